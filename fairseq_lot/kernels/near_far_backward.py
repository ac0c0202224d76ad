"""Backward kernels of near_far attention; ``near_far.py`` explains how they work together."""

import triton
import triton.language as tl

from fairseq_lot.kernels.launch import RUNTIME
from fairseq_lot.kernels.near_far_tiles import (
    INF,
    ROOM,
    fall_to_edge,
    feature_logs,
    finite,
    is_key,
    keys_met,
    load_beyond,
    load_bias,
    load_probes,
    load_rows,
    load_slope,
    near_and_far,
    product,
    query_logs,
    rounded_to_tf32,
    store_rows,
)
from fairseq_lot.kernels.tiles import NEG_INF


@triton.jit
def _of_feature_logs(grad_logs, x, z, HAS_NORMS: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients of x and z from ``grad_logs``, the gradient of ``x.z_t - |x|^2/2``; without HAS_NORMS of ``x.z_t``."""
    TYPE: tl.constexpr = x.dtype
    of_x = product(grad_logs, z, TYPE, PRECISION)
    if HAS_NORMS:
        of_x -= x.to(tl.float32) * tl.sum(grad_logs, 1)[:, None]
    return of_x, product(tl.trans(grad_logs), x, TYPE, PRECISION)


@triton.jit(do_not_specialize=RUNTIME)
def query_gradients(Q, K, V, Z, BIAS, SLOPES, PADS, MEANS, CONSTANTS, TOPS, MASSES, SUMS, OUT, ROW_PEAKS, ROW_LOGS,
                    GRAD_OUT, GRAD_Q, DELTA, QUERY_SUMS, GRAD_Z, GRAD_BIAS, TO_TOPS, TO_MASSES, TO_SUMS,
                    n, early, skip, r, d, dv, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sdb, sdh, sdn, spb, heads,
                    scale, natural, window, sides, partials,
                    BEYOND: tl.constexpr, CAUSAL: tl.constexpr, TANGENTS: tl.constexpr, HAS_PADS: tl.constexpr,
                    HAS_SLOPES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
                    DV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of a block of queries, from GRAD_OUT (dout).

    Writes:
        GRAD_Q: gradient of the queries.
        DELTA: ``delta_i = out_i.dout_i``, ``(programs, rows)``.
        GRAD_BIAS: the block's part of the bias's gradient, ``sum_i grad_it``, ``(programs, blocks, r)``.
        GRAD_Z: the block's part of the features' gradient, ``(programs, partials, r, d)``; with tangents instead
            QUERY_SUMS, ``sum_i grad_it q_i``, ``(programs, blocks, r, d)``, for ``merge``.
        TO_TOPS, TO_MASSES, TO_SUMS: sums for the keys beyond the block, ``sum_i phi_it delta_i`` (masses) and
            ``sum_i phi_it dout_i``, where ``phi_it`` is ``2^(a_it - top_t)`` over the total weight of row i.

    Grid: sentence and head, block.
    """
    g, at_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, head = g // heads, g % heads
    t = tl.arange(0, R)
    start, first, last = keys_met(at_block + skip, n, BEYOND, CAUSAL, C)
    i = start + tl.arange(0, C)
    is_query = (i >= early) & (i < n)
    all_programs, blocks = tl.num_programs(0), tl.num_programs(1)
    grad_out = load_rows(GRAD_OUT + b * sdb + head * sdh, i - early, sdn, dv, is_query, DV)
    out = load_rows(OUT + g * dv, i - early, all_programs * dv, dv, is_query, DV)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    row = g * (n - early) + i - early
    tl.store(DELTA + row, delta, mask=is_query)
    row_peaks = tl.load(ROW_PEAKS + row, mask=is_query, other=INF)
    row_logs = tl.load(ROW_LOGS + row, mask=is_query, other=0.0)
    q = load_rows(Q + b * sqb + head * sqh, i - early, sqn, d, is_query, D)
    z = load_rows(Z + head * r * d, t, d, d, t < r, D)
    probes, constants = load_probes(z, MEANS, CONSTANTS, g, r, d, TANGENTS, R, D)
    a = query_logs(q, probes, constants, load_bias(BIAS, head, r, R), scale, TANGENTS, PRECISION)
    slope = load_slope(SLOPES, head, HAS_SLOPES)
    grad_q = tl.zeros([C, D], tl.float32)
    grad_logs = tl.zeros([C, R], tl.float32)
    if BEYOND:
        for side in range(sides):
            x = a
            if HAS_SLOPES:
                x = a - fall_to_edge(i, start, start + C, slope, side)[:, None]
            tops, masses, sums = load_beyond(TOPS, MASSES, SUMS, g, at_block, side, sides, blocks, dv, R, DV)
            grad = product(grad_out, tl.trans(sums), tl.float32, PRECISION) - delta[:, None] * masses[None, :]
            grad_logs += tl.exp2((x + tops[None, :] - row_peaks[:, None]) - row_logs[:, None]) * grad
            x = (x - row_peaks[:, None]) - row_logs[:, None]
            top = tl.max(x, 0)
            phi = tl.exp2(x - finite(top)[None, :])
            place = ((g * sides + side) * blocks + at_block) * R
            tl.store(TO_TOPS + place + t, top)
            tl.store(TO_MASSES + place + t, tl.sum(phi * delta[:, None], 0))
            of_out = product(tl.trans(phi), grad_out, V.dtype.element_ty, PRECISION)
            store_rows(TO_SUMS + place * dv, t, dv, dv, t < R, of_out, DV)
    for at in range(first, last, T):
        j = at + tl.arange(0, T)
        real = is_key(PADS + b * spb, j, n, HAS_PADS)
        k = load_rows(K + b * skb + head * skh, j, skn, d, real, D)
        v = load_rows(V + b * svb + head * svh, j, svn, dv, real, DV)
        distance = i[:, None] - j[None, :]
        near, far = near_and_far(distance, real[None, :], window, CAUSAL)
        grad = product(grad_out, tl.trans(v), V.dtype.element_ty, PRECISION) - delta[:, None]
        scores = product(q, tl.trans(k), Q.dtype.element_ty, PRECISION) * scale
        grad_far = tl.where(far, grad, 0.0)
        if HAS_SLOPES:
            fall = slope * tl.abs(distance).to(tl.float32)
            scores -= fall
            grad_far *= tl.exp2(-fall)
        share = tl.exp2(tl.where(near, (scores - row_peaks[:, None]) - row_logs[:, None], NEG_INF))
        grad_q += product(share * grad, k, Q.dtype.element_ty, PRECISION)
        key_logs = tl.where(real[:, None], feature_logs(k, z, scale, not TANGENTS, PRECISION), NEG_INF)
        top = finite(tl.max(key_logs, 0))
        psi = tl.exp2(key_logs - top[None, :] + ROOM)
        phi = tl.exp2(tl.minimum((a + top[None, :] - row_peaks[:, None]) - row_logs[:, None] - ROOM, ROOM))
        grad_logs += phi * product(grad_far, psi, tl.float32, PRECISION)
    of_x, of_probes = _of_feature_logs(grad_logs, q, probes, not TANGENTS, PRECISION)
    store_rows(GRAD_Q + g * d, i - early, all_programs * d, d, is_query, (grad_q + of_x) * natural, D)
    if TANGENTS:
        store_rows(QUERY_SUMS + (g * blocks + at_block) * r * d, t, d, d, t < r, of_probes, D)
    else:
        store_rows(GRAD_Z + (g * partials + at_block) * r * d, t, d, d, t < r, of_probes * natural, D)
    tl.store(GRAD_BIAS + (g * blocks + at_block) * r + t, tl.sum(grad_logs, 0), mask=t < r)


@triton.jit
def _of_means(k, real, key_logs, MEANS, GRAD_MEANS, TOTAL_TOPS, TOTAL_MASSES, g, r, d, natural,
              R: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of keys and of their logs ``b_jt`` through the means, ``mean_t = sum_j softmax_j(b_jt) k_j``."""
    t = tl.arange(0, R)
    means = load_rows(MEANS + g * R * d, t, d, d, t < r, D)
    of_means = load_rows(GRAD_MEANS + g * R * d, t, d, d, t < r, D)
    if PRECISION == "tf32":  # rounded once for both products below, so that their gradients of the logs sum to zero
        of_means = (rounded_to_tf32(of_means).to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    top, mass = tl.load(TOTAL_TOPS + g * R + t), tl.load(TOTAL_MASSES + g * R + t)
    shares = tl.exp2(key_logs - finite(top)[None, :]) / tl.where(mass > 0.0, mass, 1.0)[None, :]
    shares = tl.where(real[:, None], shares, 0.0)
    grad = product(k, tl.trans(of_means), tl.float32, PRECISION) - tl.sum(of_means * means, 1)[None, :]
    return product(shares, of_means, tl.float32, PRECISION), natural * shares * grad


@triton.jit(do_not_specialize=RUNTIME)
def key_gradients(Q, K, V, Z, BIAS, SLOPES, PADS, MEANS, CONSTANTS, GRAD_MEANS, TOTAL_TOPS, TOTAL_MASSES,
                  TOPS, MASSES, SUMS, ROW_PEAKS, ROW_LOGS, GRAD_OUT, DELTA, GRAD_K, GRAD_V, GRAD_Z,
                  n, early, blocks, r, d, dv, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sdb, sdh, sdn, spb, heads,
                  scale, natural, window, sides, partials,
                  BEYOND: tl.constexpr, CAUSAL: tl.constexpr, TANGENTS: tl.constexpr, HAS_PADS: tl.constexpr,
                  HAS_SLOPES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
                  DV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of a chunk: GRAD_K, GRAD_V, and its part of the features' gradient, GRAD_Z.

    Tiles have keys as rows and queries as columns. GRAD_Z is ``(programs, partials, r, d)``; the chunks' parts come
    after the blocks'. Grid: sentence and head, chunk.
    """
    g, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, head = g // heads, g % heads
    t = tl.arange(0, R)
    j = c * C + tl.arange(0, C)
    is_slot = j < n
    real = is_key(PADS + b * spb, j, n, HAS_PADS)
    k = load_rows(K + b * skb + head * skh, j, skn, d, real, D)
    v = load_rows(V + b * svb + head * svh, j, svn, dv, real, DV)
    z = load_rows(Z + head * r * d, t, d, d, t < r, D)
    probes, constants = load_probes(z, MEANS, CONSTANTS, g, r, d, TANGENTS, R, D)
    bias = load_bias(BIAS, head, r, R)
    key_logs = tl.where(real[:, None], feature_logs(k, z, scale, not TANGENTS, PRECISION), NEG_INF)
    top = finite(tl.max(key_logs, 0))
    psi = tl.exp2(key_logs - top[None, :] + ROOM)
    slope = load_slope(SLOPES, head, HAS_SLOPES)
    grad_k = tl.zeros([C, D], tl.float32)
    grad_v = tl.zeros([C, DV], tl.float32)
    grad_logs = tl.zeros([C, R], tl.float32)
    if TANGENTS:  # first, because it needs many registers
        grad_k, grad_logs = _of_means(
            k, real, key_logs, MEANS, GRAD_MEANS, TOTAL_TOPS, TOTAL_MASSES, g, r, d, natural, R, D, PRECISION
        )
    if BEYOND:
        for side in range(sides):
            x = key_logs
            if HAS_SLOPES:
                x = key_logs - fall_to_edge(j, c * C + C, c * C, slope, side)[:, None]
            tops, masses, sums = load_beyond(TOPS, MASSES, SUMS, g, c, side, sides, tl.num_programs(1), dv, R, DV)
            share = tl.exp2(x + tops[None, :])
            grad_logs += share * (product(v, tl.trans(sums), tl.float32, PRECISION) - masses[None, :])
            grad_v += product(share, sums, tl.float32, PRECISION)
    first, last = 0, n
    if BEYOND:
        first, last = tl.maximum(c * C - C // 2, 0), tl.minimum(c * C + C + C // 2, n)
    if CAUSAL:
        first = c * C
    for at in range(first, last, T):
        i = at + tl.arange(0, T)
        is_query = (i >= early) & (i < last)  # a tile may reach into the next block
        q = load_rows(Q + b * sqb + head * sqh, i - early, sqn, d, is_query, D)
        grad_out = load_rows(GRAD_OUT + b * sdb + head * sdh, i - early, sdn, dv, is_query, DV)
        row = g * (n - early) + i - early
        delta = tl.load(DELTA + row, mask=is_query, other=0.0)
        row_peaks = tl.load(ROW_PEAKS + row, mask=is_query, other=INF)
        row_logs = tl.load(ROW_LOGS + row, mask=is_query, other=0.0)
        a = query_logs(q, probes, constants, bias, scale, TANGENTS, PRECISION)
        phi = tl.exp2(tl.minimum((a + top[None, :] - row_peaks[:, None]) - row_logs[:, None] - ROOM, ROOM))
        distance = i[None, :] - j[:, None]
        near, far = near_and_far(distance, real[:, None], window, CAUSAL)
        grad = product(v, tl.trans(grad_out), V.dtype.element_ty, PRECISION) - delta[None, :]
        scores = product(k, tl.trans(q), Q.dtype.element_ty, PRECISION) * scale
        share = tl.where(far, product(psi, tl.trans(phi), tl.float32, PRECISION), 0.0)
        grad_far = tl.where(far, grad, 0.0)
        if HAS_SLOPES:
            fall = slope * tl.abs(distance).to(tl.float32)
            scores -= fall
            fade = tl.exp2(-fall)
            share *= fade
            grad_far *= fade
        near_share = tl.exp2(tl.where(near, (scores - row_peaks[None, :]) - row_logs[None, :], NEG_INF))
        grad_k += product(near_share * grad, q, Q.dtype.element_ty, PRECISION)
        grad_v += product(share + near_share, grad_out, V.dtype.element_ty, PRECISION)
        grad_logs += psi * product(grad_far, phi, tl.float32, PRECISION)
    of_x, of_z = _of_feature_logs(grad_logs, k, z, not TANGENTS, PRECISION)
    all_programs = tl.num_programs(0)
    store_rows(GRAD_K + g * d, j, all_programs * d, d, is_slot, (grad_k + of_x) * natural, D)
    store_rows(GRAD_V + g * dv, j, all_programs * dv, dv, is_slot, grad_v, DV)
    place = g * partials + c
    if not TANGENTS:
        place += blocks  # after the queries' parts
    store_rows(GRAD_Z + place * r * d, t, d, d, t < r, of_z * natural, D)


@triton.jit(do_not_specialize=RUNTIME)
def all_gradients(Q, K, V, Z, BIAS, SLOPES, PADS, OUT, ROW_PEAKS, ROW_LOGS, GRAD_OUT,
                  GRAD_Q, GRAD_K, GRAD_V, GRAD_Z, GRAD_BIAS,
                  n, early, r, d, dv, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sdb, sdh, sdn, spb, heads, scale,
                  natural, window, CAUSAL: tl.constexpr, HAS_PADS: tl.constexpr, HAS_SLOPES: tl.constexpr,
                  R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """All gradients of a sentence that is one chunk, without tangents. Grid: sentence and head."""
    g = tl.program_id(0).to(tl.int64)
    b, head = g // heads, g % heads
    t, i = tl.arange(0, R), tl.arange(0, C)
    is_slot = i < n
    is_query = (i >= early) & is_slot
    distance = i[:, None] - i[None, :]
    width = tl.num_programs(0)
    z = load_rows(Z + head * r * d, t, d, d, t < r, D)
    real = is_key(PADS + b * spb, i, n, HAS_PADS)
    q = load_rows(Q + b * sqb + head * sqh, i - early, sqn, d, is_query, D)
    k = load_rows(K + b * skb + head * skh, i, skn, d, real, D)
    v = load_rows(V + b * svb + head * svh, i, svn, dv, real, DV)
    grad_out = load_rows(GRAD_OUT + b * sdb + head * sdh, i - early, sdn, dv, is_query, DV)
    row = g * (n - early) + i - early
    row_peaks = tl.load(ROW_PEAKS + row, mask=is_query, other=INF)
    row_logs = tl.load(ROW_LOGS + row, mask=is_query, other=0.0)
    out = load_rows(OUT + g * dv, i - early, width * dv, dv, is_query, DV)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    near, far = near_and_far(distance, real[None, :], window, CAUSAL)
    a = feature_logs(q, z, scale, True, PRECISION) + load_bias(BIAS, head, r, R)[None, :]
    key_logs = tl.where(real[:, None], feature_logs(k, z, scale, True, PRECISION), NEG_INF)
    top = finite(tl.max(key_logs, 0))
    psi = tl.exp2(key_logs - top[None, :] + ROOM)
    phi = tl.exp2(tl.minimum((a + top[None, :] - row_peaks[:, None]) - row_logs[:, None] - ROOM, ROOM))
    weights = tl.where(far, product(phi, tl.trans(psi), tl.float32, PRECISION), 0.0)
    scores = product(q, tl.trans(k), Q.dtype.element_ty, PRECISION) * scale
    if HAS_SLOPES:
        fall = load_slope(SLOPES, head, HAS_SLOPES) * tl.abs(distance).to(tl.float32)
        scores -= fall
        weights *= tl.exp2(-fall)
    near_share = tl.exp2(tl.where(near, (scores - row_peaks[:, None]) - row_logs[:, None], NEG_INF))
    weights = (weights + near_share).to(V.dtype.element_ty)
    of_v = product(tl.trans(weights), grad_out, V.dtype.element_ty, PRECISION)
    store_rows(GRAD_V + g * dv, i, width * dv, dv, is_slot, of_v, DV)
    grad = product(grad_out, tl.trans(v), V.dtype.element_ty, PRECISION) - delta[:, None]
    near_grad = (near_share * grad).to(Q.dtype.element_ty)
    grad = tl.where(far, grad, 0.0)
    if HAS_SLOPES:
        grad *= tl.exp2(-fall)
    of_a = phi * product(grad, psi, tl.float32, PRECISION)
    of_b = psi * product(tl.trans(grad), phi, tl.float32, PRECISION)
    of_x, grad_z = _of_feature_logs(of_a, q, z, True, PRECISION)
    of_x += product(near_grad, k, Q.dtype.element_ty, PRECISION)
    store_rows(GRAD_Q + g * d, i - early, width * d, d, is_query, of_x * natural, D)
    of_x, of_z = _of_feature_logs(of_b, k, z, True, PRECISION)
    of_x += product(tl.trans(near_grad), q, Q.dtype.element_ty, PRECISION)
    store_rows(GRAD_K + g * d, i, width * d, d, is_slot, of_x * natural, D)
    store_rows(GRAD_Z + g * r * d, t, d, d, t < r, (grad_z + of_z) * natural, D)
    tl.store(GRAD_BIAS + g * r + t, tl.sum(of_a, 0), mask=t < r)


@triton.jit(do_not_specialize=RUNTIME)
def add_up(GRAD_Z, GRAD_BIAS, TO_Z, TO_BIAS, r, d, sentences, heads, partials, blocks,
           N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Add up the parts of one feature's gradient, and of its bias's, over all sentences, blocks and chunks.

    Reads GRAD_Z, ``(programs, partials, r, d)``, and GRAD_BIAS, ``(programs, blocks, r)``; writes TO_Z, ``(heads, r,
    d)``, and TO_BIAS, ``(heads, r)``. Grid: head x feature.
    """
    head, t = tl.program_id(0) // r, tl.program_id(0) % r
    e = tl.arange(0, D)
    total = tl.zeros([D], tl.float32)
    for start in range(0, sentences * partials, N):
        p = start + tl.arange(0, N)
        row = ((p // partials * heads + head) * partials + p % partials).to(tl.int64) * r + t
        total += tl.sum(load_rows(GRAD_Z, row, d, d, p < sentences * partials, D), 0)
    of_bias = tl.zeros([N], tl.float32)
    for start in range(0, sentences * blocks, N):
        p = start + tl.arange(0, N)
        row = ((p // blocks * heads + head) * blocks + p % blocks).to(tl.int64) * r + t
        of_bias += tl.load(GRAD_BIAS + row, mask=p < sentences * blocks, other=0.0)
    tl.store(TO_Z + tl.program_id(0) * d + e, total.to(TO_Z.dtype.element_ty), mask=e < d)
    tl.store(TO_BIAS + tl.program_id(0), tl.sum(of_bias, 0).to(TO_BIAS.dtype.element_ty))
