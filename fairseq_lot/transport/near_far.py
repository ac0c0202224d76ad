"""near_far: softmax's kernel, exact near the diagonal and of low rank elsewhere, in time linear in the sentence length.

Written with whole matrices, for n queries i, m keys j and r features t:

    near_ij = s q_i·k_j
    far_ij = log Σ_t exp(query_logs_it + c_t + key_logs_jt)
    logs_ij = (near_ij if |i - j| ≤ W else far_ij) - slope |i - j| + key_log_mass_j
    values = softmax(logs, -1) v,    log_sums = logsumexp(logs, -1)

The code makes no n × m matrix. It cuts the queries into blocks of L. The neighbourhood of a block is the keys at most W
tokens away from it; queries and keys are multiplied there in a matrix of L × (L + 2W). The keys left of the
neighbourhood enter through one sum, those right of it through another. With the features φ = exp(query_logs + c) and
ψ = exp(key_logs + key_log_mass), without slopes, query i of block b gets

    numerator_i = Σ_{j in the neighbourhood} exp(logs_ij) v_j + φ_i·(S_left[b] + S_right[b])
    S_left[b] = Σ_{j left of the neighbourhood} ψ_j v_jᵀ,    S_right[b] likewise

and a denominator with 1 instead of v. S_left is a prefix sum over the blocks, S_right a suffix sum. Nothing is
subtracted, so there is no cancellation.

With slopes, :class:`_Decay` splits exp(-slope |i - j|) into three factors: from the key to the edge of its block, from
block to block, and from the edge of the query's block to the query.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fairseq_lot.numerics.autograd import once_in_full_precision
from fairseq_lot.numerics.devices import ways
from fairseq_lot.transport.pivots_causal import falling_sums

# Least number of queries in a block.
_BLOCK = 32
# Powers are scaled: each feature's largest value over the keys is 2**_HEADROOM, and a row's largest power of its scores
# and its query features is 1. The key with the largest value may stand in the row's band, where its feature does not
# count; the remaining mass is small then, and the headroom preserves it. Below _LEAST a row counts as empty. Query
# features divided by the row's mass are clamped to _MOST, so that their products with key features do not overflow.
# More headroom would cost precision: the rounding of a logarithm grows with it.
_HEADROOM, _LEAST, _MOST = 16.0, 2.0**-120, 2.0**104
# This file uses logarithms to base 2. On a CPU exp2 is four times as fast as exp, and thirty times near underflow.
_LOG2_E = math.log2(math.e)
# The two sides of a neighbourhood.
_LEFT, _RIGHT = 0, 1


def near_far(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_logs: Tensor | None,
    key_logs: Tensor | None,
    key_log_mass: Tensor | None = None,
    feature_bias: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    window: int,
    scale: float = 1.0,
    causal: bool = False,
    with_log_sums: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``softmax(logs) v`` and ``logsumexp(logs)`` with the logs at the top of this file.

    Time and memory are O((n + m) (r + W + block) d), forward and backward.

    Each row is computed relative to its largest exponential. That may be the feature of a key whose features do not
    count in the row: a key in its band or, if causal, a later key. A row keeps full precision if its sum is at least
    e^-85 of that exponential; below e^-110 it counts as empty. docs/internals.md derives a bound from this.

    Args:
        q: ``(bsz, num_heads, n, d)``; k: ``(bsz, num_heads, m, d)``.
        v: ``(bsz, num_heads, m, value_dim)``; finite also at keys without mass.
        query_logs: ``(bsz, num_heads, n, r)``, logs of the queries' features; None: attend to the band only.
        key_logs: ``(bsz, num_heads, m, r)``, logs of the keys' features; None with query_logs.
        key_log_mass: ``(bsz, num_heads or 1, m)``, -inf = no mass; None: equal masses.
        feature_bias: c, ``(num_heads, r)``; None: zero.
        slopes: ``(num_heads,)``, at least 0; they get no gradient; None: zero.
        window: W, in tokens.
        scale: s; ``s q·k`` are the scores.
        causal: hide the keys after the query; needs n = m.
        with_log_sums: also return ``logsumexp(logs)``.

    Returns:
        The values, ``(bsz, num_heads, n, value_dim)``, zero in rows without mass; the log sums,
        ``(bsz, num_heads, n)``, with the lowest finite number in rows without mass, or None.
    """
    settings = window, scale, causal, with_log_sums
    return _NearFar.apply(q, k, v, query_logs, key_logs, key_log_mass, feature_bias, slopes, settings)


