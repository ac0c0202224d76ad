"""Sinkhorn attention without an n x m matrix in memory: kernels compute the scores on chip each time they need them.

All quantities are logs. For queries i (rows) and keys j (columns), after ``updates`` alternating half-updates,

    rows:      reach_i = logsumexp_j(s_ij + h_j),  f_i = -reach_i
    columns:   reach_j = logsumexp_i(s_ij + f_i),  h_j = -reach_j
    values:    out_i = sum_j softmax_j(s_ij + h_j) v_j

Half-update ``u`` is of the rows if ``updates - u`` is even; the first one starts from potentials of 0. A reach is
stored as two float32, the maximum and the log of the sum relative to the maximum. The gradient needs nothing but the
inputs and all reaches, ``REACHES`` of shape ``(updates + 1, programs, 2, longest)``; the last one is the softmax's.
Scores of pads are -inf, so their potentials do not count.

Up to ``LONGEST_ON_CHIP`` queries and keys: one launch forward, :func:`short_forward`, and one backward,
:func:`short_backward`. A program handles one sentence and head; its scores stay in registers through all half-updates.

Longer sentences: forward a launch of :func:`reduce_side` for each half-update and one for the values, backward a launch
for each half-update and two for the gradients of the inputs. A program handles a block of one side; it streams the
other side.
"""

import torch
import triton
import triton.language as tl

from fairseq_lot.kernels.blocks import Blocks, tuned
from fairseq_lot.kernels.launch import LONGEST_ON_CHIP, RUNTIME, dot_precision, padded, start
from fairseq_lot.kernels.naive import SinkhornInputs, SinkhornSettings
from fairseq_lot.kernels.tiles import NEG_INF
from fairseq_lot.numerics.autograd import once_in_full_precision

BLOCK, WARPS, STAGES = 32, 4, 2  # for long sentences: with blocks of 64 tokens the kernels spill registers


@triton.jit
def _rows(X, i, stride, D: tl.constexpr, width, real):
    e = tl.arange(0, D)
    return tl.load(
        X + i[:, None].to(tl.int64) * stride + e[None, :], mask=real[:, None] & (e < width)[None, :], other=0.0
    )


@triton.jit
def _store(X, i, count, D: tl.constexpr, width, values):
    """Store the rows i < count of values in X."""
    e = tl.arange(0, D)
    at = i[:, None].to(tl.int64) * width + e[None, :]
    tl.store(X + at, values.to(X.dtype.element_ty), mask=(i < count)[:, None] & (e < width)[None, :])


@triton.jit
def _real(PADS, i, count, HAS_PADS: tl.constexpr):
    real = i < count
    if HAS_PADS:
        real = real & (tl.load(PADS + i, mask=real, other=1) == 0)
    return real


@triton.jit
def _positions(POSITIONS, i, count, PRIOR: tl.constexpr):
    if PRIOR:
        return tl.load(POSITIONS + i, mask=i < count, other=0).to(tl.float32)
    else:
        return i.to(tl.float32)


@triton.jit
def _products(x, y, scale, PRECISION: tl.constexpr):
    if (x.dtype != y.dtype) | (PRECISION == "ieee"):  # the interpreter has no products of bfloat16
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale


@triton.jit
def _scores(products, slope, px, py, real_x, real_y, PRIOR: tl.constexpr):
    """Scores from scaled products: the prior ``slope |px - py|`` is subtracted; -inf at pads."""
    if PRIOR:
        products -= slope * tl.abs(px[:, None] - py[None, :])
    return tl.where(real_x[:, None] & real_y[None, :], products, NEG_INF)


@triton.jit
def _scale(FACTORS, SLOPES, scale, head, LEARNT: tl.constexpr, PRIOR: tl.constexpr):
    """The factor of a head's products, with the slope of its prior."""
    slope = 0.0
    if LEARNT:
        scale *= tl.load(FACTORS + head)
    if PRIOR:
        slope = tl.load(SLOPES + head)
    return scale, slope


