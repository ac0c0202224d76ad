"""The points of a sweep: ways to swap, what each gave, and the file that keeps them."""

import itertools
import json
import shlex
from argparse import ArgumentParser
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.results import MetricScore
from fairseq_lot.evaluation.results import parse as parse_line
from fairseq_lot.modules.flat_options import add_attention_args, option_names
from fairseq_lot.output.files import atomic_write, read_lines

# what the parameters of a swapped attention were fitted on; empty: they are as drawn
DRAWN, PIECES, TEXT = "", "pieces", "text"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way to swap, and what it gave: a line of sweep.jsonl.

    Attributes:
        attention, options: mechanism and flat options, as they were given.
        calibrated: the parameters were fitted, which took ``calibration_seconds``.
        loss: nats per target token on the validation set, teacher-forced; of ``tokens`` tokens.
        bleu: tokenised BLEU on the test set with interval, signature and comparison with the base; None if not asked.
        seed: of the calibration.
        calibrated_on: ``pieces`` or ``text``; older files leave it out, which means text.
        device: older files leave it out, which means CPU.
    """

    attention: str
    options: str
    calibrated: bool
    calibration_seconds: float | None
    loss: float
    tokens: int
    bleu: MetricScore | None
    seed: int
    commit: str
    threads: int
    calibrated_on: str = TEXT
    device: str = "CPU"

    @property
    def calibration(self) -> str:
        """``DRAWN``, ``PIECES`` or ``TEXT``."""
        return self.calibrated_on if self.calibrated else DRAWN

    @property
    def key(self) -> tuple:
        """What makes two points the same."""
        return self.attention, self.options, self.calibration


def expand(text: str) -> list[tuple[str, str]]:
    """``"lot --lot-num-pivots 16/32"`` as ``[("lot", "--lot-num-pivots 16"), ("lot", "--lot-num-pivots 32")]``."""
    try:
        attention, *words = shlex.split(text)
    except ValueError:
        raise InputError(f"--try {text!r} names no mechanism; choose one of {', '.join(MECHANISMS)}") from None
    ways = itertools.product(*(word.split("/") for word in words))
    found = [(attention, shlex.join(way)) for way in ways]
    for way in found:
        parse(*way)
    return found


def parse(attention: str, options: str) -> dict:
    """Flat options from the words of a command line."""

    class Parser(ArgumentParser):
        def error(self, message):
            raise InputError(f"--try '{attention} {options}': {message}")

    parser = Parser(allow_abbrev=False, add_help=False)
    add_attention_args(parser, differential=False)
    given = vars(parser.parse_args(shlex.split(options)))
    return {name: given[name] for name in option_names() if given.get(name) is not None and name != "attention"}


def write_points(file: Path, points: Iterable[Point], settings: dict) -> None:
    """Write the points so far, and beside them the settings that they share."""
    with atomic_write(file.parent / "settings.json") as beside:
        json.dump(settings, beside, indent=1)
    with atomic_write(file) as lines:
        lines.writelines(json.dumps(asdict(point), ensure_ascii=False) + "\n" for point in points)


def read_points(file: Path, kind: type[Point] = Point) -> dict[tuple, Point]:
    """The points so far; InputError when a line is broken."""
    points = {}
    for number, line in enumerate(read_lines(file) if file.exists() else [], start=1):
        try:
            point = parse_line(kind, line, "point")
        except ValueError as error:
            raise InputError(f"{file}, line {number}: {error}; mend or remove the line") from error
        points[point.key] = point
    return points


def check_settings(file: Path, settings: dict) -> None:
    """Raise InputError when the points of this folder were made with other settings."""
    if not file.exists():
        return
    try:
        before = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file} cannot be read ({error}); remove it if the points are of this base") from error
    for name, value in settings.items():
        if before.get(name) != value:
            old = before.get(name)
            raise InputError(f"{file.parent} holds points with another {name}, {old}; give another --out")
