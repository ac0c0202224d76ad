"""Softmax attention, optionally with a prior: the entropic plan with one marginal fixed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fairseq_lot.attention.base import AttentionOutput, Masks, Mechanism, Traits
from fairseq_lot.attention.options import Options, prior_option
from fairseq_lot.numerics.devices import ways
from fairseq_lot.transport.marginals import at_least_float32, without_empty
from fairseq_lot.transport.positions import alibi_log_prior


@dataclass(frozen=True)
class SoftmaxOptions(Options):
    """Options of softmax; with the defaults it is fairseq's own attention."""

    prior: str | None = prior_option()


class Softmax(Mechanism):
    """``A = softmax(s·q·k + log π)``: rows sum to 1, columns are free [Transformer].

    A maximises ``⟨A, s·q·k⟩ - KL(A‖π)`` over the matrices whose rows sum to 1 [AttentionOT]. The prior π is uniform, or
    ``alibi``: ``π_ij ∝ exp(-slope·|i - j|)`` with one slope per head [ALiBi], symmetric unless causal.

    ``softmax_plan`` of ``tests/reference.py`` computes the same in plain loops.
    """

    options_class = SoftmaxOptions
    options: SoftmaxOptions

    def __init__(self, **context: Any) -> None:
        super().__init__(**context)
        has_prior = self.options.prior is not None
        self.traits = Traits(
            couples_queries=False, positional=has_prior, is_causal=True, can_be_causal=True, is_stock=not has_prior
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, need_weights: bool) -> AttentionOutput:
        # a GPU's flash kernel supports no other mask
        is_triangle = masks.key_pads is None and self.options.prior is None and q.size(-2) == k.size(-2)
        is_causal = masks.causal and is_triangle and not need_weights
        bias = _additive_mask(q, k, masks.key_pads, masks.causal and not is_causal)
        if self.options.prior == "alibi":
            log_prior = alibi_log_prior(masks.key_pads, q, k)
            bias = log_prior if bias is None else log_prior + bias
        if ways(q).attends_in_float32:
            q, k, v = at_least_float32(q), at_least_float32(k), at_least_float32(v)
        if not (need_weights or _is_step(q, k)):
            # scale = head_dim^-1/2 by default; the same kernel as in fairseq's own attention
            bias, dropout = None if bias is None else bias.to(q.dtype), self.dropout if self.drops else 0.0
            values = scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=is_causal)
            return AttentionOutput(values)
        scores = (self.scaling * at_least_float32(q)) @ at_least_float32(k).transpose(-1, -2)
        if bias is None:
            weights = torch.softmax(scores, -1)
        else:
            nothing = bias.isneginf().all(-1, keepdim=True)  # rows of zeros, as from the kernel above
            weights = torch.softmax(scores + bias.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
        return AttentionOutput(self.drop(weights) @ v.to(weights.dtype), weights if need_weights else None)


def _is_step(q, k):
    """Whether two matrix products are faster than torch's kernel: with one query on a CPU they take half the time.

    False for small products, which torch computes without its matrix library, more slowly.
    """
    wide = ways(q).steps_by_products and q.dtype in (torch.float32, torch.float64)
    return wide and q.size(-2) == 1 and q.size(-1) * k.size(-2) >= 400


def _additive_mask(q, k, key_padding_mask, causal):
    """``(bsz or 1, 1, tgt_len or 1, src_len)``: -inf where a query may not attend, else 0; None: it may everywhere."""
    tgt_len, src_len = q.size(-2), k.size(-2)
    bias = None
    if key_padding_mask is not None:
        hidden = without_empty(key_padding_mask)
        bias = q.new_zeros(hidden.shape).masked_fill(hidden, -torch.inf)[:, None, None, :]
    if causal and tgt_len > 1:
        future = torch.full((tgt_len, src_len), -torch.inf, dtype=q.dtype, device=q.device)
        future = future.triu(1 + src_len - tgt_len)
        bias = future if bias is None else bias + future
    return bias
