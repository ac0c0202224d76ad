"""Expected sliced plans from exact sorts, without any n×m matrix, forward or backward [ESPFormer]."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_lot.numerics.autograd import once_in_full_precision
from fairseq_lot.numerics.devices import ways
from fairseq_lot.transport.marginals import num_real
from fairseq_lot.transport.sliced_soft import sort_real


def segments(n: Tensor, m: Tensor, tgt_len: int, src_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """The exact plan between two sorted uniform measures, as pieces: the points i/n and j/m cut [0, 1] into them.

    The pieces are the entries of :func:`~fairseq_lot.transport.sliced_soft.staircase`, at most ``n + m - 1``. They are
    computed in whole numbers of ``1/(n·m)``, without rounding.

    Args:
        n, m: ``(bsz,)`` integers, real points on each side.
        tgt_len, src_len: padded sizes.

    Returns:
        ``(bsz, tgt_len + src_len - 1)`` each: for each piece the rank of its query, the rank of its key, and its length
        in units of ``1/(n·m)``. Superfluous pieces have length 0.
    """
    n, m = n[:, None], m[:, None]
    i, j = (torch.arange(1, size + 1, device=n.device) for size in (tgt_len, src_len))
    ends = torch.cat([i * m, j * n], 1)
    ends = ends.minimum(n * m).sort(1).values[:, :-1]  # the last two are both the end of the line
    starts = torch.nn.functional.pad(ends[:, :-1], (1, 0))
    return (starts // m).clamp(max=tgt_len - 1), (starts // n).clamp(max=src_len - 1), ends - starts


class _Matching(NamedTuple):
    """The plans ``n·U_l`` for equally many queries and keys: permutations. G is bsz × num_heads.

    Attributes:
        columns: ``(G, L, n)``, the key of each query in each slice.
    """

    columns: Tensor

    def transposed(self) -> "_Matching":
        """The transposed plans."""
        return _Matching(_inverse(self.columns))

    def part(self, groups: slice, lines: slice) -> "_Matching":
        """The plans of some slices of some groups. The methods below are called on such parts, to bound memory."""
        return _Matching(self.columns[groups, lines])

    def squares(self, q: Tensor, k: Tensor) -> Tensor:
        """Terms whose sum over the last axis is ``n ⟨C, U_l⟩``, with the squared distances C: ``(G, L, n·d)``."""
        return _take(k, self.columns).sub_(q.unsqueeze(1)).square_().flatten(2)

    def add_values(self, out: Tensor, weights: Tensor, x: Tensor) -> None:
        """Add ``Σ_l weights_l (n·U_l) x`` to ``out``, ``(G, n, c)``."""
        out.view(len(out), 1, -1).baddbmm_(weights.unsqueeze(1), _take(x, self.columns).flatten(2))

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """``⟨x yᵀ, n·U_l⟩``, ``(G, L)``."""
        taken = _take(y, self.columns).flatten(2)
        return torch.bmm(x.flatten(1).unsqueeze(1), taken.transpose(1, 2)).squeeze(1)


class _Segments(NamedTuple):
    """The plans ``n·U_l`` for any numbers of queries and keys, as lists of S entries; methods as in :class:`_Matching`.

    Attributes:
        columns: ``(G, L, S)``, the key of each entry.
        rows: ``(G, L, S)``, the query of each entry.
        share: ``(G, S)``, the value of each entry, equal in all slices.
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
        out.view(-1, out.size(-1)).index_add_(0, _flat_index(self.rows, out.size(1)), taken.flatten(0, 2))

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
    """The weighted mean of exact sliced plans, ``G = Σ_l σ_l U_l``, as a function ``v -> n·G v``.

    U_l sorts queries and keys along slice l and couples them in order. ``σ_l ∝ exp(-τ ⟨C, U_l⟩)``, where C holds the
    squared distances.

    Time is O(L n log n + L n d), memory O(n d + L n) plus one chunk, forward and backward. A chunk is as many slices as
    fit into a temporary tensor of fixed size; the backward pass gathers the sorted tokens again. Tokens with equal
    projections keep their order. Gradients go to v and, through σ, to q and k. The plans are piecewise constant in the
    slices, so the slices get the gradient 0.

    Args:
        q: ``(bsz, num_heads, tgt_len, d)`` and k: ``(bsz, num_heads, src_len, d)``, zero at pads.
        slices: ``(num_heads, L, d)``, one direction per row; or a number L: the first L coordinate axes.
        same_number: each sentence has equally many queries and keys.
        query_padding_mask, key_padding_mask: ``(bsz, len)`` bool, True = pad; or None.
        inverse_temperature: τ.

    Returns:
        A function from ``(bsz, num_heads, src_len, c)`` to ``(bsz, num_heads, tgt_len, c)``.
    """
    lead, tgt_len, src_len = q.shape[:2], q.size(-2), k.size(-2)
    query_order, key_order = _order(q, slices, query_padding_mask), _order(k, slices, key_padding_mask)
    n = num_real(query_padding_mask, q)
    if same_number:  # pads are sorted last on both sides and are zero, so matching them adds nothing
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
    """``⟨C, U_l⟩`` of each slice, ``(G, L)``, from q, ``(G, n, d)``, and k, ``(G, m, d)``."""

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
        # U_l has the marginals 1/n and 1/m, so ⟨C, U_l⟩ = mean ‖q_i‖² + mean ‖k_j‖² - 2 ⟨q kᵀ, U_l⟩
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
    """Pairs of slice objects ``(groups, lines)`` for parts of about ``chunk`` elements.

    Args:
        num_groups, num_lines: the sizes of the two axes that are cut; a line is one slice of ESP.
        size: number of elements per group and line.
        chunk: number of elements in a part.
    """
    lines = max(1, min(num_lines, chunk // size))
    groups = max(1, chunk // (size * num_lines))
    for i in range(0, num_groups, groups):
        for line in range(0, num_lines, lines):
            yield slice(i, i + groups), slice(line, line + lines)


def _parts(plans, width):
    """:func:`_chunks` of plans whose entries take ``width`` elements each."""
    num_groups, num_lines, size = plans.columns.shape
    return _chunks(num_groups, num_lines, size * width, ways(plans.columns).hard_chunk)


def _for_each_head(x, num_heads):
    """``(bsz, ...) -> (bsz·num_heads, ...)``."""
    return x.repeat_interleave(num_heads, 0)


def _order(x, slices, padding_mask):
    """The token of each rank along each slice, ``(G, L, n)``: a stable sort, pads last."""
    with torch.no_grad():
        lines = x[..., :slices].transpose(-1, -2) if isinstance(slices, int) else _project(x, slices)
        return sort_real(lines, None if padding_mask is None else padding_mask[:, None, None, :])[1].flatten(0, 1)


def _project(x, slices):
    """Projections, ``(bsz, num_heads, L, n)``, bit for bit equal for equal tokens, wherever they are in a batch.

    A matrix product has no fixed order of summation, and a difference in the last bit would decide the order of equal
    tokens. Here the products are summed pairwise.
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


def _flat_index(index, length):
    """Indices of tokens in their group, ``(G, L, S)``, as indices of rows of a ``(G·length, c)``: ``(G·L·S,)``."""
    start = length * torch.arange(index.size(0), device=index.device).view(-1, 1, 1)
    return (index + start).flatten()


def _take(x, index):
    """The rows of x at the indices: ``(G, n, c), (G, L, S) -> (G, L, S, c)``."""
    return x.flatten(0, 1).index_select(0, _flat_index(index, x.size(1))).view(*index.shape, x.size(-1))
