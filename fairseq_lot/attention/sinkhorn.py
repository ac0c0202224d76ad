"""Sinkhorn attention: the entropic plan with both marginals fixed."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_lot.attention.base import AttentionOutput, Masks, Mechanism, Traits
from fairseq_lot.attention.options import Options, option, prior_option
from fairseq_lot.kernels import choice as kernels
from fairseq_lot.kernels.naive import SinkhornInputs, SinkhornSettings
from fairseq_lot.transport.marginals import at_least_float32, uniform_log_mass
from fairseq_lot.transport.positions import alibi_log_prior, alibi_slopes, check_queries_among_keys, positions
from fairseq_lot.transport.sinkhorn import solve


@dataclass(frozen=True)
class SinkhornOptions(Options):
    """Options of Sinkhorn. Defaults are those of ESPFormer's translation experiment (its Table 12) [ESPFormer]."""

    epsilon: float = option(
        None, "entropic regularisation, in the unit of the scores (default: 0.1; with learn_epsilon: 1)", above=1e-30
    )
    num_updates: int = option(15, "half-updates, S in the papers; 1 is softmax of the scores / epsilon", minimum=1)
    tolerance: float | None = option(
        None,
        "stop early at this marginal error (on a GPU the host waits); at most num_updates half-updates",
        above=1e-30,
    )
    learn_epsilon: bool = option(False, "learn an epsilon for each head, initially epsilon")
    prior: str | None = prior_option()

    def __post_init__(self) -> None:
        if self.epsilon is None:
            object.__setattr__(self, "epsilon", 1.0 if self.learn_epsilon else 0.1)
        super().__post_init__()


class Sinkhorn(Mechanism):
    """``A = n·P``, where P in U(1/n, 1/m) maximises ``⟨P, s·q·k⟩ + ε H(P)`` [Sinkformer, Cuturi13]; rows are exact.

    With ``learn_epsilon`` each head learns its own ε ([CETA], §7). With a prior π, as for softmax attention,
    ``-ε KL(P‖π)`` replaces ``ε H(P)`` [AttentionOT].

    ``sinkhorn_plan`` of ``tests/reference.py`` computes the same in plain loops.

    Attributes:
        log_epsilon: ``(num_heads,)``, learnt; None if ε is fixed.
    """

    options_class = SinkhornOptions
    options: SinkhornOptions
    log_epsilon: nn.Parameter | None

    def __init__(self, **context: Any) -> None:
        super().__init__(**context)
        self.traits = Traits(
            couples_queries=self.options.num_updates > 1,  # one update is the softmax of a row
            uncoupling_options=(("num_updates", 1),),
            positional=self.options.prior is not None,
        )
        self.log_epsilon = None
        if self.options.learn_epsilon:
            self.log_epsilon = nn.Parameter(torch.full((self.num_heads,), math.log(self.options.epsilon)))

    def epsilon(self) -> float | Tensor:
        """ε: a number, or one for each head, ``(num_heads, 1, 1)``, at least float32."""
        if self.log_epsilon is None:
            return self.options.epsilon
        return at_least_float32(self.log_epsilon).exp()[:, None, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, need_weights: bool) -> AttentionOutput:
        if self.options.num_updates > 1 and self.options.tolerance is None and not need_weights and kernels.wanted(q):
            values = self._fused(q, k, v, masks)
            if values is not None:
                return AttentionOutput(values)
        q, k = at_least_float32(q), at_least_float32(k)
        scores = (q * (self.scaling / self.epsilon())) @ k.transpose(-1, -2)
        if self.options.prior == "alibi":
            scores += alibi_log_prior(masks.key_pads, q, k)
        solution = solve(
            scores,
            uniform_log_mass(masks.query_pads, q).unsqueeze(-2),
            uniform_log_mass(masks.key_pads, k).unsqueeze(-2),
            num_updates=self.options.num_updates,
            tolerance=self.options.tolerance,
        )
        values = self.drop(solution.conditional) @ v.to(q.dtype)
        return AttentionOutput(values, solution.conditional if need_weights else None)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> Tensor | None:
        """The values by a fused kernel that stores no n × m matrix; None if the kernel is not used."""
        factors = slopes = where = None
        if self.log_epsilon is not None:
            factors = (-at_least_float32(self.log_epsilon)).exp()
        if self.options.prior == "alibi":
            check_queries_among_keys(q, k)
            slopes, where = (
                alibi_slopes(self.num_heads, dtype=torch.float32, device=q.device),
                positions(masks.key_pads, k),
            )
        inputs = SinkhornInputs(q, k, v, factors, slopes, where, masks.query_pads, masks.key_pads)
        scale = self.scaling if factors is not None else self.scaling / self.options.epsilon
        settings = SinkhornSettings(scale, self.options.num_updates, self.dropout if self.drops else 0.0)
        return kernels.sinkhorn_attention(inputs, settings)
