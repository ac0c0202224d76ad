"""What the near_far kernels share: rows of tensors, logs of features, distances, products of tiles.

All logs are to base two.
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
    """x plus half a digit of tf32: tensor cores cut off the digits after it."""
    return (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)


@triton.jit
def product(x, y, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """x y, both rounded to TYPE, summed in float32; with "tf32" float32 is rounded to that."""
    x, y = x.to(TYPE), y.to(TYPE)
    if (tl.float32 == TYPE) & (PRECISION == "tf32"):
        x, y = rounded_to_tf32(x), rounded_to_tf32(y)
    if PRECISION == "ieee":  # the interpreter's products know no bfloat16
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def product_in_two(x, y, PRECISION: tl.constexpr):
    """x yᵀ in the type of x; a more precise y is taken in two parts."""
    total = product(x, tl.trans(y), x.dtype, PRECISION)
    if y.dtype != x.dtype:
        rest = y.to(tl.float32) - y.to(x.dtype).to(tl.float32)
        total += product(x, tl.trans(rest), x.dtype, PRECISION)
    return total


@triton.jit
def load_rows(X, i, stride, width, real, WIDTH: tl.constexpr):
    """The rows i of X; zeros where they are not real."""
    e = tl.arange(0, WIDTH)
    at = i[:, None].to(tl.int64) * stride + e[None, :]
    return tl.load(X + at, mask=real[:, None] & (e < width)[None, :], other=0.0)


@triton.jit
def store_rows(X, i, stride, width, real, values, WIDTH: tl.constexpr):
    """Write the rows i of X where they are real."""
    e = tl.arange(0, WIDTH)
    at = i[:, None].to(tl.int64) * stride + e[None, :]
    tl.store(X + at, values.to(X.dtype.element_ty), mask=real[:, None] & (e < width)[None, :])


@triton.jit
def is_key(PADS, j, n, HAS_PADS: tl.constexpr):
    """Whether the slots j hold keys of the sentence."""
    real = (j >= 0) & (j < n)
    if HAS_PADS:
        real = real & (tl.load(PADS + j, mask=real, other=1) == 0)
    return real


@triton.jit
def feature_logs(x, z, scale, HAS_NORMS: tl.constexpr, PRECISION: tl.constexpr):
    """``s x.z_t``, less ``s|x|^2/2`` with norms."""
    logs = product_in_two(x, z, PRECISION)
    if HAS_NORMS:
        wide = x.to(tl.float32)
        logs -= 0.5 * tl.sum(wide * wide, 1)[:, None]
    return scale * logs


@triton.jit
def load_probes(z, MEANS, CONSTANTS, g, r, d, TANGENTS: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    """What queries are multiplied with, the means of keys with tangents and z without, and what their logs lose."""
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
    """Logs of the features of queries, with c and less log r."""
    logs = feature_logs(q, probes, scale, not TANGENTS, PRECISION)
    return logs + (bias - constants)[None, :]


@triton.jit
def keys_met(c, n, BEYOND: tl.constexpr, CAUSAL: tl.constexpr, C: tl.constexpr):
    """Where block c starts, and from where to where it meets keys."""
    start, first, last = c * C, 0, n
    if BEYOND:
        start = c * C - C // 2
        first, last = tl.maximum(c * C - C, 0), tl.minimum(c * C + C, n)
    if CAUSAL:
        last = tl.minimum(last, start + C)
    return start, first, last


@triton.jit
def load_bias(BIAS, head, r, R: tl.constexpr):
    """``c_t - log r``; a feature that fills up R has no weight."""
    t = tl.arange(0, R)
    bias = tl.load(BIAS + head * r + t, mask=t < r, other=NEG_INF).to(tl.float32)
    return bias * LOG2_E - tl.log2(r.to(tl.float32))


@triton.jit
def load_slope(SLOPES, head, HAS_SLOPES: tl.constexpr):
    """By how much the log of the kernel falls with each token between query and key."""
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(SLOPES + head).to(tl.float32) * LOG2_E
    return slope


@triton.jit
def finite(top):
    """The maximum, or 0 where it is -inf: powers of nothing are relative to 0."""
    return tl.where(top == NEG_INF, 0.0, top)


@triton.jit
def near_and_far(distance, allowed, window, CAUSAL: tl.constexpr):
    """Which pairs have their own score and which have the features', from the query's slot minus the key's."""
    near = tl.abs(distance) <= window
    far = allowed & (near == 0)
    near = near & allowed
    if CAUSAL:
        near = near & (distance >= 0)
        far = far & (distance >= 0)
    return near, far


@triton.jit
def fall_to_edge(i, edge_before, edge_after, slope, side):
    """How far the kernel falls from a token to the edge of its block or chunk that faces the other side.

    Side 0 are keys before the queries, side 1 keys after them. A query passes the edges of its block as (before,
    after), a key passes the edges of its chunk as (end, start).
    """
    length = tl.where(side == 0, tl.abs(i - edge_before), tl.abs(edge_after - i))
    return slope * length.to(tl.float32)


@triton.jit
def load_beyond(TOPS, MASSES, SUMS, g, c, side, sides, count, dv, R: tl.constexpr, DV: tl.constexpr):
    """The sums over all that is beyond block or chunk c."""
    t = tl.arange(0, R)
    place = ((g * sides + side) * count + c) * R
    return tl.load(TOPS + place + t), tl.load(MASSES + place + t), load_rows(SUMS + place * dv, t, dv, dv, t < R, DV)