@functools.lru_cache(16)
def _band(length, width, before, window, causal, dtype, device):
    """Three masks, ``(length, width)``: 1 in the band, its logs, 1 where features count; cached for all layers."""
    every = torch.ones(length, width, dtype=dtype, device=device)
    band = every.triu(before - window).tril_(before + (0 if causal else window))
    return band, band.log(), every.tril_(before - window - 1) if causal else every - band


class _Layout:
    """The cut of n queries and m keys into blocks of queries, each with a neighbourhood of keys.

    Attributes:
        length: L, the number of queries in a block.
        count: the number of blocks.
        before, after: numbers of keys of a neighbourhood before and after its block.
        width: number of keys in a neighbourhood: before + length + after.
        sides: the sides on which keys outside of a neighbourhood count: ``_LEFT``, and ``_RIGHT`` unless causal.
        band: ``(length, width)``, 1 in the band, 0 elsewhere.
        log_band: ``(length, width)``, 0 in the band, -inf elsewhere.
        outside: ``(length, width)``, 1 where features count, 0 elsewhere.
    """

    def __init__(self, n: int, m: int, window: int, causal: bool, like: Tensor):
        self.n, self.m, longest = n, m, max(n, m)
        dense = ways(like).dense_length
        is_one = longest <= max(dense, window)
        self.length = longest if is_one else max(_BLOCK, window)
        self.count = -(-longest // self.length)
        self.before = 0 if is_one else window
        self.after = 0 if is_one or causal else window
        self.width = self.before + self.length + self.after
        self.sides = (_LEFT,) if causal else (_LEFT, _RIGHT)
        # do not cache large masks or fake tensors
        make = _band if type(like) is Tensor and self.length <= dense else _band.__wrapped__
        sizes = self.length, self.width, self.before, window, causal
        self.band, self.log_band, self.outside = make(*sizes, like.dtype, like.device)

    def queries(self, x: Tensor) -> Tensor:
        """``(b, h, n, c) -> (b, h, count, length, c)``, padded with zeros."""
        missing = self.count * self.length - x.size(2)
        return (pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (self.count, self.length))

    def for_products(self, blocks: Tensor) -> Tensor:
        """The blocks, contiguous: otherwise each product that uses them would copy them."""
        return blocks if self.count == 1 else blocks.contiguous()

    def tokens(self, blocks: Tensor) -> Tensor:
        """The inverse of :meth:`queries`."""
        return blocks.flatten(2, 3)[:, :, : self.n]

    def neighbours(self, x: Tensor, value: float = 0.0) -> Tensor:
        """The keys in each neighbourhood, ``(b, h, m, c) -> (b, h, count, width, c)``; ``value`` where no key is."""
        missing = self.count * self.length - x.size(2)
        if self.before or self.after or missing:
            x = pad(x, (0, 0, self.before, self.after + missing), value=value)
        if self.count == 1:
            return x.unsqueeze(2)
        # copied once here: each product would copy a view of overlapping blocks
        return x.unfold(2, self.width, self.length).transpose(-1, -2).contiguous()

    def keys(self, neighbours: Tensor) -> Tensor:
        """For each key the sum over the neighbourhoods that contain it; the transpose of :meth:`neighbours`."""
        own = neighbours[..., self.before : self.before + self.length, :]
        if self.count > 1:
            own = own.contiguous()
            if self.before:
                own[:, :, :-1, self.length - self.before :] += neighbours[:, :, 1:, : self.before]
            if self.after:
                own[:, :, 1:, : self.after] += neighbours[:, :, :-1, -self.after :]
        return own.flatten(2, 3)[:, :, : self.m]

    def leaving(self, neighbours: Tensor, side: int) -> Tensor:
        """The ``length`` keys of each neighbourhood that the next neighbourhood does not contain; a view.

        For the left side the next neighbourhood is the one to the right, and its first keys leave. So the keys left of
        a neighbourhood are the keys that left one of the earlier ones, each once. The right side is the mirror image.

        Args:
            neighbours: ``(b, h, count, width, c)``, from :meth:`neighbours`.
            side: ``_LEFT`` or ``_RIGHT``.

        Returns:
            ``(b, h, count, length, c)``.
        """
        return neighbours[..., : self.length, :] if side == _LEFT else neighbours[..., self.width - self.length :, :]


class _NoDecay:
    """Sums over the keys on both sides of a neighbourhood, without slopes: both sides share one sum and one product.

    :class:`_Decay` has the same methods for slopes. Here decays are 1, so most methods return their argument.

    Attributes:
        log_band, outside: ``(length, width)``, as in the layout.
    """

    def __init__(self, layout: _Layout):
        self.num_sides = len(layout.sides)
        self.log_band, self.outside = layout.log_band, layout.outside

    def of_keys(self, x: Tensor, side: int) -> Tensor:
        """Features of the keys that leave a neighbourhood, times the decay to the edge of their block."""
        return x

    def grad_of_keys(self, grad: Tensor, side: int) -> Tensor:
        """The transpose of :meth:`of_keys`; may overwrite the gradient."""
        return grad

    def of_queries(self, phi: Tensor) -> Tensor:
        """Features of the queries, ``(..., r)``, in the layout of :meth:`join`: 2r columns if sides stay separate."""
        return phi

    def grad_of_queries(self, grad: Tensor) -> Tensor:
        """The transpose of :meth:`of_queries`; may overwrite the gradient."""
        return grad

    def join(self, sums: list[Tensor], axis: int) -> Tensor:
        """One tensor for the sums of all sides: here their sum, with decay their concatenation; may overwrite them."""
        return sums[0] if len(sums) == 1 else sums[0].add_(sums[1])

    def split(self, grad: Tensor, axis: int) -> list[Tensor]:
        """The transpose of :meth:`join`."""
        return [grad] * self.num_sides

    def sums_before(self, blocks: Tensor, *, reverse: bool) -> Tensor:
        """For each block the sum of all blocks before it along axis 2; with ``reverse`` of all blocks after it."""
        if ways(blocks).adds_one_by_one:
            return _added_one_by_one(blocks, torch.add, reverse)
        blocks = _shifted(blocks, reverse)
        return blocks.flip(2).cumsum(2).flip(2) if reverse else blocks.cumsum(2)


class _Decay(_NoDecay):
    """Sums over the keys weighted by ``exp(-slope |i - j|)``. Each side decays differently and has a sum of its own.

    Attributes:
        log_band, outside: ``(num_heads, 1, length, width)``, as in the layout, with the decay.
        key_decay: for each side, ``(num_heads, 1, length, 1)``: from a key to the edge of its block towards the query.
        block_decay: ``(num_heads, 1, 1)``: from one block to the next.
        query_decay: for each side, like ``key_decay``: from the edge of a key's block to a query in the next block.
    """

    def __init__(self, layout: _Layout, slopes: Tensor, window: int):
        super().__init__(layout)
        like = layout.band
        slopes = slopes.to(like.dtype)[:, None, None, None] * -_LOG2_E
        slots = torch.arange(layout.width, dtype=like.dtype, device=like.device)
        own = slots[: layout.length, None]
        near = slopes * (own + layout.before - slots).abs_()
        self.log_band, self.outside = layout.log_band + near, layout.outside * near.exp2_()
        if layout.count > 1:
            from_start, to_end = (slopes * (own + window)).exp2_(), (slopes * (layout.length - own)).exp2_()
            self.key_decay = (to_end, from_start)
            self.query_decay = (from_start, to_end)[: self.num_sides]
            self.block_decay = (slopes[:, 0] * layout.length).exp2_()

    def of_keys(self, x: Tensor, side: int) -> Tensor:
        return x * self.key_decay[side]

    def grad_of_keys(self, grad: Tensor, side: int) -> Tensor:
        return grad.mul_(self.key_decay[side])

    def of_queries(self, phi: Tensor) -> Tensor:
        return torch.cat([phi * decay for decay in self.query_decay], -1)

    def grad_of_queries(self, grad: Tensor) -> Tensor:
        parts = self.split(grad, -1)
        first, *second = (x.mul_(decay) for x, decay in zip(parts, self.query_decay, strict=True))
        return first.add_(second[0]) if second else first

    def join(self, sums: list[Tensor], axis: int) -> Tensor:
        return sums[0] if len(sums) == 1 else torch.cat(sums, axis)

    def split(self, grad: Tensor, axis: int) -> list[Tensor]:
        return list(grad.chunk(self.num_sides, axis))

    def sums_before(self, blocks: Tensor, *, reverse: bool) -> Tensor:
        if ways(blocks).adds_one_by_one:
            return _added_one_by_one(blocks, self._decayed_sum, reverse)
        power = self.block_decay.unsqueeze(1).pow
        return falling_sums(_shifted(blocks, reverse), power, reverse=reverse)

    def _decayed_sum(self, before, added, *, out):
        torch.addcmul(added, before, self.block_decay, out=out)


class _NearFar(torch.autograd.Function):
    """:func:`near_far` in blocks; stores the kernel in the neighbourhoods and the features for the gradients."""

    @staticmethod
    def forward(ctx, q, k, v, query_logs, key_logs, key_log_mass, feature_bias, slopes, settings):
        window, scale, causal, with_log_sums = settings
        layout = _Layout(q.size(2), k.size(2), window, causal, q)
        decay = _NoDecay(layout) if slopes is None else _Decay(layout, slopes, window)
        lowest = torch.finfo(q.dtype).min
        q, k, v = layout.for_products(layout.queries(q)), layout.neighbours(k), layout.neighbours(v)
        log_mass = None
        if key_log_mass is not None:
            log_mass = (key_log_mass * _LOG2_E).unsqueeze(-1)
        elif layout.count > 1 or layout.n > layout.m:  # neighbourhoods have slots without a key
            log_mass = k.new_zeros(1, 1, layout.m, 1)
        bias = decay.log_band
        if log_mass is not None:
            bias = bias + layout.neighbours(log_mass, -torch.inf).transpose(-1, -2)
        near = q @ k.transpose(-1, -2)
        phi = psi = sums = mass_sums = None
        if query_logs is None:
            plan = torch.add(bias, near, alpha=scale * _LOG2_E)
            peak = plan.amax(-1, keepdim=True).clamp_(min=lowest)
            plan.sub_(peak).exp2_()
        else:
            psi = key_logs * _LOG2_E if log_mass is None else torch.add(log_mass, key_logs, alpha=_LOG2_E)
            shift = psi.amax(2, keepdim=True).clamp_(min=lowest).sub_(_HEADROOM)  # added to the queries' logs below
            psi = layout.neighbours(psi.sub_(shift).exp2_())
            if feature_bias is not None:
                shift = torch.add(shift, feature_bias.unsqueeze(-2), alpha=_LOG2_E)
            by_feature = shift.unsqueeze(2), layout.queries(query_logs), _LOG2_E
            plan, phi, peak = _relative_powers((bias, near, scale * _LOG2_E), by_feature)
            plan.addcmul_(phi @ psi.transpose(-1, -2), decay.outside)
        mass = plan.sum(-1, keepdim=True)
        values = plan @ v
        if layout.count > 1 and phi is not None:
            sums, mass_sums = _sums_outside(layout, decay, psi, v)
            far = decay.of_queries(phi)
            mass += far @ mass_sums.transpose(-1, -2)
            values += far @ sums
        mass.clamp_(min=_LEAST)
        values.div_(mass)
        log_sums = None
        if with_log_sums:
            log_sums = mass.log2().add_(peak).div_(_LOG2_E).masked_fill_(mass == _LEAST, lowest)
            log_sums = layout.tokens(log_sums).squeeze(-1)
        ctx.save_for_backward(q, k, v, values, plan, mass, phi, psi, sums, mass_sums)
        ctx.layout, ctx.decay, ctx.scale = layout, decay, scale
        ctx.mass_shape = None if key_log_mass is None else key_log_mass.shape
        return layout.tokens(values), log_sums

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_values, grad_log_sums):
        q, k, v, values, plan, mass, phi, psi, sums, mass_sums = ctx.saved_tensors
        layout, decay, needs = ctx.layout, ctx.decay, ctx.needs_input_grad
        # a row is numerator / denominator: these are the gradients of both, times the denominator
        grad_values, plan = layout.for_products(layout.queries(grad_values)), plan / mass
        grad_mass = (grad_values * values).sum(-1, keepdim=True).neg_()
        if grad_log_sums is not None:
            grad_mass += layout.queries(grad_log_sums.unsqueeze(-1))
        grad_v = plan.transpose(-1, -2) @ grad_values
        grad_plan = (grad_values @ v.transpose(-1, -2)).add_(grad_mass)
        grad_query_logs = grad_key_logs = grad_bias = None
        if phi is not None:
            phi = (phi / mass).clamp_(max=_MOST)
            grad_far = grad_plan * decay.outside
            grad_phi, grad_psi = grad_far @ psi, grad_far.transpose(-1, -2) @ phi
            if sums is not None:
                grad_far = (grad_values @ sums.transpose(-1, -2)).addcmul_(grad_mass, mass_sums)
                grad_phi += decay.grad_of_queries(grad_far)
                far = decay.of_queries(phi)
                grads = far.transpose(-1, -2) @ grad_values, grad_mass.transpose(-1, -2) @ far
                _add_grads_outside(layout, decay, psi, v, *grads, grad_psi, grad_v)
            grad_query_logs = layout.tokens(grad_phi.mul_(phi))
            grad_key_logs = layout.keys(grad_psi.mul_(psi))
            if needs[6]:
                grad_bias = grad_query_logs.sum((0, 2))
        grad_near = grad_plan.mul_(plan).mul_(layout.band * ctx.scale)
        grad_q = layout.tokens(grad_near @ k)
        grad_k = layout.keys(grad_near.transpose(-1, -2) @ q)
        grad_log_mass = None
        if needs[5]:
            grad_log_mass = layout.keys(grad_near.sum(-2).unsqueeze(-1)).squeeze(-1) / ctx.scale
            if grad_key_logs is not None:
                grad_log_mass += grad_key_logs.sum(-1)
            grad_log_mass = grad_log_mass.sum_to_size(ctx.mass_shape)
        grad_v = layout.keys(grad_v)
        return grad_q, grad_k, grad_v, grad_query_logs, grad_key_logs, grad_log_mass, grad_bias, None, None


