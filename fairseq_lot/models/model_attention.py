"""The attention that a model's arguments describe: its options, its parameters, its description in words."""

import copy
import re
from argparse import Namespace
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from fairseq_lot.attention.options import SITES
from fairseq_lot.attention.registry import DEFAULT, describe
from fairseq_lot.modules import flat_options
from fairseq_lot.modules.sites import (
    ATTENTION_AT,
    attention_sites,
    build_site_mechanism,
    kept_places,
    sites_in_words,
)


class Parameter(NamedTuple):
    """A tensor that a mechanism adds to a model.

    Attributes:
        shape: its shape.
        owner: the name of the mechanism, or ``differential``.
        is_learnt: true for a parameter, false for a buffer.
    """

    shape: torch.Size
    owner: str
    is_learnt: bool


def completed(args: Namespace, defaults: dict[str, Any] | None = None) -> Namespace:
    """A copy of a model's arguments with a value for each option of its attention.

    Sites are written in a fixed order and spacing, so that equal attentions compare equal.

    Args:
        args: the arguments of a model.
        defaults: values for missing arguments; they come before the mechanism's own defaults.
    """
    args = copy.copy(args)
    flat_options.set_defaults(args, defaults or {})
    flat_options.resolve_options(args)
    args.attention_sites = ",".join(attention_sites(args))
    return args


def in_words(args: Namespace) -> str:
    """The attention of completed arguments in words: ``lot (num_pivots=6) attention at encoder``."""
    form = "differential " if args.differential else ""
    named = describe(args.attention, flat_options.mechanism_options(args, args.attention))
    return f"{form}{named} attention at {sites_in_words(args)}"


def options_read(args: Namespace) -> list[str]:
    """The names of the options that a model's mechanisms use."""
    named = [args.attention, *([DEFAULT] if kept_places(args) else [])]
    return [name for mechanism in named for name in flat_options.options_of(mechanism)]


def changed(names: Iterable[str], before: Namespace, after: Namespace) -> list[str]:
    """The names among ``names`` whose values differ."""
    return [name for name in names if getattr(before, name, None) != getattr(after, name, None)]


def parameters(args: Namespace, layers: Namespace) -> dict[str, Parameter]:
    """The tensors that the attention adds, by their names in checkpoints.

    Args:
        args: completed arguments of the model.
        layers: arguments that give the numbers of layers.
    """
    found = {}
    for site in SITES:
        side = "encoder" if site == "encoder" else "decoder"
        heads = getattr(args, f"{side}_attention_heads")
        sizes = {"num_heads": heads, "head_dim": getattr(args, f"{side}_embed_dim") // heads}
        stack, attention = ATTENTION_AT[site]
        for layer in range(getattr(layers, f"{side}_layers")):
            mechanism = build_site_mechanism(args, site=site, layer=layer, dropout=0.0, **sizes)
            learnt = dict(mechanism.named_parameters()) if mechanism else ()
            for name, value in mechanism.state_dict().items() if mechanism else ():
                owner = "differential" if args.differential and not name.startswith("inner.") else args.attention
                key = f"{stack}.layers.{layer}.{attention}.mechanism.{name}"
                found[key] = Parameter(value.shape, owner, name in learnt)
    return found


def redrawn(before: dict[str, Parameter], after: dict[str, Parameter]) -> set[str]:
    """Names, without layer numbers, of parameters that are in both models with different owners or shapes."""
    return {without_layer(name) for name in before.keys() & after if before[name][:2] != after[name][:2]}


def without_layer(name: str) -> str:
    """The name of a parameter without the number of its layer."""
    return re.sub(r"\.\d+\.", ".", name, count=1)
