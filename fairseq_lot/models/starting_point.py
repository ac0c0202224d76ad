"""What a training takes over from the checkpoint that it starts from: attention, options and sites, and the sizes.

fairseq builds the model from the command line and then reads the weights into it. An attention that is not in the
weights, such as a temperature, would silently be another one.
"""

import copy
import logging
import os
import re
import zipfile
from argparse import Namespace
from collections.abc import Callable

import torch
from fairseq.data.data_utils import infer_language_pair
from fairseq.models import ARCH_MODEL_REGISTRY, FairseqLanguageModel
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.models.transformer.transformer_legacy import base_architecture
from fairseq.utils import split_paths
from torch import Tensor

from fairseq_lot.attention.options import SITES
from fairseq_lot.attention.registry import DEFAULT, describe
from fairseq_lot.errors import InputError, first_line, flag
from fairseq_lot.models.architecture import refuse_renamed
from fairseq_lot.modules import flat_options
from fairseq_lot.modules.places import listed
from fairseq_lot.modules.sites import (
    ATTENTION_AT,
    attention_sites,
    build_site_mechanism,
    kept_places,
    sites_in_words,
    softmax_trained_at,
)

logger = logging.getLogger(__name__)

# arguments of a model that change what it computes and none of its weights; the last two together take away a norm
_UNSEEN = (
    "encoder_attention_heads",
    "decoder_attention_heads",
    "activation_fn",
    "no_scale_embedding",
    "no_token_positional_embeddings",
    "cross_self_attention",
    "decoder_normalize_before",
    "no_decoder_final_norm",
)
# arguments of a model that neither its weights nor its function depend on; layers that are not kept are gone afterwards
_TRAINING_ONLY = re.compile("drop|quant_noise_scalar|_activations|min_params|mha_|ffn_blocks|embed_path|layers_to_keep")
# what architectures say nothing about, and the defaults of it that fairseq-train assumes
_UNSAID = (
    "max_source_positions",
    "max_target_positions",
    "no_decoder_final_norm",
    "adaptive_softmax_factor",
    "tie_adaptive_proj",
    "base_layers",
    "base_sublayers",
    "base_shuffle",
)
_ASSUMED = {name: value for name, value in vars(TransformerConfig()).items() if name in _UNSAID}


def take_over(args: Namespace, defaults: dict, size: Callable[[Namespace], None]) -> bool:
    """Complete a training's command line by the checkpoint from which it starts.

    Args:
        args: the command line: what was typed alone.
        defaults: what the architecture adds to the attention where nothing was typed.
        size: adds the architecture's sizes, where neither the command line nor the checkpoint of a fine-tuning has any.

    Returns:
        Whether there is a checkpoint that names its attention.

    Raises:
        InputError: the architecture means another attention than the checkpoint has; or the optimiser's state is to
            go on with parameters that it does not know.
    """
    path = starting_point(args) if is_command_line(args) else None
    if path is None:
        size(args)
        return False
    saved, task, has_optimiser = _read(path)
    refuse_renamed(saved, path)
    _keep_model(args, saved, path, size)
    _keep_direction(args, task, path)
    typed = flat_options.typed_options(args)
    goes_on = has_optimiser and not args.reset_optimizer and path != args.finetune_from_model
    if getattr(saved, "attention", None) is None:
        planned = _completed(args, defaults)
        if goes_on and any(learnt for *_, learnt in _parameters(planned, planned).values()):
            raise InputError(
                f"{path} has fairseq's own attention; {_words(planned)} learns parameters, which the optimiser's saved "
                "state does not fit: use --finetune-from-model or --reset-optimizer"
            )
        if planned.attention != DEFAULT or planned.differential:
            logger.warning(f"{path} has fairseq's own attention; trained is {_words(planned)}, its parameters as drawn")
        return False
    saved = _completed(saved, {})
    _refuse_other_defaults(args, defaults, typed, saved, path)
    same = "attention" not in typed or args.attention == saved.attention
    own = _options_read(saved) if same else []
    brought = [*flat_options.DEFAULTS, *own] if same else ["differential", "differential_lambda_init"]
    for name in brought:
        if name not in typed and getattr(saved, name, None) is not None:
            setattr(args, name, getattr(saved, name))
    try:
        softmax = softmax_trained_at(saved, kept_places(_completed(args, {})))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    for name, value in softmax.items():
        if name not in typed:
            setattr(args, name, value)
    planned = _completed(args, {})
    line = f"{path} has {_words(saved)}"
    changes = [
        f"{flag(name)} {getattr(saved, name, None)} becomes {getattr(planned, name, None)}"
        for name in _changed([*flat_options.DEFAULTS, *own], saved, planned)
    ]
    before, after = _parameters(saved, saved), _parameters(planned, saved)
    if goes_on and before != after:
        raise InputError(
            f"{line}; the command line changes its parameters ({', '.join(changes)}), which the optimiser's saved "
            "state does not fit: use --finetune-from-model or --reset-optimizer"
        )
    redrawn = _redrawn(before, after)
    if redrawn:
        args.redrawn_attention = redrawn
    if redrawn or after.keys() - before:
        changes.append("parameters that are new or of another shape are drawn")
    begins = path == args.finetune_from_model or args.reset_dataloader
    if begins and getattr(args, "esp_anneal", None) not in (None, 1):
        logger.warning(
            f"{path} sorts as cold as its training left it; here annealing begins again, in the first epoch "
            f"at {flag('esp_sort_temperature')} {args.esp_sort_temperature}"
        )
    if changes:
        logger.warning(f"{line}; by the command line {', '.join(changes)}")
    else:
        logger.info(f"{line}, which is kept")
    return True


