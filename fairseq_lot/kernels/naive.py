"""The kernels' formulas in plain torch, for any dtype and device, with gradients; tuples of the kernels' arguments."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_lot.numerics.log_domain import log_domain_sinkhorn, pad_log_mass

#: log mass of a pad in a decoder's state: far below all others, but finite, so that sums of it have gradients
NO_MASS = -1e30
#: near_far at cross-attention: the share outside of the band counts as zero below this multiple of the dtype's eps
ROUNDING = 84


class LotInputs(NamedTuple):
    """Tensor arguments of LOT attention.

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
    """Other arguments of LOT attention.

    Attributes:
        scale: the score of token x and pivot z is ``scale·x·z``.
        query_updates, key_updates: number of half-updates on the query side and on the key side.
        dropout: probability of dropping one of the query side's n x r weights.
    """

    scale: float
    query_updates: int
    key_updates: int
    dropout: float = 0.0


class NearFarSettings(NamedTuple):
    """Arguments of near_far attention that get no gradient.

    Attributes:
        window: W, at most half a chunk; keys at most W slots from the query have exact scores.
        scale: s, the factor of all scores.
        slopes: of a prior over positions [ALiBi], ``(num_heads,)``; None = no prior.
        key_padding_mask: ``(bsz, n)``, True = pad, whose key and value are not read; None = no pads.
        causal: queries see no later keys. The queries are the last tokens of the keys' sentence.
        tangents: use tangent features, which depend on all keys; not with ``causal``.
    """

    window: int
    scale: float
    slopes: Tensor | None = None
    key_padding_mask: Tensor | None = None
    causal: bool = False
    tangents: bool = False


class NearFarKept(NamedTuple):
    """State of near_far's decoder in float32: the last W + 1 keys, and for each feature sums over all earlier keys.

    Attributes:
        keys, values: ``(bsz, num_heads, at most W + 1, width)``.
        log_mass: ``(bsz, 1, at most W + 1)``, 0 for tokens, NO_MASS for pads; None = no pads so far.
        log_sums: ``(bsz, num_heads, r)``, log of the feature's sum over the earlier keys; None = no earlier keys.
        means: ``(bsz, num_heads, r, value_dim)``, mean of their values, weighted by the feature; None likewise.
    """

    keys: Tensor
    values: Tensor
    log_mass: Tensor | None = None
    log_sums: Tensor | None = None
    means: Tensor | None = None


class ExpectedKeys(NamedTuple):
    """Keys, values and their sums for each feature, as near_far's queries at cross-attention read them.

    ``...`` stands for ``bsz, num_heads``; ``b_jt`` is the log of feature t of key j.

    Attributes:
        key: ``s k``, ``(..., m, d)``; value: ``(..., m, value_dim)``.
        shares: ``softmax_j(b_jt)``, ``(..., m, r)``.
        log_sums: ``logsumexp_j(b_jt)``, ``(..., r)``, float64.
        positions: mean slot of the keys, weighted by the shares, ``(..., r)``, float64.
        means: of the values, weighted by the shares, ``(..., r, value_dim)``.
        probes: vectors whose products with a query give its features: z, ``(num_heads, r, d)``, or with tangents the
            keys' means, weighted by the shares, ``(..., r, d)``, float64.
        constants: subtracted from the logs of a query's features, ``(..., r)``, float64; None without tangents.
        key_padding_mask: ``(bsz, m)``, True = pad.
    """

    key: Tensor
    value: Tensor
    shares: Tensor
    log_sums: Tensor
    positions: Tensor
    means: Tensor
    probes: Tensor
    constants: Tensor | None = None
    key_padding_mask: Tensor | None = None


