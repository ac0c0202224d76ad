"""Causal attention through pivots: every pivot spreads over the keys so far, linear in their number [LOTFormer]."""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

# Scores below this in size need no peak; chunks can then be as long as _WIDE.
_MODERATE, _WIDE = 40.0, 64


@dataclass(frozen=True)
class PrefixState:
    """What the keys so far leave behind, of constant size.

    Attributes:
        peak: ``(..., r)`` largest score per pivot, the lowest finite number before the first real key; no gradient.
        sums: ``(..., r, d + 1)``, ``Σ_j exp(scores_jt - peak_t) [v_j, 1]``; the last entry is at least 1 once there is
            a real key.
    """

    peak: torch.Tensor
    sums: torch.Tensor


def empty_prefix(key_scores: torch.Tensor, v: torch.Tensor) -> PrefixState:
    """The state before the first key; shapes as in :func:`prefix_apply`."""
    peak = torch.full_like(key_scores[..., 0, :], torch.finfo(key_scores.dtype).min, requires_grad=False)
    return PrefixState(peak, v.new_zeros((*peak.shape, v.size(-1) + 1)))


def absorb(state: PrefixState, key_scores: torch.Tensor, v: torch.Tensor) -> PrefixState:
    """The state after some more keys; shapes as in :func:`prefix_apply`."""
    peak = torch.maximum(state.peak, key_scores.detach().amax(-2))
    reach = torch.exp(key_scores - peak.unsqueeze(-2)).transpose(-1, -2)  # (..., r, m)
    decay = torch.exp(state.peak - peak).unsqueeze(-1)
    return PrefixState(peak, decay * state.sums + reach @ pad(v, (0, 1), value=1.0))


def prefix_apply(
    query_weights: torch.Tensor,
    key_scores: torch.Tensor,
    v: torch.Tensor,
    state: PrefixState | None = None,
    *,
    chunk_len: int = 8,
) -> tuple[torch.Tensor, PrefixState]:
    """``A v`` with ``A_ij = Σ_t w_it exp(S_jt) / Σ_{j' ≤ i} exp(S_j't)`` for ``j ≤ i``, 0 for later keys.

    Keys are taken in chunks: inside a chunk ``exp(S_jt - peak_it)`` is formed for all pairs, across chunks only
    :class:`PrefixState` is carried, so time and memory are O(n · chunk_len · r + n d). ``peak_it`` is the largest
    score up to i, so that nothing overflows and no sum of a row with a real key is below 1.

    At the start, and on the CPU, where it costs nothing to look, scores of moderate size are exponentiated once per
    key, without any peak. That check is all that later keys change for a query, and they change rounding alone.

    Args:
        query_weights: w, ``(..., n, r)``, each row a probability vector on the pivots.
        key_scores: S, ``(..., m, r)`` with m ≥ n, divided by epsilon; -inf = no mass (padding). Query i sees keys
            0 .. i + m - n.
        v: ``(..., m, d)``, zero at the pads.
        state: what keys before these left behind; None for a start.
        chunk_len: a constant that trades memory for parallel work; it changes no value.

    Returns:
        ``(..., n, d)``, zero in rows without any real key, and the state after all keys.
    """
    n, early = query_weights.size(-2), key_scores.size(-2) - query_weights.size(-2)
    if early < 0:
        raise ValueError(f"{n} queries need at least as many keys, got {key_scores.size(-2)}")
    if state is None and key_scores.device.type == "cpu" and _moderate(key_scores):
        return _apply_moderate(query_weights, key_scores, v, early)
    state = empty_prefix(key_scores, v) if state is None else state
    if early:
        state = absorb(state, key_scores[..., :early, :], v[..., :early, :])
    chunk_len = min(chunk_len, n)
    w = _chunks(query_weights, chunk_len, 0.0)  # (..., n / chunk_len, chunk_len, r), likewise below
    scores = _chunks(key_scores[..., early:, :], chunk_len, -torch.inf)
    v = _chunks(v[..., early:, :], chunk_len, 0.0)

    running = torch.maximum(scores.detach().cummax(-2).values, _peaks_before(scores, state.peak).unsqueeze(-2))
    past_peak, past_sums, state = _scan(scores, v, running[..., -1, :], state)
    decay = torch.exp(past_peak.unsqueeze(-2) - running)
    order = torch.ones(chunk_len, chunk_len, dtype=torch.bool, device=v.device).tril().unsqueeze(-1)
    # masked before exp, which could overflow for a later key
    reach = (scores.unsqueeze(-3) - running.unsqueeze(-2)).masked_fill(~order, -torch.inf).exp()  # (..., i, j, r)
    total = reach.sum(-2) + decay * past_sums[..., -1].unsqueeze(-2)
    w = w / total.clamp(min=1.0)  # below 1 only when no real key has come: then it is 0, and so are the sums
    inside = (reach @ w.unsqueeze(-1)).squeeze(-1)  # (..., i, j)
    values = inside @ v + (w * decay) @ past_sums[..., :-1]
    return values.flatten(-3, -2)[..., :n, :], state