def _keep_model(args: Namespace, saved: Namespace, path: str, size: Callable[[Namespace], None]) -> None:
    """Give a fine-tuning the checkpoint's sizes where none were typed; let any model compute and share as it does."""
    arch = Namespace(**(_ASSUMED | vars(args)))
    size(arch)
    if args.finetune_from_model:
        names = Namespace(**_ASSUMED)
        base_architecture(names)
        for name in vars(names):
            value, typed = getattr(saved, name, None), getattr(args, name, None) is not None
            if not (typed or value is None or _TRAINING_ONLY.search(name)):
                setattr(args, name, value)
    size(args)
    kept = [name for name, value in vars(arch).items() if getattr(args, name, value) != value]
    if kept:
        logger.info(f"{path} has {', '.join(f'{flag(name)} {getattr(args, name)}' for name in kept)}, which is kept")
    shared = {"share_all_embeddings": (), "share_decoder_input_output_embed": ("share_all_embeddings",)}
    for name, implied_by in shared.items():
        here, there = (any(getattr(one, x, False) for x in (name, *implied_by)) for one in (args, saved))
        setattr(args, name, there)
        if here != there:
            logger.warning(f"{path} was trained {'with' if there else 'without'} {flag(name)}, which is kept")
    for name in _UNSEEN:
        value = getattr(saved, name, None)
        if value is not None and getattr(args, name, None) != value:
            setattr(args, name, value)
            logger.warning(f"{path} was trained with {flag(name)} {value}, which is kept")


def _keep_direction(args: Namespace, task: dict, path: str) -> None:
    """Train in the checkpoint's direction where no languages were typed and the data's names tell the opposite one."""
    pair = task.get("source_lang"), task.get("target_lang")
    folder = split_paths(args.data)[0] if isinstance(getattr(args, "data", None), str) else ""
    typed = getattr(args, "source_lang", None) or getattr(args, "target_lang", None)
    if not typed and None not in pair and os.path.isdir(folder) and tuple(infer_language_pair(folder)) == pair[::-1]:
        args.source_lang, args.target_lang = pair
        logger.warning(f"{path} translates {pair[0]} to {pair[1]}, which is kept")


def is_command_line(args: Namespace) -> bool:
    """Not the arguments of a checkpoint: fairseq calls architectures again for each model that it builds or loads."""
    return not hasattr(args, "_name") and hasattr(args, "restore_file")


