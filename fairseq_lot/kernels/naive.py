"""What the kernels compute, in plain operations of torch: of any dtype, on any device, with gradients."""

from typing import NamedTuple

import torch


class LotInputs(NamedTuple):
    """The tensors of LOT attention.

    Attributes:
        q: ``(bsz, num_heads, n, d)``, k: ``(bsz, num_heads, m, d)`` and v: ``(bsz, num_heads, m, value_dim)``.
        pivots: ``(num_heads, r, d)``.
        log_masses: ``(num_heads, r)``, float32.
        query_padding_mask: ``(bsz, n)`` and key_padding_mask: ``(bsz, m)``, bool, True = pad; None = no pads.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pivots: torch.Tensor
    log_masses: torch.Tensor
    query_padding_mask: torch.Tensor | None = None
    key_padding_mask: torch.Tensor | None = None


class LotSettings(NamedTuple):
    """The numbers of LOT attention.

    Attributes:
        scale: the scores are ``scale·x·z``.
        query_updates, key_updates: half-updates on either side.
        dropout: probability of dropping an entry of the query side.
    """

    scale: float
    query_updates: int
    key_updates: int
    dropout: float = 0.0


def log_mass(padding_mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """``(bsz, 1, n)``: 0 for a token, -inf for a pad; uniform masses up to a factor, which scalings absorb."""
    if padding_mask is None:
        return like.new_zeros(like.size(0), 1, like.size(-2))
    return like.new_zeros(padding_mask.shape).masked_fill(padding_mask, -torch.inf).unsqueeze(1)


def sinkhorn(scores: torch.Tensor, log_a: torch.Tensor, log_b: torch.Tensor, *, num_updates: int) -> torch.Tensor:
    """The rows of the plan in U(a, b) as probability vectors, ``(..., n, m)``; the last half-update is of the rows."""
    f, g = (torch.where(mass.isneginf(), mass, 0.0) for mass in (log_a, log_b))
    for left in range(num_updates - 1, 0, -1):
        if left % 2 == 0:
            f = log_a - torch.logsumexp(scores + g.unsqueeze(-2), -1)
        else:
            g = log_b - torch.logsumexp(scores + f.unsqueeze(-1), -2)
    return torch.softmax(scores + g.unsqueeze(-2), -1)


def lot(inputs: LotInputs, settings: LotSettings) -> torch.Tensor:
    """Values of LOT attention without dropout, ``(bsz, num_heads, n, value_dim)``; no sentence may be of pads alone."""
    q, k, v, pivots, log_masses, query_padding_mask, key_padding_mask = inputs
    query_scores, key_scores = (settings.scale * x @ pivots.transpose(-1, -2) for x in (q, k))
    log_a, log_b = log_mass(query_padding_mask, q), log_mass(key_padding_mask, k)
    from_queries = sinkhorn(query_scores, log_a, log_masses, num_updates=settings.query_updates)
    to_keys = sinkhorn(key_scores.transpose(-1, -2), log_masses, log_b, num_updates=settings.key_updates)
    values = from_queries @ (to_keys @ v)
    return values if query_padding_mask is None else values.masked_fill(query_padding_mask[:, None, :, None], 0.0)
