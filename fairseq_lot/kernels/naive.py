"""What the kernels of LOT and near_far compute, in plain torch: of any dtype, on any device, with gradients."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_lot.numerics.log_domain import log_domain_sinkhorn, pad_log_mass

#: the log of no mass in what a decoder keeps: far below all others, and finite, so that sums of it have gradients
NO_MASS = -1e30
#: near_far at cross: a share that is left over counts as zero below so many units of the precision
ROUNDING = 84


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


class NearFarSettings(NamedTuple):
    """The settings of near_far attention, and its tensors without a gradient.

    Attributes:
        window: W, at most half a chunk.
        scale: s.
        slopes: of ALiBi, ``(num_heads,)``; None: without.
        key_padding_mask: ``(bsz, n)``, True = a key without mass, which is not read; None: without.
        causal: no key after the query; queries are the last tokens of the keys' sentence.
        tangents: features are tangents, made of all keys; not causal.
    """

    window: int
    scale: float
    slopes: Tensor | None = None
    key_padding_mask: Tensor | None = None
    causal: bool = False
    tangents: bool = False


class NearFarKept(NamedTuple):
    """What near_far's decoder keeps: the last W + 1 keys, and sums over all keys before them, in float32.

    Attributes:
        keys, values: ``(bsz, num_heads, at most W + 1, width)``.
        log_mass: ``(bsz, 1, at most W + 1)``, 0, and NO_MASS at pads; None: no pads so far.
        log_sums, means: of the features, ``(bsz, num_heads, r)`` and ``(bsz, num_heads, r, value_dim)``; None: no key
            has left the window.
    """

    keys: Tensor
    values: Tensor
    log_mass: Tensor | None = None
    log_sums: Tensor | None = None
    means: Tensor | None = None


class ExpectedKeys(NamedTuple):
    """What a query at cross needs of all keys, ``(bsz, num_heads, ...)``.

    Attributes:
        key: ``s k``, ``(..., m, d)``; value: ``(..., m, value_dim)``.
        shares: of the keys in each feature, ``(..., m, r)``.
        log_sums, positions: ``(..., r)``, float64: log sums of the features over the keys, and the mean slot.
        means: of the values by the shares, ``(..., r, value_dim)``.
        probes: what queries are multiplied with: z, ``(num_heads, r, d)``, or with tangents the means of the keys by
            the shares, ``(..., r, d)``, float64.
        constants: of the tangents, ``(..., r)``, float64; None: without tangents.
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
    """The tensors of Sinkhorn attention.

    Attributes:
        q: ``(bsz, num_heads, n, d)``, k: ``(bsz, num_heads, m, d)`` and v: ``(bsz, num_heads, m, value_dim)``.
        factors: ``(num_heads,)``, float32, by which the scores of each head are multiplied; None = 1.
        slopes: ``(num_heads,)``, float32, of a prior over positions [ALiBi]; None = no prior.
        positions: ``(bsz or 1, m)``, integers, of the keys; the queries are the last n of them. None = no prior.
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
    """The numbers of Sinkhorn attention.

    Attributes:
        scale: the scores are ``scale·factor·q·k - slope·distance``.
        num_updates: half-updates, the last of which is a softmax of the rows.
        dropout: probability of dropping a weight.
    """

    scale: float
    num_updates: int
    dropout: float = 0.0


def convolution(v: Tensor, weight: Tensor) -> Tensor:
    """Each value with its neighbours' over tokens; arguments as for :func:`~fairseq_lot.kernels.choice.convolution`."""
    n, number = v.size(2), weight.size(-1)
    weight = weight.repeat(1, v.size(-1) // weight.size(1), 1).unsqueeze(1)
    around = torch.nn.functional.pad(v, (0, 0, number // 2, number // 2))
    return torch.stack([around[:, :, o : o + n] * weight[..., o] for o in range(number)]).sum(0)


def lot(inputs: LotInputs, settings: LotSettings) -> Tensor:
    """Values of LOT attention without dropout, ``(bsz, num_heads, n, value_dim)``; no sentence may be of pads alone."""
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
    """Values of near_far attention by the dense formula, whose largest tensor is n x n x r; arguments as the kernel's.

    Zero in rows without mass.
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
    """Values of near_far with the band where the features expect it, by the dense formula."""
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


def sinkhorn_attention(inputs: SinkhornInputs, settings: SinkhornSettings) -> Tensor:
    """Values of Sinkhorn attention without dropout, ``(bsz, num_heads, n, value_dim)``; as for :func:`lot`."""
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
