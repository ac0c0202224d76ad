"""Every registered mechanism with the options under which it is tested, alone and inside the differential wrapper.

A mechanism without an entry in ``VARIANTS`` is tested with its default options, so that listing it in the registry
is enough.
"""

from dataclasses import dataclass, field

import torch

from fairseq_lot.attention.differential import Differential
from fairseq_lot.attention.registry import MECHANISMS, build_mechanism

NUM_HEADS, HEAD_DIM = 2, 4


def build(name, *, num_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype=torch.float64, **options):
    """The mechanism ``name`` with small heads."""
    return build_mechanism(name, num_heads=num_heads, head_dim=head_dim, **options).to(dtype)


def build_differential(name, *, lambda_init=None, **context_and_options):
    """The differential form around the mechanism ``name``."""
    return Differential(build_mechanism(name, **context_and_options), lambda_init=lambda_init)


# options of near_far that are combined with exact_up_to below
EXACT = {
    "narrow": {},
    "updates-2": {"num_updates": 2},
    "expected": {"band": "expected"},
    "band": {"num_features": 0},
    "tangents": {"tangents": True},
    "tangents-expected": {"tangents": True, "band": "expected"},
    "alibi": {"prior": "alibi"},
    "alibi-updates-3": {"num_updates": 3, "prior": "alibi"},
}
VARIANTS = {
    "esp": {
        "default": {},
        "smooth": {"sort_temperature": 0.3, "slice_inverse_temperature": 1.0},
        "hard": {"hard": True, "slice_inverse_temperature": 0.5, "num_slices": 3},
        "frozen": {"slicer": "frozen", "num_slices": 5, "sort_temperature": 0.3},
        "learnable": {"slicer": "learnable", "num_slices": 3, "sort_temperature": 0.3},
        "hard-frozen": {"hard": True, "slicer": "frozen", "num_slices": 5},
    },
    "lot": {
        "default": {},
        "uncoupled": {"num_pivots": 6, "query_updates": 1, "epsilon": 0.7},
        "one-pivot": {"num_pivots": 1},
        "fixed": {"num_pivots": 6, "learn_pivots": False, "learn_masses": False},
        "convolution": {"num_pivots": 6, "conv_kernel": 3, "query_updates": 1},
        **{f"updates-{n}": {"num_pivots": 6, "num_updates": n, "epsilon": 0.5} for n in (1, 5)},
    },
    "near_far": {
        "default": {},
        "narrow": {"num_features": 6, "window": 1},
        "updates-3": {"num_features": 6, "window": 1, "num_updates": 3},
        "updates-2": {"num_features": 6, "window": 2, "num_updates": 2},
        "expected": {"num_features": 6, "window": 1, "band": "expected"},
        "band": {"num_features": 0, "window": 2},
        "tangents": {"num_features": 6, "window": 1, "tangents": True},
        "tangents-expected": {"num_features": 6, "window": 1, "band": "expected", "tangents": True},
        "tangents-updates-3": {"num_features": 6, "window": 1, "num_updates": 3, "tangents": True},
        "tangents-alibi": {"num_features": 6, "window": 1, "prior": "alibi", "tangents": True},
        "tangents-fixed": {"num_features": 6, "window": 1, "learn_features": False, "tangents": True},
        "fixed": {"num_features": 6, "window": 1, "learn_features": False},
        "alibi": {"num_features": 6, "window": 1, "prior": "alibi"},
        "alibi-updates-3": {"num_features": 6, "window": 1, "num_updates": 3, "prior": "alibi"},
        # the tests have sentences on both sides of this length
        **{
            f"{name}-exact": {"num_features": 6, "window": 1, "exact_up_to": 3, **options}
            for name, options in EXACT.items()
        },
    },
    "set": {
        "default": {},
        "one-pivot": {"num_pivots": 1},
        "positional": {"num_pivots": 6, "epsilon": 0.7, "num_updates": 4, "positional_temperature": 0.4},
        "updates-1": {"num_pivots": 6, "num_updates": 1, "epsilon": 0.5},
    },
    "sinkhorn": {
        "default": {},
        "even": {"epsilon": 0.5, "num_updates": 4},
        "one-update": {"epsilon": 0.5, "num_updates": 1},
        "tolerance": {"epsilon": 1.0, "num_updates": 101, "tolerance": 1e-12},
        "learnable": {"learn_epsilon": True},
        "learnable-one-update": {"learn_epsilon": True, "epsilon": 0.5, "num_updates": 1},
        "alibi": {"epsilon": 1.0, "num_updates": 3, "prior": "alibi"},
        "alibi-one-update": {"epsilon": 0.5, "num_updates": 1, "prior": "alibi"},
    },
    "softmax": {
        "default": {},
        "alibi": {"prior": "alibi"},
    },
}


