"""Command-line options of attention for fairseq, generated from the options dataclasses of the mechanisms.

A flat option is a mechanism's option with the mechanism's name before it, such as ``lot_num_pivots``.
"""

import dataclasses
import typing
from argparse import ArgumentParser, ArgumentTypeError, _ArgumentGroup
from collections.abc import Iterable

from fairseq_lot.attention.options import SITES, Options, kind_of
from fairseq_lot.attention.registry import DEFAULT, MECHANISMS, build_options, mechanism_class
from fairseq_lot.errors import InputError, flag
from fairseq_lot.modules.places import NONE, listed, named_places

# the model-wide options; the others are in the mechanisms' dataclasses
DEFAULTS: dict[str, typing.Any] = {
    "attention": DEFAULT,
    "attention_sites": "encoder",
    "keep_softmax": None,
    "differential": False,
    "differential_lambda_init": None,
}


def parse_bool(text: str) -> bool:
    """Parse ``true`` or ``false``; ArgumentTypeError for other texts."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(text).lower() not in words:
        raise ArgumentTypeError(f"expected true or false, got {text!r}")
    return words[str(text).lower()]


def flat_name(mechanism: str, field_name: str) -> str:
    """``("lot", "num_pivots") -> "lot_num_pivots"``."""
    return f"{mechanism}_{field_name}"


def options_of(mechanism: str) -> list[str]:
    """The flat names of a mechanism's own options."""
    return [flat_name(mechanism, field.name) for field in dataclasses.fields(mechanism_class(mechanism).options_class)]


def add_attention_args(
    parser: ArgumentParser | _ArgumentGroup, *, differential: bool = True, default: str | None = None
) -> None:
    """Add the model-wide options and all mechanisms' own options.

    No option gets an argparse default: defaults are in the options dataclasses and in the architectures.

    Args:
        parser: the command's parser.
        differential: also add the options of the differential form.
        default: the default mechanism, for ``--help``; None: it varies.
    """
    add = parser.add_argument
    unless = "" if default is None else f" (default: {default})"
    add("--attention", metavar="NAME", help=f"attention mechanism: {', '.join(MECHANISMS)}{unless}")
    add(
        "--attention-sites",
        metavar="SITES",
        help=f"sites that have it, comma-separated: {', '.join(SITES)} (default: {DEFAULTS['attention_sites']}); "
        f"other sites have {DEFAULT}",
    )
    add(
        "--keep-softmax",
        metavar="PLACES",
        help=f"places at these sites that keep the trained {DEFAULT}, comma-separated: site and layer from 0, as in "
        f"encoder.0,cross.2; {NONE}: no place, even if the checkpoint has some (default: {NONE})",
    )
    if differential:
        add(
            "--differential",
            nargs="?",
            const=True,
            type=parse_bool,
            metavar="BOOL",
            help="differential attention at all sites, with plans of the site's mechanism",
        )
        add(
            "--differential-lambda-init",
            type=float,
            metavar="FLOAT",
            help="constant λ_init of differential attention (default: 0.8 - 0.6 exp(-0.3 layer))",
        )
    for name, mechanism in MECHANISMS.items():
        add_options(parser, mechanism.options_class, of=name)


def add_options(
    parser: ArgumentParser | _ArgumentGroup, options_class: type[Options], *, of: str | None = None
) -> None:
    """Add a command-line option for each field of an options dataclass.

    Args:
        parser: the command's parser.
        options_class: the dataclass.
        of: the mechanism of these options: their names then start with it, and they get no argparse default. None:
            the options keep the names and the defaults of the fields.
    """
    for field in dataclasses.fields(options_class):
        read = parse_bool if kind_of(field) is bool else kind_of(field)
        extra: dict[str, typing.Any] = {"metavar": read.__name__.upper()}
        if read is parse_bool:
            extra = {"nargs": "?", "const": True, "metavar": "BOOL"}
        name, title = (field.name, "") if of is None else (flat_name(of, field.name), f"{of}: ")
        default = "" if field.default is None else f" (default: {field.default})"
        help_text = f"{title}{field.metadata['help']}{default}".replace("%", "%%")
        parser.add_argument(flag(name), type=read, default=None if of else field.default, help=help_text, **extra)


def option_names() -> list[str]:
    """The names of all options of attention, as in a checkpoint's arguments."""
    return [*DEFAULTS, *(option for name in MECHANISMS for option in options_of(name))]


def check_overrides(names: Iterable[str]) -> None:
    """Raise InputError if a name in ``--model-overrides`` looks like one of our options but is not one."""
    ours = option_names()
    families = {*(f"{name}_" for name in MECHANISMS), "attention_", "differential_", "keep_soft"}
    for name in names:
        family = next((family for family in families if name.replace("-", "_").startswith(family)), None)
        if family is not None and name not in ours and name != "attention_dropout":  # fairseq's own
            known = [option for option in ours if option.startswith(family)]
            raise InputError(f"there is no option {name!r} to override; {family}* are {', '.join(known)}")


def typed_options(args: typing.Any) -> dict[str, typing.Any]:
    """The options of attention that are set in ``args``, as ``{flat name: value}``."""
    return {name: value for name in option_names() if (value := getattr(args, name, None)) is not None}


def check_used(names: Iterable[str], attention: str, *, differential: bool, keeps_softmax: bool = False) -> None:
    """Refuse options that a model with this attention does not use.

    Args:
        names: flat names of the given options.
        attention: the mechanism.
        differential: the model has the differential form.
        keeps_softmax: some places keep softmax, so its options are used, too.

    Raises:
        InputError: an unknown mechanism, or an option that is not used.
    """
    read = {attention, DEFAULT} if keeps_softmax else {attention}
    unread = {name: f"--attention {other}" for other in MECHANISMS if other not in read for name in options_of(other)}
    if attention == DEFAULT:
        unread["keep_softmax"] = "another --attention"
    if not differential:
        unread["differential_lambda_init"] = "--differential"
    mechanism_class(attention)
    for name in names:
        if name in unread:
            way_out = f"leave it out, or use {unread[name]}"
            raise InputError(f"option {flag(name)} does not belong to {attention} attention; {way_out}")


def mechanism_options(args: typing.Any, name: str) -> dict[str, typing.Any]:
    """The options of mechanism ``name`` in ``args``, a namespace or fairseq config, by their field names."""
    fields = dataclasses.fields(mechanism_class(name).options_class)
    flat = {field.name: getattr(args, flat_name(name, field.name), None) for field in fields}
    return {key: value for key, value in flat.items() if value is not None}


def set_defaults(args: typing.Any, defaults: dict[str, typing.Any]) -> None:
    """Set arguments that are missing or None to their defaults."""
    for name, default in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, default)


def resolve_options(args: typing.Any) -> None:
    """Write all options of the chosen mechanism into ``args``, so that later changes of defaults do not change a model.

    Raises:
        InputError: an unknown mechanism or a value outside its range.
    """
    set_defaults(args, DEFAULTS)
    if not isinstance(args.differential, bool):
        raise InputError(f"differential must be true or false, got {args.differential!r}")
    options = build_options(args.attention, **mechanism_options(args, args.attention))
    for name, value in dataclasses.asdict(options).items():
        if value is not None:
            setattr(args, flat_name(args.attention, name), value)
    kept = named_places(args.keep_softmax)
    args.keep_softmax = None if args.attention == DEFAULT else listed(kept)
