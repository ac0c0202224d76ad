"""Products with a kernel that is exact near the diagonal and of low rank elsewhere, linear in the sentence length.

The kernel of n queries and m keys is

    K̃_ij = exp(s q_i·k_j)                              for |i - j| ≤ W, the band
    K̃_ij = Σ_t exp(query_logs_it + c_t + key_logs_jt)  elsewhere

and is never made. Queries are taken in blocks: a block is multiplied with the keys of its neighbourhood one by one, and
with all others through sums over the keys before and after. These are sums of what lies outside of the neighbourhood;
nothing is subtracted, so nothing cancels.

With slopes the kernel falls with the distance, by ``exp(-slope |i - j|)``: so do the sums, from block to block.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch.nn.functional import pad, threshold

from fairseq_lot.kernels.autograd import once_in_full_precision
from fairseq_lot.transport import pivots_causal

# Queries in a block.
_BLOCK = 32
# The sentence length up to which all keys are one neighbourhood. Off the CPU that is reasoned, not measured: it takes
# half as many kernels, a third with slopes, and n² is little there.
_DENSE = {"cpu": 96, "other": 256}
# The largest feature of a key is 2**_HEADROOM, what a query has of the kernel at most 1, and less mass than _LEAST is
# none: so a row whose largest feature belongs to a key of its band, where it does not count, keeps the rest. A feature
# of a query over the mass of its row is at most _MOST, and its product with a key's does not overflow. More headroom
# would cost precision: the roundings of a logarithm grow with it.
_HEADROOM, _LEAST, _MOST = 16.0, 2.0**-120, 2.0**104
# A difference to 1 that is rounding, in units of the precision.
_ROUNDING = 84
# The powers inside are powers of two: a CPU takes them four times as fast, and thirty where the result is next to 0.
_LOG2_E = math.log2(math.e)


def feature_logs(
    x: torch.Tensor, features: torch.Tensor, *, scale: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``s x·z_t - s‖x‖²/2 - (log r)/2``: the logs of positive features, whose products have 1/r in them.

    Args:
        x: ``(bsz, num_heads, n, d)``.
        features: z, ``(num_heads, r, d)``, in any precision.
        scale: s.
        dtype: of the logs, in which they are made; None: that of x, in which gradients are made in any case.

    Returns:
        ``(bsz, num_heads, n, r)``.
    """
    dtype = x.dtype if dtype is None else dtype
    if x.size(2) >= features.size(1):
        return _FeatureLogs.apply(x, features, scale, dtype)
    x = x.to(dtype)
    # few tokens, as in a step of decoding: one product for each head, whatever the batch
    heads = x.transpose(0, 1).flatten(1, 2)
    norms = torch.linalg.vector_norm(heads, dim=-1, keepdim=True).square() + math.log(features.size(1)) / scale
    features = features.to(x.dtype).transpose(-1, -2)
    logs = torch.baddbmm(norms, heads, features, beta=-scale / 2, alpha=scale)
    return logs.unflatten(1, (x.size(0), x.size(2))).transpose(0, 1)


class _FeatureLogs(torch.autograd.Function):
    """One product; nothing of width r is kept."""

    @staticmethod
    def forward(ctx, x, features, scale, dtype):
        each = features.expand(x.size(0), -1, -1, -1)  # in one kernel made wide, and precise
        features = each.to(dtype, memory_format=torch.contiguous_format).flatten(0, 1)
        ctx.save_for_backward(x, features)
        ctx.scale = scale
        x = x.to(dtype)
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # one kernel, where squares and their sum are two
        norms = torch.addcmul(x.new_full((), math.log(features.size(1)) / scale), norms, norms).flatten(0, 1)
        logs = torch.baddbmm(norms, x.flatten(0, 1), features.transpose(-1, -2), beta=-scale / 2, alpha=scale)
        return logs.unflatten(0, x.shape[:2])

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_logs):
        (x, features), scale = ctx.saved_tensors, ctx.scale
        grad_x = grad_features = None
        flat, grad_logs = x.flatten(0, 1), grad_logs.flatten(0, 1).to(x.dtype)
        if ctx.needs_input_grad[0]:
            grad_x = flat * grad_logs.sum(-1, keepdim=True)
            grad_x = grad_x.baddbmm_(grad_logs, features.to(x.dtype), beta=-scale, alpha=scale).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_features = torch.bmm(grad_logs.transpose(-1, -2), flat).unflatten(0, x.shape[:2]).sum(0).mul_(scale)
        return grad_x, grad_features, None, None


