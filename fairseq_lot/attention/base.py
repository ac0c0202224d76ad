"""The contract that every attention mechanism fulfils."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fairseq_lot.errors import InputError


def option(default: Any, help: str, *, minimum: float | None = None, above: float | None = None, choices=None):
    """A field of an options dataclass: its default, its ``--help`` text and its allowed range."""
    return dataclasses.field(
        default=default, metadata={"help": help, "minimum": minimum, "above": above, "choices": choices}
    )


@dataclass(frozen=True)
class Options:
    """Options of a mechanism; subclasses declare fields with :func:`option`, values are checked here."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            minimum, above, choices = (field.metadata[key] for key in ("minimum", "above", "choices"))
            if value is None and field.default is None:
                continue
            if (minimum is not None or above is not None) and not isinstance(value, (int, float)):
                raise InputError(f"{field.name} must be a number, got {value!r}")
            if minimum is not None and not value >= minimum:
                raise InputError(f"{field.name} must be at least {minimum}, got {value}")
            if above is not None and not above < value < float("inf"):
                raise InputError(f"{field.name} must be a finite number greater than {above}, got {value}")
            if choices is not None and value not in choices:
                raise InputError(f"{field.name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True)
class AttentionOutput:
    """What a mechanism returns.

    Attributes:
        values: ``(bsz, num_heads, tgt_len, head_dim)``; zero at padded queries.
        plan: ``A = n·plan``, ``(bsz, num_heads, tgt_len, src_len)``, when it was asked for; zero rows at
            padded queries and zero columns at padded keys.
    """

    values: torch.Tensor
    plan: torch.Tensor | None = None


class Mechanism(nn.Module):
    """An attention mechanism on separate batch and head axes.

    Subclasses set the class attributes and implement :meth:`attend`, which gets inputs whose padded slots are
    already zero.

    Args:
        num_heads: number of heads.
        head_dim: width of a query and of a key in one head.
        options: an instance of ``options_class``.
        layer: 0-based index of the layer in its stack; seeds initial values, so that layers differ.
        dropout: probability of dropping an entry of A (for lot: of its query side) during training.
    """

    options_class: ClassVar[type[Options]] = Options
    #: row i of A depends on the other queries, so the mechanism cannot decode step by step
    couples_queries: bool = True
    #: A depends on where queries and keys stand, so both must be tokens of one sentence
    positional: bool = False
    #: queries and keys are the same tokens, so their numbers must agree
    tied_tokens: bool = False
    #: values of neighbouring tokens, later ones included, are mixed before they are attended to
    mixes_values: bool = False
    #: :meth:`attend` honours ``causal=True`` (query i sees no later key)
    supports_causal: ClassVar[bool] = False

    def __init__(self, *, num_heads: int, head_dim: int, options: Options, layer: int = 0, dropout: float = 0.0):
        super().__init__()
        if num_heads < 1 or head_dim < 1:
            raise InputError(f"num_heads and head_dim must be at least 1, got {num_heads} and {head_dim}")
        self.num_heads, self.head_dim, self.options = num_heads, head_dim, options
        self.layer, self.dropout = layer, dropout
        self.scaling = head_dim**-0.5

    def attend(self, q, k, v, *, query_padding_mask, key_padding_mask, need_plan, causal) -> AttentionOutput:
        """Compute ``A v`` (and A when ``need_plan``); see :meth:`forward` for the shapes."""
        raise NotImplementedError

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        query_padding_mask: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_plan: bool = False,
        *,
        causal: bool = False,
    ) -> AttentionOutput:
        """Attend: ``values = A v``.

        Args:
            q: ``(bsz, num_heads, tgt_len, head_dim)``, not yet scaled.
            k: ``(bsz, num_heads, src_len, head_dim)``.
            v: ``(bsz, num_heads, src_len, value_dim)``.
            query_padding_mask: ``(bsz, tgt_len)`` bool, True = pad; padded slots may hold anything, NaN included.
                In self-attention pass the same object as ``key_padding_mask``.
            key_padding_mask: ``(bsz, src_len)`` bool, True = pad.
            need_plan: also return A.
            causal: query i sees keys 0 .. i + src_len - tgt_len only.

        Raises:
            InputError: ``causal`` with a mechanism that does not support it, or queries that are not the keys' tokens
                with a mechanism that ties them.
        """
        if self.tied_tokens and q.size(-2) != k.size(-2):
            name = type(self).__name__.lower()
            raise InputError(f"{name} attention ties queries to keys; got {q.size(-2)} queries and {k.size(-2)} keys")
        if causal and self.mixes_values:
            name = type(self).__name__.lower()
            raise InputError(f"{name} attention mixes values with later ones, so it cannot be causal")
        if causal and not self.supports_causal:
            raise InputError(f"{type(self).__name__.lower()} attention cannot be causal")
        if query_padding_mask is not None:
            q = q.masked_fill(query_padding_mask[:, None, :, None], 0.0)
        if key_padding_mask is not None:
            key_slots = key_padding_mask[:, None, :, None]
            k, v = k.masked_fill(key_slots, 0.0), v.masked_fill(key_slots, 0.0)
        output = self.attend(
            q,
            k,
            v,
            query_padding_mask=query_padding_mask,
            key_padding_mask=key_padding_mask,
            need_plan=need_plan,
            causal=causal,
        )
        values, plan = output.values.to(v.dtype), output.plan
        if query_padding_mask is not None:
            values = values.masked_fill(query_padding_mask[:, None, :, None], 0.0)
        if plan is not None:
            plan = plan.to(v.dtype)
            if query_padding_mask is not None:
                plan = plan.masked_fill(query_padding_mask[:, None, :, None], 0.0)
        return AttentionOutput(values, plan)

    def drop(self, weights: torch.Tensor) -> torch.Tensor:
        """Attention dropout, active in training only."""
        return nn.functional.dropout(weights, self.dropout, self.training) if self.dropout else weights

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, {self.options}"
