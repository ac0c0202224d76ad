"""near_far at cross-attention in one launch, from the features' sums over all keys.

``fairseq_lot/transport/expected_band.py`` has the formula. The kernel is for translation and has no gradient. Logs of
the features and expected positions are float64, as in plain torch, so that rounding does not move the band.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_lot.kernels import launch
from fairseq_lot.kernels.blocks import Blocks, tuned
from fairseq_lot.kernels.naive import ROUNDING, ExpectedKeys
from fairseq_lot.kernels.tiles import NEG_INF

WARPS, STAGES = 4, 1


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
    t, w, e, ev = tl.arange(0, R), tl.arange(0, W), tl.arange(0, D), tl.arange(0, DV)
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
    top = tl.max(far, 0)
    powers = tl.exp(far - top)
    total = tl.sum(powers, 0)
    log_sum = (top + tl.log(total)).to(tl.float32)
    expected = tl.sum(powers / total * tl.load(POSITIONS + g * r + t, mask=is_t, other=0.0), 0)
    features = (powers / total).to(tl.float32)

    slot = expected.to(tl.int64) - window + w
    shown = (w <= 2 * window) & (slot >= 0) & (slot < m)
    if HAS_PADS:
        shown = shown & (tl.load(PADS + b * m + slot, mask=shown, other=1) == 0)
    place = g * m + slot
    keys = tl.load(KEYS + place[:, None] * d + e[None, :], mask=shown[:, None] & is_e[None, :], other=0.0)
    near = tl.where(shown, tl.sum(keys.to(tl.float32) * q[None, :], 1), NEG_INF)
    shares = tl.load(SHARES + place[:, None] * r + t[None, :], mask=shown[:, None] & is_t[None, :], other=0.0)
    replaced = tl.sum(shares.to(tl.float32) * features[None, :], 1)
    rest = 1.0 - tl.sum(replaced, 0)
    rest = tl.where(rest > rounding, rest, 0.0)
    rest_log = tl.where(rest > 0.0, log_sum + tl.log(tl.where(rest > 0.0, rest, 1.0)), NEG_INF)
    peak = tl.maximum(tl.max(near, 0), rest_log)
    near, beyond = tl.exp(near - peak), tl.exp(rest_log - peak)
    total = tl.sum(near, 0) + beyond
    beyond = beyond / total / tl.maximum(rest, rounding)
    weights = near / total - beyond * replaced
    values = tl.load(VALUES + place[:, None] * dv + ev[None, :], mask=shown[:, None] & is_ev[None, :], other=0.0)
    means = tl.load(MEANS + (g * r + t)[:, None] * dv + ev[None, :], mask=is_t[:, None] & is_ev[None, :], other=0.0)
    out = tl.sum(weights[:, None] * values.to(tl.float32), 0)
    out += beyond * tl.sum(features[:, None] * means.to(tl.float32), 0)
    place = (g * tl.num_programs(1) + i) * dv
    tl.store(OUT + place + ev, out.to(OUT.dtype.element_ty), mask=is_ev)


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
