"""Expected sliced plans from soft sorts: average the one-dimensional plans of many projections [ESPFormer]."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import threshold

from fairseq_lot.numerics.autograd import once_in_full_precision
from fairseq_lot.numerics.devices import ways
from fairseq_lot.transport.marginals import num_real

# A sentence is long if it has more than _LONG · (width of q + width of v) tokens.
_LONG = 2.3


def staircase(n: Tensor, m: Tensor, tgt_len: int, src_len: int, dtype: torch.dtype) -> Tensor:
    """The exact plan I between two sorted uniform measures on a line.

    ``I_ij = |[i/n, (i+1)/n] ∩ [j/m, (j+1)/m]|``: the north-west corner rule.

    Args:
        n, m: ``(...)``, the numbers of real points of the two measures.
        tgt_len, src_len: padded sizes; rows from n on and columns from m on are zero.
        dtype: of the result.

    Returns:
        ``n·I``, ``(..., tgt_len, src_len)``. Real rows sum to 1; it is the identity when n = m.
    """
    n, m = n.to(dtype)[..., None, None], m.to(dtype)[..., None, None]
    i = torch.arange(tgt_len, device=n.device, dtype=dtype)[:, None]
    j = torch.arange(src_len, device=n.device, dtype=dtype)
    overlap = torch.minimum((i + 1) / n, (j + 1) / m) - torch.maximum(i / n, j / m)
    return n * overlap.clamp(min=0) * ((i < n) & (j < m))


def sort_real(values: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sort along the last axis: ascending, stable, pads last.

    Args:
        values: ``(..., n)``.
        padding_mask: ``(..., n)`` bool, broadcastable, True = pad; or None.

    Returns:
        The sorted values, 0 for pads, and the permutation; both ``(..., n)``.
    """
    if padding_mask is None:
        return values.sort(dim=-1, stable=True)
    ordered, permutation = values.masked_fill(padding_mask, torch.inf).sort(dim=-1, stable=True)
    return ordered.masked_fill(ordered.isposinf(), 0.0), permutation


class SoftSort(torch.autograd.Function):
    """``A_l[p, j] ∝ 2^-(sorted_lp - token_lj)²``, one row for each rank p in each slice l.

    Rows of real ranks sum to 1; rows of pads are zero. Each sorted value equals some token, so a row's sum before the
    division is at least 1.
    """

    @staticmethod
    def forward(ctx: Any, ordered: Tensor, tokens: Tensor, padding_mask: Tensor | None, real_ranks: Any) -> Tensor:
        """ordered, tokens: ``(..., L, n)``; padding_mask, real_ranks: ``(..., 1, n)``, or None and 1.0 without pads."""
        far = tokens if padding_mask is None else tokens.masked_fill(padding_mask, torch.inf)
        difference = ordered.unsqueeze(-1) - far.unsqueeze(-2)
        # exp2: exp takes up to three times as long on a CPU
        # drop what is below 1e-17, negligible in a sum of at least 1: exp2(-inf) and subnormals are 10 times slower
        sort = threshold(difference.square_().neg_().clamp_(min=-58.0).exp2_(), 1e-17, 0.0, inplace=True)
        sort *= (real_ranks / sort.sum(-1).clamp(min=1)).unsqueeze(-1)
        ctx.save_for_backward(ordered, tokens, sort)
        return sort

    @staticmethod
    @once_in_full_precision
    def backward(ctx: Any, grad_sort: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ordered, tokens, sort = ctx.saved_tensors
        pull = grad_sort * sort
        pull.addcmul_(sort, pull.sum(-1, keepdim=True), value=-1)  # gradient of the logits, as for any softmax
        # vectors are multiplied as rows: torch's products with a column take up to ten times as long
        # d/d sorted_p = -2 ln 2 Σ_j pull_pj (sorted_p - token_j), where Σ_j pull_pj = 0; the opposite for the tokens
        grad_ordered = 2 * math.log(2) * (tokens.unsqueeze(-2) @ pull.transpose(-1, -2)).squeeze(-2)
        grad_tokens = 2 * math.log(2) * ((ordered.unsqueeze(-2) @ pull).squeeze(-2) - pull.sum(-2) * tokens)
        return grad_ordered, grad_tokens, None, None


def soft_sliced_apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Tensor,
    rank_plan: Tensor | None = None,
    *,
    query_padding_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    temperature: float | Tensor,
    inverse_temperature: float,
) -> Tensor:
    """``n·G v`` for the mean of sliced plans, ``G = Σ_l σ_l U_l``, from soft sorts [ESPFormer].

    ``U_l = A_lᵀ I B_l``, where A_l and B_l sort queries and keys (:class:`SoftSort`) and I couples their ranks
    (:func:`staircase`). ``σ_l ∝ exp(-τ ⟨C, U_l⟩)``, where C holds the squared distances.

    For short sentences the plan of each slice is computed, in time O(n³) per slice. For long ones the plan is applied
    by sums over the tokens of each rank, in time O(n² d). A few sentences, heads or slices are computed at a time, so
    that their n×n matrices stay in the processor's cache. The backward pass computes them again.

    Args:
        q: ``(bsz, num_heads, tgt_len, d)``; k: ``(bsz, num_heads, src_len, d)``; v: ``(bsz, num_heads, src_len, c)``;
            zero at pads.
        slices: ``(num_heads, L, d)``, one direction per row.
        rank_plan: n·I, ``(bsz, tgt_len, src_len)``; None for the identity: equally many queries and keys in each
            sentence.
        query_padding_mask, key_padding_mask: ``(bsz, len)`` bool, True = pad; or None.
        temperature: t of the soft sort, in squared units of q.
        inverse_temperature: τ.

    Returns:
        ``(bsz, num_heads, tgt_len, c)``. G has total mass 1. With the identity as v the result is n·G.
    """
    per_sentence = rank_plan, query_padding_mask, key_padding_mask
    return _InChunks.apply(q, k, v, slices, per_sentence, (temperature, inverse_temperature))


