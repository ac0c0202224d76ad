"""Logarithms of the features by which near_far approximates the kernel exp(s q·k)."""

import math

import torch

from fairseq_lot.numerics.autograd import once_in_full_precision


def feature_logs(
    x: torch.Tensor, features: torch.Tensor, *, scale: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Logs of positive features, ``s x·z_t - s‖x‖²/2 - (log r)/2`` [FAVOR].

    The product of a query's and a key's feature contains the factor 1/r.

    Args:
        x: queries or keys, ``(bsz, num_heads, n, d)``.
        features: z, ``(num_heads, r, d)``, in any precision.
        scale: s.
        dtype: of the computation and of the logs; None: that of x. Gradients have the dtype of x.

    Returns:
        ``(bsz, num_heads, n, r)``.
    """
    dtype = x.dtype if dtype is None else dtype
    if x.size(2) >= features.size(1):
        return _FeatureLogs.apply(x, features, scale, dtype)
    x = x.to(dtype)
    # few tokens, as in a decoding step: one matrix product per head for the whole batch
    heads = x.transpose(0, 1).flatten(1, 2)
    norms = torch.linalg.vector_norm(heads, dim=-1, keepdim=True).square() + math.log(features.size(1)) / scale
    features = features.to(x.dtype).transpose(-1, -2)
    logs = torch.baddbmm(norms, heads, features, beta=-scale / 2, alpha=scale)
    return logs.unflatten(1, (x.size(0), x.size(2))).transpose(0, 1)


class _FeatureLogs(torch.autograd.Function):
    """:func:`feature_logs` that stores x and z for the gradient, nothing of width r."""

    @staticmethod
    def forward(ctx, x, features, scale, dtype):
        each = features.expand(x.size(0), -1, -1, -1)  # the next line copies and converts in one kernel
        features = each.to(dtype, memory_format=torch.contiguous_format).flatten(0, 1)
        ctx.save_for_backward(x, features)
        ctx.scale = scale
        x = x.to(dtype)
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # one kernel; square().sum() would be two
        norms = torch.addcmul(x.new_full((), math.log(features.size(1)) / scale), norms, norms).flatten(0, 1)
        logs = torch.baddbmm(norms, x.flatten(0, 1), features.transpose(-1, -2), beta=-scale / 2, alpha=scale)
        return logs.unflatten(0, x.shape[:2])

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_logs):
        (x, features), scale = ctx.saved_tensors, ctx.scale
        grad_x = grad_features = None
        flat, grad_logs = x.flatten(0, 1), grad_logs.flatten(0, 1).to(x.dtype)
        if ctx.needs_input_grad[0]:
            grad_x = flat * grad_logs.sum(-1, keepdim=True)
            grad_x = grad_x.baddbmm_(grad_logs, features.to(x.dtype), beta=-scale, alpha=scale).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_features = torch.bmm(grad_logs.transpose(-1, -2), flat).unflatten(0, x.shape[:2]).sum(0).mul_(scale)
        return grad_x, grad_features, None, None


def tangents(
    k: torch.Tensor, shares: torch.Tensor, features: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tangents of softmax's log normaliser at the features, as :func:`tangent_logs` needs them.

    ``L(q) = log Σ_j exp(s q·k_j)`` is convex. Its gradient at z_t is ``s k̄_t``, where k̄_t is the mean of the keys with
    the shares ``softmax_j(s k_j·z_t)``. So the tangent ``L(z_t) + s (q - z_t)·k̄_t`` is a lower bound of L(q).

    Args:
        k: ``(bsz, num_heads, m, d)``, zero at pads.
        shares: ``(bsz, num_heads, m, r)``, zero at pads.
        features: z, ``(num_heads, r, d)``, in any precision.
        scale: s.

    Returns:
        The means k̄, ``(bsz, num_heads, r, d)``; the constants ``s z_t·k̄_t + log r``, ``(bsz, num_heads, r)``.
    """
    means = shares.transpose(-1, -2) @ k
    return means, (features.to(k.dtype) * means).sum(-1) * scale + math.log(features.size(1))


def tangent_logs(q: torch.Tensor, means: torch.Tensor, constants: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Logs of the queries' features, ``s (q - z_t)·k̄_t - log r``, for keys with the logs ``s k·z_t``.

    Summed over all keys, feature t then contributes ``exp(L(z_t) + s (q - z_t)·k̄_t) / r``, its tangent's exponential.

    Args:
        q: ``(bsz, num_heads, n, d)``.
        means: k̄, and constants, from :func:`tangents`.
        scale: s.

    Returns:
        ``(bsz, num_heads, n, r)``.
    """
    parts = constants.unsqueeze(2).flatten(0, 1), q.flatten(0, 1), means.flatten(0, 1).transpose(-1, -2)
    return torch.baddbmm(*parts, beta=-1, alpha=scale).unflatten(0, q.shape[:2])
