"""near_far attention: a kernel that is exact near the diagonal and of low rank elsewhere."""

import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from fairseq_lot.attention.base import AttentionOutput, Mechanism, draw_normal, without_pads
from fairseq_lot.attention.options import Options, option
from fairseq_lot.errors import InputError
from fairseq_lot.transport.marginals import at_least_float32, without_empty
from fairseq_lot.transport.near_far import FarSummary, near_far, near_far_at_expected, summarise_far
from fairseq_lot.transport.pivots import pivot_scores
from fairseq_lot.transport.pivots_causal import PrefixState, absorb, empty_prefix, prefix_apply

# The log of no mass: far below all others, and finite, so that sums of it have gradients.
_NO_MASS = -1e30


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
    learn_features: bool = option(True, "learn the features; false: they stay as they were drawn")
    seed: int = option(0, "seed of the initial features", minimum=0)

    def __post_init__(self):
        super().__post_init__()
        if self.band == "expected" and not self.num_features:
            raise InputError("num_features must be at least 1 with band expected, got 0")
        if self.band == "expected" and self.num_updates > 1:
            raise InputError(f"num_updates must be 1 with band expected, got {self.num_updates}")

    def at_site(self, site):
        return replace(self, band="expected") if site == "cross" and self.num_updates == 1 else self


