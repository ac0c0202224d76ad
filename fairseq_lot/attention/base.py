"""The contract that every attention mechanism fulfils."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fairseq_lot.attention.options import Options
from fairseq_lot.errors import InputError


@dataclass(frozen=True)
class AttentionOutput:
    """What a mechanism returns.

    Attributes:
        values: ``(bsz, num_heads, tgt_len, head_dim)``; zero at padded queries.
        weights: ``A = n·plan``, ``(bsz, num_heads, tgt_len, src_len)``, when it was asked for; zero rows at
            padded queries and zero columns at padded keys.
    """

    values: torch.Tensor
    weights: torch.Tensor | None = None


def without_pads(x: torch.Tensor, padding_mask: torch.Tensor | None) -> torch.Tensor:
    """``x``, ``(bsz, num_heads, len, c)``, with zeros in the padded slots, whatever stood there."""
    return x if padding_mask is None else x.masked_fill(padding_mask[:, None, :, None], 0.0)


def draw_normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Standard normal numbers of a generator on the CPU, on torch's default device: the same ones on any."""
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


class Mechanism(nn.Module):
    """An attention mechanism on separate batch and head axes.

    Subclasses set the class attributes and implement :meth:`attend`, which gets inputs whose padded slots are
    already zero.

    Args:
        num_heads: number of heads.
        head_dim: width of a query and of a key in one head.
        options: an instance of ``options_class``.
        layer: 0-based index of the layer in its stack; seeds initial values, so that layers differ.
        dropout: probability of dropping an entry of A (lot: of its query side, esp: a column) during training.
    """

    options_class: ClassVar[type[Options]] = Options
    #: row i of A depends on the other queries, so the mechanism cannot decode step by step
    couples_queries: bool = True
    #: A depends on the positions of queries and keys, so both must be tokens of one sentence
    positional: bool = False
    #: queries and keys are the same tokens, so their numbers must agree
    tied_tokens: bool = False
    #: values of neighbouring tokens, later ones included, are mixed before they are attended to
    mixes_values: bool = False
    #: A depends on the slots that tokens stand in, so pads may stand at the ends of a sentence only
    counts_slots: ClassVar[bool] = False
    #: :meth:`attend` honours ``causal=True`` (query i sees no later key)
    supports_causal: bool = False
    #: :meth:`summarise` and :meth:`causal_step` keep less than keys and values
    summarises: ClassVar[bool] = False
    #: the values of options with which the queries are not coupled, if there are such options
    uncoupling_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, *, num_heads: int, head_dim: int, options: Options, layer: int = 0, dropout: float = 0.0):
        super().__init__()
        if num_heads < 1 or head_dim < 1:
            raise InputError(f"num_heads and head_dim must be at least 1, got {num_heads} and {head_dim}")
        self.num_heads, self.head_dim, self.options = num_heads, head_dim, options
        self.layer, self.dropout = layer, dropout
        self.scaling = head_dim**-0.5

    def attend(self, q, k, v, *, query_padding_mask, key_padding_mask, need_weights, causal) -> AttentionOutput:
        """Compute ``A v`` (and A when ``need_weights``); see :meth:`forward` for the shapes."""
        raise NotImplementedError

    def attend_scored(
        self, query_scores, key_scores, v, *, query_padding_mask, key_padding_mask, need_weights, causal
    ) -> AttentionOutput:
        """:meth:`attend` on the products of q and k with :meth:`probes`, ``(bsz, num_heads, len, r)``."""
        raise NotImplementedError

    def probes(self, like: torch.Tensor) -> torch.Tensor | None:
        """``(num_heads, r, head_dim)``: all that is needed of q and k are their products with these; None: more is.

        Who makes q and k by a projection may then make the products by a narrower one, and pass them to
        :meth:`forward` instead.

        Args:
            like: has the dtype and the device that q and k would have.
        """
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        query_padding_mask: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        *,
        causal: bool = False,
        masked: bool = False,
        scored: bool = False,
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
            masked: the padded slots of q, k and v hold zeros already.
            scored: q and k are their products with :meth:`probes`.

        Raises:
            InputError: ``causal`` with a mechanism that does not support it, or queries that are not the keys' tokens
                with a mechanism that ties them.
        """
        name = type(self).__name__.lower()
        if self.tied_tokens and q.size(-2) != k.size(-2):
            raise InputError(f"{name} attention ties queries to keys; got {q.size(-2)} queries and {k.size(-2)} keys")
        if causal and not self.supports_causal:
            raise InputError(f"{name} attention cannot be causal")
        if not masked:
            q = without_pads(q, query_padding_mask)
            k, v = without_pads(k, key_padding_mask), without_pads(v, key_padding_mask)
        masks = {"query_padding_mask": query_padding_mask, "key_padding_mask": key_padding_mask}
        with torch.autocast(q.device.type, enabled=False):  # each mechanism chooses its own precision
            attend = self.attend_scored if scored else self.attend
            output = attend(q, k, v, **masks, need_weights=need_weights, causal=causal)
        values, weights = without_pads(output.values.to(v.dtype), query_padding_mask), output.weights
        if weights is not None:
            weights = without_pads(weights.to(v.dtype), query_padding_mask)
        return AttentionOutput(values, weights)

    def factors(self, q, k, query_padding_mask=None, key_padding_mask=None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """``p(pivot | query)`` and ``p(key | pivot)``, whose product is A; None where there are no pivots.

        Arguments as for :meth:`forward`; ``(bsz, num_heads, tgt_len, r)`` and ``(bsz, num_heads, r, src_len)``.
        """
        return None

    def summarise(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
    ) -> dict[str, torch.Tensor]:
        """All that :meth:`attend_summary` needs of the keys, computed once; for mechanisms that couple no queries.

        Args:
            k, v, key_padding_mask: as for :meth:`forward`.
            need_weights: A will be asked for.

        Returns:
            Tensors by name, batch first, so that a beam is followed with ``index_select(0, order)``.
        """
        k, v = (without_pads(x, key_padding_mask).contiguous() for x in (k, v))
        return self._keep_all(k, v, key_padding_mask)

    @staticmethod
    def _keep_all(k, v, key_padding_mask):
        """Keys and values themselves, zero at pads, by name."""
        kept = {"key": k, "value": v}
        return kept if key_padding_mask is None else {**kept, "key_padding_mask": key_padding_mask}

    def attend_summary(
        self, q: torch.Tensor, summary: dict[str, torch.Tensor], need_weights: bool = False
    ) -> AttentionOutput:
        """:meth:`forward` on summarised keys; no weights if the summary was made without."""
        mask = summary.get("key_padding_mask")
        return self(q, summary["key"], summary["value"], None, mask, need_weights, masked=True)

    def causal_step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        state: dict[str, torch.Tensor] | None = None,
        need_weights: bool = False,
    ) -> tuple[AttentionOutput, dict[str, torch.Tensor]]:
        """Causal :meth:`forward` for the next tokens.

        Args:
            q, k, v, key_padding_mask: as for :meth:`forward`, of the new tokens alone.
            state: what the previous step returned; None at the start.
            need_weights: also return A over all keys so far; ask from the first step on, or never.

        Returns:
            The output for the new queries, and the next state: tensors by name, batch first.
        """
        k, v = without_pads(k, key_padding_mask), without_pads(v, key_padding_mask)
        if state:
            seen, new = state["key"].size(2), k.size(2)
            k, v = torch.cat([state["key"], k], 2), torch.cat([state["value"], v], 2)
            masks = (state.get("key_padding_mask"), seen), (key_padding_mask, new)
            if any(mask is not None for mask, _ in masks):
                no_pads = torch.zeros(k.size(0), seen + new, dtype=torch.bool, device=k.device)
                key_padding_mask = torch.cat(
                    [no_pads[:, :length] if mask is None else mask for mask, length in masks], 1
                )
        output = self(q, k, v, None, key_padding_mask, need_weights, causal=True, masked=True)
        return output, self._keep_all(k, v, key_padding_mask)

    def drop(self, weights: torch.Tensor) -> torch.Tensor:
        """Attention dropout, active in training only."""
        return nn.functional.dropout(weights, self.dropout, self.training) if self.dropout else weights

    def set_epoch(self, epoch: int) -> None:
        """Called when an epoch of training begins, counted from 1; for mechanisms that change during training.

        State that they need to translate as they were trained belongs in a buffer.
        """

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, {self.options}"
