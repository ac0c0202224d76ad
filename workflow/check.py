"""Refuses an experiment that would fail later: reads it as JSON, and checks the schema, then flags and mechanisms."""

import argparse
import contextlib
import io
import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from fairseq import options
from fairseq.models import ARCH_CONFIG_REGISTRY
from flags import attention_words, words

from fairseq_lot.attention.registry import mechanism_class
from fairseq_lot.errors import InputError
from fairseq_lot.modules.flat_options import add_attention_args, option_names
from fairseq_lot.plug_and_play.calibrate import FitOptions, add_fit_arguments
from fairseq_lot.plug_and_play.swap import plug
from fairseq_lot.pretrained.loading import untrained

SCHEMA = Path(__file__).with_name("schema.yaml")


def check(config: dict[str, Any]) -> None:
    """Check the experiment of a config file.

    Raises:
        InputError: it is not as the schema says, or a flag or a mechanism is unknown or wrong.
    """
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    errors = jsonschema.Draft202012Validator(schema).iter_errors(config)
    error = jsonschema.exceptions.best_match(errors)
    if error:
        raise InputError(f"{_place(error.absolute_path)}: {error.message}")
    for backbone, own in config["backbones"].items():
        architecture = {"arch": f"{'lot_' * (backbone == 'transformer')}{backbone}_{config['size']}"}
        for stage in ("pretrain", "finetune"):
            _training(f"{stage}, {backbone}", [*words({**architecture, **own, **config.get(stage, {})})])
        for name, system in config["systems"].items():
            with _said(f"systems, {name}"):
                _build(system, architecture["arch"])
            _training(f"systems, {name}, finetune", words({**architecture, **system.get("finetune", {})}))
    _parse("generate", lambda parser: None, words(config.get("generate", {})), options.get_generation_parser())


def _place(path) -> str:
    return ", ".join(map(str, path)) or "the experiment"


@contextlib.contextmanager
def _said(place: str):
    """Errors say where the value stands."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {' '.join(str(error).split())}") from None


def _parse(place: str, add: Callable, given: list[str], parser: ArgumentParser | None = None) -> argparse.Namespace:
    """The values of some words; InputError with argparse's message."""
    parser = parser or ArgumentParser(allow_abbrev=False, add_help=False)
    add(parser)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            return parser.parse_args(given)
        except SystemExit:
            raise InputError(f"{place}: {printed.getvalue().strip().partition('error: ')[2]}") from None


def _training(place: str, given: list[str]) -> None:
    """Flags of fairseq-train."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            options.parse_args_and_arch(options.get_training_parser(), ["DATA", *given])
        except SystemExit:
            raise InputError(f"{place}: {printed.getvalue().strip().partition('error: ')[2]}") from None


def _build(system: dict[str, Any], architecture: str) -> None:
    """The system's mechanisms, in a model of that architecture with few symbols."""
    mechanism_class(system["attention"])
    given = attention_words(system)
    attention = _parse("options", lambda parser: add_attention_args(parser, differential=False), given)
    fit = {name: value for name, value in system.get("calibrate", {}).items() if name != "with"}
    FitOptions.of(_parse("calibrate", add_fit_arguments, words(fit)))
    model = argparse.Namespace(arch=architecture)
    ARCH_CONFIG_REGISTRY[architecture](model)
    options = {name: value for name, value in vars(attention).items() if name in option_names() and value is not None}
    plug(model, **options)
    untrained(model, 8, 8)


def main() -> int:
    """Check what comes on standard input; 2 and one line when it is wrong."""
    try:
        check(json.load(sys.stdin))
    except InputError as error:
        print(f"snakemake: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
