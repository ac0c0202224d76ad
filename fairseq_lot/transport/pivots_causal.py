"""Causal attention through pivots in linear time: each pivot spreads over the keys so far [LOTFormer]."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fairseq_lot.numerics.autograd import once_in_full_precision
from fairseq_lot.numerics.devices import ways
from fairseq_lot.transport.exporting import is_exporting

# if all scores are smaller than this in size, no peak is subtracted, and chunks have this length
_LARGEST_WITHOUT_PEAK, _CHUNK_WITHOUT_PEAK = 40.0, 64


@dataclass(frozen=True)
class PrefixState:
    """Sums over the keys so far; the size does not grow with their number.

    Attributes:
        log_sums: ``(..., r)``, ``log Σ_j exp(scores_jt)``; the lowest finite number before the first real key.
        means: ``(..., r, d)``, ``Σ_j exp(scores_jt) v_j / Σ_j exp(scores_jt)``; zero before the first real key.
    """

    log_sums: Tensor
    means: Tensor


def empty_prefix(key_scores: Tensor, v: Tensor) -> PrefixState:
    """The state before the first key; shapes as in :func:`prefix_apply`."""
    log_sums = torch.full_like(key_scores[..., 0, :], torch.finfo(key_scores.dtype).min, requires_grad=False)
    return PrefixState(log_sums, v.new_zeros((*log_sums.shape, v.size(-1))))


def absorb(state: PrefixState, key_scores: Tensor, v: Tensor) -> PrefixState:
    """The state after one more key, in five kernels on a GPU.

    Args:
        state: the state before this key.
        key_scores: ``(..., r)``, scores of the key; -inf = no mass (padding).
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

    Time and memory are O(n · chunk_len · r + n d). Later keys change a query's values by rounding at most: on a CPU
    all scores decide between :func:`_apply_without_peaks` and :func:`_apply_with_peaks`.

    Args:
        query_weights: w, ``(..., n, r)``, each row a probability vector on the pivots.
        key_scores: S, ``(..., m, r)`` with m ≥ n, divided by epsilon; -inf = no mass (padding). Query i sees keys
            0 .. i + m - n.
        v: ``(..., m, d)``, zero at the pads.
        state: the state after earlier keys; None if there are none.
        chunk_len: trades memory for parallel work; changes values by rounding only.
        with_state: return the state; false in training, where no keys follow.

    Returns:
        The values, ``(..., n, d)``, zero in rows without a real key; the state after all keys, or None.

    Raises:
        ValueError: fewer keys than queries.
    """
    n, early = query_weights.size(-2), key_scores.size(-2) - query_weights.size(-2)
    if early < 0:
        raise ValueError(f"{n} queries need at least as many keys, got {key_scores.size(-2)}")
    query_weights = pad(query_weights, (0, 0, early, 0)) if early else query_weights  # zeros for the first keys
    # on a GPU the host would wait to read the scores
    if state is None and ways(key_scores).looks and _need_no_peaks(key_scores):
        values, state = _apply_without_peaks(query_weights, key_scores, v, with_state)
    else:
        state = empty_prefix(key_scores, v) if state is None else state
        values, state = _apply_with_peaks(query_weights, key_scores, v, state, chunk_len, with_state)
    return (values[..., early:, :] if early else values), state


def _need_no_peaks(scores):
    """Whether sums of ``exp(scores)`` over any keys neither overflow nor underflow."""
    if is_exporting():
        return False
    scores = scores.detach()
    low, high = (x.item() for x in scores.aminmax())
    if low == -math.inf:  # pads
        low = scores.masked_fill(scores.isneginf(), 0.0).min().item()
    return low > -_LARGEST_WITHOUT_PEAK and high < _LARGEST_WITHOUT_PEAK


def _apply_without_peaks(query_weights, key_scores, v, with_state):
    """:func:`prefix_apply` without a state, for moderate scores: ``(w · exp(S)ᵀ).tril() v``, chunk by chunk."""
    n, least = query_weights.size(-2), math.exp(-_LARGEST_WITHOUT_PEAK)
    reach = torch.exp(key_scores)
    total = reach.cumsum(-2)
    w = query_weights / total.clamp(min=least)  # clamps only where there is no real key yet
    w, reach, v = (_chunks(x, min(n, _CHUNK_WITHOUT_PEAK), 0.0) for x in (w, reach, v))
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
    some = total.clamp(min=least)
    log_sums = some.log().masked_fill(total == 0, torch.finfo(total.dtype).min)
    return values, PrefixState(log_sums, past / some.unsqueeze(-1))


def _apply_with_peaks(query_weights, key_scores, v, state, chunk_len, with_state):
    """:func:`prefix_apply` for scores of any size: exponentials are relative to ``peak_it``, the largest score up to i.

    Nothing overflows, and no sum is below 1. Inside a chunk ``exp(S_jt - peak_it)`` is computed for all pairs; from
    chunk to chunk a peak and sums per pivot are carried.
    """
    n = query_weights.size(-2)
    chunk_len = min(chunk_len, n)
    peak, sums = _opened(state)
    w = _chunks(query_weights, chunk_len, 0.0)  # (..., n / chunk_len, chunk_len, r), likewise below
    scores, v = _chunks(key_scores, chunk_len, -torch.inf), _chunks(v, chunk_len, 0.0)

    # the largest score before each chunk, (..., n / chunk_len, r), and the largest up to each key
    past_peak = torch.cat([peak.unsqueeze(-2), scores[..., :-1, :, :].amax(-2)], -2).detach().cummax(-2).values
    running = torch.maximum(scores.detach().cummax(-2).values, past_peak.unsqueeze(-2))
    shares = torch.exp(scores - running[..., -1, :].unsqueeze(-2)).transpose(-1, -2)
    added = shares @ pad(v, (0, 1), value=1.0)  # (..., n / chunk_len, r, d + 1)
    past_sums = (_sums_one_by_one if ways(scores).adds_one_by_one else _sums_by_doubling)(sums, added, past_peak)
    decay = torch.exp(past_peak.unsqueeze(-2) - running)
    order = torch.ones(chunk_len, chunk_len, dtype=torch.bool, device=v.device).tril().unsqueeze(-1)
    # masked before exp, which could overflow for a later key
    reach = (scores.unsqueeze(-3) - running.unsqueeze(-2)).masked_fill(~order, -torch.inf).exp()  # (..., i, j, r)
    total = reach.sum(-2) + decay * past_sums[..., -1].unsqueeze(-2)
    w = w / total  # total is at least 1: the key of the running peak contributes 1
    inside = (reach @ w.unsqueeze(-1)).squeeze(-1)  # (..., i, j)
    values = inside @ v + (w * decay) @ past_sums[..., :-1]
    values = values.flatten(-3, -2)[..., :n, :]
    if not with_state:
        return values, None
    sums = decay[..., -1, -1, :].unsqueeze(-1) * past_sums[..., -1, :, :] + added[..., -1, :, :]
    return values, _closed(running[..., -1, -1, :], sums)


def _opened(state):
    """A state as peaks, ``(..., r)``, and the sums ``Σ_j exp(scores_jt - peak_t) [v_j, 1]``, ``(..., r, d + 1)``.

    The empty state becomes one key of the lowest score and of value 0; its weight underflows as soon as a real key
    arrives. Peaks have no gradient; the gradient of a state goes through the sums.
    """
    peak, sums = state.log_sums.detach(), pad(state.means, (0, 1), value=1.0)
    if state.log_sums.requires_grad:
        sums = sums * torch.exp(state.log_sums - peak).unsqueeze(-1)
    return peak, sums


def _closed(peak, sums):
    """The inverse of :func:`_opened`, for sums whose last column is at least 1."""
    total = sums[..., -1]
    return PrefixState(peak + total.log(), sums[..., :-1] / total.unsqueeze(-1))


def _chunks(x, chunk_len, fill):
    """``(..., n, c) -> (..., ⌈n / chunk_len⌉, chunk_len, c)``; the last chunk is padded with ``fill``."""
    missing = -x.size(-2) % chunk_len
    x = pad(x, (0, 0, 0, missing), value=fill) if missing else x  # pad copies even if nothing is missing
    return x.unflatten(-2, (-1, chunk_len))


def falling_sums(chunks: Tensor, decay: Callable[[int], Tensor], *, reverse: bool = False) -> Tensor:
    """Decaying prefix sums over chunks, in ⌈log2(count)⌉ steps.

    Args:
        chunks: ``(..., count, r, c)``.
        decay: a function of a number of chunks k: the factor by which a sum decays over k chunks. It broadcasts to
            ``(..., count - k, r, c)``, one factor for each pair of chunks at distance k.
        reverse: suffix sums.

    Returns:
        For each chunk the sum of the chunks up to it, itself included; shaped like ``chunks``.
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
    """:func:`falling_sums` for chunks that are stored relative to peaks.

    Chunk i is stored as ``exp(-peak_i)`` times its value, and so is the sum up to chunk i: ``(..., count, r, c)``. The
    peaks, ``(..., count, r)``, get no gradient.
    """

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
    """Factors that convert each sum from its own peak to the peak ``reach`` chunks later."""
    return torch.exp(peaks[..., :-reach, :] - peaks[..., reach:, :]).unsqueeze(-1)


def _sums_one_by_one(sums, added, peaks):
    """Sums before each chunk, relative to its peaks.

    Args:
        sums: before the first chunk, ``(..., r, d + 1)``.
        added: sums over each chunk, relative to the peaks after it, ``(..., chunks, r, d + 1)``.
        peaks: before each chunk, ``(..., chunks, r)``.
    """
    before = [sums]
    for fading, new in zip(_decay(peaks, 1).unbind(-3), added.unbind(-3)[:-1], strict=True):
        before.append(fading * before[-1] + new)
    return torch.stack(before, -3)


def _sums_by_doubling(sums, added, peaks):
    """:func:`_sums_one_by_one` in ⌈log2(chunks)⌉ steps, for a GPU."""
    return _FallingSums.apply(torch.cat([sums.unsqueeze(-3), added[..., :-1, :, :]], -3), peaks)
