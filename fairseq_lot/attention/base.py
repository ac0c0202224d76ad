"""The contract that every attention mechanism fulfils."""

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

#: what a mechanism keeps while it decodes: tensors by name, batch first, so that a beam is followed by their rows
DecodeCache: TypeAlias = dict[str, Tensor]


class Masks(NamedTuple):
    """What does not count in an attention.

    Attributes:
        query_pads: ``(bsz, tgt_len)`` bool, True = pad; None: there are none.
        key_pads: ``(bsz, src_len)``, likewise; in self-attention the same object.
        causal: query i sees keys 0 .. i + src_len - tgt_len only.
    """

    query_pads: Pads
    key_pads: Pads
    causal: bool


class AttentionOutput(NamedTuple):
    """What a mechanism returns.

    Attributes:
        values: ``(bsz, num_heads, tgt_len, head_dim)``; zero at padded queries.
        weights: ``A = n·plan``, ``(bsz, num_heads, tgt_len, src_len)``, when it was asked for; zero rows at
            padded queries and zero columns at padded keys, unless all are pads. A differential form has one A for two
            heads.
    """

    values: Tensor
    weights: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "AttentionOutput":
        """The same in another dtype."""
        return AttentionOutput(self.values.to(dtype), None if self.weights is None else self.weights.to(dtype))


def without_pads(x: Tensor, padding_mask: Pads) -> Tensor:
    """``x``, ``(bsz, num_heads, len, c)``, with zeros in the padded slots, whatever stood there."""
    return x if padding_mask is None else x.masked_fill(padding_mask[:, None, :, None], 0.0)


def joined_pads(cache: DecodeCache, key_padding_mask: Pads, k: Tensor) -> Pads:
    """The mask of the keys that a cache holds and of new ones, ``(bsz, number of both)``; None: neither has pads."""
    masks = (cache.get("key_padding_mask"), cache["key"].size(2)), (key_padding_mask, k.size(2))
    if all(mask is None for mask, _ in masks):
        return None
    no_pads = k.new_zeros(k.size(0), 1, dtype=torch.bool)
    return torch.cat([no_pads.expand(-1, length) if mask is None else mask for mask, length in masks], 1)


def draw_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard normal numbers of a generator on the CPU, on torch's default device: the same ones on any."""
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def _outside_of_autocast(device_type):
    """No autocast; torch.export records this context, and torch may not load what was saved with it."""
    needless = is_exporting() and not torch.is_autocast_enabled(device_type)
    return contextlib.nullcontext() if needless else torch.autocast(device_type, enabled=False)


def refuse_scripting(module: nn.Module) -> NoReturn:
    """Say in one line what torch.jit.script, which calls this first, would say on a page."""
    raise InputError("torch.jit.script cannot compile modules of fairseq_lot; use torch.export.export")


