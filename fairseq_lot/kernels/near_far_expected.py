"""near_far at cross-attention, from the features' sums over all keys.

``fairseq_lot/transport/expected_band.py`` has the formula. ``attend_expected`` is for translation: one launch, without
gradients. ``expected_forward`` and ``expected_backward`` are for training: one launch each way. Logs of the features
and expected positions are float64, as in plain torch, so that rounding does not move the band.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_lot.kernels import launch
from fairseq_lot.kernels.blocks import Blocks, tuned
from fairseq_lot.kernels.naive import ROUNDING, ExpectedKeys
from fairseq_lot.kernels.tiles import NEG_INF
from fairseq_lot.numerics.autograd import once_in_full_precision

WARPS, STAGES = 4, 1


@triton.jit
def _band(far, q, keys, shares, positions, pads, m, r, window, d, key_stride, rounding,
          HAS_PADS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """One query's band and its weights, from ``far``, the float64 logs of its features' sums over all keys.

    The pointers are those of the query's sentence and head.

    Returns:
        The band's slots, with where they are real keys; the features' shares; the softmax over the band and the rest;
        the features' shares of the band's keys; the rest's weight, divided by the rest's share.
    """
    t, w, e = tl.arange(0, R), tl.arange(0, W), tl.arange(0, D)
    is_t, is_e = t < r, e < d
    top = tl.max(far, 0)
    powers = tl.exp(far - top)
    total = tl.sum(powers, 0)
    log_sum = (top + tl.log(total)).to(tl.float32)
    expected = tl.sum(powers / total * tl.load(positions + t, mask=is_t, other=0.0), 0)
    features = (powers / total).to(tl.float32)

    slot = expected.to(tl.int64) - window + w
    shown = (w <= 2 * window) & (slot >= 0) & (slot < m)
    if HAS_PADS:
        shown = shown & (tl.load(pads + slot, mask=shown, other=1) == 0)
    k = tl.load(keys + slot[:, None] * key_stride + e[None, :], mask=shown[:, None] & is_e[None, :], other=0.0)
    near = tl.where(shown, tl.sum(k.to(tl.float32) * q[None, :], 1), NEG_INF)
    s = tl.load(shares + slot[:, None] * r + t[None, :], mask=shown[:, None] & is_t[None, :], other=0.0)
    replaced = tl.sum(s.to(tl.float32) * features[None, :], 1)
    rest = 1.0 - tl.sum(replaced, 0)
    rest = tl.where(rest > rounding, rest, 0.0)
    rest_log = tl.where(rest > 0.0, log_sum + tl.log(tl.where(rest > 0.0, rest, 1.0)), NEG_INF)
    peak = tl.maximum(tl.max(near, 0), rest_log)
    near, beyond = tl.exp(near - peak), tl.exp(rest_log - peak)
    total = tl.sum(near, 0) + beyond
    return slot, shown, features, near / total, replaced, beyond / total / tl.maximum(rest, rounding)


@triton.jit(do_not_specialize=launch.RUNTIME)
def attend_expected(Q, KEYS, VALUES, SHARES, PROBES, CONSTANTS, LOG_SUMS, POSITIONS, MEANS, PADS, OUT,
                    m, r, window, d, dv, sqb, sqh, sqn, heads, rounding, scale,
                    TANGENTS: tl.constexpr, HAS_PADS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
                    DV: tl.constexpr):  # fmt: skip
    """Values of one query, written to OUT ``(programs, n, dv)``; the other tensors are those of ``ExpectedKeys``.

    A program reads the 2W + 1 keys and values of the query's band, and r sums over all keys. The keys outside of the
    band count as these sums minus the band's share. Grid: sentence and head, query.
    """
    g, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, head = g // heads, g % heads
    t, e, ev = tl.arange(0, R), tl.arange(0, D), tl.arange(0, DV)
    is_t, is_e, is_ev = t < r, e < d, ev < dv
    q = tl.load(Q + b * sqb + head * sqh + i * sqn + e, mask=is_e, other=0.0).to(tl.float32)
    wide = q.to(tl.float64)
    row = head * r + t
    if TANGENTS:
        row = g * r + t
    probes = tl.load(PROBES + row[:, None] * d + e[None, :], mask=is_t[:, None] & is_e[None, :], other=0.0)
    logs = scale * tl.sum(probes.to(tl.float64) * wide[None, :], 1)
    if TANGENTS:
        logs -= tl.load(CONSTANTS + g * r + t, mask=is_t, other=0.0)
    else:
        logs -= scale * 0.5 * tl.sum(wide * wide, 0) + 0.5 * tl.log(r.to(tl.float64))
    far = tl.where(is_t, logs + tl.load(LOG_SUMS + g * r + t, mask=is_t, other=0.0), NEG_INF)
    slot, shown, features, near, replaced, beyond = _band(
        far, q, KEYS + g * m * d, SHARES + g * m * r, POSITIONS + g * r, PADS + b * m,
        m, r, window, d, d, rounding, HAS_PADS, R, W, D,
    )  # fmt: skip
    weights = near - beyond * replaced
    place = g * m + slot
    values = tl.load(VALUES + place[:, None] * dv + ev[None, :], mask=shown[:, None] & is_ev[None, :], other=0.0)
    means = tl.load(MEANS + (g * r + t)[:, None] * dv + ev[None, :], mask=is_t[:, None] & is_ev[None, :], other=0.0)
    out = tl.sum(weights[:, None] * values.to(tl.float32), 0)
    out += beyond * tl.sum(features[:, None] * means.to(tl.float32), 0)
    place = (g * tl.num_programs(1) + i) * dv
    tl.store(OUT + place + ev, out.to(OUT.dtype.element_ty), mask=is_ev)


@triton.jit
def _read(q, keys, values, query_logs, log_sums, positions, means, shares, pads,
          m, r, window, d, dv, key_stride, value_stride, rounding,
          HAS_PADS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr):  # fmt: skip
    """Load all that the forward and the backward kernel need of one query; compute its weights.

    The first pointer is of the query, the others are of its sentence and head.

    Returns:
        The query; slots, where they are real, features, near and beyond of :func:`_band`; the weights of the band's
        values; these values; the features' means. All but the slots and the mask are float32.
    """
    t, e, ev = tl.arange(0, R), tl.arange(0, D), tl.arange(0, DV)
    is_t, is_ev = t < r, ev < dv
    q = tl.load(q + e, mask=e < d, other=0.0).to(tl.float32)
    far = tl.load(query_logs + t, mask=is_t, other=NEG_INF) + tl.load(log_sums + t, mask=is_t, other=0.0)
    slot, shown, features, near, replaced, beyond = _band(
        far, q, keys, shares, positions, pads, m, r, window, d, key_stride, rounding, HAS_PADS, R, W, D
    )
    is_v = shown[:, None] & is_ev[None, :]
    v = tl.load(values + slot[:, None] * value_stride + ev[None, :], mask=is_v, other=0.0).to(tl.float32)
    means = tl.load(means + t[:, None] * dv + ev[None, :], mask=is_t[:, None] & is_ev[None, :], other=0.0)
    return q, slot, shown, features, near, beyond, near - beyond * replaced, v, means.to(tl.float32)


@triton.jit(do_not_specialize=launch.RUNTIME)
def expected_forward(Q, K, V, QUERY_LOGS, LOG_SUMS, POSITIONS, MEANS, SHARES, PADS, OUT,
                   m, r, window, d, dv, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, heads, rounding,
                   HAS_PADS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
                   DV: tl.constexpr):  # fmt: skip
    """Values of one query, written to OUT ``(programs, n, dv)``. Grid: sentence and head, query."""
    g, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, head = g // heads, g % heads
    ev = tl.arange(0, DV)
    is_ev = ev < dv
    row = g * tl.num_programs(1) + i
    keys = K + b * skb + head * skh
    q, slot, shown, features, near, beyond, weights, v, means = _read(
        Q + b * sqb + head * sqh + i * sqn, keys, V + b * svb + head * svh, QUERY_LOGS + row * r, LOG_SUMS + g * r,
        POSITIONS + g * r, MEANS + g * r * dv, SHARES + g * m * r, PADS + b * m,
        m, r, window, d, dv, skn, svn, rounding, HAS_PADS, R, W, D, DV,
    )  # fmt: skip
    out = tl.sum(weights[:, None] * v, 0) + beyond * tl.sum(features[:, None] * means, 0)
    tl.store(OUT + row * dv + ev, out.to(OUT.dtype.element_ty), mask=is_ev)


@triton.jit(do_not_specialize=launch.RUNTIME)
def expected_backward(Q, K, V, QUERY_LOGS, LOG_SUMS, POSITIONS, MEANS, SHARES, PADS, GRAD_OUT,
                   GRAD_Q, GRAD_LOGS, FAR_WEIGHTS, GRAD_K, GRAD_V, GRAD_SHARES,
                   m, r, window, d, dv, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sdb, sdh, sdn, heads, rounding,
                   HAS_PADS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
                   DV: tl.constexpr):  # fmt: skip
    """Gradients of one query's values.

    Writes GRAD_Q, GRAD_LOGS and the weights of the means, FAR_WEIGHTS, ``(programs, n, r)``. Adds to GRAD_K, GRAD_V and
    GRAD_SHARES, float32, by atomics: bands of other queries have the same keys. Grid: sentence and head, query.
    """
    g, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, head = g // heads, g % heads
    t, e, ev = tl.arange(0, R), tl.arange(0, D), tl.arange(0, DV)
    is_t, is_e, is_ev = t < r, e < d, ev < dv
    row = g * tl.num_programs(1) + i
    keys = K + b * skb + head * skh
    q, slot, shown, features, near, beyond, weights, v, means = _read(
        Q + b * sqb + head * sqh + i * sqn, keys, V + b * svb + head * svh, QUERY_LOGS + row * r, LOG_SUMS + g * r,
        POSITIONS + g * r, MEANS + g * r * dv, SHARES + g * m * r, PADS + b * m,
        m, r, window, d, dv, skn, svn, rounding, HAS_PADS, R, W, D, DV,
    )  # fmt: skip
    grad = tl.load(GRAD_OUT + b * sdb + head * sdh + i * sdn + ev, mask=is_ev, other=0.0).to(tl.float32)
    of_v, of_means = tl.sum(v * grad[None, :], 1), tl.sum(means * grad[None, :], 1)
    far_weights = beyond * features
    delta = tl.sum(weights * of_v, 0) + tl.sum(far_weights * of_means, 0)  # the gradient times the values
    of_v = tl.where(shown, of_v - delta, 0.0)
    of_near = near * of_v
    is_k, is_s, is_v = (shown[:, None] & is_e[None, :], shown[:, None] & is_t[None, :], shown[:, None] & is_ev[None, :])
    k = tl.load(keys + slot[:, None] * skn + e[None, :], mask=is_k, other=0.0).to(tl.float32)
    tl.store(GRAD_Q + row * d + e, tl.sum(of_near[:, None] * k, 0).to(GRAD_Q.dtype.element_ty), mask=is_e)
    place = g * m + slot
    s = tl.load(SHARES + place[:, None] * r + t[None, :], mask=is_s, other=0.0).to(tl.float32)
    of_logs = far_weights * (of_means - delta - tl.sum(of_v[:, None] * s, 0))
    tl.store(GRAD_LOGS + row * r + t, of_logs.to(tl.float64), mask=is_t)
    tl.store(FAR_WEIGHTS + row * r + t, far_weights, mask=is_t)
    at = place[:, None]
    tl.atomic_add(GRAD_K + at * d + e[None, :], of_near[:, None] * q[None, :], mask=is_k, sem="relaxed")
    tl.atomic_add(GRAD_V + at * dv + ev[None, :], weights[:, None] * grad[None, :], mask=is_v, sem="relaxed")
    of_shares = -of_v[:, None] * far_weights[None, :]
    tl.atomic_add(GRAD_SHARES + at * r + t[None, :], of_shares, mask=is_s, sem="relaxed")


class _AtExpected(torch.autograd.Function):
    """Values at cross; stores its inputs alone for the gradient."""

    @staticmethod
    def forward(ctx, q, k, v, query_logs, log_sums, means, shares, positions, key_padding_mask, window):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        (bsz, heads, n, d), m, dv, r = q.shape, k.size(2), v.size(3), log_sums.size(2)
        out = torch.empty(bsz, heads, n, dv, dtype=q.dtype, device=q.device)
        # any tensor is passed in place of one that is not given; it is not read
        pads = out if key_padding_mask is None else key_padding_mask.contiguous().view(torch.uint8)
        tensors = q, k, v, *(x.contiguous() for x in (query_logs, log_sums, positions, means, shares)), pads
        sizes = tuple(triton.next_power_of_2(x) for x in (r, 2 * window + 1, d, dv))
        ctx.strides = (m, r, window, d, dv, *(step for x in (q, k, v) for step in x.stride()[:3]))
        ctx.constants, ctx.dtypes = (
            (key_padding_mask is not None, *sizes),
            (k.dtype, v.dtype, means.dtype, shares.dtype),
        )
        ctx.save_for_backward(*tensors)
        numbers = *ctx.strides, heads, ROUNDING * torch.finfo(torch.float32).eps
        _start(expected_forward, (*tensors, out), numbers, ctx.constants)
        return out

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad):
        tensors = q, k, v, query_logs, log_sums, _, means, shares, _ = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        added = k.numel(), v.numel(), shares.numel()
        parts = torch.zeros(sum(added), dtype=torch.float32, device=q.device).split(added)  # one kernel for all three
        grad_k, grad_v, grad_shares = (x.view(like.shape) for x, like in zip(parts, (k, v, shares), strict=True))
        grad_q, grad_logs = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(query_logs)
        far_weights = torch.empty(query_logs.shape, dtype=torch.float32, device=q.device)
        results = grad_q, grad_logs, far_weights, grad_k, grad_v, grad_shares
        numbers = *ctx.strides, *grad.stride()[:3], q.size(1), ROUNDING * torch.finfo(torch.float32).eps
        _start(expected_backward, (*tensors, grad, *results), numbers, ctx.constants)
        grad_means = far_weights.transpose(-1, -2) @ grad.float()
        of_k, of_v, of_means, of_shares = ctx.dtypes
        grads = grad_logs, grad_logs.sum(2), grad_means.to(of_means), grad_shares.to(of_shares)
        return grad_q, grad_k.to(of_k), grad_v.to(of_v), *grads, None, None, None


def _start(kernel, tensors, numbers, constants):
    """Launch with one program for each query of the first tensor."""
    q = tensors[0]
    default = Blocks(0, WARPS, STAGES)
    _, warps, stages = tuned(kernel.__name__, q.device, (8 * q.element_size(), *constants[1:]), default)
    launch.start(kernel, (q.size(0) * q.size(1), q.size(2)), tensors, numbers, constants, warps, stages)


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
    """Values with gradients; the arguments of ``transport/expected_band.py``, with the summary's tensors one by one.

    Gradients of keys, values and shares are added by atomics in float32: their last digits vary from run to run.
    """
    window = min(window, k.size(2) - 1)
    return _AtExpected.apply(q, k, v, query_logs, log_sums, means, shares, positions, key_padding_mask, window)


def near_far_expected(q: Tensor, keys: ExpectedKeys, *, window: int, scale: float) -> Tensor:
    """Values, ``(bsz, num_heads, n, value_dim)``, in the dtype of q.

    Args:
        q: ``(bsz, num_heads, n, d)``.
        keys: keys, values and their sums.
        window: W.
        scale: s.
    """
    (bsz, heads, n, d), m, dv, r = q.shape, keys.key.size(2), keys.value.size(3), keys.log_sums.size(2)
    q, window = q if q.stride(-1) == 1 else q.contiguous(), min(window, m - 1)
    values = torch.empty(bsz, heads, n, dv, dtype=q.dtype, device=q.device)
    # any tensor is passed in place of one that is not given; it is not read
    constants = keys.log_sums if keys.constants is None else keys.constants
    pads = values if keys.key_padding_mask is None else keys.key_padding_mask.contiguous().view(torch.uint8)
    kept = (keys.key, keys.value, keys.shares, keys.probes, constants, keys.log_sums, keys.positions, keys.means)
    tensors = (q, *(x.contiguous() for x in kept), pads, values)
    numbers = (m, r, window, d, dv, *q.stride()[:3], heads, ROUNDING * torch.finfo(torch.float32).eps, scale)
    sizes = tuple(triton.next_power_of_2(x) for x in (r, 2 * window + 1, d, dv))
    flags = keys.constants is not None, keys.key_padding_mask is not None
    default = Blocks(0, WARPS, STAGES)
    _, warps, stages = tuned(attend_expected.__name__, q.device, (8 * q.element_size(), *sizes), default)
    launch.start(attend_expected, (bsz * heads, n), tensors, numbers, (*flags, *sizes), warps, stages)
    return values
