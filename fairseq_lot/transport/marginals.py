"""Marginals: the mass that each token sends or receives."""

from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

#: ``(bsz, len)`` bool, True = pad; None: no pads
Pads: TypeAlias = Tensor | None
SomePads = TypeVar("SomePads", Tensor, None, Pads)


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32 if it is in half precision, else unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def without_empty(padding_mask: SomePads) -> SomePads:
    """The padding mask, cleared for sentences that are all padding, so that no sum over real tokens is empty.

    An empty sum would become NaN. Values of such sentences are zero, so the result stays zero.
    """
    return None if padding_mask is None else padding_mask & ~padding_mask.all(-1, keepdim=True)


def num_real(padding_mask: Pads, like: Tensor) -> Tensor:
    """Number of real tokens in each sentence, ``(bsz,)`` int64.

    Args:
        padding_mask: ``(bsz, n)`` bool, True = pad; None when there is no padding.
        like: ``(bsz, ..., n, d)``; gives the sizes and the device.
    """
    if padding_mask is None:
        return torch.full((like.size(0),), like.size(-2), device=like.device)
    return (~padding_mask).sum(-1)


def uniform_log_mass(padding_mask: Pads, like: Tensor) -> Tensor:
    """Log of the uniform probability vector on the real tokens.

    Args:
        padding_mask: ``(..., n)`` bool, True = pad; None when there is no padding.
        like: any tensor with ``like.size(-2) == n``; gives the dtype, the device and, without a mask, n.

    Returns:
        ``(..., n)``: -log(number of real tokens), and -inf at pads.
    """
    if padding_mask is None:
        n = like.size(-2)
        return torch.full((n,), 1.0 / n, dtype=like.dtype, device=like.device).log_()
    real = (~without_empty(padding_mask)).to(like.dtype)
    return (real / real.sum(-1, keepdim=True)).log()


def marginal_error(plan: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Violation of both marginals, ``‖plan 1 - a‖₁ + ‖planᵀ 1 - b‖₁``.

    Args:
        plan: ``(..., n, m)``, total mass 1.
        a: ``(..., n)`` and b: ``(..., m)``, broadcastable.

    Returns:
        ``(...)``, in units of mass (between 0 and 4).
    """
    return (plan.sum(-1) - a).abs().sum(-1) + (plan.sum(-2) - b).abs().sum(-1)
