"""What the kernels share: half-updates and their gradients on a block of tokens with all pivots.

A program streams blocks of tokens, the rows of a tile; the other side, "pivots", is held whole. Everything is in the
log domain. A pass turns the pivots' potential ``h`` into the tokens' potential ``f``, token by token, and reduces
``scores + f`` over the tokens to ``reach``, the log of a sum of exponentials for each pivot. The next potential of the
pivots is ``log_masses - reach``, so the reaches of all passes are all that the gradient needs.
"""

import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def log_sum(reaches, parts, t, R: tl.constexpr):
    """The reach over all tokens from those over parts of them, ``(parts, R)``; 0 where there is no token at all."""
    top = tl.full([R], NEG_INF, tl.float32)
    total = tl.zeros([R], tl.float32)
    for part in range(0, parts):
        reach = tl.load(reaches + part * R + t)
        new = tl.maximum(top, reach)
        safe = tl.where(new == NEG_INF, 0.0, new)
        total = total * tl.exp(top - safe) + tl.exp(reach - safe)
        top = new
    return tl.where(top == NEG_INF, 0.0, top + tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def pivot_potential(log_masses, reach, number):
    """h after pass ``number``; after pass -1, that is before the first one, 0 wherever there is mass."""
    h = tl.where(number < 0, 0.0, log_masses - reach)
    return tl.where(log_masses == NEG_INF, NEG_INF, h)


@triton.jit
def token_potential(s, h, log_mass, updated):
    """f made from h (``updated`` is 1), or 0 (``updated`` is 0); -inf for tokens without mass. And the log sums."""
    y = s + h[None, :]
    top = tl.max(y, 1)
    total = top + tl.log(tl.sum(tl.exp(y - top[:, None]), 1))
    massless = log_mass == NEG_INF
    return tl.where(massless, NEG_INF, (tl.where(massless, 0.0, log_mass) - total) * updated), total


@triton.jit
def add_tokens(top, total, x):
    """Take the rows of x into the running maximum and the running sum of exponentials, and the factor of the old."""
    new = tl.maximum(top, tl.max(x, 0))
    safe = tl.where(new == NEG_INF, 0.0, new)
    fade = tl.exp(top - safe)
    terms = tl.exp(x - safe[None, :])
    return new, total * fade + tl.sum(terms, 0), fade, terms


@triton.jit
def reach_of(top, total, parts):
    """The reach from its running maximum and sum; of no token at all -inf in a part, 0 in a whole sentence."""
    nothing = tl.where(parts == 1, 0.0, NEG_INF)
    return tl.where(total == 0.0, nothing, top + tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def undo_pivots(s, f, reach, grad_h):
    """What an update of the pivots takes from the gradient of the scores; its rows, summed, from that of f."""
    return tl.exp(s + f[:, None] - reach[None, :]) * grad_h[None, :]


@triton.jit
def undo_tokens(s, h, log_mass, total, grad_f):
    """What an update of the tokens takes from the gradient of the scores; its columns, summed, from that of h."""
    share = tl.where((log_mass == NEG_INF)[:, None], 0.0, tl.exp(s + h[None, :] - total[:, None]))
    return share * grad_f[:, None]


@triton.jit
def potential_before(reaches, log_masses, number, parts, t, R: tl.constexpr):
    """The pivots' potential that pass ``number`` starts from."""
    reach = tl.zeros([R], tl.float32)
    if number > 0:
        reach = log_sum(reaches + (number - 1) * parts * R, parts, t, R)
    return pivot_potential(log_masses, reach, number - 1)


@triton.jit
def undo_pass(s, REACHES, GRAD_H, log_masses, log_mass, u, g, passes, all_programs, t, TOKENS_FIRST: tl.constexpr,
              R: tl.constexpr):  # fmt: skip
    """Undo pass u, given the gradient of the potential that it led to.

    Returns:
        what it takes from the gradient of the scores; the part of it that the update of the tokens takes, whose column
        sums it takes from the gradient of the potential before; and the gradient of the tokens' potential.
    """
    before = tl.load(REACHES + (g * passes + u - 1) * R + t, mask=(t < R) & (u > 0), other=0.0)
    h = pivot_potential(log_masses, before, u - 1)
    updated = tl.where((u > 0) | TOKENS_FIRST, 1.0, 0.0)
    f, total = token_potential(s, h, log_mass, updated)
    reach = tl.load(REACHES + (g * passes + u) * R + t)
    grad_h = tl.load(GRAD_H + (u * all_programs + g) * R + t)
    of_pivots = undo_pivots(s, f, reach, grad_h)
    grad_f = -tl.sum(of_pivots, 1) * updated
    of_tokens = undo_tokens(s, h, log_mass, total, grad_f)
    return of_pivots + of_tokens, of_tokens, grad_f
