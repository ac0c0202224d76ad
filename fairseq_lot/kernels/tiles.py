"""Half-updates with their gradients on tiles of tokens and pivots, for the kernels of LOT and of the Sinkhorn solver.

A tile has a block of tokens i as rows and all pivots t as columns. A program streams the blocks of a sentence and holds
the pivots' potential ``h`` on chip. All quantities are logs. One pass over the tokens computes

    f_i = log_mass_i - logsumexp_t(s_it + h_t)      the tokens' potential; 0 in a first pass that skips it
    reach_t = logsumexp_i(s_it + f_i)
    h_t = log_masses_t - reach_t                    the pivots' next potential

A reach is stored as two float32, the maximum and the log of the sum relative to the maximum. The gradient needs nothing
but the reaches of all passes: it computes the potentials again from them.
"""

import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))
PARTS, ENTRIES = tl.constexpr(32), tl.constexpr(2048)  # merged at once, at most: parts, and numbers in their tile


@triton.jit
def place(heads, length, n):
    """The indices of this program in a grid of (sentence and head, part); a part has ``length`` of the n tokens.

    Returns:
        number of the sentence and head; sentence; head; part; first token; end of the tokens.
    """
    g = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    return g, g // heads, g % heads, part, part * length, tl.minimum(part * length + length, n)


@triton.jit
def load_reach(reaches, t, there, R: tl.constexpr):
    """Load a reach, the maximum with the log of the sum relative to it; 0 and 0 if ``there`` is false."""
    mask = tl.where(there, t < R, False)  # Triton 3.9's interpreter has no & of a scalar and a block
    return tl.load(reaches + t, mask=mask, other=0.0), tl.load(reaches + R + t, mask=mask, other=0.0)


@triton.jit
def store_reach(reaches, t, top, total, R: tl.constexpr):
    """Store a reach from a running maximum and sum; 0 and 0 if no token has mass."""
    nothing = total == 0.0
    tl.store(reaches + t, tl.where(nothing, 0.0, top))
    tl.store(reaches + R + t, tl.log(tl.where(nothing, 1.0, total)))


@triton.jit
def is_last(ARRIVED, parts):
    """Whether this program is the last one of a sentence to arrive; it can then read what the other parts stored.

    The counter is never reset: every launch adds the number of parts to it.
    """
    tl.debug_barrier()  # all threads of this program have stored their results
    return (tl.atomic_add(ARRIVED, 1, sem="acq_rel", scope="gpu") + 1) % parts == 0


