"""Low-rank couplings: two plans composed through a pivot measure [LOTFormer, LowRankSinkhorn].

Queries have the masses a, keys b, pivots σ. A plan in U(a, σ) has the row sums a and the column sums σ; its
``conditional`` is the plan with each row divided by its sum. ``sinkhorn`` finds it by half-updates, the last one of the
rows, so that the first marginal is exact and the second one converges.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_lot.kernels import choice as kernels
from fairseq_lot.kernels.naive import LotInputs, LotSettings
from fairseq_lot.transport.marginals import Pads
from fairseq_lot.transport.sinkhorn import Plan, sinkhorn


@dataclass(frozen=True)
class Coupling:
    """The coupling ``Γ = Γ1 diag(1/σ) Γ2ᵀ`` of two measures through r pivots, never built unless asked for.

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
        """``n·Γ``, ``(..., n, m)``, rows sum to 1; costs n·m memory."""
        return torch.matmul(*self.factors)


def key_side(
    key_scores: Tensor, log_b: Tensor, log_masses: Tensor, *, num_updates: int, log_factor: Tensor | None = None
) -> Plan:
    """Γ2ᵀ in U(σ, b), exact on σ; arguments as in :func:`pivot_coupling`."""
    factor = None if log_factor is None else log_factor.mT
    return sinkhorn(key_scores.mT, log_masses, log_b, num_updates=num_updates, log_factor=factor)


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
    """Couple queries and keys through pivots of masses σ, by one entropic plan on either side.

    Args:
        query_scores: ``(..., n, r)`` and key_scores: ``(..., m, r)``, already divided by epsilon.
        log_a: ``(..., n)``, log_b: ``(..., m)``; -inf = no mass. log_masses: ``(..., r)``, finite.
        query_updates, key_updates: half-updates on either side. With ``query_updates=1`` a query's row
            depends on that query alone: it is a softmax over the pivots.
        log_factor: of a measure that is coupled with itself, ``(..., n, r)``, log of what both finished plans are
            multiplied by, see :func:`~fairseq_lot.transport.sinkhorn.sinkhorn`.

    Returns:
        The coupling; its rows are exact for any number of updates, its columns converge unless there is a factor.

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
        from_queries = sinkhorn(query_scores, log_a, log_masses, num_updates=query_updates, log_factor=log_factor)
    to_keys = key_side(key_scores, log_b, log_masses, num_updates=key_updates, log_factor=log_factor)
    return Coupling(from_queries, to_keys)


def fusable(q: Tensor) -> bool:
    """Whether :func:`fused_values` is worth a call: on a GPU, unless kernels are off."""
    return kernels.wanted(q)


def fused_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pivots: Tensor,
    log_masses: Tensor,
    query_pads: Pads,
    key_pads: Pads,
    *,
    scale: float,
    query_updates: int,
    key_updates: int,
    dropout: float,
) -> Tensor | None:
    """:meth:`Coupling.apply` for scores ``scale·x·z`` in one kernel, which keeps no scores; None where there is none.

    Arguments as in :class:`LotInputs` and :class:`LotSettings`. ``(bsz, num_heads, n, value_dim)``, zero at pads.
    """
    inputs = LotInputs(q, k, v, pivots, log_masses, query_pads, key_pads)
    return kernels.lot(inputs, LotSettings(scale, query_updates, key_updates, dropout))


class _PivotScores(torch.autograd.Function):
    """``x zᵀ`` as products of one batch; torch's own way costs half as much again when sentences are short.

    Where x is time first in memory, as fairseq has it, that is one product a head, else one a sentence and head.
    """

    @staticmethod
    def forward(ctx, x, pivots):
        ctx.save_for_backward(x, pivots)
        if not _is_time_first(x):
            return torch.bmm(x.flatten(0, 1), _for_each(pivots, x.size(0)).mT).unflatten(0, x.shape[:2])
        scores = torch.bmm(_by_head(x), pivots.mT).unflatten(1, (x.size(2), x.size(0)))
        return scores.permute(2, 0, 1, 3).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_scores):
        x, pivots = ctx.saved_tensors
        grad_x, grad_pivots = None, None
        if _is_time_first(x):
            grad_scores = _by_head(grad_scores)
            if ctx.needs_input_grad[0]:
                grad_x = torch.bmm(grad_scores, pivots).unflatten(1, (x.size(2), x.size(0))).permute(2, 0, 1, 3)
            if ctx.needs_input_grad[1]:
                grad_pivots = torch.bmm(grad_scores.mT, _by_head(x))
            return grad_x, grad_pivots
        grad_scores = grad_scores.flatten(0, 1)
        if ctx.needs_input_grad[0]:
            grad_x = torch.bmm(grad_scores, _for_each(pivots, x.size(0))).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_pivots = torch.bmm(grad_scores.mT, x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(0)
        return grad_x, grad_pivots


def _for_each(pivots, bsz):
    """``(num_heads, r, d) -> (bsz·num_heads, r, d)``."""
    return pivots.expand(bsz, -1, -1, -1).flatten(0, 1)


def _is_time_first(x):
    """Whether ``(bsz, num_heads, n, d)`` is ``(n, bsz, ...)`` in memory, so that :func:`_by_head` is a view."""
    return x.stride(2) == x.size(0) * x.stride(0)


def _by_head(x):
    """``(bsz, num_heads, n, d) -> (num_heads, n·bsz, d)``."""
    return x.permute(1, 2, 0, 3).flatten(1, 2)


def pivot_scores(x: Tensor, pivots: Tensor) -> Tensor:
    """``x_i·z_t``: ``(bsz, num_heads, n, d), (num_heads, r, d) -> (bsz, num_heads, n, r)``, no copy of x is made."""
    return _PivotScores.apply(x, pivots)


def gaussian_scores(x: Tensor, pivots: Tensor) -> Tensor:
    """``-‖x_i - z_t‖²/2``: ``(..., n, d), (..., r, d) -> (..., n, r)``."""
    norms = x.square().sum(-1).unsqueeze(-1) + pivots.square().sum(-1).unsqueeze(-2)
    return pivot_scores(x, pivots) - norms / 2
