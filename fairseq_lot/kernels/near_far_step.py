"""A decoding step of causal near_far attention in one launch: one token's values, with the decoder's next state.

The state, ``NearFarKept``, has the last W + 1 keys and values. For each feature it has the log of the sum over all
earlier keys and the mean of their values. A step writes a new state and does not change the old one, so several
hypotheses can continue from it. Logs in the state are natural logs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_lot.kernels import launch
from fairseq_lot.kernels.blocks import Blocks, tuned
from fairseq_lot.kernels.naive import NO_MASS, NearFarKept
from fairseq_lot.kernels.near_far_tiles import LOG2_E, finite, load_slope
from fairseq_lot.kernels.tiles import NEG_INF

WARPS, STAGES = 4, 1


@triton.jit
def _logs(x, z, scale, log_r):
    """Logs of the features of one vector x, ``s x.z_t - s|x|^2/2 - log(r)/2``."""
    return scale * (tl.sum(z * x[None, :], 1) - 0.5 * tl.sum(x * x, 0)) - 0.5 * log_r


@triton.jit(do_not_specialize=launch.RUNTIME)
def next_token(Q, K, V, Z, BIAS, SLOPES, PADS, KEYS, VALUES, LOG_MASS, LOG_SUMS, MEANS,
               OUT, TO_KEYS, TO_VALUES, TO_LOG_MASS, TO_LOG_SUMS, TO_MEANS,
               length, r, d, dv, sqb, sqh, skb, skh, svb, svh, spb, heads, scale, no_mass,
               LEAVES: tl.constexpr, HAS_FAR: tl.constexpr, HAS_MASS: tl.constexpr, HAD_MASS: tl.constexpr,
               HAS_PADS: tl.constexpr, HAS_SLOPES: tl.constexpr, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
               DV: tl.constexpr):  # fmt: skip
    """Values of one token, OUT ``(programs, dv)``, from a state of ``length`` keys; the next state goes to ``TO_*``.

    LEAVES: the first key leaves the window and is added to the features' sums. HAS_FAR: the state has such sums.
    HAD_MASS: it has log masses. HAS_MASS: the next state has them. Grid: sentence and head.
    """
    g = tl.program_id(0).to(tl.int64)
    b, head = g // heads, g % heads
    t, w, e, ev = tl.arange(0, R), tl.arange(0, W), tl.arange(0, D), tl.arange(0, DV)
    is_e, is_ev, is_t = e < d, ev < dv, t < r
    q = tl.load(Q + b * sqb + head * sqh + e, mask=is_e, other=0.0).to(tl.float32)
    k = tl.load(K + b * skb + head * skh + e, mask=is_e, other=0.0).to(tl.float32)
    v = tl.load(V + b * svb + head * svh + ev, mask=is_ev, other=0.0).to(tl.float32)
    z = tl.load(Z + (head * r + t)[:, None] * d + e[None, :], mask=is_t[:, None] & is_e[None, :], other=0.0)
    z = z.to(tl.float32)
    slope = load_slope(SLOPES, head, HAS_SLOPES) / LOG2_E
    log_r = tl.log(r.to(tl.float32))
    mass = 0.0
    if HAS_PADS:
        is_pad = tl.load(PADS + b * spb) != 0
        k, v = tl.where(is_pad, 0.0, k), tl.where(is_pad, 0.0, v)
        mass = tl.where(is_pad, no_mass, 0.0)

    kept = w < length
    here_k, here_v = kept[:, None] & is_e[None, :], kept[:, None] & is_ev[None, :]
    keys = tl.load(KEYS + (g * length + w)[:, None] * d + e[None, :], mask=here_k, other=0.0)
    values = tl.load(VALUES + (g * length + w)[:, None] * dv + ev[None, :], mask=here_v, other=0.0)
    log_mass = tl.zeros([W], tl.float32)
    if HAD_MASS:
        log_mass = tl.load(LOG_MASS + b * length + w, mask=kept, other=0.0)
    first = 0
    if LEAVES:
        first = 1
        log_sums = tl.full([R], NEG_INF, tl.float32)
        means = tl.zeros([R, DV], tl.float32)
        place = (g * r + t)[:, None] * dv + ev[None, :]
        here = is_t[:, None] & is_ev[None, :]
        if HAS_FAR:
            log_sums = tl.load(LOG_SUMS + g * r + t, mask=is_t, other=NEG_INF) - slope
            means = tl.load(MEANS + place, mask=here, other=0.0)
        is_first = w == 0
        leaving = tl.sum(tl.where(is_first[:, None], keys, 0.0), 0)
        value = tl.sum(tl.where(is_first[:, None], values, 0.0), 0)
        gone = tl.sum(tl.where(is_first, log_mass, 0.0), 0)
        logs = _logs(leaving, z, scale, log_r) + gone - slope * length.to(tl.float32)
        top = tl.maximum(log_sums, logs)
        old, new = tl.exp(log_sums - top), tl.exp(logs - top)
        means += (new / (old + new))[:, None] * (value[None, :] - means)
        log_sums = top + tl.log(old + new)
        tl.store(TO_LOG_SUMS + g * r + t, log_sums, mask=is_t)
        tl.store(TO_MEANS + place, means, mask=here)

    # the keys that stay, one slot further to the front if one left; then the new key
    stays = kept & (w >= first)
    after = length + 1 - first
    to = g * after + w - first
    tl.store(TO_KEYS + to[:, None] * d + e[None, :], keys, mask=stays[:, None] & is_e[None, :])
    tl.store(TO_VALUES + to[:, None] * dv + ev[None, :], values, mask=stays[:, None] & is_ev[None, :])
    tl.store(TO_KEYS + (g * after + after - 1) * d + e, k, mask=is_e)
    tl.store(TO_VALUES + (g * after + after - 1) * dv + ev, v, mask=is_ev)
    if HAS_MASS:
        is_one = tl.where(head == 0, stays, False)  # the same for all heads, so one head writes it
        tl.store(TO_LOG_MASS + b * after + w - first, log_mass, mask=is_one)
        tl.store(TO_LOG_MASS + b * after + after - 1, mass, mask=head == 0)

    distance = (length - w).to(tl.float32)
    near = tl.where(stays, scale * tl.sum(keys * q[None, :], 1) + log_mass - slope * distance, NEG_INF)
    own = scale * tl.sum(k * q, 0) + mass
    peak = tl.maximum(tl.max(near, 0), own)
    if LEAVES:
        bias = tl.load(BIAS + head * r + t, mask=is_t, other=NEG_INF).to(tl.float32)
        far = _logs(q, z, scale, log_r) + bias + log_sums
        peak = tl.maximum(peak, tl.max(far, 0))
    near, own = tl.exp(near - finite(peak)), tl.exp(own - finite(peak))
    total = tl.sum(near, 0) + own
    out = tl.sum(near[:, None] * values, 0) + own * v
    if LEAVES:
        far = tl.exp(far - finite(peak))
        total += tl.sum(far, 0)
        out += tl.sum(far[:, None] * means, 0)
    tl.store(OUT + g * dv + ev, (out / total).to(OUT.dtype.element_ty), mask=is_ev)


def near_far_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pads: Tensor | None,
    kept: NearFarKept,
    features: Tensor,
    feature_bias: Tensor,
    slopes: Tensor | None,
    *,
    window: int,
    scale: float,
) -> tuple[Tensor, NearFarKept]:
    """Values of one token, ``(bsz, num_heads, 1, value_dim)`` in the dtype of v, with the next state.

    Args:
        q, k, v: ``(bsz, num_heads, 1, width)``.
        pads: ``(bsz, 1)``, True = the token is a pad; None = no pads.
        kept: the state after the previous token.
        features, feature_bias, slopes, window, scale: as for :func:`fairseq_lot.kernels.near_far.near_far`.
    """
    (bsz, heads, _, d), dv, r, length = q.shape, v.size(-1), features.size(1), kept.keys.size(2)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    leaves = length > window
    has_mass = pads is not None or kept.log_mass is not None
    after = length + (not leaves)
    values = torch.empty(bsz, heads, 1, dv, dtype=v.dtype, device=v.device)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    following = NearFarKept(
        empty(bsz, heads, after, d),
        empty(bsz, heads, after, dv),
        empty(bsz, 1, after) if has_mass else None,
        empty(bsz, heads, r) if leaves else None,
        empty(bsz, heads, r, dv) if leaves else None,
    )
    mask = None if pads is None else pads.view(torch.uint8)
    # any tensor is passed in place of one that is not given; it is neither read nor written
    before, to = ([values if x is None else x.contiguous() for x in state] for state in (kept, following))
    tensors = [q, k, v, features.contiguous(), feature_bias.contiguous()]
    tensors += [values if slopes is None else slopes, values if mask is None else mask, *before, values, *to]
    strides = [x.stride(axis) for x in (q, k, v) for axis in (0, 1)]
    numbers = (length, r, d, dv, *strides, 1 if mask is None else mask.stride(0), heads, scale, NO_MASS)
    flags = leaves, kept.means is not None, has_mass, kept.log_mass is not None, pads is not None, slopes is not None
    sizes = tuple(triton.next_power_of_2(x) for x in (r, window + 1, d, dv))
    default = Blocks(0, WARPS, STAGES)
    _, warps, stages = tuned(next_token.__name__, q.device, (8 * q.element_size(), *sizes), default)
    launch.start(next_token, (bsz * heads,), tuple(tensors), numbers, (*flags, *sizes), warps, stages)
    return values, following
