"""The interface of all attention mechanisms."""

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from fairseq_lot.attention.options import Options
from fairseq_lot.errors import InputError
from fairseq_lot.transport.exporting import is_exporting
from fairseq_lot.transport.marginals import Pads
from fairseq_lot.transport.pivots import Coupling, PivotProblem

#: the cache of a mechanism during decoding: tensors by name, batch first, so that beam search can reorder their rows
DecodeCache: TypeAlias = dict[str, Tensor]


class Masks(NamedTuple):
    """The masks of an attention.

    Attributes:
        query_pads: ``(bsz, tgt_len)`` bool, True = pad; None: no pads.
        key_pads: ``(bsz, src_len)`` bool, True = pad; None: no pads. In self-attention the same object as query_pads.
        causal: query i sees only the keys 0 .. i + src_len - tgt_len.
    """

    query_pads: Pads
    key_pads: Pads
    causal: bool


class AttentionOutput(NamedTuple):
    """The output of a mechanism.

    Attributes:
        values: ``(bsz, num_heads, tgt_len, head_dim)``; zero at padded queries.
        weights: ``A = n·plan``, ``(bsz, num_heads, tgt_len, src_len)``, if requested; zero rows at padded queries and
            zero columns at padded keys, unless all keys are pads. Differential attention has one A per two heads.
    """

    values: Tensor
    weights: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "AttentionOutput":
        """The output in another dtype."""
        return AttentionOutput(self.values.to(dtype), None if self.weights is None else self.weights.to(dtype))


def without_pads(x: Tensor, padding_mask: Pads) -> Tensor:
    """``x``, ``(bsz, num_heads, len, c)``, with zeros in the padded slots."""
    return x if padding_mask is None else x.masked_fill(padding_mask[:, None, :, None], 0.0)


def joined_pads(cache: DecodeCache, key_padding_mask: Pads, k: Tensor) -> Pads:
    """The padding mask of the cached and the new keys together, ``(bsz, number of both)``; None: no pads."""
    masks = (cache.get("key_padding_mask"), cache["key"].size(2)), (key_padding_mask, k.size(2))
    if all(mask is None for mask, _ in masks):
        return None
    no_pads = k.new_zeros(k.size(0), 1, dtype=torch.bool)
    return torch.cat([no_pads.expand(-1, length) if mask is None else mask for mask, length in masks], 1)


def draw_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard normal numbers on torch's default device, drawn by a generator on the CPU: equal on all devices."""
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def _outside_of_autocast(device_type):
    """A context that switches autocast off; during export an empty one if autocast is off already.

    torch may fail to load an exported model with a recorded autocast context.
    """
    needless = is_exporting() and not torch.is_autocast_enabled(device_type)
    return contextlib.nullcontext() if needless else torch.autocast(device_type, enabled=False)


def refuse_scripting(module: nn.Module) -> NoReturn:
    """Raise an InputError of one line; torch.jit.script calls this before it compiles and fails with a long message."""
    raise InputError("torch.jit.script cannot compile modules of fairseq_lot; use torch.export.export")


@dataclass(frozen=True)
class Traits:
    """Properties of a mechanism with its options, for the code around it.

    Attributes:
        couples_queries: row i of A depends on other queries, so the mechanism cannot decode step by step.
        uncoupling_options: ``(name, value)`` of options that make couples_queries false; empty if there are none.
        positional: A depends on the positions of queries and keys, so both must be tokens of one sentence.
        tied_tokens: queries and keys are the same tokens, so their numbers must agree.
        mixes_values: values of neighbouring tokens, later ones included, are mixed before the attention.
        counts_slots: A depends on the slots of tokens, so pads are allowed only at the ends of a sentence.
        is_causal: :meth:`Mechanism.attend` supports ``causal=True`` (query i sees no later key).
        can_be_causal: is_causal is true with some options.
        is_stock: the mechanism equals fairseq's own attention.
        heads_per_plan: number of heads that share one A.
        signed: A is a difference of plans and has negative entries.
    """

    couples_queries: bool = True
    uncoupling_options: tuple[tuple[str, Any], ...] = ()
    positional: bool = False
    tied_tokens: bool = False
    mixes_values: bool = False
    counts_slots: bool = False
    is_causal: bool = False
    can_be_causal: bool = False
    is_stock: bool = False
    heads_per_plan: int = 1
    signed: bool = False