def check_configured(model: Namespace, path: str) -> None:
    """Refuse to start from a checkpoint with another attention than a model has that fairseq-hydra-train configures.

    Its model is built before anything says which checkpoint is to be read, so it cannot be completed.
    """
    saved, _, _ = _read(path)
    refuse_renamed(saved, path)
    if getattr(saved, "attention", None) is None:
        return
    saved, planned = _completed(saved, {}), _completed(model, {})
    names = [*flat_options.DEFAULTS, *_options_read(saved)]
    if _changed(names, saved, planned):
        values = {name: getattr(saved, name, None) for name in names}
        wanted = " ".join(f"+model.{name}={value}" for name, value in values.items() if value is not None)
        raise InputError(f"{path} has {_words(saved)}, the configuration means {_words(planned)}; give it {wanted}")


def check_overridden(path: str, overrides: dict) -> None:
    """Refuse arguments under which the parameters of a checkpoint's attention would be those of another, or not fit."""
    saved, _, _ = _read(path)
    arch = getattr(saved, "arch", None) or getattr(saved, "_name", None)
    model = ARCH_MODEL_REGISTRY.get(arch, TransformerModel)  # an architecture that nobody registered fails elsewhere
    if issubclass(model, FairseqLanguageModel):
        return  # that of --lm-path, which gets the same overrides and reads none of ours
    ours = [name for name in overrides if name in flat_options.option_names()]
    planned = _completed(Namespace(**(vars(saved) | overrides)), {})
    is_stock = getattr(saved, "attention", None) is None
    if is_stock and model is not TransformerModel:
        raise InputError(f"{path} is a {arch}, whose attention cannot be overridden; that of a transformer can")
    if is_stock and "attention" not in overrides:
        raise InputError(f"{path} has fairseq's own attention, which does not read {ours[0]}; override attention too")
    kept = kept_places(planned)
    flat_options.check_used(ours, planned.attention, differential=planned.differential, keeps_softmax=bool(kept))
    try:
        softmax = softmax_trained_at(saved, kept)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if kept and getattr(planned, "softmax_prior", None) != softmax.get("softmax_prior"):
        trained = softmax.get("softmax_prior")
        raise InputError(f"{path} was trained with prior {trained} at {listed(kept)}; override softmax_prior with that")
    if is_stock:
        return
    saved = _completed(saved, {})
    given_up = set(kept_places(saved)).difference(kept)
    if given_up and planned.attention != DEFAULT:
        raise InputError(f"{path} has {_words(saved)}, and no parameters for {planned.attention} there; use swap")
    if saved.differential != planned.differential:
        raise InputError(f"{path} has {_words(saved)}, which is not trained as {_words(planned)}; fine-tune it so")
    if _redrawn(_parameters(saved, saved), _parameters(planned, saved)):
        raise InputError(f"{path} has {_words(saved)}, whose parameters are not those of {_words(planned)}; use swap")


def starting_point(args: Namespace) -> str | None:
    """The local checkpoint from which a training with these options starts, by fairseq's rules; None: there is none."""
    suffix = args.checkpoint_suffix
    path = args.restore_file.replace(".pt", f"{suffix}.pt")
    if args.restore_file == "checkpoint_last.pt":
        path = os.path.join(args.save_dir, path)
        if not os.path.exists(path):
            path = args.continue_once or args.finetune_from_model
    return path if path and os.path.isfile(path) else None


def saved_model(path: str) -> Namespace:
    """The arguments of the model in a checkpoint, whose weights are not read where its format allows it."""
    return _read(path)[0]


def shapes_weights(name: str) -> bool:
    """Whether a model with another value of this argument may have weights of other shapes."""
    names = Namespace(**_ASSUMED)
    base_architecture(names)
    return hasattr(names, name) and not _TRAINING_ONLY.search(name) and name not in _UNSEEN


