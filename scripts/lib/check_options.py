"""Reads a plan as run_stages.py does and refuses options of a mechanism, or of its calibration, that a stage would."""

import argparse
import contextlib
import io
import os
import shlex
import sys

from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_lot.cli import OneLineParser
from fairseq_lot.errors import InputError
from fairseq_lot.modules.flat_options import add_attention_args
from fairseq_lot.plug_and_play.calibrate import FitOptions, add_fit_arguments
from fairseq_lot.plug_and_play.swap import swap


def parser_of(add_arguments, **kind):
    """A parser of these options; like fairseq-train's it takes no abbreviations."""
    parser = OneLineParser(allow_abbrev=False, add_help=False)
    add_arguments(parser, **kind)
    return parser


def parse(parser, words):
    """What the words say; InputError with argparse's message."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            return parser.parse_args(words)
        except SystemExit:
            message = printed.getvalue().strip().partition("error: ")[2]
            raise InputError(message.partition(" (see ")[0]) from None


def check(settings, architecture):
    """Plug what the variables of a stage ask for into a model of that architecture, which has no weights.

    Raises:
        InputError: an option is unknown, wrong or of another mechanism, or the mechanism cannot stand at its site.
    """
    attention, fit = parser_of(add_attention_args, differential=False), parser_of(add_fit_arguments)
    args = parse(attention, ["--attention", settings["ATTENTION"], *settings["OPTIONS"].split()])
    if settings["CALIBRATE"] != "no":
        FitOptions.of(parse(fit, os.environ.get("CALIBRATE_OPTIONS", "").split()))
    model = argparse.Namespace(arch=architecture)
    ARCH_CONFIG_REGISTRY[architecture](model)
    options = {name: value for name, value in vars(args).items() if value is not None}
    swap({"model": {}, "args": model}, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architectures", nargs="+", required=True, metavar="BACKBONE=ARCH", help="of each backbone")
    architectures = dict(pair.split("=") for pair in parser.parse_args().architectures)
    for line in sys.stdin:
        *_, title, command = line.rstrip("\n").split("\t") if "\t" in line else ("", "")
        settings = dict(word.split("=", 1) for word in shlex.split(command) if "=" in word)
        if "OPTIONS" not in settings:
            continue
        try:
            check(settings, architectures[settings["BACKBONE"]])
        except InputError as error:
            name = os.environ.get("CALLED_BY", parser.prog)
            print(f"{name}: error: options of '{title}': {' '.join(str(error).splitlines())}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