class Mechanism(nn.Module):
    """Base class of attention mechanisms; batch and heads are separate axes.

    A subclass sets ``options_class``, sets ``traits`` in its constructor, and implements :meth:`attend`, whose inputs
    are zero at padded slots.

    Args:
        num_heads: number of heads.
        head_dim: width of a query and of a key in one head.
        options: an instance of ``options_class``.
        layer: 0-based index of the layer in its stack; part of the seed of initial values, so that layers differ.
        dropout: probability of dropping an entry of A in training, and also in evaluation if ``retain_dropout`` is set.
            lot and set drop entries of their query-side plan, esp and near_far drop whole columns of A.
    """

    options_class: ClassVar[type[Options]] = Options
    # torch.jit.trace would try to compile these before it reaches the line that refuses it
    __jit_ignored_attributes__ = ("options", "traits")
    __prepare_scriptable__ = refuse_scripting

    def __init__(self, *, num_heads: int, head_dim: int, options: Options, layer: int = 0, dropout: float = 0.0):
        super().__init__()
        if num_heads < 1 or head_dim < 1:
            raise InputError(f"num_heads and head_dim must be at least 1, got {num_heads} and {head_dim}")
        if not 0 <= dropout <= 1:
            raise InputError(f"dropout must be between 0 and 1, got {dropout}")
        self.num_heads, self.head_dim, self.options = num_heads, head_dim, options
        self.traits = Traits()
        self.layer, self.dropout = layer, dropout
        self.scaling = head_dim**-0.5
        self.retain_dropout = False

    def register(self, name: str, value: Tensor, *, learn: bool) -> None:
        """Register a tensor as a parameter if ``learn``, else as a buffer; the name in checkpoints is the same."""
        if learn:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def drawn(self, number: int, seed: int, std: float | None = None) -> Tensor:
        """Normal random numbers, ``(num_heads, number, head_dim)``; they depend on the seed and the layer alone.

        Args:
            number: vectors per head.
            seed: seed of a separate generator, so that a swap always draws the same numbers.
            std: standard deviation; None: ``head_dim^(1/4)``.
        """
        generator = torch.Generator("cpu").manual_seed(seed * 1_000 + self.layer)
        std = self.head_dim**0.25 if std is None else std
        return std * draw_normal((self.num_heads, number, self.head_dim), generator)

    def _title(self) -> str:
        """The mechanism's name, for messages."""
        return type(self).__name__.lower()

    def fittable(self) -> list[nn.Parameter]:
        """The parameters that a calibration fits: those with a gradient in eval mode."""
        return list(self.parameters())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, need_weights: bool) -> AttentionOutput:
        """Compute ``A v``, and A if ``need_weights``; shapes as in :meth:`forward`, inputs are zero at pads."""
        raise NotImplementedError

    def probes(self, like: Tensor) -> Tensor | None:
        """Vectors z, ``(num_heads, r, head_dim)``, such that only q·z and k·z are needed; None: q and k are needed.

        The caller may then compute the products by one narrow projection and call :meth:`forward_scored`. A mechanism
        with probes has a method ``attend_scored`` that gets the products.

        Args:
            like: a tensor with the dtype and the device of q and k.
        """
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_padding_mask: Pads = None,
        key_padding_mask: Pads = None,
        need_weights: bool = False,
        *,
        causal: bool = False,
        pads_are_zero: bool = False,
    ) -> AttentionOutput:
        """Attend: ``values = A v``.

        Args:
            q: ``(bsz, num_heads, tgt_len, head_dim)``, not yet scaled.
            k: ``(bsz, num_heads, src_len, head_dim)``.
            v: ``(bsz, num_heads, src_len, value_dim)``.
            query_padding_mask: ``(bsz, tgt_len)`` bool, True = pad; padded slots may contain anything, NaN included.
                In self-attention pass the same object as ``key_padding_mask``.
            key_padding_mask: ``(bsz, src_len)`` bool, True = pad.
            need_weights: also return A.
            causal: query i sees only the keys 0 .. i + src_len - tgt_len.
            pads_are_zero: the padded slots of q, k and v are already zero.

        Raises:
            InputError: tensors of other shapes; ``causal`` with a mechanism that does not support it or with more
                queries than keys; numbers of queries and keys that differ with a mechanism that ties them.
        """
        one_batch = q.ndim == k.ndim == v.ndim == 4 and q.shape[:2] == k.shape[:2] and k.shape[:3] == v.shape[:3]
        if not (one_batch and q.size(1) == self.num_heads and q.size(3) == k.size(3) == self.head_dim):
            raise InputError(
                f"q and k must be (bsz, {self.num_heads} heads, len, {self.head_dim}), with a value for each key; got "
                f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            )
        for mask, x in ((query_padding_mask, q), (key_padding_mask, k)):
            if mask is not None and (mask.shape != x.shape[::2] or mask.dtype != torch.bool):
                expected = f"bool, ({x.size(0)}, {x.size(2)})"
                raise InputError(f"a padding mask must be {expected}, got {mask.dtype}, {tuple(mask.shape)}")
        masks = Masks(query_padding_mask, key_padding_mask, causal)
        return self._attend_without_pads(self.attend, q, k, v, masks, need_weights, pads_are_zero=pads_are_zero)

    def forward_scored(
        self, query_scores: Tensor, key_scores: Tensor, v: Tensor, masks: Masks, need_weights: bool
    ) -> AttentionOutput:
        """:meth:`forward` for the products of q and k with :meth:`probes`, ``(bsz, num_heads, len, r)``."""
        return self._attend_without_pads(self.attend_scored, query_scores, key_scores, v, masks, need_weights)

    def _attend_without_pads(self, attend, q, k, v, masks, need_weights, *, pads_are_zero=False):
        """Check the arguments, then call ``attend`` with zeros at pads; padded rows of the output are zero.

        Args:
            attend: :meth:`attend`, or another method with the same arguments.
            q, k, v, masks, need_weights: the arguments of ``attend``.
            pads_are_zero: q, k and v are already zero at pads.
        """
        name = self._title()
        if torch.jit.is_tracing():
            raise InputError(
                "torch.jit.trace would record decisions that depend on lengths and scores; use torch.export.export"
            )
        if self.traits.tied_tokens and q.size(-2) != k.size(-2):
            raise InputError(f"{name} attention ties queries to keys; got {q.size(-2)} queries and {k.size(-2)} keys")
        if masks.causal and not self.traits.is_causal:
            raise InputError(f"{name} attention cannot be causal")
        if masks.causal and q.size(-2) > k.size(-2):
            raise InputError(f"causal attention needs a key for every query; got {q.size(-2)} and {k.size(-2)}")
        if not pads_are_zero:
            q, v = without_pads(q, masks.query_pads), without_pads(v, masks.key_pads)
            k = without_pads(k, masks.key_pads)
        if not (len(q) and q.size(2) and k.size(2)):  # an empty batch, or no tokens
            weights = q[:, :: self.traits.heads_per_plan, :, :1] * k.new_zeros(k.size(-2)) if need_weights else None
            return AttentionOutput(q[..., :1] * v.new_zeros(v.size(-1)), weights)
        with _outside_of_autocast(q.device.type):  # each mechanism chooses its own precision
            values, weights = attend(q, k, v, masks, need_weights).to(v.dtype)
        weights = None if weights is None else without_pads(weights, masks.query_pads)
        return AttentionOutput(without_pads(values, masks.query_pads), weights)

    def coupling(
        self, q: Tensor, k: Tensor, query_padding_mask: Pads = None, key_padding_mask: Pads = None
    ) -> Coupling | None:
        """The coupling through pivots, whose factors multiply to A; None for mechanisms without pivots.

        Arguments as for :meth:`forward`, zero at pads.
        """
        return None

    def pivot_problem(self, q: Tensor, k: Tensor) -> PivotProblem | None:
        """The arguments of :func:`pivot_coupling` that give :meth:`coupling`; None for mechanisms without pivots."""
        return None

    def epsilon(self) -> float | Tensor:
        """The entropic regularisation ε: a number, or one per head, ``(num_heads, 1, 1)``.

        1 for mechanisms without the option, because softmax is the entropic plan at ε = 1.
        """
        return getattr(self.options, "epsilon", 1.0)

    def combine_heads(self, x: Tensor) -> Tensor:
        """Combine the heads that share one A: ``(bsz, num_heads, ...) -> (bsz, heads, ...)``; here unchanged."""
        return x

    def summarise(self, k: Tensor, v: Tensor, key_padding_mask: Pads = None, need_weights: bool = False) -> DecodeCache:
        """Precompute from keys and values the cache that :meth:`attend_summary` reads, for cross-attention in decoding.

        For mechanisms that do not couple queries.

        Args:
            k, v, key_padding_mask: as for :meth:`forward`.
            need_weights: A will be requested.
        """
        k, v = (without_pads(x, key_padding_mask).contiguous() for x in (k, v))
        return self._cache_of(k, v, key_padding_mask)

    @staticmethod
    def _cache_of(k, v, key_padding_mask):
        """A cache of the keys and values, which are zero at pads."""
        kept = {"key": k, "value": v}
        return kept if key_padding_mask is None else {**kept, "key_padding_mask": key_padding_mask}

    def attend_summary(self, q: Tensor, summary: DecodeCache, need_weights: bool = False) -> AttentionOutput:
        """:meth:`forward` for summarised keys; no weights if the summary was made without them."""
        mask = summary.get("key_padding_mask")
        return self(q, summary["key"], summary["value"], None, mask, need_weights, pads_are_zero=True)

    def causal_step(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Pads, cache: DecodeCache, need_weights: bool
    ) -> tuple[AttentionOutput, DecodeCache]:
        """Causal :meth:`forward` for the next tokens in decoding.

        Args:
            q, k, v, key_padding_mask: as for :meth:`forward`, of the new tokens only.
            cache: the one that the previous step returned; empty at the start.
            need_weights: also return A over all keys so far; request it from the first step on, or never.

        Returns:
            The output for the new queries, and the next cache.
        """
        k, v = without_pads(k, key_padding_mask), without_pads(v, key_padding_mask)
        if cache:
            key_padding_mask = joined_pads(cache, key_padding_mask, k)
            k, v = torch.cat([cache["key"], k], 2), torch.cat([cache["value"], v], 2)
        output = self(q, k, v, None, key_padding_mask, need_weights, causal=True, pads_are_zero=True)
        return output, self._cache_of(k, v, key_padding_mask)

    def drop(self, weights: Tensor) -> Tensor:
        """Attention dropout of single entries of A; no change unless :attr:`drops`."""
        return nn.functional.dropout(weights, self.dropout) if self.drops else weights

    def drop_keys(self, v: Tensor) -> Tensor:
        """Dropout of whole columns of A: a key is dropped for all queries; no change unless :attr:`drops`."""
        return v * self.drop(v.new_ones(v.shape[:3])).unsqueeze(-1) if self.drops else v

    @property
    def drops(self) -> bool:
        """Whether dropout is active: in training, and with ``retain_dropout`` also in evaluation."""
        return self.dropout > 0 and (self.training or self.retain_dropout)

    def set_epoch(self, epoch: int) -> None:
        """Called at the start of a training epoch, counted from 1; for mechanisms that change during training.

        They keep their state in a buffer, so that a checkpoint translates as it was trained.
        """

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, {self.options}"
