"""Expected sliced plans from soft sorts: average the one-dimensional plans of many projections [3]."""

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import threshold
from torch.utils.checkpoint import checkpoint

# Elements of one (sentences, heads, src_len, L, tgt_len) tensor that is alive at a time: about a cache's worth.
_CHUNK = 2**19


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


class SoftSortKernel(torch.autograd.Function):
    """``E[j, l, p] = exp(-(place_lp - token_lj)²)``, zero at padded tokens.

    SoftSort's matrix is E with its places normalised: ``A_l[p, j] = E[j, l, p] / Σ_j E[j, l, p]``; as each place
    is a token's own value, every sum is at least 1. Tokens come first so that all products with E are of one
    wide matrix, ``(n, L·n)``. The backward pass costs one product of that size and two thin ones.
    """

    @staticmethod
    def forward(ctx, places, tokens, padding_mask):
        """places and tokens ``(..., L, n)``, padding_mask ``(..., 1, n)`` or None -> ``(..., n, L, n)``."""
        if padding_mask is not None:
            tokens = tokens.masked_fill(padding_mask, torch.inf)
        difference = places.unsqueeze(-3) - tokens.transpose(-1, -2).unsqueeze(-1)
        # exp(-46) = 1e-20 shows in no sum that is at least 1, and subnormal numbers are 10 times slower
        kernel = threshold(difference.square_().neg_(), -46.0, -torch.inf, inplace=True).exp_()
        if padding_mask is not None:
            tokens = tokens.masked_fill(padding_mask, 0.0)
        ctx.save_for_backward(places, tokens, kernel)
        return kernel

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        places, tokens, kernel = ctx.saved_tensors
        pull = (gradient * kernel).movedim(-2, -3)  # (..., L, n tokens, n places)
        # d/d place_p = -2 Σ_j pull_jp (place_p - token_j), and the opposite for the tokens
        of_places = pull.sum(-2) * places - (tokens.unsqueeze(-2) @ pull).squeeze(-2)
        of_tokens = pull.sum(-1) * tokens - (pull @ places.unsqueeze(-1)).squeeze(-1)
        return -2 * of_places, -2 * of_tokens, None


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

    C holds the squared distances. A few sentences (or heads, or slices) are worked on at a time, so that their n×n
    matrices stay in the processor's cache; the backward pass makes them again instead of keeping them.

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
    bsz, num_heads, tgt_len, _ = q.shape
    size = max(tgt_len, k.size(-2)) ** 2
    matrix = slices.size(-2) * size
    lines = max(1, _CHUNK // size)
    heads = max(1, min(num_heads, _CHUNK // matrix))
    sentences = max(1, _CHUNK // (matrix * num_heads))
    run = _soft_sliced_apply
    if torch.is_grad_enabled():

        def run(*inputs):
            return checkpoint(_soft_sliced_apply, *inputs, use_reentrant=False, preserve_rng_state=False)

    rows = []
    for i in range(0, bsz, sentences):
        batched = (place_plan, query_padding_mask, key_padding_mask)
        per_sentence = [None if x is None else x[i : i + sentences] for x in batched]
        row = []
        for h in range(0, num_heads, heads):
            per_head = [x[i : i + sentences, h : h + heads] for x in (q, k, v)]
            row.append(
                _mean(
                    run(*per_head, some, *per_sentence, temperature, inverse_temperature)
                    for some in slices[h : h + heads].split(lines, 1)
                )
            )
        rows.append(torch.cat(row, 1))
    return torch.cat(rows)


def _soft_sliced_apply(
    q, k, v, slices, place_plan, query_padding_mask, key_padding_mask, temperature, inverse_temperature
):
    """One chunk of :func:`soft_sliced_apply`, and ``log Σ_l exp(-τ ⟨C, U_l⟩)`` of its slices, ``(bsz, heads)``."""
    num_slices, tgt_len = slices.size(-2), q.size(-2)
    a = _sort_kernel(q, slices, query_padding_mask, temperature)  # (bsz, heads, tgt_len, L·tgt_len)
    b = _sort_kernel(k, slices, key_padding_mask, temperature)  # (bsz, heads, src_len, L·src_len)
    # sums over the tokens at each sorted place, to be divided by the last, the sum of the kernel itself
    q_sum, q2_sum, q_norm = _sums(a, q, q.square().sum(-1, keepdim=True))
    k_sum, k2_sum, v_sum, k_norm = _sums(b, k, k.square().sum(-1, keepdim=True), v)
    if place_plan is not None:
        k_sum, k2_sum, v_sum = (_by_place(x / k_norm, place_plan, num_slices) for x in (k_sum, k2_sum, v_sum))
        k_norm = torch.ones_like(k2_sum)
    if query_padding_mask is None:
        real_place, n = q.new_ones(1, 1, 1, tgt_len), tgt_len
    else:
        n = (~query_padding_mask).sum(-1)[:, None, None, None]
        real_place = (torch.arange(tgt_len, device=q.device) < n).to(q.dtype)  # (bsz, 1, 1, tgt_len)
    inner = (q_sum * k_sum).sum(-2, keepdim=True) / (q_norm * k_norm)
    distance = (q2_sum / q_norm + k2_sum / k_norm - 2 * inner).squeeze(-2).unflatten(-1, (num_slices, tgt_len))
    cost = (distance * real_place / n).sum(-1)  # ⟨C, U_l⟩, (bsz, heads, L)
    weights = torch.softmax(-inverse_temperature * cost, -1).unsqueeze(-1) * real_place
    weights = weights.flatten(2).unsqueeze(-2) / (q_norm * k_norm)
    return a @ (weights * v_sum).transpose(-1, -2), torch.logsumexp(-inverse_temperature * cost, -1)


def _mean(chunks):
    """The values of all slices from those of chunks of them, each with the log of its weight."""
    values, log_weights = zip(*chunks, strict=True)
    if len(values) == 1:
        return values[0]
    weights = torch.softmax(torch.stack(log_weights), 0)[..., None, None]
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def _sums(kernel, *columns):
    """Sums of ``(..., n, c_i)`` columns at the sorted places, ``(..., c_i, L·n)``, then the sum of the kernel."""
    stacked = torch.cat([*columns, columns[0].new_ones(1).expand(*columns[0].shape[:-1], 1)], -1)
    *sums, norm = (stacked.transpose(-1, -2) @ kernel).split([*(x.size(-1) for x in columns), 1], -2)
    # less than 1 only where the place of a pad is far from every token; such places have no weight, but what they
    # are divided by must not vanish either, or 0 times infinity gets into the gradients
    return [*sums, norm.clamp(min=1)]


def _by_place(means, place_plan, num_slices):
    """Move ``(..., c, L·src_len)`` from the keys' places to the queries' places, ``(..., c, L·tgt_len)``."""
    by_slice = means.unflatten(-1, (num_slices, -1)).transpose(-2, -3)
    return (by_slice @ place_plan[:, None, None].transpose(-1, -2)).transpose(-2, -3).flatten(-2)


def _sort_kernel(x, slices, padding_mask, temperature):
    """``(bsz, heads, n, L·n)``: :class:`SoftSortKernel` of the projections of x, places of all slices side by side."""
    pads = None if padding_mask is None else padding_mask[:, None, None, :]
    projected = (slices * temperature**-0.5) @ x.transpose(-1, -2)  # (bsz, heads, L, n)
    return SoftSortKernel.apply(sort_real(projected, pads)[0], projected, pads).flatten(-2)
