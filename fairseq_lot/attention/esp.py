"""ESP attention: a weighted mean of sliced transport plans."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_lot.attention.base import AttentionOutput, Masks, Mechanism
from fairseq_lot.attention.options import Options, option
from fairseq_lot.errors import InputError
from fairseq_lot.transport.marginals import at_least_float32, num_real, without_empty
from fairseq_lot.transport.sliced_hard import hard_sliced_plan
from fairseq_lot.transport.sliced_soft import soft_sliced_apply, staircase


@dataclass(frozen=True)
class EspOptions(Options):
    """Options of ESP. Defaults are Table 12's values for translation, in the units of the released modules [ESPFormer].

    docs/mechanisms.md has other readings of the paper, with their options.
    """

    sort_temperature: float = option(1e-3, "temperature t of the soft sort", minimum=1e-30)
    anneal: float = option(1.0, "t is multiplied by this after every epoch; the paper has 0.8", above=0, maximum=1)
    min_sort_temperature: float = option(
        1e-8, "annealing stops at this t: below it gradients in float32 are rounding errors", minimum=1e-30
    )
    slice_inverse_temperature: float = option(
        10.0, "τ: how strongly cheaper slices are preferred; 0 is the mean of all slices", minimum=0, maximum=1e30
    )
    hard: bool = option(
        False, "sort exactly: doubly stochastic, O(n log n); gradients go to v and the slice weights, not to slices"
    )
    hard_inference: bool = option(False, "sort softly in training, exactly in evaluation")
    slicer: str = option(
        "axis", "directions: coordinate axes, frozen random or learnable", choices=("axis", "frozen", "learnable")
    )
    num_slices: int | None = option(None, "number of slices L; default: head_dim", minimum=1)
    seed: int = option(0, "seed of the initial frozen or learnable slices", minimum=0)


class Esp(Mechanism):
    """``A = n·Σ_l σ_l U_l``: a mean of the 1-D plans U_l of L slices, with larger σ_l for cheaper ones.

    [ESPFormer], Alg. 1; such a mean is the expected sliced transport plan of [ESP]. ``U_l = A_lᵀ I B_l``, where A_l and
    B_l sort, softly [SoftSort] or exactly, and I is the exact plan between two sorted uniform measures ([ESPFormer],
    §3.1).

    q and k are scaled by ``head_dim^-1/2`` before they are projected and compared. With ``hard`` A is doubly
    stochastic if queries and keys are equally many; otherwise both marginals are approximate.

    ``esp_plan`` of ``tests/reference.py`` computes the same in plain loops.

    Attributes:
        slices: ``(num_heads, L, head_dim)``, frozen (buffer) or learnable (parameter), normalised when used; None for
            axes.
        epoch: the epoch of the training, a buffer, for annealing only. It is stored instead of t, because a small t
            underflows in half precision.
    """

    options_class = EspOptions
    options: EspOptions
    epoch: Tensor
    slices: Tensor | None

    def __init__(self, **context: Any) -> None:
        super().__init__(**context)
        options = self.options
        if options.anneal < 1:
            self.register_buffer("epoch", torch.tensor(1))
        self.num_slices = self.head_dim if options.num_slices is None else options.num_slices
        if options.slicer == "axis":
            if self.num_slices > self.head_dim:
                raise InputError(
                    f"num_slices is {self.num_slices}, but a head has only {self.head_dim} axes; "
                    "use fewer, or --esp-slicer frozen"
                )
            self.slices = None
            return
        self.register("slices", self.drawn(self.num_slices, options.seed, 1.0), learn=options.slicer == "learnable")

    def fittable(self) -> list[nn.Parameter]:
        """The slices; empty with exact sorts, which have no gradient to them."""
        return [] if self.options.hard or self.options.hard_inference else super().fittable()

    def directions(self, like: Tensor) -> Tensor:
        """Unit directions, ``(num_heads, L, head_dim)``, in the dtype and on the device of ``like``."""
        if self.slices is None:
            axes = torch.eye(self.num_slices, self.head_dim, dtype=like.dtype, device=like.device)
            return axes.expand(self.num_heads, -1, -1)
        return nn.functional.normalize(self.slices.to(like.dtype), dim=-1)

    def set_epoch(self, epoch: int) -> None:
        if self.options.anneal < 1:
            self.epoch.fill_(epoch)

    def sort_temperature(self, like: Tensor) -> float | Tensor:
        """t in this epoch: ``t(1) = sort_temperature``, ``t(e) = anneal·t(e-1)``, not below ``min_sort_temperature``.

        A ``sort_temperature`` below the minimum is not changed.

        Returns:
            A number; with annealing a scalar tensor in the dtype and on the device of ``like``.
        """
        t = self.options.sort_temperature
        if self.options.anneal == 1:
            return t
        epochs_before = (self.epoch - 1).to(like)
        return (t * self.options.anneal**epochs_before).clamp(min=min(t, self.options.min_sort_temperature))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, need_weights: bool) -> AttentionOutput:
        q, k = at_least_float32(q) * self.scaling, at_least_float32(k) * self.scaling
        v = v.to(q.dtype)
        same_number = masks.query_pads is masks.key_pads and q.size(-2) == k.size(-2)
        query_pads, key_pads = without_empty(masks.query_pads), without_empty(masks.key_pads)
        problem: dict[str, Any] = {"query_padding_mask": query_pads, "key_padding_mask": key_pads}
        problem["inverse_temperature"] = self.options.slice_inverse_temperature
        if self.options.hard or (self.options.hard_inference and not self.training):
            slices = self.num_slices if self.slices is None else self.directions(q)
            apply = hard_sliced_plan(q, k, slices, same_number=same_number, **problem)
        else:
            if not same_number:
                n, m = num_real(query_pads, q), num_real(key_pads, k)
                problem["rank_plan"] = staircase(n, m, q.size(-2), k.size(-2), q.dtype)
            temperature = self.sort_temperature(q)
            apply = partial(soft_sliced_apply, q, k, slices=self.directions(q), temperature=temperature, **problem)
        values, weights = apply(self.drop_keys(v)), None
        if need_weights:
            weights = apply(torch.eye(k.size(-2), dtype=q.dtype, device=q.device).expand(*k.shape[:-2], -1, -1))
        return AttentionOutput(values, weights)
