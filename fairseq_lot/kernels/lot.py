"""All of LOT attention in two launches forward and two backward; no n x r matrix is written.

One program per sentence and head streams blocks of tokens, the r pivots stay on chip. Kept for the gradient: the reach
of the pivots in every pass, and the values at the pivots. Where sentences are long and programs few, the tokens are
split among ``parts`` programs, and each pass becomes a launch; the next one merges what the parts found.

The key side ends with an update of the pivots: T updates are ``ceil(T/2)`` passes, the last of which also reduces the
values. The query side ends with one of the tokens: ``floor(T/2)`` passes, and one that writes the values.
"""

import torch
import triton
import triton.language as tl

from fairseq_lot.kernels.blocks import Blocks
from fairseq_lot.kernels.launch import (
    RUNTIME,
    Side,
    backward_passes,
    dot_precision,
    forward_passes,
    merged,
    num_parts,
    padded,
)
from fairseq_lot.kernels.naive import LotInputs, LotSettings
from fairseq_lot.kernels.tiles import (
    NEG_INF,
    add_tokens,
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

BLOCK, WARPS, STAGES = 16, 4, 3  # tokens in a block: with 32 the kernels spill registers


@triton.jit
def _rows(X, i, stride, e, width, real):
    return tl.load(
        X + i[:, None].to(tl.int64) * stride + e[None, :], mask=real[:, None] & (e < width)[None, :], other=0.0
    )


@triton.jit
def _scores(x, z, scale, PRECISION: tl.constexpr):
    if (x.dtype != z.dtype) | (PRECISION == "ieee"):  # the interpreter's products know no bfloat16
        x = x.to(tl.float32)
        z = z.to(tl.float32)
    return tl.dot(x, tl.trans(z), input_precision=PRECISION) * scale


@triton.jit
def _block(X, PADS, c, end, z, stride, d, scale, HAS_PADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
           PRECISION: tl.constexpr):  # fmt: skip
    """The tokens from c on: slots, log masses (0, or -inf of a pad), vectors, and scores with the pivots."""
    i = c + tl.arange(0, BLOCK)
    real = i < end
    if HAS_PADS:
        real = real & (tl.load(PADS + i, mask=real, other=1) == 0)
    x = _rows(X, i, stride, tl.arange(0, D), d, real)
    return i, tl.where(real, 0.0, NEG_INF), x, _scores(x, z, scale, PRECISION)


@triton.jit
def _store(X, i, count, e, width, values):
    """The rows i of values, those below count."""
    at = i[:, None].to(tl.int64) * width + e[None, :]
    tl.store(X + at, values.to(X.dtype.element_ty), mask=(i < count)[:, None] & (e < width)[None, :])


@triton.jit
def _kept(seed, dropout, g, n, i, t, R: tl.constexpr):
    """1/(1 - dropout) where an entry of the query side stays, else 0; the same forward and backward."""
    place = ((g * n + i) * R)[:, None] + t[None, :]
    return tl.where(tl.rand(seed, place.to(tl.int32)) >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def _passes(X, z, log_masses, PADS, reaches, stride, d, scale, first, last, start, end, part, parts,
            TOKENS_FIRST: tl.constexpr, HAS_PADS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
            D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Passes ``first`` to ``last``, excluded, over the tokens from ``start`` to ``end``: stores their reaches."""
    t = tl.arange(0, R)
    for number in range(first, last):
        h = potential_before(reaches, log_masses, number, parts, t, R)
        updated = tl.where((number > 0) | TOKENS_FIRST, 1.0, 0.0)
        top = tl.full([R], NEG_INF, tl.float32)
        total = tl.zeros([R], tl.float32)
        for c in range(start, end, BLOCK):
            i, log_mass, _, s = _block(X, PADS, c, end, z, stride, d, scale, HAS_PADS, BLOCK, D, PRECISION)
            f, _ = token_potential(s, h, log_mass, updated)
            top, total, _, _ = add_tokens(top, total, s + f[:, None])
        store_reach(reaches + (number * parts + part) * 2 * R, t, top, total, parts, R)
        tl.debug_barrier()  # other threads of this program read it in the next pass


@triton.jit(do_not_specialize=RUNTIME)
def key_forward(K, V, Z, MASSES, PADS, REACHES, A, n, r, d, dv, skb, skh, skn, svb, svh, svn, spb, heads, scale,
                passes, first, last, length, parts,
                TOKENS_FIRST: tl.constexpr, VALUES: tl.constexpr, HAS_PADS: tl.constexpr, R: tl.constexpr,
                D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    g, b, head, part, start, end = place(heads, length, n)
    t, e, ev = tl.arange(0, R), tl.arange(0, D), tl.arange(0, DV)
    K += b * skb + head * skh
    V += b * svb + head * svh
    PADS += b * spb
    reaches = REACHES + g * passes * parts * 2 * R
    z = _rows(Z + head * r * d, t, d, e, d, t < r)
    log_masses = tl.load(MASSES + head * r + t, mask=t < r, other=NEG_INF)
    _passes(K, z, log_masses, PADS, reaches, skn, d, scale, first, last, start, end, part, parts,
            TOKENS_FIRST, HAS_PADS, R, BLOCK, D, PRECISION)  # fmt: skip
    if VALUES:
        h = potential_before(reaches, log_masses, passes - 1, parts, t, R)
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
        store_reach(reaches + ((passes - 1) * parts + part) * 2 * R, t, top, total, parts, R)
        values = values / tl.where(total == 0.0, 1.0, total)[:, None]
        _store(A + (g * parts + part) * r * dv, t, r, ev, dv, values)


@triton.jit(do_not_specialize=RUNTIME)
def query_forward(Q, Z, MASSES, PADS, REACHES, A, OUT, n, r, d, dv, sqb, sqh, sqn, spb, heads, scale, dropout, seed,
                  passes, first, last, length, parts,
                  TOKENS_FIRST: tl.constexpr, VALUES: tl.constexpr, DROPS: tl.constexpr, HAS_PADS: tl.constexpr,
                  R: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    g, b, head, part, start, end = place(heads, length, n)
    t, e, ev = tl.arange(0, R), tl.arange(0, D), tl.arange(0, DV)
    Q += b * sqb + head * sqh
    PADS += b * spb
    reaches = REACHES + g * passes * parts * 2 * R
    z = _rows(Z + head * r * d, t, d, e, d, t < r)
    log_masses = tl.load(MASSES + head * r + t, mask=t < r, other=NEG_INF)
    _passes(Q, z, log_masses, PADS, reaches, sqn, d, scale, first, last, start, end, part, parts,
            TOKENS_FIRST, HAS_PADS, R, BLOCK, D, PRECISION)  # fmt: skip
    if VALUES:
        h = potential_before(reaches, log_masses, passes, parts, t, R)
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
def _levels(X, z, log_masses, PADS, REACHES, GRAD_H, OUT, stride, d, scale, passes, high, levels, start, end,
            g, all_programs, part, parts, slot,
            TOKENS_FIRST: tl.constexpr, HAS_PADS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
            D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Undo passes ``high``, ``high - 1``, ...: the gradients of the potentials before them."""
    t = tl.arange(0, R)
    for back in range(0, levels):
        u = high - back
        grad = tl.zeros([R], tl.float32)
        for c in range(start, end, BLOCK):
            i, log_mass, _, s = _block(X, PADS, c, end, z, stride, d, scale, HAS_PADS, BLOCK, D, PRECISION)
            _, of_tokens, _ = undo_pass(s, REACHES, GRAD_H, log_masses, log_mass, u, g, passes, all_programs, t,
                                        TOKENS_FIRST, R)  # fmt: skip
            grad -= tl.sum(of_tokens, 0)
        tl.store(OUT + (u - 1) * slot + (g * parts + part) * R + t, grad)
        tl.debug_barrier()


@triton.jit
def _of_last_tokens(s, do, a, h, log_mass, kept, PRECISION: tl.constexpr):
    """The query side's last update: its softmax, and what the values' gradient is for the scores."""
    _, w = token_potential(s, h, log_mass, 1.0)
    w = tl.where((log_mass == 0.0)[:, None], w, 0.0)
    grad = w * kept * tl.dot(do, tl.trans(a), input_precision=PRECISION)
    return w, grad - w * tl.sum(grad, 1)[:, None]


@triton.jit(do_not_specialize=RUNTIME)
def query_backward(Q, Z, MASSES, PADS, REACHES, A, GRAD_O, GRAD_Q, GRAD_A, GRAD_Z, GRAD_H, OUT,
                   n, r, d, dv, sqb, sqh, sqn, spb, heads, scale, dropout, seed,
                   passes, top, high, levels, length, parts, slot,
                   TOKENS_FIRST: tl.constexpr, BEGIN: tl.constexpr, FINISH: tl.constexpr, DROPS: tl.constexpr,
                   HAS_PADS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                   PRECISION: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    g, b, head, part, start, end = place(heads, length, n)
    all_programs = tl.num_programs(0)
    t, e, ev = tl.arange(0, R), tl.arange(0, D), tl.arange(0, DV)
    Q += b * sqb + head * sqh
    PADS += b * spb
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
        tl.store(OUT + top * slot + (g * parts + part) * R + t, grad_h, mask=tl.where(top >= 0, t < R, False))
        _store(GRAD_A + (part * all_programs + g) * r * dv, t, r, ev, dv, grad_a)
        tl.debug_barrier()
    _levels(Q, z, log_masses, PADS, REACHES, GRAD_H, OUT, sqn, d, scale, passes, high, levels, start, end,
            g, all_programs, part, parts, slot, TOKENS_FIRST, HAS_PADS, R, BLOCK, D, PRECISION)  # fmt: skip
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
    """The key side's last pass: its softmax over tokens, what the values' gradient is for the scores and what the
    update of the tokens takes from it."""
    f, shares = token_potential(s, h, log_mass, updated)
    share = token_shares(s, f, peak, log_total)
    grad = share * (tl.dot(v, tl.trans(da), input_precision=PRECISION) - delta[None, :])
    return share, grad, undo_tokens(shares, tl.sum(grad, 1) * updated)


@triton.jit(do_not_specialize=RUNTIME)
def key_backward(K, V, Z, MASSES, PADS, REACHES, A, GRAD_A, GRAD_K, GRAD_V, GRAD_Z, GRAD_H, OUT,
                 n, r, d, dv, skb, skh, skn, svb, svh, svn, spb, heads, scale,
                 passes, top, high, levels, length, parts, slot,
                 TOKENS_FIRST: tl.constexpr, BEGIN: tl.constexpr, FINISH: tl.constexpr, HAS_PADS: tl.constexpr,
                 R: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    g, b, head, part, start, end = place(heads, length, n)
    all_programs = tl.num_programs(0)
    t, e, ev = tl.arange(0, R), tl.arange(0, D), tl.arange(0, DV)
    K += b * skb + head * skh
    V += b * svb + head * svh
    PADS += b * spb
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
        tl.store(OUT + top * slot + (g * parts + part) * R + t, grad_h)
        tl.debug_barrier()
    _levels(K, z, log_masses, PADS, REACHES, GRAD_H, OUT, skn, d, scale, passes, high, levels, start, end,
            g, all_programs, part, parts, slot, TOKENS_FIRST, HAS_PADS, R, BLOCK, D, PRECISION)  # fmt: skip
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


class _Lot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, pivots, log_masses, query_padding_mask, key_padding_mask, settings):
        scale, query_updates, key_updates, dropout = settings
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        # without pads any tensor stands for them, unread
        query_pads = q if query_padding_mask is None else query_padding_mask.contiguous().view(torch.uint8)
        key_pads = k if key_padding_mask is None else key_padding_mask.contiguous().view(torch.uint8)
        bsz, heads, n, d = q.shape
        m, dv, r = k.size(2), v.size(3), pivots.size(1)
        programs, R = bsz * heads, padded(r)
        empty = {"dtype": torch.float32, "device": q.device}
        # drawn on the host, which need not wait for the device
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

        passes = (key_updates + 1) // 2
        parts, length = num_parts(programs, m, R, q.device)
        reaches = torch.empty(programs, passes, parts, 2, R, **empty)
        at_pivots = torch.empty(programs, parts, r, dv, **empty)
        tensors = k, v, pivots, log_masses, key_pads, reaches, at_pivots
        forward_passes(key_forward, (programs, parts, length), passes, passes - 1, tensors, key_side)
        key_reaches = merged(reaches)
        if parts > 1:
            top, log_total = (reaches[:, -1] - key_reaches[:, -1, None]).unbind(-2)
            share = (top + log_total).exp()[..., :r]
            at_pivots = (share.unsqueeze(-1) * at_pivots).sum(1)

        passes = query_updates // 2
        parts, length = num_parts(programs, n, R, q.device)
        reaches = torch.empty(programs, passes, parts, 2, R, **empty)
        values = torch.empty(bsz, heads, n, dv, dtype=v.dtype, device=q.device)
        tensors = q, pivots, log_masses, query_pads, reaches, at_pivots, values
        forward_passes(query_forward, (programs, parts, length), passes, passes, tensors, query_side)
        kept = [q, k, v, pivots, log_masses, query_pads, key_pads]
        ctx.save_for_backward(*kept, key_reaches, merged(reaches), at_pivots)
        ctx.sides = query_side, key_side
        return values

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_values):
        q, k, v, pivots, log_masses, query_pads, key_pads, key_reaches, query_reaches, at_pivots = ctx.saved_tensors
        query_side, key_side = ctx.sides
        bsz, heads, n, d = q.shape
        m, dv, r, R = k.size(2), v.size(3), pivots.size(1), padded(pivots.size(1))
        programs, empty = bsz * heads, {"dtype": torch.float32, "device": q.device}
        (query_parts, query_length), (key_parts, key_length) = (num_parts(programs, x, R, q.device) for x in (n, m))
        query_passes, key_passes = query_reaches.size(1), key_reaches.size(1)
        # what both sides add to, one after the other, is summed at the end
        grad_h = torch.empty(query_passes + key_passes - 1, programs, R, **empty)
        grad_z = torch.empty(query_parts + key_parts, programs, r, d, **empty)
        grad_a = torch.empty(query_parts, programs, r, dv, **empty)
        grad_q, grad_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        of_queries = q, pivots, log_masses, query_pads, query_reaches, at_pivots
        backward_passes(
            query_backward, (programs, query_parts, query_length), query_passes, query_passes - 1, True,
            grad_h[:query_passes], (*of_queries, grad_values.contiguous(), grad_q, grad_a, grad_z), query_side,
        )  # fmt: skip
        grad_a = grad_a.sum(0) if query_parts > 1 else grad_a
        of_keys = k, v, pivots, log_masses, key_pads, key_reaches, at_pivots
        backward_passes(
            key_backward, (programs, key_parts, key_length), key_passes, key_passes - 2, key_passes > 1,
            grad_h[query_passes:], (*of_keys, grad_a, grad_k, grad_v, grad_z[query_parts:]), key_side,
        )  # fmt: skip
        of_pivots = grad_z.view(-1, heads, r, d).sum(0).to(pivots.dtype)
        of_masses = grad_h[..., :r].reshape(-1, heads, r).sum(0)
        return grad_q, grad_k, grad_v, of_pivots, of_masses, None, None, None


def lot(inputs: LotInputs, settings: LotSettings) -> torch.Tensor:
    """Values of LOT attention, ``(bsz, num_heads, n, value_dim)``, zero at padded queries."""
    return _Lot.apply(*inputs, settings)
