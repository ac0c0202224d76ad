"""near_far attention: a kernel that is exact near the diagonal and of low rank elsewhere."""

from dataclasses import dataclass, fields, replace

import torch
from torch import nn

from fairseq_lot.attention.base import AttentionOutput, Mechanism, draw_normal, without_pads
from fairseq_lot.attention.options import Options, option
from fairseq_lot.errors import InputError
from fairseq_lot.transport.marginals import at_least_float32, without_empty
from fairseq_lot.transport.near_far import FarSummary, feature_logs, near_far, near_far_at_expected, summarise_far
from fairseq_lot.transport.pivots_causal import PrefixState, absorb, empty_prefix, prefix_apply

# The log of no mass: far below all others, and finite, so that sums of it have gradients.
_NO_MASS = -1e30
# Logs of features of keys that differ by less can be taken relative to the largest of a sentence, whatever the row.
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

    def _logs(self, x: torch.Tensor) -> torch.Tensor | None:
        """``s·x·z_t - s‖x‖²/2 - (log r)/2``, ``(bsz, num_heads, len, r)``; None without features."""
        return feature_logs(x, self.features, scale=self.scaling) if self.options.num_features else None

    def query_logs(self, q: torch.Tensor) -> torch.Tensor | None:
        """``log φ(q)``, up to ``(log r)/2``, ``(bsz, num_heads, tgt_len, r)``. q is at least float32."""
        logs = self._logs(q)
        return logs if logs is None else logs + self.feature_bias[:, None]

    def key_logs(self, k: torch.Tensor) -> torch.Tensor | None:
        """``log ψ(k)``, less ``(log r)/2``, ``(bsz, num_heads, src_len, r)``. k is at least float32."""
        return self._logs(k)

    def attend(self, q, k, v, masks, need_weights):
        query_padding_mask, key_padding_mask, causal = masks
        tokens = at_least_float32(torch.cat([q, k], 2))  # one kernel each for both
        q, k = sides = tokens.split([q.size(2), k.size(2)], 2)
        v = self._drop_keys(at_least_float32(v))
        if self.options.band == "expected":
            return self._attend_expected(q, self._summary(k, v, key_padding_mask), need_weights)
        if causal:
            early = k.size(2) - q.size(2)  # keys before the first query
            q = nn.functional.pad(q, (0, 0, early, 0))
            logs = self.query_logs(q), self.key_logs(k)

            apply_causal = self._in_blocks if _moderate(logs[1]) else self._by_prefixes

            def apply(v):
                return apply_causal(q, k, v, *logs, key_padding_mask)[:, :, early:]
        else:
            both = self._logs(tokens)
            logs = (None, None) if both is None else both.split([q.size(2), k.size(2)], 2)
            mass = self._log_masses(sides, logs, query_padding_mask, key_padding_mask)

            def apply(v):
                return self._products(sides, v, logs, mass)[0]

        weights = None
        if need_weights:
            identity = torch.eye(k.size(2), dtype=k.dtype, device=k.device)
            weights = apply(identity.expand(*k.shape[:2], -1, -1))
        return AttentionOutput(apply(v), weights)

    def _products(self, sides, v, logs, log_mass, *, with_log_sums=False):
        """:func:`near_far` of two sides and the logs of their features, with c."""
        settings = {"window": self.options.window, "scale": self.scaling, "with_log_sums": with_log_sums}
        bias = self.feature_bias if self.options.num_features else None
        return near_far(*sides, v, *logs, log_mass, bias, **settings)

    def _drop_keys(self, v):
        """Dropout of whole columns of A: what a key would give to all queries."""
        return v * self.drop(v.new_ones(v.shape[:3])).unsqueeze(-1) if self.dropout and self.training else v

    def _log_masses(self, sides, logs, query_padding_mask, key_padding_mask):
        """log w after all half-updates but the last, which is that of the rows; None: all keys alike."""
        g = _log_mass(key_padding_mask, sides[1])
        if self.options.num_updates > 1:
            f = _log_mass(query_padding_mask, sides[0])
        for left in range(self.options.num_updates, 1, -1):
            if left % 2 == 1:
                f = self._update(sides, logs, g, query_padding_mask)
            else:
                g = self._update(sides[::-1], logs[::-1], f, key_padding_mask)
        return g

    def _update(self, sides, logs, log_mass, pads):
        """A half-update: minus the log of the sums of the rows, -inf at pads and where a row has no mass."""
        nothing = sides[1].new_empty(*sides[1].shape[:3], 0)
        _, sums = self._products(sides, nothing, logs, log_mass, with_log_sums=True)
        empty = sums == torch.finfo(sums.dtype).min
        return (-sums).masked_fill(empty if pads is None else empty | pads.unsqueeze(1), -torch.inf)

    def _in_blocks(self, q, k, v, query_logs, key_logs, key_padding_mask):
        """``A v``, causal, where no later key's feature is too far above that of an earlier one."""
        settings = {"window": self.options.window, "scale": self.scaling, "causal": True, "with_log_sums": False}
        return near_far(q, k, v, query_logs, key_logs, _log_mass(key_padding_mask, k), **settings)[0]

    def _by_prefixes(self, q, k, v, query_logs, key_logs, key_padding_mask):
        """``A v``, causal: the band, and the features of the keys before it, by prefix sums."""
        settings = {"window": self.options.window, "scale": self.scaling, "causal": True}
        values, log_sums = near_far(q, k, v, None, None, _log_mass(key_padding_mask, k), **settings)
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
        key_padding_mask = without_empty(key_padding_mask)
        far = summarise_far(self.key_logs(k) + self.feature_bias[:, None], v, key_padding_mask)
        summary = {"key": k * self.scaling, "value": v} | vars(far)
        return summary if key_padding_mask is None else {**summary, "key_padding_mask": key_padding_mask}

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
            value, state = self._next_token(*(x[now] for x in (q, k, v)), pads, state)
            values.append(value.to(q.dtype))
        return AttentionOutput(values[0] if len(values) == 1 else torch.cat(values, 2)), state

    def _next_token(self, q, k, v, pads, state):
        """The values of one token, and the next state, at least float32: what is put beside it gets its precision."""
        k, v = without_pads(k, pads), without_pads(v, pads)
        if not state:
            k, v = at_least_float32(k), at_least_float32(v)
            far = empty_prefix(self.key_logs(k), v)
            state = {"key": k[:, :, :0], "value": v[:, :, :0], "log_sums": far.log_sums, "means": far.means}
        k, v = torch.cat([state["key"], k], 2), torch.cat([state["value"], v], 2)
        log_mass = None
        if pads is not None or "log_mass" in state:
            seen = state.get("log_mass", k.new_zeros(k.size(0), 1, k.size(2) - 1))
            now = k.new_zeros(k.size(0), 1, 1) if pads is None else _log_mass(pads, k)
            log_mass = torch.cat([seen, now], 2)
        far = PrefixState(state["log_sums"], state["means"])
        tokens = torch.cat([q, k[:, :, :1]], 2)
        logs = self._logs(tokens)
        if k.size(2) > self.options.window + 1:
            leaving = logs[:, :, 1]
            if log_mass is not None:
                leaving, log_mass = leaving + log_mass[:, :, :1], log_mass[:, :, 1:]
            far = absorb(far, leaving, v[:, :, 0])
            k, v = k[:, :, 1:], v[:, :, 1:]
        heads = tokens[:, :, :1].flatten(0, 1), k.flatten(0, 1).transpose(-1, -2)
        near = torch.baddbmm(k.new_empty(()), *heads, beta=0, alpha=self.scaling).unflatten(0, k.shape[:2])
        if log_mass is not None:
            near = near + log_mass.unsqueeze(2)
        through = logs[:, :, :1] + (far.log_sums + self.feature_bias).unsqueeze(2)
        shares = torch.softmax(torch.cat([near, through], -1), -1)
        values = shares @ torch.cat([v, far.means], 2)
        state = {"key": k, "value": v, "log_sums": far.log_sums, "means": far.means}
        return values, state if log_mass is None else {**state, "log_mass": log_mass}


def _moderate(key_logs: torch.Tensor | None) -> bool:
    """Powers of all keys may be taken relative to the largest. Seen on the CPU alone, where looking costs nothing."""
    if key_logs is None:
        return True
    if key_logs.device.type != "cpu" or not key_logs.numel():
        return False
    low, high = key_logs.detach().aminmax()
    return (high - low).item() < _MODERATE


def _log_mass(padding_mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """``(bsz, 1, len)``: 0, and -inf at pads; None without a mask."""
    if padding_mask is None:
        return None
    return like.new_zeros(padding_mask.shape).masked_fill_(padding_mask, -torch.inf).unsqueeze(1)
