"""SeT attention, after SeTformer: tied tokens, coupled through pivots by a Gaussian kernel."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fairseq_lot.attention.base import AttentionOutput, Masks, Mechanism, Traits, without_pads
from fairseq_lot.attention.options import PivotOptions, option
from fairseq_lot.transport.marginals import Pads, at_least_float32, uniform_log_mass
from fairseq_lot.transport.pivots import Coupling, gaussian_scores, pivot_coupling
from fairseq_lot.transport.positions import linear_log_factor


@dataclass(frozen=True)
class SetOptions(PivotOptions):
    """Options of SeT: pivots, and a position factor, which is off by default [SeTformer]."""

    positional_temperature: float | None = option(
        None,
        "τ of the position factor exp(-(i/n - t/r)²/τ²) for token i of n and pivot t of r; default: no factor",
        above=1e-15,
    )


class Set(Mechanism):
    """``A = n·Γ1 diag(r) Γ2ᵀ``: the tokens x of a sentence are transported to r equal pivots and back [SeTformer].

    Scores are ``-s·‖x_i - z_t‖²/2``. Queries and keys are tied: both are ``x = (q + k)/2``, so both projections get a
    gradient. A is self-attention.

    The plan to the pivots is exact on the tokens, the plan back on the pivots. With ``positional_temperature`` τ both
    plans are multiplied by ``exp(-(i/n - t/r)²/τ²)``, with i and t counted from 1 over real tokens and pivots, and
    their rows are normalised again. Rows of A then sum to 1, but its columns no longer converge to n/m.

    ``set_plan`` of ``tests/reference.py`` computes the same in plain loops.

    Attributes:
        pivots: ``(num_heads, r, head_dim)``, learnt, in the space of q and k.
    """

    options_class = SetOptions
    options: SetOptions

    def __init__(self, **context: Any) -> None:
        super().__init__(**context)
        options = self.options
        self.traits = Traits(tied_tokens=True, positional=options.positional_temperature is not None)
        self.pivots = nn.Parameter(self.drawn(options.num_pivots, options.seed, options.pivot_std))

    def coupling(
        self, q: Tensor, k: Tensor, query_padding_mask: Pads = None, key_padding_mask: Pads = None
    ) -> Coupling:
        """The coupling of the tokens with themselves; arguments as for :meth:`forward`."""
        pads = query_padding_mask if key_padding_mask is None else key_padding_mask
        x = without_pads((at_least_float32(q) + at_least_float32(k)) / 2, pads)
        pivots, options = at_least_float32(self.pivots), self.options
        log_factor = None
        if options.positional_temperature is not None:
            log_factor = linear_log_factor(pads, x, options.num_pivots, options.positional_temperature).unsqueeze(1)
        scores = gaussian_scores(x, pivots) * (self.scaling / options.epsilon)
        log_a, log_masses = uniform_log_mass(pads, x).unsqueeze(-2), uniform_log_mass(None, pivots)
        updates = {"query_updates": options.num_updates, "key_updates": options.num_updates}
        return pivot_coupling(scores, scores, log_a, log_a, log_masses, **updates, log_factor=log_factor)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, need_weights: bool) -> AttentionOutput:
        coupling = self.coupling(q, k, masks.query_pads, masks.key_pads)
        from_queries, to_keys = coupling.factors
        at_pivots = coupling.to_keys.apply(v.to(to_keys.dtype))  # (bsz, num_heads, r, value_dim)
        return AttentionOutput(self.drop(from_queries) @ at_pivots, coupling.conditional if need_weights else None)
