"""Differential attention: the difference of two plans of any mechanism."""

import math
import sys
from dataclasses import replace

import torch
from torch import Tensor, nn

from fairseq_lot.attention.base import AttentionOutput, DecodeCache, Masks, Mechanism, draw_normal
from fairseq_lot.attention.options import Options
from fairseq_lot.errors import InputError
from fairseq_lot.transport.marginals import Pads, at_least_float32


def scheduled_lambda_init(layer: int) -> float:
    """``0.8 - 0.6 exp(-0.3·layer)`` for the 0-based layer ([DiffTransformer], Eq. 3)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def side_by_side(v: Tensor) -> Tensor:
    """The values of each pair of heads in one tensor, ``[v_2h, v_2h+1]``.

    ``(bsz, num_heads, src_len, value_dim) -> (bsz, num_heads / 2, src_len, 2 value_dim)``.
    """
    return v.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)


class Differential(Mechanism):
    """``A = A1 - λ A2``, where A1 and A2 are plans of one mechanism on two halves of q and k [DiffTransformer].

    Heads 2h and 2h+1 form a pair: they give A1 and A2, and A multiplies their concatenated values. The result is
    RMS-normalised and multiplied by ``1 - λ_init``. Inputs and outputs have the shapes of a plain mechanism with
    ``num_heads`` heads.

    Args:
        inner: the mechanism of A1 and A2, with all ``num_heads`` heads.
        lambda_init: λ_init; None: :func:`scheduled_lambda_init` of the layer.

    Attributes:
        lambda_q1, lambda_k1, lambda_q2, lambda_k2: ``(head_dim,)``, learnt;
            ``λ = exp(λq1·λk1) - exp(λq2·λk2) + λ_init``.
    """

    def __init__(self, inner: Mechanism, *, lambda_init: float | None = None):
        super().__init__(num_heads=inner.num_heads, head_dim=inner.head_dim, options=Options(), layer=inner.layer)
        if inner.num_heads % 2:
            raise InputError(f"differential attention pairs heads; their number must be even, got {inner.num_heads}")
        is_number = isinstance(lambda_init, (int, float)) and abs(lambda_init) <= sys.float_info.max
        if lambda_init is not None and not is_number:
            raise InputError(f"differential_lambda_init must be a finite number, got {lambda_init!r}")
        self.inner = inner
        self.traits = replace(inner.traits, is_stock=False, heads_per_plan=2, signed=True)
        self.lambda_init = scheduled_lambda_init(inner.layer) if lambda_init is None else lambda_init
        generator = torch.Generator("cpu").manual_seed(inner.layer)
        lambdas = (nn.Parameter(0.1 * draw_normal((inner.head_dim,), generator)) for _ in range(4))
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = lambdas
        self.norm = nn.RMSNorm(2 * inner.head_dim, eps=1e-5)

    def difference_weight(self) -> Tensor:
        """λ, a scalar tensor, at least float32."""
        q1, k1, q2, k2 = map(at_least_float32, (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2))
        return torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + self.lambda_init

    def _title(self) -> str:
        return f"differential {self.inner._title()}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, need_weights: bool) -> AttentionOutput:
        query_pads, key_pads, causal = masks
        wide = self._widen(v)
        output = self.inner(q, k, wide, query_pads, key_pads, need_weights, causal=causal, pads_are_zero=True)
        return self._subtract(output)

    def summarise(self, k: Tensor, v: Tensor, key_padding_mask: Pads = None, need_weights: bool = False) -> DecodeCache:
        return self.inner.summarise(k, self._widen(v), key_padding_mask, need_weights)

    def attend_summary(self, q: Tensor, summary: DecodeCache, need_weights: bool = False) -> AttentionOutput:
        return self._subtract(self.inner.attend_summary(q, summary, need_weights)).to(q.dtype)

    def causal_step(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Pads, cache: DecodeCache, need_weights: bool
    ) -> tuple[AttentionOutput, DecodeCache]:
        output, cache = self.inner.causal_step(q, k, self._widen(v), key_padding_mask, cache, need_weights)
        return self._subtract(output).to(q.dtype), cache

    @staticmethod
    def _widen(v):
        """``[v_2h, v_2h+1]`` for both heads of a pair, ``(bsz, num_heads, src_len, 2 value_dim)``."""
        return side_by_side(v).repeat_interleave(2, dim=1)

    def _subtract(self, output):
        """``A1 - λ A2`` of the inner mechanism's output, normalised; as ``(bsz, num_heads, tgt_len, value_dim)``."""
        values = self.norm(self.combine_heads(output.values).to(self.norm.weight.dtype)) * (1 - self.lambda_init)
        values = values.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)
        return AttentionOutput(values, None if output.weights is None else self.combine_heads(output.weights))

    def combine_heads(self, x: Tensor) -> Tensor:
        """``x_2h - λ x_2h+1`` for each pair of heads, ``(bsz, num_heads, ...) -> (bsz, num_heads / 2, ...)``."""
        first, second = at_least_float32(x).unflatten(1, (-1, 2)).unbind(2)
        return first - self.difference_weight() * second