def _relative_powers(*parts):
    """For parts ``(x, y, α)``: ``2^(x + α y - peak)`` of each, then peak, each row's largest ``x + α y`` of all."""
    like = parts[0][1]
    if ways(like).adds_one_by_one or torch.compiler.is_compiling():
        whole = logs = [torch.add(x, y, alpha=alpha) for x, y, alpha in parts]
    else:  # in one tensor, which takes fewer kernels; on a CPU the products would copy its parts; torch.compile fails
        widths = [y.size(-1) for _, y, _ in parts]
        whole = [like.new_empty(*like.shape[:-1], sum(widths))]
        logs = whole[0].split(widths, -1)
        for (x, y, alpha), log in zip(parts, logs, strict=True):
            torch.add(x, y, alpha=alpha, out=log)
    peak = functools.reduce(torch.maximum, (x.amax(-1, keepdim=True) for x in whole))
    for x in whole:
        x.sub_(peak).exp2_()
    return *logs, peak


def _sums_outside(layout, decay, psi, v):
    """``Σ_j ψ_j v_jᵀ`` and ``Σ_j ψ_j`` over the keys outside of each neighbourhood, both sides joined.

    Args:
        layout, decay: the blocks, and how their sums decay.
        psi: ``(b, h, count, width, r)``, features of the keys in each neighbourhood.
        v: ``(b, h, count, width, c)``, their values.

    Returns:
        ``(b, h, count, r, c)`` and ``(b, h, count, 1, r)``; with decay 2r instead of r, unless causal.
    """
    sums: list[Tensor] = []
    mass_sums: list[Tensor] = []
    for side in layout.sides:
        keys = decay.of_keys(layout.leaving(psi, side), side)
        products, masses = keys.transpose(-1, -2) @ layout.leaving(v, side), keys.sum(-2, keepdim=True)
        sums.append(decay.sums_before(products, reverse=side == _RIGHT))
        mass_sums.append(decay.sums_before(masses, reverse=side == _RIGHT))
    return decay.join(sums, -2), decay.join(mass_sums, -1)