class _InChunks(torch.autograd.Function):
    """:func:`_of_chunk` chunk by chunk; the backward pass computes each chunk again.

    Results are written into tensors allocated before the first chunk. Allocated between the large tensors of the
    chunks they would fragment the heap.
    """

    @staticmethod
    def forward(ctx, q, k, v, slices, per_sentence, temperatures):
        values = v.new_zeros(*q.shape[:-1], v.size(-1))
        log_weights = q.new_full(q.shape[:2], -torch.inf)  # log Σ_l exp(-τ ⟨C, U_l⟩) of the slices so far
        for places in _chunks(q, k, slices):
            at, parts = places[0], [x[place] for x, place in zip((q, k, v, slices), places, strict=True)]
            value, log_weight = _of_chunk(parts, at[0], per_sentence, temperatures)
            log_weights[at] = torch.logaddexp(log_weights[at], log_weight)
            values[at].lerp_(value, (log_weight - log_weights[at]).exp()[..., None, None])
        ctx.save_for_backward(q, k, v, slices, values, log_weights)
        ctx.problem = per_sentence, temperatures
        return values

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_values):
        *inputs, values, log_weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[:4]
        gradients: list[Any] = [torch.zeros_like(x) if need else None for x, need in zip(inputs, needed, strict=True)]
        for places in _chunks(inputs[0], inputs[1], inputs[3]):
            chunk = zip(inputs, places, needed, strict=True)
            at, parts = places[0], [x[place].detach().requires_grad_(need) for x, place, need in chunk]
            with torch.enable_grad():
                value, log_weight = _of_chunk(parts, at[0], *ctx.problem)
            grad_value = (log_weight.detach() - log_weights[at]).exp()[..., None, None] * grad_values[at]
            grad_log_weight = (grad_value * (value.detach() - values[at])).sum((-2, -1))
            with torch.enable_grad():
                change = (value * grad_value).sum() + (log_weight * grad_log_weight).sum()
            change.backward()
            for whole, part, place in zip(gradients, parts, places, strict=True):
                if part.grad is not None:
                    whole[place] += part.grad
        return *gradients, None, None


