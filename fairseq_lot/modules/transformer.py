"""fairseq's Transformer encoder and decoder with a mechanism at each attention site."""

import contextlib
from typing import Any

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import MultiheadAttention
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fairseq_lot.attention.base import refuse_scripting
from fairseq_lot.modules.multihead_attention import PluggableMultiheadAttention
from fairseq_lot.modules.sites import build_site_mechanism
from fairseq_lot.transport.exporting import is_exporting


def wrap_attention(stock: MultiheadAttention, cfg: TransformerConfig, *, site: str, layer: int) -> nn.Module:
    """The attention for one place: ``stock``'s projections with the place's mechanism, or ``stock`` itself.

    Args:
        stock: fairseq's attention.
        cfg: the model's arguments.
        site, layer: the place.
    """
    mechanism = build_site_mechanism(
        cfg,
        site=site,
        layer=layer,
        num_heads=stock.num_heads,
        head_dim=stock.head_dim,
        dropout=cfg.attention_dropout,
    )
    return stock if mechanism is None else PluggableMultiheadAttention(stock, mechanism, site=site)


class EncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer; ``self_attn`` is pluggable."""

    def __init__(self, cfg: TransformerConfig, *, layer: int, return_fc: bool = False):
        self.layer = layer  # before the constructor calls build_self_attention
        super().__init__(cfg, return_fc=return_fc)

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        return wrap_attention(super().build_self_attention(embed_dim, cfg), cfg, site="encoder", layer=self.layer)


class DecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer; ``self_attn`` and ``encoder_attn`` are pluggable."""

    __prepare_scriptable__ = refuse_scripting

    def __init__(self, cfg: TransformerConfig, *, layer: int, no_encoder_attn: bool = False):
        self.layer = layer
        super().__init__(cfg, no_encoder_attn=no_encoder_attn)

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig, **extra: bool) -> nn.Module:
        return wrap_attention(
            super().build_self_attention(embed_dim, cfg, **extra), cfg, site="decoder", layer=self.layer
        )

    def build_encoder_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        return wrap_attention(super().build_encoder_attention(embed_dim, cfg), cfg, site="cross", layer=self.layer)

    def forward(self, *args: Any, need_attn: bool = False, need_head_weights: bool = False, **kwargs: Any) -> tuple:
        """fairseq's forward pass, without weights that nobody reads: fairseq always requests the last layer's."""
        wanted = self.training or self.need_attn
        weights = {"need_attn": need_attn and wanted, "need_head_weights": need_head_weights and wanted}
        return super().forward(*args, **weights, **kwargs)


def _wrap(layer, cfg):
    """Wrap a layer for activation checkpointing and FSDP, as fairseq does."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


class _WithoutLooking(TorchFunctionMode):
    """A context for torch.export, which cannot branch on the values of tokens.

    fairseq tests whether there are pads. Here the answer is always yes, which is safe: a mask without pads changes
    nothing. Shapes are numbers here, not tensors.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.any and len(args) == 1 and not kwargs:
            return True
        if function is torch._shape_as_tensor:  # for the positions; as numbers
            return args[0].shape
        return function(*args, **(kwargs or {}))


def _recordable():
    """The context for fairseq's forward passes: :class:`_WithoutLooking` during torch.export."""
    return _WithoutLooking() if is_exporting() else contextlib.nullcontext()


class Encoder(TransformerEncoderBase):
    """A stack of :class:`EncoderLayer`."""

    __prepare_scriptable__ = refuse_scripting

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        # fairseq calls this once per layer, in order, without the layer's number
        self._layers_built = getattr(self, "_layers_built", 0) + 1
        return _wrap(EncoderLayer(cfg, layer=self._layers_built - 1, return_fc=self.return_fc), cfg)

    def forward_scriptable(self, src_tokens: Tensor, *args: Any, **kwargs: Any) -> dict:
        """fairseq's forward pass; it returns a padding mask only if there are pads."""
        # before the layers, where fairseq itself waits for the GPU; later the host would wait for all layers
        with _recordable():
            has_pads = bool(src_tokens.eq(self.padding_idx).any())
            out = super().forward_scriptable(src_tokens, *args, **kwargs)
        return out if has_pads else {**out, "encoder_padding_mask": []}


class Decoder(TransformerDecoderBase):
    """A stack of :class:`DecoderLayer`."""

    __prepare_scriptable__ = refuse_scripting

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        self._layers_built = getattr(self, "_layers_built", 0) + 1
        return _wrap(DecoderLayer(cfg, layer=self._layers_built - 1, no_encoder_attn=no_encoder_attn), cfg)

    def extract_features_scriptable(self, *args: Any, **kwargs: Any) -> tuple:
        """fairseq's method, in a context that torch.export can record."""
        with _recordable():
            return super().extract_features_scriptable(*args, **kwargs)
