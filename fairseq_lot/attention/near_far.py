"""near_far attention: softmax's kernel, exact for near tokens and of low rank for far ones."""

import functools
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fairseq_lot.attention.base import AttentionOutput, DecodeCache, Masks, Mechanism, Traits, joined_pads, without_pads
from fairseq_lot.attention.by_length import (
    attend_by_length,
    attend_by_row,
    leading_pads,
    split_by_length,
    with_zero_gradients,
)
from fairseq_lot.attention.options import Options, option, prior_option
from fairseq_lot.attention.sinkhorn import Sinkhorn, SinkhornOptions
from fairseq_lot.attention.softmax import Softmax, SoftmaxOptions
from fairseq_lot.errors import InputError
from fairseq_lot.kernels import choice as kernels
from fairseq_lot.kernels.naive import NO_MASS, ExpectedKeys, NearFarKept, NearFarSettings
from fairseq_lot.numerics.devices import ways
from fairseq_lot.numerics.log_domain import pad_log_mass
from fairseq_lot.transport.expected_band import FarSummary, near_far_at_expected, summarise_far
from fairseq_lot.transport.exporting import is_exporting
from fairseq_lot.transport.features import feature_logs, tangent_logs, tangents
from fairseq_lot.transport.marginals import Pads, at_least_float32, without_empty
from fairseq_lot.transport.near_far import near_far
from fairseq_lot.transport.pivots_causal import PrefixState, absorb, empty_prefix, prefix_apply
from fairseq_lot.transport.positions import alibi_slopes

# The value of exact_up_to that a swap writes. Up to about this length softmax is faster on a CPU: `python -m benchmarks
# --mechanism softmax --mechanism near_far --lengths 256 384 512 640 768 --threads 1 --out FOLDER` shows the crossing
# between 384 and 640 tokens, forward and backward, with heads of 32 and of 64.
EXACT_UP_TO = 512
# Prefix of cache names at cross: keys and values of the short sentences in a mixed batch.
_SHORT = "short_"
# A row's own score may be this far below the row's reference exponent; the row then loses less than a rounding.
_LARGEST_GAP = 60.0


@dataclass(frozen=True)
class NearFarOptions(Options):
    """Options of near_far. Defaults were chosen on validation data: results/log/near_far.md."""

    num_features: int = option(32, "features per head, r: the rank of the far part; 0: only the band", minimum=0)
    window: int = option(8, "W: scores of keys at most so many tokens away are exact", minimum=0)
    num_updates: int = option(
        1, "half-updates, rows last: 1 is softmax with this kernel; more bring columns near their marginal", minimum=1
    )
    band: str = option(
        "diagonal",
        "centre of a query's exact keys: diagonal, its own position, or expected, the position that the features "
        "expect; at cross always expected",
        choices=("diagonal", "expected"),
    )
    prior: str | None = prior_option()
    exact_up_to: int = option(
        0,
        "E: sentences of at most so many keys, and in the decoder the first so many tokens, get the exact kernel "
        f"(softmax with one update), longer ones the linear form; default of swap: {EXACT_UP_TO}",
        minimum=0,
    )
    tangents: bool = option(
        False,
        "the far part uses tangents of log Σ exp(scores), which stay in range for any norm of q and k; not in the "
        "decoder's self-attention; default of swap: true",
    )
    learn_features: bool = option(True, "learn the features; false: they keep their random initial values")
    seed: int = option(0, "seed of the initial features", minimum=0)

    def __post_init__(self):
        super().__post_init__()
        if self.band == "expected" and not self.num_features:
            raise InputError("num_features must be at least 1 with band expected, got 0")
        if self.band == "expected" and self.num_updates > 1:
            raise InputError(f"num_updates must be 1 with band expected, got {self.num_updates}")
        if self.band == "expected" and self.prior is not None:
            raise InputError(f"band expected has no prior, got {self.prior}; leave out one of both")

    def at_site(self, site: str) -> "NearFarOptions":
        if site != "cross" or self.num_updates > 1:
            return self
        return replace(self, band="expected", prior=None)


