"""Multi-head attention with any mechanism, called like fairseq's own."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from fairseq.incremental_decoding_utils import FairseqIncrementalState
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_lot.attention.base import Masks, Mechanism
from fairseq_lot.transport.marginals import Pads


def _exactly(method: Callable, first: Tensor, *others: Any) -> Any:
    """Call a method of a mechanism with autocast off, as in its ``forward``; ``first`` gives the type of device."""
    with torch.autocast(first.device.type, enabled=False):
        return method(first, *others)


def split_heads(x: Tensor, attention: Any) -> Tensor:
    """``(len, bsz, embed_dim) -> (bsz, num_heads, len, head_dim)``, a view."""
    return x.unflatten(-1, (attention.num_heads, attention.head_dim)).permute(1, 2, 0, 3)


class _WithoutPads(torch.autograd.Function):
    """Write zeros at pads. The gradient passes unchanged: it is already zero there, because mechanisms ignore pads."""

    @staticmethod
    def forward(ctx, x, pads):
        return x.masked_fill(pads, 0.0)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class PluggableMultiheadAttention(FairseqIncrementalState, nn.Module):
    """fairseq's projections and caches with any mechanism.

    It reuses the projections of ``stock``, so names, initial values and the random state after building are the same as
    in the stock model. q and k may never be materialised; hooks on the mechanism then do not fire
    (``inspection.capture`` computes q and k itself).

    Args:
        stock: fairseq's own attention for this place.
        mechanism: gets q, k, v and masks.
        site: ``encoder``, ``cross`` or ``decoder``.
    """

    # from fairseq's base class, which mypy does not read
    get_incremental_state: Callable
    set_incremental_state: Callable

    def __init__(self, stock: MultiheadAttention, mechanism: Mechanism, *, site: str):
        super().__init__()
        if stock.bias_k is not None or stock.add_zero_attn:
            raise NotImplementedError("add_bias_kv and add_zero_attn are not supported by pluggable attention")
        self.embed_dim, self.num_heads, self.head_dim = stock.embed_dim, stock.num_heads, stock.head_dim
        # in fairseq's order: saved optimiser states depend on it
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = stock.k_proj, stock.v_proj, stock.q_proj, stock.out_proj
        self.mechanism = mechanism
        self.site = site
        if not mechanism.state_dict() and not mechanism.traits.is_stock:
            # fairseq without this package would load the checkpoint as softmax
            mechanism.register_buffer("is_plugged_in", torch.ones(1))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Pads = None,
        incremental_state: dict | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend. Inputs and output have the token axis first, as in fairseq.

        Args:
            query: ``(tgt_len, bsz, embed_dim)``.
            key, value: ``(src_len, bsz, kdim)``; not read if ``static_kv`` is set and the cache has them.
            key_padding_mask: ``(bsz, src_len)``, True = pad.
            incremental_state: fairseq's cache; the mechanism's cache is stored there.
            need_weights: also return A, averaged over heads: ``(bsz, tgt_len, src_len)``.
            need_head_weights: also return A of each head: ``(num_heads, bsz, tgt_len, src_len)``.
            static_kv: keys and values never change (cross-attention in decoding).
            attn_mask: only the decoder's future mask is supported; if given, the attention is causal.
            before_softmax: not supported.

        Returns:
            The output, ``(tgt_len, bsz, embed_dim)``; A or None.

        Raises:
            NotImplementedError: an unsupported argument.
        """
        if before_softmax:
            raise NotImplementedError("before_softmax has no meaning for a transport plan")
        if attn_mask is not None and self.site != "decoder":
            raise NotImplementedError(f"an attention mask is not supported at the {self.site!r} site")
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.bool()
        need_weights = need_weights or need_head_weights
        if incremental_state is None:
            pads = key_padding_mask if self.site == "encoder" else None
            masks = Masks(pads, key_padding_mask, attn_mask is not None)
            query, key, value = self._zero_pads(query, key, value, key_padding_mask)
            output = self._attend(query, key, split_heads(self.v_proj(value), self), masks, need_weights)
        else:
            attend = self._attend_static if static_kv else self._attend_next
            q = split_heads(self.q_proj(query), self)
            output = attend(q, key, value, key_padding_mask, incremental_state, need_weights)
        values, weights = output.values.permute(2, 0, 1, 3).flatten(2), output.weights
        if weights is not None:
            weights = weights.transpose(0, 1) if need_head_weights else weights.mean(1)
        return self.out_proj(values), weights

    def _zero_pads(self, query, key, value, key_padding_mask):
        """The inputs of the projections, with zeros at pads if gradients are on.

        The mechanism ignores pads, but a NaN there would reach the gradient of the projections: 0·NaN is NaN.
        """
        if key_padding_mask is None or not torch.is_grad_enabled():
            return query, key, value
        pads = key_padding_mask.T.unsqueeze(-1)
        real_key = _WithoutPads.apply(key, pads)
        real_value = real_key if value is key else _WithoutPads.apply(value, pads)
        if self.site == "encoder":
            query = real_key if query is key else _WithoutPads.apply(query, pads)
        return query, real_key, real_value

    def _attend(self, query, key, v, masks, need_weights):
        """Attend to all keys: by products with the mechanism's probes if that is faster, else by q and k."""
        probes = self._probes(query, key)
        if probes is not None:
            products = self._products(self.q_proj, query, probes), self._products(self.k_proj, key, probes)
            return self.mechanism.forward_scored(*products, v, masks, need_weights)
        query_pads, key_pads, causal = masks
        q, k = split_heads(self.q_proj(query), self), split_heads(self.k_proj(key), self)
        return self.mechanism(q, k, v, query_pads, key_pads, need_weights, causal=causal)

    def _probes(self, query, key):
        """The mechanism's probes, if products with them are faster than q and k; else None.

        None also if a projection is not a plain linear layer or has hooks: only a call gives its true output then.
        Hooks on the mechanism do not count.

        Args:
            query, key: ``(len, bsz, dim)``, the inputs of the projections.
        """
        if torch.is_autocast_enabled("cpu") or any(
            type(x) is not nn.Linear or x._forward_hooks or x._forward_pre_hooks for x in (self.q_proj, self.k_proj)
        ):
            return None
        probes = self.mechanism.probes(query)
        if probes is None:
            return None
        r, tokens = probes.size(1), query.size(1) * min(query.size(0), key.size(0))
        # only if the saving exceeds the cost of Wᵀ z
        return probes if tokens * (self.head_dim - r) >= self.head_dim * r else None

    def _products(self, projection, x, probes):
        """``(W x + b)·z = x·(Wᵀ z) + b·z``, a narrower projection: ``(len, bsz, dim) -> (bsz, num_heads, len, r)``."""
        weight = (probes @ projection.weight.view(self.num_heads, self.head_dim, -1)).flatten(0, 1)
        bias = None
        if projection.bias is not None:
            bias = (probes @ projection.bias.view(self.num_heads, self.head_dim, 1)).flatten()
        products = nn.functional.linear(x, weight, bias)
        return products.unflatten(-1, probes.shape[:2]).permute(1, 2, 0, 3).contiguous()

    def _keys_and_values(self, key, value):
        return split_heads(self.k_proj(key), self), split_heads(self.v_proj(value), self)

    def _attend_static(self, q, key, value, key_padding_mask, incremental_state, need_weights):
        """Attend to keys that never change. The first step summarises them; for LOT's weights it must request them."""
        summary = self._read_cache(incremental_state)
        if not summary:
            sides = self._keys_and_values(key, value)
            summary = _exactly(self.mechanism.summarise, *sides, key_padding_mask, need_weights)
            self._write_cache(incremental_state, summary)
        return _exactly(self.mechanism.attend_summary, q, summary, need_weights)

    def _attend_next(self, q, key, value, key_padding_mask, incremental_state, need_weights):
        """Causal attention to the new keys and the cached earlier ones."""
        state = self._read_cache(incremental_state)
        k, v = self._keys_and_values(key, value)
        output, state = _exactly(self.mechanism.causal_step, q, k, v, key_padding_mask, state, need_weights)
        self._write_cache(incremental_state, state)
        return output

    def make_generation_fast_(
        self,
        name: str = "",
        retain_dropout: bool = False,
        retain_dropout_modules: Collection[str] | None = None,
        **others: Any,
    ) -> None:
        """Apply ``--retain-dropout``; ``--retain-dropout-modules MultiheadAttention`` includes this class."""
        wanted = retain_dropout_modules is None or MultiheadAttention.__name__ in retain_dropout_modules
        if retain_dropout and wanted:
            for module in self.mechanism.modules():
                if isinstance(module, Mechanism):
                    module.retain_dropout = True

    def _read_cache(self, incremental_state):
        return self.get_incremental_state(incremental_state, "attn_state") or {}

    def _write_cache(self, incremental_state, state):
        self.set_incremental_state(incremental_state, "attn_state", state)

    def reorder_incremental_state(self, incremental_state: dict, new_order: Tensor) -> dict:
        """Reorder the cache along the batch axis, for beam search.

        At the cross site the cache is the same for all hypotheses of a sentence. So, as in fairseq's own attention, it
        is reordered only if the batch loses sentences.
        """
        state = self._read_cache(incremental_state)
        if state and not (self.site == "cross" and next(iter(state.values())).size(0) == new_order.size(0)):
            self._write_cache(incremental_state, {name: x.index_select(0, new_order) for name, x in state.items()})
        return incremental_state

    # old checkpoints have the projections of q, k and v as one tensor
    upgrade_state_dict_named = MultiheadAttention.upgrade_state_dict_named

    def _get_input_buffer(self, incremental_state):
        """A dictionary that has ``prev_key`` if there is a cache: fairseq's layer tests for this name."""
        kept = self._read_cache(incremental_state)
        return {"prev_key": next(iter(kept.values()))} if kept else {}
