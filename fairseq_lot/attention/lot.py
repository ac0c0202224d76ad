"""LOT attention: a coupling through learnable pivots, linear in the sentence length.

:meth:`Lot.attend_scored` is the mechanism: scores with the pivots, the coupling, the values. ``attend`` and ``probes``
compute it faster. ``summarise`` and ``attend_summary`` compute it for cross-attention in decoding, ``causal_step`` for
self-attention in decoding.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fairseq_lot.attention.base import AttentionOutput, DecodeCache, Masks, Mechanism, Traits, without_pads
from fairseq_lot.attention.convolution import TokenConvolution
from fairseq_lot.attention.options import PivotOptions, option
from fairseq_lot.errors import InputError
from fairseq_lot.kernels import choice as kernels
from fairseq_lot.kernels.naive import LotInputs, LotSettings
from fairseq_lot.numerics.devices import ways
from fairseq_lot.transport.marginals import Pads, at_least_float32, uniform_log_mass
from fairseq_lot.transport.pivots import Coupling, PivotProblem, key_side, pivot_coupling, pivot_scores
from fairseq_lot.transport.pivots_causal import PrefixState, absorb, empty_prefix, prefix_apply


@dataclass(frozen=True)
class LotOptions(PivotOptions):
    """Options of LOT: pivots, half-updates of the query-side plan, learnt parts, a convolution of the values."""

    query_updates: int | None = option(
        None,
        "half-updates of the query-side plan; 1 uncouples the queries; default: num_updates, at cross and decoder 1",
        minimum=1,
    )
    learn_pivots: bool = option(True, "learn the pivots; false: they keep their random initial values")
    learn_masses: bool = option(True, "learn the masses of the pivots; false: they stay equal")
    conv_kernel: int | None = option(
        None, "odd width of a depthwise convolution of V over tokens, encoder only; default: none", minimum=1
    )

    def __post_init__(self):
        super().__post_init__()
        if self.conv_kernel is not None and self.conv_kernel % 2 != 1:
            raise InputError(f"conv_kernel must be odd, got {self.conv_kernel}")

    def at_site(self, site: str) -> "LotOptions":
        if site == "encoder":
            return self
        query_updates = 1 if self.query_updates is None else self.query_updates
        # the causal form has no masses, and torch's data parallelism fails if a parameter has no gradient
        return replace(self, query_updates=query_updates, learn_masses=self.learn_masses and site != "decoder")


class Lot(Mechanism):
    """``A = n·Γ1 diag(1/σ) Γ2ᵀ``: queries and keys are coupled through r pivots with masses σ [LOTFormer].

    Rows of A sum to 1 after any number of updates; columns converge to n/m.

    With the default initialisation ``E_z[exp(z·x) exp(z·y)] = exp(‖x + y‖²/2)``. The marginals absorb its factors that
    depend on x or y alone, so LOT starts as a positive-feature estimate of Sinkhorn attention.

    As soft clustering: ``A_ij = Σ_t p(t|i) p(j|t)``, query i chooses pivot t, and t chooses key j.

    With ``query_updates=1`` row i depends on query i alone. The causal form has one marginal:
    ``A_ij = Σ_t softmax(s·q_i·z/ε)_t exp(s·k_j·z_t/ε) / Σ_{j' ≤ i} exp(s·k_j'·z_t/ε)`` for j ≤ i. A causal and exactly
    doubly stochastic A would be the identity ([CETA], §8). The causal form does not use masses and num_updates.

    ``lot_plan`` of ``tests/reference.py`` computes the same in plain loops.

    Attributes:
        pivots: ``(num_heads, r, head_dim)``, in the space of q and k; a parameter if learnt, else a buffer.
        mass_logits: ``(num_heads, r)``, log σ up to a constant; a parameter if learnt and used, else a buffer.
        convolution: applied to V first; or None.
    """

    options_class = LotOptions
    options: LotOptions
    pivots: Tensor
    mass_logits: Tensor

    def __init__(self, **context: Any) -> None:
        super().__init__(**context)
        options = self.options
        self.query_updates = options.num_updates if options.query_updates is None else options.query_updates
        couples_queries, mixes_values = self.query_updates > 1, options.conv_kernel is not None
        self.traits = Traits(
            couples_queries=couples_queries,
            uncoupling_options=(("query_updates", 1),),
            mixes_values=mixes_values,
            is_causal=not (couples_queries or mixes_values),
            can_be_causal=True,
        )
        pivots = self.drawn(options.num_pivots, options.seed, options.pivot_std)
        self.register("pivots", pivots, learn=options.learn_pivots)
        has_masses = max(options.num_updates, self.query_updates) > 1  # one update of either plan is a softmax
        self.register("mass_logits", torch.zeros(pivots.shape[:2]), learn=options.learn_masses and has_masses)
        self.convolution = None
        if options.conv_kernel is not None:
            sizes = {"num_heads": self.num_heads, "head_dim": self.head_dim}
            self.convolution = TokenConvolution(**sizes, kernel=options.conv_kernel)

    def log_masses(self) -> Tensor:
        """log σ, ``(num_heads, r)``, at least float32."""
        return torch.log_softmax(at_least_float32(self.mass_logits), -1)

    def scores(self, x: Tensor) -> Tensor:
        """``s·x·z/ε`` of queries or keys x with each pivot z, ``(bsz, num_heads, len, r)``, at least float32."""
        return pivot_scores(at_least_float32(x), self._scaled_pivots())

    def _scaled_pivots(self) -> Tensor:
        return at_least_float32(self.pivots) * (self.scaling / self.options.epsilon)

    def coupling(
        self, q: Tensor, k: Tensor, query_padding_mask: Pads = None, key_padding_mask: Pads = None
    ) -> Coupling:
        return self._coupling_of(self.scores(q), self.scores(k), query_padding_mask, key_padding_mask)

    def pivot_problem(self, q: Tensor, k: Tensor) -> PivotProblem:
        updates = {"query_updates": self.query_updates, "key_updates": self.options.num_updates}
        return PivotProblem(self.scores(q), self.scores(k), self.log_masses(), **updates)

    def _coupling_of(self, query_scores, key_scores, query_pads, key_pads):
        return pivot_coupling(
            query_scores,
            key_scores,
            uniform_log_mass(query_pads, query_scores).unsqueeze(-2),
            uniform_log_mass(key_pads, key_scores).unsqueeze(-2),
            self.log_masses(),
            query_updates=self.query_updates,
            key_updates=self.options.num_updates,
        )

    def attend_scored(
        self, query_scores: Tensor, key_scores: Tensor, v: Tensor, masks: Masks, need_weights: bool
    ) -> AttentionOutput:
        """:meth:`attend` for given scores: move the values to the pivots, then to the queries."""
        if masks.causal:
            scores = query_scores, key_scores
            return self._attend_prefix(*scores, v, masks.key_pads, {}, need_weights, with_state=False)[0]
        coupling = self._coupling_of(query_scores, key_scores, masks.query_pads, masks.key_pads)
        from_queries, to_keys = coupling.factors
        at_pivots = coupling.to_keys.apply(self._mixed(v.to(to_keys.dtype)))  # (bsz, num_heads, r, value_dim)
        return AttentionOutput(self.drop(from_queries) @ at_pivots, coupling.conditional if need_weights else None)

    def _mixed(self, v: Tensor) -> Tensor:
        """The values after the convolution; unchanged if there is none."""
        return v if self.convolution is None else self.convolution(v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, need_weights: bool) -> AttentionOutput:
        """:meth:`attend_scored`, on a GPU by one fused kernel."""
        if not masks.causal and not need_weights and kernels.wanted(q):
            options, dropout = self.options, self.dropout if self.drops else 0.0
            settings = LotSettings(self.scaling / options.epsilon, self.query_updates, options.num_updates, dropout)
            inputs = LotInputs(q, k, self._mixed(v), self.pivots, self.log_masses(), masks.query_pads, masks.key_pads)
            values = kernels.lot(inputs, settings)
            if values is not None:
                return AttentionOutput(values)
        return self.attend_scored(self.scores(q), self.scores(k), v, masks, need_weights)

    def probes(self, like: Tensor) -> Tensor | None:
        """The scaled pivots on a CPU, where products take the time; None elsewhere: the kernels need q and k."""
        probes = self._scaled_pivots()
        return probes if ways(like).projects_probes and like.dtype == probes.dtype else None

    def summarise(self, k: Tensor, v: Tensor, key_padding_mask: Pads = None, need_weights: bool = False) -> DecodeCache:
        """``Γ2ᵀV/σ``, ``(bsz, num_heads, r, value_dim)``, and with ``need_weights`` ``Γ2ᵀ/σ``."""
        k, v = without_pads(k, key_padding_mask), without_pads(v, key_padding_mask)
        scores = self.scores(k)
        log_b = uniform_log_mass(key_padding_mask, scores).unsqueeze(-2)
        to_keys = key_side(scores, log_b, self.log_masses(), num_updates=self.options.num_updates)
        summary = {"at_pivots": to_keys.apply(self._mixed(v.to(scores.dtype)))}
        return {**summary, "to_keys": to_keys.conditional} if need_weights else summary

    def attend_summary(self, q: Tensor, summary: DecodeCache, need_weights: bool = False) -> AttentionOutput:
        scores = self._scores_by_head(q.transpose(0, 1))
        to_pivots = torch.softmax(scores, -1).transpose(0, 1)  # Γ1/a after one half-update
        weights = to_pivots @ summary["to_keys"] if need_weights and "to_keys" in summary else None
        return AttentionOutput(self.drop(to_pivots) @ summary["at_pivots"], weights).to(q.dtype)

    def causal_step(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Pads, cache: DecodeCache, need_weights: bool
    ) -> tuple[AttentionOutput, DecodeCache]:
        """The cache is a :class:`PrefixState`, of constant size, and with ``need_weights`` the scores of all keys."""
        if q.size(2) == k.size(2) == 1 and not need_weights:
            return self._next_token(q, k, v, key_padding_mask, cache)
        k, v = without_pads(k, key_padding_mask), without_pads(v, key_padding_mask)
        scores = self.scores(q), self.scores(k)
        output, cache = self._attend_prefix(*scores, v, key_padding_mask, cache, need_weights)
        return output.to(q.dtype), cache

    def _next_token(self, q, k, v, key_padding_mask, cache):
        """:meth:`causal_step` for one token, without weights, in few kernels: their number decides a step's time."""
        both = torch.cat([x.permute(1, 2, 0, 3) for x in (q, k)], 1)  # (num_heads, 2, bsz, head_dim)
        scores = self._scores_by_head(both).permute(2, 0, 1, 3)  # (bsz, num_heads, 2, r)
        v = v.squeeze(2).to(scores.dtype, copy=key_padding_mask is not None)
        if key_padding_mask is not None:
            pads = key_padding_mask.unsqueeze(-1)
            scores[:, :, 1].masked_fill_(pads, -torch.inf)
            v.masked_fill_(pads, 0.0)
        after = absorb(_prefix(cache) or empty_prefix(scores, v), scores[:, :, 1], v)
        # softmax of both rows, of which the query's is used: slicing first would cost a kernel
        to_pivots = torch.softmax(scores, -1)[:, :, :1]
        return AttentionOutput(self.drop(to_pivots) @ after.means).to(q.dtype), vars(after)

    def _scores_by_head(self, x):
        """:meth:`scores` of ``(num_heads, i, j, head_dim)``, in one kernel: faster for few tokens."""
        x, pivots, scale = at_least_float32(x), at_least_float32(self.pivots), self.scaling / self.options.epsilon
        scores = torch.baddbmm(x.new_empty(()), x.flatten(1, 2), pivots.transpose(-1, -2), beta=0, alpha=scale)
        return scores.unflatten(1, x.shape[1:3])

    def _attend_prefix(self, query_scores, key_scores, v, key_pads, cache, need_weights, *, with_state=True):
        """The output of causal attention, and the next cache (empty without ``with_state``)."""
        to_pivots = torch.softmax(query_scores, -1)
        if key_pads is not None:
            key_scores = key_scores.masked_fill(key_pads[:, None, :, None], -torch.inf)
        v = v.to(key_scores.dtype)
        values, after = prefix_apply(self.drop(to_pivots), key_scores, v, _prefix(cache), with_state=with_state)
        following = {} if after is None else vars(after)
        if not need_weights or (cache and "key_scores" not in cache):
            return AttentionOutput(values), following
        key_scores = torch.cat([cache["key_scores"], key_scores], 2) if cache else key_scores
        identity = torch.eye(key_scores.size(2), dtype=v.dtype, device=v.device)
        weights, _ = prefix_apply(to_pivots, key_scores, identity.expand(*key_scores.shape[:2], -1, -1))
        return AttentionOutput(values, weights), {**following, "key_scores": key_scores}


def _prefix(cache: DecodeCache) -> PrefixState | None:
    return PrefixState(cache["log_sums"], cache["means"]) if cache else None
