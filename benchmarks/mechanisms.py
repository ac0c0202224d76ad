"""Mechanisms as a benchmark's command line names them: ``NAME[@SITES][:OPTION=VALUE,...]``."""

import ast
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fairseq_lot.attention.registry import build_options, mechanism_class
from fairseq_lot.errors import InputError

# the option that is a mechanism's rank, where it has one
RANKS = ("num_pivots", "num_features")


@dataclass(frozen=True)
class Named:
    """A mechanism of the registry.

    Attributes:
        name: in the registry.
        options: of its dataclass.
        sites: where in a model it is to stand, ``encoder,cross``; None where nothing is said.
    """

    name: str
    options: dict[str, Any]
    sites: str | None

    @property
    def label(self) -> str:
        """The name in the table; figures read the rank from its end."""
        rest = {key: value for key, value in self.options.items() if key not in RANKS}
        rank = next((value for key, value in self.options.items() if key in RANKS), None)
        where = "" if self.sites is None else f"@{self.sites}"
        label = " ".join([self.name + where, *(f"{key}={value}" for key, value in rest.items())])
        return label if rank is None else with_rank(label, rank)


def with_rank(label: str, rank: int) -> str:
    """The name of a contender of this rank."""
    return f"{label} r={rank}"


def read_mechanisms(texts: Iterable[str], ranks: list[int]) -> list[Named]:
    """What the texts name; a mechanism with a rank once for every rank, unless its text gives it.

    Raises:
        InputError: unknown mechanism or option, or a value outside its range.
    """
    found = []
    for text in texts:
        head, _, rest = text.partition(":")
        name, at, sites = head.partition("@")
        options = dict(map(_option, rest.split(","))) if rest else {}
        build_options(name, **options)  # what is wrong is known before anything is measured
        known = {field.name for field in dataclasses.fields(mechanism_class(name).options_class)}
        open_rank = [option for option in RANKS if option in known - options.keys()]
        ways = [{**options, open_rank[0]: rank} for rank in ranks] if open_rank else [options]
        found += [Named(name, way, sites if at else None) for way in ways]
    return found


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text!r} is not option=value")
    try:
        return name.replace("-", "_"), ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
    except (ValueError, SyntaxError):
        return name.replace("-", "_"), value