def model_of(path: str) -> tuple[Namespace, dict[str, Tensor]]:
    """The arguments of a checkpoint's model, and its weights."""
    saved, _, state = _read_all(path)
    return saved, state["model"]


def _read(path):
    """The arguments of a checkpoint's model and of its task, and whether it has the state of an optimiser."""
    saved, task, state = _read_all(path)
    return saved, task, state.get("last_optimizer_state") is not None


def _read_all(path):
    """The arguments of a checkpoint's model and of its task, and all that is in it."""
    try:
        # a file of today's format is mapped: its tensors are not read
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        cfg = state["cfg"] if state.get("cfg") is not None else dict.fromkeys(("model", "task"), state["args"])
        saved, task = ({} if one is None else one for one in (cfg["model"], cfg.get("task")))
        saved, task = (dict(one if isinstance(one, dict) else vars(one)) for one in (saved, task))
    except Exception as error:  # torch raises whatever the damage leads to
        raise InputError(f"{path} cannot be read as a checkpoint: {first_line(error)}") from error
    return Namespace(**saved), task, state


def _refuse_other_defaults(args, defaults, typed, saved, path):
    """Refuse an architecture that means another attention than the checkpoint has, unless that was typed."""
    size = args.arch.partition("_transformer")[2]
    meant, change = defaults.get("attention", saved.attention), ""
    if "attention" not in typed and meant != saved.attention:
        change = f"--attention {meant}"
    elif "differential" not in typed and defaults.get("differential") and not saved.differential:
        meant, change = "a differential one", "--differential"
    if change:
        raise InputError(
            f"{path} has {_words(saved)}, --arch {args.arch} means {meant}; use --arch {saved.attention}_transformer"
            f"{size} to keep it, or {change} to change it"
        )


def _completed(args, defaults):
    """A copy of the arguments whose attention has every option, its sites in one order and spacing."""
    args = copy.copy(args)
    flat_options.fill(args, defaults)
    flat_options.spell_out(args)
    args.attention_sites = ",".join(attention_sites(args))
    return args


def _words(args):
    """``lot (num_pivots=6) attention at encoder``."""
    form = "differential " if args.differential else ""
    named = describe(args.attention, flat_options.mechanism_options(args, args.attention))
    return f"{form}{named} attention at {sites_in_words(args)}"


def _options_read(args):
    """The options of the mechanisms that stand in a model."""
    named = [args.attention, *([DEFAULT] if kept_places(args) else [])]
    return [name for mechanism in named for name in flat_options.options_of(mechanism)]


def _changed(names, saved, planned):
    """Those of the options that differ."""
    return [name for name in names if getattr(saved, name, None) != getattr(planned, name, None)]


def _redrawn(before, after):
    """The parameters that both have and that are not the same ones, without the numbers of their layers."""
    return {without_layer(name) for name in before.keys() & after if before[name][:2] != after[name][:2]}


def without_layer(name: str) -> str:
    """The name of a parameter without the number of its layer."""
    return re.sub(r"\.\d+\.", ".", name, count=1)


def _parameters(args, layers):
    """Shape of what the attention adds, whose it is, and whether it is learnt, by the names in checkpoints.

    Args:
        layers: arguments that say how many layers there are.
    """
    found = {}
    for site in SITES:
        side = "encoder" if site == "encoder" else "decoder"
        heads = getattr(args, f"{side}_attention_heads")
        sizes = {"num_heads": heads, "head_dim": getattr(args, f"{side}_embed_dim") // heads}
        stack, attention = ATTENTION_AT[site]
        for layer in range(getattr(layers, f"{side}_layers")):
            mechanism = build_site_mechanism(args, site=site, layer=layer, dropout=0.0, **sizes)
            learnt = dict(mechanism.named_parameters()) if mechanism else ()
            for name, value in mechanism.state_dict().items() if mechanism else ():
                owner = "differential" if args.differential and not name.startswith("inner.") else args.attention
                found[f"{stack}.layers.{layer}.{attention}.mechanism.{name}"] = (value.shape, owner, name in learnt)
    return found
