"""Options of mechanisms: dataclass fields with a default, a ``--help`` text and a range that is checked."""

import dataclasses
import sys
import typing
from dataclasses import dataclass
from typing import Any

from fairseq_lot.errors import COUNTABLE, InputError

# encoder self-attention, cross-attention (decoder to encoder), decoder self-attention
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
    """A field of an options dataclass.

    Args:
        default: its default; None: not set.
        help: its ``--help`` text.
        minimum, maximum: bounds, inclusive.
        above: lower bound, exclusive; infinity is then refused.
        choices: allowed values.
    """
    return dataclasses.field(
        default=default,
        metadata={"help": help, "minimum": minimum, "above": above, "maximum": maximum, "choices": choices},
    )


def prior_option() -> Any:
    """The field ``prior`` of a mechanism that can favour near tokens."""
    what = "alibi: favour near keys, with one slope per head; self-attention only; default: no prior"
    return option(None, what, choices=("alibi",))


@dataclass(frozen=True)
class Options:
    """Base class of a mechanism's options. Subclasses declare fields by :func:`option`; InputError if invalid."""

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

    def at_site(self, site: str) -> "Options":
        """The options for one of ``SITES``; here the prior is dropped at cross."""
        has_prior = site == "cross" and getattr(self, "prior", None) is not None
        return dataclasses.replace(self, **{"prior": None} if has_prior else {})


@dataclass(frozen=True)
class PivotOptions(Options):
    """Options of plans through pivots. Defaults: [LOTFormer]'s plug-in for translation, except ``pivot_std``."""

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
    """The field's type, ignoring None: ``int`` for ``int | None``."""
    return next(kind for kind in typing.get_args(field.type) or (field.type,) if kind is not type(None))


def _check_kind(field: dataclasses.Field, value: Any) -> None:
    """Raise InputError if a value is not of the annotated type; whole numbers count as float."""
    kind, is_bool, number = kind_of(field), isinstance(value, bool), isinstance(value, (int, float))
    if kind is bool and not is_bool:
        raise InputError(f"must be true or false, got {value!r}", field.name)
    if kind is int and (is_bool or not isinstance(value, int)):
        raise InputError(f"must be a whole number, got {value!r}", field.name)
    if kind is float and (is_bool or not number or not abs(value) <= sys.float_info.max):
        raise InputError(f"must be a finite number, got {value!r}", field.name)
