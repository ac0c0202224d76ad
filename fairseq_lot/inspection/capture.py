"""Record inputs and weights of all attentions of a model while it runs."""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from fairseq_lot.attention.base import Mechanism, without_pads
from fairseq_lot.attention.differential import side_by_side
from fairseq_lot.attention.registry import DEFAULT, MECHANISMS, build_mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.modules.multihead_attention import split_heads
from fairseq_lot.modules.sites import attentions, unwrapped


@dataclass(frozen=True)
class Captured:
    """The record of one attention on one batch; entries at pads are arbitrary.

    Attributes:
        site, layer: the place of the attention; layers count from 0, as in parameter names.
        mechanism: the attention mechanism; None for fairseq's own softmax attention.
        q, k, v: projected queries, keys and values, ``(bsz, num_heads, len, head_dim)``; q is not scaled.
        causal: query i saw only the keys 0 .. i + src_len - tgt_len.
        weights: A, ``(bsz, heads, tgt_len, src_len)``; differential attention has one A per pair of heads.
    """

    site: str
    layer: int
    mechanism: Mechanism | None
    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    weights: Tensor

    @property
    def name(self) -> str:
        """The mechanism's name in the registry, such as "lot", "softmax with alibi" or "differential lot"."""
        if self.mechanism is None:
            return DEFAULT
        plans = unwrapped(self.mechanism)
        name = next((name for name, kind in MECHANISMS.items() if type(plans) is kind), type(plans).__name__)
        prior = getattr(plans.options, "prior", None)
        name = name if prior is None else f"{name} with {prior}"
        return name if plans is self.mechanism else f"differential {name}"

    @property
    def signed(self) -> bool:
        """Whether A is a difference of plans, with negative entries."""
        return self.mechanism is not None and self.mechanism.traits.signed

    @property
    def epsilon(self) -> float | Tensor:
        """The mechanism's epsilon: a number, or ``(heads, 1, 1)``; 1 for softmax and others without the option."""
        plans = unwrapped(self.mechanism)
        return 1.0 if plans is None else plans.epsilon()

    def softmax_weights(self, key_padding_mask: Tensor) -> Tensor:
        """The weights of softmax attention for the same q and k, shaped like ``weights``.

        Args:
            key_padding_mask: ``(bsz, src_len)`` bool, True = pad.
        """
        weights = _softmax(self.q, self.k, key_padding_mask, causal=self.causal)
        return weights if self.mechanism is None else self.mechanism.combine_heads(weights)

    def values_of_plans(self, key_padding_mask: Tensor) -> Tensor:
        """The values that each head's plan multiplies: v, or v after LOT's convolution.

        Args:
            key_padding_mask: ``(bsz, src_len)`` bool, True = pad.

        Returns:
            ``(bsz, num_heads, src_len, head_dim)``; arbitrary at pads.
        """
        convolution = getattr(unwrapped(self.mechanism), "convolution", None)
        return self.v if convolution is None else convolution(without_pads(self.v, key_padding_mask))

    def values(self, key_padding_mask: Tensor) -> Tensor:
        """The values that ``weights`` multiply.

        For differential attention with a convolution they are the values before the convolution: its two plans multiply
        different values.

        Args:
            key_padding_mask: ``(bsz, src_len)`` bool, True = pad.

        Returns:
            ``(bsz, heads, src_len, head_dim)``. For differential attention ``heads`` counts the pairs, and the last
            axis has the values of both heads of a pair.
        """
        return side_by_side(self.v) if self.signed else self.values_of_plans(key_padding_mask)

    def check_finite(self, path: object) -> None:
        """Raise InputError if weights or values are not finite; ``path`` is the checkpoint, for the message."""
        if not (self.weights.isfinite().all() and self.v.isfinite().all()):
            where = f"{self.site}, layer {self.layer}"
            raise InputError(f"{path}: the attention at {where} is not finite; give an undamaged checkpoint")


def _softmax(q: Tensor, k: Tensor, key_padding_mask: Tensor | None, *, causal: bool) -> Tensor:
    """Weights of softmax attention, ``(bsz, num_heads, tgt_len, src_len)``."""
    softmax = build_mechanism(DEFAULT, num_heads=q.size(1), head_dim=q.size(-1))
    return softmax(q, k, k, None, key_padding_mask, need_weights=True, causal=causal).weights


@contextlib.contextmanager
def capture(model: nn.Module) -> Iterator[list[Captured]]:
    """Context manager: record all attentions of a fairseq Transformer in the forward passes inside the block.

    Each attention is computed a second time for the record, so the output of a model in evaluation mode does not
    change. Decoding steps are not recorded.

    Yields:
        A list to which each forward pass appends one :class:`Captured` per attention, in order of execution. Empty it
        between batches.
    """
    seen: list[Captured] = []
    with contextlib.ExitStack() as hooks:
        for site, layer, attention in attentions(model):
            hook = partial(_record, seen, site, layer)
            hooks.enter_context(attention.register_forward_pre_hook(hook, with_kwargs=True))
        yield seen


def _record(seen: list[Captured], site: str, layer: int, attention: Any, args: tuple, kwargs: dict) -> None:
    """The forward pre-hook of one attention: compute its weights, then append the record to ``seen``."""
    given = inspect.signature(attention.forward).bind(*args, **kwargs).arguments
    if given.get("incremental_state") is not None:
        return
    names = ("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")
    q, k, v = (split_heads(getattr(attention, projection)(given[x]), attention) for x, projection in names)
    pads, causal = given.get("key_padding_mask"), given.get("attn_mask") is not None
    mechanism = getattr(attention, "mechanism", None)
    if mechanism is None:
        weights = _softmax(q, k, pads, causal=causal)
    else:
        of_queries = pads if site == "encoder" else None
        weights = mechanism(q, k, v, of_queries, pads, need_weights=True, causal=causal).weights
    seen.append(Captured(site, layer, mechanism, q, k, v, causal, weights))
