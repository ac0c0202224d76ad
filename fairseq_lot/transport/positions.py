"""Positions of tokens in their sentence; priors over positions."""

from typing import Any

import torch
from torch import Tensor

from fairseq_lot.errors import InputError
from fairseq_lot.transport.marginals import without_empty


def positions(padding_mask: Tensor | None, like: Tensor) -> Tensor:
    """0-based positions, counted over the real tokens.

    Args:
        padding_mask: ``(bsz, n)`` bool, True = pad; None when there is no padding.
        like: any tensor with ``like.size(-2) == n``; gives the device and, without a mask, n.

    Returns:
        ``(bsz, n)``, or ``(1, n)`` without a mask, integers. A pad has the position of the last real token before it,
        or -1 if there is none.
    """
    if padding_mask is None:
        return torch.arange(like.size(-2), device=like.device).unsqueeze(0)
    return (~without_empty(padding_mask)).cumsum(-1) - 1


def alibi_slopes(num_heads: int, **kind: Any) -> Tensor:
    """The slopes of Press et al. [ALiBi]: ``2^(-8h/H)`` for h = 1 .. H if H is a power of two.

    Otherwise the slopes for the power of two below H, then every other slope for the power of two above it.

    Args:
        num_heads: H.
        kind: ``dtype`` and ``device``. The slopes are computed on the device: copying them to a GPU would make the host
            wait.
    """
    below = 2 ** (num_heads.bit_length() - 1)
    exponents = torch.arange(1, below + 1, **kind) * (8 / below)
    if below < num_heads:
        between = torch.arange(1, 2 * (num_heads - below), 2, **kind) * (4 / below)
        exponents = torch.cat([exponents, between])
    return torch.exp2(-exponents)


def check_queries_among_keys(q: Tensor, k: Tensor) -> None:
    """Raise an :class:`InputError` if there are more queries than keys: a prior needs each query's position."""
    if q.size(-2) > k.size(-2):
        sizes = f"{q.size(-2)} queries, {k.size(-2)} keys"
        raise InputError(f"a prior over positions needs queries among the keys, got {sizes}")


def alibi_log_prior(padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """``log π_ij = -slope·|position of i - position of j|``, one slope per head [ALiBi]; rows are not normalised.

    The queries are the last ``tgt_len`` tokens of the keys' sentence: query i has the position of key
    ``i + src_len - tgt_len``.

    Args:
        padding_mask: ``(bsz, src_len)`` bool, True = pad; or None.
        q: ``(bsz, num_heads, tgt_len, d)``; k: ``(bsz, num_heads, src_len, d)``. Only sizes, dtype and device are used.

    Returns:
        ``(bsz or 1, num_heads, tgt_len, src_len)``, at least float32.

    Raises:
        InputError: more queries than keys.
    """
    check_queries_among_keys(q, k)
    tgt_len, src_len = q.size(-2), k.size(-2)
    of_keys = positions(padding_mask, k)
    of_queries = of_keys[:, src_len - tgt_len :]
    distance = (of_queries.unsqueeze(-1) - of_keys.unsqueeze(-2)).abs()  # (bsz or 1, tgt_len, src_len)
    slopes = alibi_slopes(q.size(1), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    return -slopes[:, None, None] * distance.unsqueeze(1)


def linear_log_factor(padding_mask: Tensor | None, x: Tensor, num_pivots: int, temperature: float) -> Tensor:
    """``-(i/n - t/r)²/τ²`` for token i of n and pivot t of r, both counted from 1 [SeTformer].

    It favours pairs that are equally far along. Only real tokens count.

    Args:
        padding_mask: ``(bsz, n)`` bool, True = pad; or None.
        x: ``(..., n, d)``; gives the dtype, the device and, without a mask, n.
        num_pivots: r.
        temperature: τ, as a fraction of the sentence.

    Returns:
        ``(bsz or 1, n, r)``, at most 0.
    """
    number = positions(padding_mask, x) + 1
    along = number.to(x.dtype) / number[:, -1:]  # the last slot holds the number of real tokens
    pivots = torch.arange(1, num_pivots + 1, dtype=x.dtype, device=x.device) / num_pivots
    return -((along.unsqueeze(-1) - pivots) / temperature).square()