def _of_chunk(parts, sentences, per_sentence, temperatures):
    """Values of a chunk, with σ over its slices only, and ``log Σ_l exp(-τ ⟨C, U_l⟩)`` over them, ``(bsz, heads)``."""
    (q, k, v, slices), (temperature, inverse_temperature) = parts, temperatures
    rank_plan, query_pads, key_pads = (None if x is None else x[sentences] for x in per_sentence)
    from_queries = _soft_sort(q, slices, query_pads, temperature)
    to_keys = _soft_sort(k, slices, key_pads, temperature)
    through = _by_ranks if _is_long(q, k, v) else _by_plans
    cost, mean_values = through(q, k, v, from_queries, to_keys, rank_plan)
    n = num_real(query_pads, q)[:, None, None]
    logits = -inverse_temperature * cost / n
    return mean_values(torch.softmax(logits, -1)), torch.logsumexp(logits, -1)


def _chunks(q, k, slices):
    """Index tuples into q, k, v and the slices, for chunks of sentences, heads and slices that fit into the cache."""
    bsz, num_heads, num_slices = q.size(0), q.size(1), slices.size(1)
    chunk = ways(q).soft_chunk
    size = max(q.size(-2), k.size(-2)) ** 2
    lines = max(1, chunk // size)
    heads = max(1, min(num_heads, chunk // (num_slices * size)))
    sentences = max(1, chunk // (num_heads * num_slices * size))
    for i in range(0, bsz, sentences):
        for h in range(0, num_heads, heads):
            for line in range(0, num_slices, lines):
                at = slice(i, i + sentences), slice(h, h + heads)
                yield at, at, at, (at[1], slice(line, line + lines))


def _is_long(q, k, v):
    """Whether sums over ranks take less time than plans."""
    return max(q.size(-2), k.size(-2)) > _LONG * (q.size(-1) + v.size(-1))


def _by_plans(q, k, v, from_queries, to_keys, rank_plan):
    """``n ⟨C, U_l⟩``, ``(bsz, heads, L)``, and a function from σ to ``Σ_l σ_l (n·U_l) v``; makes each slice's plan."""
    if rank_plan is not None:
        to_keys = rank_plan[:, None, None] @ to_keys
    plans = (from_queries.transpose(-1, -2) @ to_keys).flatten(-2)  # n·U_l, (bsz, heads, L, tgt_len·src_len)
    norms = q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2)
    squared_distances = norms - 2 * (q @ k.transpose(-1, -2))
    cost = (squared_distances.flatten(-2).unsqueeze(-2) @ plans.transpose(-1, -2)).squeeze(-2)
    return cost, lambda weights: (weights.unsqueeze(-2) @ plans).view_as(squared_distances) @ v


def _by_ranks(q, k, v, from_queries, to_keys, rank_plan):
    """The results of :func:`_by_plans` from means over the tokens of each rank; makes no plan."""
    q, norm_q = _at_ranks(from_queries, q, q.square().sum(-1, keepdim=True))
    k, norm_k, v = _at_ranks(to_keys, k, k.square().sum(-1, keepdim=True), v, rank_plan=rank_plan)
    cost = (norm_q + norm_k).sum((-2, -1)) - 2 * (q * k).sum((-2, -1))
    to_queries = from_queries.flatten(-3, -2).transpose(-1, -2)  # (bsz, heads, tgt_len, L·tgt_len)
    return cost, lambda weights: to_queries @ (weights[..., None, None] * v).flatten(-3, -2)


def _at_ranks(sort, *columns, rank_plan=None):
    """Means of ``(bsz, heads, n, c_i)`` over the tokens of each rank, ``(bsz, heads, L, n, c_i)``.

    A rank plan moves them from the keys' ranks to the queries' ranks.
    """
    means = (sort.flatten(-3, -2) @ torch.cat(columns, -1)).unflatten(-2, sort.shape[-3:-1])
    if rank_plan is not None:
        means = rank_plan[:, None, None] @ means
    return means.split([x.size(-1) for x in columns], -1)


def _soft_sort(x, slices, padding_mask, temperature):
    """``(bsz, heads, L, n, n)``: :class:`SoftSort` of the projections of x."""
    projected = (slices * (temperature * math.log(2)) ** -0.5) @ x.transpose(-1, -2)  # (bsz, heads, L, n)
    if padding_mask is None:
        return SoftSort.apply(sort_real(projected, None)[0], projected, None, 1.0)
    pads = padding_mask[:, None, None, :]
    real_ranks = torch.arange(x.size(-2), device=x.device) < num_real(padding_mask, x)[:, None, None, None]
    return SoftSort.apply(sort_real(projected, pads)[0], projected, pads, real_ranks)
