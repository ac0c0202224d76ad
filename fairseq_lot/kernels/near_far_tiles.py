"""Helpers of the near_far kernels: rows of tensors, logs of features, distances, products of tiles.

All logs are to base two. ``near_far.py`` explains features, blocks, chunks and "beyond".
"""

import math

import triton
import triton.language as tl

from fairseq_lot.kernels.tiles import NEG_INF

INF = tl.constexpr(float("inf"))
ROOM = tl.constexpr(60.0)
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def rounded_to_tf32(x):
    """x plus half a unit of tf32's last digit: tensor cores truncate, so the result is x rounded to nearest."""
    return (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)


@triton.jit
def product(x, y, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """``x y``, summed in float32. Both are first rounded to TYPE; float32 is rounded to tf32 if PRECISION is "tf32"."""
    x, y = x.to(TYPE), y.to(TYPE)
    if (tl.float32 == TYPE) & (PRECISION == "tf32"):
        x, y = rounded_to_tf32(x), rounded_to_tf32(y)
    if PRECISION == "ieee":  # the interpreter has no products of bfloat16
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def product_in_two(x, y, PRECISION: tl.constexpr):
    """``x yᵀ`` with products in the dtype of x; a y of higher precision is split in two: rounded, and the rest."""
    total = product(x, tl.trans(y), x.dtype, PRECISION)
    if y.dtype != x.dtype:
        rest = y.to(tl.float32) - y.to(x.dtype).to(tl.float32)
        total += product(x, tl.trans(rest), x.dtype, PRECISION)
    return total


@triton.jit
def load_rows(X, i, stride, width, real, WIDTH: tl.constexpr):
    """Load the rows i of X, ``(rows, WIDTH)``; zeros where ``real`` is false."""
    e = tl.arange(0, WIDTH)
    at = i[:, None].to(tl.int64) * stride + e[None, :]
    return tl.load(X + at, mask=real[:, None] & (e < width)[None, :], other=0.0)


@triton.jit
def store_rows(X, i, stride, width, real, values, WIDTH: tl.constexpr):
    """Store values in the rows i of X where ``real`` is true."""
    e = tl.arange(0, WIDTH)
    at = i[:, None].to(tl.int64) * stride + e[None, :]
    tl.store(X + at, values.to(X.dtype.element_ty), mask=real[:, None] & (e < width)[None, :])


@triton.jit
def is_key(PADS, j, n, HAS_PADS: tl.constexpr):
    """Whether the slots j are inside the sentence and are not pads."""
    real = (j >= 0) & (j < n)
    if HAS_PADS:
        real = real & (tl.load(PADS + j, mask=real, other=1) == 0)
    return real


@triton.jit
def feature_logs(x, z, scale, HAS_NORMS: tl.constexpr, PRECISION: tl.constexpr):
    """Logs of the features of x, ``(rows, R)``: ``s x.z_t - s|x|^2/2``; without HAS_NORMS ``s x.z_t`` alone."""
    logs = product_in_two(x, z, PRECISION)
    if HAS_NORMS:
        wide = x.to(tl.float32)
        logs -= 0.5 * tl.sum(wide * wide, 1)[:, None]
    return scale * logs


@triton.jit
def load_probes(z, MEANS, CONSTANTS, g, r, d, TANGENTS: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    """The vectors and constants of :func:`query_logs`, ``(R, D)`` and ``(R,)``.

    With tangents they are the means of the keys and ``s z_t.mean_t``, without them z and 0.
    """
    if TANGENTS:
        t = tl.arange(0, R)
        probes = load_rows(MEANS + g * R * d, t, d, d, t < r, D)
        constants = tl.load(CONSTANTS + g * R + t)
    else:
        probes = z
        constants = tl.zeros([R], tl.float32)
    return probes, constants


@triton.jit
def query_logs(q, probes, constants, bias, scale, TANGENTS: tl.constexpr, PRECISION: tl.constexpr):
    """Logs ``a_it`` of the features of queries, with the bias ``c_t - log r``."""
    logs = feature_logs(q, probes, scale, not TANGENTS, PRECISION)
    return logs + (bias - constants)[None, :]


@triton.jit
def keys_met(c, n, BEYOND: tl.constexpr, CAUSAL: tl.constexpr, C: tl.constexpr):
    """The first slot of block c, with the first slot and the end of the keys that it reads one by one."""
    start, first, last = c * C, 0, n
    if BEYOND:
        start = c * C - C // 2
        first, last = tl.maximum(c * C - C, 0), tl.minimum(c * C + C, n)
    if CAUSAL:
        last = tl.minimum(last, start + C)
    return start, first, last


@triton.jit
def load_bias(BIAS, head, r, R: tl.constexpr):
    """``c_t - log r``; -inf for features from r to R, which do not exist."""
    t = tl.arange(0, R)
    bias = tl.load(BIAS + head * r + t, mask=t < r, other=NEG_INF).to(tl.float32)
    return bias * LOG2_E - tl.log2(r.to(tl.float32))


@triton.jit
def load_slope(SLOPES, head, HAS_SLOPES: tl.constexpr):
    """The head's slope: the log of a pair falls by it with each token between query and key; 0 without slopes."""
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(SLOPES + head).to(tl.float32) * LOG2_E
    return slope


@triton.jit
def finite(top):
    """The maximum, or 0 where it is -inf, so that ``-inf - finite(top)`` is -inf and not NaN."""
    return tl.where(top == NEG_INF, 0.0, top)


@triton.jit
def near_and_far(distance, allowed, window, CAUSAL: tl.constexpr):
    """Masks of the pairs with exact scores, and of the pairs with the features' scores.

    ``distance`` is the query's slot minus the key's; ``allowed`` is False for pads.
    """
    near = tl.abs(distance) <= window
    far = allowed & (near == 0)
    near = near & allowed
    if CAUSAL:
        near = near & (distance >= 0)
        far = far & (distance >= 0)
    return near, far


@triton.jit
def fall_to_edge(i, edge_before, edge_after, slope, side):
    """Slope times the distance from a token to the edge of its block or chunk that faces the other side.

    Side 0: keys before the queries; side 1: keys after them. For queries the two edges are the start and the end of
    their block, for keys the end and the start of their chunk.
    """
    length = tl.where(side == 0, tl.abs(i - edge_before), tl.abs(edge_after - i))
    return slope * length.to(tl.float32)


@triton.jit
def load_beyond(TOPS, MASSES, SUMS, g, c, side, sides, count, dv, R: tl.constexpr, DV: tl.constexpr):
    """Load the sums over everything beyond block or chunk c: tops and masses ``(R,)``, sums ``(R, DV)``."""
    t = tl.arange(0, R)
    place = ((g * sides + side) * count + c) * R
    return tl.load(TOPS + place + t), tl.load(MASSES + place + t), load_rows(SUMS + place * dv, t, dv, dv, t < R, DV)
