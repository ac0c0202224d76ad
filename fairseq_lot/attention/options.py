"""Options of a mechanism: fields with a default, a ``--help`` text and an allowed range, checked when they are set."""

import dataclasses
import sys
import typing
from dataclasses import dataclass
from typing import Any

from fairseq_lot.errors import COUNTABLE, InputError

# where a mechanism may stand: encoder self-attention, attention of the decoder to the encoder, decoder self-attention
SITES = ("encoder", "cross", "decoder")


def option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A field of an options dataclass: its default, its ``--help`` text and its allowed range."""
    return dataclasses.field(
        default=default,
        metadata={"help": help, "minimum": minimum, "above": above, "maximum": maximum, "choices": choices},
    )


def prior_option() -> Any:
    """The field ``prior`` of a mechanism that may favour near tokens."""
    what = (
        "alibi: nearer keys are likelier before any score is seen, in self-attention; cross-attention, whose positions "
        "are of two sentences, has none; default: all alike"
    )
    return option(None, what, choices=("alibi",))


@dataclass(frozen=True)
class Options:
    """Options of a mechanism; subclasses declare fields with :func:`option`, values are checked here."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            keys = ("minimum", "above", "maximum", "choices")
            minimum, above, maximum, choices = (field.metadata[key] for key in keys)
            if value is None and field.default is None:
                continue
            _check_kind(field, value)
            if minimum is not None and not value >= minimum:
                raise InputError(f"must be at least {minimum}, got {value}", field.name)
            if above is not None and not above < value < float("inf"):
                raise InputError(f"must be a finite number greater than {above}, got {value}", field.name)
            most = COUNTABLE if maximum is None and isinstance(value, int) else maximum
            if most is not None and not value <= most:
                raise InputError(f"must be at most {most}, got {value}", field.name)
            if choices is not None and value not in choices:
                raise InputError(f"must be one of {', '.join(choices)}, got {value!r}", field.name)

    @classmethod
    def completed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """What was given, with the values that it implies for options that were not."""
        return given

    def at_site(self, site: str) -> "Options":
        """These options as they apply at one of ``SITES``: no prior at cross."""
        has_prior = site == "cross" and getattr(self, "prior", None) is not None
        return dataclasses.replace(self, **{"prior": None} if has_prior else {})


@dataclass(frozen=True)
class PivotOptions(Options):
    """A plan through pivots. Defaults are [LOTFormer]'s released plug-in's for translation, except ``pivot_std``."""

    num_pivots: int = option(32, "pivots per head, r in the paper: the rank of A", minimum=1)
    epsilon: float = option(1.0, "entropic regularisation, in the unit of the scores", above=1e-30)
    num_updates: int = option(5, "half-updates of either plan, T in the paper", minimum=1)
    pivot_std: float | None = option(
        None,
        "standard deviation of the initial pivots; default: head_dim^(1/4); LOTFormer's code: 0.02",
        minimum=0,
        maximum=1e6,
    )
    seed: int = option(0, "seed of the initial pivots", minimum=0)


def kind_of(field: dataclasses.Field) -> Any:
    """What the values of a field are, perhaps beside None: ``int`` of ``int | None``."""
    return next(kind for kind in typing.get_args(field.type) or (field.type,) if kind is not type(None))


def _check_kind(field: dataclasses.Field, value: Any) -> None:
    """Refuse a value that is not of the annotated type; whole numbers count as float."""
    kind, is_bool, number = kind_of(field), isinstance(value, bool), isinstance(value, (int, float))
    if kind is bool and not is_bool:
        raise InputError(f"must be true or false, got {value!r}", field.name)
    if kind is int and (is_bool or not isinstance(value, int)):
        raise InputError(f"must be a whole number, got {value!r}", field.name)
    if kind is float and (is_bool or not number or not abs(value) <= sys.float_info.max):
        raise InputError(f"must be a finite number, got {value!r}", field.name)
