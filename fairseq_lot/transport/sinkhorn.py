"""Entropic optimal transport by alternating half-updates [Sinkformer, Cuturi13]."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_lot.kernels import choice as kernels
from fairseq_lot.numerics.autograd import once_in_full_precision
from fairseq_lot.numerics.devices import ways
from fairseq_lot.numerics.log_domain import log_domain_sinkhorn
from fairseq_lot.transport.marginals import marginal_error
from fairseq_lot.transport.sinkhorn_scaling import scaled_conditional


@dataclass(frozen=True)
class Plan:
    """A transport plan whose rows are exact, stored as ``plan = diag(a) conditional``.

    Attributes:
        conditional: ``(..., n, m)``, each row a probability vector (this is what multiplies V).
        log_a: ``(..., n)`` log of the row marginal, -inf where there is no mass.
        log_b: ``(..., m)`` log of the column marginal that the updates aim at.
    """

    conditional: Tensor
    log_a: Tensor
    log_b: Tensor

    @property
    def plan(self) -> Tensor:
        """The plan itself, ``(..., n, m)``, total mass 1."""
        return self.log_a.exp().unsqueeze(-1) * self.conditional

    def apply(self, v: Tensor) -> Tensor:
        """Barycentric projection ``conditional @ v``: ``(..., m, d) -> (..., n, d)``."""
        if self.conditional.stride(-1) == 1 or v.shape[:-2] != self.conditional.shape[:-2]:
            return self.conditional @ v
        return _TransposedProduct.apply(self.conditional, v)

    @property
    def marginal_error(self) -> Tensor:
        """``(...)``: how far the plan is from both marginals, in units of mass."""
        return marginal_error(self.plan, self.log_a.exp(), self.log_b.exp())


class _TransposedProduct(torch.autograd.Function):
    """``conditional @ v`` for a conditional that is stored transposed; its gradient is stored likewise."""

    @staticmethod
    def forward(ctx, conditional, v):
        ctx.save_for_backward(conditional, v)
        return conditional @ v

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_values):
        conditional, v = ctx.saved_tensors
        grad_conditional = (v @ grad_values.transpose(-1, -2)).transpose(-1, -2)
        return grad_conditional, conditional.transpose(-1, -2) @ grad_values


def solve(
    scores: Tensor,
    log_a: Tensor,
    log_b: Tensor,
    *,
    num_updates: int,
    tolerance: float | None = None,
    log_factor: Tensor | None = None,
) -> Plan:
    """The entropic plan after ``num_updates`` half-updates.

    It converges to the plan P that maximises ``⟨P, scores⟩ + H(P)`` over U(a, b), the matrices with the row sums a and
    the column sums b. The half-updates alternate between columns and rows and end with the rows, as a softmax over the
    columns. So rows are exact up to rounding after any number of updates, and ``num_updates=1`` is the softmax of the
    scores.

    On a CPU the updates scale the rows and columns of ``exp(scores)``
    (:func:`~fairseq_lot.transport.sinkhorn_scaling.scaled_conditional`). With extreme scores, with a factor and on
    other devices the updates run in the log domain: on a GPU the host would wait to learn whether scores are extreme.
    On CUDA one fused kernel does all updates; :mod:`~fairseq_lot.kernels.choice` says when.

    Args:
        scores: ``(..., n, m)``, already divided by epsilon; at least float32.
        log_a: ``(..., n)``, log row masses, -inf = no mass (padding).
        log_b: ``(..., m)``, log column masses, -inf = no mass.
        num_updates: number of half-updates, S in [Sinkformer], T in [LOTFormer].
        tolerance: stop early, once both sides were updated and the largest marginal error in the batch is at most this;
            one host sync per pair of half-updates.
        log_factor: ``(..., n, m)``, log of a factor: the finished plan is multiplied by it, then its rows are made
            exact again. Columns then do not converge.

    Returns:
        The plan. Its rows are exact.

    Examples:
        >>> scores = torch.tensor([[2.0, 0.0], [1.0, 0.0]])
        >>> half = torch.tensor([0.5, 0.5]).log()
        >>> solve(scores, half, half, num_updates=1).conditional  # the softmax of each row
        tensor([[0.8808, 0.1192],
                [0.7311, 0.2689]])
        >>> solve(scores, half, half, num_updates=15).plan.sum(0)  # each column receives its share
        tensor([0.5000, 0.5000])
    """
    conditional = None
    if num_updates > 1 and log_factor is None:
        if tolerance is None and kernels.wanted(scores):
            conditional = kernels.try_fused_sinkhorn(scores, log_a, log_b, num_updates=num_updates)
        if conditional is None and ways(scores).looks:
            conditional = scaled_conditional(scores, log_a, log_b, num_updates=num_updates, tolerance=tolerance)
    if conditional is None:
        conditional = log_domain_sinkhorn(
            scores, log_a, log_b, num_updates=num_updates, tolerance=tolerance, log_factor=log_factor
        )
    return Plan(conditional, log_a, log_b)
