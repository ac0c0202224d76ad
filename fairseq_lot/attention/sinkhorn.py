"""Sinkhorn attention: the entropic plan with both marginals."""

from dataclasses import dataclass

from fairseq_lot.attention.base import AttentionOutput, Mechanism
from fairseq_lot.attention.options import Options, option
from fairseq_lot.transport.marginals import at_least_float32, uniform_log_mass
from fairseq_lot.transport.sinkhorn import sinkhorn


@dataclass(frozen=True)
class SinkhornOptions(Options):
    """Defaults are those of ESPFormer's translation experiment (its Table 12) [ESPFormer]."""

    epsilon: float = option(0.1, "entropic regularisation, in the unit of the scores", above=0)
    num_updates: int = option(15, "half-updates, S in the papers; 1 is softmax", minimum=1)
    tolerance: float | None = option(
        None,
        "stop once the marginal error is at most this, for which a GPU is waited for; num_updates stays the bound",
        above=0,
    )


class Sinkhorn(Mechanism):
    """``A = n·P`` with P in U(1/n, 1/m) maximising ``⟨P, s·q·k⟩ + ε H(P)`` [Sinkformer, Cuturi13]; rows exact.

    :func:`~fairseq_lot.attention.reference.sinkhorn_plan` computes the same in plain loops.
    """

    options_class = SinkhornOptions

    def __init__(self, **context):
        super().__init__(**context)
        self.couples_queries = self.options.num_updates > 1  # one update is the softmax of a row

    def attend(self, q, k, v, *, query_padding_mask, key_padding_mask, need_weights, causal):
        q, k = at_least_float32(q), at_least_float32(k)
        solution = sinkhorn(
            (q * (self.scaling / self.options.epsilon)) @ k.transpose(-1, -2),
            uniform_log_mass(query_padding_mask, q).unsqueeze(-2),
            uniform_log_mass(key_padding_mask, k).unsqueeze(-2),
            num_updates=self.options.num_updates,
            tolerance=self.options.tolerance,
        )
        values = self.drop(solution.conditional) @ v.to(q.dtype)
        return AttentionOutput(values, solution.conditional if need_weights else None)
