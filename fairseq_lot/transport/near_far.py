"""Products with a kernel that is exact near the diagonal and of low rank elsewhere, linear in the sentence length.

The kernel of n queries and m keys is

    K̃_ij = exp(q_i·k_j)                          for |i - j| ≤ W, the band
    K̃_ij = Σ_t exp(query_logs_it + key_logs_jt)  elsewhere

and is never made. Queries are taken in blocks: a block is multiplied with the keys of its band one by one, and with all
others through sums over the keys before and after. These are sums of what lies outside of the block's neighbourhood;
nothing is subtracted, so nothing cancels.
"""

import math
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

# Queries in a block, and the sentence length up to which all keys are one neighbourhood.
_BLOCK, _DENSE = 32, 64
# The far part of a row counts as nothing where it is less than exp(-this) of its largest feature, which may belong to a
# key of the band. exp of more than 88 would overflow in float32; the rest is room for gradients.
_LARGEST = 70.0
# A difference to 1 that is rounding.
_ROUNDING = 1e-5
_LOG2_E = math.log2(math.e)


def near_far(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_logs: torch.Tensor | None,
    key_logs: torch.Tensor | None,
    key_log_mass: torch.Tensor | None = None,
    *,
    window: int,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``A v`` with ``A_ij ∝ K̃_ij exp(key_log_mass_j)`` in every row, and the logs of the sums of the rows.

    Time and memory are O((n + m) (r + W + block) d), forward and backward. The part of a row outside of the band counts
    as nothing where it is less than e^-70 of the row's largest product of two features, and in float32 single products
    below e^-87 of that do; docs/attention.md has the bound that follows.

    Args:
        q: ``(bsz, num_heads, n, d)``, scaled so that ``q·k`` are the scores; k: ``(bsz, num_heads, m, d)``.
        v: ``(bsz, num_heads, m, value_dim)``; finite at keys without mass.
        query_logs: ``(bsz, num_heads, n, r)``, logs of the features of the queries; None: the band alone.
        key_logs: ``(bsz, num_heads, m, r)``, likewise of the keys.
        key_log_mass: ``(bsz, num_heads or 1, m)``, -inf = no mass; None: all alike.
        window: W, in tokens.
        causal: no key after the query; without features only, with as many keys as queries.

    Returns:
        ``(bsz, num_heads, n, value_dim)``, zero in rows without mass, and ``(bsz, num_heads, n)``, there the lowest
        finite number.
    """
    if causal and query_logs is not None:
        raise ValueError("the causal band takes no features; see fairseq_lot.transport.pivots_causal for these")
    return _NearFar.apply(q, k, v, query_logs, key_logs, key_log_mass, window, causal)


class _Blocks:
    """How the tokens of a call are cut into blocks of queries with a neighbourhood of keys each.

    Args:
        n, m: numbers of queries and keys.
        window: W.
        causal: no key after the query.
        like: gives the device.
    """

    def __init__(self, n: int, m: int, window: int, causal: bool, like: torch.Tensor):
        self.n, self.m, longest = n, m, max(n, m)
        is_one = longest <= max(_DENSE, window)
        self.length = longest if is_one else max(_BLOCK, window)
        self.count = -(-longest // self.length)
        self.before = 0 if is_one else window
        self.after = 0 if is_one or causal else window
        i = torch.arange(self.length, device=like.device)[:, None]
        j = torch.arange(self.before + self.length + self.after, device=like.device) - self.before
        #: ``(length, neighbours)`` bool
        self.band = (i - j <= window) & (j <= i if causal else j - i <= window)
        #: the same as numbers, 1 where the features count
        self.outside_band = (~self.band).to(like.dtype)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """``(b, h, n, c) -> (b, h, count, length, c)``, filled up with zeros."""
        missing = self.count * self.length - x.size(2)
        return (pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (self.count, self.length))

    def tokens(self, blocks: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`queries`."""
        return blocks.flatten(2, 3)[:, :, : self.n]

    def around(self, x: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """``(b, h, m, c) -> (b, h, before + count·length + after, c)``: the keys, with margins."""
        missing = self.count * self.length - x.size(2)
        if not (self.before or self.after or missing):
            return x
        return pad(x, (0, 0, self.before, self.after + missing), value=value)

    def neighbours(self, around: torch.Tensor) -> torch.Tensor:
        """The keys beside every block, ``(b, h, count, neighbours, c)``, of what :meth:`around` returned."""
        if self.count == 1:
            return around.unsqueeze(2)
        neighbours = around.unfold(2, self.before + self.length + self.after, self.length).transpose(-1, -2)
        return neighbours.contiguous()  # as it will be multiplied, transposed, too: torch copies that more slowly

    def add_neighbours(self, around: torch.Tensor, x: torch.Tensor) -> None:
        """Add to every key what it got as a neighbour: the transpose of :meth:`neighbours`."""
        if self.count == 1:
            around += x.squeeze(2)
            return
        own = around[:, :, self.before : self.before + self.count * self.length]
        own += x[..., self.before : self.before + self.length, :].flatten(2, 3)
        if self.before:
            self._edges(around, 0)[..., : self.before, :] += x[..., : self.before, :]
        if self.after:
            ends = self._edges(around, self.before + self.after)
            ends[..., -self.after :, :] += x[..., -self.after :, :]

    def own(self, around: torch.Tensor) -> torch.Tensor:
        """The keys without their margins."""
        return around[:, :, self.before : self.before + self.m]

    def _edges(self, around, start):
        """Blocks of keys from a slot on, ``(b, h, count, length, c)``, a view."""
        return around[:, :, start : start + self.count * self.length].unflatten(2, (self.count, self.length))

    def outside(self, around: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys before and after a neighbourhood, in blocks: views, ``(b, h, count, length, c)``.

        Block c of the former is outside of the neighbourhoods of the query blocks after c, block c of the latter of
        those before c.
        """
        return self._edges(around, 0), self._edges(around, self.before + self.after)


def _add_sums_before(out: torch.Tensor, blocks: torch.Tensor, *, reverse: bool = False) -> torch.Tensor:
    """Add to every block of ``out`` the sum of the blocks before it, or after it, over axis 2; returns ``out``.

    Sums of later blocks alone: what is outside is never the difference of two sums.
    """
    if out.device.type != "cpu":
        blocks = blocks.flip(2) if reverse else blocks
        sums = pad(blocks[:, :, :-1], (0, 0, 0, 0, 1, 0)).cumsum(2)
        return out.add_(sums.flip(2) if reverse else sums)
    running = torch.zeros_like(blocks[:, :, 0])  # torch sums over a strided axis many times as slowly
    pairs = list(zip(out.unbind(2), blocks.unbind(2), strict=True))
    for total, block in reversed(pairs) if reverse else pairs:
        total += running
        running += block
    return out


def _exp_(logs: torch.Tensor) -> torch.Tensor:
    """``exp`` in place; a CPU takes the power of two four times as fast, and thirty where the result is next to 0."""
    return logs.mul_(_LOG2_E).exp2_()


class _NearFar(torch.autograd.Function):
    """The products. Kept for the gradients is the plan beside the diagonal, in blocks, and the features."""

    @staticmethod
    def forward(ctx, q, k, v, query_logs, key_logs, key_log_mass, window, causal):
        blocks = _Blocks(q.size(2), k.size(2), window, causal, q)
        v_around = blocks.around(v)
        bias = torch.zeros_like(blocks.outside_band).masked_fill_(~blocks.band, -torch.inf)
        if key_log_mass is None and (blocks.count > 1 or blocks.n > blocks.m):
            key_log_mass = k.new_zeros(1, 1, blocks.m)
        if key_log_mass is not None:
            key_log_mass = key_log_mass.unsqueeze(-1)
            bias = bias + blocks.neighbours(blocks.around(key_log_mass, -torch.inf)).transpose(-1, -2)
        plan = (blocks.queries(q) @ blocks.neighbours(blocks.around(k)).transpose(-1, -2)).add_(bias)
        peak = plan.amax(-1, keepdim=True).clamp_(min=torch.finfo(plan.dtype).min)
        phi = psi = beyond = mass_beyond = None
        if query_logs is None:
            plan = _exp_(plan.sub_(peak))
            mass = plan.sum(-1, keepdim=True)
        else:
            if key_log_mass is not None:
                key_logs = key_logs + key_log_mass
            shift = key_logs.amax(2, keepdim=True).clamp_(min=torch.finfo(plan.dtype).min)  # goes to the queries
            psi = blocks.around(_exp_(key_logs - shift))
            phi = blocks.queries(query_logs + shift)
            far_peak = phi.amax(-1, keepdim=True)
            phi = _exp_(phi.sub_(far_peak))
            far = (phi @ blocks.neighbours(psi).transpose(-1, -2)).mul_(blocks.outside_band)
            far_mass = far.sum(-1, keepdim=True)
            if blocks.count > 1:
                beyond, mass_beyond = _sums_beyond(blocks, psi, v_around)
                far_mass += (phi * mass_beyond).sum(-1, keepdim=True)
            # the far part by its true size: its largest feature may belong to a key of the band
            far_mass *= far_mass > math.exp(-_LARGEST)
            peak = torch.maximum(peak, far_peak + far_mass.log())
            scale = _exp_((far_peak - peak).clamp_(max=_LARGEST)).mul_(far_mass > 0)
            plan = _exp_(plan.sub_(peak))
            mass = plan.sum(-1, keepdim=True).addcmul_(far_mass, scale)
            plan.addcmul_(far, scale)
        mass.clamp_(min=_ROUNDING**2)  # 0 in a row without mass, elsewhere about 1 or more
        values = plan.div_(mass) @ blocks.neighbours(v_around)
        if phi is not None:
            phi.mul_(scale.div_(mass))
        if beyond is not None:
            values += phi @ beyond
        values = blocks.tokens(values)
        log_sums = blocks.tokens(peak.add_(mass.log_())).squeeze(-1)
        ctx.save_for_backward(q, k, v, values, plan, phi, psi, beyond, mass_beyond)
        ctx.blocks = blocks
        ctx.mass_shape = None if key_log_mass is None else key_log_mass.shape[:3]
        return values, log_sums

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_values, grad_log_sums):
        q, k, v, values, plan, phi, psi, beyond, mass_beyond = ctx.saved_tensors
        blocks = ctx.blocks
        q, v_around = blocks.queries(q), blocks.around(v)
        # every row is a quotient: the gradients of its numerator and of its denominator, over the denominator
        grad_mass = blocks.queries(grad_log_sums.unsqueeze(-1) - (grad_values * values).sum(-1, keepdim=True))
        grad_values = blocks.queries(grad_values)
        grad_k, grad_v = (torch.zeros_like(blocks.around(x)) for x in (k, v))
        blocks.add_neighbours(grad_v, plan.transpose(-1, -2) @ grad_values)
        grad_plan = (grad_values @ blocks.neighbours(v_around).transpose(-1, -2)).add_(grad_mass)
        grad_query_logs = grad_key_logs = None
        if phi is not None:
            grad_far = grad_plan * blocks.outside_band
            grad_phi, grad_psi = grad_far @ blocks.neighbours(psi), torch.zeros_like(psi)
            blocks.add_neighbours(grad_psi, grad_far.transpose(-1, -2) @ phi)
            if beyond is not None:
                grad_phi += grad_values @ beyond.transpose(-1, -2)
                grad_phi.addcmul_(grad_mass, mass_beyond)
                grads = phi.transpose(-1, -2) @ grad_values, (phi * grad_mass).sum(-2, keepdim=True)
                _add_beyond(blocks, psi, v_around, *grads, grad_psi, grad_v)
            grad_query_logs = blocks.tokens(grad_phi.mul_(phi))
            grad_key_logs = blocks.own(grad_psi.mul_(psi))
        grad_near = grad_plan.mul_(plan).masked_fill_(~blocks.band, 0.0)
        grad_q = blocks.tokens(grad_near @ blocks.neighbours(blocks.around(k)))
        blocks.add_neighbours(grad_k, grad_near.transpose(-1, -2) @ q)
        grad_log_mass = None
        if ctx.needs_input_grad[5]:
            grad_log_mass = torch.zeros_like(grad_k[..., :1])
            blocks.add_neighbours(grad_log_mass, grad_near.sum(-2).unsqueeze(-1))
            grad_log_mass = blocks.own(grad_log_mass).squeeze(-1)
            if grad_key_logs is not None:
                grad_log_mass = grad_log_mass + grad_key_logs.sum(-1)
            grad_log_mass = grad_log_mass.sum_to_size(ctx.mass_shape)
        return grad_q, blocks.own(grad_k), blocks.own(grad_v), grad_query_logs, grad_key_logs, grad_log_mass, None, None


def _sums_beyond(blocks, psi, v):
    """``Σ_j ψ_j v_j`` and ``Σ_j ψ_j`` over the keys outside of every block's neighbourhood.

    ``(b, h, count, r, c)`` and ``(b, h, count, 1, r)``; psi and v are given with their margins.
    """
    sides = list(zip(blocks.outside(psi), blocks.outside(v), strict=True))
    sums = [psi.contiguous().transpose(-1, -2) @ v for psi, v in sides]
    masses = [psi.sum(-2, keepdim=True) for psi, _ in sides]
    return _beyond(*sums), _beyond(*masses)


def _beyond(earlier, later):
    """Of every block, the earlier ones' sums before it and the later ones' after it."""
    return _add_sums_before(_add_sums_before(torch.zeros_like(earlier), earlier), later, reverse=True)


def _add_beyond(blocks, psi, v, grad_sums, grad_masses, grad_psi, grad_v):
    """What the sums beyond send back to the keys, given their gradients for every block, in their shapes."""
    sides = zip(*map(blocks.outside, (psi, v, grad_psi, grad_v)), strict=True)
    # keys before a neighbourhood get from the blocks after theirs, and the other way round
    for (psi, v, to_psi, to_v), reverse in zip(sides, (True, False), strict=True):
        grads = [_add_sums_before(torch.zeros_like(x), x, reverse=reverse) for x in (grad_sums, grad_masses)]
        to_psi += (v @ grads[0].transpose(-1, -2)).add_(grads[1])
        to_v += psi @ grads[0]


@dataclass(frozen=True)
class FarSummary:
    """What all keys leave behind for the features of a query, of constant size.

    Attributes:
        log_sums: ``(bsz, num_heads, r)``, ``log Σ_j exp(key_logs_jt)``.
        means: ``(bsz, num_heads, r, value_dim)``, ``Σ_j exp(key_logs_jt) v_j / Σ_j exp(key_logs_jt)``.
        positions: ``(bsz, num_heads, r)``, likewise of the slots j; no gradient.
    """

    log_sums: torch.Tensor
    means: torch.Tensor
    positions: torch.Tensor


def summarise_far(key_logs: torch.Tensor, v: torch.Tensor, key_padding_mask: torch.Tensor | None) -> FarSummary:
    """Sum up the keys; ``(bsz, num_heads, m, r)``, ``(bsz, num_heads, m, value_dim)`` and ``(bsz, m)``, True = pad."""
    if key_padding_mask is not None:
        key_logs = key_logs.masked_fill(key_padding_mask[:, None, :, None], -torch.inf)
    shares = torch.softmax(key_logs, 2).transpose(-1, -2)
    slots = torch.arange(v.size(2), dtype=v.dtype, device=v.device)
    return FarSummary(torch.logsumexp(key_logs, 2), shares @ v, shares.detach() @ slots)


def near_far_at_expected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_logs: torch.Tensor,
    key_logs: torch.Tensor,
    summary: FarSummary,
    key_padding_mask: torch.Tensor | None,
    *,
    window: int,
    need_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`near_far` with a query's band around the slot that its features expect, ``|j - round(p_i)| ≤ W``.

    ``p_i`` is the mean slot of the keys under the features alone. Each query reads 2W + 1 keys: O(n (r + W) d). What
    the features give these keys is taken from what they give all; where less than 1e-5 of it is left, nothing is.

    Args:
        q, k, v, query_logs, key_logs: as for :func:`near_far`.
        summary: of all keys.
        key_padding_mask: ``(bsz, m)``, True = pad.
        window: W, in tokens.
        need_weights: also return A, ``(bsz, num_heads, n, m)``.
    """
    far = query_logs + summary.log_sums.unsqueeze(2)
    shares, log_sums = torch.softmax(far, -1), torch.logsumexp(far, -1, keepdim=True)
    with torch.no_grad():
        centre = (shares @ summary.positions.unsqueeze(-1)).round_().long()
        slots = centre + torch.arange(-window, window + 1, device=q.device)
        hidden = (slots < 0) | (slots >= k.size(2))
        slots.clamp_(0, k.size(2) - 1)
        if key_padding_mask is not None:
            hidden |= key_padding_mask[:, None, None, :].expand(-1, slots.size(1), slots.size(2), -1).gather(3, slots)

    def gathered(x):
        """``(b, h, m, c) -> (b, h, n, 2W + 1, c)``."""
        index = slots.flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.size(-1))
        return x.gather(2, index).unflatten(2, slots.shape[2:])

    v_near = gathered(v)
    near = (gathered(k) @ q.unsqueeze(-1)).squeeze(-1).masked_fill(hidden, -torch.inf)
    replaced = torch.logsumexp(query_logs.unsqueeze(3) + gathered(key_logs), -1) - log_sums
    replaced = replaced.masked_fill(hidden, -torch.inf).exp()
    left = 1 - replaced.sum(-1, keepdim=True)
    left = left * (left > _ROUNDING)
    far_values = shares @ summary.means - (replaced.unsqueeze(-2) @ v_near).squeeze(-2)
    peak = torch.maximum(near.amax(-1, keepdim=True), log_sums + left.log()).detach()
    near, scale = (near - peak).exp(), (log_sums - peak).clamp(max=_LARGEST).exp() * (left > 0)
    mass = near.sum(-1, keepdim=True) + scale * left
    values = ((near.unsqueeze(-2) @ v_near).squeeze(-2) + scale * far_values) / mass
    if not need_weights:
        return values, None
    weights = scale * shares @ (key_logs - summary.log_sums.unsqueeze(2)).exp().transpose(-1, -2)
    if key_padding_mask is not None:
        weights = weights.masked_fill(key_padding_mask[:, None, None, :], 0.0)
    # a slot that is hidden has been moved onto one that may not be
    change = (near - scale * replaced).masked_fill(hidden, 0.0)
    return values, weights.scatter_add(-1, slots, change) / mass
