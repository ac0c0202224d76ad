"""Expected sliced plans from soft sorts: average the one-dimensional plans of many projections [3]."""

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import threshold

from fairseq_lot.transport.marginals import num_real

# Elements of one (sentences, heads, L, tgt_len, src_len) tensor that is alive at a time: on the CPU about a cache's
# worth, elsewhere enough that starting the kernels does not take longer than running them.
_CHUNKS = {"cpu": 2**19, "other": 2**25}


def staircase(n: torch.Tensor, m: torch.Tensor, tgt_len: int, src_len: int, dtype: torch.dtype) -> torch.Tensor:
    """The exact plan I between two uniform measures on a line, both sorted.

    ``I_ij = |[i/n, (i+1)/n] ∩ [j/m, (j+1)/m]|``: the north-west corner rule.

    Args:
        n: ``(...)`` numbers of real points on the first line, and m: ``(...)`` on the second.
        tgt_len, src_len: padded sizes; rows from n on and columns from m on are zero.

    Returns:
        ``n·I``, ``(..., tgt_len, src_len)``: rows sum to 1, the identity when n = m.
    """
    n, m = n.to(dtype)[..., None, None], m.to(dtype)[..., None, None]
    i = torch.arange(tgt_len, device=n.device, dtype=dtype)[:, None]
    j = torch.arange(src_len, device=n.device, dtype=dtype)
    overlap = torch.minimum((i + 1) / n, (j + 1) / m) - torch.maximum(i / n, j / m)
    return n * overlap.clamp(min=0) * ((i < n) & (j < m))


