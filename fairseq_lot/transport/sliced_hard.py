"""Expected sliced plans from exact sorts: nothing of size n×m is made, forward or backward [ESPFormer]."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_lot.numerics.autograd import once_in_full_precision
from fairseq_lot.numerics.devices import ways
from fairseq_lot.transport.marginals import num_real
from fairseq_lot.transport.sliced_soft import sort_real


def segments(n: Tensor, m: Tensor, tgt_len: int, src_len: int) -> tuple[Tensor, Tensor, Tensor]:
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


class _Matching(NamedTuple):
    """The plans ``n·U_l`` of as many queries as keys: each query has one key. G is the product of the leading sizes.

    Attributes:
        columns: ``(G, L, n)``, the key of each query in every slice.
    """

    columns: Tensor

    def transposed(self) -> "_Matching":
        """The transposed plans."""
        return _Matching(_inverse(self.columns))

    def part(self, groups: slice, lines: slice) -> "_Matching":
        """The plans of some slices of some groups; the methods below are called on these."""
        return _Matching(self.columns[groups, lines])

    def squares(self, q: Tensor, k: Tensor) -> Tensor:
        """Terms whose sums over the last axis are ``n ⟨C, U_l⟩``, ``(G, L, n·d)``."""
        return _take(k, self.columns).sub_(q.unsqueeze(1)).square_().flatten(2)

    def add_values(self, out: Tensor, weights: Tensor, x: Tensor) -> None:
        """Add ``Σ_l weights_l (n·U_l) x`` to ``out``, ``(G, n, c)``."""
        out.view(len(out), 1, -1).baddbmm_(weights.unsqueeze(1), _take(x, self.columns).flatten(2))

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """``⟨x yᵀ, n·U_l⟩``, ``(G, L)``."""
        taken = _take(y, self.columns).flatten(2)
        return torch.bmm(x.flatten(1).unsqueeze(1), taken.transpose(1, 2)).squeeze(1)


class _Segments(NamedTuple):
    """The plans ``n·U_l`` of any numbers of queries and keys, as lists of S entries; methods as of :class:`_Matching`.

    Attributes:
        columns: ``(G, L, S)``, the key of each entry.
        rows: ``(G, L, S)``, its query.
        share: ``(G, S)``, the entries themselves, the same in every slice.
    """

    columns: Tensor
    rows: Tensor
    share: Tensor

    def transposed(self) -> "_Segments":
        return _Segments(self.rows, self.columns, self.share)

    def part(self, groups: slice, lines: slice) -> "_Segments":
        return _Segments(self.columns[groups, lines], self.rows[groups, lines], self.share[groups])

    def squares(self, q: Tensor, k: Tensor) -> Tensor:
        squares = _take(k, self.columns).sub_(_take(q, self.rows)).square_().sum(-1)
        squares *= self.share.unsqueeze(1)
        return squares

    def add_values(self, out: Tensor, weights: Tensor, x: Tensor) -> None:
        taken = _take(x, self.columns)
        taken *= (weights.unsqueeze(-1) * self.share.unsqueeze(1)).unsqueeze(-1)
        out.view(-1, out.size(-1)).index_add_(0, _flat(self.rows, out.size(1)), taken.flatten(0, 2))

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        taken = _take(y, self.columns)
        taken *= _take(x, self.rows)
        return (taken.sum(-1) * self.share.unsqueeze(1)).sum(-1)


def hard_sliced_plan(
    q: Tensor,
    k: Tensor,
    slices: Tensor | int,
    *,
    same_number: bool,
    query_padding_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    inverse_temperature: float,
) -> Callable[[Tensor], Tensor]:
    """The mean of exact sliced plans, ``G = Σ_l σ_l U_l``, as ``v -> n·G v``.

    Both sides are sorted along every slice; σ weighs the slices by the cost of their plans.

    Time is O(L n log n + L n d) and memory O(n d + L n) and a chunk, backward too: the tokens in the order of a slice
    are gathered again rather than kept. As many slices as fill a chunk are worked on at once. Equal values keep the
    order of their tokens. Gradients go through v and through the weights to q and k; the plans are piecewise constant
    in the slices, whose gradient is 0.

    Args:
        q: ``(bsz, num_heads, tgt_len, d)`` and k: ``(bsz, num_heads, src_len, d)``, zero at pads.
        slices: ``(num_heads, L, d)``, one direction a row; a number L for the first L coordinate axes.
        same_number: queries and keys are equally many in each sentence.
        query_padding_mask, key_padding_mask: ``(bsz, len)`` bool, True = pad; or None.
        inverse_temperature: τ of ``σ_l ∝ exp(-τ ⟨C, U_l⟩)``, C the squared distances.
    """
    lead, tgt_len, src_len = q.shape[:2], q.size(-2), k.size(-2)
    query_order, key_order = _order(q, slices, query_padding_mask), _order(k, slices, key_padding_mask)
    n = num_real(query_padding_mask, q)
    if same_number:  # pads stand last on both sides and are zero, so they add nothing
        m = n
        plans: _Matching | _Segments = _Matching(key_order.gather(-1, _inverse(query_order)))
    else:
        m = num_real(key_padding_mask, k)
        row, column, length = (_for_each_head(x, lead[1]) for x in segments(n, m, tgt_len, src_len))
        shape = (*query_order.shape[:-1], length.size(-1))
        plans = _Segments(
            key_order.gather(-1, column.unsqueeze(1).expand(shape)),
            query_order.gather(-1, row.unsqueeze(1).expand(shape)),
            length / _for_each_head(m, lead[1]).unsqueeze(-1).to(q.dtype),
        )
    numbers = [_for_each_head(x.to(q.dtype), lead[1])[:, None, None] for x in (n, m)]
    directions = None if isinstance(slices, int) else slices
    costs = _Costs.apply(*(x.flatten(0, 1).contiguous() for x in (q, k)), directions, plans, *numbers)
    weights = torch.softmax(-inverse_temperature * costs, -1)
    return lambda v: _Apply.apply(weights, v.flatten(0, 1).contiguous(), plans, tgt_len).unflatten(0, lead)


class _Costs(torch.autograd.Function):
    """``⟨C, U_l⟩`` of every slice, ``(G, L)``; q and k are ``(G, n, d)`` and ``(G, m, d)``."""

    @staticmethod
    def forward(ctx, q, k, slices, plans, n, m):
        ctx.save_for_backward(q, k, slices, n, m, *plans)
        ctx.kind = type(plans)
        costs = q.new_empty(plans.columns.shape[:2])
        for groups, lines in _parts(plans, q.size(-1)):
            squares = plans.part(groups, lines).squares(q[groups], k[groups])
            torch.sum(squares, -1, out=costs[groups, lines])
        return costs / n.squeeze(-1)

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_costs):
        q, k, slices, n, m, *plans = ctx.saved_tensors
        plans = ctx.kind(*plans)
        # U_l has the marginals 1/n and 1/m: -⟨C, U_l⟩/2 is ⟨q kᵀ, U_l⟩ less half of the mean squares of q and of k
        total = grad_costs.sum(-1)[:, None, None]
        grad_q = q * total - _combine(grad_costs, plans, k, q.size(1))
        grad_k = k * (total * n / m) - _combine(grad_costs, plans.transposed(), q, k.size(1))
        grad_slices = None if slices is None else torch.zeros_like(slices)
        return grad_q * (2 / n), grad_k * (2 / n), grad_slices, None, None, None


class _Apply(torch.autograd.Function):
    """``Σ_l σ_l (n·U_l) v``, ``(G, L), (G, m, c) -> (G, n, c)``."""

    @staticmethod
    def forward(ctx, weights, v, plans, tgt_len):
        ctx.save_for_backward(weights, v, *plans)
        ctx.kind = type(plans)
        return _combine(weights, plans, v, tgt_len)

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_values):
        weights, v, *plans = ctx.saved_tensors
        plans, grad_values = ctx.kind(*plans), grad_values.contiguous()
        grad_v = _combine(weights, plans.transposed(), grad_values, v.size(1))
        grad_weights = torch.empty_like(weights)
        for groups, lines in _parts(plans, v.size(-1)):
            grad_weights[groups, lines] = plans.part(groups, lines).inner(grad_values[groups], v[groups])
        return grad_weights, grad_v, None, None


def _combine(weights, plans, x, length):
    """``Σ_l weights_l (n·U_l) x``, ``(G, L), (G, m, c) -> (G, length, c)``."""
    combined = x.new_zeros(x.size(0), length, x.size(-1))
    for groups, lines in _parts(plans, x.size(-1)):
        plans.part(groups, lines).add_values(combined[groups], weights[groups, lines], x[groups])
    return combined


def _chunks(num_groups, num_lines, size, chunk):
    """Parts of two axes that have ``chunk`` elements together, when each place on them has ``size`` elements."""
    lines = max(1, min(num_lines, chunk // size))
    groups = max(1, chunk // (size * num_lines))
    for i in range(0, num_groups, groups):
        for line in range(0, num_lines, lines):
            yield slice(i, i + groups), slice(line, line + lines)


def _parts(plans, width):
    """Chunks of the groups and the slices; each entry takes a row of this width."""
    num_groups, num_lines, size = plans.columns.shape
    return _chunks(num_groups, num_lines, size * width, ways(plans.columns).hard_chunk)


def _for_each_head(x, num_heads):
    """``(bsz, ...) -> (bsz·num_heads, ...)``."""
    return x.repeat_interleave(num_heads, 0)


def _order(x, slices, padding_mask):
    """Rank -> token along every slice, ``(G, L, n)``, pads last, equals in the order of tokens."""
    with torch.no_grad():
        lines = x[..., :slices].transpose(-1, -2) if isinstance(slices, int) else _project(x, slices)
        return sort_real(lines, None if padding_mask is None else padding_mask[:, None, None, :])[1].flatten(0, 1)


def _project(x, slices):
    """``(bsz, num_heads, L, n)`` projections, the same for equal tokens anywhere in any batch.

    A matrix product has no fixed order of its sums, and a last bit would decide between equal tokens. Here the
    products are added in pairs, and the sums in pairs again.
    """
    tokens, slices = x.transpose(-1, -2).unsqueeze(-2).contiguous(), slices.transpose(-1, -2).unsqueeze(-1)
    lines = x.new_empty((*x.shape[:2], slices.size(-2), x.size(-2)))
    for sentences, part in _chunks(len(x), lines.size(2), x[0].numel(), ways(x).hard_chunk):
        sums = tokens[sentences] * slices[..., part, :]  # (bsz, num_heads, d, L, n)
        while (width := sums.size(2)) > 1:
            half = (width + 1) // 2
            sums[:, :, : width - half] += sums[:, :, half:]
            sums = sums[:, :, :half]
        lines[sentences, :, part] = sums.squeeze(2)
    return lines


def _inverse(permutation):
    ranks = torch.arange(permutation.size(-1), device=permutation.device).expand_as(permutation)
    return torch.empty_like(permutation).scatter_(-1, permutation, ranks)


def _flat(index, length):
    """``(G, L, S)`` tokens of a group -> rows of the flattened ``(G·length, c)``."""
    start = length * torch.arange(index.size(0), device=index.device).view(-1, 1, 1)
    return (index + start).flatten()


def _take(x, index):
    """``(G, n, c)`` in the order of ``(G, L, S)``: ``(G, L, S, c)``."""
    return x.flatten(0, 1).index_select(0, _flat(index, x.size(1))).view(*index.shape, x.size(-1))
