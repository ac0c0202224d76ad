"""How far a doubly stochastic plan can move when its scores are perturbed: measured against proven bounds."""

from dataclasses import dataclass
from typing import Any

import torch

from fairseq_lot.transport.marginals import uniform_log_mass
from fairseq_lot.transport.sinkhorn import sinkhorn


@dataclass(frozen=True)
class Certificate:
    """Measured change over its bound, one entry per perturbation; at most 1 where the theorem holds.

    Attributes:
        plan_ratio: ``‖P_τ(S) - P_τ(T)‖₁`` over ``(n/τ) ‖S - T‖_∞``, inequality (31) of [CETA]; ``(k, ...)``.
        output_ratio: ``Σ_i ‖((P_τ(S) - P_τ(T)) V)_i‖₂`` over ``(n/τ) ‖S - T‖_∞ max_j ‖V_j - mean V‖₂``: the output
            certificate derived from (31), ``(k, ...)``.
        marginal_error: ``(...)``, the largest that was left in any of the plans, in units of mass: P_τ is the
            doubly stochastic plan, and this says how far from one it was.
    """

    plan_ratio: torch.Tensor
    output_ratio: torch.Tensor
    marginal_error: torch.Tensor


def perturbation_certificate(
    scores: torch.Tensor,
    v: torch.Tensor,
    noise: torch.Tensor,
    *,
    epsilon: float | torch.Tensor,
    tolerance: float = 1e-10,
) -> Certificate:
    """Perturb scores and compare the change of the plan and of the output with what is certified.

    P_τ(S) maximises ``⟨P, S⟩ + τ H(P)`` over the matrices with row sums 1 and column sums n/m. Their total mass is n,
    so by Pinsker's inequality -τH is (τ/n)-strongly convex in ‖·‖₁, and the maximiser is (n/τ)-Lipschitz: that is
    (31). The rows of ``D = P_τ(S) - P_τ(T)`` sum to 0, so ``D V = D (V - c)`` for any row c, and the norm of row i is
    at most ``‖D_i‖₁ max_j ‖V_j - c‖``; c is the mean of V here.

    Where the updates end before the columns of P_τ(S) are exact, P_τ(T) is held to the same columns: the argument
    needs equal marginals, not uniform ones.

    Args:
        scores: ``(..., n, m)``, S, of real tokens only; float64 for ratios near 0.
        v: ``(..., m, d)``.
        noise: ``(k, ..., n, m)``, T - S, nowhere all zero.
        epsilon: τ, in the unit of the scores: a number, or one for every plan, ``(..., 1, 1)``.
        tolerance: the marginal error at which a plan counts as exact.
    """
    n = scores.size(-2)
    log_a, log_b = uniform_log_mass(None, scores), uniform_log_mass(None, scores.transpose(-1, -2))
    budget: dict[str, Any] = {"num_updates": 2001, "tolerance": tolerance}
    base = sinkhorn(scores / epsilon, log_a, log_b, **budget)
    # log P_τ(S) differs from S/τ by row and column constants alone, which change no plan: a start near the solution
    start = base.conditional.clamp(min=torch.finfo(scores.dtype).tiny).log()
    log_columns = base.conditional.mean(-2).clamp(min=torch.finfo(scores.dtype).tiny).log()
    moved = sinkhorn(start + noise / epsilon, log_a, log_columns, **budget)
    difference = moved.conditional - base.conditional
    bound = n * (noise / epsilon).abs().amax((-1, -2))
    radius = (v - v.mean(-2, keepdim=True)).norm(dim=-1).amax(-1)
    change = (difference @ v).norm(dim=-1).sum(-1)
    return Certificate(
        plan_ratio=difference.abs().sum((-1, -2)) / bound,
        output_ratio=change / (bound * torch.where(radius == 0, 1.0, radius)),
        marginal_error=base.marginal_error + moved.marginal_error.amax(0),
    )
