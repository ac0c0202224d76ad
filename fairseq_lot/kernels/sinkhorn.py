"""The Sinkhorn solver for given scores in one launch forward and one backward: the conditional, whose rows sum to 1.

The passes are those of ``tiles.py``. The shorter axis of the scores is the pivots, kept on chip; the longer one is the
tokens, streamed. PIVOTS_EXACT: the rows, whose sums are exact, are the pivots. If there are too few programs to fill
the GPU, tokens are split among programs, and each pass is a launch, as in ``lot.py``.
"""

import torch
import triton
import triton.language as tl

from fairseq_lot.kernels.blocks import Blocks, tuned
from fairseq_lot.kernels.launch import RUNTIME, Side, backward_passes, padded, solver_parts, start
from fairseq_lot.kernels.tiles import (
    NEG_INF,
    add_tokens,
    finish_gradient,
    finish_reach,
    load_reach,
    pivot_potential,
    place,
    potential_before,
    token_potential,
    token_shares,
    undo_pass,
    undo_tokens,
)
from fairseq_lot.numerics.autograd import once_in_full_precision

TILE, STAGES = 4096, 3  # TILE: scores in a block


@triton.jit
def _tile(X, i, t, stride_i, stride_t, end, m):
    at = i[:, None].to(tl.int64) * stride_i + t[None, :] * stride_t
    return tl.load(X + at, mask=(i < end)[:, None] & (t < m)[None, :], other=0.0)