@dataclass(frozen=True)
class Case:
    """A mechanism by name with options, perhaps inside the differential wrapper."""

    name: str
    variant: str
    options: dict = field(hash=False)
    differential: bool = False

    def __str__(self):
        return f"{'differential-' if self.differential else ''}{self.name}-{self.variant}"

    def flag(self, name):
        """One of the mechanism's traits."""
        return getattr(build_mechanism(self.name, num_heads=NUM_HEADS, head_dim=HEAD_DIM, **self.options).traits, name)

    @property
    def rows_exact(self):
        """Whether rows of A sum to 1; soft sorting alone moves mass between queries."""
        return self.name != "esp" or self.options.get("hard", False)

    @property
    def kinds(self):
        """``self``: queries and keys are the same tokens; ``cross``: they belong to two sentences."""
        return ("self",) if self.flag("positional") or self.flag("tied_tokens") else ("self", "cross")

    def draw(self, bsz=3, tgt_len=5, src_len=6, **options):
        """Random q, k, v; as many keys as queries where the tokens are tied."""
        return draw(bsz, tgt_len, tgt_len if self.flag("tied_tokens") else src_len, **options)

    @property
    def layouts(self):
        """Where pads may stand: at the ends alone if the mechanism takes neighbouring slots for neighbouring tokens."""
        at_ends = self.flag("mixes_values") or self.flag("counts_slots")
        return ("right", "left") if at_ends else ("right", "left", "scattered")

    def build(self, dtype=torch.float64, **options):
        """The mechanism with its parameters moved away from special values such as equal masses."""
        build = build_differential if self.differential else build_mechanism
        context = {"num_heads": NUM_HEADS, "head_dim": HEAD_DIM}
        mechanism = build(self.name, **context, **self.options | options)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in mechanism.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        return mechanism.to(dtype)


PLAIN_CASES = [
    Case(name, variant, options)
    for name in MECHANISMS
    for variant, options in VARIANTS.get(name, {"default": {}}).items()
]


def differential_cases():
    """Cases inside the differential wrapper: one variant of a mechanism for each set of its traits."""
    flags = ("couples_queries", "counts_slots", "mixes_values", "positional", "is_causal")
    first = {}
    for case in PLAIN_CASES:
        by_length = "exact_up_to" in case.options
        first.setdefault((case.name, by_length, case.rows_exact, *map(case.flag, flags)), case)
    return [Case(case.name, case.variant, case.options, differential=True) for case in first.values()]


CASES = PLAIN_CASES + differential_cases()
CAUSAL_CASES = [case for case in CASES if case.flag("is_causal")]


def draw(bsz=3, tgt_len=5, src_len=6, *, num_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype=torch.float64, seed=1):
    """Random q, k, v."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(bsz, num_heads, length, head_dim) for length in (tgt_len, src_len, src_len)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def padding_mask(lengths, size, layout):
    """``(bsz, size)`` bool, True = pad: ``lengths`` real slots; pads on the right, on the left or scattered."""
    mask = torch.ones(len(lengths), size, dtype=torch.bool)
    generator = torch.Generator().manual_seed(5)
    for sentence, length in enumerate(lengths):
        if layout == "right":
            mask[sentence, :length] = False
        elif layout == "left":
            mask[sentence, size - length :] = False
        else:
            mask[sentence, torch.randperm(size, generator=generator)[:length]] = False
    return mask
