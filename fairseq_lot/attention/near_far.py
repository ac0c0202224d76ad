"""near_far attention: a kernel that is exact near the diagonal and of low rank elsewhere."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fairseq_lot.attention.base import AttentionOutput, Masks, Mechanism, State, without_pads
from fairseq_lot.attention.options import Options, option, prior_option
from fairseq_lot.errors import InputError
from fairseq_lot.transport.marginals import Pads, at_least_float32, without_empty
from fairseq_lot.transport.near_far import FarSummary, feature_logs, near_far, near_far_at_expected, summarise_far
from fairseq_lot.transport.pivots_causal import PrefixState, absorb, empty_prefix, prefix_apply
from fairseq_lot.transport.positions import alibi_slopes

# The log of no mass: far below all others, and finite, so that sums of it have gradients.
_NO_MASS = -1e30
# A row may be exp of this below what its powers are taken relative to: what it then loses is below a rounding.
_MODERATE = 60.0


@dataclass(frozen=True)
class NearFarOptions(Options):
    """Defaults were chosen on validation data: docs/notes/near_far.md."""

    num_features: int = option(32, "features per head, r: the rank of the far part; 0: the band alone", minimum=0)
    window: int = option(8, "W: scores of keys at most so many tokens away are exact", minimum=0)
    num_updates: int = option(
        1, "half-updates, rows last: 1 is softmax with this kernel; with more, columns near their marginal", minimum=1
    )
    band: str = option(
        "diagonal",
        "where the exact keys of a query stand: diagonal, beside its own position, or expected, beside the position "
        "that the features expect; at cross always expected",
        choices=("diagonal", "expected"),
    )
    prior: str | None = prior_option()
    learn_features: bool = option(True, "learn the features; false: they stay as they were drawn")
    seed: int = option(0, "seed of the initial features", minimum=0)

    def __post_init__(self):
        super().__post_init__()
        if self.band == "expected" and not self.num_features:
            raise InputError("num_features must be at least 1 with band expected, got 0")
        if self.band == "expected" and self.num_updates > 1:
            raise InputError(f"num_updates must be 1 with band expected, got {self.num_updates}")
        if self.band == "expected" and self.prior is not None:
            raise InputError(f"there is no prior with band expected, got {self.prior}")

    def at_site(self, site: str) -> "NearFarOptions":
        of_one_sentence = self.num_updates > 1 or self.prior is not None
        return self if site != "cross" or of_one_sentence else replace(self, band="expected")


class NearFar(Mechanism):
    """``A = diag(u) K̃ diag(w)``: exact scores within a window, features elsewhere, T half-updates, rows last.

        K̃_ij = exp(s·q_i·k_j)     for |i - j| ≤ W
        K̃_ij = φ(q_i)·ψ(k_j)      elsewhere
        φ_t(q) = exp(s·q·z_t - s‖q‖²/2 + c_t) / r
        ψ_t(k) = exp(s·k·z_t - s‖k‖²/2)

    With the prior ``alibi`` both are times ``exp(-slope·|i - j|)``, with one slope per head [ALiBi].

    As drawn, z ~ N(0, √d) and c = 0, φ·ψ is an unbiased estimate of exp(s·q·k): the positive features of [FAVOR]. A
    kernel that is sparse and exact here and of low rank there is [Scatterbrain]'s, and with Sinkhorn's updates
    [LocallyCorrectedNystrom]'s; entropic plans by positive features are [PositiveSinkhorn]'s. Time and memory are
    O(n (r + W) d) for any T.

    With T = 1 row i depends on query i alone: it may stand in the decoder, where the keys that left the window are
    summed up and the state has a constant size, and with ``band="expected"`` at cross. With T ≥ 3 columns come near
    their marginal; rows are exact for any T.

    ``near_far_plan`` of ``tests/reference.py`` computes the same in plain loops.

    Attributes:
        features: z, ``(num_heads, r, head_dim)``, learnt (else a buffer), in the space of q and k.
        feature_bias: c, ``(num_heads, r)``, likewise; zero at the start.
    """

    options_class = NearFarOptions
    options: NearFarOptions
    features: Tensor
    feature_bias: Tensor
    counts_slots = True
    supports_causal = True  # of some options
    uncoupling_options = {"num_updates": 1}

    def __init__(self, **context: Any) -> None:
        super().__init__(**context)
        options = self.options
        self.couples_queries = options.num_updates > 1
        self.positional = options.band == "diagonal"
        self.supports_causal = self.positional and not self.couples_queries
        if options.num_features:
            features = self.drawn(options.num_features, options.seed)
            self.keep("features", features, learn=options.learn_features)
            self.keep("feature_bias", torch.zeros(features.shape[:2]), learn=options.learn_features)

    def _slopes(self, like: Tensor) -> Tensor | None:
        """``(num_heads,)``; None without a prior."""
        if self.options.prior is None:
            return None
        return alibi_slopes(self.num_heads, dtype=like.dtype, device=like.device)

    def _logs(self, x: Tensor) -> Tensor:
        """``s·x·z_t - s‖x‖²/2 - (log r)/2``, ``(bsz, num_heads, len, r)``: ``log ψ``, and ``log φ`` but for c."""
        return feature_logs(x, self.features, scale=self.scaling)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, need_weights: bool) -> AttentionOutput:
        v = self.drop_keys(at_least_float32(v))
        if self.options.band == "expected":
            summary = self._summary(at_least_float32(k), v, masks.key_pads)
            return self._attend_expected(at_least_float32(q), summary, need_weights)
        early = k.size(2) - q.size(2) if masks.causal else 0  # keys before the first query
        if early:
            q = nn.functional.pad(q, (0, 0, early, 0))
        sizes = q.size(2), k.size(2)
        tokens = at_least_float32(torch.cat([q, k], 2))  # one kernel each for both
        sides = tokens.split(sizes, 2)
        logs = self._logs(tokens).split(sizes, 2) if self.options.num_features else (None, None)
        if masks.causal and not self._rows_are_kept(sides, logs):

            def apply(v):
                return self._by_prefixes(sides, v, logs, masks.key_pads)[:, :, early:]
        else:
            mass = self._log_masses(sides, logs, masks)

            def apply(v):
                return self._products(sides, v, logs, mass, causal=masks.causal)[0][:, :, early:]

        weights = None
        if need_weights:
            identity = torch.eye(v.size(2), dtype=v.dtype, device=v.device)
            weights = apply(identity.expand(*v.shape[:2], -1, -1))
        return AttentionOutput(apply(v), weights)

    @torch.no_grad()
    def _rows_are_kept(self, sides, logs):
        """Whether causal rows keep their precision relative to all keys, those after them included.

        Each row has at least the score of its own key. Seen on the CPU alone, where looking costs nothing.
        """
        (q, k), (query_logs, key_logs) = sides, logs
        if query_logs is None:
            return True
        if q.device.type != "cpu" or not q.numel():
            return False
        largest = (query_logs + (key_logs.amax(2, keepdim=True) + self.feature_bias[:, None])).amax(-1)
        return (largest - self.scaling * (q * k).sum(-1)).max().item() < _MODERATE

    def _products(self, sides, v, logs, log_mass, **kind):
        """:func:`near_far` of two sides and the logs of their features; without logs the band alone."""
        bias = None if logs[0] is None else self.feature_bias
        settings = {"window": self.options.window, "scale": self.scaling, **kind}
        return near_far(sides[0], sides[1], v, logs[0], logs[1], log_mass, bias, self._slopes(sides[0]), **settings)

    def _log_masses(self, sides, logs, masks):
        """log w after all half-updates but the last, which is that of the rows; None: all keys alike."""
        g = _log_mass(masks.key_pads, sides[1])
        if self.options.num_updates > 1:
            f = _log_mass(masks.query_pads, sides[0])
        for left in range(self.options.num_updates, 1, -1):
            if left % 2 == 1:
                f = self._update(sides, logs, g, masks.query_pads)
            else:
                g = self._update(sides[::-1], logs[::-1], f, masks.key_pads)
        return g

    def _update(self, sides, logs, log_mass, pads):
        """A half-update: minus the log of the sums of the rows, -inf at pads and where a row has no mass."""
        nothing = sides[1].new_empty(*sides[1].shape[:3], 0)
        _, sums = self._products(sides, nothing, logs, log_mass, with_log_sums=True)
        empty = sums == torch.finfo(sums.dtype).min
        return (-sums).masked_fill(empty if pads is None else empty | pads.unsqueeze(1), -torch.inf)

    def _by_prefixes(self, sides, v, logs, key_pads):
        """``A v``, causal, whatever the logs of the keys: the band, and by prefix sums the keys before it."""
        log_mass = _log_mass(key_pads, sides[1])
        values, log_sums = self._products(sides, v, (None, None), log_mass, causal=True, with_log_sums=True)
        query_logs, key_logs = logs
        slopes = self._slopes(v)
        if slopes is not None:
            falls = slopes[:, None, None] * torch.arange(v.size(2), dtype=v.dtype, device=v.device).unsqueeze(-1)
            query_logs, key_logs = query_logs - falls, key_logs + falls
        if key_pads is not None:
            key_logs = key_logs.masked_fill(key_pads[:, None, :, None], _NO_MASS)
        # a key counts from the query on whose window it has left
        n, late = v.size(2), min(self.options.window + 1, v.size(2))
        key_logs = nn.functional.pad(key_logs[:, :, : n - late], (0, 0, late, 0), value=_NO_MASS)
        v = nn.functional.pad(v[:, :, : n - late], (0, 0, late, 0))
        far = query_logs + self.feature_bias[:, None] + torch.logcumsumexp(key_logs, 2)
        far_values, _ = prefix_apply(torch.softmax(far, -1), key_logs, v, with_state=False)
        share = torch.sigmoid(torch.logsumexp(far, -1) - log_sums)
        return torch.lerp(values, far_values, share.unsqueeze(-1))

    def _summary(self, k, v, key_padding_mask):
        key_padding_mask = without_empty(key_padding_mask)
        far = summarise_far(self._logs(k) + self.feature_bias[:, None], v, key_padding_mask)
        return self._keep_all(k * self.scaling, v, key_padding_mask) | vars(far)

    def _attend_expected(self, q, summary, need_weights):
        values, weights = near_far_at_expected(
            q,
            summary["key"],
            summary["value"],
            self._logs(q),
            FarSummary(**{field.name: summary[field.name] for field in fields(FarSummary)}),
            summary.get("key_padding_mask"),
            window=self.options.window,
            need_weights=need_weights,
        )
        return AttentionOutput(values, weights)

    def summarise(self, k: Tensor, v: Tensor, key_padding_mask: Pads = None, need_weights: bool = False) -> State:
        """Keys, values and their features, and what all of these sum up to."""
        if self.options.band == "diagonal":
            return super().summarise(k, v, key_padding_mask, need_weights)
        k, v = (at_least_float32(without_pads(x, key_padding_mask)) for x in (k, v))
        return self._summary(k.contiguous(), self.drop_keys(v).contiguous(), key_padding_mask)

    def attend_summary(self, q: Tensor, summary: State, need_weights: bool = False) -> AttentionOutput:
        if self.options.band == "diagonal":
            return super().attend_summary(q, summary, need_weights)
        return self._attend_expected(at_least_float32(q), summary, need_weights).to(q.dtype)

    def causal_step(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Pads, state: State, need_weights: bool
    ) -> tuple[AttentionOutput, State]:
        """Keeps the last W + 1 keys and values, and the sums of those before, if any: of constant size."""
        keeps_all = "recent_key" not in state if state else need_weights
        if keeps_all or not self.options.num_features:
            return super().causal_step(q, k, v, key_padding_mask, state, need_weights)
        early = k.size(2) - q.size(2)  # keys before the first query, as of a source in --cross-self-attention
        if early:
            q = nn.functional.pad(q, (0, 0, early, 0))
        values, following = [], state
        for i in range(q.size(2)):
            now = (slice(None), slice(None), slice(i, i + 1))
            pads = None if key_padding_mask is None else key_padding_mask[:, i : i + 1]
            value, following = self._next_token(q[now], k[now], v[now], pads, following)
            values.append(value.to(q.dtype))
        values = values[early:]
        return AttentionOutput(values[0] if len(values) == 1 else torch.cat(values, 2)), following

    def _next_token(self, q, k, v, pads, state):
        """The values of one token, and the next state, at least float32: what is put beside it gets its precision."""
        k, v = without_pads(k, pads), self.drop_keys(without_pads(v, pads))
        if state:
            k, v = torch.cat([state["recent_key"], k], 2), torch.cat([state["recent_value"], v], 2)
        else:
            k, v = at_least_float32(k), at_least_float32(v)
        log_mass = None
        if pads is not None or "log_mass" in state:
            log_mass = state.get("log_mass", k.new_zeros(k.size(0), 1, k.size(2) - 1))
            now = k.new_zeros(k.size(0), 1, 1)
            log_mass = torch.cat([log_mass, now if pads is None else now.masked_fill_(pads.unsqueeze(1), _NO_MASS)], 2)
        slopes, far = self._slopes(k), None
        if k.size(2) > self.options.window + 1:
            tokens = torch.cat([q, k[:, :, :1]], 2)
            query_logs, leaving = self._logs(tokens).split(1, 2)
            if log_mass is not None:
                leaving, log_mass = leaving + log_mass[:, :, :1, None], log_mass[:, :, 1:]
            before = PrefixState(state["log_sums"], state["means"]) if "means" in state else empty_prefix(leaving, v)
            if slopes is not None:
                leaving = leaving - slopes[:, None, None] * (self.options.window + 1)
                before = replace(before, log_sums=before.log_sums - slopes[:, None])
            far = absorb(before, leaving.squeeze(2), v[:, :, 0])
            q, k, v = tokens[:, :, :1], k[:, :, 1:], v[:, :, 1:]
        state = {"recent_key": k, "recent_value": v} | ({} if log_mass is None else {"log_mass": log_mass})
        bias = None if log_mass is None else log_mass.unsqueeze(2)
        if slopes is not None:
            falls = slopes[:, None, None] * torch.arange(1 - k.size(2), 1, dtype=k.dtype, device=k.device)
            bias = falls.unsqueeze(0) if bias is None else bias + falls
        if far is None:
            return scaled_dot_product_attention(at_least_float32(q), k, v, bias), state
        heads = q.flatten(0, 1), k.flatten(0, 1).transpose(-1, -2)
        near = torch.baddbmm(k.new_empty(()), *heads, beta=0, alpha=self.scaling).unflatten(0, k.shape[:2])
        near = near if bias is None else near + bias
        through = query_logs + (far.log_sums + self.feature_bias).unsqueeze(2)
        shares = torch.softmax(torch.cat([near, through], -1), -1).flatten(0, 1)
        near, through = shares.split([near.size(-1), through.size(-1)], -1)
        values = torch.baddbmm(near @ v.flatten(0, 1), through, far.means.flatten(0, 1))
        return values.unflatten(0, k.shape[:2]), state | vars(far)


def _log_mass(padding_mask: Pads, like: Tensor) -> Tensor | None:
    """``(bsz, 1, len)``: 0, and -inf at pads; None without a mask."""
    if padding_mask is None:
        return None
    return like.new_zeros(padding_mask.shape).masked_fill_(padding_mask, -torch.inf).unsqueeze(1)
