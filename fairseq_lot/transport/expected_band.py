"""near_far for cross-attention: each query attends exactly to the keys around its expected position.

The features give the expected position p_i. Written with whole matrices, for queries i, keys j and features t:

    near_ij = q_i·k_j
    far_ij = log Σ_t exp(query_logs_it + key_logs_jt)
    p_i = Σ_j softmax(far)_ij (j + 0.501)
    logs_ij = near_ij if |j - ⌊p_i⌋| ≤ W else far_ij
    values = softmax(logs, -1) v

Each query reads 2W + 1 keys: time and memory are O(n (r + W) d). The features' sum over the keys outside of the band
is computed as the sum over all keys minus the sum over the band; a difference below rounding (1e-5 in float32) counts
as zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import threshold

from fairseq_lot.kernels import choice as kernels
from fairseq_lot.kernels.naive import ROUNDING
from fairseq_lot.numerics.autograd import once_in_full_precision


@dataclass(frozen=True)
class FarSummary:
    """Sums over all keys for each of r features, with the keys' shares in them.

    Attributes:
        log_sums: ``(bsz, num_heads, r)``, ``log Σ_j exp(key_logs_jt)``, in the dtype of key_logs.
        means: ``(bsz, num_heads, r, value_dim)``, means of the values, ``Σ_j shares_jt v_j``.
        positions: ``(bsz, num_heads, r)``, means of the slots, ``Σ_j shares_jt (j + 0.501)``, in the dtype of key_logs;
            no gradient. Equal keys have means of the form k + 1/2: 0.501 instead of 0.5 rounds them up safely, so pads
            on the left do not move the band.
        shares: ``(bsz, num_heads, m, r)``, ``exp(key_logs_jt) / Σ_j' exp(key_logs_j't)``.
    """

    log_sums: Tensor
    means: Tensor
    positions: Tensor
    shares: Tensor


def summarise_far(key_logs: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> FarSummary:
    """Sum over all keys for each feature.

    Args:
        key_logs: ``(bsz, num_heads, m, r)``; float64, so that rounding does not move the band.
        v: ``(bsz, num_heads, m, value_dim)``.
        key_padding_mask: ``(bsz, m)``, True = pad.
    """
    if key_padding_mask is not None:
        key_logs = key_logs.masked_fill(key_padding_mask[:, None, :, None], -torch.inf)
    shares, log_sums = _Shares.apply(key_logs)
    slots = torch.arange(0.501, v.size(2), dtype=shares.dtype, device=v.device)
    positions = shares.detach().transpose(-1, -2) @ slots
    shares = shares.to(v.dtype)
    return FarSummary(log_sums, shares.transpose(-1, -2) @ v, positions, shares)


class _Shares(torch.autograd.Function):
    """``softmax(logs, 2)`` with ``logsumexp(logs, 2)``, in few kernels."""

    @staticmethod
    def forward(ctx, logs):
        shares = torch.softmax(logs, 2)
        ctx.save_for_backward(shares)
        return shares, logs.amax(2) - shares.amax(2).log_()

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_shares, grad_log_sums):
        (shares,) = ctx.saved_tensors
        products = grad_shares * shares
        return torch.addcmul(products, shares, (grad_log_sums - products.sum(2)).unsqueeze(2))


class _Band:
    """The 2W + 1 key slots in each query's band, ``(bsz, num_heads, n, 2W + 1)``.

    Attributes:
        slots: indices of keys, clamped to the sentence.
        hidden: True where the slot is a pad or was clamped.
    """

    def __init__(self, centres: Tensor, src_len: int, key_padding_mask: Tensor | None, window: int):
        wanted = centres + torch.arange(-window, window + 1, device=centres.device)
        self.slots = wanted.clamp(0, src_len - 1)
        self.hidden = self.slots != wanted
        if key_padding_mask is not None:
            pads = key_padding_mask[:, None, None, :].expand(*self.slots.shape[:3], -1)
            self.hidden |= pads.gather(3, self.slots)
        self._index = self.slots.flatten(2).unsqueeze(-1)

    def gather(self, x: Tensor) -> Tensor:
        """``(b, h, m, c) -> (b, h, n, 2W + 1, c)``."""
        return x.gather(2, self._index.expand(-1, -1, -1, x.size(-1))).unflatten(2, self.slots.shape[2:])

    def products(self, keys: Tensor, queries: Tensor, where_hidden: float) -> Tensor:
        """Each query times the keys in its band, ``(b, h, m, c), (b, h, n, c) -> (b, h, n, 2W + 1)``."""
        return torch.where(self.hidden, where_hidden, (self.gather(keys) @ queries.unsqueeze(-1)).squeeze(-1))


def near_far_at_expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_logs: Tensor,
    summary: FarSummary,
    key_padding_mask: Tensor | None,
    *,
    window: int,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``softmax(logs) v`` with the logs at the top of this file, on a GPU by a fused kernel if it supports the case.

    Args:
        q: ``(bsz, num_heads, n, d)``; k: ``(bsz, num_heads, m, d)``, already scaled: ``q·k`` are the scores.
        v: ``(bsz, num_heads, m, value_dim)``.
        query_logs: ``(bsz, num_heads, n, r)``, in the dtype of the summary's log_sums (float64).
        summary: the sums over all keys, from :func:`summarise_far`.
        key_padding_mask: ``(bsz, m)``, True = pad.
        window: W, in tokens.
        need_weights: also return the weights; n × m memory.

    Returns:
        The values, ``(bsz, num_heads, n, value_dim)``; the weights, ``(bsz, num_heads, n, m)``, or None.
    """
    if not need_weights and kernels.wanted(q):
        sums = summary.log_sums, summary.means, summary.shares, summary.positions
        fused = kernels.near_far_at_expected(q, k, v, query_logs, *sums, key_padding_mask, window=window)
        if fused is not None:
            return fused, None
    window = min(window, k.size(2) - 1)  # reaches every key
    far = query_logs + summary.log_sums.unsqueeze(2)
    log_features = torch.log_softmax(far, -1)
    log_sums, features = far[..., :1] - log_features[..., :1], log_features.exp()
    with torch.no_grad():
        band = _Band((features @ summary.positions.unsqueeze(-1)).long(), k.size(2), key_padding_mask, window)
    features, log_sums = features.to(q.dtype), log_sums.to(q.dtype)
    near, replaced = band.products(k, q, -torch.inf), band.products(summary.shares, features, 0.0)
    rounding = ROUNDING * torch.finfo(q.dtype).eps
    rest = threshold(1 - replaced.sum(-1, keepdim=True), rounding, 0.0)
    shares = torch.softmax(torch.cat([near, log_sums + rest.log()], -1), -1)
    near, scale = shares[..., :-1], shares[..., -1:] / rest.clamp(min=rounding)
    near, features = torch.addcmul(near, scale, replaced, value=-1.0), scale * features
    values = (near.unsqueeze(-2) @ band.gather(v)).squeeze(-2)
    parts = (x.flatten(0, 1) for x in (values, features, summary.means))
    values = torch.baddbmm(*parts).unflatten(0, values.shape[:2])
    if not need_weights:
        return values, None
    # a clamped slot adds 0 to the key at the edge; the band's shares cancel up to rounding, hence the clamp
    weights = (features @ summary.shares.transpose(-1, -2)).scatter_add(-1, band.slots, near)
    return values, weights.clamp(min=0.0)
