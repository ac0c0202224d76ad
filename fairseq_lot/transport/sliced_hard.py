"""Expected sliced plans from exact sorts: nothing of size n×m is made, forward or backward [ESPFormer]."""

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from fairseq_lot.transport.marginals import num_real
from fairseq_lot.transport.sliced_soft import sort_real


def segments(
    n: torch.Tensor, m: torch.Tensor, tgt_len: int, src_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The exact plan between two sorted uniform measures, as the pieces into which i/n and j/m cut [0, 1].

    It has the entries of :func:`~fairseq_lot.transport.sliced_soft.staircase`, ``n + m - 1`` at most. Whole numbers of
    ``1/(n·m)`` are merged, so that no rounding decides which piece belongs to whom.

    Args:
        n, m: ``(bsz,)`` whole numbers of real points on either side.
        tgt_len, src_len: padded sizes.

    Returns:
        ``(bsz, tgt_len + src_len - 1)`` each: rank of the query and of the key of every piece, and its length in
        units of ``1/(n·m)``; superfluous pieces have length 0.
    """
    n, m = n[:, None], m[:, None]
    i, j = (torch.arange(1, size + 1, device=n.device) for size in (tgt_len, src_len))
    ends = torch.cat([i * m, j * n], 1)
    ends = ends.minimum(n * m).sort(1).values[:, :-1]  # the last two are both the end of the line
    starts = torch.nn.functional.pad(ends[:, :-1], (1, 0))
    return (starts // m).clamp(max=tgt_len - 1), (starts // n).clamp(max=src_len - 1), ends - starts


@dataclass(frozen=True)
class HardSlicedPlan:
    """``G = Σ_l σ_l U_l``, each U_l a list of entries.

    Attributes:
        weights: σ, ``(bsz, num_heads, L)``.
        rows, columns: ``(bsz, num_heads, L, S)`` query and key of the S entries of each U_l; rows is None when entry
            i belongs to query i.
        share: ``(bsz, 1, S)``, the entries of n·U_l; None when all are 1.
        tgt_len: number of queries.
    """

    weights: torch.Tensor
    rows: torch.Tensor | None
    columns: torch.Tensor
    share: torch.Tensor | None
    tgt_len: int

    def apply(self, v: torch.Tensor) -> torch.Tensor:
        """``n·G v``: ``(bsz, num_heads, src_len, c) -> (bsz, num_heads, tgt_len, c)``, v zero at pads."""
        return _Apply.apply(self.weights, v.contiguous(), self.rows, self.columns, self.share, self.tgt_len)


def hard_sliced_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    slices: torch.Tensor | int,
    *,
    same_number: bool,
    query_padding_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    inverse_temperature: float,
) -> HardSlicedPlan:
    """Sort both sides exactly along every slice, weigh the slices by the cost of their plans.

    Time is O(L n log n + L n d) and memory O(n d + L n), backward too: a slice's rows are gathered again rather than
    kept. Equal values keep the order of their tokens. Gradients go through v and through the weights to q and k; the
    plans are piecewise constant in the slices, whose gradient is 0.

    Args:
        q: ``(bsz, num_heads, tgt_len, d)`` and k: ``(bsz, num_heads, src_len, d)``, zero at pads.
        slices: ``(num_heads, L, d)``, one direction a row; a number L for the first L coordinate axes.
        same_number: queries and keys are equally many in each sentence.
        query_padding_mask, key_padding_mask: ``(bsz, len)`` bool, True = pad; or None.
        inverse_temperature: τ of ``σ_l ∝ exp(-τ ⟨C, U_l⟩)``, C the squared distances.
    """
    q, k = q.contiguous(), k.contiguous()
    tgt_len, src_len = q.size(-2), k.size(-2)
    query_order, key_order = _order(q, slices, query_padding_mask), _order(k, slices, key_padding_mask)
    n = num_real(query_padding_mask, q)
    if same_number:  # pads stand last on both sides and are zero, so they add nothing
        rows, share, columns = None, None, key_order.gather(-1, _inverse(query_order))
        mass = (1 / n.to(q.dtype))[:, None, None]
    else:
        m = num_real(key_padding_mask, k)
        row, column, length = segments(n, m, tgt_len, src_len)
        shape = (*query_order.shape[:-1], length.size(-1))
        rows = query_order.gather(-1, row[:, None, None].expand(shape))
        columns = key_order.gather(-1, column[:, None, None].expand(shape))
        share = (length / m[:, None].to(q.dtype))[:, None]
        mass = share / n[:, None, None]
    costs = _Costs.apply(q, k, None if isinstance(slices, int) else slices, rows, columns, mass)
    return HardSlicedPlan(torch.softmax(-inverse_temperature * costs, -1), rows, columns, share, tgt_len)


class _Costs(torch.autograd.Function):
    """``⟨C, U_l⟩`` of every slice, ``(bsz, num_heads, L)``."""

    @staticmethod
    def forward(ctx, q, k, slices, rows, columns, mass):
        ctx.save_for_backward(q, k, slices, rows, columns, mass)
        differences = (_take(q, row) - _take(k, column) for row, column in _each_slice(rows, columns))
        return torch.stack([(x.square_().sum(-1) * mass).sum(-1) for x in differences], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        q, k, slices, rows, columns, mass = ctx.saved_tensors
        grad_q, grad_k = torch.zeros_like(q), torch.zeros_like(k)
        for index, (row, column) in enumerate(_each_slice(rows, columns)):
            pull = _take(q, row) - _take(k, column)
            pull *= (2 * gradient[..., index, None] * mass).unsqueeze(-1)
            _add(grad_q, row, pull)
            _add(grad_k, column, pull.neg_())
        return grad_q, grad_k, None if slices is None else torch.zeros_like(slices), None, None, None


class _Apply(torch.autograd.Function):
    """``Σ_l σ_l (n·U_l) v``."""

    @staticmethod
    def forward(ctx, weights, v, rows, columns, share, tgt_len):
        ctx.save_for_backward(weights, v, rows, columns, share)
        values = v.new_zeros((*v.shape[:2], tgt_len, v.size(-1)))
        for index, (row, column) in enumerate(_each_slice(rows, columns)):
            _add(values, row, _take(v, column).mul_(_entries(weights, index, share)))
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        weights, v, rows, columns, share = ctx.saved_tensors
        gradient, grad_v, grad_weights = gradient.contiguous(), torch.zeros_like(v), []
        for index, (row, column) in enumerate(_each_slice(rows, columns)):
            arriving = _take(gradient, row)
            inner = (arriving * _take(v, column)).sum(-1)
            grad_weights.append((inner if share is None else inner * share).sum(-1))
            _add(grad_v, column, arriving * _entries(weights, index, share))
        return torch.stack(grad_weights, -1), grad_v, None, None, None, None


def _entries(weights, index, share):
    """σ_l n·U_l of slice l, to be multiplied with rows, ``(bsz, num_heads, S or 1, 1)``."""
    weight = weights[..., index, None]
    return (weight if share is None else weight * share).unsqueeze(-1)


def _each_slice(rows, columns):
    """Pairs of ``(bsz, num_heads, S)``, one a slice."""
    columns = columns.unbind(2)
    return zip([None] * len(columns) if rows is None else rows.unbind(2), columns, strict=True)


def _order(x, slices, padding_mask):
    """Rank -> token along every slice, ``(bsz, num_heads, L, n)``, pads last, equals in the order of tokens."""
    with torch.no_grad():
        lines = x[..., :slices].transpose(-1, -2) if isinstance(slices, int) else _project(x, slices)
        return sort_real(lines, None if padding_mask is None else padding_mask[:, None, None, :])[1]


def _project(x, slices):
    """``(bsz, num_heads, L, n)`` projections, the same for equal tokens anywhere in any batch.

    A matrix product has no fixed order of its sums, and a last bit would decide between equal tokens.
    """
    tokens = x.transpose(-1, -2).contiguous()
    lines = torch.zeros((*x.shape[:2], slices.size(-2), x.size(-2)), dtype=x.dtype, device=x.device)
    product = torch.empty_like(lines)
    for axis in range(x.size(-1)):
        torch.mul(slices[..., axis, None], tokens[:, :, axis, None], out=product)
        lines += product
    return lines


def _inverse(permutation):
    ranks = torch.arange(permutation.size(-1), device=permutation.device).expand_as(permutation)
    return torch.empty_like(permutation).scatter_(-1, permutation, ranks)


def _flat(index, length):
    """``(bsz, num_heads, S)`` tokens of a sentence and head -> rows of the flattened ``(bsz·num_heads·length, c)``."""
    bsz, num_heads, _ = index.shape
    start = length * torch.arange(bsz * num_heads, device=index.device).view(bsz, num_heads, 1)
    return (index + start).flatten()


def _take(x, index):
    """Rows of ``(bsz, num_heads, n, c)`` in the order of ``(bsz, num_heads, S)``; all of them for None."""
    if index is None:
        return x
    return x.flatten(0, 2).index_select(0, _flat(index, x.size(2))).view(*index.shape, x.size(-1))


def _add(total, index, x):
    """Add ``(bsz, num_heads, S, c)`` to these rows of ``total``, in place."""
    if index is None:
        total += x
    else:
        total.view(-1, total.size(-1)).index_add_(0, _flat(index, total.size(2)), x.flatten(0, 2))
