"""Multi-head attention whose plan is pluggable, with fairseq's calling convention."""

import torch
from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.modules import MultiheadAttention
from torch import nn

from fairseq_lot.attention.base import Mechanism


@with_incremental_state
class PluggableMultiheadAttention(nn.Module):
    """Projections and caches of fairseq's attention around any mechanism.

    It takes over the projections of ``stock``, so that names, initial values and the random state after building
    are those of the stock model.

    Args:
        stock: the attention that fairseq would have put here.
        mechanism: what computes the plan; sees q, k, v and masks only.
        site: ``encoder``, ``cross`` or ``decoder``.
    """

    def __init__(self, stock: MultiheadAttention, mechanism: Mechanism, *, site: str):
        super().__init__()
        if stock.bias_k is not None or stock.add_zero_attn:
            raise NotImplementedError("add_bias_kv and add_zero_attn are not supported by pluggable attention")
        self.embed_dim, self.num_heads, self.head_dim = stock.embed_dim, stock.num_heads, stock.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = stock.q_proj, stock.k_proj, stock.v_proj, stock.out_proj
        self.mechanism = mechanism
        self.site = site

    def forward(
        self,
        query,
        key,
        value,
        key_padding_mask=None,
        incremental_state=None,
        need_weights=True,
        static_kv=False,
        attn_mask=None,
        before_softmax=False,
        need_head_weights=False,
    ):
        """Attend, time first.

        Args:
            query: ``(tgt_len, bsz, embed_dim)``.
            key, value: ``(src_len, bsz, kdim)``; ignored once a static cache holds the projections.
            key_padding_mask: ``(bsz, src_len)``, true = pad.
            incremental_state: fairseq's cache; keys and values of earlier steps are kept in it.
            need_weights, need_head_weights: also return A, averaged over heads or ``(num_heads, bsz, tgt, src)``.
            static_kv: keys and values never change (cross-attention while decoding).
            attn_mask: only the decoder's future mask is known; its presence means causal.

        Returns:
            ``(tgt_len, bsz, embed_dim)`` and A or None.
        """
        if before_softmax:
            raise NotImplementedError("before_softmax has no meaning for a transport plan")
        if attn_mask is not None and self.site != "decoder":
            raise NotImplementedError(f"an attention mask is not supported at the {self.site!r} site")
        q = self._split_heads(self.q_proj(query))
        if incremental_state is None:
            k, v = self._split_heads(self.k_proj(key)), self._split_heads(self.v_proj(value))
        else:
            k, v, key_padding_mask = self._cached(key, value, key_padding_mask, incremental_state, static_kv)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.bool()
        output = self.mechanism(
            q,
            k,
            v,
            query_padding_mask=key_padding_mask if self.site == "encoder" else None,
            key_padding_mask=key_padding_mask,
            need_plan=need_weights or need_head_weights,
            causal=attn_mask is not None,
        )
        tgt_len, bsz, _ = query.shape
        values = output.values.permute(2, 0, 1, 3).reshape(tgt_len, bsz, self.embed_dim)
        plan = output.plan
        if plan is not None:
            plan = plan.transpose(0, 1) if need_head_weights else plan.mean(1)
        return self.out_proj(values), plan

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """``(len, bsz, embed_dim) -> (bsz, num_heads, len, head_dim)``, a view."""
        length, bsz, _ = x.shape
        return x.view(length, bsz, self.num_heads, self.head_dim).permute(1, 2, 0, 3)

    def _cached(self, key, value, key_padding_mask, incremental_state, static_kv):
        """Keys, values and padding mask of all steps so far; also stores them."""
        saved = self._get_input_buffer(incremental_state)
        if static_kv and "prev_key" in saved:
            return saved["prev_key"], saved["prev_value"], saved["prev_key_padding_mask"]
        k, v = self._split_heads(self.k_proj(key)), self._split_heads(self.v_proj(value))
        if "prev_key" in saved:
            k = torch.cat([saved["prev_key"], k], dim=2)
            v = torch.cat([saved["prev_value"], v], dim=2)
            key_padding_mask = MultiheadAttention._append_prev_key_padding_mask(
                key_padding_mask=key_padding_mask,
                prev_key_padding_mask=saved["prev_key_padding_mask"],
                batch_size=k.size(0),
                src_len=k.size(2),
                static_kv=False,
            )
        saved = {"prev_key": k, "prev_value": v, "prev_key_padding_mask": key_padding_mask}
        self._set_input_buffer(incremental_state, saved)
        return k, v, key_padding_mask

    def reorder_incremental_state(self, incremental_state, new_order):
        """Follow the beam: reorder the cache along the batch axis."""
        saved = self._get_input_buffer(incremental_state)
        if saved:
            reordered = {name: None if x is None else x.index_select(0, new_order) for name, x in saved.items()}
            self._set_input_buffer(incremental_state, reordered)
        return incremental_state

    def _get_input_buffer(self, incremental_state):
        return self.get_incremental_state(incremental_state, "attn_state") or {}

    def _set_input_buffer(self, incremental_state, buffer):
        return self.set_incremental_state(incremental_state, "attn_state", buffer)