class NearFar(Mechanism):
    """``A = diag(u) K̃ diag(w)``: exact scores within a window, features elsewhere, T half-updates, rows last.

        K̃_ij = exp(s·q_i·k_j)     for |i - j| ≤ W
        K̃_ij = φ(q_i)·ψ(k_j)      elsewhere
        φ_t(q) = exp(s·q·z_t - s‖q‖²/2 + c_t) / r
        ψ_t(k) = exp(s·k·z_t - s‖k‖²/2)

    As drawn, z ~ N(0, √d) and c = 0, φ·ψ is an unbiased estimate of exp(s·q·k): the positive features of [FAVOR]. A
    kernel that is sparse and exact here and of low rank there is [Scatterbrain]'s, and with Sinkhorn's updates
    [LocallyCorrectedNystrom]'s; entropic plans by positive features are [PositiveSinkhorn]'s. Time and memory are
    O(n (r + W) d) for any T.

    With T = 1 row i depends on query i alone: it may stand in the decoder, where the keys that left the window are
    summed up and the state has a constant size, and with ``band="expected"`` at cross. With T ≥ 3 columns come near
    their marginal; rows are exact for any T.

    :func:`~fairseq_lot.attention.reference.near_far_plan` computes the same in plain loops.

    Attributes:
        features: z, ``(num_heads, r, head_dim)``, learnt (else a buffer), in the space of q and k.
        feature_bias: c, ``(num_heads, r)``, likewise; zero at the start.
    """

    options_class = NearFarOptions
    options: NearFarOptions
    features: torch.Tensor
    feature_bias: torch.Tensor
    summarises = True
    counts_slots = True
    uncoupling_options = {"num_updates": 1}

    def __init__(self, **context):
        super().__init__(**context)
        options = self.options
        self.couples_queries = options.num_updates > 1
        self.positional = options.band == "diagonal"
        self.supports_causal = self.positional and not self.couples_queries
        generator = torch.Generator("cpu").manual_seed(options.seed * 1_000 + self.layer)
        shape = (self.num_heads, options.num_features, self.head_dim)
        if options.num_features:
            keep = self._learnt if options.learn_features else self.register_buffer
            keep("features", self.head_dim**0.25 * draw_normal(shape, generator))
            keep("feature_bias", torch.zeros(shape[:2]))

    def _learnt(self, name: str, value: torch.Tensor) -> None:
        self.register_parameter(name, nn.Parameter(value))

    def _logs(self, x: torch.Tensor) -> torch.Tensor:
        """``s·x·z_t - s‖x‖²/2``, ``(bsz, num_heads, len, r)``."""
        half_norms = x.square().sum(-1, keepdim=True) * (self.scaling / 2)
        return pivot_scores(x, at_least_float32(self.features) * self.scaling) - half_norms

    def query_logs(self, q: torch.Tensor) -> torch.Tensor | None:
        """``log φ(q)``, ``(bsz, num_heads, tgt_len, r)``; None without features. q is at least float32."""
        if not self.options.num_features:
            return None
        return self._logs(q) + (at_least_float32(self.feature_bias) - math.log(self.options.num_features))[:, None]

    def key_logs(self, k: torch.Tensor) -> torch.Tensor | None:
        """``log ψ(k)``, ``(bsz, num_heads, src_len, r)``; None without features. k is at least float32."""
        return self._logs(k) if self.options.num_features else None

    def attend(self, q, k, v, *, query_padding_mask, key_padding_mask, need_weights, causal):
        q, k, v = at_least_float32(q), at_least_float32(k), self._drop_keys(at_least_float32(v))
        if self.options.band == "expected":
            return self._attend_expected(q, self._summary(k, v, key_padding_mask), need_weights)
        q, logs = q * self.scaling, (self.query_logs(q), self.key_logs(k))
        if causal:
            early = k.size(2) - q.size(2)  # keys before the first query
            q, query_logs = (x if x is None else nn.functional.pad(x, (0, 0, early, 0)) for x in (q, logs[0]))

            def apply(v):
                return self._apply_causal(q, k, v, query_logs, logs[1], key_padding_mask)[:, :, early:]
        else:
            mass = self._log_masses(q, k, *logs, query_padding_mask, key_padding_mask)

            def apply(v):
                return near_far(q, k, v, *logs, mass, window=self.options.window)[0]

        weights = None
        if need_weights:
            identity = torch.eye(k.size(2), dtype=k.dtype, device=k.device)
            weights = apply(identity.expand(*k.shape[:2], -1, -1))
        return AttentionOutput(apply(v), weights)

    def _drop_keys(self, v):
        """Dropout of whole columns of A: what a key would give to all queries."""
        return v * self.drop(v.new_ones(v.shape[:3])).unsqueeze(-1) if self.dropout and self.training else v

    def _log_masses(self, q, k, query_logs, key_logs, query_padding_mask, key_padding_mask):
        """log w after all half-updates but the last, which is that of the rows; None: all keys alike."""
        query_pads, key_pads = without_empty(query_padding_mask), without_empty(key_padding_mask)
        logs_of_pads = [
            None if pads is None else x.new_zeros(pads.shape).masked_fill(pads, -torch.inf).unsqueeze(1)
            for x, pads in ((q, query_pads), (k, key_pads))
        ]
        rows = [q, k, query_logs, key_logs]
        columns = [k, q, key_logs, query_logs]
        f, g = logs_of_pads
        for left in range(self.options.num_updates, 1, -1):
            if left % 2 == 1:
                f = self._update(rows, g, query_pads)
            else:
                g = self._update(columns, f, key_pads)
        return g

    def _update(self, sides, log_mass, pads):
        """A half-update: minus the log of the sums of the rows, -inf at pads and where a row has no mass."""
        x, y, x_logs, y_logs = sides
        nothing = y.new_empty(*y.shape[:3], 0)
        _, sums = near_far(x, y, nothing, x_logs, y_logs, log_mass, window=self.options.window)
        empty = sums == torch.finfo(sums.dtype).min
        return (-sums).masked_fill(empty if pads is None else empty | pads.unsqueeze(1), -torch.inf)

    def _apply_causal(self, q, k, v, query_logs, key_logs, key_padding_mask):
        """``A v``: the band, and the features of the keys before it, by prefix sums."""
        mass = None
        if key_padding_mask is not None:
            mass = k.new_zeros(key_padding_mask.shape).masked_fill(key_padding_mask, -torch.inf).unsqueeze(1)
        values, log_sums = near_far(q, k, v, None, None, mass, window=self.options.window, causal=True)
        if query_logs is None:
            return values
        if key_padding_mask is not None:
            key_logs = key_logs.masked_fill(key_padding_mask[:, None, :, None], _NO_MASS)
        # a key counts from the query on whose window it has left
        n, late = k.size(2), min(self.options.window + 1, k.size(2))
        key_logs = nn.functional.pad(key_logs[:, :, : n - late], (0, 0, late, 0), value=_NO_MASS)
        v = nn.functional.pad(v[:, :, : n - late], (0, 0, late, 0))
        far = query_logs + torch.logcumsumexp(key_logs, 2)
        scores = key_logs.masked_fill(key_logs == _NO_MASS, -torch.inf)
        far_values, _ = prefix_apply(torch.softmax(far, -1), scores, v, with_state=False)
        share = torch.sigmoid(torch.logsumexp(far, -1) - log_sums)
        return torch.lerp(values, far_values, share.unsqueeze(-1))

    def _summary(self, k, v, key_padding_mask):
        key_logs = self.key_logs(k)
        far = summarise_far(key_logs, v, without_empty(key_padding_mask))
        summary = {"key": k, "value": v, "key_logs": key_logs} | vars(far)
        return summary if key_padding_mask is None else {**summary, "key_padding_mask": without_empty(key_padding_mask)}

    def _attend_expected(self, q, summary, need_weights):
        far = FarSummary(summary["log_sums"], summary["means"], summary["positions"])
        values, weights = near_far_at_expected(
            q * self.scaling,
            summary["key"],
            summary["value"],
            self.query_logs(q),
            summary["key_logs"],
            far,
            summary.get("key_padding_mask"),
            window=self.options.window,
            need_weights=need_weights,
        )
        return AttentionOutput(values, weights)

    def summarise(self, k, v, key_padding_mask=None, need_weights=False):
        """Keys, values and their features, and what all of these sum up to."""
        if self.options.band == "diagonal":
            return super().summarise(k, v, key_padding_mask, need_weights)
        k, v = (at_least_float32(without_pads(x, key_padding_mask)) for x in (k, v))
        return self._summary(k.contiguous(), v.contiguous(), key_padding_mask)

    def attend_summary(self, q, summary, need_weights=False):
        if self.options.band == "diagonal":
            return super().attend_summary(q, summary, need_weights)
        output = self._attend_expected(at_least_float32(q), summary, need_weights)
        weights = None if output.weights is None else output.weights.to(q.dtype)
        return AttentionOutput(output.values.to(q.dtype), weights)

    def causal_step(self, q, k, v, key_padding_mask=None, state=None, need_weights=False):
        """Keeps the last W + 1 keys and values, and the sums of those before: of constant size."""
        keeps_all = "log_sums" not in state if state else need_weights
        if keeps_all or not self.options.num_features:
            return super().causal_step(q, k, v, key_padding_mask, state, need_weights)
        values = []
        for i in range(q.size(2)):
            now = (slice(None), slice(None), slice(i, i + 1))
            pads = None if key_padding_mask is None else key_padding_mask[:, i : i + 1]
            value, state = self._next_token(*(at_least_float32(x[now]) for x in (q, k, v)), pads, state)
            values.append(value)
        return AttentionOutput(torch.cat(values, 2).to(q.dtype)), state

    def _next_token(self, q, k, v, pads, state):
        """The values of one token, and the next state."""
        bias = None
        if pads is not None:
            v = without_pads(v, pads)
            bias = k.new_zeros(pads.shape).masked_fill(pads, -torch.inf)
        if not state:
            far = empty_prefix(self.key_logs(without_pads(k, pads)), v)
            state = {"key": k[:, :, :0], "value": v[:, :, :0], "log_sums": far.log_sums, "means": far.means}
        k, v = torch.cat([state["key"], without_pads(k, pads)], 2), torch.cat([state["value"], v], 2)
        if bias is not None or "log_mass" in state:
            seen = state.get("log_mass", k.new_zeros(k.size(0), k.size(2) - 1))
            bias = torch.cat([seen, k.new_zeros(k.size(0), 1) if bias is None else bias], 1)
        far = PrefixState(state["log_sums"], state["means"])
        if k.size(2) > self.options.window + 1:
            logs = self.key_logs(k[:, :, :1]).squeeze(2)
            if bias is not None:
                logs, bias = logs + bias[:, None, :1], bias[:, 1:]
            far = absorb(far, logs, v[:, :, 0])
            k, v = k[:, :, 1:], v[:, :, 1:]
        near = (q * self.scaling) @ k.transpose(-1, -2)
        if bias is not None:
            near = near + bias[:, None, None]
        shares = torch.softmax(torch.cat([near, self.query_logs(q) + far.log_sums.unsqueeze(2)], -1), -1)
        values = shares @ torch.cat([v, far.means], 2)
        state = {"key": k, "value": v, "log_sums": far.log_sums, "means": far.means}
        return values, state if bias is None else {**state, "log_mass": bias}