class NearFar(Mechanism):
    """``A = diag(u) K̃ diag(w)``: exact scores within a window, features elsewhere, T half-updates, rows last.

        K̃_ij = exp(s·q_i·k_j)     for |i - j| ≤ W
        K̃_ij = φ(q_i)·ψ(k_j)      elsewhere
        φ_t(q) = exp(s·q·z_t - s‖q‖²/2 + c_t) / r
        ψ_t(k) = exp(s·k·z_t - s‖k‖²/2)

    With ``tangents``, except in the causal form,

        φ_t(q) = exp(s·(q - z_t)·k̄_t + c_t) / r
        ψ_t(k) = exp(s·k·z_t),                   k̄_t the mean of the keys by ψ_t

    Then ``Σ_j φ_t(q) ψ_t(k_j)`` is ``exp(c_t) / r`` times the exponential of the tangent of log Σ_j exp(s·q·k_j) at
    q = z_t. The tangent is exact at z_t and a lower bound elsewhere, for any norms of q and k.

    The prior ``alibi`` multiplies both by ``exp(-slope·|i - j|)``, with one slope per head [ALiBi].

    With initial values, z ~ N(0, √d) and c = 0, φ·ψ is an unbiased estimate of exp(s·q·k): the positive features of
    [FAVOR]. Sparse exact plus low rank is from [Scatterbrain], the same with Sinkhorn's updates from
    [LocallyCorrectedNystrom], entropic plans by positive features from [PositiveSinkhorn]. Time and memory are
    O(n (r + W) d) for any T.

    With T = 1 row i depends on query i alone. Such attention works in the decoder, with a cache of constant size: sums
    over the keys that left the window. With ``band="expected"``, where the window is centred at the position that the
    features expect, it also works at cross. With T ≥ 3 columns get near their marginal; rows are exact for any T.

    Sentences of at most E = ``exact_up_to`` real keys have the exact kernel everywhere: with T = 1 that is
    :class:`Softmax`, with more updates :class:`Sinkhorn` at ε = 1. In the decoder the first E rows are exact, counted
    from the first real token. Neither other sentences of the batch nor pads change the form that a sentence gets.

    ``near_far_plan`` of ``tests/reference.py`` computes the same in plain loops.

    Attributes:
        exact: the mechanism for short sentences; None if E is 0.
        features: z, ``(num_heads, r, head_dim)``, in the space of q and k; a parameter if learnt, else a buffer.
        feature_bias: c, ``(num_heads, r)``, initially zero; a parameter if learnt, else a buffer.
    """

    options_class = NearFarOptions
    options: NearFarOptions
    features: Tensor
    feature_bias: Tensor

    def __init__(self, **context: Any) -> None:
        super().__init__(**context)
        options = self.options
        couples_queries, positional = options.num_updates > 1, options.band == "diagonal"
        self.traits = Traits(
            couples_queries=couples_queries,
            uncoupling_options=(("num_updates", 1),),
            positional=positional,
            counts_slots=True,
            is_causal=positional and not couples_queries,
            can_be_causal=True,
        )
        self.exact: Mechanism | None = None
        if options.exact_up_to and options.num_updates == 1:
            self.exact = Softmax(**context | {"options": SoftmaxOptions(prior=options.prior)})
        elif options.exact_up_to:
            plan = SinkhornOptions(epsilon=1.0, num_updates=options.num_updates, prior=options.prior)
            self.exact = Sinkhorn(**context | {"options": plan})
        if options.num_features:
            features = self.drawn(options.num_features, options.seed)
            self.register("features", features, learn=options.learn_features)
            self.register("feature_bias", torch.zeros(features.shape[:2]), learn=options.learn_features)

    def _slopes(self, like: Tensor) -> Tensor | None:
        """The slopes of the prior, ``(num_heads,)``; None without a prior."""
        if self.options.prior is None:
            return None
        return alibi_slopes(self.num_heads, dtype=like.dtype, device=like.device)

    def _logs(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``s·x·z_t - s‖x‖²/2 - (log r)/2``, ``(bsz, num_heads, len, r)``: log φ or log ψ up to c and powers of r."""
        return feature_logs(x, self.features, scale=self.scaling, dtype=dtype)

    def _side_logs(self, tokens, sides, masks):
        """log φ of the queries, without c, and log ψ of the keys; None and None without features.

        Args:
            tokens: queries and keys in one tensor, ``(bsz, num_heads, tgt_len + src_len, head_dim)``.
            sides: queries and keys, views of ``tokens``.
            masks: the masks of the attention.
        """
        q, k = sides
        if not self.options.num_features:
            return None, None
        if not self.options.tangents or masks.causal:
            return self._logs(tokens).split((q.size(2), k.size(2)), 2)
        key_logs = self._tangent_key_logs(k)
        pads = without_empty(masks.key_pads)
        seen = key_logs if pads is None else key_logs.masked_fill(pads[:, None, :, None], -torch.inf)
        found = tangents(k, torch.softmax(seen, 2), self.features, scale=self.scaling)
        return tangent_logs(q, *found, scale=self.scaling), key_logs

    def _tangent_key_logs(self, k):
        """``s·k·z_t``, log ψ of the keys with tangents, ``(bsz, num_heads, src_len, r)``."""
        return (k * self.scaling) @ self.features.to(k.dtype).transpose(-1, -2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, need_weights: bool) -> AttentionOutput:
        if self.exact is None:
            return self._attend_linearly(q, k, v, masks, need_weights)
        limit, exact, linear = self.options.exact_up_to, self.exact.attend, self._attend_linearly
        if k.size(2) <= limit:
            values, weights = exact(q, k, v, masks, need_weights)
        elif masks.causal:
            values, weights = attend_by_row(limit, exact, linear, q, k, v, masks, need_weights)
        else:
            compares = self.exact.traits.positional
            values, weights = attend_by_length(limit, exact, linear, q, k, v, masks, need_weights, positional=compares)
        return AttentionOutput(with_zero_gradients(values, self.parameters()), weights)

    def _attend_linearly(self, q, k, v, masks, need_weights):
        """The linear form for any length, on a GPU by a fused kernel if it supports the case."""
        values = None if need_weights else self._by_kernel(q, k, v, masks)
        if values is not None:
            return AttentionOutput(values)
        v = self.drop_keys(at_least_float32(v))
        if self.options.band == "expected":
            summary = self._summary(at_least_float32(k), v, masks.key_pads)
            return self._attend_expected(q, summary, need_weights)
        early = k.size(2) - q.size(2) if masks.causal else 0  # keys before the first query
        if early:
            q = nn.functional.pad(q, (0, 0, early, 0))
        tokens = at_least_float32(torch.cat([q, k], 2))  # q and k together: half as many kernels
        sides = tokens.split((q.size(2), k.size(2)), 2)
        logs = self._side_logs(tokens, sides, masks)
        if masks.causal and not self._rows_are_kept(sides, logs):
            apply = functools.partial(self._by_prefixes, sides, logs, masks.key_pads)
        else:
            apply = functools.partial(self._by_blocks, sides, logs, self._log_masses(sides, logs, masks), masks.causal)
        weights = None
        if need_weights:
            identity = torch.eye(v.size(2), dtype=v.dtype, device=v.device)
            weights = apply(identity.expand(*v.shape[:2], -1, -1))[:, :, early:]
        return AttentionOutput(apply(v)[:, :, early:], weights)

    def _kernel_slopes(self, device):
        return None if self.options.prior is None else _kept_slopes(self.num_heads, device)

    def _by_kernel(self, q, k, v, masks):
        """Values by a fused kernel that stores no features; None if it is off or does not support the case."""
        options = self.options
        if options.band == "expected" or options.num_updates > 1 or not options.num_features or not kernels.wanted(q):
            return None
        if q.size(2) != k.size(2) and not masks.causal:
            return None
        tangents = options.tangents and not masks.causal
        slopes = self._kernel_slopes(q.device)
        settings = NearFarSettings(options.window, self.scaling, slopes, masks.key_pads, masks.causal, tangents)
        return kernels.near_far(q, k, self.drop_keys(v), self.features, self.feature_bias, settings)

    @torch.no_grad()
    def _rows_are_kept(self, sides, logs):
        """Whether causal rows keep their precision in :meth:`_by_blocks`, which scales them by later keys, too.

        Row i contains the score of key i. Precision is kept if no key's features exceed it by more than a fixed gap.
        False where reading the scores would make the host wait.
        """
        (q, k), (query_logs, key_logs) = sides, logs
        if query_logs is None:
            return True
        if not ways(q).looks or not q.numel() or is_exporting():
            return False
        largest = (query_logs + (key_logs.amax(2, keepdim=True) + self.feature_bias[:, None])).amax(-1)
        return (largest - self.scaling * (q * k).sum(-1)).max().item() < _LARGEST_GAP

    def _products(self, sides, v, logs, log_mass, **kind):
        """:func:`near_far` with the options of this mechanism.

        Args:
            sides: queries and keys.
            v: the values.
            logs: the logs of the features of both sides; None and None: only the band.
            log_mass: log masses of the keys, or None.
            **kind: ``causal`` and ``with_log_sums``.
        """
        bias = None if logs[0] is None else self.feature_bias
        settings = {"window": self.options.window, "scale": self.scaling, **kind}
        return near_far(sides[0], sides[1], v, logs[0], logs[1], log_mass, bias, self._slopes(sides[0]), **settings)

    def _log_masses(self, sides, logs, masks):
        """log w, ``(bsz, num_heads or 1, src_len)``, after all half-updates but the last; None: equal for all keys.

        The last half-update divides the rows by their sums; :func:`near_far` does that.
        """
        g = None if masks.key_pads is None else pad_log_mass(masks.key_pads, sides[1])
        if self.options.num_updates > 1:
            f = None if masks.query_pads is None else pad_log_mass(masks.query_pads, sides[0])
        for left in range(self.options.num_updates, 1, -1):
            if left % 2 == 1:
                f = self._update(sides, logs, g, masks.query_pads)
            else:
                g = self._update(sides[::-1], logs[::-1], f, masks.key_pads)
        return g

    def _update(self, sides, logs, log_mass, pads):
        """A half-update of the first side: minus the log of the row sums; -inf at pads and in rows without mass.

        ``log_mass`` belongs to the second side, ``pads`` to the first.
        """
        nothing = sides[1].new_empty(*sides[1].shape[:3], 0)
        _, sums = self._products(sides, nothing, logs, log_mass, with_log_sums=True)
        empty = sums == torch.finfo(sums.dtype).min
        return (-sums).masked_fill(empty if pads is None else empty | pads.unsqueeze(1), -torch.inf)

    def _by_blocks(self, sides, logs, log_mass, causal, v):
        """``A v`` by :func:`near_far`."""
        return self._products(sides, v, logs, log_mass, causal=causal)[0]

    def _by_prefixes(self, sides, logs, key_pads, v):
        """``A v``, causal, for logs of any size: the band by :func:`near_far`, the keys before it by prefix sums."""
        log_mass = None if key_pads is None else pad_log_mass(key_pads, sides[1])
        values, log_sums = self._products(sides, v, (None, None), log_mass, causal=True, with_log_sums=True)
        query_logs, key_logs = logs
        slopes = self._slopes(v)
        if slopes is not None:
            falls = slopes[:, None, None] * torch.arange(v.size(2), dtype=v.dtype, device=v.device).unsqueeze(-1)
            query_logs, key_logs = query_logs - falls, key_logs + falls
        if key_pads is not None:
            key_logs = key_logs.masked_fill(key_pads[:, None, :, None], NO_MASS)
        # shift: query i sums over the keys up to i - W - 1, which have left its window
        n, late = v.size(2), min(self.options.window + 1, v.size(2))
        key_logs = nn.functional.pad(key_logs[:, :, : n - late], (0, 0, late, 0), value=NO_MASS)
        v = nn.functional.pad(v[:, :, : n - late], (0, 0, late, 0))
        far = query_logs + self.feature_bias[:, None] + torch.logcumsumexp(key_logs, 2)
        far_values, _ = prefix_apply(torch.softmax(far, -1), key_logs, v, with_state=False)
        share = torch.sigmoid(torch.logsumexp(far, -1) - log_sums)
        return torch.lerp(values, far_values, share.unsqueeze(-1))

    def _summary(self, k, v, key_padding_mask):
        key_padding_mask = without_empty(key_padding_mask)
        key_logs = self._tangent_key_logs(k.double()) if self.options.tangents else self._logs(k, torch.float64)
        far = summarise_far(key_logs + self.feature_bias[:, None], v, key_padding_mask)
        summary = self._cache_of(k * self.scaling, v, key_padding_mask) | vars(far)
        if not self.options.tangents:
            return summary
        key_means, constants = tangents(k.double(), far.shares.double(), self.features, scale=self.scaling)
        return summary | {"key_means": key_means, "constants": constants}

    def _expected_by_kernel(self, q, summary):
        """Values at cross by one fused kernel; None if it is off or does not support the case."""
        if not kernels.wanted(q):
            return None
        names = ("key", "value", "shares", "log_sums", "positions", "means")
        probes, constants = summary.get("key_means", self.features), summary.get("constants")
        kept = {name: summary[name] for name in names}
        pads = summary.get("key_padding_mask")
        keys = ExpectedKeys(**kept, probes=probes, constants=constants, key_padding_mask=pads)
        return kernels.near_far_expected(q, keys, window=self.options.window, scale=self.scaling)

    def _attend_expected(self, q, summary, need_weights):
        values = None if need_weights else self._expected_by_kernel(q, summary)
        if values is not None:
            return AttentionOutput(values)
        q = at_least_float32(q)
        if self.options.tangents:
            query_logs = tangent_logs(q.double(), summary["key_means"], summary["constants"], scale=self.scaling)
        else:
            query_logs = self._logs(q, torch.float64)
        values, weights = near_far_at_expected(
            q,
            summary["key"],
            summary["value"],
            query_logs,
            FarSummary(**{field.name: summary[field.name] for field in fields(FarSummary)}),
            summary.get("key_padding_mask"),
            window=self.options.window,
            need_weights=need_weights,
        )
        return AttentionOutput(values, weights)

    def summarise(self, k: Tensor, v: Tensor, key_padding_mask: Pads = None, need_weights: bool = False) -> DecodeCache:
        """The cache of cross-attention.

        It has keys and values alone if the band is diagonal or there are at most E slots. Else it has keys, values,
        shares of the features and their sums; in a batch with short sentences it also has a copy of their keys and
        values.
        """
        limit = self.options.exact_up_to
        if self.options.band == "diagonal" or k.size(2) <= limit:
            return super().summarise(k, v, key_padding_mask, need_weights)
        k, v = (without_pads(x, key_padding_mask) for x in (k, v))
        wide_k, wide_v = at_least_float32(k).contiguous(), self.drop_keys(at_least_float32(v)).contiguous()
        summary = self._summary(wide_k, wide_v, key_padding_mask)
        split = split_by_length(key_padding_mask, limit) if limit else None
        if key_padding_mask is None or split is None:
            return summary
        # weights have all slots
        slots = slice(None) if need_weights else split.slots
        k, v = (x[:, :, slots].contiguous() for x in (k, v))
        short = self._cache_of(k, v, key_padding_mask[:, slots])
        is_short = key_padding_mask.new_zeros(len(k)).index_fill(0, split.short, True)
        return summary | {_SHORT + name: x for name, x in short.items()} | {"is_short": is_short}

    def attend_summary(self, q: Tensor, summary: DecodeCache, need_weights: bool = False) -> AttentionOutput:
        if "shares" not in summary:
            return super().attend_summary(q, summary, need_weights)
        output = self._attend_expected(q, summary, need_weights).to(q.dtype)
        if self.exact is None or "is_short" not in summary:
            return output
        short = {name.removeprefix(_SHORT): x for name, x in summary.items() if name.startswith(_SHORT)}
        exact, is_short = self.exact.attend_summary(q, short, need_weights), summary["is_short"][:, None, None, None]
        values = torch.where(is_short, exact.values, output.values)
        if exact.weights is None or output.weights is None:
            return AttentionOutput(values)
        return AttentionOutput(values, torch.where(is_short, exact.weights, output.weights))

    def causal_step(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Pads, cache: DecodeCache, need_weights: bool
    ) -> tuple[AttentionOutput, DecodeCache]:
        """The cache has all keys and values up to E tokens; later the last W + 1 keys and sums over the earlier ones.

        After E tokens its size is constant.
        """
        values = []
        if "recent_key" in cache:
            window: _Window | None = _Window.of(cache)
        else:
            exact = k.size(2)  # number of new keys that come while the cache has all keys
            if self.options.num_features and not need_weights:
                exact = self._number_within_exact(k, key_padding_mask, cache)
            if exact == k.size(2):
                return super().causal_step(q, k, v, key_padding_mask, cache, need_weights)
            if exact:
                rows = max(0, exact - (k.size(2) - q.size(2)))
                pads = None if key_padding_mask is None else key_padding_mask[:, :exact]
                first = q[:, :, :rows], k[:, :, :exact], v[:, :, :exact], pads
                output, cache = super().causal_step(*first, cache, need_weights)
                values.append(output.values)
                q, k, v = q[:, :, rows:], k[:, :, exact:], v[:, :, exact:]
                key_padding_mask = None if key_padding_mask is None else key_padding_mask[:, exact:]
            window = self._folded(cache) if cache else None
        early = k.size(2) - q.size(2)  # keys before the first query: the source in --cross-self-attention
        if early:
            q = nn.functional.pad(q, (0, 0, early, 0))
        for i in range(q.size(2)):
            now = (slice(None), slice(None), slice(i, i + 1))
            pads = None if key_padding_mask is None else key_padding_mask[:, i : i + 1]
            found = self._step_by_kernel(q[now], k[now], v[now], pads, window)
            if found is None:
                found = self._attend_window(q[now], self._appended(window, k[now], v[now], pads))
            value, window = found
            if i >= early:
                values.append(value.to(q.dtype))
        assert window is not None
        return AttentionOutput(values[0] if len(values) == 1 else torch.cat(values, 2)), window.as_cache()

    def _step_by_kernel(self, q, k, v, pads, window):
        """The values of one token and the next window by one fused kernel; None if it is off or lacks the case."""
        if self.drops or not self.options.num_features or not kernels.wanted(q):
            return None
        if window is None:
            none = q.new_empty(*q.shape[:2], 0, q.size(3), dtype=torch.float32)
            window = _Window(none, none.new_empty(*q.shape[:2], 0, v.size(3)), None, None)
        far = () if window.far is None else (window.far.log_sums, window.far.means)
        found = kernels.near_far_step(
            q,
            k,
            v,
            pads,
            NearFarKept(window.keys, window.values, window.log_mass, *far),
            self.features,
            self.feature_bias,
            self._kernel_slopes(q.device),
            window=self.options.window,
            scale=self.scaling,
        )
        if found is None:
            return None
        values, (keys, kept, log_mass, log_sums, means) = found
        sums = None if log_sums is None or means is None else PrefixState(log_sums, means)
        return values, _Window(keys, kept, log_mass, sums)

    def _number_within_exact(self, k, key_padding_mask, cache):
        """Number of new keys that are among the first E tokens in at least one sentence; leading pads are no tokens."""
        if self.exact is None:
            return 0
        before = cache["key"].size(2) if cache else 0
        pads = joined_pads(cache, key_padding_mask, k) if cache else key_padding_mask
        within = self.options.exact_up_to
        if pads is not None and before + k.size(2) > within:
            within += int(leading_pads(pads).max())
        return min(max(within - before, 0), k.size(2))

    def _folded(self, cache):
        """The window made from a cache that has all keys."""
        k, v = at_least_float32(cache["key"]), self.drop_keys(at_least_float32(cache["value"]))
        n, late = k.size(2), min(self.options.window + 1, k.size(2))
        log_mass, pads = None, cache.get("key_padding_mask")
        if pads is not None:
            log_mass = pad_log_mass(pads, k, NO_MASS)
        far = None
        if n > late:
            logs = self._logs(k[:, :, : n - late])
            if log_mass is not None:
                logs = logs + log_mass[:, :, : n - late, None]
            slopes = self._slopes(k)
            if slopes is not None:
                distances = torch.arange(n - 1, late - 1, -1, dtype=k.dtype, device=k.device)
                logs = logs - slopes[:, None, None] * distances[:, None]
            means = torch.softmax(logs, 2).transpose(-1, -2) @ v[:, :, : n - late]
            far = PrefixState(torch.logsumexp(logs, 2), means)
            log_mass = None if log_mass is None else log_mass[:, :, n - late :].contiguous()
        return _Window(k[:, :, n - late :].contiguous(), v[:, :, n - late :].contiguous(), log_mass, far)

    def _appended(self, window, k, v, pads):
        """The window with one more key, at least float32."""
        k, v = without_pads(k, pads), self.drop_keys(without_pads(v, pads))
        if window is None:
            k, v, log_mass, far = at_least_float32(k), at_least_float32(v), None, None
        else:
            k, v = torch.cat([window.keys, k], 2), torch.cat([window.values, v], 2)
            log_mass, far = window.log_mass, window.far
        if pads is not None or log_mass is not None:
            if log_mass is None:
                log_mass = k.new_zeros(k.size(0), 1, k.size(2) - 1)
            now = k.new_zeros(k.size(0), 1, 1) if pads is None else pad_log_mass(pads, k, NO_MASS)
            log_mass = torch.cat([log_mass, now], 2)
        return _Window(k, v, log_mass, far)

    def _without_first(self, window, key_logs, slopes):
        """The window without its first key, which is added to the sums.

        Args:
            window: a window of W + 2 keys.
            key_logs: logs of the first key's features, ``(bsz, num_heads, 1, r)``.
            slopes: the slopes of the prior, or None.
        """
        k, v, log_mass, far = window
        if log_mass is not None:
            key_logs, log_mass = key_logs + log_mass[:, :, :1, None], log_mass[:, :, 1:]
        if far is None:
            far = empty_prefix(key_logs, v)
        if slopes is not None:
            key_logs = key_logs - slopes[:, None, None] * (self.options.window + 1)
            far = replace(far, log_sums=far.log_sums - slopes[:, None])
        return _Window(k[:, :, 1:], v[:, :, 1:], log_mass, absorb(far, key_logs.squeeze(2), v[:, :, 0]))

    def _attend_window(self, q, window):
        """The values of the last token, and its window of at most W + 1 keys; an older key goes into the sums."""
        is_full, slopes = window.keys.size(2) > self.options.window + 1, self._slopes(window.keys)
        if is_full:
            tokens = torch.cat([q, window.keys[:, :, :1]], 2)
            query_logs, key_logs = self._logs(tokens).split(1, 2)
            window, q = self._without_first(window, key_logs, slopes), tokens[:, :, :1]
        k, v, log_mass, far = window
        bias = None if log_mass is None else log_mass.unsqueeze(2)
        if slopes is not None:
            falls = slopes[:, None, None] * torch.arange(1 - k.size(2), 1, dtype=k.dtype, device=k.device)
            bias = falls.unsqueeze(0) if bias is None else bias + falls
        if not is_full:
            return scaled_dot_product_attention(at_least_float32(q), k, v, bias), window
        heads = q.flatten(0, 1), k.flatten(0, 1).transpose(-1, -2)
        near = torch.baddbmm(k.new_empty(()), *heads, beta=0, alpha=self.scaling).unflatten(0, k.shape[:2])
        near = near if bias is None else near + bias
        through = query_logs + (far.log_sums + self.feature_bias).unsqueeze(2)
        shares = torch.softmax(torch.cat([near, through], -1), -1).flatten(0, 1)
        near, through = shares.split([near.size(-1), through.size(-1)], -1)
        values = torch.baddbmm(near @ v.flatten(0, 1), through, far.means.flatten(0, 1))
        return values.unflatten(0, k.shape[:2]), window


@functools.lru_cache(16)
def _kept_slopes(num_heads: int, device: torch.device) -> Tensor:
    """The slopes of ALiBi in float32, cached: computing them would launch more kernels in each decoding step."""
    with torch.inference_mode(False):
        return alibi_slopes(num_heads, dtype=torch.float32, device=device)


class _Window(NamedTuple):
    """The decoding cache after the exact tokens: the last W + 1 keys and sums over all earlier keys.

    Attributes:
        keys, values: ``(bsz, num_heads, at most W + 1, head_dim)``, at least float32.
        log_mass: ``(bsz, 1, at most W + 1)``, 0 for tokens, NO_MASS at pads; None: no pads so far.
        far: sums over the keys that left the window; None: no key has left it yet.
    """

    keys: Tensor
    values: Tensor
    log_mass: Tensor | None
    far: PrefixState | None

    @classmethod
    def of(cls, cache: DecodeCache) -> "_Window":
        """The inverse of :meth:`as_cache`."""
        far = PrefixState(cache["log_sums"], cache["means"]) if "means" in cache else None
        return cls(cache["recent_key"], cache["recent_value"], cache.get("log_mass"), far)

    def as_cache(self) -> DecodeCache:
        """The window as a cache: tensors by name, which beam search reorders."""
        cache = {"recent_key": self.keys, "recent_value": self.values}
        if self.log_mass is not None:
            cache["log_mass"] = self.log_mass
        return cache if self.far is None else cache | vars(self.far)
