"""What the kernels compute, in plain operations of torch: of any dtype, on any device, with gradients."""

from typing import NamedTuple

import torch
from torch import Tensor


class LotInputs(NamedTuple):
    """The tensors of LOT attention.

    Attributes:
        q: ``(bsz, num_heads, n, d)``, k: ``(bsz, num_heads, m, d)`` and v: ``(bsz, num_heads, m, value_dim)``.
        pivots: ``(num_heads, r, d)``.
        log_masses: ``(num_heads, r)``, float32.
        query_padding_mask: ``(bsz, n)`` and key_padding_mask: ``(bsz, m)``, bool, True = pad; None = no pads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pivots: Tensor
    log_masses: Tensor
    query_padding_mask: Tensor | None = None
    key_padding_mask: Tensor | None = None


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


def log_mass(padding_mask: Tensor | None, like: Tensor) -> Tensor:
    """``(bsz, 1, n)``: 0 for a token, -inf for a pad; uniform masses up to a factor, which scalings absorb."""
    if padding_mask is None:
        return like.new_zeros(like.size(0), 1, like.size(-2))
    return like.new_zeros(padding_mask.shape).masked_fill_(padding_mask, -torch.inf).unsqueeze(1)


def sinkhorn(
    scores: Tensor,
    log_a: Tensor,
    log_b: Tensor,
    *,
    num_updates: int,
    tolerance: float | None = None,
    log_factor: Tensor | None = None,
) -> Tensor:
    """The rows of the plan in U(a, b) as probability vectors, ``(..., n, m)``, for scores of any size.

    Arguments as for :func:`~fairseq_lot.transport.sinkhorn.sinkhorn`: sums of exponentials in every half-update.
    """
    # -inf exactly where there is no mass, so that those scores never count; 0 elsewhere.
    f = torch.where(log_a.isneginf(), log_a, 0.0)
    g = torch.where(log_b.isneginf(), log_b, 0.0)
    for left in range(num_updates - 1, 0, -1):
        if left % 2 == 0:
            f = log_a - _LogSumExp.apply(scores + g.unsqueeze(-2), -1)
            continue
        log_reach = _LogSumExp.apply(scores + f.unsqueeze(-1), -2)
        if tolerance is not None and left < num_updates - 2:  # both sides have been updated
            error = ((g + log_reach).exp() - log_b.exp()).abs().sum(-1)
            if error.max() <= tolerance:
                break  # g is still the one that f was made for
        g = log_b - log_reach
    if log_factor is not None:
        scores = scores + log_factor  # the last update is a softmax, so this is to multiply and to normalise
    return torch.softmax(scores + g.unsqueeze(-2), -1)


class _LogSumExp(torch.autograd.Function):
    """``torch.logsumexp`` with a gradient whose shares sum to 1, however large the sums are.

    torch takes the shares relative to the rounded result. At 1e6 that is off by 0.03, and the updates amplify it.
    """

    @staticmethod
    def forward(ctx, x, dim):
        ctx.save_for_backward(x)
        ctx.dim = dim
        return torch.logsumexp(x, dim)

    @staticmethod
    def backward(ctx, grad_sums):
        (x,) = ctx.saved_tensors
        return torch.softmax(x, ctx.dim) * grad_sums.unsqueeze(ctx.dim), None


def lot(inputs: LotInputs, settings: LotSettings) -> Tensor:
    """Values of LOT attention without dropout, ``(bsz, num_heads, n, value_dim)``; no sentence may be of pads alone."""
    q, k, v, pivots, log_masses, query_padding_mask, key_padding_mask = inputs
    query_scores, key_scores = (settings.scale * x @ pivots.transpose(-1, -2) for x in (q, k))
    log_a, log_b = log_mass(query_padding_mask, q), log_mass(key_padding_mask, k)
    from_queries = sinkhorn(query_scores, log_a, log_masses, num_updates=settings.query_updates)
    to_keys = sinkhorn(key_scores.transpose(-1, -2), log_masses, log_b, num_updates=settings.key_updates)
    values = from_queries @ (to_keys @ v)
    return values if query_padding_mask is None else values.masked_fill(query_padding_mask[:, None, :, None], 0.0)