@triton.jit
def _kept(seed, dropout, g, m, i, j):
    """Dropout of the weights: factors 1/(1 - dropout) or 0, the same ones forward and backward."""
    place = (i * m)[:, None] + j[None, :]
    return tl.where(tl.rand(seed + g, place.to(tl.int32)) >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def _save(reaches, i, count, longest, top, log_total):
    tl.store(reaches + i, top, mask=i < count)
    tl.store(reaches + longest + i, log_total, mask=i < count)


@triton.jit
def _reach(reaches, i, count, longest, there):
    """Load a reach, the maximum with the log of the sum relative to it; 0 and 0 if ``there`` is false."""
    mask = tl.where(there, i < count, False)
    return tl.load(reaches + i, mask=mask, other=0.0), tl.load(reaches + longest + i, mask=mask, other=0.0)


@triton.jit
def _finished(top, total):
    """The reach of a running maximum and sum; 0 and 0 if the sum is empty."""
    nothing = total == 0.0
    return tl.where(nothing, 0.0, top), tl.log(tl.where(nothing, 1.0, total))


@triton.jit
def _reduced(y, AXIS: tl.constexpr):
    """``logsumexp(y)`` along an axis as a reach, the maximum with the log of the sum relative to it."""
    top = tl.max(y, AXIS)
    top = tl.where(top == NEG_INF, 0.0, top)
    return _finished(top, tl.sum(tl.exp(y - tl.expand_dims(top, AXIS)), AXIS))


@triton.jit
def _shares(s, potential, top, log_total, AXIS: tl.constexpr):
    """``softmax(s + potential)`` along an axis, from the reach along this axis.

    The maximum is subtracted before the log of the sum. Their sum would round the log away at large scores.
    """
    other: tl.constexpr = 1 - AXIS
    y = s + tl.expand_dims(potential, other)
    return tl.exp((y - tl.expand_dims(top, AXIS)) - tl.expand_dims(log_total, AXIS))


@triton.jit(do_not_specialize=RUNTIME)
def short_forward(Q, K, V, FACTORS, SLOPES, QUERY_PADS, KEY_PADS, POSITIONS, REACHES, OUT,
                  n, m, d, dv, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sab, sbb, spb, heads, scale, dropout, seed,
                  updates, longest,
                  HAS_QUERY_PADS: tl.constexpr, HAS_KEY_PADS: tl.constexpr, LEARNT: tl.constexpr, PRIOR: tl.constexpr,
                  DROPS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr,
                  M: tl.constexpr):  # fmt: skip
    """All half-updates of one sentence and head; writes REACHES and the values, OUT ``(programs, n, dv)``.

    Grid: sentence and head.
    """
    g = tl.program_id(0).to(tl.int64)
    b, head = g // heads, g % heads
    i, j = tl.arange(0, N), tl.arange(0, M)
    real_i = _real(QUERY_PADS + b * sab, i, n, HAS_QUERY_PADS)
    real_j = _real(KEY_PADS + b * sbb, j, m, HAS_KEY_PADS)
    factor, slope = _scale(FACTORS, SLOPES, scale, head, LEARNT, PRIOR)
    q = _rows(Q + b * sqb + head * sqh, i, sqn, D, d, real_i)
    k = _rows(K + b * skb + head * skh, j, skn, D, d, real_j)
    pi = _positions(POSITIONS + b * spb + m - n, i, n, PRIOR)
    pj = _positions(POSITIONS + b * spb, j, m, PRIOR)
    s = _scores(_products(q, k, factor, PRECISION), slope, pi, pj, real_i, real_j, PRIOR)
    f, h = tl.zeros([N], tl.float32), tl.zeros([M], tl.float32)
    for u in range(0, updates):
        reaches = REACHES + (u * tl.num_programs(0) + g) * 2 * longest
        if (updates - u) % 2 == 0:
            top, log_total = _reduced(s + h[None, :], 1)
            _save(reaches, i, n, longest, top, log_total)
            f = -(top + log_total)
        else:
            of_keys, log_of_keys = _reduced(s + f[:, None], 0)
            _save(reaches, j, m, longest, of_keys, log_of_keys)
            h = -(of_keys + log_of_keys)
    top, log_total = _reduced(s + h[None, :], 1)
    weights = _shares(s, h, top, log_total, 1)
    if DROPS:
        weights = weights * _kept(seed, dropout, g, m, i, j)
    v = _rows(V + b * svb + head * svh, j, svn, DV, dv, real_j).to(tl.float32)
    _store(OUT + g * n * dv, i, n, DV, dv, tl.dot(weights, v, input_precision=PRECISION))


@triton.jit(do_not_specialize=RUNTIME)
def short_backward(Q, K, V, FACTORS, SLOPES, QUERY_PADS, KEY_PADS, POSITIONS, REACHES, GRAD_O, GRAD_Q, GRAD_K, GRAD_V,
                   GRAD_FACTORS,
                   n, m, d, dv, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sab, sbb, spb, heads, scale, dropout, seed,
                   updates, longest,
                   HAS_QUERY_PADS: tl.constexpr, HAS_KEY_PADS: tl.constexpr, LEARNT: tl.constexpr, PRIOR: tl.constexpr,
                   DROPS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr,
                   M: tl.constexpr):  # fmt: skip
    """All gradients of one sentence and head from GRAD_O ``(programs, n, dv)``. Grid: sentence and head.

    Writes GRAD_Q, GRAD_K, GRAD_V and the sentence's part of the factors' gradient, GRAD_FACTORS ``(programs,)``.
    """
    g = tl.program_id(0).to(tl.int64)
    b, head = g // heads, g % heads
    i, j = tl.arange(0, N), tl.arange(0, M)
    real_i = _real(QUERY_PADS + b * sab, i, n, HAS_QUERY_PADS)
    real_j = _real(KEY_PADS + b * sbb, j, m, HAS_KEY_PADS)
    factor, slope = _scale(FACTORS, SLOPES, scale, head, LEARNT, PRIOR)
    q = _rows(Q + b * sqb + head * sqh, i, sqn, D, d, real_i)
    k = _rows(K + b * skb + head * skh, j, skn, D, d, real_j)
    pi = _positions(POSITIONS + b * spb + m - n, i, n, PRIOR)
    pj = _positions(POSITIONS + b * spb, j, m, PRIOR)
    s = _scores(_products(q, k, factor, PRECISION), slope, pi, pj, real_i, real_j, PRIOR)
    do = _rows(GRAD_O + g * n * dv, i, dv, DV, dv, real_i).to(tl.float32)
    v = _rows(V + b * svb + head * svh, j, svn, DV, dv, real_j).to(tl.float32)
    top, log_total = _reach(
        REACHES + ((updates - 1) * tl.num_programs(0) + g) * 2 * longest, j, m, longest, updates > 0
    )
    h = -(top + log_total)
    of_rows, log_of_rows = _reduced(s + h[None, :], 1)
    weights = _shares(s, h, of_rows, log_of_rows, 1)
    grad = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    dropped = weights
    if DROPS:
        kept = _kept(seed, dropout, g, m, i, j)
        grad = grad * kept
        dropped = weights * kept
    grad_v = tl.dot(tl.trans(dropped), do, input_precision=PRECISION)
    _store(GRAD_V + g * m * dv, j, m, DV, dv, grad_v)
    grad = weights * grad
    grad -= weights * tl.sum(grad, 1)[:, None]
    grad_f, grad_h = tl.zeros([N], tl.float32), tl.sum(grad, 0)
    for back in range(0, updates):
        u = updates - 1 - back
        reaches = REACHES + (u * tl.num_programs(0) + g) * 2 * longest
        before = reaches - tl.num_programs(0) * 2 * longest
        if back % 2 == 1:
            of_rows, log_of_rows = _reach(reaches, i, n, longest, True)
            top, log_total = _reach(before, j, m, longest, u > 0)
            taken = _shares(s, -(top + log_total), of_rows, log_of_rows, 1) * grad_f[:, None]
            grad_h = -tl.sum(taken, 0)
            grad -= taken
        else:
            top, log_total = _reach(reaches, j, m, longest, True)
            of_rows, log_of_rows = _reach(before, i, n, longest, u > 0)
            taken = _shares(s, -(of_rows + log_of_rows), top, log_total, 0) * grad_h[None, :]
            grad_f = -tl.sum(taken, 1)
            grad -= taken
    if LEARNT:
        q = _rows(Q + b * sqb + head * sqh, i, sqn, D, d, real_i)
        k = _rows(K + b * skb + head * skh, j, skn, D, d, real_j)
        of_products = tl.sum(tl.sum(grad * _products(q, k, scale, PRECISION), 1), 0)
        tl.store(GRAD_FACTORS + g, of_products)
    grad = grad * factor
    # q and k are loaded again here: kept, they would take registers throughout the loop
    k = _rows(K + b * skb + head * skh, j, skn, D, d, real_j).to(tl.float32)
    _store(GRAD_Q + g * n * d, i, n, D, d, tl.dot(grad, k, input_precision=PRECISION))
    q = _rows(Q + b * sqb + head * sqh, i, sqn, D, d, real_i).to(tl.float32)
    _store(GRAD_K + g * m * d, j, m, D, d, tl.dot(tl.trans(grad), q, input_precision=PRECISION))


@triton.jit(do_not_specialize=RUNTIME)
def reduce_side(X, Y, V, FACTORS, SLOPES, X_PADS, Y_PADS, X_POSITIONS, Y_POSITIONS, REACHES, OUT,
                n, m, d, dv, sxb, sxh, sxn, syb, syh, syn, svb, svh, svn, sab, sbb, spb, heads, scale, dropout, seed,
                number, longest,
                VALUES: tl.constexpr, X_HAS_PADS: tl.constexpr, Y_HAS_PADS: tl.constexpr, LEARNT: tl.constexpr,
                PRIOR: tl.constexpr, DROPS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Half-update ``number`` of a block of x's n tokens, from the potential of y's m tokens; write its reach.

    With VALUES it is the last softmax, x are the queries, and the values are written to OUT ``(programs, n, dv)``.
    Grid: sentence and head, block of x.
    """
    g = tl.program_id(0).to(tl.int64)
    b, head = g // heads, g % heads
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_i = _real(X_PADS + b * sab, i, n, X_HAS_PADS)
    factor, slope = _scale(FACTORS, SLOPES, scale, head, LEARNT, PRIOR)
    x = _rows(X + b * sxb + head * sxh, i, sxn, D, d, real_i)
    pi = _positions(X_POSITIONS + b * spb, i, n, PRIOR)
    reaches = REACHES + (number * tl.num_programs(0) + g) * 2 * longest
    before = reaches - tl.num_programs(0) * 2 * longest
    top = tl.full([BLOCK], NEG_INF, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    values = tl.zeros([BLOCK, DV], tl.float32)
    for c in range(0, m, BLOCK):
        j = c + tl.arange(0, BLOCK)
        real_j = _real(Y_PADS + b * sbb, j, m, Y_HAS_PADS)
        y = _rows(Y + b * syb + head * syh, j, syn, D, d, real_j)
        pj = _positions(Y_POSITIONS + b * spb, j, m, PRIOR)
        s = _scores(_products(x, y, factor, PRECISION), slope, pi, pj, real_i, real_j, PRIOR)
        peak, log_sum = _reach(before, j, m, longest, number > 0)
        s -= (peak + log_sum)[None, :]
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == NEG_INF, 0.0, new)
        fade = tl.exp(top - safe)
        terms = tl.exp(s - safe[:, None])
        top, total = new, total * fade + tl.sum(terms, 1)
        if VALUES:
            if DROPS:
                terms = terms * _kept(seed, dropout, g, m, i, j)
            v = _rows(V + b * svb + head * svh, j, svn, DV, dv, real_j).to(tl.float32)
            values = tl.dot(terms, v, values * fade[:, None], input_precision=PRECISION)
    if VALUES:
        values = values / tl.where(total == 0.0, 1.0, total)[:, None]
        _store(OUT + g * n * dv, i, n, DV, dv, values)
    top, log_total = _finished(top, total)
    _save(reaches, i, n, longest, top, log_total)


@triton.jit(do_not_specialize=RUNTIME)
def undo_update(X, Y, FACTORS, SLOPES, X_PADS, Y_PADS, X_POSITIONS, Y_POSITIONS, REACHES, GRADS,
                n, m, d, sxb, sxh, sxn, syb, syh, syn, sab, sbb, spb, heads, scale, number, longest,
                X_HAS_PADS: tl.constexpr, Y_HAS_PADS: tl.constexpr, LEARNT: tl.constexpr, PRIOR: tl.constexpr,
                D: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Go back through half-update ``number``, which computed y's potential from x's.

    Reads the gradient of y's potential, ``GRADS[number]``; writes that of x's, ``GRADS[number - 1]``. GRADS is
    ``(updates, programs, longest)``. Grid: sentence and head, block of x.
    """
    g = tl.program_id(0).to(tl.int64)
    b, head = g // heads, g % heads
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_i = _real(X_PADS + b * sab, i, n, X_HAS_PADS)
    factor, slope = _scale(FACTORS, SLOPES, scale, head, LEARNT, PRIOR)
    x = _rows(X + b * sxb + head * sxh, i, sxn, D, d, real_i)
    pi = _positions(X_POSITIONS + b * spb, i, n, PRIOR)
    reaches = REACHES + (number * tl.num_programs(0) + g) * 2 * longest
    top, log_total = _reach(reaches - tl.num_programs(0) * 2 * longest, i, n, longest, True)
    potential = -(top + log_total)
    grads = GRADS + (number * tl.num_programs(0) + g) * longest
    grad = tl.zeros([BLOCK], tl.float32)
    for c in range(0, m, BLOCK):
        j = c + tl.arange(0, BLOCK)
        real_j = _real(Y_PADS + b * sbb, j, m, Y_HAS_PADS)
        y = _rows(Y + b * syb + head * syh, j, syn, D, d, real_j)
        pj = _positions(Y_POSITIONS + b * spb, j, m, PRIOR)
        s = _scores(_products(x, y, factor, PRECISION), slope, pi, pj, real_i, real_j, PRIOR)
        top, log_total = _reach(reaches, j, m, longest, True)
        of_y = tl.load(grads + j, mask=j < m, other=0.0)
        grad -= tl.sum(_shares(s, potential, top, log_total, 0) * of_y[None, :], 1)
    tl.store(grads - tl.num_programs(0) * longest + i, grad, mask=i < n)


@triton.jit
def _last_softmax(s, do, v, delta, reaches, before, i, j, n, m, longest, updates, seed, dropout, g, DROPS: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """Gradient of the last softmax for a tile.

    Returns:
        the weights after dropout; the gradient of the scores through them.
    """
    top, log_total = _reach(before, j, m, longest, updates > 0)
    of_rows, log_of_rows = _reach(reaches, i, n, longest, True)
    weights = _shares(s, -(top + log_total), of_rows, log_of_rows, 1)
    grad = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    dropped = weights
    if DROPS:
        kept = _kept(seed, dropout, g, m, i, j)
        grad = grad * kept
        dropped = weights * kept
    return dropped, weights * (grad - delta[:, None])


@triton.jit(do_not_specialize=RUNTIME)
def gradients(Q, K, V, FACTORS, SLOPES, QUERY_PADS, KEY_PADS, QUERY_POSITIONS, KEY_POSITIONS, REACHES, GRADS, GRAD_O,
              DELTA, GRAD_Q, GRAD_K, GRAD_V, GRAD_FACTORS,
              n, m, d, dv, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sab, sbb, spb, heads, scale, dropout, seed,
              updates, longest,
              KIND: tl.constexpr, HAS_QUERY_PADS: tl.constexpr, HAS_KEY_PADS: tl.constexpr, LEARNT: tl.constexpr,
              PRIOR: tl.constexpr, DROPS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """Gradients of a block of queries or keys of a long sentence.

    KIND "first": of the keys' last potential, ``GRADS[updates - 1]``, from the last softmax alone.
    KIND "queries": GRAD_Q, and the block's part of the factors' gradient, GRAD_FACTORS ``(programs, blocks)``.
    KIND "keys": GRAD_K and GRAD_V.
    Grid: sentence and head, block of queries if KIND is "queries", else of keys.
    """
    g = tl.program_id(0).to(tl.int64)
    b, head = g // heads, g % heads
    t = tl.arange(0, BLOCK)
    mine = tl.program_id(1) * BLOCK + t
    factor, slope = _scale(FACTORS, SLOPES, scale, head, LEARNT, PRIOR)
    stride = tl.num_programs(0) * 2 * longest
    reaches = REACHES + updates * stride + g * 2 * longest
    grad_x = tl.zeros([BLOCK, D], tl.float32)
    grad_v = tl.zeros([BLOCK, DV], tl.float32)
    first = tl.zeros([BLOCK], tl.float32)
    of_factor = tl.zeros([BLOCK], tl.float32)
    others = m if KIND == "queries" else n
    for c in range(0, others, BLOCK):
        if KIND == "queries":
            i, j = mine, c + t
        else:
            i, j = c + t, mine
        real_i = _real(QUERY_PADS + b * sab, i, n, HAS_QUERY_PADS)
        real_j = _real(KEY_PADS + b * sbb, j, m, HAS_KEY_PADS)
        q = _rows(Q + b * sqb + head * sqh, i, sqn, D, d, real_i)
        k = _rows(K + b * skb + head * skh, j, skn, D, d, real_j)
        v = _rows(V + b * svb + head * svh, j, svn, DV, dv, real_j).to(tl.float32)
        do = _rows(GRAD_O + g * n * dv, i, dv, DV, dv, real_i).to(tl.float32)
        delta = tl.load(DELTA + g * n + i, mask=i < n, other=0.0)
        pi = _positions(QUERY_POSITIONS + b * spb, i, n, PRIOR)
        pj = _positions(KEY_POSITIONS + b * spb, j, m, PRIOR)
        s = _scores(_products(q, k, factor, PRECISION), slope, pi, pj, real_i, real_j, PRIOR)
        dropped, grad = _last_softmax(s, do, v, delta, reaches, reaches - stride, i, j, n, m, longest, updates, seed,
                                      dropout, g, DROPS, PRECISION)  # fmt: skip
        if KIND == "first":
            first += tl.sum(grad, 0)
        else:
            for u in range(0, updates):
                made = REACHES + u * stride + g * 2 * longest
                grads = GRADS + (u * tl.num_programs(0) + g) * longest
                if (updates - u) % 2 == 0:
                    top, log_total = _reach(made, i, n, longest, True)
                    peak, log_sum = _reach(made - stride, j, m, longest, u > 0)
                    of_rows = tl.load(grads + i, mask=i < n, other=0.0)
                    grad -= _shares(s, -(peak + log_sum), top, log_total, 1) * of_rows[:, None]
                else:
                    top, log_total = _reach(made, j, m, longest, True)
                    peak, log_sum = _reach(made - stride, i, n, longest, u > 0)
                    of_columns = tl.load(grads + j, mask=j < m, other=0.0)
                    grad -= _shares(s, -(peak + log_sum), top, log_total, 0) * of_columns[None, :]
            if KIND == "queries":
                if LEARNT:
                    of_factor += tl.sum(grad * _products(q, k, scale, PRECISION), 1)
                grad_x = tl.dot(grad * factor, k.to(tl.float32), grad_x, input_precision=PRECISION)
            else:
                grad_x = tl.dot(tl.trans(grad * factor), q.to(tl.float32), grad_x, input_precision=PRECISION)
                grad_v = tl.dot(tl.trans(dropped), do, grad_v, input_precision=PRECISION)
    if KIND == "first":
        tl.store(GRADS + ((updates - 1) * tl.num_programs(0) + g) * longest + mine, first, mask=mine < m)
    elif KIND == "queries":
        _store(GRAD_Q + g * n * d, mine, n, D, d, grad_x)
        if LEARNT:
            tl.store(GRAD_FACTORS + g * tl.num_programs(1) + tl.program_id(1), tl.sum(of_factor, 0))
    else:
        _store(GRAD_K + g * m * d, mine, m, D, d, grad_x)
        _store(GRAD_V + g * m * dv, mine, m, DV, dv, grad_v)


def short_warps(n: int, m: int) -> tuple[int, int]:
    """Default number of warps, forward and backward, of a program that holds n x m scores."""
    entries = padded(n) * padded(m)
    return (4, 4) if entries <= 2048 else (8, 8) if entries <= 8192 else (8, 16)


def _short(kernel, ctx, x, backward):
    """Sides of the tile, warps and stages of a kernel that holds all scores."""
    sides = padded(ctx.numbers[0]), padded(ctx.numbers[1])
    default = Blocks(0, short_warps(*sides)[backward], 1)
    return sides, *tuned(kernel.__name__, x.device, (8 * x.element_size(), *ctx.constants[5:7], *sides), default)[1:]


def _long(kernel, ctx, x):
    sizes = 8 * x.element_size(), *ctx.constants[5:7]
    return tuned(kernel.__name__, x.device, sizes, Blocks(BLOCK, WARPS, STAGES))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, factors, slopes, positions, query_padding_mask, key_padding_mask, settings):
        scale, num_updates, dropout = settings
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        bsz, heads, n, d = q.shape
        m, dv, updates, programs = k.size(2), v.size(3), num_updates - 1, bsz * heads
        # any tensor is passed in place of one that is not given; it is not read
        masks = (q, query_padding_mask), (k, key_padding_mask)
        query_pads, key_pads = (x if mask is None else mask.contiguous().view(torch.uint8) for x, mask in masks)
        learnt, prior = factors is not None, slopes is not None
        held_factors = factors.float().contiguous() if learnt else q
        held_slopes, held_positions = (slopes, positions.contiguous()) if prior else (q, k)
        of_positions = 0 if prior and positions.size(0) == 1 else held_positions.stride(0)
        seed = int(torch.randint(2**31 - 1, (), device="cpu")) if dropout else 0
        longest = max(n, m)
        kept = q, k, v, held_factors, held_slopes, query_pads, key_pads, held_positions
        ctx.numbers = (n, m, d, dv, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], query_pads.stride(0))
        ctx.numbers += (key_pads.stride(0), of_positions, heads, scale, float(dropout), seed)
        pads = query_padding_mask is not None, key_padding_mask is not None
        ctx.constants = *pads, learnt, prior, dropout > 0, padded(d), padded(dv), dot_precision(q)
        ctx.updates, ctx.longest, ctx.short = updates, longest, longest <= LONGEST_ON_CHIP
        reaches = torch.empty(num_updates, programs, 2, longest, dtype=torch.float32, device=q.device)
        if ctx.short:
            out = torch.empty(bsz, heads, n, dv, dtype=v.dtype, device=q.device)
            sides, *rest = _short(short_forward, ctx, q, False)
            numbers, every = (*ctx.numbers, updates, longest), (*ctx.constants, *sides)
            start(short_forward, (programs,), (*kept, reaches, out), numbers, every, *rest)
            ctx.save_for_backward(*kept, reaches)
            return out
        out = torch.empty(bsz, heads, n, dv, dtype=torch.float32, device=q.device)
        for u in range(num_updates):
            _reduce(ctx, kept, reaches, out, u)
        ctx.save_for_backward(*kept, reaches, out)
        return out.to(v.dtype)

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_values):
        *kept, reaches = ctx.saved_tensors[:9]
        q, k, v, factors = kept[:4]
        bsz, heads, n, d = q.shape
        m, programs = k.size(2), bsz * heads
        learnt = ctx.constants[2]
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        of_factors = None
        grad_values = grad_values.contiguous()
        if ctx.short:
            found = torch.empty(bsz, heads, dtype=torch.float32, device=q.device) if learnt else grad_q
            sides, *rest = _short(short_backward, ctx, q, True)
            numbers, every = (*ctx.numbers, ctx.updates, ctx.longest), (*ctx.constants, *sides)
            tensors = (*kept, reaches, grad_values, grad_q, grad_k, grad_v, found)
            start(short_backward, (programs,), tensors, numbers, every, *rest)
            of_factors = found.sum(0) if learnt else None
            return grad_q, grad_k, grad_v, of_factors, *[None] * 5
        out = ctx.saved_tensors[9]
        delta = (grad_values * out).sum(-1)
        block, warps, stages = _long(gradients, ctx, q)
        blocks = triton.cdiv(n, block), triton.cdiv(m, block)
        grads = torch.empty(max(ctx.updates, 1), programs, ctx.longest, dtype=torch.float32, device=q.device)
        found = torch.empty(bsz, heads, blocks[0], dtype=torch.float32, device=q.device) if learnt else delta
        positions = kept[7]
        both = positions[..., positions.size(-1) - n :] if ctx.constants[3] else positions, positions
        tensors = (*kept[:7], *both, reaches, grads, grad_values, delta, grad_q, grad_k, grad_v, found)
        numbers = *ctx.numbers, ctx.updates, ctx.longest

        def run(kind, count):
            start(gradients, (programs, count), tensors, numbers, (kind, *ctx.constants, block), warps, stages)

        if ctx.updates:
            run("first", blocks[1])
        for u in range(ctx.updates - 1, 0, -1):
            _undo(ctx, kept, reaches, grads, u)
        run("queries", blocks[0])
        run("keys", blocks[1])
        of_factors = found.sum((0, 2)) if learnt else None
        return grad_q, grad_k, grad_v, of_factors, *[None] * 5


def _sides(ctx, kept, rows):
    """Tensors, numbers and flags of a kernel whose x are the queries, if ``rows``, or the keys."""
    q, k, v, factors, slopes, query_pads, key_pads, positions = kept
    n, m, d, dv, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sab, sbb, spb, heads, scale, dropout, seed = ctx.numbers
    query_has, key_has, learnt, prior, drops, *sizes = ctx.constants
    of_queries = positions[..., positions.size(-1) - n :] if prior else positions
    queries = q, query_pads, of_queries, n, (sqb, sqh, sqn), sab, query_has
    keys = k, key_pads, positions, m, (skb, skh, skn), sbb, key_has
    x, y = (queries, keys) if rows else (keys, queries)
    return x, y, (v, factors, slopes), (d, dv, svb, svh, svn, spb, heads, scale, dropout, seed), (learnt, prior, drops)


def _reduce(ctx, kept, reaches, out, u):
    last = u == ctx.updates
    x, y, (v, factors, slopes), numbers, flags = _sides(ctx, kept, last or (ctx.updates - u) % 2 == 0)
    d, dv, svb, svh, svn, spb, heads, scale, dropout, seed = numbers
    tensors = x[0], y[0], v, factors, slopes, x[1], y[1], x[2], y[2], reaches, out
    numbers = (x[3], y[3], d, dv, *x[4], *y[4], svb, svh, svn, x[5], y[5], spb, heads, scale, dropout, seed)
    learnt, prior, drops = flags
    block, warps, stages = _long(reduce_side, ctx, x[0])
    constants = last, x[6], y[6], learnt, prior, drops, *ctx.constants[5:], block
    grid = reaches.size(1), triton.cdiv(x[3], block)
    start(reduce_side, grid, tensors, (*numbers, u, ctx.longest), constants, warps, stages)


def _undo(ctx, kept, reaches, grads, u):
    rows_updated = (ctx.updates - u) % 2 == 0
    x, y, (_, factors, slopes), numbers, flags = _sides(ctx, kept, not rows_updated)
    d, _, _, _, _, spb, heads, scale, _, _ = numbers
    tensors = x[0], y[0], factors, slopes, x[1], y[1], x[2], y[2], reaches, grads
    numbers = (x[3], y[3], d, *x[4], *y[4], x[5], y[5], spb, heads, scale, u, ctx.longest)
    width, _, precision = ctx.constants[5:]
    block, warps, stages = _long(undo_update, ctx, x[0])
    constants = x[6], y[6], *flags[:2], width, precision, block
    start(undo_update, (reaches.size(1), triton.cdiv(x[3], block)), tensors, numbers, constants, warps, stages)


def sinkhorn_attention(inputs: SinkhornInputs, settings: SinkhornSettings) -> torch.Tensor:
    """Values of Sinkhorn attention, ``(bsz, num_heads, n, value_dim)``, zero at padded queries."""
    return _Attention.apply(*inputs, settings)