class SinkhornInputs(NamedTuple):
    """Tensor arguments of Sinkhorn attention.

    Attributes:
        q: ``(bsz, num_heads, n, d)``, k: ``(bsz, num_heads, m, d)`` and v: ``(bsz, num_heads, m, value_dim)``.
        factors: of each head's scores, ``(num_heads,)``, float32; None = 1.
        slopes: ``(num_heads,)``, float32, of a prior over positions [ALiBi]; None = no prior.
        positions: of the keys, ``(bsz or 1, m)``, integers; the queries have the last n of them. None = no prior.
        query_padding_mask: ``(bsz, n)`` and key_padding_mask: ``(bsz, m)``, bool, True = pad; None = no pads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    factors: Tensor | None = None
    slopes: Tensor | None = None
    positions: Tensor | None = None
    query_padding_mask: Tensor | None = None
    key_padding_mask: Tensor | None = None


class SinkhornSettings(NamedTuple):
    """Other arguments of Sinkhorn attention.

    Attributes:
        scale: the scores are ``scale·factor·q·k - slope·distance``.
        num_updates: number of half-updates; the last one is the softmax of the rows.
        dropout: probability of dropping a weight.
    """

    scale: float
    num_updates: int
    dropout: float = 0.0


def convolution(v: Tensor, weight: Tensor) -> Tensor:
    """Depthwise convolution of the values over tokens, ``out_i = Σ_o weight_o v_(i + o - number // 2)``.

    Arguments as for :func:`~fairseq_lot.kernels.choice.convolution`; values outside of the sentence are 0.
    """
    n, number = v.size(2), weight.size(-1)
    weight = weight.repeat(1, v.size(-1) // weight.size(1), 1).unsqueeze(1)
    around = torch.nn.functional.pad(v, (0, 0, number // 2, number // 2))
    return torch.stack([around[:, :, o : o + n] * weight[..., o] for o in range(number)]).sum(0)


def lot(inputs: LotInputs, settings: LotSettings) -> Tensor:
    """Values of LOT attention without dropout, ``(bsz, num_heads, n, value_dim)``, zero at padded queries.

    The values are ``A_q (A_k v)``: the rows of ``A_q`` are the queries' weights on the pivots, and the rows of ``A_k``
    the pivots' weights on the keys. Each sentence must have at least one token that is not a pad.
    """
    q, k, v, pivots, log_masses, query_padding_mask, key_padding_mask = inputs
    query_scores, key_scores = (settings.scale * x @ pivots.transpose(-1, -2) for x in (q, k))
    log_a, log_b = (
        x.new_zeros(x.size(0), 1, x.size(2)) if pads is None else pad_log_mass(pads, x)
        for x, pads in ((q, query_padding_mask), (k, key_padding_mask))
    )
    from_queries = log_domain_sinkhorn(query_scores, log_a, log_masses, num_updates=settings.query_updates)
    to_keys = log_domain_sinkhorn(key_scores.transpose(-1, -2), log_masses, log_b, num_updates=settings.key_updates)
    values = from_queries @ (to_keys @ v)
    return values if query_padding_mask is None else values.masked_fill(query_padding_mask[:, None, :, None], 0.0)


def near_far(
    q: Tensor, k: Tensor, v: Tensor, features: Tensor, feature_bias: Tensor, settings: NearFarSettings
) -> Tensor:
    """Values of near_far attention by the dense formula; arguments as for the kernel.

    The values are ``softmax_j(logs_ij) v``, with a and b as in ``near_far.py``:

        logs_ij = s q_i·k_j if |i - j| ≤ W else log Σ_t exp(a_it + b_jt)
        logs_ij -= slope |i - j|, with slopes

    Rows without mass are zero. The largest tensor is ``(bsz, num_heads, n, n, r)``.
    """
    window, scale, slopes, pads, causal, tangents = settings
    rows, n, r = q.size(2), k.size(2), features.size(1)
    slots = torch.arange(n, device=q.device)
    distance = slots[n - rows :, None] - slots
    hidden = torch.zeros(1, 1, rows, n, dtype=torch.bool, device=q.device)
    if pads is not None:
        hidden = hidden | pads[:, None, None, :]
        k = k.masked_fill(pads[:, None, :, None], 0.0)
    if causal:
        hidden = hidden | (distance < 0)
    empty = hidden.all(-1, keepdim=True)
    key_logs = scale * k @ features.transpose(-1, -2)
    if tangents:
        seen = key_logs
        if pads is not None:
            seen = key_logs.masked_fill((pads & ~pads.all(-1, keepdim=True))[:, None, :, None], -torch.inf)
        means = torch.softmax(seen, 2).transpose(-1, -2) @ k
        query_logs = scale * (q @ means.transpose(-1, -2) - (features * means).sum(-1).unsqueeze(2))
    else:
        query_logs = scale * (q @ features.transpose(-1, -2) - q.square().sum(-1, keepdim=True) / 2)
        key_logs = key_logs - scale / 2 * k.square().sum(-1, keepdim=True)
    query_logs = query_logs + feature_bias[:, None] - math.log(r)
    far = torch.logsumexp(query_logs.unsqueeze(3) + key_logs.unsqueeze(2), -1)
    logs = torch.where(distance.abs() <= window, scale * q @ k.transpose(-1, -2), far)
    if slopes is not None:
        logs = logs - slopes[:, None, None].to(logs.dtype) * distance.abs()
    return torch.softmax(logs.masked_fill(hidden & ~empty, -torch.inf), -1).masked_fill(empty, 0.0) @ v


def near_far_expected(q: Tensor, keys: ExpectedKeys, *, window: int, scale: float) -> Tensor:
    """Values of near_far at cross-attention by the dense formula, which ``transport/expected_band.py`` states."""
    query_logs = scale * q @ keys.probes.to(q.dtype).transpose(-1, -2)
    if keys.constants is None:
        query_logs = query_logs - scale / 2 * q.square().sum(-1, keepdim=True) - math.log(keys.log_sums.size(2)) / 2
    else:
        query_logs = query_logs - keys.constants.unsqueeze(2)
    key_logs = keys.shares.log() + keys.log_sums.unsqueeze(2)
    far = torch.logsumexp(query_logs.unsqueeze(3) + key_logs.unsqueeze(2), -1)
    slots = torch.arange(keys.key.size(2), device=q.device)
    centre = (torch.softmax(far, -1) @ (slots + 0.501).to(q.dtype)).long().unsqueeze(-1)
    logs = torch.where((slots - centre).abs() <= window, q @ keys.key.transpose(-1, -2), far)
    if keys.key_padding_mask is not None:
        logs = logs.masked_fill(keys.key_padding_mask[:, None, None, :], -torch.inf)
    return torch.softmax(logs, -1) @ keys.value


def near_far_at_expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_logs: Tensor,
    log_sums: Tensor,
    means: Tensor,
    shares: Tensor,
    positions: Tensor,
    key_padding_mask: Tensor | None,
    *,
    window: int,
) -> Tensor:
    """Values of near_far at cross with n × m matrices, from the features' sums over all keys."""
    far = query_logs + log_sums.unsqueeze(2)
    features, log_sum = torch.softmax(far, -1), torch.logsumexp(far, -1, keepdim=True).to(q.dtype)
    centre = (features.detach() @ positions.to(features.dtype).unsqueeze(-1)).long()
    band = (torch.arange(k.size(2), device=q.device) - centre).abs() <= window
    if key_padding_mask is not None:
        band = band & ~key_padding_mask[:, None, None, :]
    features = features.to(q.dtype)
    near = (q @ k.transpose(-1, -2)).masked_fill(~band, -torch.inf)
    replaced = (features @ shares.transpose(-1, -2)).masked_fill(~band, 0.0)
    rest = 1 - replaced.sum(-1, keepdim=True)
    some = rest > ROUNDING * torch.finfo(q.dtype).eps
    rest = torch.where(some, rest, 1.0)
    parts = torch.softmax(torch.cat([near, (log_sum + rest.log()).masked_fill(~some, -torch.inf)], -1), -1)
    near, beyond = parts[..., :-1], parts[..., -1:] / rest
    return (near - beyond * replaced) @ v + beyond * features @ means


def sinkhorn_attention(inputs: SinkhornInputs, settings: SinkhornSettings) -> Tensor:
    """Values of Sinkhorn attention without dropout, ``(bsz, num_heads, n, value_dim)``, zero at padded queries.

    Each sentence must have at least one token that is not a pad.
    """
    q, k, v, factors, slopes, positions, query_padding_mask, key_padding_mask = inputs
    scores = settings.scale * q @ k.transpose(-1, -2)
    if factors is not None:
        scores = scores * factors[:, None, None]
    if slopes is not None and positions is not None:
        distance = (positions[:, -q.size(2) :, None] - positions[:, None]).abs().unsqueeze(1)
        scores = scores - slopes[:, None, None] * distance
    log_a, log_b = (
        x.new_zeros(x.size(0), 1, x.size(2)) if pads is None else pad_log_mass(pads, x)
        for x, pads in ((q, query_padding_mask), (k, key_padding_mask))
    )
    values = log_domain_sinkhorn(scores, log_a, log_b, num_updates=settings.num_updates) @ v
    return values if query_padding_mask is None else values.masked_fill(query_padding_mask[:, None, :, None], 0.0)