def _add_grads_outside(layout, decay, psi, v, grad_sums, grad_mass_sums, grad_psi, grad_v):
    """Add to ``grad_psi`` and ``grad_v`` the gradients that flow through :func:`_sums_outside`."""
    grads = zip(layout.sides, decay.split(grad_sums, -2), decay.split(grad_mass_sums, -1), strict=True)
    for side, of_sums, of_masses in grads:
        # a key left of a neighbourhood gets its gradient from later blocks, so the order is reversed
        of_sums, of_masses = (decay.sums_before(x, reverse=side == _LEFT) for x in (of_sums, of_masses))
        keys = decay.of_keys(layout.leaving(psi, side), side)
        of_psi = (layout.leaving(v, side) @ of_sums.transpose(-1, -2)).add_(of_masses)
        layout.leaving(grad_psi, side).add_(decay.grad_of_keys(of_psi, side))
        layout.leaving(grad_v, side).add_(keys @ of_sums)


def _shifted(blocks, reverse):
    """The blocks moved by one place forward, or back with ``reverse``; zeros at the free end."""
    return pad(blocks, (0, 0, 0, 0, -1, 1) if reverse else (0, 0, 0, 0, 1, -1))


def _added_one_by_one(blocks: Tensor, add: Callable[..., object], reverse: bool) -> Tensor:
    """For each block the sum of the blocks before it along axis 2; with ``reverse`` of the blocks after it.

    Args:
        blocks: the summands.
        add: called as ``add(sum so far, next block, out=new sum)``.
        reverse: sum from the last block to the first.
    """
    sums = torch.empty_like(blocks)
    added, before = blocks.unbind(2), sums.unbind(2)
    order = range(blocks.size(2) - 1, -1, -1) if reverse else range(blocks.size(2))
    before[order[0]].zero_()
    for last, now in zip(order, order[1:], strict=False):
        add(before[last], added[last], out=before[now])
    return sums