@triton.jit
def finish_reach(reaches, of_parts, ARRIVED, t, top, total, part, parts,
                 SPLIT: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Store the reach of a sentence, from a running maximum and sum.

    With SPLIT they belong to one part: each program writes them to ``of_parts``, ``(parts, 2, R)``, and the last
    program to arrive merges all parts.
    """
    if SPLIT:
        tl.store(of_parts + part * 2 * R + t, top)
        tl.store(of_parts + part * 2 * R + R + t, total)
        P: tl.constexpr = PARTS if PARTS * R <= ENTRIES else ENTRIES // R
        if is_last(ARRIVED, parts):
            top = tl.full([R], NEG_INF, tl.float32)
            total = tl.zeros([R], tl.float32)
            for c in range(0, parts, P):
                p = c + tl.arange(0, P)
                at = of_parts + p[:, None] * 2 * R + t[None, :]
                here = (p < parts)[:, None] & (t < R)[None, :]
                tops = tl.load(at, mask=here, other=NEG_INF)
                new = tl.maximum(top, tl.max(tops, 0))
                safe = tl.where(new == NEG_INF, 0.0, new)
                totals = tl.load(at + R, mask=here, other=0.0)
                total = total * tl.exp(top - safe) + tl.sum(tl.exp(tops - safe[None, :]) * totals, 0)
                top = new
            store_reach(reaches, t, top, total, R)
    else:
        store_reach(reaches, t, top, total, R)
    tl.debug_barrier()  # other threads of this program read the reach in the next pass


@triton.jit
def finish_gradient(to, of_parts, ARRIVED, t, grad, part, parts, SPLIT: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Store the gradient of the pivots' potential, a sum over tokens.

    With SPLIT ``grad`` belongs to one part: each program writes it to ``of_parts``, ``(parts, R)``, and the last
    program to arrive adds up all parts.
    """
    if SPLIT:
        tl.store(of_parts + part * R + t, grad)
        P: tl.constexpr = PARTS if PARTS * R <= ENTRIES else ENTRIES // R
        if is_last(ARRIVED, parts):
            total = tl.zeros([R], tl.float32)
            for c in range(0, parts, P):
                p = c + tl.arange(0, P)
                here = (p < parts)[:, None] & (t < R)[None, :]
                total += tl.sum(tl.load(of_parts + p[:, None] * R + t[None, :], mask=here, other=0.0), 0)
            tl.store(to + t, total)
    else:
        tl.store(to + t, grad)
    tl.debug_barrier()


@triton.jit
def pivot_potential(log_masses, top, log_total, number):
    """The pivots' potential after pass ``number``, ``h = log_masses - reach``; -inf for pivots without mass.

    Pass -1 stands for the start: h is 0.
    """
    h = tl.where(number < 0, 0.0, log_masses - (top + log_total))
    return tl.where(log_masses == NEG_INF, NEG_INF, h)


@triton.jit
def potential_before(reaches, log_masses, number, t, R: tl.constexpr):
    """Load the reach before pass ``number``; return the pivots' potential that the pass starts from."""
    top = tl.zeros([R], tl.float32)
    log_total = tl.zeros([R], tl.float32)
    if number > 0:
        top, log_total = load_reach(reaches + (number - 1) * 2 * R, t, True, R)
    return pivot_potential(log_masses, top, log_total, number - 1)


@triton.jit
def token_potential(s, h, log_mass, updated):
    """The tokens' potential ``f_i = log_mass_i - logsumexp_t(s_it + h_t)``, with ``softmax_t(s_it + h_t)``.

    f is 0 if ``updated`` is 0, and -inf for tokens without mass. The softmax divides by its sum, so that its rows sum
    to 1 at scores of any size.
    """
    y = s + h[None, :]
    top = tl.max(y, 1)
    shares = tl.exp(y - top[:, None])
    total = tl.sum(shares, 1)
    massless = log_mass == NEG_INF
    f = (tl.where(massless, 0.0, log_mass) - (top + tl.log(total))) * updated
    return tl.where(massless, NEG_INF, f), shares / total[:, None]


@triton.jit
def add_tokens(top, total, x):
    """Add the rows of x to each column's running maximum and sum of exponentials.

    Returns:
        the new maximum; the new sum; the factor by which the old sum was rescaled; the terms ``exp(x - maximum)``.
    """
    new = tl.maximum(top, tl.max(x, 0))
    safe = tl.where(new == NEG_INF, 0.0, new)
    fade = tl.exp(top - safe)
    terms = tl.exp(x - safe[None, :])
    return new, total * fade + tl.sum(terms, 0), fade, terms


@triton.jit
def token_shares(s, f, top, log_total):
    """``softmax_i(s_it + f_i)`` from the pivots' reaches: the tokens' shares in each pivot.

    The maximum is subtracted before the log of the sum. Their sum would round the log away at large scores.
    """
    return tl.exp((s + f[:, None] - top[None, :]) - log_total[None, :])


@triton.jit
def undo_tokens(shares, grad_f):
    """``softmax_t(s_it + h_t) grad_f_i``: minus the gradient of the scores through the tokens' potential f.

    Callers subtract it from the gradient of the scores, and its sums over tokens from the gradient of h.
    """
    return shares * grad_f[:, None]


@triton.jit
def undo_pass(s, REACHES, GRAD_H, log_masses, log_mass, u, g, passes, all_programs, t, TOKENS_FIRST: tl.constexpr,
              R: tl.constexpr):  # fmt: skip
    """Gradients of pass u for a block of tokens, from the gradient of the potential after it, ``GRAD_H[u]``.

    Returns:
        ``(BLOCK, R)``, to be subtracted from the gradient of the scores;
        ``(BLOCK, R)``, the part of it from the tokens' half-update, whose sums over tokens are minus the gradient of h
        before pass u;
        ``(BLOCK,)``, the gradient of the tokens' potential.
    """
    reaches = REACHES + (g * passes + u) * 2 * R
    top, log_total = load_reach(reaches - 2 * R, t, u > 0, R)
    h = pivot_potential(log_masses, top, log_total, u - 1)
    updated = tl.where((u > 0) | TOKENS_FIRST, 1.0, 0.0)
    f, shares = token_potential(s, h, log_mass, updated)
    top, log_total = load_reach(reaches, t, True, R)
    grad_h = tl.load(GRAD_H + (u * all_programs + g) * R + t)
    of_pivots = token_shares(s, f, top, log_total) * grad_h[None, :]
    grad_f = -tl.sum(of_pivots, 1) * updated
    of_tokens = undo_tokens(shares, grad_f)
    return of_pivots + of_tokens, of_tokens, grad_f
