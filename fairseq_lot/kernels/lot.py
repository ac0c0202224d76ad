"""LOT attention in two launches forward and two backward; no n x r matrix is written.

Each side, keys and queries, solves for a plan between its tokens and the r pivots by alternating half-updates, as in
``tiles.py``. A program handles one sentence and head: it streams blocks of tokens and keeps the pivots on chip.

    key side     T half-updates, the last one of the pivots: ``ceil(T/2)`` passes over the keys. The last pass also
                 computes the values at the pivots, ``a_t = sum_j softmax_j(s_jt + f_j) v_j``.
    query side   T half-updates, the last one of the queries: ``floor(T/2)`` passes over the queries. Another pass
                 writes the values, ``out_i = sum_t softmax_t(s_it + h_t) a_t``.

The gradient needs the inputs, the reaches of all passes and the values at the pivots.

If there are too few programs to fill the GPU, the tokens of a sentence are split among ``parts`` programs, and each
pass is a launch: :func:`pass_of_both` runs one pass of each side, as the sides are independent up to the values. The
program that finishes last merges the results of all parts.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fairseq_lot.kernels.blocks import Blocks, tuned
from fairseq_lot.kernels.launch import (
    RUNTIME,
    Numbers,
    Side,
    Tensors,
    backward_passes,
    dot_precision,
    lot_parts,
    padded,
    start,
)
from fairseq_lot.kernels.naive import LotInputs, LotSettings
from fairseq_lot.kernels.tiles import (
    NEG_INF,
    PARTS,
    add_tokens,
    finish_gradient,
    finish_reach,
    load_reach,
    pivot_potential,
    place,
    potential_before,
    store_reach,
    token_potential,
    token_shares,
    undo_pass,
    undo_tokens,
)
from fairseq_lot.numerics.autograd import once_in_full_precision

BLOCK, WARPS, STAGES = 16, 4, 3  # BLOCK: tokens in a block; with 32 the kernels spill registers


@triton.jit
def _rows(X, i, stride, e, width, real):
    return tl.load(
        X + i[:, None].to(tl.int64) * stride + e[None, :], mask=real[:, None] & (e < width)[None, :], other=0.0
    )


@triton.jit
def _scores(x, z, scale, PRECISION: tl.constexpr):
    if (x.dtype != z.dtype) | (PRECISION == "ieee"):  # the interpreter has no products of bfloat16
        x = x.to(tl.float32)
        z = z.to(tl.float32)
    return tl.dot(x, tl.trans(z), input_precision=PRECISION) * scale


@triton.jit
def _block(X, PADS, c, end, z, stride, d, scale, HAS_PADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
           PRECISION: tl.constexpr):  # fmt: skip
    """Load a block of tokens, from c on.

    Returns:
        their slots; log masses, 0 or -inf (pad); vectors, ``(BLOCK, D)``; scores with the pivots, ``(BLOCK, R)``.
    """
    i = c + tl.arange(0, BLOCK)
    real = i < end
    if HAS_PADS:
        real = real & (tl.load(PADS + i, mask=real, other=1) == 0)
    x = _rows(X, i, stride, tl.arange(0, D), d, real)
    return i, tl.where(real, 0.0, NEG_INF), x, _scores(x, z, scale, PRECISION)


@triton.jit
def _store(X, i, count, e, width, values):
    """Store the rows i < count of values in X."""
    at = i[:, None].to(tl.int64) * width + e[None, :]
    tl.store(X + at, values.to(X.dtype.element_ty), mask=(i < count)[:, None] & (e < width)[None, :])


@triton.jit
def _kept(seed, dropout, g, n, i, t, R: tl.constexpr):
    """Dropout of the query side's weights: factors 1/(1 - dropout) or 0, the same ones forward and backward."""
    place = ((g * n + i) * R)[:, None] + t[None, :]
    return tl.where(tl.rand(seed, place.to(tl.int32)) >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def _pass(X, z, PADS, h, stride, d, scale, updated, start, end, HAS_PADS: tl.constexpr, R: tl.constexpr,
          BLOCK: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One pass over the tokens from ``start`` to ``end``: the maximum and sum of exponentials of each pivot."""
    top = tl.full([R], NEG_INF, tl.float32)
    total = tl.zeros([R], tl.float32)
    for c in range(start, end, BLOCK):
        _, log_mass, _, s = _block(X, PADS, c, end, z, stride, d, scale, HAS_PADS, BLOCK, D, PRECISION)
        f, _ = token_potential(s, h, log_mass, updated)
        top, total, _, _ = add_tokens(top, total, s + f[:, None])
    return top, total


@triton.jit
def _passes(X, z, log_masses, PADS, reaches, stride, d, scale, passes, start, end,
            TOKENS_FIRST: tl.constexpr, HAS_PADS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
            D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Run the passes 0 to ``passes - 1`` over a whole sentence; store their reaches, ``(passes, 2, R)``."""
    t = tl.arange(0, R)
    for number in range(0, passes):
        h = potential_before(reaches, log_masses, number, t, R)
        updated = tl.where((number > 0) | TOKENS_FIRST, 1.0, 0.0)
        top, total = _pass(X, z, PADS, h, stride, d, scale, updated, start, end, HAS_PADS, R, BLOCK, D, PRECISION)
        store_reach(reaches + number * 2 * R, t, top, total, R)
        tl.debug_barrier()  # other threads of this program read the reach in the next pass


@triton.jit
def _pass_of_part(X, Z, MASSES, PADS, reaches, of_parts, ARRIVED, part, parts, length, n, r, d, sxb, sxh, sxn, spb,
                  b, head, scale, number, TOKENS_FIRST: tl.constexpr, HAS_PADS: tl.constexpr, R: tl.constexpr,
                  D: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Run pass ``number`` over one part of a side's tokens; the last part to arrive stores the reach."""
    t, e = tl.arange(0, R), tl.arange(0, D)
    start, end = part * length, tl.minimum(part * length + length, n)
    X += b * sxb + head * sxh
    z = _rows(Z + head * r * d, t, d, e, d, t < r)
    log_masses = tl.load(MASSES + head * r + t, mask=t < r, other=NEG_INF)
    h = potential_before(reaches, log_masses, number, t, R)
    updated = tl.where((number > 0) | TOKENS_FIRST, 1.0, 0.0)
    top, total = _pass(X, z, PADS + b * spb, h, sxn, d, scale, updated, start, end, HAS_PADS, R, BLOCK, D, PRECISION)
    finish_reach(reaches + number * 2 * R, of_parts, ARRIVED, t, top, total, part, parts, True, R)


@triton.jit(do_not_specialize=RUNTIME)
def pass_of_both(Q, K, Z, MASSES, QUERY_PADS, KEY_PADS, QUERY_REACHES, KEY_REACHES, QUERY_PARTS, KEY_PARTS, ARRIVED,
                 n, m, r, d, sqb, sqh, sqn, skb, skh, skn, sab, sbb, heads, scale, number,
                 query_passes, query_length, query_parts, key_passes, key_length, key_parts,
                 QUERIES_FIRST: tl.constexpr, KEYS_FIRST: tl.constexpr, HAS_QUERY_PADS: tl.constexpr,
                 HAS_KEY_PADS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Run pass ``number`` of both sides, with the tokens split.

    Writes the reaches, ``(programs, passes, 2, R)`` for each side. The keys' last pass is left to :func:`key_forward`.
    Grid: sentence and head, part, side (0 keys, 1 queries); a program returns if its side has no such part or pass.
    """
    g = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    b, head = g // heads, g % heads
    if tl.program_id(2) == 0:
        if (part < key_parts) & (number < key_passes - 1):  # the last one computes the values, in key_forward
            _pass_of_part(K, Z, MASSES, KEY_PADS, KEY_REACHES + g * key_passes * 2 * R,
                          KEY_PARTS + g * key_parts * 2 * R, ARRIVED + g, part, key_parts, key_length, m, r, d,
                          skb, skh, skn, sbb, b, head, scale, number, KEYS_FIRST, HAS_KEY_PADS, R, D, PRECISION,
                          BLOCK)  # fmt: skip
    else:
        if (part < query_parts) & (number < query_passes):
            _pass_of_part(Q, Z, MASSES, QUERY_PADS, QUERY_REACHES + g * query_passes * 2 * R,
                          QUERY_PARTS + g * query_parts * 2 * R, ARRIVED + tl.num_programs(0) + g, part, query_parts,
                          query_length, n, r, d, sqb, sqh, sqn, sab, b, head, scale, number, QUERIES_FIRST,
                          HAS_QUERY_PADS, R, D, PRECISION, BLOCK)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def key_forward(K, V, Z, MASSES, PADS, REACHES, OF_PARTS, A, n, r, d, dv, skb, skh, skn, svb, svh, svn, spb, heads,
                scale, passes, length, parts,
                TOKENS_FIRST: tl.constexpr, SPLIT: tl.constexpr, HAS_PADS: tl.constexpr, R: tl.constexpr,
                D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """All passes of the key side; write the reaches and the values at the pivots, A ``(programs, r, dv)``.

    With SPLIT only the last pass: a program writes its part's maxima and sums to OF_PARTS, ``(programs, parts, 2, R)``,
    and its sums of values, not divided yet, to A, ``(programs, parts, r, dv)``. Grid: sentence and head, part.
    """
    g, b, head, part, start, end = place(heads, length, n)
    t, e, ev = tl.arange(0, R), tl.arange(0, D), tl.arange(0, DV)
    K += b * skb + head * skh
    V += b * svb + head * svh
    PADS += b * spb
    reaches = REACHES + g * passes * 2 * R
    z = _rows(Z + head * r * d, t, d, e, d, t < r)
    log_masses = tl.load(MASSES + head * r + t, mask=t < r, other=NEG_INF)
    if not SPLIT:
        _passes(K, z, log_masses, PADS, reaches, skn, d, scale, passes - 1, start, end,
                TOKENS_FIRST, HAS_PADS, R, BLOCK, D, PRECISION)  # fmt: skip
    h = potential_before(reaches, log_masses, passes - 1, t, R)
    updated = tl.where((passes > 1) | TOKENS_FIRST, 1.0, 0.0)
    top = tl.full([R], NEG_INF, tl.float32)
    total = tl.zeros([R], tl.float32)
    values = tl.zeros([R, DV], tl.float32)
    for c in range(start, end, BLOCK):
        j, log_mass, _, s = _block(K, PADS, c, end, z, skn, d, scale, HAS_PADS, BLOCK, D, PRECISION)
        real = log_mass == 0.0
        f, _ = token_potential(s, h, log_mass, updated)
        top, total, fade, terms = add_tokens(top, total, s + f[:, None])
        v = _rows(V, j, svn, ev, dv, real).to(tl.float32)
        values = tl.dot(tl.trans(terms), v, values * fade[:, None], input_precision=PRECISION)
    if SPLIT:
        of_parts = OF_PARTS + (g * parts + part) * 2 * R
        tl.store(of_parts + t, top)
        tl.store(of_parts + R + t, total)
    else:
        store_reach(reaches + (passes - 1) * 2 * R, t, top, total, R)
        values = values / tl.where(total == 0.0, 1.0, total)[:, None]
    _store(A + (g * parts + part) * r * dv, t, r, ev, dv, values)


@triton.jit(do_not_specialize=RUNTIME)
def merge_values(OF_PARTS, A_OF_PARTS, REACHES, A, r, dv, passes, parts,
                 R: tl.constexpr, DV: tl.constexpr):  # fmt: skip
    """Merge all parts' results of :func:`key_forward` for one pivot; write its values to A, its reach to REACHES.

    Grid: sentence and head, pivot.
    """
    g, t = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ev = tl.arange(0, DV)
    top, total = tl.full([1], NEG_INF, tl.float32), tl.zeros([1], tl.float32)
    values = tl.zeros([DV], tl.float32)
    for c in range(0, parts, PARTS):
        p = c + tl.arange(0, PARTS)
        at = OF_PARTS + (g * parts + p) * 2 * R + t
        tops = tl.load(at, mask=p < parts, other=NEG_INF)
        new = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(new == NEG_INF, 0.0, new)
        fade, shares = tl.exp(top - safe), tl.exp(tops - safe)
        total = total * fade + tl.sum(shares * tl.load(at + R, mask=p < parts, other=0.0), 0)
        sums = _rows(A_OF_PARTS + (g * parts * r + t) * dv, p, r * dv, ev, dv, (p < parts) & (t < r))
        values = values * fade + tl.sum(sums * shares[:, None], 0)
        top = new
    store_reach(REACHES + (g * passes + passes - 1) * 2 * R, t + tl.arange(0, 1), top, total, R)
    tl.store(A + (g * r + t) * dv + ev, values / tl.where(total == 0.0, 1.0, total), mask=(ev < dv) & (t < r))


@triton.jit(do_not_specialize=RUNTIME)
def query_forward(Q, Z, MASSES, PADS, REACHES, A, OUT, n, r, d, dv, sqb, sqh, sqn, spb, heads, scale, dropout, seed,
                  passes, length, parts,
                  TOKENS_FIRST: tl.constexpr, SPLIT: tl.constexpr, DROPS: tl.constexpr, HAS_PADS: tl.constexpr,
                  R: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """All passes of the query side; write the reaches and the values, OUT ``(programs, n, dv)``.

    With SPLIT only the values of a part. Grid: sentence and head, part.
    """
    g, b, head, part, start, end = place(heads, length, n)
    t, e, ev = tl.arange(0, R), tl.arange(0, D), tl.arange(0, DV)
    Q += b * sqb + head * sqh
    PADS += b * spb
    reaches = REACHES + g * passes * 2 * R
    z = _rows(Z + head * r * d, t, d, e, d, t < r)
    log_masses = tl.load(MASSES + head * r + t, mask=t < r, other=NEG_INF)
    if not SPLIT:
        _passes(Q, z, log_masses, PADS, reaches, sqn, d, scale, passes, start, end,
                TOKENS_FIRST, HAS_PADS, R, BLOCK, D, PRECISION)  # fmt: skip
    h = potential_before(reaches, log_masses, passes, t, R)
    a = _rows(A + g * r * dv, t, dv, ev, dv, t < r)
    for c in range(start, end, BLOCK):
        i, log_mass, _, s = _block(Q, PADS, c, end, z, sqn, d, scale, HAS_PADS, BLOCK, D, PRECISION)
        real = log_mass == 0.0
        _, w = token_potential(s, h, log_mass, 1.0)
        w = tl.where(real[:, None], w, 0.0)
        if DROPS:
            w = w * _kept(seed, dropout, g, n, i, t, R)
        _store(OUT + g * n * dv, i, end, ev, dv, tl.dot(w, a, input_precision=PRECISION))


@triton.jit
def _levels(X, z, log_masses, PADS, REACHES, GRAD_H, of_parts, ARRIVED, stride, d, scale, passes, high, levels,
            start, end, g, all_programs, part, parts,
            TOKENS_FIRST: tl.constexpr, SPLIT: tl.constexpr, HAS_PADS: tl.constexpr, R: tl.constexpr,
            BLOCK: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Go back through passes u from ``high`` down; store the gradient of h before each, ``GRAD_H[u - 1]``."""
    t = tl.arange(0, R)
    for back in range(0, levels):
        u = high - back
        grad = tl.zeros([R], tl.float32)
        for c in range(start, end, BLOCK):
            i, log_mass, _, s = _block(X, PADS, c, end, z, stride, d, scale, HAS_PADS, BLOCK, D, PRECISION)
            _, of_tokens, _ = undo_pass(s, REACHES, GRAD_H, log_masses, log_mass, u, g, passes, all_programs, t,
                                        TOKENS_FIRST, R)  # fmt: skip
            grad -= tl.sum(of_tokens, 0)
        to = GRAD_H + ((u - 1) * all_programs + g) * R
        finish_gradient(to, of_parts, ARRIVED, t, grad, part, parts, SPLIT, R)


@triton.jit
def _of_last_tokens(s, do, a, h, log_mass, kept, PRECISION: tl.constexpr):
    """Gradient of the query side's last half-update for a block of queries.

    Returns:
        the weights ``softmax_t(s_it + h_t)``, 0 at pads; the gradient of the scores through them.
    """
    _, w = token_potential(s, h, log_mass, 1.0)
    w = tl.where((log_mass == 0.0)[:, None], w, 0.0)
    grad = w * kept * tl.dot(do, tl.trans(a), input_precision=PRECISION)
    return w, grad - w * tl.sum(grad, 1)[:, None]


@triton.jit(do_not_specialize=RUNTIME)
def query_backward(Q, Z, MASSES, PADS, REACHES, A, GRAD_O, GRAD_Q, GRAD_A, GRAD_Z, GRAD_H, OF_PARTS, ARRIVED,
                   n, r, d, dv, sqb, sqh, sqn, spb, heads, scale, dropout, seed,
                   passes, top, high, levels, length, parts,
                   TOKENS_FIRST: tl.constexpr, BEGIN: tl.constexpr, FINISH: tl.constexpr, SPLIT: tl.constexpr,
                   DROPS: tl.constexpr, HAS_PADS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                   PRECISION: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Gradients of the query side, in three steps. Grid: sentence and head, part.

    BEGIN goes back through the last softmax; it writes GRAD_A, ``(parts, programs, r, dv)``, and the gradient of the
    last h. Then `levels` passes from `high` down write GRAD_H, ``(passes, programs, R)``. FINISH writes GRAD_Q and this
    part's gradient of the pivots, GRAD_Z, ``(parts, programs, r, d)``. Without SPLIT one launch does all steps, with
    SPLIT each pass is a launch.
    """
    g, b, head, part, start, end = place(heads, length, n)
    all_programs = tl.num_programs(0)
    t, e, ev = tl.arange(0, R), tl.arange(0, D), tl.arange(0, DV)
    Q += b * sqb + head * sqh
    PADS += b * spb
    of_parts = OF_PARTS + g * parts * R
    z = _rows(Z + head * r * d, t, d, e, d, t < r)
    log_masses = tl.load(MASSES + head * r + t, mask=t < r, other=NEG_INF)
    a = _rows(A + g * r * dv, t, dv, ev, dv, t < r)
    before, log_before = load_reach(REACHES + (g * passes + top) * 2 * R, t, top >= 0, R)
    h = pivot_potential(log_masses, before, log_before, top)
    if BEGIN:
        grad_a = tl.zeros([R, DV], tl.float32)
        grad_h = tl.zeros([R], tl.float32)
        for c in range(start, end, BLOCK):
            i, log_mass, _, s = _block(Q, PADS, c, end, z, sqn, d, scale, HAS_PADS, BLOCK, D, PRECISION)
            do = _rows(GRAD_O + g * n * dv, i, dv, ev, dv, log_mass == 0.0).to(tl.float32)
            kept = tl.full([BLOCK, R], 1.0, tl.float32)
            if DROPS:
                kept = _kept(seed, dropout, g, n, i, t, R)
            w, grad = _of_last_tokens(s, do, a, h, log_mass, kept, PRECISION)
            grad_a = tl.dot(tl.trans(w * kept), do, grad_a, input_precision=PRECISION)
            grad_h += tl.sum(grad, 0)
        _store(GRAD_A + (part * all_programs + g) * r * dv, t, r, ev, dv, grad_a)
        if top >= 0:
            to = GRAD_H + (top * all_programs + g) * R
            finish_gradient(to, of_parts, ARRIVED + all_programs + g, t, grad_h, part, parts, SPLIT, R)
    _levels(Q, z, log_masses, PADS, REACHES, GRAD_H, of_parts, ARRIVED + all_programs + g, sqn, d, scale, passes,
            high, levels, start, end, g, all_programs, part, parts, TOKENS_FIRST, SPLIT, HAS_PADS, R, BLOCK, D,
            PRECISION)  # fmt: skip
    if FINISH:
        grad_z = tl.zeros([R, D], tl.float32)
        for c in range(start, end, BLOCK):
            i, log_mass, x, s = _block(Q, PADS, c, end, z, sqn, d, scale, HAS_PADS, BLOCK, D, PRECISION)
            do = _rows(GRAD_O + g * n * dv, i, dv, ev, dv, log_mass == 0.0).to(tl.float32)
            kept = tl.full([BLOCK, R], 1.0, tl.float32)
            if DROPS:
                kept = _kept(seed, dropout, g, n, i, t, R)
            w, grad = _of_last_tokens(s, do, a, h, log_mass, kept, PRECISION)
            for back in range(0, top + 1):
                taken, _, _ = undo_pass(s, REACHES, GRAD_H, log_masses, log_mass, top - back, g, passes, all_programs,
                                        t, TOKENS_FIRST, R)  # fmt: skip
                grad -= taken
            grad = grad * scale
            _store(GRAD_Q + g * n * d, i, end, e, d, tl.dot(grad, z.to(tl.float32), input_precision=PRECISION))
            grad_z = tl.dot(tl.trans(grad), x.to(tl.float32), grad_z, input_precision=PRECISION)
        _store(GRAD_Z + (part * all_programs + g) * r * d, t, r, e, d, grad_z)


@triton.jit
def _of_last_pivots(s, v, da, delta, h, log_mass, peak, log_total, updated, PRECISION: tl.constexpr):
    """Gradient of the key side's last pass for a block of keys.

    Returns:
        the weights ``softmax_j(s_jt + f_j)``; the gradient of the scores through them with f fixed; the part through
        f, to be subtracted, as from :func:`~fairseq_lot.kernels.tiles.undo_tokens`.
    """
    f, shares = token_potential(s, h, log_mass, updated)
    share = token_shares(s, f, peak, log_total)
    grad = share * (tl.dot(v, tl.trans(da), input_precision=PRECISION) - delta[None, :])
    return share, grad, undo_tokens(shares, tl.sum(grad, 1) * updated)


@triton.jit(do_not_specialize=RUNTIME)
def key_backward(K, V, Z, MASSES, PADS, REACHES, A, GRAD_A, GRAD_K, GRAD_V, GRAD_Z, GRAD_H, OF_PARTS,
                 ARRIVED,
                 n, r, d, dv, skb, skh, skn, svb, svh, svn, spb, heads, scale,
                 passes, top, high, levels, length, parts,
                 TOKENS_FIRST: tl.constexpr, BEGIN: tl.constexpr, FINISH: tl.constexpr, SPLIT: tl.constexpr,
                 HAS_PADS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Gradients of the key side from GRAD_A, ``(programs, r, dv)``, in the steps of ``query_backward``.

    BEGIN goes back through the tokens' half-update in the last pass. FINISH writes GRAD_K, GRAD_V and GRAD_Z. Grid:
    sentence and head, part.
    """
    g, b, head, part, start, end = place(heads, length, n)
    all_programs = tl.num_programs(0)
    t, e, ev = tl.arange(0, R), tl.arange(0, D), tl.arange(0, DV)
    K += b * skb + head * skh
    V += b * svb + head * svh
    PADS += b * spb
    of_parts = OF_PARTS + g * parts * R
    z = _rows(Z + head * r * d, t, d, e, d, t < r)
    log_masses = tl.load(MASSES + head * r + t, mask=t < r, other=NEG_INF)
    da = _rows(GRAD_A + g * r * dv, t, dv, ev, dv, t < r)
    delta = tl.sum(da * _rows(A + g * r * dv, t, dv, ev, dv, t < r), 1)
    peak, log_total = load_reach(REACHES + (g * passes + passes - 1) * 2 * R, t, True, R)
    before, log_before = load_reach(REACHES + (g * passes + top) * 2 * R, t, top >= 0, R)
    h = pivot_potential(log_masses, before, log_before, top)
    updated = tl.where((top >= 0) | TOKENS_FIRST, 1.0, 0.0)
    if BEGIN:
        grad_h = tl.zeros([R], tl.float32)
        for c in range(start, end, BLOCK):
            j, log_mass, _, s = _block(K, PADS, c, end, z, skn, d, scale, HAS_PADS, BLOCK, D, PRECISION)
            v = _rows(V, j, svn, ev, dv, log_mass == 0.0).to(tl.float32)
            _, _, of_tokens = _of_last_pivots(s, v, da, delta, h, log_mass, peak, log_total, updated, PRECISION)
            grad_h -= tl.sum(of_tokens, 0)
        to = GRAD_H + (top * all_programs + g) * R
        finish_gradient(to, of_parts, ARRIVED + g, t, grad_h, part, parts, SPLIT, R)
    _levels(K, z, log_masses, PADS, REACHES, GRAD_H, of_parts, ARRIVED + g, skn, d, scale, passes, high, levels,
            start, end, g, all_programs, part, parts, TOKENS_FIRST, SPLIT, HAS_PADS, R, BLOCK, D,
            PRECISION)  # fmt: skip
    if FINISH:
        grad_z = tl.zeros([R, D], tl.float32)
        for c in range(start, end, BLOCK):
            j, log_mass, x, s = _block(K, PADS, c, end, z, skn, d, scale, HAS_PADS, BLOCK, D, PRECISION)
            v = _rows(V, j, svn, ev, dv, log_mass == 0.0).to(tl.float32)
            share, grad, of_tokens = _of_last_pivots(s, v, da, delta, h, log_mass, peak, log_total, updated, PRECISION)
            _store(GRAD_V + g * n * dv, j, end, ev, dv, tl.dot(share, da, input_precision=PRECISION))
            grad -= of_tokens
            for back in range(0, top + 1):
                taken, _, _ = undo_pass(s, REACHES, GRAD_H, log_masses, log_mass, top - back, g, passes, all_programs,
                                        t, TOKENS_FIRST, R)  # fmt: skip
                grad -= taken
            grad = grad * scale
            _store(GRAD_K + g * n * d, j, end, e, d, tl.dot(grad, z.to(tl.float32), input_precision=PRECISION))
            grad_z = tl.dot(tl.trans(grad), x.to(tl.float32), grad_z, input_precision=PRECISION)
        _store(GRAD_Z + (part * all_programs + g) * r * d, t, r, e, d, grad_z)


class _Split(NamedTuple):
    """Number of parts of a sentence, and of tokens in a part, for the query side and the key side."""

    query_parts: int
    query_length: int
    key_parts: int
    key_length: int

    @property
    def parts(self) -> int:
        """Number of parts of the side that has more."""
        return max(self.query_parts, self.key_parts)


def split(programs: int, n: int, m: int, device: torch.device) -> _Split:
    """How n queries and m keys are split; ``programs`` is the number of sentences times heads."""
    return _Split(*lot_parts(programs, n, device), *lot_parts(programs, m, device))


class _Lot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, pivots, log_masses, query_padding_mask, key_padding_mask, settings):
        scale, query_updates, key_updates, dropout = settings
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        # without pads any tensor is passed in their place; it is not read
        query_pads = q if query_padding_mask is None else query_padding_mask.contiguous().view(torch.uint8)
        key_pads = k if key_padding_mask is None else key_padding_mask.contiguous().view(torch.uint8)
        bsz, heads, n, d = q.shape
        m, dv, r = k.size(2), v.size(3), pivots.size(1)
        programs, R, device = bsz * heads, padded(r), q.device
        # drawn on the CPU, which then need not wait for the GPU
        seed = int(torch.randint(2**31 - 1, (), device="cpu")) if dropout else 0
        pivots, log_masses = pivots.contiguous(), log_masses.float().contiguous()
        widths = R, padded(d), padded(dv)
        sizes, blocks = (8 * q.element_size(), *widths), Blocks(BLOCK, WARPS, STAGES)
        key_side = Side(
            numbers=(m, r, d, dv, *k.stride()[:3], *v.stride()[:3], key_pads.stride(0), heads, scale),
            tokens_first=key_updates % 2 == 0,
            constants=(key_padding_mask is not None, *widths, dot_precision(q)),
            sizes=sizes,
            blocks=blocks,
        )
        query_side = Side(
            numbers=(n, r, d, dv, *q.stride()[:3], query_pads.stride(0), heads, scale, float(dropout), seed),
            tokens_first=query_updates % 2 == 1,
            constants=(dropout > 0, query_padding_mask is not None, *widths, dot_precision(q)),
            sizes=sizes,
            blocks=blocks,
        )
        key_passes, query_passes, parts = (key_updates + 1) // 2, query_updates // 2, split(programs, n, m, device)

        def empty(*shape):
            return torch.empty(shape, dtype=torch.float32, device=device)

        key_reaches, query_reaches = empty(programs, key_passes, 2, R), empty(programs, query_passes, 2, R)
        at_pivots = empty(programs, r, dv)
        # without parts any tensor is passed in place of their results; it is not read
        key_parts, arrived, sums = key_reaches, key_reaches, at_pivots
        if parts.parts > 1:
            key_parts, query_parts = (empty(programs, count, 2, R) for count in (parts.key_parts, parts.query_parts))
            arrived = torch.zeros(2, programs, dtype=torch.int32, device=device)
            sums = empty(programs, parts.key_parts, r, dv)
            held = q, k, pivots, log_masses, query_pads, key_pads
            room = query_reaches, key_reaches, query_parts, key_parts, arrived
            _passes_of_both((*held, *room), programs, parts, query_side, key_side)
        tensors: Tensors = (k, v, pivots, log_masses, key_pads, key_reaches, key_parts, sums)
        _forward(key_forward, programs, parts, (key_passes, parts.key_length, parts.key_parts), tensors, key_side)
        if parts.parts > 1:
            tensors = key_parts, sums, key_reaches, at_pivots
            start(merge_values, (programs, R), tensors, (r, dv, key_passes, parts.key_parts), (R, padded(dv)), 4, 1)
        values = torch.empty(bsz, heads, n, dv, dtype=v.dtype, device=device)
        tensors = q, pivots, log_masses, query_pads, query_reaches, at_pivots, values
        of_queries = query_passes, parts.query_length, parts.query_parts
        _forward(query_forward, programs, parts, of_queries, tensors, query_side)
        kept = [q, k, v, pivots, log_masses, query_pads, key_pads]
        ctx.save_for_backward(*kept, key_reaches, query_reaches, at_pivots, arrived)
        ctx.sides, ctx.parts = (query_side, key_side), parts
        return values

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_values):
        q, k, v, pivots, log_masses, query_pads, key_pads, key_reaches, query_reaches, at_pivots, arrived = (
            ctx.saved_tensors
        )
        (query_side, key_side), parts = ctx.sides, ctx.parts
        bsz, heads, n, d = q.shape
        dv, r, R = v.size(3), pivots.size(1), padded(pivots.size(1))
        programs, empty = bsz * heads, {"dtype": torch.float32, "device": q.device}
        query_passes, key_passes = query_reaches.size(1), key_reaches.size(1)
        # each program writes its own part of the pivots' gradients; torch adds them up at the end
        grad_h = torch.empty(query_passes + key_passes - 1, programs, R, **empty)
        grad_z = torch.empty(parts.query_parts + parts.key_parts, programs, r, d, **empty)
        grad_a = torch.empty(parts.query_parts, programs, r, dv, **empty)
        of_parts = torch.empty(programs, parts.parts, R, **empty) if parts.parts > 1 else grad_h
        grad_q, grad_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        tensors: Tensors = (
            q,
            pivots,
            log_masses,
            query_pads,
            query_reaches,
            at_pivots,
            grad_values.contiguous(),
            grad_q,
        )
        tensors += grad_a, grad_z, grad_h[:query_passes], of_parts, arrived
        split = programs, parts.query_parts, parts.query_length
        backward_passes(query_backward, split, query_passes, query_passes - 1, True, tensors, query_side)
        grad_a = grad_a.sum(0) if parts.query_parts > 1 else grad_a
        tensors = k, v, pivots, log_masses, key_pads, key_reaches, at_pivots, grad_a, grad_k, grad_v
        tensors += grad_z[parts.query_parts :], grad_h[query_passes:], of_parts, arrived
        split = programs, parts.key_parts, parts.key_length
        backward_passes(key_backward, split, key_passes, key_passes - 2, key_passes > 1, tensors, key_side)
        of_pivots = grad_z.view(-1, heads, r, d).sum(0).to(pivots.dtype)
        of_masses = grad_h[..., :r].reshape(-1, heads, r).sum(0)
        return grad_q, grad_k, grad_v, of_pivots, of_masses, None, None, None


def _passes_of_both(tensors, programs, parts, query_side, key_side):
    """Launch :func:`pass_of_both` once per pass; ``tensors`` are its tensors."""
    q, k, pivots, _, query_pads, key_pads, query_reaches, key_reaches, *_ = tensors
    (n, d), m, (heads, r, _), passes = (
        q.shape[2:],
        k.size(2),
        pivots.shape,
        (query_reaches.size(1), key_reaches.size(1)),
    )
    strides = *q.stride()[:3], *k.stride()[:3], query_pads.stride(0), key_pads.stride(0)
    numbers = n, m, r, d, *strides, heads, key_side.numbers[-1]
    of_parts = passes[0], parts.query_length, parts.query_parts, passes[1], parts.key_length, parts.key_parts
    block, warps, stages = tuned(pass_of_both.__name__, q.device, key_side.sizes, key_side.blocks)
    (_, query_has_pads, *_), (key_has_pads, R, D, _, precision) = query_side.constants, key_side.constants
    firsts = query_side.tokens_first, key_side.tokens_first
    constants = *firsts, query_has_pads, key_has_pads, R, D, precision, block
    for number in range(max(passes[0], passes[1] - 1)):
        every = *numbers, number, *of_parts
        start(pass_of_both, (programs, parts.parts, 2), tensors, every, constants, warps, stages)


def _forward(kernel: Any, programs: int, parts: _Split, numbers: Numbers, tensors: Tensors, side: Side) -> None:
    """Launch ``kernel``, :func:`key_forward` or :func:`query_forward`, with the arguments of its side."""
    block, warps, stages = tuned(kernel.__name__, tensors[0].device, side.sizes, side.blocks)
    constants = side.tokens_first, parts.parts > 1, *side.constants, block
    start(kernel, (programs, int(numbers[-1])), tensors, (*side.numbers, *numbers), constants, warps, stages)


def lot(inputs: LotInputs, settings: LotSettings) -> torch.Tensor:
    """Values of LOT attention, ``(bsz, num_heads, n, value_dim)``, zero at padded queries."""
    return _Lot.apply(*inputs, settings)
