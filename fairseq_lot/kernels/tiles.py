"""What the kernels share: half-updates and their gradients on a block of tokens with all pivots.

A program streams blocks of tokens, the rows of a tile; the other side, "pivots", is held whole. Everything is in the
log domain. A pass turns the pivots' potential ``h`` into the tokens' potential ``f``, token by token, and reduces
``scores + f`` over the tokens to ``reach``, the log of a sum of exponentials for each pivot. The next potential of the
pivots is ``log_masses - reach``, so the reaches of all passes are all that the gradient needs.
"""

import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))
PARTS, ENTRIES = tl.constexpr(32), tl.constexpr(2048)  # parts of a sentence that are merged at once, at most


@triton.jit
def place(heads, length, n):
    """Which sentence and head this program has, their number, and which of its n tokens: part, first and end."""
    g = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    return g, g // heads, g % heads, part, part * length, tl.minimum(part * length + length, n)


@triton.jit
def load_reach(reaches, t, there, R: tl.constexpr):
    """One reach, as its maximum and the log of the sum over that; 0 where there is none."""
    mask = tl.where(there, t < R, False)  # Triton 3.9's interpreter knows no & of a scalar and a block
    return tl.load(reaches + t, mask=mask, other=0.0), tl.load(reaches + R + t, mask=mask, other=0.0)


@triton.jit
def store_reach(reaches, t, top, total, R: tl.constexpr):
    """The reach of a running maximum and sum; 0 of no token at all."""
    nothing = total == 0.0
    tl.store(reaches + t, tl.where(nothing, 0.0, top))
    tl.store(reaches + R + t, tl.log(tl.where(nothing, 1.0, total)))


@triton.jit
def is_last(ARRIVED, parts):
    """Whether all other parts of the sentence have come here before; what they have stored can be read then.

    A counter serves one launch after the other: each adds as many as there are parts.
    """
    tl.debug_barrier()  # all threads of this program have stored theirs
    return (tl.atomic_add(ARRIVED, 1, sem="acq_rel", scope="gpu") + 1) % parts == 0


@triton.jit
def finish_reach(reaches, of_parts, ARRIVED, t, top, total, part, parts,
                 SPLIT: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Store the reach of a sentence; that of a part goes to ``of_parts``, and the last part merges all of them."""
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
    tl.debug_barrier()  # other threads of this program read it in the next pass


@triton.jit
def finish_gradient(to, of_parts, ARRIVED, t, grad, part, parts, SPLIT: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Store the gradient of a potential, which is a sum over tokens; of parts as in :func:`finish_reach`."""
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
    """h after pass ``number`` with that reach; after pass -1, before the first one, 0 wherever there is mass."""
    h = tl.where(number < 0, 0.0, log_masses - (top + log_total))
    return tl.where(log_masses == NEG_INF, NEG_INF, h)


@triton.jit
def potential_before(reaches, log_masses, number, t, R: tl.constexpr):
    """The pivots' potential that pass ``number`` starts from."""
    top = tl.zeros([R], tl.float32)
    log_total = tl.zeros([R], tl.float32)
    if number > 0:
        top, log_total = load_reach(reaches + (number - 1) * 2 * R, t, True, R)
    return pivot_potential(log_masses, top, log_total, number - 1)


@triton.jit
def token_potential(s, h, log_mass, updated):
    """f made from h (``updated`` is 1), or 0 (``updated`` is 0); -inf for tokens without mass.

    And the shares of the pivots in each token: its softmax, divided, so that they sum to 1 however large the scores.
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
    """Take the rows of x into the running maximum and the running sum of exponentials, and the factor of the old."""
    new = tl.maximum(top, tl.max(x, 0))
    safe = tl.where(new == NEG_INF, 0.0, new)
    fade = tl.exp(top - safe)
    terms = tl.exp(x - safe[None, :])
    return new, total * fade + tl.sum(terms, 0), fade, terms


@triton.jit
def token_shares(s, f, top, log_total):
    """The shares of the tokens in each pivot; a large maximum goes first, so that they sum to 1 as well."""
    return tl.exp((s + f[:, None] - top[None, :]) - log_total[None, :])


@triton.jit
def undo_tokens(shares, grad_f):
    """What an update of the tokens takes from the gradient of the scores; its columns, summed, from that of h."""
    return shares * grad_f[:, None]


@triton.jit
def undo_pass(s, REACHES, GRAD_H, log_masses, log_mass, u, g, passes, all_programs, t, TOKENS_FIRST: tl.constexpr,
              R: tl.constexpr):  # fmt: skip
    """Undo pass u, given the gradient of the potential that it led to.

    Returns:
        what it takes from the gradient of the scores; the part of it that the update of the tokens takes, whose column
        sums it takes from the gradient of the potential before; and the gradient of the tokens' potential.
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
