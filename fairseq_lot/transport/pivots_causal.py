"""Causal attention through pivots: every pivot spreads over the keys so far, linear in their number [LOTFormer]."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fairseq_lot.numerics.autograd import once_in_full_precision
from fairseq_lot.numerics.devices import ways
from fairseq_lot.transport.exporting import is_exporting

# Scores below this in size need no peak; chunks can then be as long as _WIDE.
_MODERATE, _WIDE = 40.0, 64


@dataclass(frozen=True)
class PrefixState:
    """What the keys so far leave behind, of constant size.

    Attributes:
        log_sums: ``(..., r)``, ``log Σ_j exp(scores_jt)``, the lowest finite number before the first real key.
        means: ``(..., r, d)``, ``Σ_j exp(scores_jt) v_j / Σ_j exp(scores_jt)``, zero before the first real key.
    """

    log_sums: Tensor
    means: Tensor


def empty_prefix(key_scores: Tensor, v: Tensor) -> PrefixState:
    """The state before the first key; shapes as in :func:`prefix_apply`."""
    log_sums = torch.full_like(key_scores[..., 0, :], torch.finfo(key_scores.dtype).min, requires_grad=False)
    return PrefixState(log_sums, v.new_zeros((*log_sums.shape, v.size(-1))))


def absorb(state: PrefixState, key_scores: Tensor, v: Tensor) -> PrefixState:
    """The state after one more key: five kernels on a GPU.

    Args:
        state: what the keys before this one left behind.
        key_scores: ``(..., r)`` of the key, -inf = no mass (padding).
        v: ``(..., d)``, its value.
    """
    log_sums = torch.logaddexp(state.log_sums, key_scores)
    share = torch.exp(key_scores - log_sums)
    return PrefixState(log_sums, torch.lerp(state.means, v.unsqueeze(-2), share.unsqueeze(-1)))


def prefix_apply(
    query_weights: Tensor,
    key_scores: Tensor,
    v: Tensor,
    state: PrefixState | None = None,
    *,
    chunk_len: int = 8,
    with_state: bool = True,
) -> tuple[Tensor, PrefixState | None]:
    """``A v`` with ``A_ij = Σ_t w_it exp(S_jt) / Σ_{j' ≤ i} exp(S_j't)`` for ``j ≤ i``, 0 for later keys.

    Keys are taken in chunks: inside a chunk ``exp(S_jt - peak_it)`` is formed for all pairs, across chunks only a peak
    and sums per pivot are carried, so time and memory are O(n · chunk_len · r + n d). ``peak_it`` is the largest score
    up to i, so that nothing overflows and no sum is below 1.

    At the start, and on the CPU, where it costs nothing to look, scores of moderate size are exponentiated once per
    key, without any peak. That check is all that later keys change for a query, and they change rounding alone.

    Args:
        query_weights: w, ``(..., n, r)``, each row a probability vector on the pivots.
        key_scores: S, ``(..., m, r)`` with m ≥ n, divided by epsilon; -inf = no mass (padding). Query i sees keys
            0 .. i + m - n.
        v: ``(..., m, d)``, zero at the pads.
        state: what keys before these left behind; None for a start.
        chunk_len: a constant that trades memory for parallel work; it changes no value.
        with_state: no more keys will come when it is false, as in training.

    Returns:
        ``(..., n, d)``, zero in rows without any real key, and the state after all keys, or None.
    """
    n, early = query_weights.size(-2), key_scores.size(-2) - query_weights.size(-2)
    if early < 0:
        raise ValueError(f"{n} queries need at least as many keys, got {key_scores.size(-2)}")
    if early:  # for the first keys, queries that want nothing of them
        query_weights = pad(query_weights, (0, 0, early, 0))
        values, state = prefix_apply(query_weights, key_scores, v, state, chunk_len=chunk_len, with_state=with_state)
        return values[..., early:, :], state
    if state is None and ways(key_scores).looks and _moderate(key_scores):
        return _apply_moderate(query_weights, key_scores, v, with_state)
    peak, sums = _opened(empty_prefix(key_scores, v) if state is None else state)
    chunk_len = min(chunk_len, n)
    w = _chunks(query_weights, chunk_len, 0.0)  # (..., n / chunk_len, chunk_len, r), likewise below
    scores, v = _chunks(key_scores, chunk_len, -torch.inf), _chunks(v, chunk_len, 0.0)

    # the largest score before each chunk, (..., n / chunk_len, r), and the largest up to each key
    past_peak = torch.cat([peak.unsqueeze(-2), scores[..., :-1, :, :].amax(-2)], -2).detach().cummax(-2).values
    running = torch.maximum(scores.detach().cummax(-2).values, past_peak.unsqueeze(-2))
    past_sums, last = _scan(scores, v, past_peak, running[..., -1, :], sums)
    decay = torch.exp(past_peak.unsqueeze(-2) - running)
    order = torch.ones(chunk_len, chunk_len, dtype=torch.bool, device=v.device).tril().unsqueeze(-1)
    # masked before exp, which could overflow for a later key
    reach = (scores.unsqueeze(-3) - running.unsqueeze(-2)).masked_fill(~order, -torch.inf).exp()  # (..., i, j, r)
    total = reach.sum(-2) + decay * past_sums[..., -1].unsqueeze(-2)
    w = w / total  # at least 1: one of the terms is where the running peak comes from
    inside = (reach @ w.unsqueeze(-1)).squeeze(-1)  # (..., i, j)
    values = inside @ v + (w * decay) @ past_sums[..., :-1]
    values = values.flatten(-3, -2)[..., :n, :]
    if not with_state:
        return values, None
    sums = decay[..., -1, -1, :].unsqueeze(-1) * past_sums[..., -1, :, :] + last
    return values, _closed(running[..., -1, -1, :], sums)


def _opened(state):
    """A state as a score per pivot, ``(..., r)``, and ``Σ_j exp(scores_jt - that) [v_j, 1]``, ``(..., r, d + 1)``.

    Before the first key it counts as one key of the lowest score and of value 0, which no real key leaves a trace of.
    As all peaks the scores have no gradient; if the state has one, it goes through the sums.
    """
    peak, sums = state.log_sums.detach(), pad(state.means, (0, 1), value=1.0)
    if state.log_sums.requires_grad:
        sums = sums * torch.exp(state.log_sums - peak).unsqueeze(-1)
    return peak, sums


def _closed(peak, sums):
    """The state of a score per pivot and the sums relative to it, each of which counts 1 at least."""
    total = sums[..., -1]
    return PrefixState(peak + total.log(), sums[..., :-1] / total.unsqueeze(-1))


def _moderate(scores):
    """Sums of these exponentials neither overflow nor underflow, whatever keys they are of."""
    if is_exporting():
        return False
    scores = scores.detach()
    low, high = (x.item() for x in scores.aminmax())
    if low == -math.inf:  # pads
        low = scores.masked_fill(scores.isneginf(), 0.0).min().item()
    return low > -_MODERATE and high < _MODERATE


def _apply_moderate(query_weights, key_scores, v, with_state):
    """:func:`prefix_apply` without peaks."""
    n = query_weights.size(-2)
    reach = torch.exp(key_scores)
    total = reach.cumsum(-2)
    w = query_weights / total.clamp(min=math.exp(-_MODERATE))  # below that only without a real key
    w, reach, v = (_chunks(x, min(n, _WIDE), 0.0) for x in (w, reach, v))
    values = (w @ reach.transpose(-1, -2)).tril() @ v
    is_one = reach.size(-3) == 1
    if is_one and not with_state:
        return values.squeeze(-3), None
    past, *others = (reach.transpose(-1, -2) @ v).unbind(-3)
    before = [torch.zeros_like(past)]
    for added in others:
        before.append(past)
        past = past + added
    if not is_one:
        values = values + w @ torch.stack(before, -3)
    values = values.flatten(-3, -2)[..., :n, :]
    if not with_state:
        return values, None
    total = total[..., -1, :]
    some = total.clamp(min=math.exp(-_MODERATE))
    log_sums = some.log().masked_fill(total == 0, torch.finfo(total.dtype).min)
    return values, PrefixState(log_sums, past / some.unsqueeze(-1))


def _chunks(x, chunk_len, fill):
    """``(..., n, c) -> (..., ⌈n / chunk_len⌉, chunk_len, c)``, the last chunk filled up."""
    missing = -x.size(-2) % chunk_len
    x = pad(x, (0, 0, 0, missing), value=fill) if missing else x  # pad copies even where nothing is missing
    return x.unflatten(-2, (-1, chunk_len))


def falling_sums(chunks: Tensor, decay: Callable[[int], Tensor], *, reverse: bool = False) -> Tensor:
    """Sums of all chunks so far, which decay on the way, in as many steps as the number of chunks has binary digits.

    Args:
        chunks: along axis -3.
        decay: what is left of a sum after so many chunks; one factor, or one for each chunk that has so many before it.
        reverse: of all chunks from here on.
    """
    reach = 1
    while reach < chunks.size(-3):
        early, late = slice(None, -reach), slice(reach, None)
        to, of = (early, late) if reverse else (late, early)
        sums = chunks.clone()
        sums[..., to, :, :].addcmul_(decay(reach), chunks[..., of, :, :])
        chunks, reach = sums, 2 * reach
    return chunks


class _FallingSums(torch.autograd.Function):
    """:func:`falling_sums`, each relative to the peak of its chunk; peaks get no gradient."""

    @staticmethod
    def forward(ctx, chunks, peaks):
        ctx.save_for_backward(peaks)
        return falling_sums(chunks, lambda reach: _decay(peaks, reach))

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_sums):
        (peaks,) = ctx.saved_tensors
        return falling_sums(grad_sums, lambda reach: _decay(peaks, reach), reverse=True), None


def _decay(peaks, reach):
    """What is left of sums ``reach`` chunks later."""
    return torch.exp(peaks[..., :-reach, :] - peaks[..., reach:, :]).unsqueeze(-1)


def _scan(scores, v, peaks, peaks_after, sums):
    """Sums before each chunk, relative to the peaks there, and what the last one adds."""
    reach = torch.exp(scores - peaks_after.unsqueeze(-2)).transpose(-1, -2)
    added = reach @ pad(v, (0, 1), value=1.0)  # (..., chunks, r, d + 1)
    if not ways(scores).adds_one_by_one:
        past = _FallingSums.apply(torch.cat([sums.unsqueeze(-3), added[..., :-1, :, :]], -3), peaks)
        return past, added[..., -1, :, :]
    before, news = [sums], added.unbind(-3)
    for fading, new in zip(_decay(peaks, 1).unbind(-3), news[:-1], strict=True):
        before.append(fading * before[-1] + new)
    return torch.stack(before, -3), news[-1]
