"""What the kernels compute, in plain operations of torch: of any dtype, on any device, with gradients."""

import torch


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


def lot(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pivots: torch.Tensor,
    log_masses: torch.Tensor,
    query_padding_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    *,
    scale: float,
    query_updates: int,
    key_updates: int,
) -> torch.Tensor:
    """Values of LOT attention; arguments as for :func:`~fairseq_lot.kernels.choice.lot`, no sentence of pads alone."""
    query_scores, key_scores = (scale * x @ pivots.transpose(-1, -2) for x in (q, k))
    log_a, log_b = log_mass(query_padding_mask, q), log_mass(key_padding_mask, k)
    from_queries = sinkhorn(query_scores, log_a, log_masses, num_updates=query_updates)
    to_keys = sinkhorn(key_scores.transpose(-1, -2), log_masses, log_b, num_updates=key_updates)
    values = from_queries @ (to_keys @ v)
    return values if query_padding_mask is None else values.masked_fill(query_padding_mask[:, None, :, None], 0.0)
