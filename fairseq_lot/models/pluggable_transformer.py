"""The Transformer with pluggable attention and its architectures, registered with fairseq."""

import copy
from argparse import ArgumentParser, Namespace
from collections.abc import Collection
from typing import Any

from fairseq.checkpoint_utils import prune_state_dict
from fairseq.data import Dictionary
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.models.transformer.transformer_legacy import base_architecture, transformer_iwslt_de_en
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_lot.attention.base import Mechanism
from fairseq_lot.attention.registry import DEFAULT, MECHANISMS
from fairseq_lot.errors import InputError
from fairseq_lot.models.architecture import refuse_renamed
from fairseq_lot.models.dictionaries import note_dictionaries
from fairseq_lot.models.fairseq_hooks import announce_epochs, install
from fairseq_lot.models.model_attention import without_layer
from fairseq_lot.models.starting_point import Defaults, inherit_from_checkpoint, mark_parsed, starting_point, take_mark
from fairseq_lot.modules.flat_options import (
    add_attention_args,
    check_used,
    resolve_options,
    set_defaults,
    typed_options,
)
from fairseq_lot.modules.sites import attention_sites, attentions, kept_places, settle_kept_places
from fairseq_lot.modules.transformer import Decoder, Encoder


@register_model("lot_transformer")
class PluggableTransformerModel(TransformerModel):
    """fairseq's Transformer with ``--attention`` at ``--attention-sites``.

    Parameters have the names of fairseq's ``transformer``; a mechanism's own are under ``...self_attn.mechanism`` (or
    ``encoder_attn.mechanism``). So stock checkpoints load, and new parameters keep their initial values.
    """

    #: names, without the layer's number, of parameters whose values in the checkpoint belong to another attention
    redrawn_attention: Collection[str] = ()
    __jit_ignored_attributes__ = ("redrawn_attention",)

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Add fairseq's Transformer options and the flat options of the mechanisms."""
        super().add_args(parser)
        add_attention_args(parser)
        mark_parsed(parser)

    @classmethod
    def build_model(cls, args: Namespace, task: Any) -> "PluggableTransformerModel":
        """Build a model; InputError (exit code 2 in a command) if an option is wrong."""
        refuse_renamed(args)
        base_architecture(args)
        resolve_options(args)
        _resolve_layers_to_keep(args)
        settle_kept_places(args)
        for side in ("encoder", "decoder"):
            width, heads = getattr(args, f"{side}_embed_dim"), getattr(args, f"{side}_attention_heads")
            if heads < 1 or width % heads:
                raise InputError(
                    f"{heads} attention heads do not divide the {side}'s width {width}; "
                    f"change --{side}-attention-heads or --{side}-embed-dim"
                )
            kept = getattr(args, f"{side}_layers_to_keep", None)
            if kept and args.differential and args.differential_lambda_init is None:
                places = sorted(map(int, kept.split(",")))
                if places != list(range(len(places))):
                    raise InputError(
                        f"--{side}-layers-to-keep {kept} would renumber differential layers, whose λ_init depends on "
                        "their number; keep the first ones, or train with --differential-lambda-init"
                    )
        announce_epochs(task)
        note_dictionaries(args, task)
        redrawn = vars(args).pop("redrawn_attention", ())  # must not be saved in the model's checkpoints
        # fairseq drops unknown options from a config of fairseq-hydra-train, but not from a namespace
        model = super().build_model(Namespace(**args) if OmegaConf.is_config(args) else args, task)
        model.redrawn_attention = redrawn
        sites = attention_sites(args)
        if not any(site in sites for site, _, _ in attentions(model)):
            raise InputError(f"the model has no attention at {','.join(sites)}; give other sites")
        left_pads = getattr(getattr(task, "cfg", None), "left_pad_source", True)
        if getattr(args, "cross_self_attention", False) and not left_pads:
            for layer in model.decoder.layers:
                mechanism = getattr(layer.self_attn, "mechanism", None)
                if mechanism is not None and mechanism.traits.counts_slots:
                    raise InputError(
                        f"{args.attention} attention at decoder counts the slots between tokens, but with "
                        "--cross-self-attention there would be pads between source and target; leave out "
                        "--left-pad-source, which switches left pads off"
                    )
        return model

    def set_epoch(self, epoch: int) -> None:
        """Tell all mechanisms that an epoch of the training begins, counted from 1."""
        for module in self.modules():
            if isinstance(module, Mechanism):
                module.set_epoch(epoch)

    @classmethod
    def build_encoder(cls, args: Namespace, src_dict: Dictionary, embed_tokens: nn.Embedding) -> Encoder:
        return Encoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args: Namespace, tgt_dict: Dictionary, embed_tokens: nn.Embedding) -> Decoder:
        cfg = TransformerConfig.from_namespace(args)
        return Decoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def load_state_dict(
        self, state_dict: dict[str, Tensor], strict: bool = True, model_cfg: Any = None, args: Namespace | None = None
    ) -> Any:
        """fairseq's method, after layers that are not kept (``--encoder-layers-to-keep``) were removed."""
        return super().load_state_dict(prune_state_dict(state_dict, model_cfg), strict, model_cfg, args)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Add mechanisms' parameters that a checkpoint lacks, and drop those that this model does not have.

        If a training's command line changes the attention, parameters that do not fit count as lacking.
        """
        super().upgrade_state_dict_named(state_dict, name)
        own = {key: value for key, value in self.state_dict().items() if ".mechanism." in key}
        for key in [key for key in state_dict if ".mechanism." in key]:
            if key not in own or without_layer(key) in self.redrawn_attention:
                del state_dict[key]
        for key, value in own.items():
            state_dict.setdefault(key, value)


def _resolve_layers_to_keep(args):
    """Write the layers to keep of both sides as texts, the form that fairseq reads.

    fairseq's parser makes lists, and fairseq would drop all layers of a side that is not given.
    """
    kept = {f"{side}_layers": getattr(args, f"{side}_layers_to_keep", None) for side in ("encoder", "decoder")}
    if any(kept.values()):
        for name, places in kept.items():
            places = places or range(getattr(args, name))
            setattr(args, f"{name}_to_keep", places if isinstance(places, str) else ",".join(map(str, places)))


def _small(args):
    """3+3 layers of width 128: trains on two CPU cores."""
    _sized(args, embed_dim=128, ffn_embed_dim=256, layers=3, attention_heads=4)


def _medium(args):
    """6+6 layers of width 256: trains overnight on one CPU core."""
    _sized(args, embed_dim=256, ffn_embed_dim=512, layers=6, attention_heads=4)


def _sized(args, **sizes):
    set_defaults(args, {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()})
    base_architecture(args)


# They differ only in defaults: each accepts any --attention.
_FAMILIES = {f"{name}_transformer": {"attention": name} for name in MECHANISMS} | {
    "diff_transformer": {"differential": True},
    "pluggable_transformer": {},  # keeps the attention of the checkpoint that a training starts from
}
SIZES = {"": base_architecture, "_iwslt_de_en": transformer_iwslt_de_en, "_medium": _medium, "_small": _small}


def _register(arch, attention_defaults, size):
    def architecture(args):
        is_command_line = take_mark(args)
        typed = typed_options(args) if is_command_line else ()
        path = starting_point(args) if is_command_line else None
        inherit_from_checkpoint(args, path, Defaults(attention_defaults, size))
        set_defaults(args, attention_defaults)
        if typed:
            attention = getattr(args, "attention", None) or DEFAULT
            differential, keeps_softmax = bool(getattr(args, "differential", False)), bool(kept_places(args))
            check_used(typed, attention, differential=differential, keeps_softmax=keeps_softmax)
            if keeps_softmax:  # refuse wrong places before fairseq creates the folder of the training
                planned = copy.copy(args)
                resolve_options(planned)
                _resolve_layers_to_keep(planned)
                settle_kept_places(planned)

    register_model_architecture("lot_transformer", arch)(architecture)


for _family, _defaults in _FAMILIES.items():
    for _suffix, _size in SIZES.items():
        _register(_family + _suffix, _defaults, _size)

install()
