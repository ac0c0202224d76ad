"""Forward kernels of near_far attention; ``near_far.py`` explains how they work together."""

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
    store_rows,
)
from fairseq_lot.kernels.tiles import NEG_INF


@triton.jit(do_not_specialize=RUNTIME)
def summarise_keys(K, V, Z, SLOPES, PADS, TOPS, MASSES, SUMS, KEY_TOPS, KEY_MASSES, KEY_SUMS,
                   n, r, d, dv, skb, skh, skn, svb, svh, svn, spb, heads, scale,
                   TANGENTS: tl.constexpr, HAS_PADS: tl.constexpr, HAS_SLOPES: tl.constexpr, R: tl.constexpr,
                   C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """For one chunk and each feature t, sums over the chunk's keys: top, mass and sum of ``near_far.py``.

    Writes TOPS and MASSES, ``(programs, sides, chunks, R)``, and SUMS, ``(programs, sides, chunks, R, dv)``. With
    slopes ``b_jt`` falls by the distance of key j to the edge of the chunk, its end for side 0, its start for side 1.
    With tangents side 0 also writes KEY_TOPS and KEY_MASSES, ``(programs, chunks, R)``, and KEY_SUMS, ``(programs,
    chunks, R, d)``: without slopes, and with keys in place of values. Grid: sentence and head, chunk, side.
    """
    g, c, side = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    b, head = g // heads, g % heads
    t = tl.arange(0, R)
    j = c * C + tl.arange(0, C)
    real = is_key(PADS + b * spb, j, n, HAS_PADS)
    k = load_rows(K + b * skb + head * skh, j, skn, d, real, D)
    v = load_rows(V + b * svb + head * svh, j, svn, dv, real, DV)
    z = load_rows(Z + head * r * d, t, d, d, t < r, D)
    logs = tl.where(real[:, None], feature_logs(k, z, scale, not TANGENTS, PRECISION), NEG_INF)
    if TANGENTS:  # noqa: SIM102, Triton must evaluate this condition alone, when it compiles
        if side == 0:
            top = tl.max(logs, 0)
            psi = tl.exp2(logs - finite(top)[None, :])
            place = (g * tl.num_programs(1) + c) * R
            tl.store(KEY_TOPS + place + t, top)
            tl.store(KEY_MASSES + place + t, tl.sum(psi, 0))
            store_rows(KEY_SUMS + place * d, t, d, d, t < R, product(tl.trans(psi), k, tl.float32, PRECISION), D)
    if HAS_SLOPES:
        logs -= fall_to_edge(j, c * C + C, c * C, load_slope(SLOPES, head, HAS_SLOPES), side)[:, None]
    top = tl.max(logs, 0)
    psi = tl.exp2(logs - finite(top)[None, :])
    place = ((g * tl.num_programs(2) + side) * tl.num_programs(1) + c) * R
    tl.store(TOPS + place + t, top)
    tl.store(MASSES + place + t, tl.sum(psi, 0))
    sums = product(tl.trans(psi), v, V.dtype.element_ty, PRECISION)
    store_rows(SUMS + place * dv, t, dv, dv, t < R, sums, DV)


@triton.jit
def _merge_chunks(TOPS, MASSES, SUMS, slope, target, t, side, sources, skip, dv,
                  TO_KEYS: tl.constexpr, CAUSAL: tl.constexpr, TWO_SIDES: tl.constexpr, HAS_SLOPES: tl.constexpr,
                  R: tl.constexpr, C: tl.constexpr, N: tl.constexpr, DV: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """One feature's top, mass and sum over all sources beyond each target: ``(N,)``, ``(N,)``, ``(N, DV)``."""
    top = tl.full([N], NEG_INF, tl.float32)
    mass = tl.zeros([N], tl.float32)
    sums = tl.zeros([N, DV], tl.float32)
    for start in range(0, sources, N):
        source = start + tl.arange(0, N)
        is_source = source < sources
        ahead = target[:, None] - source[None, :]  # the block's number less the chunk's
        if TO_KEYS:
            ahead = -ahead
        ahead += skip
        before, after = ahead >= 2, ahead <= -1
        if TWO_SIDES:
            beyond = tl.where(side == 0, before, after)
        elif CAUSAL:
            beyond = before
        else:
            beyond = before | after
        x = tl.load(TOPS + source * R, mask=is_source, other=NEG_INF)[None, :]
        if HAS_SLOPES:
            gap = tl.where(before, C * ahead - (C + C // 2), -C * ahead - C // 2)
            x = x - slope * gap.to(tl.float32)
        x = tl.where(beyond, x, NEG_INF)
        new = tl.maximum(top, tl.max(x, 1))
        w = tl.exp2(x - finite(new)[:, None])
        fade = tl.exp2(top - finite(new))
        masses = tl.load(MASSES + source * R, mask=is_source, other=0.0)
        mass = mass * fade + tl.sum(w * masses[None, :], 1)
        values = load_rows(SUMS, source, R * dv, dv, is_source, DV)
        sums = sums * fade[:, None] + product(w, values, tl.float32, PRECISION)
        top = new
    return top, mass, sums


@triton.jit
def _mean_of_keys(TOPS, MASSES, SUMS, sources, d, R: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """One feature's top and mass over all keys, with the mean of the keys; 0 if there are no keys."""
    top = tl.full([1], NEG_INF, tl.float32)
    mass = tl.zeros([1], tl.float32)
    total = tl.zeros([D], tl.float32)
    for start in range(0, sources, N):
        source = start + tl.arange(0, N)
        is_source = source < sources
        x = tl.load(TOPS + source * R, mask=is_source, other=NEG_INF)
        new = tl.maximum(top, tl.max(x, 0))
        w = tl.exp2(x - finite(new))
        fade = tl.exp2(top - finite(new))
        mass = mass * fade + tl.sum(w * tl.load(MASSES + source * R, mask=is_source, other=0.0), 0)
        keys = load_rows(SUMS, source, R * d, d, is_source, D)
        total = total * fade + tl.sum(w[:, None] * keys, 0)
        top = new
    return top, mass, total / tl.where(mass > 0.0, mass, 1.0)


@triton.jit
def _add_query_sums(QUERY_SUMS, GRAD_BIAS, g, t, r, d, sources, N: tl.constexpr, D: tl.constexpr):
    """One feature's ``sum_i grad_it q_i`` and ``sum_i grad_it``, added up over all blocks."""
    sums = tl.zeros([D], tl.float32)
    total = tl.zeros([1], tl.float32)
    for start in range(0, sources, N):
        source = start + tl.arange(0, N)
        is_source = source < sources
        row = (g * sources + source) * r + t
        sums += tl.sum(load_rows(QUERY_SUMS, row, d, d, is_source, D), 0)
        total += tl.sum(tl.load(GRAD_BIAS + row, mask=is_source, other=0.0), 0)
    return sums, total


@triton.jit(do_not_specialize=RUNTIME)
def merge(TOPS, MASSES, SUMS, SLOPES, TO_TOPS, TO_MASSES, TO_SUMS,
          Z, KEY_TOPS, KEY_MASSES, KEY_SUMS, MEANS, CONSTANTS, TOTAL_TOPS, TOTAL_MASSES,
          QUERY_SUMS, GRAD_BIAS, GRAD_MEANS, GRAD_Z, sources, targets, skip, partials, r, d, dv, heads, scale, natural,
          TO_KEYS: tl.constexpr, CAUSAL: tl.constexpr, TWO_SIDES: tl.constexpr, HAS_SLOPES: tl.constexpr,
          TANGENTS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
          DV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One feature's sums over all sources beyond each of N targets.

    Forward, sources are chunks and targets are blocks; with TO_KEYS (backward) it is the reverse. Blocks are numbered
    from ``skip`` on. Reads TOPS and MASSES, ``(programs, sides, sources, R)``, and SUMS, ``(programs, sides, sources,
    R, dv)``; writes the same with targets in place of sources to TO_TOPS, TO_MASSES and TO_SUMS. With slopes, sources
    fall by the gap between chunk and block. Two sides: those before a target and those after it have separate sums.

    With tangents, one more program per feature sums over all sources. Forward it writes the mean of the keys to MEANS,
    the constant ``s z.mean`` to CONSTANTS, and the keys' top and mass to TOTAL_TOPS and TOTAL_MASSES. With TO_KEYS it
    writes the gradient of the mean, divided by s, to GRAD_MEANS, and the gradient of z through the constant to GRAD_Z.

    Grid: (sentence and head) x feature, N targets (with tangents, one more), side.
    """
    g, t, side = tl.program_id(0).to(tl.int64) // R, tl.program_id(0) % R, tl.program_id(2)
    head = g % heads
    number = tl.program_id(1)
    if TANGENTS:  # noqa: SIM102
        if number == tl.num_programs(1) - 1:
            e = tl.arange(0, D)
            here, one = e < d, tl.arange(0, 1)
            z = tl.load(Z + (head * r + t) * d + e, mask=here & (e < tl.where(t < r, d, 0)), other=0.0).to(tl.float32)
            place = g * R + t
            if TO_KEYS:
                sums, total = _add_query_sums(QUERY_SUMS, GRAD_BIAS, g, t, r, d, tl.where(t < r, sources, 0), N, D)
                tl.store(GRAD_MEANS + place * d + e, sums - total * z, mask=here)
                mean = tl.load(MEANS + place * d + e, mask=here, other=0.0)
                to_z = (g * partials + partials - 1) * r + t
                tl.store(GRAD_Z + to_z * d + e, -natural * total * mean, mask=here & (e < tl.where(t < r, d, 0)))
            else:
                at = g * sources * R + t
                top, mass, mean = _mean_of_keys(KEY_TOPS + at, KEY_MASSES + at, KEY_SUMS + at * d, sources, d, R, N, D)
                tl.store(MEANS + place * d + e, mean, mask=here)
                tl.store(CONSTANTS + place, scale * tl.sum(z * mean, 0))
                tl.store(TOTAL_TOPS + place + one, top)
                tl.store(TOTAL_MASSES + place + one, mass)
            return
    target = number * N + tl.arange(0, N)
    pair = g * tl.num_programs(2) + side
    top, mass, sums = _merge_chunks(
        TOPS + pair * sources * R + t, MASSES + pair * sources * R + t, SUMS + (pair * sources * R + t) * dv,
        load_slope(SLOPES, head, HAS_SLOPES), target, t, side, sources, skip, dv,
        TO_KEYS, CAUSAL, TWO_SIDES, HAS_SLOPES, R, C, N, DV, PRECISION,
    )  # fmt: skip
    is_target = target < targets
    tl.store(TO_TOPS + pair * targets * R + target * R + t, top, mask=is_target)
    tl.store(TO_MASSES + pair * targets * R + target * R + t, mass, mask=is_target)
    store_rows(TO_SUMS + (pair * targets * R + t) * dv, target, R * dv, dv, is_target, sums, DV)


@triton.jit(do_not_specialize=RUNTIME)
def attend(Q, K, V, Z, BIAS, SLOPES, PADS, MEANS, CONSTANTS, TOPS, MASSES, SUMS, OUT, ROW_PEAKS, ROW_LOGS,
           n, early, skip, r, d, dv, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, spb, heads, scale, window, sides,
           BEYOND: tl.constexpr, CAUSAL: tl.constexpr, TANGENTS: tl.constexpr, HAS_PADS: tl.constexpr,
           HAS_SLOPES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
           DV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The values of a block of queries, written to OUT ``(rows, programs, dv)``.

    Also writes, ``(programs, rows)`` each, the maximum of a row to ROW_PEAKS, +inf for rows without mass, and the log
    of its sum relative to the maximum to ROW_LOGS. Queries are the slots from ``early`` on; blocks are numbered from
    ``skip`` on. Grid: sentence and head, block.
    """
    g, at_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, head = g // heads, g % heads
    t = tl.arange(0, R)
    start, first, last = keys_met(at_block + skip, n, BEYOND, CAUSAL, C)
    i = start + tl.arange(0, C)
    is_query = (i >= early) & (i < n)
    q = load_rows(Q + b * sqb + head * sqh, i - early, sqn, d, is_query, D)
    z = load_rows(Z + head * r * d, t, d, d, t < r, D)
    probes, constants = load_probes(z, MEANS, CONSTANTS, g, r, d, TANGENTS, R, D)
    a = query_logs(q, probes, constants, load_bias(BIAS, head, r, R), scale, TANGENTS, PRECISION)
    slope = load_slope(SLOPES, head, HAS_SLOPES)
    peak = tl.full([C], NEG_INF, tl.float32)
    mass = tl.zeros([C], tl.float32)
    values = tl.zeros([C, DV], tl.float32)
    if BEYOND:
        for side in range(sides):
            tops, masses, sums = load_beyond(
                TOPS, MASSES, SUMS, g, at_block, side, sides, tl.num_programs(1), dv, R, DV
            )
            x = a + tops[None, :]
            if HAS_SLOPES:
                x -= fall_to_edge(i, start, start + C, slope, side)[:, None]
            new = tl.maximum(peak, tl.max(x, 1))
            safe = finite(new)
            weights = tl.exp2(x - safe[:, None])
            fade = tl.exp2(peak - safe)
            mass = mass * fade + tl.sum(weights * masses[None, :], 1)
            values = values * fade[:, None] + product(weights, sums, tl.float32, PRECISION)
            peak = new
    for at in range(first, last, T):
        j = at + tl.arange(0, T)
        real = is_key(PADS + b * spb, j, n, HAS_PADS)
        k = load_rows(K + b * skb + head * skh, j, skn, d, real, D)
        distance = i[:, None] - j[None, :]
        near, far = near_and_far(distance, real[None, :], window, CAUSAL)
        # weights by the features: ``part`` times 2^reference
        key_logs = tl.where(real[:, None], feature_logs(k, z, scale, not TANGENTS, PRECISION), NEG_INF)
        top = finite(tl.max(key_logs, 0))
        reference = tl.max(a + top[None, :], 1)
        psi = tl.exp2(key_logs - top[None, :] + ROOM)
        phi = tl.exp2(a + top[None, :] - reference[:, None] + ROOM)
        part = tl.where(far, product(phi, tl.trans(psi), tl.float32, PRECISION), 0.0)
        reference -= 2 * ROOM
        scores = product(q, tl.trans(k), Q.dtype.element_ty, PRECISION) * scale
        if HAS_SLOPES:
            fall = slope * tl.abs(distance).to(tl.float32)
            part *= tl.exp2(-fall)
            scores -= fall
        scores = tl.where(near, scores, NEG_INF)
        largest = tl.max(part, 1)
        far_peak = tl.where(largest > 0.0, tl.log2(tl.where(largest > 0.0, largest, 1.0)) + reference, NEG_INF)
        new = tl.maximum(peak, tl.maximum(tl.max(scores, 1), far_peak))
        safe = finite(new)
        weights = tl.exp2(scores - safe[:, None]) + part * tl.exp2(tl.minimum(reference - safe, 126.0))[:, None]
        fade = tl.exp2(peak - safe)
        mass = mass * fade + tl.sum(weights, 1)
        v = load_rows(V + b * svb + head * svh, j, svn, dv, real, DV)
        values = values * fade[:, None] + product(weights, v, V.dtype.element_ty, PRECISION)
        peak = new
    some = mass > 0.0
    mass = tl.where(some, mass, 1.0)
    row = g * (n - early) + i - early
    tl.store(ROW_PEAKS + row, tl.where(some, peak, INF), mask=is_query)
    tl.store(ROW_LOGS + row, tl.log2(mass), mask=is_query)
    width = tl.num_programs(0) * dv  # time first, as the output projection reads it
    store_rows(OUT + g * dv, i - early, width, dv, is_query, values / mass[:, None], DV)