@dataclass(frozen=True)
class Traits:
    """What others need to know of a mechanism with its options; a wrapper passes them on.

    Attributes:
        couples_queries: row i of A depends on the other queries, so the mechanism cannot decode step by step.
        uncoupling_options: ``(name, value)`` of the options with which it does not, if there are such options.
        positional: A depends on the positions of queries and keys, so both must be tokens of one sentence.
        tied_tokens: queries and keys are the same tokens, so their numbers must agree.
        mixes_values: values of neighbouring tokens, later ones included, are mixed before they are attended to.
        counts_slots: A depends on the slots that tokens stand in, so pads may stand at the ends of a sentence only.
        is_causal: :meth:`Mechanism.attend` honours ``causal=True`` (query i sees no later key).
        can_be_causal: it does with some options.
        is_stock: it is fairseq's own attention.
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
    """An attention mechanism on separate batch and head axes.

    Subclasses set ``options_class``, and in their constructor ``traits``. They implement :meth:`attend`, which gets
    inputs whose padded slots are already zero.

    Args:
        num_heads: number of heads.
        head_dim: width of a query and of a key in one head.
        options: an instance of ``options_class``.
        layer: 0-based index of the layer in its stack; seeds initial values, so that layers differ.
        dropout: probability of dropping an entry of A (lot, set: of its query side; esp, near_far: a column) during
            training, and where ``retain_dropout`` is set.
    """

    options_class: ClassVar[type[Options]] = Options
    # what torch.jit.trace would try to compile, before it comes to the line that refuses it
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
        """Store a parameter, or a buffer of the same name in checkpoints."""
        if learn:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def drawn(self, number: int, seed: int, std: float | None = None) -> Tensor:
        """``(num_heads, number, head_dim)`` normal numbers, of standard deviation ``head_dim^(1/4)`` if None is given.

        Seed and layer decide them, by a generator of their own: a swap draws the same ones wherever the model is built.
        """
        generator = torch.Generator("cpu").manual_seed(seed * 1_000 + self.layer)
        std = self.head_dim**0.25 if std is None else std
        return std * draw_normal((self.num_heads, number, self.head_dim), generator)

    def _title(self) -> str:
        """The mechanism's name in messages."""
        return type(self).__name__.lower()

    def fittable(self) -> list[nn.Parameter]:
        """The parameters that the gradient of a model in eval mode reaches, by which it is fitted to another."""
        return list(self.parameters())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, need_weights: bool) -> AttentionOutput:
        """Compute ``A v`` (and A when ``need_weights``); see :meth:`forward` for the shapes."""
        raise NotImplementedError

    def probes(self, like: Tensor) -> Tensor | None:
        """``(num_heads, r, head_dim)``: all that is needed of q and k are their products with these; None: more is.

        Who makes q and k by a projection may then make the products by a narrower one, for :meth:`forward_scored`; the
        mechanism has a method ``attend_scored`` of the products.

        Args:
            like: has the dtype and the device that q and k would have.
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
            query_padding_mask: ``(bsz, tgt_len)`` bool, True = pad; padded slots may hold anything, NaN included.
                In self-attention pass the same object as ``key_padding_mask``.
            key_padding_mask: ``(bsz, src_len)`` bool, True = pad.
            need_weights: also return A.
            causal: query i sees keys 0 .. i + src_len - tgt_len only.
            pads_are_zero: the padded slots of q, k and v hold zeros already.

        Raises:
            InputError: tensors of other shapes; ``causal`` with a mechanism that does not support it or with more
                queries than keys, or queries that are not the keys' tokens with a mechanism that ties them.
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
        """:meth:`forward` on the products of q and k with :meth:`probes`, ``(bsz, num_heads, len, r)``."""
        return self._attend_without_pads(self.attend_scored, query_scores, key_scores, v, masks, need_weights)

    def _attend_without_pads(self, attend, q, k, v, masks, need_weights, *, pads_are_zero=False):
        """Attend with zeros in the padded slots of what goes in (unless ``pads_are_zero``) and of what comes out."""
        name = self._title()
        if torch.jit.is_tracing():
            raise InputError(
                "torch.jit.trace would fix for all sentences what the attention decides by their lengths and "
                "scores; use torch.export.export"
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
        """``p(pivot | query)`` and ``p(key | pivot)``, whose product is A; None where there are no pivots.

        Arguments as for :meth:`forward`, pads zero.
        """
        return None

    def pivot_problem(self, q: Tensor, k: Tensor) -> PivotProblem | None:
        """The arguments from which :meth:`coupling` makes its plans; None where these do not define it."""
        return None

    def epsilon(self) -> float | Tensor:
        """The entropic regularisation, or one of every head, ``(num_heads, 1, 1)``; 1 (softmax's) if there is none."""
        return getattr(self.options, "epsilon", 1.0)

    def combine_heads(self, x: Tensor) -> Tensor:
        """One tensor for the heads that share an A: ``(bsz, num_heads, ...) -> (bsz, heads, ...)``."""
        return x

    def summarise(self, k: Tensor, v: Tensor, key_padding_mask: Pads = None, need_weights: bool = False) -> DecodeCache:
        """All that :meth:`attend_summary` needs of the keys, computed once; for mechanisms that couple no queries.

        Args:
            k, v, key_padding_mask: as for :meth:`forward`.
            need_weights: A will be asked for.
        """
        k, v = (without_pads(x, key_padding_mask).contiguous() for x in (k, v))
        return self._cache_of(k, v, key_padding_mask)

    @staticmethod
    def _cache_of(k, v, key_padding_mask):
        """Keys and values themselves, zero at pads, by name."""
        kept = {"key": k, "value": v}
        return kept if key_padding_mask is None else {**kept, "key_padding_mask": key_padding_mask}

    def attend_summary(self, q: Tensor, summary: DecodeCache, need_weights: bool = False) -> AttentionOutput:
        """:meth:`forward` on summarised keys; no weights if the summary was made without."""
        mask = summary.get("key_padding_mask")
        return self(q, summary["key"], summary["value"], None, mask, need_weights, pads_are_zero=True)

    def causal_step(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Pads, cache: DecodeCache, need_weights: bool
    ) -> tuple[AttentionOutput, DecodeCache]:
        """Causal :meth:`forward` for the next tokens.

        Args:
            q, k, v, key_padding_mask: as for :meth:`forward`, of the new tokens alone.
            cache: what the previous step returned; empty at the start.
            need_weights: also return A over all keys so far; ask from the first step on, or never.

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
        """Attention dropout, where it :attr:`drops`."""
        return nn.functional.dropout(weights, self.dropout) if self.drops else weights

    def drop_keys(self, v: Tensor) -> Tensor:
        """Dropout of whole columns of A: what a key would give to all queries."""
        return v * self.drop(v.new_ones(v.shape[:3])).unsqueeze(-1) if self.drops else v

    @property
    def drops(self) -> bool:
        """Whether dropout is active: in training, and after that where it is retained."""
        return self.dropout > 0 and (self.training or self.retain_dropout)

    def set_epoch(self, epoch: int) -> None:
        """Called when an epoch of training begins, counted from 1; for mechanisms that change during training.

        State that they need to translate as they were trained belongs in a buffer.
        """

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, {self.options}"