def sort_real(values: torch.Tensor, padding_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort along the last axis, ascending and stable, with the pads last.

    Args:
        values: ``(..., n)``.
        padding_mask: ``(..., n)`` bool, broadcastable, True = pad; or None.

    Returns:
        sorted values (0 in the places of pads) and the permutation, both ``(..., n)``.
    """
    if padding_mask is None:
        return values.sort(dim=-1, stable=True)
    ordered, permutation = values.masked_fill(padding_mask, torch.inf).sort(dim=-1, stable=True)
    return ordered.masked_fill(ordered.isposinf(), 0.0), permutation


class SoftSort(torch.autograd.Function):
    """``A_l[p, j] ∝ exp(-(place_lp - token_lj)²)``, one row for each sorted place p of each slice l.

    Rows of real places sum to 1, rows of pads are zero. As each real place is a token's own value, the sum that its row
    is divided by is at least 1.
    """

    @staticmethod
    def forward(ctx, places, tokens, padding_mask, real_places):
        """places and tokens ``(..., L, n)``; padding_mask and, where it is not None, real_places ``(..., 1, n)``."""
        far = tokens if padding_mask is None else tokens.masked_fill(padding_mask, torch.inf)
        difference = places.unsqueeze(-1) - far.unsqueeze(-2)
        # 1e-17 shows in no sum that is at least 1; exp(-inf) and subnormal numbers are 10 times slower than others
        sort = threshold(difference.square_().neg_().clamp_(min=-40.0).exp_(), 1e-17, 0.0, inplace=True)
        sort *= (real_places / sort.sum(-1).clamp(min=1)).unsqueeze(-1)
        ctx.save_for_backward(places, tokens, sort)
        return sort

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        places, tokens, sort = ctx.saved_tensors
        pull = gradient * sort
        pull.addcmul_(sort, pull.sum(-1, keepdim=True), value=-1)  # that of the log, as for any softmax
        # d/d place_p = -2 Σ_j pull_pj (place_p - token_j), where Σ_j pull_pj = 0, and the opposite for the tokens
        of_places = (pull @ tokens.unsqueeze(-1)).squeeze(-1)
        of_tokens = (places.unsqueeze(-2) @ pull).squeeze(-2) - pull.sum(-2) * tokens
        return 2 * of_places, 2 * of_tokens, None, None


def soft_sliced_apply(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slices: torch.Tensor,
    place_plan: torch.Tensor | None = None,
    *,
    query_padding_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    temperature: float | torch.Tensor,
    inverse_temperature: float,
) -> torch.Tensor:
    """``n·G v`` with ``G = Σ_l σ_l U_l``, ``U_l = A_lᵀ I B_l`` from soft sorts and ``σ_l ∝ exp(-τ ⟨C, U_l⟩)``.

    C holds the squared distances. The plan of a slice is a product of two n×n matrices, so time is O(L n³); up to some
    hundred tokens that is faster than products with q and k. A few sentences (or heads, or slices) are worked on at a
    time, so that their n×n matrices stay in the processor's cache; the backward pass makes them again.

    Args:
        q: ``(bsz, num_heads, tgt_len, d)``; k: ``(bsz, num_heads, src_len, d)``; v: ``(bsz, num_heads, src_len, c)``;
            zero at pads.
        slices: ``(num_heads, L, d)``, one direction a row.
        place_plan: n·I, see :func:`staircase`, ``(bsz, tgt_len, src_len)``; None when queries and keys are equally
            many in each sentence (the identity).
        query_padding_mask, key_padding_mask: ``(bsz, len)`` bool, True = pad; or None.
        temperature: t of the soft sort, in squared units of q.
        inverse_temperature: τ.

    Returns:
        ``(bsz, num_heads, tgt_len, c)``; G has total mass 1. With the identity as v this is n·G itself.
    """
    per_sentence = place_plan, query_padding_mask, key_padding_mask
    return _InChunks.apply(q, k, v, slices, per_sentence, (temperature, inverse_temperature))


class _InChunks(torch.autograd.Function):
    """:func:`_soft_sliced_apply` on a few sentences, heads and slices at a time, and again in the backward pass.

    What stays is written into tensors made before: allocated between the large tensors of the chunks it would
    fragment the heap.
    """

    @staticmethod
    def forward(ctx, q, k, v, slices, per_sentence, temperatures):
        values = v.new_zeros(*q.shape[:-1], v.size(-1))
        log_weights = q.new_full(q.shape[:2], -torch.inf)  # log Σ_l exp(-τ ⟨C, U_l⟩) of the slices so far
        for i, h, lines in _chunks(q, k, slices):
            some = [None if x is None else x[i] for x in per_sentence]
            value, log_weight = _soft_sliced_apply(q[i, h], k[i, h], v[i, h], slices[h, lines], *some, *temperatures)
            log_weights[i, h] = torch.logaddexp(log_weights[i, h], log_weight)
            values[i, h].lerp_(value, (log_weight - log_weights[i, h]).exp()[..., None, None])
        ctx.save_for_backward(q, k, v, slices, values, log_weights)
        ctx.problem = per_sentence, temperatures
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        q, k, v, slices, values, log_weights = ctx.saved_tensors
        per_sentence, temperatures = ctx.problem
        inputs = q, k, v, slices
        found = [
            torch.zeros_like(x) if need else None for x, need in zip(inputs, ctx.needs_input_grad[:4], strict=True)
        ]
        for i, h, lines in _chunks(q, k, slices):
            some = [None if x is None else x[i] for x in per_sentence]
            with torch.enable_grad():
                parts = [
                    x.detach().requires_grad_(of_x is not None)
                    for x, of_x in zip((q[i, h], k[i, h], v[i, h], slices[h, lines]), found, strict=True)
                ]
                value, log_weight = _soft_sliced_apply(*parts, *some, *temperatures)
            of_value = (log_weight.detach() - log_weights[i, h]).exp()[..., None, None] * gradient[i, h]
            of_log_weight = (of_value * (value.detach() - values[i, h])).sum((-2, -1))
            outputs = [(x, of_x) for x, of_x in ((value, of_value), (log_weight, of_log_weight)) if x.requires_grad]
            outputs, of_outputs = zip(*outputs, strict=True)
            of_parts = iter(torch.autograd.grad(outputs, [x for x in parts if x.requires_grad], of_outputs))
            for of_x, at in zip(found, ((i, h), (i, h), (i, h), (h, lines)), strict=True):
                if of_x is not None:
                    of_x[at] += next(of_parts)
        return *found, None, None


def _chunks(q, k, slices):
    """Which sentences, heads and slices to work on at a time, as three slice objects."""
    bsz, num_heads, num_slices = *q.shape[:2], slices.size(1)
    chunk = _CHUNKS.get(q.device.type, _CHUNKS["other"])
    size = max(q.size(-2), k.size(-2)) ** 2
    lines = max(1, chunk // size)
    heads = max(1, min(num_heads, chunk // (num_slices * size)))
    sentences = max(1, chunk // (num_heads * num_slices * size))
    for i in range(0, bsz, sentences):
        for h in range(0, num_heads, heads):
            for line in range(0, num_slices, lines):
                yield slice(i, i + sentences), slice(h, h + heads), slice(line, line + lines)


def _soft_sliced_apply(
    q, k, v, slices, place_plan, query_padding_mask, key_padding_mask, temperature, inverse_temperature
):
    """One chunk of :func:`soft_sliced_apply`, and ``log Σ_l exp(-τ ⟨C, U_l⟩)`` of its slices, ``(bsz, heads)``."""
    from_queries = _soft_sort(q, slices, query_padding_mask, temperature)
    to_keys = _soft_sort(k, slices, key_padding_mask, temperature)
    if place_plan is not None:
        to_keys = place_plan[:, None, None] @ to_keys
    plans = (from_queries.transpose(-1, -2) @ to_keys).flatten(-2)  # n·U_l, (bsz, heads, L, tgt_len·src_len)
    norms = q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2)
    squared_distances = norms - 2 * (q @ k.transpose(-1, -2))
    n = num_real(query_padding_mask, q)[:, None, None]
    cost = (plans @ squared_distances.flatten(-2).unsqueeze(-1)).squeeze(-1) / n  # ⟨C, U_l⟩, (bsz, heads, L)
    weights = torch.softmax(-inverse_temperature * cost, -1)
    plan = (weights.unsqueeze(-2) @ plans).view_as(squared_distances)
    return plan @ v, torch.logsumexp(-inverse_temperature * cost, -1)


def _soft_sort(x, slices, padding_mask, temperature):
    """``(bsz, heads, L, n, n)``: :class:`SoftSort` of the projections of x."""
    projected = (slices * temperature**-0.5) @ x.transpose(-1, -2)  # (bsz, heads, L, n)
    if padding_mask is None:
        return SoftSort.apply(sort_real(projected, None)[0], projected, None, 1.0)
    pads = padding_mask[:, None, None, :]
    real_places = torch.arange(x.size(-2), device=x.device) < num_real(padding_mask, x)[:, None, None, None]
    return SoftSort.apply(sort_real(projected, pads)[0], projected, pads, real_places)
