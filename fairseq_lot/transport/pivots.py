"""Low-rank couplings: two plans composed through a pivot measure [LOTFormer, LowRankSinkhorn].

Queries have the masses a, keys b, pivots σ. A plan in U(a, σ) has the row sums a and the column sums σ. Its
``conditional`` is the plan with each row divided by its sum. ``solve`` finds the plan by half-updates and ends with
the rows: row sums are exact, column sums converge.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_lot.transport.sinkhorn import Plan, solve


@dataclass(frozen=True)
class Coupling:
    """The coupling ``Γ = Γ1 diag(1/σ) Γ2ᵀ`` of two measures through r pivots, stored as its two plans.

    Attributes:
        from_queries: Γ1 in U(a, σ), exact on a; ``(..., n, r)``.
        to_keys: Γ2ᵀ in U(σ, b), exact on σ; ``(..., r, m)``.
    """

    from_queries: Plan
    to_keys: Plan

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """``p(pivot | query)``, ``(..., n, r)``, and ``p(key | pivot)``, ``(..., r, m)``."""
        return self.from_queries.conditional, self.to_keys.conditional

    @property
    def conditional(self) -> Tensor:
        """``n·Γ``, ``(..., n, m)``; rows sum to 1. Takes n·m memory."""
        return torch.matmul(*self.factors)


class PivotProblem(NamedTuple):
    """A coupling's definition apart from the marginals; fields as the arguments of :func:`pivot_coupling`."""

    query_scores: Tensor
    key_scores: Tensor
    log_masses: Tensor
    query_updates: int
    key_updates: int


def key_side(
    key_scores: Tensor, log_b: Tensor, log_masses: Tensor, *, num_updates: int, log_factor: Tensor | None = None
) -> Plan:
    """Γ2ᵀ in U(σ, b), exact on σ; arguments as in :func:`pivot_coupling`."""
    factor = None if log_factor is None else log_factor.mT
    return solve(key_scores.mT, log_masses, log_b, num_updates=num_updates, log_factor=factor)


def pivot_coupling(
    query_scores: Tensor,
    key_scores: Tensor,
    log_a: Tensor,
    log_b: Tensor,
    log_masses: Tensor,
    *,
    query_updates: int,
    key_updates: int,
    log_factor: Tensor | None = None,
) -> Coupling:
    """Couple queries and keys through pivots with masses σ, by an entropic plan on each side [LOTFormer].

    Args:
        query_scores: ``(..., n, r)`` and key_scores: ``(..., m, r)``, already divided by epsilon.
        log_a: ``(..., n)``, log_b: ``(..., m)``; -inf = no mass. log_masses: ``(..., r)``, finite.
        query_updates, key_updates: half-updates on each side. With ``query_updates=1`` a query's row is a softmax over
            the pivots and depends on no other query.
        log_factor: ``(..., n, r)``, only if queries and keys are the same tokens: both plans get this factor, see
            :func:`~fairseq_lot.transport.sinkhorn.solve`.

    Returns:
        The coupling. Its rows are exact after any number of updates; its columns converge, unless there is a factor.

    Examples:
        >>> queries, keys, pivots = torch.eye(3), torch.eye(3)[:2], torch.eye(3)
        >>> log_a, log_b, log_masses = (torch.full((n,), 1 / n).log() for n in (3, 2, 3))
        >>> updates = {"query_updates": 15, "key_updates": 15}
        >>> coupling = pivot_coupling(queries @ pivots.T, keys @ pivots.T, log_a, log_b, log_masses, **updates)
        >>> coupling.conditional.sum(0)  # rows spend 1, columns receive n/m
        tensor([1.5000, 1.5000])
    """
    if query_updates == 1 and log_factor is None:
        from_queries = Plan(torch.softmax(query_scores, -1), log_a, log_masses)
    else:
        from_queries = solve(query_scores, log_a, log_masses, num_updates=query_updates, log_factor=log_factor)
    to_keys = key_side(key_scores, log_b, log_masses, num_updates=key_updates, log_factor=log_factor)
    return Coupling(from_queries, to_keys)


def pivot_scores(x: Tensor, pivots: Tensor) -> Tensor:
    """``x_i·z_t``: ``(bsz, num_heads, n, d), (num_heads, r, d) -> (bsz, num_heads, n, r)``."""
    if x.stride(2) != x.size(0) * x.stride(0):
        return x @ pivots.mT
    # fairseq stores time first: one product per head then needs no copy of x
    by_head = x.permute(1, 2, 0, 3).flatten(1, 2)  # (num_heads, n·bsz, d), a view
    scores = torch.bmm(by_head, pivots.mT).unflatten(1, (x.size(2), x.size(0)))
    return scores.permute(2, 0, 1, 3).contiguous()


def gaussian_scores(x: Tensor, pivots: Tensor) -> Tensor:
    """``-‖x_i - z_t‖²/2``: ``(..., n, d), (..., r, d) -> (..., n, r)``."""
    norms = x.square().sum(-1).unsqueeze(-1) + pivots.square().sum(-1).unsqueeze(-2)
    return pivot_scores(x, pivots) - norms / 2