def tangents(
    k: torch.Tensor, shares: torch.Tensor, features: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`tangent_logs` needs of the keys: their mean for every feature, and a constant.

    ``L(q) = log Σ_j exp(s q·k_j)`` is convex, and its gradient at z_t is ``s k̄_t``, the mean of the keys by the shares
    ``softmax_j(s k_j·z_t)``. So ``L(z_t) + s (q - z_t)·k̄_t``, its tangent there, is nowhere above it.

    Args:
        k: ``(bsz, num_heads, m, d)``, zero at pads.
        shares: ``(bsz, num_heads, m, r)``, zero at pads.
        features: z, ``(num_heads, r, d)``, in any precision.
        scale: s.

    Returns:
        k̄, ``(bsz, num_heads, r, d)``, and ``s z_t·k̄_t + log r``, ``(bsz, num_heads, r)``.
    """
    means = shares.transpose(-1, -2) @ k
    return means, (features.to(k.dtype) * means).sum(-1) * scale + math.log(features.size(1))


def tangent_logs(q: torch.Tensor, means: torch.Tensor, constants: torch.Tensor, *, scale: float) -> torch.Tensor:
    """``s (q - z_t)·k̄_t - log r``: logs of the queries' features where ``s k·z_t`` are those of the keys.

    ``(bsz, num_heads, n, r)``. The sum over all keys of a feature's products is then the tangent's power, over r.
    """
    parts = constants.unsqueeze(2).flatten(0, 1), q.flatten(0, 1), means.flatten(0, 1).transpose(-1, -2)
    return torch.baddbmm(*parts, beta=-1, alpha=scale).unflatten(0, q.shape[:2])


def near_far(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_logs: torch.Tensor | None,
    key_logs: torch.Tensor | None,
    key_log_mass: torch.Tensor | None = None,
    feature_bias: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    *,
    window: int,
    scale: float = 1.0,
    causal: bool = False,
    with_log_sums: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``A v`` with ``A_ij ∝ K̃_ij exp(key_log_mass_j)`` in every row, and the logs of the sums of the rows.

    Time and memory are O((n + m) (r + W + block) d), forward and backward. Powers are taken relative to the row's
    largest, which may belong to a feature of a key in its band: a row whose sum is e^85 below that keeps all its
    precision, below e^110 it counts as empty. docs/attention.md has the bound that follows.

    Args:
        q: ``(bsz, num_heads, n, d)``; k: ``(bsz, num_heads, m, d)``.
        v: ``(bsz, num_heads, m, value_dim)``; finite at keys without mass.
        query_logs: ``(bsz, num_heads, n, r)``, logs of the features of the queries; None: the band alone.
        key_logs: ``(bsz, num_heads, m, r)``, likewise of the keys.
        key_log_mass: ``(bsz, num_heads or 1, m)``, -inf = no mass; None: all alike.
        feature_bias: c, ``(num_heads, r)``; None: zero.
        slopes: ``(num_heads,)``, at least 0; they get no gradient; None: zero.
        window: W, in tokens.
        scale: s, such that ``s q·k`` are the scores.
        causal: no key after the query, with as many keys as queries. Later keys' features are among those that
            powers are relative to.
        with_log_sums: the sums are asked for.

    Returns:
        ``(bsz, num_heads, n, value_dim)``, zero in rows without mass, and ``(bsz, num_heads, n)``, there the lowest
        finite number, or None.
    """
    settings = window, scale, causal, with_log_sums
    return _NearFar.apply(q, k, v, query_logs, key_logs, key_log_mass, feature_bias, slopes, settings)


@functools.lru_cache(16)
def _band(length, width, before, window, causal, dtype, device):
    """1 in the band, its logs, and 1 where the features count; kept, as all layers of a model want the same."""
    every = torch.ones(length, width, dtype=dtype, device=device)
    band = every.triu(before - window).tril_(before + (0 if causal else window))
    return band, band.log(), every.tril_(before - window - 1) if causal else every - band


class _Blocks:
    """How n queries and m keys are cut into blocks of queries with a neighbourhood of keys each."""

    def __init__(self, n: int, m: int, window: int, causal: bool, like: torch.Tensor, slopes: torch.Tensor | None):
        self.n, self.m, longest = n, m, max(n, m)
        dense = _DENSE.get(like.device.type, _DENSE["other"])
        is_one = longest <= max(dense, window)
        self.length = longest if is_one else max(_BLOCK, window)
        self.count = -(-longest // self.length)
        self.before = 0 if is_one else window
        self.after = 0 if is_one or causal else window
        self.width = self.before + self.length + self.after
        #: ``(length, width)``, 1 in the band and 0 elsewhere; its logs; 1 where the features count
        # large ones and fake tensors must not be kept
        make = _band if type(like) is torch.Tensor and self.length <= dense else _band.__wrapped__
        sizes = self.length, self.width, self.before, window, causal
        self.band, self.log_band, self.outside = make(*sizes, like.dtype, like.device)
        #: the sides that have keys outside of a neighbourhood: those before it, and those after it
        self.sides = 1 if causal else 2
        #: how much a sum of a side falls from a block to the next, ``(num_heads, 1, 1)``; None: not at all
        self.fall: torch.Tensor | None = None
        #: by side, ``(num_heads, 1, length, 1)``: ``exp(-slope distance)`` from a key to the edge of its block that
        #: faces the query, and from there to the query; with ``fall`` for each block between it is all the way
        self.of_keys: tuple[torch.Tensor, ...] = ()
        self.of_queries: tuple[torch.Tensor, ...] = ()
        if slopes is not None:
            slopes = slopes.to(like.dtype)[:, None, None, None] * -_LOG2_E
            slots = torch.arange(self.width, dtype=like.dtype, device=like.device)
            own = slots[: self.length, None]
            falls = slopes * (own + self.before - slots).abs_()
            self.log_band, self.outside = self.log_band + falls, self.outside * falls.exp2_()
            if self.count > 1:
                from_start, to_end = (slopes * (own + window)).exp2_(), (slopes * (self.length - own)).exp2_()
                self.of_keys = (to_end, from_start)[: self.sides]
                self.of_queries = (from_start, to_end)[: self.sides]
                self.fall = (slopes[:, 0] * self.length).exp2_()

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """``(b, h, n, c) -> (b, h, count, length, c)``, filled up with zeros."""
        missing = self.count * self.length - x.size(2)
        return (pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (self.count, self.length))

    def for_products(self, blocks: torch.Tensor) -> torch.Tensor:
        """Blocks that more than one product will be made of: each would copy them."""
        return blocks if self.count == 1 else blocks.contiguous()

    def tokens(self, blocks: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`queries`."""
        return blocks.flatten(2, 3)[:, :, : self.n]

    def neighbours(self, x: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """The keys beside every block, ``(b, h, m, c) -> (b, h, count, width, c)``; ``value`` where there is none."""
        missing = self.count * self.length - x.size(2)
        if self.before or self.after or missing:
            x = pad(x, (0, 0, self.before, self.after + missing), value=value)
        if self.count == 1:
            return x.unsqueeze(2)
        # copied: as a view of overlapping blocks it would be so in every product
        return x.unfold(2, self.width, self.length).transpose(-1, -2).contiguous()

    def keys(self, neighbours: torch.Tensor) -> torch.Tensor:
        """What every key got as a neighbour: the transpose of :meth:`neighbours`."""
        own = neighbours[..., self.before : self.before + self.length, :]
        if self.count > 1:
            own = own.contiguous()
            if self.before:
                own[:, :, :-1, self.length - self.before :] += neighbours[:, :, 1:, : self.before]
            if self.after:
                own[:, :, 1:, : self.after] += neighbours[:, :, :-1, -self.after :]
        return own.flatten(2, 3)[:, :, : self.m]

    def beside(self, neighbours: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the last keys of every neighbourhood, as many as a block has: two views.

        Those of a block are outside of the neighbourhoods of the later blocks, or of the earlier ones, and all that
        are outside are among them.
        """
        return neighbours[..., : self.length, :], neighbours[..., self.width - self.length :, :]

    def beyond(self, neighbours: torch.Tensor) -> list[torch.Tensor]:
        """Features of keys as they are summed up: :meth:`beside`, faded."""
        if self.fall is None:
            return list(self.beside(neighbours))[: self.sides]
        return [x * fade for x, fade in zip(self.beside(neighbours), self.of_keys, strict=False)]

    def to_sides(self, phi: torch.Tensor) -> torch.Tensor:
        """Features of queries as they meet the sums; with slopes those for each side, one beside the other."""
        return phi if self.fall is None else torch.cat([phi * fade for fade in self.of_queries], -1)

    def from_sides(self, grad: torch.Tensor) -> torch.Tensor:
        """The transpose of :meth:`to_sides`."""
        if self.fall is None:
            return grad
        first, *second = (x.mul_(fade) for x, fade in zip(grad.chunk(self.sides, -1), self.of_queries, strict=True))
        return first.add_(second[0]) if second else first

    def by_side(self, sums: torch.Tensor, axis: int) -> list[torch.Tensor]:
        """Each side's part of what is as wide as :meth:`to_sides` along an axis."""
        return [sums] * self.sides if self.fall is None else list(sums.chunk(self.sides, axis))


class _NearFar(torch.autograd.Function):
    """The products. Kept for the gradients are the kernel beside the diagonal, in blocks, and the features."""

    @staticmethod
    def forward(ctx, q, k, v, query_logs, key_logs, key_log_mass, feature_bias, slopes, settings):
        window, scale, causal, with_log_sums = settings
        blocks = _Blocks(q.size(2), k.size(2), window, causal, q, slopes)
        lowest = torch.finfo(q.dtype).min
        q, k, v = blocks.for_products(blocks.queries(q)), blocks.neighbours(k), blocks.neighbours(v)
        bias = blocks.log_band  # all logs are to base two
        log_mass = None
        if key_log_mass is not None:
            log_mass = (key_log_mass * _LOG2_E).unsqueeze(-1)
        elif blocks.count > 1 or blocks.n > blocks.m:
            log_mass = k.new_zeros(1, 1, blocks.m, 1)
        if log_mass is not None:
            bias = bias + blocks.neighbours(log_mass, -torch.inf).transpose(-1, -2)
        near = q @ k.transpose(-1, -2)
        phi = psi = beyond = mass_beyond = None
        if query_logs is None:
            plan = torch.add(bias, near, alpha=scale * _LOG2_E)
            peak = plan.amax(-1, keepdim=True).clamp_(min=lowest)
            plan.sub_(peak).exp2_()
        else:
            psi = key_logs * _LOG2_E if log_mass is None else torch.add(log_mass, key_logs, alpha=_LOG2_E)
            shift = psi.amax(2, keepdim=True).clamp_(min=lowest).sub_(_HEADROOM)  # goes to the queries
            psi = blocks.neighbours(psi.sub_(shift).exp2_())
            if feature_bias is not None:
                shift = torch.add(shift, feature_bias.unsqueeze(-2), alpha=_LOG2_E)
            by_feature = shift.unsqueeze(2), blocks.queries(query_logs), _LOG2_E
            plan, phi, peak = _relative_powers((bias, near, scale * _LOG2_E), by_feature)
            plan.addcmul_(phi @ psi.transpose(-1, -2), blocks.outside)
        mass = plan.sum(-1, keepdim=True)
        values = plan @ v
        if blocks.count > 1 and phi is not None:
            beyond, mass_beyond = _sums_beyond(blocks, psi, v)
            far = blocks.to_sides(phi)
            mass += far @ mass_beyond.transpose(-1, -2)
            values += far @ beyond
        mass.clamp_(min=_LEAST)
        values.div_(mass)
        log_sums = None
        if with_log_sums:
            log_sums = mass.log2().add_(peak).div_(_LOG2_E).masked_fill_(mass == _LEAST, lowest)
            log_sums = blocks.tokens(log_sums).squeeze(-1)
        ctx.save_for_backward(q, k, v, values, plan, mass, phi, psi, beyond, mass_beyond)
        ctx.blocks, ctx.scale = blocks, scale
        ctx.mass_shape = None if key_log_mass is None else key_log_mass.shape
        return blocks.tokens(values), log_sums

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_values, grad_log_sums):
        q, k, v, values, plan, mass, phi, psi, beyond, mass_beyond = ctx.saved_tensors
        blocks, needs = ctx.blocks, ctx.needs_input_grad
        # every row is a quotient: the gradients of its numerator and of its denominator, times the latter
        grad_values, plan = blocks.for_products(blocks.queries(grad_values)), plan / mass
        grad_mass = (grad_values * values).sum(-1, keepdim=True).neg_()
        if grad_log_sums is not None:
            grad_mass += blocks.queries(grad_log_sums.unsqueeze(-1))
        grad_v = plan.transpose(-1, -2) @ grad_values
        grad_plan = (grad_values @ v.transpose(-1, -2)).add_(grad_mass)
        grad_query_logs = grad_key_logs = grad_bias = None
        if phi is not None:
            phi = (phi / mass).clamp_(max=_MOST)
            grad_far = grad_plan * blocks.outside
            grad_phi, grad_psi = grad_far @ psi, grad_far.transpose(-1, -2) @ phi
            if beyond is not None:
                grad_far = (grad_values @ beyond.transpose(-1, -2)).addcmul_(grad_mass, mass_beyond)
                grad_phi += blocks.from_sides(grad_far)
                far = blocks.to_sides(phi)
                grads = far.transpose(-1, -2) @ grad_values, grad_mass.transpose(-1, -2) @ far
                _add_beyond(blocks, psi, v, *grads, grad_psi, grad_v)
            grad_query_logs = blocks.tokens(grad_phi.mul_(phi))
            grad_key_logs = blocks.keys(grad_psi.mul_(psi))
            if needs[6]:
                grad_bias = grad_query_logs.sum((0, 2))
        grad_near = grad_plan.mul_(plan).mul_(blocks.band * ctx.scale)
        grad_q = blocks.tokens(grad_near @ k)
        grad_k = blocks.keys(grad_near.transpose(-1, -2) @ q)
        grad_log_mass = None
        if needs[5]:
            grad_log_mass = blocks.keys(grad_near.sum(-2).unsqueeze(-1)).squeeze(-1) / ctx.scale
            if grad_key_logs is not None:
                grad_log_mass += grad_key_logs.sum(-1)
            grad_log_mass = grad_log_mass.sum_to_size(ctx.mass_shape)
        grad_v = blocks.keys(grad_v)
        return grad_q, grad_k, grad_v, grad_query_logs, grad_key_logs, grad_log_mass, grad_bias, None, None


def _relative_powers(*parts):
    """``2^(x + α y - peak)`` of each ``(x, y, α)``, then peak, what is largest in a row of all of them."""
    like = parts[0][1]
    if like.device.type in pivots_causal.ONE_BY_ONE or torch.compiler.is_compiling():
        whole = logs = [torch.add(x, y, alpha=alpha) for x, y, alpha in parts]
    else:  # in one tensor, which takes fewer kernels and, on a CPU, copies in the products; torch.compile refuses it
        widths = [y.size(-1) for _, y, _ in parts]
        whole = [like.new_empty(*like.shape[:-1], sum(widths))]
        logs = whole[0].split(widths, -1)
        for (x, y, alpha), log in zip(parts, logs, strict=True):
            torch.add(x, y, alpha=alpha, out=log)
    peak = functools.reduce(torch.maximum, (x.amax(-1, keepdim=True) for x in whole))
    for x in whole:
        x.sub_(peak).exp2_()
    return *logs, peak


def _sums_beyond(blocks, psi, v):
    """``Σ_j ψ_j v_j`` and ``Σ_j ψ_j`` over the keys outside of every neighbourhood.

    ``(b, h, count, r, c)`` and ``(b, h, count, 1, r)``; with slopes those of either side, one beside the other.
    """
    sums = []
    for is_after, keys, values in zip((False, True), blocks.beyond(psi), blocks.beside(v), strict=False):
        products = keys.transpose(-1, -2) @ values, keys.sum(-2, keepdim=True)
        sums.append([_sums_before(x, blocks.fall, reverse=is_after) for x in products])
    if blocks.sides == 1:
        return sums[0]
    parts = zip(*sums, (-2, -1), strict=True)
    return [x.add_(y) if blocks.fall is None else torch.cat([x, y], axis) for x, y, axis in parts]


def _add_beyond(blocks, psi, v, grad_sums, grad_masses, grad_psi, grad_v):
    """Add what the sums beyond send back to the keys, given their gradients for every block."""
    keys = zip(blocks.beyond(psi), *map(blocks.beside, (v, grad_psi, grad_v)), strict=False)
    grads = zip(blocks.by_side(grad_sums, -2), blocks.by_side(grad_masses, -1), strict=True)
    for is_after, (psi, v, to_psi, to_v), grad in zip((False, True), keys, grads, strict=False):
        # keys before a neighbourhood get from the blocks after theirs, and the other way round
        sums, masses = (_sums_before(x, blocks.fall, reverse=not is_after) for x in grad)
        of_psi = (v @ sums.transpose(-1, -2)).add_(masses)
        to_psi += of_psi if blocks.fall is None else of_psi.mul_(blocks.of_keys[is_after])
        to_v += psi @ sums


def _sums_before(blocks: torch.Tensor, fall: torch.Tensor | None, *, reverse: bool) -> torch.Tensor:
    """For every block the sum of the blocks before it, or after it, over axis 2; a sum falls from block to block."""
    if blocks.device.type not in pivots_causal.ONE_BY_ONE:
        blocks = pad(blocks, (0, 0, 0, 0, -1, 1) if reverse else (0, 0, 0, 0, 1, -1))
        if fall is not None:
            return pivots_causal.falling_sums(blocks, fall.unsqueeze(1).pow, reverse=reverse)
        return blocks.flip(2).cumsum(2).flip(2) if reverse else blocks.cumsum(2)
    sums = torch.empty_like(blocks)
    added, before = blocks.unbind(2), sums.unbind(2)
    order = range(blocks.size(2) - 1, -1, -1) if reverse else range(blocks.size(2))
    before[order[0]].zero_()
    for last, now in zip(order, order[1:], strict=False):
        if fall is None:
            torch.add(before[last], added[last], out=before[now])
        else:
            torch.addcmul(added[last], before[last], fall, out=before[now])
    return sums


@dataclass(frozen=True)
class FarSummary:
    """What keys are to the features of a query; all but the shares is of constant size.

    Attributes:
        log_sums: ``(bsz, num_heads, r)``, ``log Σ_j exp(key_logs_jt)``, in the logs' precision.
        means: ``(bsz, num_heads, r, value_dim)``, ``Σ_j exp(key_logs_jt) v_j / Σ_j exp(key_logs_jt)``.
        positions: ``(bsz, num_heads, r)``, likewise of the slots ``j + 0.501``, in the logs' precision; no gradient.
            Halves, which equal keys give, so go up, and pads on the left do not move the band.
        shares: ``(bsz, num_heads, m, r)``, ``exp(key_logs_jt) / Σ_j' exp(key_logs_j't)``.
    """

    log_sums: torch.Tensor
    means: torch.Tensor
    positions: torch.Tensor
    shares: torch.Tensor


def summarise_far(key_logs: torch.Tensor, v: torch.Tensor, key_padding_mask: torch.Tensor | None) -> FarSummary:
    """Sum up the keys; ``(bsz, num_heads, m, r)``, ``(bsz, num_heads, m, value_dim)`` and ``(bsz, m)``, True = pad.

    With logs in float64, whatever the values are in, rounding moves no band by a slot.
    """
    if key_padding_mask is not None:
        key_logs = key_logs.masked_fill(key_padding_mask[:, None, :, None], -torch.inf)
    shares, log_sums = _Shares.apply(key_logs)
    slots = torch.arange(0.501, v.size(2), dtype=shares.dtype, device=v.device)
    positions = shares.detach().transpose(-1, -2) @ slots
    shares = shares.to(v.dtype)
    return FarSummary(log_sums, shares.transpose(-1, -2) @ v, positions, shares)


class _Shares(torch.autograd.Function):
    """``softmax(logs, 2)`` with ``logsumexp(logs, 2)``, in few kernels."""

    @staticmethod
    def forward(ctx, logs):
        shares = torch.softmax(logs, 2)
        ctx.save_for_backward(shares)
        return shares, logs.amax(2) - shares.amax(2).log_()

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_shares, grad_log_sums):
        (shares,) = ctx.saved_tensors
        products = grad_shares * shares
        return torch.addcmul(products, shares, (grad_log_sums - products.sum(2)).unsqueeze(2))


def near_far_at_expected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_logs: torch.Tensor,
    summary: FarSummary,
    key_padding_mask: torch.Tensor | None,
    *,
    window: int,
    need_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`near_far` with a query's band around the slot that its features expect, ``|j - ⌊p_i + 0.501⌋| ≤ W``.

    ``p_i`` is the mean slot of the keys under the features alone. Each query reads 2W + 1 keys: O(n (r + W) d). What
    the features give these keys is taken from what they give all; where what is left is rounding (1e-5 in float32),
    nothing is.

    Args:
        q, k, v: as for :func:`near_far`; ``q·k`` are the scores.
        query_logs: likewise; in float64, as the logs of the summary.
        summary: of all keys.
        key_padding_mask: ``(bsz, m)``, True = pad.
        window: W, in tokens.
        need_weights: also return A, ``(bsz, num_heads, n, m)``.
    """
    window = min(window, k.size(2) - 1)  # which reaches every key
    far = query_logs + summary.log_sums.unsqueeze(2)
    log_features = torch.log_softmax(far, -1)
    log_sums, features = far[..., :1] - log_features[..., :1], log_features.exp()
    with torch.no_grad():
        centre = (features @ summary.positions.unsqueeze(-1)).long()
        wanted = centre + torch.arange(-window, window + 1, device=q.device)
        slots = wanted.clamp(0, k.size(2) - 1)
        hidden = slots != wanted
        if key_padding_mask is not None:
            hidden |= key_padding_mask[:, None, None, :].expand(-1, slots.size(1), slots.size(2), -1).gather(3, slots)
    index = slots.flatten(2).unsqueeze(-1)

    def gathered(x):
        """``(b, h, m, c) -> (b, h, n, 2W + 1, c)``."""
        return x.gather(2, index.expand(-1, -1, -1, x.size(-1))).unflatten(2, slots.shape[2:])

    def at_slots(x, of_queries, where_hidden):
        """The products of what is gathered from x with what queries have, ``(b, h, n, 2W + 1)``."""
        return torch.where(hidden, where_hidden, (gathered(x) @ of_queries.unsqueeze(-1)).squeeze(-1))

    features, log_sums = features.to(q.dtype), log_sums.to(q.dtype)
    near, replaced = at_slots(k, q, -torch.inf), at_slots(summary.shares, features, 0.0)
    rounding = _ROUNDING * torch.finfo(q.dtype).eps
    left = threshold(1 - replaced.sum(-1, keepdim=True), rounding, 0.0)
    both = torch.softmax(torch.cat([near, log_sums + left.log()], -1), -1)
    near, scale = both[..., :-1], both[..., -1:] / left.clamp(min=rounding)
    near, features = torch.addcmul(near, scale, replaced, value=-1.0), scale * features
    values = (near.unsqueeze(-2) @ gathered(v)).squeeze(-2)
    parts = (x.flatten(0, 1) for x in (values, features, summary.means))
    values = torch.baddbmm(*parts).unflatten(0, values.shape[:2])
    if not need_weights:
        return values, None
    # a slot that is hidden has been moved onto one that may not be, and gets nothing; replaced shares cancel, but for
    # rounding
    weights = (features @ summary.shares.transpose(-1, -2)).scatter_add(-1, slots, near)
    return values, weights.clamp(min=0.0)
