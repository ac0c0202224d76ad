"""Sinkhorn by scaling: exponentiate the scores once, then multiply the kernel by vectors [Cuturi13]."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_lot.numerics.autograd import once_in_full_precision
from fairseq_lot.transport.exporting import is_exporting


def scaled_conditional(
    scores: Tensor, log_a: Tensor, log_b: Tensor, *, num_updates: int, tolerance: float | None = None
) -> Tensor | None:
    """The conditional of :func:`~fairseq_lot.transport.sinkhorn.solve`, or None if the scores are too extreme.

    The updates scale the rows and columns of ``K = exp(scores)``, with scores shifted if they are large. Each update
    costs one product of K with a vector. Entries that underflow in K must be negligible in every sum; the smallest and
    the largest sum show it. Reading them would make the host wait for a GPU, so this function is for CPUs.

    The gradient is the exact gradient of all updates. Each update contributes the plan times an outer product of two
    vectors, entry by entry. So the forward pass stores the plan and vectors only, and the backward pass applies all
    updates as one matrix of rank ``num_updates``.

    Args:
        scores, log_a, log_b, num_updates, tolerance: as for ``solve``.

    Returns:
        ``(..., n, m)``; None also during torch.export and for one update (a softmax).
    """
    if is_exporting():
        return None
    with torch.no_grad(), torch.autocast(scores.device.type, enabled=False):
        solution = _solve(scores, log_a, log_b, num_updates, tolerance)
        is_safe = solution.is_safe()
        if not is_safe:
            # retry with scores shifted on the side that is updated first: its sums are then at least 1
            shifted = scores - scores.amax(-1 if num_updates % 2 else -2, keepdim=True)
            solution = _solve(shifted, log_a, log_b, num_updates, tolerance)
            is_safe = solution.is_safe()
    return _Unrolled.apply(scores, log_a, log_b, solution) if is_safe else None


class _Masses(NamedTuple):
    """The masses of one side, ``(G or 1, n)`` or ``(G or 1, m)``; G as in :class:`_Solution`.

    Attributes:
        mass: the exponential of the log mass; 0 also where it underflows.
        has_mass: 1 where the log mass is above -inf, else 0.
        divisor: the mass where there is one, else 1.
    """

    mass: Tensor
    has_mass: Tensor
    divisor: Tensor


@dataclass(frozen=True)
class _Solution:
    """The result of the updates, with the vectors that the gradient needs; G is the product of the leading sizes.

    Attributes:
        conditional: ``(G, n, m)``, ``K_ij w_j`` divided by its row sums.
        a, b: the masses of the rows and of the columns.
        least_mass: the least divisor of both.
        row_sums: ``K w`` of each row update, ``(G, n)``; the last ones are the row sums of ``K_ij w_j`` above.
        column_sums: ``Kᵀ u`` of each column update, ``(G, m)``.
    """

    conditional: Tensor
    a: _Masses
    b: _Masses
    least_mass: float
    row_sums: list[Tensor]
    column_sums: list[Tensor]

    def is_safe(self) -> bool:
        """Whether all sums, and the masses that the gradient divides by, are large enough.

        An entry that underflows in K then changes no sum by more than rounding, after any scaling.
        """
        if not self.column_sums:
            return False  # one update is a softmax; the log domain does it
        low_row, high_row = (x.item() for x in torch.cat(self.row_sums).aminmax())
        low_column, high_column = (x.item() for x in torch.cat(self.column_sums).aminmax())
        info = torch.finfo(self.conditional.dtype)
        spread = max(*self.conditional.shape[1:], high_row * high_column)
        return (  # false for NaN
            low_row * low_column * info.eps >= info.tiny * spread
            # the gradient multiplies and divides masses by ratios of sums
            and self.least_mass * low_row * info.eps >= info.tiny * high_row
            and self.least_mass * low_column * info.eps >= info.tiny * high_column
        )


def _solve(scores, log_a, log_b, num_updates, tolerance):
    """The solution after all half-updates, the rows last; arguments as for :func:`scaled_conditional`."""
    *lead, n, m = scores.shape
    kernel = _exp(scores)
    (of_rows, least_row), (of_columns, least_column) = _masses(log_a, lead), _masses(log_b, lead)
    a, b = of_rows.mass, of_columns.mass
    # scalings start at 1 where there is mass, at 0 elsewhere
    u, w = (side.has_mass.expand(kernel.size(0), -1) for side in (of_rows, of_columns))
    row_sums: list[Tensor] = []
    column_sums: list[Tensor] = []
    for left in range(num_updates - 1, 0, -1):  # all half-updates but the last one
        if left % 2 == 0:
            row_sums.append(_rows(kernel, w))
            u = a / row_sums[-1]
            continue
        sums = _columns(kernel, u)
        if tolerance is not None and row_sums and column_sums and (w * sums - b).abs().sum(-1).max() <= tolerance:
            row_sums.pop()  # this row update becomes the last one, made below
            break
        column_sums.append(sums)
        w = b / sums
    kernel *= w.unsqueeze(-2)
    row_sums.append(kernel.sum(-1))
    kernel *= row_sums[-1].reciprocal().unsqueeze(-1)
    return _Solution(kernel, of_rows, of_columns, min(least_row, least_column), row_sums, column_sums)


def _exp(scores):
    """``exp(scores)``, ``(G, n, m)``, stored row-major or column-major as the scores are."""
    *lead, n, m = scores.shape
    if scores.stride(-1) > scores.stride(-2):
        return _exp(scores.transpose(-1, -2)).transpose(-1, -2)
    kernel = torch.empty((*lead, n, m), dtype=scores.dtype, device=scores.device)
    return torch.exp(scores, out=kernel).view(-1, n, m)


def _masses(log_mass, lead):
    """The masses of one side, with the least divisor.

    Args:
        log_mass: the log masses, ``(..., n)``.
        lead: the leading sizes of the scores.
    """
    is_shared = log_mass.dim() == 1  # by all sentences: there are no pads
    log_mass = log_mass.unsqueeze(0) if is_shared else log_mass.expand(*lead, -1).flatten(0, -2)
    mass = log_mass.exp()
    if is_shared and (least := mass.amin().item()) > 0:
        return _Masses(mass, torch.ones_like(mass), mass), least
    has_mass = torch.gt(log_mass, -torch.inf, out=torch.empty_like(log_mass))
    divisor = torch.lerp(mass.new_ones(()), mass, has_mass)  # one kernel, nine times as fast as mass.pow(has_mass)
    return _Masses(mass, has_mass, divisor), divisor.amin().item()


def _rows(matrix, w):
    """``matrix @ w``, ``(G, n, m), (G, m) -> (G, n)``; as ``wᵀ matrixᵀ``, which is faster."""
    return torch.bmm(w.unsqueeze(-2), matrix.transpose(-1, -2)).squeeze(-2)


def _columns(matrix, u):
    """``matrixᵀ @ u``, ``(G, n, m), (G, n) -> (G, m)``."""
    return torch.bmm(u.unsqueeze(-2), matrix).squeeze(-2)


class _Unrolled(torch.autograd.Function):
    """Return the conditional of a solution; its backward pass is the gradient of all updates."""

    @staticmethod
    def forward(ctx, scores, log_a, log_b, solution):
        sums = *solution.row_sums, *solution.column_sums
        ctx.save_for_backward(solution.conditional, *solution.a, *solution.b, *sums)
        ctx.num_row_sums = len(solution.row_sums)
        ctx.shapes = scores.shape, log_a.shape, log_b.shape
        return solution.conditional.view(scores.shape)

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_conditional):
        plan, *saved = ctx.saved_tensors
        a, b, sums = _Masses(*saved[:3]), _Masses(*saved[3:6]), saved[6:]
        row_sums, column_sums = sums[: ctx.num_row_sums], sums[ctx.num_row_sums :]
        grad_scores = plan * grad_conditional.reshape(plan.shape)
        mean = grad_scores.sum(-1)
        grad_log_w = grad_scores.sum(-2) - _columns(plan, mean)
        left, right, grad_log_a, grad_log_b = _undo_updates(plan, a, b, row_sums, column_sums, grad_log_w)
        left[:, 0], right[:, 0] = mean, 1.0
        grad_scores.addcmul_(plan, _outer(left, right, plan), value=-1)
        shape, shape_a, shape_b = ctx.shapes
        needs_a, needs_b = ctx.needs_input_grad[1:3]
        return (
            grad_scores.view(shape),
            grad_log_a.view(*shape[:-2], -1).sum_to_size(shape_a) if needs_a else None,
            grad_log_b.view(*shape[:-2], -1).sum_to_size(shape_b) if needs_b else None,
            None,
        )


def _undo_updates(plan, a, b, row_sums, column_sums, grad_log_w):
    """Carry the gradient of log w, the last scaling of the columns, back through all updates but the last.

    An update of the columns is ``log w = log b - log Kᵀu``, one of the rows ``log u = log a - log K w``. With g the
    gradient of log w, and all products entry by entry,

        ∂ log_b = g,    ∂ scores_ij = -K_ij u_i (g w / b)_j,    ∂ log u = -u K(g w / b)

    and the same for the rows, with u and w, a and b exchanged. Scaling K by rows and columns changes no plan, so K is
    replaced by the plan, ``K_ij w_j / r_i`` with the last w and the last row sums r. Then each u is multiplied by r and
    each w divided by the last w: both become ratios of stored sums. docs/internals.md derives it.

    Args:
        plan: ``(G, n, m)``, rows divided by their sums.
        a, b, row_sums, column_sums: as in :class:`_Solution`.
        grad_log_w: ``(G, m)``.

    Returns:
        left, right: ``(G, T, n)`` and ``(G, T, m)`` for T updates. ``plan_ij Σ_t left_ti right_tj`` is to be subtracted
        from the gradient of the scores. Index t = 0, the last update, is left for the caller to fill.
        grad_log_a, grad_log_b: ``(G, n)`` and ``(G, m)``.
    """
    last_row, last_column = row_sums[-1], column_sums[-1]
    # both lists start with the last update: w[i] was computed from u[i], and u[i] from w[i + 1]
    u = [a.mass * (last_row / sums) for sums in reversed(row_sums[:-1])]
    w = [last_column / sums for sums in reversed(column_sums)]
    if len(u) == len(w):  # the first update was of the rows, with the initial scaling of the columns
        w.append(last_column / b.divisor * b.has_mass)
    else:
        u.append(last_row * a.has_mass)
    num_updates = len(row_sums) + len(column_sums)
    left, right = (x.new_empty(x.size(0), num_updates, x.size(1)) for x in (last_row, last_column))
    grad_log_a, grad_log_b = torch.zeros_like(last_row), torch.zeros_like(last_column)
    for undone in range(1, num_updates):
        i = (undone - 1) // 2
        if undone % 2 == 1:  # w[i] = b / (columns of the plan summed with u[i])
            left[:, undone] = u[i]
            torch.mul(grad_log_w, w[i] / b.divisor, out=right[:, undone])
            grad_log_u = -u[i] * _rows(plan, right[:, undone])
            grad_log_b += grad_log_w
        else:  # u[i] = a / (rows of the plan summed with w[i + 1])
            right[:, undone] = w[i + 1]
            torch.mul(grad_log_u, u[i] / a.divisor, out=left[:, undone])
            grad_log_w = -w[i + 1] * _columns(plan, left[:, undone])
            grad_log_a += grad_log_u
    return left, right, grad_log_a, grad_log_b


def _outer(left, right, like):
    """``leftᵀ right``, ``(G, T, n), (G, T, m) -> (G, n, m)``, stored row-major or column-major as ``like``."""
    if like.stride(-1) > like.stride(-2):
        return torch.bmm(right.transpose(-1, -2), left).transpose(-1, -2)
    return torch.bmm(left.transpose(-1, -2), right)
