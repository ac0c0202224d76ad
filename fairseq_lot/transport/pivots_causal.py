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

# the exponentials of scores below this in size are summed without a peak, in chunks of this length
_LARGEST_WITHOUT_PEAK, _CHUNK_WITHOUT_PEAK = 40.0, 64


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

    Time and memory are O(n · chunk_len · r + n d). Later keys change the rounding of a query's values at most: on the
    CPU they decide which of two ways is taken, :func:`_apply_without_peaks` or :func:`_apply_with_peaks`.

    Args:
        query_weights: w, ``(..., n, r)``, each row a probability vector on the pivots.
        key_scores: S, ``(..., m, r)`` with m ≥ n, divided by epsilon; -inf = no mass (padding). Query i sees keys
            0 .. i + m - n.
        v: ``(..., m, d)``, zero at the pads.
        state: what keys before these left behind; None for a start.
        chunk_len: a constant that trades memory for parallel work; it changes no value.
        with_state: false where no more keys will come, as in training.

    Returns:
        ``(..., n, d)``, zero in rows without any real key, and the state after all keys, or None.
    """
    n, early = query_weights.size(-2), key_scores.size(-2) - query_weights.size(-2)
    if early < 0:
        raise ValueError(f"{n} queries need at least as many keys, got {key_scores.size(-2)}")
    query_weights = pad(query_weights, (0, 0, early, 0)) if early else query_weights  # zeros for the first keys
    # only a CPU can look at the scores without waiting
    if state is None and ways(key_scores).looks and _need_no_peaks(key_scores):
        values, state = _apply_without_peaks(query_weights, key_scores, v, with_state)
    else:
        state = empty_prefix(key_scores, v) if state is None else state
        values, state = _apply_with_peaks(query_weights, key_scores, v, state, chunk_len, with_state)
    return (values[..., early:, :] if early else values), state


def _need_no_peaks(scores):
    """Whether sums of the exponentials of these scores neither overflow nor underflow, whatever keys they are of."""
    if is_exporting():
        return False
    scores = scores.detach()
    low, high = (x.item() for x in scores.aminmax())
    if low == -math.inf:  # pads
        low = scores.masked_fill(scores.isneginf(), 0.0).min().item()
    return low > -_LARGEST_WITHOUT_PEAK and high < _LARGEST_WITHOUT_PEAK


def _apply_without_peaks(query_weights, key_scores, v, with_state):
    """:func:`prefix_apply` from a start, each score exponentiated once: ``(w · exp(S)ᵀ).tril() v`` by chunks."""
    n, least = query_weights.size(-2), math.exp(-_LARGEST_WITHOUT_PEAK)
    reach = torch.exp(key_scores)
    total = reach.cumsum(-2)
    w = query_weights / total.clamp(min=least)  # below that only without a real key
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

    Nothing overflows, and no sum is below 1. Inside a chunk ``exp(S_jt - peak_it)`` is formed for all pairs; from chunk
    to chunk one peak and the sums of each pivot are carried.
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
    w = w / total  # at least 1: one of the terms is where the running peak comes from
    inside = (reach @ w.unsqueeze(-1)).squeeze(-1)  # (..., i, j)
    values = inside @ v + (w * decay) @ past_sums[..., :-1]
    values = values.flatten(-3, -2)[..., :n, :]
    if not with_state:
        return values, None
    sums = decay[..., -1, -1, :].unsqueeze(-1) * past_sums[..., -1, :, :] + added[..., -1, :, :]
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


def _sums_one_by_one(sums, added, peaks):
    """Sums before each chunk, relative to the peaks there.

    Args:
        sums: of the start, ``(..., r, d + 1)``.
        added: what each chunk adds, relative to the peak after it, ``(..., chunks, r, d + 1)``.
        peaks: before each chunk, ``(..., chunks, r)``.
    """
    before = [sums]
    for fading, new in zip(_decay(peaks, 1).unbind(-3), added.unbind(-3)[:-1], strict=True):
        before.append(fading * before[-1] + new)
    return torch.stack(before, -3)


def _sums_by_doubling(sums, added, peaks):
    """:func:`_sums_one_by_one` in as many steps as the number of chunks has binary digits, as a GPU wants it."""
    return _FallingSums.apply(torch.cat([sums.unsqueeze(-3), added[..., :-1, :, :]], -3), peaks)
