"""Expected sliced plans: average the one-dimensional plans of many projections [3]."""

import torch


def staircase(n: torch.Tensor, m: torch.Tensor, tgt_len: int, src_len: int, dtype: torch.dtype) -> torch.Tensor:
    """The exact plan between two uniform measures on a line, both sorted.

    ``I_ij = |[i/n, (i+1)/n] ∩ [j/m, (j+1)/m]|``: the north-west corner rule; ``diag(1/n)`` when n = m.

    Args:
        n: ``(...)`` numbers of real points on the first line, and m: ``(...)`` on the second.
        tgt_len, src_len: padded sizes; rows from n on and columns from m on are zero.

    Returns:
        ``(..., tgt_len, src_len)``.
    """
    n, m = n.to(dtype)[..., None, None], m.to(dtype)[..., None, None]
    i = torch.arange(tgt_len, device=n.device, dtype=dtype)[:, None]
    j = torch.arange(src_len, device=n.device, dtype=dtype)
    overlap = torch.minimum((i + 1) / n, (j + 1) / m) - torch.maximum(i / n, j / m)
    return overlap.clamp(min=0) * ((i < n) & (j < m))


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


def soft_sort(values: torch.Tensor, padding_mask: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """SoftSort: a row-stochastic relaxation of the matrix that sorts ``values`` ascending.

    ``softmax_j(-(sort(v)_i - v_j)² / t)``.

    Args:
        values: ``(..., n)``.
        padding_mask: ``(..., n)`` bool, broadcastable, True = pad; or None.
        temperature: t > 0, in squared units of ``values``.

    Returns:
        ``(..., n, n)``: rows are sorted places, columns are tokens. Columns of pads are zero; rows beyond the last
        real token are arbitrary probability vectors.
    """
    ordered, _ = sort_real(values, padding_mask)
    logits = -(ordered.unsqueeze(-1) - values.unsqueeze(-2)).square() / temperature
    if padding_mask is not None:
        logits = logits.masked_fill(padding_mask.unsqueeze(-2), -torch.inf)
    return torch.softmax(logits, -1)


def soft_sliced_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    slices: torch.Tensor,
    place_plan: torch.Tensor,
    *,
    query_padding_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    temperature: float,
    inverse_temperature: float,
) -> torch.Tensor:
    """``G = Σ_l σ_l U_l`` with ``U_l = A_lᵀ I B_l`` from soft sorts, ``σ_l ∝ exp(-τ ⟨C, U_l⟩)``, C squared distances.

    Args:
        q: ``(bsz, num_heads, tgt_len, d)``, zero at pads; k: ``(bsz, num_heads, src_len, d)``, likewise.
        slices: ``(num_heads or 1, L, d)``, one direction a row.
        place_plan: I, the plan between sorted places, ``(bsz or 1, tgt_len, src_len)``.
        query_padding_mask, key_padding_mask: ``(bsz, len)`` bool, True = pad; or None.
        temperature: t of the soft sort.
        inverse_temperature: τ.

    Returns:
        ``(bsz, num_heads, tgt_len, src_len)``. Total mass 1 up to the softness of the sorts.
    """
    query_pads = None if query_padding_mask is None else query_padding_mask[:, None, None, :]
    key_pads = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
    a = soft_sort(slices @ q.transpose(-1, -2), query_pads, temperature)  # (bsz, num_heads, L, tgt_len, tgt_len)
    b = soft_sort(slices @ k.transpose(-1, -2), key_pads, temperature)
    moved = place_plan[:, None, None] @ b  # I B_l: (bsz, num_heads, L, tgt_len, src_len)
    # ⟨C, U⟩ = Σ_i ‖q_i‖² (U1)_i + Σ_j ‖k_j‖² (Uᵀ1)_j - 2 Σ_p (A q)_p · (I B k)_p, without building any U
    sent = (a * moved.sum(-1, keepdim=True)).sum(-2)  # U_l 1
    received = (moved * a.sum(-1, keepdim=True)).sum(-2)  # U_lᵀ 1; rows of A sum to 1
    inner = ((a @ q.unsqueeze(2)) * (moved @ k.unsqueeze(2))).sum((-1, -2))
    cost = (
        (sent * q.square().sum(-1).unsqueeze(2)).sum(-1)
        + (received * k.square().sum(-1).unsqueeze(2)).sum(-1)
        - 2 * inner
    )
    weights = torch.softmax(-inverse_temperature * cost, -1)[..., None, None]  # (bsz, num_heads, L, 1, 1)
    # Σ_l (σ_l A_l)ᵀ (I B_l) as one product over the joint axis (L, place)
    return (weights * a).flatten(2, 3).transpose(-1, -2) @ moved.flatten(2, 3)


def hard_sliced_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    slices: torch.Tensor,
    place_plan: torch.Tensor | None,
    *,
    query_padding_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    inverse_temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort both sides exactly along every slice and weigh the slices by the cost of their plans.

    Args: as in :func:`soft_sliced_plan`; ``place_plan=None`` stands for ``diag(1/n)`` (n = m), which needs no n×m.

    Returns:
        weights ``(bsz, num_heads, L)``, query permutations ``(bsz, num_heads, L, tgt_len)`` and key permutations
        ``(bsz, num_heads, L, src_len)``: sorted place -> token.
    """
    query_pads = None if query_padding_mask is None else query_padding_mask[:, None, None, :]
    key_pads = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
    with torch.no_grad():
        _, query_order = sort_real(slices @ q.transpose(-1, -2), query_pads)
        _, key_order = sort_real(slices @ k.transpose(-1, -2), key_pads)
    costs = []
    for query_index, key_index in zip(query_order.unbind(2), key_order.unbind(2), strict=True):
        sorted_q, sorted_k = take(q, query_index), take(k, key_index)
        if place_plan is None:
            # pads stand last on both sides and are zero, so they add nothing
            real = q.size(-2) if query_padding_mask is None else (~query_padding_mask).sum(-1).clamp(min=1)[:, None]
            costs.append((sorted_q - sorted_k).square().sum((-1, -2)) / real)
        else:
            distances = torch.cdist(sorted_q, sorted_k, compute_mode="donot_use_mm_for_euclid_dist").square()
            costs.append((distances * place_plan[:, None]).sum((-1, -2)))
    weights = torch.softmax(-inverse_temperature * torch.stack(costs, -1), -1)
    return weights, query_order, key_order


def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` in the order of ``index``: ``(..., n, d), (..., n) -> (..., n, d)``."""
    return x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.size(-1)))