@triton.jit(do_not_specialize=RUNTIME)
def solve_forward(S, TOKENS, PIVOTS, REACHES, OF_PARTS, ARRIVED, C, n, m, ssb, ssh, ssn, ssm, stb, sth, stn,
                  spb, sph, spm, scb, sch, scn, scm, heads, passes, first, last, length, parts,
                  TOKENS_FIRST: tl.constexpr, VALUES: tl.constexpr, SPLIT: tl.constexpr, PIVOTS_EXACT: tl.constexpr,
                  R: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Passes `first` to `last` - 1 over the n tokens and m pivots of S. Grid: sentence and head, part.

    Each pass writes REACHES, ``(programs, passes, 2, R)``. With VALUES the conditional is then written to C.
    """
    g, b, head, part, start, end = place(heads, length, n)
    t = tl.arange(0, R)
    S += b * ssb + head * ssh
    TOKENS += b * stb + head * sth
    reaches, of_parts = REACHES + g * passes * 2 * R, OF_PARTS + g * parts * 2 * R
    log_masses = tl.load(PIVOTS + b * spb + head * sph + t * spm, mask=t < m, other=NEG_INF)
    for number in range(first, last):
        # potential_before without its branch, which would make the kernel spill registers
        top, log_total = load_reach(reaches + (number - 1) * 2 * R, t, number > 0, R)
        h = pivot_potential(log_masses, top, log_total, number - 1)
        updated = tl.where((number > 0) | TOKENS_FIRST, 1.0, 0.0)
        top = tl.full([R], NEG_INF, tl.float32)
        total = tl.zeros([R], tl.float32)
        for c in range(start, end, BLOCK):
            i = c + tl.arange(0, BLOCK)
            log_mass = tl.load(TOKENS + i * stn, mask=i < end, other=NEG_INF)
            s = _tile(S, i, t, ssn, ssm, end, m)
            f, _ = token_potential(s, h, log_mass, updated)
            top, total, _, _ = add_tokens(top, total, s + f[:, None])
        finish_reach(reaches + number * 2 * R, of_parts, ARRIVED + g, t, top, total, part, parts, SPLIT, R)
    if VALUES:
        C += b * scb + head * sch
        # exact pivots: C is the tokens' shares in the last pass; else the pivots' shares after it
        h = potential_before(reaches, log_masses, passes - 1 if PIVOTS_EXACT else passes, t, R)
        top, log_total = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
        if PIVOTS_EXACT:
            top, log_total = load_reach(reaches + (passes - 1) * 2 * R, t, True, R)
        updated = tl.where((passes > 1) | TOKENS_FIRST, 1.0, 0.0)
        for c in range(start, end, BLOCK):
            i = c + tl.arange(0, BLOCK)
            log_mass = tl.load(TOKENS + i * stn, mask=i < end, other=NEG_INF)
            s = _tile(S, i, t, ssn, ssm, end, m)
            f, out = token_potential(s, h, log_mass, updated)
            if PIVOTS_EXACT:
                out = token_shares(s, f, top, log_total)
            at = i[:, None].to(tl.int64) * scn + t[None, :] * scm
            tl.store(C + at, out, mask=(i < end)[:, None] & (t < m)[None, :])


@triton.jit
def _start(S, C, GRAD_C, TOKENS, i, t, m, end, ssn, ssm, scn, scm, sgn, sgm, stn, delta, h, updated,
           PIVOTS_EXACT: tl.constexpr):  # fmt: skip
    """Gradient of the conditional for a block of tokens.

    Returns:
        the scores; the log masses; the gradient of the scores through the conditional with f fixed; the gradient of f;
        a matrix whose sums over tokens are minus the gradient of h. If pivots are exact, this matrix is also to be
        subtracted from the gradient of the scores.
    """
    log_mass = tl.load(TOKENS + i * stn, mask=i < end, other=NEG_INF)
    s = _tile(S, i, t, ssn, ssm, end, m)
    share = _tile(C, i, t, scn, scm, end, m)
    grad = share * _tile(GRAD_C, i, t, sgn, sgm, end, m)
    if PIVOTS_EXACT:
        grad -= share * delta[None, :]
        _, shares = token_potential(s, h, log_mass, updated)
        grad_f = tl.sum(grad, 1) * updated
        of_tokens = undo_tokens(shares, grad_f)
    else:
        grad -= share * tl.sum(grad, 1)[:, None]
        grad_f = tl.sum(grad, 1) * 0.0
        of_tokens = -grad
    return s, log_mass, grad, grad_f, of_tokens


@triton.jit(do_not_specialize=RUNTIME)
def solve_backward(S, TOKENS, PIVOTS, REACHES, C, GRAD_C, DELTA, GRAD_S, GRAD_TOKENS, GRAD_H, OF_PARTS, ARRIVED, n, m,
                   ssb, ssh, ssn, ssm, stb, sth, stn, spb, sph, spm, scb, sch, scn, scm, heads, sgb, sgh, sgn, sgm,
                   passes, top, high, levels, length, parts,
                   TOKENS_FIRST: tl.constexpr, BEGIN: tl.constexpr, FINISH: tl.constexpr, SPLIT: tl.constexpr,
                   PIVOTS_EXACT: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Gradients of the scores and of the tokens' log masses, in three steps. Grid: sentence and head, part.

    BEGIN goes back from GRAD_C to the last h. Then `levels` passes from `high` down write GRAD_H, ``(passes, programs,
    R)``. FINISH writes GRAD_S and the gradient of the tokens' log masses, GRAD_TOKENS.
    """
    g, b, head, part, start, end = place(heads, length, n)
    all_programs = tl.num_programs(0)
    t = tl.arange(0, R)
    S += b * ssb + head * ssh
    C += b * scb + head * sch
    GRAD_S += b * scb + head * sch
    GRAD_C += b * sgb + head * sgh
    TOKENS += b * stb + head * sth
    of_parts = OF_PARTS + g * parts * R
    log_masses = tl.load(PIVOTS + b * spb + head * sph + t * spm, mask=t < m, other=NEG_INF)
    delta = tl.zeros([R], tl.float32)
    if PIVOTS_EXACT:
        delta = tl.load(DELTA + g * m + t, mask=t < m, other=0.0)
    before, log_before = load_reach(REACHES + (g * passes + top) * 2 * R, t, top >= 0, R)
    h = pivot_potential(log_masses, before, log_before, top)
    updated = tl.where((top >= 0) | TOKENS_FIRST, 1.0, 0.0)
    if BEGIN:
        grad_h = tl.zeros([R], tl.float32)
        for c in range(start, end, BLOCK):
            i = c + tl.arange(0, BLOCK)
            _, _, _, _, of_tokens = _start(S, C, GRAD_C, TOKENS, i, t, m, end, ssn, ssm, scn, scm, sgn, sgm, stn,
                                           delta, h, updated, PIVOTS_EXACT)  # fmt: skip
            grad_h -= tl.sum(of_tokens, 0)
        to = GRAD_H + (top * all_programs + g) * R
        finish_gradient(to, of_parts, ARRIVED + g, t, grad_h, part, parts, SPLIT, R)
    for back in range(0, levels):
        u = high - back
        grad_h = tl.zeros([R], tl.float32)
        for c in range(start, end, BLOCK):
            i = c + tl.arange(0, BLOCK)
            log_mass = tl.load(TOKENS + i * stn, mask=i < end, other=NEG_INF)
            s = _tile(S, i, t, ssn, ssm, end, m)
            _, of_tokens, _ = undo_pass(s, REACHES, GRAD_H, log_masses, log_mass, u, g, passes, all_programs, t,
                                        TOKENS_FIRST, R)  # fmt: skip
            grad_h -= tl.sum(of_tokens, 0)
        to = GRAD_H + ((u - 1) * all_programs + g) * R
        finish_gradient(to, of_parts, ARRIVED + g, t, grad_h, part, parts, SPLIT, R)
    if FINISH:
        for c in range(start, end, BLOCK):
            i = c + tl.arange(0, BLOCK)
            s, log_mass, grad, grad_mass, of_tokens = _start(
                S, C, GRAD_C, TOKENS, i, t, m, end, ssn, ssm, scn, scm, sgn, sgm, stn, delta, h, updated,
                PIVOTS_EXACT,
            )  # fmt: skip
            if PIVOTS_EXACT:
                grad -= of_tokens
            for back in range(0, top + 1):
                taken, _, grad_f = undo_pass(s, REACHES, GRAD_H, log_masses, log_mass, top - back, g, passes,
                                             all_programs, t, TOKENS_FIRST, R)  # fmt: skip
                grad -= taken
                grad_mass += grad_f
            at = i[:, None].to(tl.int64) * scn + t[None, :] * scm
            tl.store(GRAD_S + at, grad, mask=(i < end)[:, None] & (t < m)[None, :])
            tl.store(GRAD_TOKENS + g * n + i, grad_mass, mask=i < end)


def blocks_of(held: int) -> Blocks:
    """Default block sizes if ``held`` pivots are on chip."""
    return Blocks(max(1, min(64, TILE // held)), 4 if held <= 256 else 8, STAGES)


class _Sinkhorn(torch.autograd.Function):
    """The conditional of scores ``(bsz, heads, n, m)`` with log masses ``(bsz, heads, n)`` and ``(bsz, heads, m)``."""

    @staticmethod
    def forward(ctx, scores, log_a, log_b, num_updates):
        bsz, heads, n, m = scores.shape
        exact = n < m  # the pivots are the rows, whose sums are exact
        conditional = torch.empty_like(scores)
        s, c = (x.transpose(-1, -2) if exact else x for x in (scores, conditional))
        tokens, pivots = (log_b, log_a) if exact else (log_a, log_b)
        n, m = s.shape[2:]
        passes = (num_updates + exact) // 2
        R = padded(m)
        programs = bsz * heads
        parts, length = solver_parts(programs, n, R, s.device)
        strides = *s.stride(), *tokens.stride(), *pivots.stride(), *c.stride()
        side = Side(
            numbers=(n, m, *strides, heads),
            tokens_first=num_updates % 2 == (0 if exact else 1),
            constants=(exact, R),
            sizes=(32, R),
            blocks=blocks_of(R),
        )
        reaches = torch.empty(programs, passes, 2, R, dtype=torch.float32, device=s.device)
        of_parts = arrived = reaches  # without parts any tensor is passed in place of their results; it is not read
        if parts > 1:
            of_parts = torch.empty(programs, parts, 2, R, dtype=torch.float32, device=s.device)
            arrived = torch.zeros(programs, dtype=torch.int32, device=s.device)
        block, warps, stages = tuned(solve_forward.__name__, s.device, side.sizes, side.blocks)

        def run(first, last, values):
            numbers, constants = (*side.numbers, passes, first, last, length, parts), (*side.constants, block)
            tensors = s, tokens, pivots, reaches, of_parts, arrived, c
            constants = side.tokens_first, values, parts > 1, *constants
            start(solve_forward, (programs, parts), tensors, numbers, constants, warps, stages)

        for number in range(passes if parts > 1 else 0):
            run(number, number + 1, False)
        run(0, 0 if parts > 1 else passes, True)
        ctx.save_for_backward(scores, log_a, log_b, conditional, reaches, arrived)
        ctx.side, ctx.exact, ctx.split = side, exact, (programs, parts, length)
        return conditional

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_conditional):
        scores, log_a, log_b, conditional, reaches, arrived = ctx.saved_tensors
        side, exact = ctx.side, ctx.exact
        grad_scores = torch.empty_like(conditional)
        matrices = scores, conditional, grad_conditional, grad_scores
        s, c, grad_c, grad_s = (x.transpose(-1, -2) if exact else x for x in matrices)
        bsz, heads, n, m = s.shape
        tokens, pivots = (log_b, log_a) if exact else (log_a, log_b)
        passes = reaches.size(1)
        top = passes - 2 if exact else passes - 1
        grad_h = torch.empty(max(top + 1, 1), bsz * heads, padded(m), dtype=torch.float32, device=s.device)
        grad_tokens = torch.empty(bsz, heads, n, dtype=torch.float32, device=s.device)
        delta = (c * grad_c).sum(-2) if exact else grad_tokens  # not read otherwise
        of_parts = grad_h.new_empty(*ctx.split[:2], padded(m)) if ctx.split[1] > 1 else grad_h
        tensors = s, tokens, pivots, reaches, c, grad_c, delta, grad_s, grad_tokens, grad_h, of_parts, arrived
        side = side._replace(numbers=(*side.numbers, *grad_c.stride()))
        backward_passes(solve_backward, ctx.split, passes, top, top >= 0, tensors, side)
        grad_pivots = grad_h[: top + 1, :, :m].sum(0).view(bsz, heads, m)
        return (grad_scores, *((grad_pivots, grad_tokens) if exact else (grad_tokens, grad_pivots)), None)


def fused_sinkhorn(scores: torch.Tensor, log_a: torch.Tensor, log_b: torch.Tensor, *, num_updates: int) -> torch.Tensor:
    """The conditional; arguments as for :func:`~fairseq_lot.transport.sinkhorn.solve`."""
    *lead, n, m = scores.shape
    shape = [1] * (2 - len(lead)) + lead
    log_a, log_b = (x.expand(*shape, -1) for x in (log_a, log_b))
    return _Sinkhorn.apply(scores.view(*shape, n, m), log_a, log_b, num_updates).view(scores.shape)
