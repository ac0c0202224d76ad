"""Flat fairseq options, generated from the options dataclasses of the mechanisms."""

import dataclasses
import types
import typing
from argparse import ArgumentParser, ArgumentTypeError

from fairseq_lot.attention.options import SITES
from fairseq_lot.attention.registry import DEFAULT, MECHANISMS, build_options, mechanism_class

# The model-wide options; the options of the mechanisms stand in their dataclasses.
DEFAULTS = {
    "attention": DEFAULT,
    "attention_sites": "encoder",
    "differential": False,
    "differential_lambda_init": None,
}


def parse_bool(text: str) -> bool:
    """``true``/``false``, as a flat option or in --model-overrides."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(text).lower() not in words:
        raise ArgumentTypeError(f"expected true or false, got {text!r}")
    return words[str(text).lower()]


def _parser_of(annotation) -> typing.Callable:
    """The function that reads one option from the command line."""
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    return parse_bool if annotation is bool else annotation


def flat_name(mechanism: str, field_name: str) -> str:
    """``("lot", "num_pivots") -> "lot_num_pivots"``."""
    return f"{mechanism}_{field_name}"


def add_attention_args(parser: ArgumentParser, *, differential: bool = True) -> None:
    """Add --attention, --attention-sites, the differential options (if wanted) and every mechanism's own options.

    No option gets an argparse default: those stand in the options dataclasses and in the architectures.
    """
    add = parser.add_argument
    add("--attention", metavar="NAME", help=f"attention mechanism: {', '.join(MECHANISMS)}")
    add(
        "--attention-sites",
        metavar="SITES",
        help=f"where it stands, comma-separated: {', '.join(SITES)} (default: {DEFAULTS['attention_sites']}); "
        f"{DEFAULT} elsewhere",
    )
    if differential:
        add(
            "--differential",
            nargs="?",
            const=True,
            type=parse_bool,
            metavar="BOOL",
            help="differential attention at every site, around the mechanism that stands there",
        )
        add(
            "--differential-lambda-init",
            type=float,
            metavar="FLOAT",
            help="constant λ_init of differential attention (default: 0.8 - 0.6 exp(-0.3 layer))",
        )
    for name, mechanism in MECHANISMS.items():
        hints = typing.get_type_hints(mechanism.options_class)
        for field in dataclasses.fields(mechanism.options_class):
            read = _parser_of(hints[field.name])
            extra = {"nargs": "?", "const": True, "metavar": "BOOL"} if read is parse_bool else {}
            if read is not parse_bool:
                extra = {"metavar": read.__name__.upper()}
            default = "" if field.default is None else f" (default: {field.default})"
            flag = "--" + flat_name(name, field.name).replace("_", "-")
            help_text = f"{name}: {field.metadata['help']}{default}".replace("%", "%%")
            add(flag, type=read, help=help_text, **extra)


def option_names() -> list[str]:
    """All flat names that belong to the attention, as they stand in a checkpoint's arguments."""
    own = [
        flat_name(name, field.name)
        for name, mechanism in MECHANISMS.items()
        for field in dataclasses.fields(mechanism.options_class)
    ]
    return [*DEFAULTS, *own]


def mechanism_options(args, name: str) -> dict:
    """The options of mechanism ``name`` that ``args`` holds (a namespace or fairseq config)."""
    fields = dataclasses.fields(mechanism_class(name).options_class)
    flat = {field.name: getattr(args, flat_name(name, field.name), None) for field in fields}
    return {key: value for key, value in flat.items() if value is not None}


def spell_out(args) -> None:
    """Write every option of the chosen mechanism into ``args``, so that a later change of a default changes no model.

    Raises:
        InputError: an unknown mechanism or a value outside its range.
    """
    for name, default in DEFAULTS.items():
        if getattr(args, name, None) is None:
            setattr(args, name, default)
    options = build_options(args.attention, **mechanism_options(args, args.attention))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value is not None:
            setattr(args, flat_name(args.attention, field.name), value)