def _moderate(scores):
    """Sums of these exponentials neither overflow nor underflow, whatever keys they are of."""
    scores = scores.detach()
    return scores.max().item() < _MODERATE and scores.masked_fill(scores.isneginf(), 0.0).min().item() > -_MODERATE


def _apply_moderate(query_weights, key_scores, v, early):
    """:func:`prefix_apply` without peaks."""
    n = query_weights.size(-2)
    reach = torch.exp(key_scores)
    total = reach.cumsum(-2)
    w = query_weights / total[..., early:, :].clamp(min=math.exp(-_MODERATE))  # below that only without a real key
    past, before = reach[..., :early, :].transpose(-1, -2) @ v[..., :early, :], []
    w, reach, v = (_chunks(x, min(n, _WIDE), 0.0) for x in (w, reach[..., early:, :], v[..., early:, :]))
    for added in (reach.transpose(-1, -2) @ v).unbind(-3):
        before.append(past)
        past = past + added
    values = (w @ reach.transpose(-1, -2)).tril() @ v + w @ torch.stack(before, -3)
    peak = key_scores.detach().amax(-2).clamp(min=torch.finfo(key_scores.dtype).min)
    sums = torch.cat([past, total[..., -1, :].unsqueeze(-1)], -1)
    sums = sums * torch.exp(-peak.clamp(min=-_MODERATE)).unsqueeze(-1)  # without a real key they stay 0
    return values.flatten(-3, -2)[..., :n, :], PrefixState(peak, sums)


def _chunks(x, chunk_len, fill):
    """``(..., n, c) -> (..., ⌈n / chunk_len⌉, chunk_len, c)``, the last chunk filled up."""
    return pad(x, (0, 0, 0, -x.size(-2) % chunk_len), value=fill).unflatten(-2, (-1, chunk_len))


def _peaks_before(scores, peak):
    """Largest score before each chunk, ``(..., number of chunks, r)``; ``peak`` is that of the state."""
    largest = torch.cat([peak.unsqueeze(-2), scores.detach().amax(-2)[..., :-1, :]], -2)
    return largest.cummax(-2).values


def _scan(scores, v, peak_after, state):
    """Peaks and sums before each chunk, and the state after the last one."""
    reach = torch.exp(scores - peak_after.unsqueeze(-2)).transpose(-1, -2)
    added = reach @ pad(v, (0, 1), value=1.0)  # (..., chunks, r, d + 1)
    past_peak = torch.cat([state.peak.unsqueeze(-2), peak_after[..., :-1, :]], -2)
    decay = torch.exp(past_peak - peak_after).unsqueeze(-1)
    sums, past = state.sums, []
    for fading, news in zip(decay.unbind(-3), added.unbind(-3), strict=True):
        past.append(sums)
        sums = fading * sums + news
    return past_peak, torch.stack(past, -3), PrefixState(peak_after[..., -1, :], sums)
