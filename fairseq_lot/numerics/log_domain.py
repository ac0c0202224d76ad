"""Sinkhorn in the log domain, in plain torch: any dtype, any device, with gradients."""

import torch
from torch import Tensor


def pad_log_mass(padding_mask: Tensor, like: Tensor, at_pads: float = -torch.inf) -> Tensor:
    """Log masses, ``(bsz, n) -> (bsz, 1, n)``: 0 for real tokens, ``at_pads`` for pads.

    The masses are not normalised; Sinkhorn's scalings absorb the constant.

    Args:
        padding_mask: ``(bsz, n)`` bool, True = pad.
        like: gives the dtype and the device.
        at_pads: the log mass of a pad.
    """
    return like.new_zeros(padding_mask.shape).masked_fill_(padding_mask, at_pads).unsqueeze(1)


def log_domain_sinkhorn(
    scores: Tensor,
    log_a: Tensor,
    log_b: Tensor,
    *,
    num_updates: int,
    tolerance: float | None = None,
    log_factor: Tensor | None = None,
) -> Tensor:
    """The plan in U(a, b) with each row divided by its sum, ``(..., n, m)``, for scores of any magnitude.

    Each half-update is a logsumexp. Arguments as for :func:`~fairseq_lot.transport.sinkhorn.solve`.
    """
    # -inf where there is no mass, so that those scores never count; 0 elsewhere
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
                break  # f was computed from this g
        g = log_b - log_reach
    if log_factor is not None:
        scores = scores + log_factor  # the softmax below multiplies the plan by the factor and normalises it
    return torch.softmax(scores + g.unsqueeze(-2), -1)


class _LogSumExp(torch.autograd.Function):
    """``torch.logsumexp`` with an accurate gradient for large inputs.

    torch's gradient is ``exp(x - rounded result)``. At 1e6 in float32 its sum is off by 0.03, and the updates amplify
    the error.
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
