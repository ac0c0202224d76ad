"""Measures of an attention matrix ``A = n·plan``: its balance, its sharpness, its distance from another.

Each function takes A, ``(..., n, m)``, and two padding masks, ``(..., n)`` and ``(..., m)`` bool, True = pad, or None.
The masks broadcast over the leading axes. Padded rows and columns never count, whatever their contents. A may have
negative entries (differential attention).
"""

import torch
from torch import Tensor

from fairseq_lot.transport.marginals import Pads, marginal_error


def _real(attention, query_pads, key_pads):
    """A with zeros at the pads; 1 = real, 0 = pad for the rows, ``(..., n)``, and for the columns, ``(..., m)``."""
    sides = []
    for axis, mask in ((-2, query_pads), (-1, key_pads)):
        if mask is None:
            real = attention.new_ones(attention.size(axis))
        else:
            real = (~mask).to(attention.dtype)
            attention = attention.masked_fill(mask.unsqueeze(-1 if axis == -2 else -2), 0.0)
        sides.append(real)
    return attention, *sides


def _count(real):
    """Number of real tokens, ``(...)``; at least 1, to divide by."""
    return real.sum(-1).clamp(min=1)


def attention_marginal_error(attention: Tensor, query_pads: Pads = None, key_pads: Pads = None) -> Tensor:
    """Marginal error ``‖P1 - a‖₁ + ‖Pᵀ1 - b‖₁`` of ``P = A/n`` with uniform a and b, in units of mass, ``(...)``."""
    attention, rows, columns = _real(attention, query_pads, key_pads)
    n, m = _count(rows).unsqueeze(-1), _count(columns).unsqueeze(-1)
    return marginal_error(attention / n.unsqueeze(-1), rows / n, columns / m)


def receiver_mass(attention: Tensor, query_pads: Pads = None, key_pads: Pads = None) -> Tensor:
    """``m(A)``, the attention that each key receives, ``(..., m)``: column sums times m/n, so 1 is an equal share.

    0 at pads.
    """
    attention, rows, columns = _real(attention, query_pads, key_pads)
    return attention.sum(-2) * (_count(columns) / _count(rows)).unsqueeze(-1)


def receiver_extremes(attention: Tensor, query_pads: Pads = None, key_pads: Pads = None) -> tuple[Tensor, Tensor]:
    """The least and the largest receiver mass of the real keys, each ``(...)``."""
    mass = receiver_mass(attention, query_pads, key_pads)
    if key_pads is None:
        return mass.amin(-1), mass.amax(-1)
    least = mass.masked_fill(key_pads, torch.inf).amin(-1)
    return least, mass.masked_fill(key_pads, -torch.inf).amax(-1)


def imbalance(attention: Tensor, query_pads: Pads = None, key_pads: Pads = None) -> Tensor:
    """``Δ(A) = ‖m(A) - 1‖_∞``, ``(...)``: 0 for balanced columns. With n = m it is ``‖Aᵀ1 - 1‖_∞``."""
    distance = (receiver_mass(attention, query_pads, key_pads) - 1).abs()
    return distance.amax(-1) if key_pads is None else distance.masked_fill(key_pads, 0.0).amax(-1)


def row_entropy(attention: Tensor, query_pads: Pads = None, key_pads: Pads = None) -> Tensor:
    """Mean entropy of the rows in nats, ``(...)``: between 0 and log m.

    Each row is divided by its sum first. Negative entries count by their absolute value.
    """
    attention, rows, _ = _real(attention, query_pads, key_pads)
    size = attention.abs()
    total = size.sum(-1, keepdim=True)
    share = size / torch.where(total == 0, 1.0, total)
    return torch.special.entr(share).sum((-1, -2)) / _count(rows)


def effective_rank(attention: Tensor, query_pads: Pads = None, key_pads: Pads = None) -> Tensor:
    """Exponential of the entropy of the normalised singular values, ``(...)``: 1 (all rows alike) to min(n, m)."""
    attention, _, _ = _real(attention, query_pads, key_pads)
    singular = torch.linalg.svdvals(attention)
    total = singular.sum(-1, keepdim=True)
    share = singular / torch.where(total == 0, 1.0, total)
    return torch.special.entr(share).sum(-1).exp()


def row_distance(attention: Tensor, other: Tensor, query_pads: Pads = None, key_pads: Pads = None) -> Tensor:
    """Mean over the rows of ``‖A_i - B_i‖₁``, ``(...)``: between 0 and 2 for non-negative rows that sum to 1."""
    difference, rows, _ = _real(attention - other, query_pads, key_pads)
    return difference.abs().sum((-1, -2)) / _count(rows)


def mean_shift(attention: Tensor, v: Tensor, query_pads: Pads = None, key_pads: Pads = None) -> Tensor:
    """``‖mean_i (AV)_i - mean_j V_j‖₂`` relative to the root mean square norm of the rows of V, ``(...)``.

    It is 0 for every V if and only if all columns are balanced: then attention conserves the mean.

    Args:
        v: ``(..., m, d)``, the values V.
    """
    attention, rows, columns = _real(attention, query_pads, key_pads)
    if key_pads is not None:
        v = v.masked_fill(key_pads.unsqueeze(-1), 0.0)
    n, m = _count(rows).unsqueeze(-1), _count(columns).unsqueeze(-1)
    share = attention.sum(-2) / n - columns / m
    shift = (share.unsqueeze(-2) @ v).squeeze(-2).norm(dim=-1)
    size = (v.square().sum((-1, -2)) / m.squeeze(-1)).sqrt()
    return shift / torch.where(size == 0, 1.0, size)
