"""Compare the change of a plan under perturbed scores with its proven bound.

docs/internals.md has the proofs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_lot.transport.marginals import uniform_log_mass
from fairseq_lot.transport.pivots import pivot_coupling
from fairseq_lot.transport.sinkhorn import solve


@dataclass(frozen=True)
class Certificate:
    """Ratios of a measured change to its bound, one for each of k perturbations; at most 1 where the theorem holds.

    P_τ(S) is the entropic plan of the scores S at temperature τ, with row sums 1. The perturbation changes the scores
    from S to T, and the values from V to W.

    Attributes:
        plan_ratio: ``(k, ...)``, ``‖P_τ(S) - P_τ(T)‖₁`` over ``(n/τ) ‖S - T‖_∞``, inequality (31) of [CETA].
        output_ratio: ``(k, ...)``, ``Σ_i ‖((P_τ(S) - P_τ(T)) V)_i‖₂`` over
            ``(n/τ) ‖S - T‖_∞ max_j ‖V_j - mean V‖₂``, a bound derived from (31).
        inequality_44_ratio: ``(k, ...)``, ``‖P_τ(S) V - P_τ(T) W‖`` over ``‖V - W‖ + (n/τ) ‖S - T‖_∞ ‖W‖``, inequality
            (44) of [CETA]; ``‖·‖`` is the largest norm of a row.
        marginal_error: ``(...)``, in units of mass: the marginal error of the base plan plus the largest one of the
            perturbed plans. The theorems assume 0.
    """

    plan_ratio: Tensor
    output_ratio: Tensor
    inequality_44_ratio: Tensor
    marginal_error: Tensor


def perturbation_certificate(
    scores: Tensor,
    v: Tensor,
    noise: Tensor,
    value_noise: Tensor | None = None,
    *,
    epsilon: float | Tensor,
    tolerance: float = 1e-10,
) -> Certificate:
    """Perturb scores and compare the change of the plan and of the output with its bound.

    P_τ(S) maximises ``⟨P, S⟩ + τ H(P)`` over the matrices with row sums 1 and column sums n/m.

    Args:
        scores: ``(..., n, m)``, S, without pads; float64 for ratios near 0.
        v: ``(..., m, d)``, the values V.
        noise: ``(k, ..., n, m)``, T - S; each n × m matrix has an entry that is not 0.
        value_noise: ``(k, ..., m, d)``, W - V for (44); default: W = V.
        epsilon: τ, in the unit of the scores: a number, or one for each plan, ``(..., 1, 1)``.
        tolerance: the solver stops at this marginal error, in units of mass.
    """
    n = scores.size(-2)
    log_a, log_b = uniform_log_mass(None, scores), uniform_log_mass(None, scores.transpose(-1, -2))
    base, moved, error = _exact_plans(scores / epsilon, noise / epsilon, log_a, log_b, tolerance)
    bound = n * _size(noise / epsilon)
    radius = (v - v.mean(-2, keepdim=True)).norm(dim=-1).amax(-1)
    change = ((moved - base) @ v).norm(dim=-1).sum(-1)
    return Certificate(
        plan_ratio=(moved - base).abs().sum((-1, -2)) / bound,
        output_ratio=change / (bound * _not_zero(radius)),
        inequality_44_ratio=_output_ratio(base, moved, v, value_noise, bound),
        marginal_error=error,
    )


@dataclass(frozen=True)
class CouplingCertificate:
    """Ratios of a measured change to its bound for LOT's weights ``A = n·Γ1 diag(1/σ) Γ2ᵀ``.

    Γ1 is computed from the scores S1, Γ2 from the scores S2, both divided by ε. The perturbation changes S1 to T1, S2
    to T2, the values from V to W and so the weights from A to B. ``‖·‖`` is the largest norm of a row.

    Attributes:
        plan_ratio: ``(k, ...)``, ``‖A - B‖₁`` over ``β = n √(‖S1 - T1‖_∞² + ‖S2 - T2‖_∞²)``, for exact plans.
        output_ratio: ``(k, ...)``, ``‖A V - B W‖`` over ``‖V - W‖ + β ‖W‖``, for exact plans.
        as_run_ratio: ``(k, ...)``, ``‖A V - B W‖`` over ``‖V - W‖ + √((u1 ‖S1 - T1‖_∞)² + (u2 ‖S2 - T2‖_∞)²) ‖W‖``,
            for plans after u1 and u2 half-updates.
        marginal_error: ``(...)``, in units of mass: the larger one of both plans, each as in :class:`Certificate`.
    """

    plan_ratio: Tensor
    output_ratio: Tensor
    as_run_ratio: Tensor
    marginal_error: Tensor


def coupling_certificate(
    query_scores: Tensor,
    key_scores: Tensor,
    log_masses: Tensor,
    v: Tensor,
    query_noise: Tensor,
    key_noise: Tensor,
    value_noise: Tensor | None = None,
    *,
    query_updates: int,
    key_updates: int,
    tolerance: float = 1e-10,
) -> CouplingCertificate:
    """Perturb the scores of both plans and compare the change of their coupling with its bound.

    Args:
        query_scores: ``(..., n, r)``, S1, without pads, already divided by epsilon; float64 for ratios near 0.
        key_scores: ``(..., m, r)``, S2, likewise.
        log_masses: ``(..., r)``, log σ.
        v: ``(..., m, d)``, the values V.
        query_noise: ``(k, ..., n, r)``, T1 - S1.
        key_noise: ``(k, ..., m, r)``, T2 - S2; not zero everywhere if query_noise is.
        value_noise: ``(k, ..., m, d)``, W - V; default: W = V.
        query_updates, key_updates: u1 and u2, the half-updates for ``as_run_ratio``.
        tolerance: the solver of the exact plans stops at this marginal error, in units of mass.
    """
    n = query_scores.size(-2)
    log_a, log_b = uniform_log_mass(None, query_scores), uniform_log_mass(None, key_scores)
    to_pivots, moved_to_pivots, error = _exact_plans(query_scores, query_noise, log_a, log_masses, tolerance)
    # transposed: Γ2 is exact on the pivots
    of_pivots = key_scores.transpose(-1, -2), key_noise.transpose(-1, -2)
    to_keys, moved_to_keys, key_error = _exact_plans(*of_pivots, log_masses, log_b, tolerance)
    base, moved = to_pivots @ to_keys, moved_to_pivots @ moved_to_keys
    sizes = _size(query_noise), _size(key_noise)
    bound = n * torch.hypot(*sizes)

    def run(queries, keys):
        return pivot_coupling(
            queries, keys, log_a, log_b, log_masses, query_updates=query_updates, key_updates=key_updates
        ).conditional

    run_base, run_moved = run(query_scores, key_scores), run(query_scores + query_noise, key_scores + key_noise)
    run_bound = torch.hypot(query_updates * sizes[0], key_updates * sizes[1])
    return CouplingCertificate(
        plan_ratio=(moved - base).abs().sum((-1, -2)) / bound,
        output_ratio=_output_ratio(base, moved, v, value_noise, bound),
        as_run_ratio=_output_ratio(run_base, run_moved, v, value_noise, run_bound),
        marginal_error=torch.maximum(error, key_error),
    )


def _exact_plans(scores, noise, log_a, log_b, tolerance):
    """Conditionals of the exact plans for ``scores`` and for ``scores + noise``, with their marginal error.

    The second plan aims at the column sums that the first one reached. The proof of (31) needs equal marginals, not
    uniform ones, so the bound also holds where the solver stops early.
    """
    budget: dict[str, Any] = {"num_updates": 2001, "tolerance": tolerance}
    tiny = torch.finfo(scores.dtype).tiny
    base = solve(scores, log_a, log_b, **budget)
    # warm start: the log of the base plan is the scores plus row and column constants, which change no plan
    start = base.conditional.clamp(min=tiny).log()
    moved = solve(start + noise, log_a, base.plan.sum(-2).clamp(min=tiny).log(), **budget)
    return base.conditional, moved.conditional, base.marginal_error + moved.marginal_error.amax(0)


def _output_ratio(base, moved, v, value_noise, bound):
    """``‖A V - B W‖`` over ``‖V - W‖ + bound·‖W‖``, where ``‖·‖`` is the largest norm of a row."""
    w = v if value_noise is None else v + value_noise
    certified = _largest_row(w - v) + bound * _largest_row(w)
    return _largest_row(base @ v - moved @ w) / _not_zero(certified)


def _largest_row(x):
    return x.norm(dim=-1).amax(-1)


def _size(noise):
    """``‖noise‖_∞`` of each plan."""
    return noise.abs().amax((-1, -2))


def _not_zero(x):
    return torch.where(x == 0, 1.0, x)
