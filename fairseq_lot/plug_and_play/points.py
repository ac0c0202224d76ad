"""The results of a sweep.

A point is the result of one way to swap in one base, a line of ``sweep.jsonl``.
"""

import itertools
import json
import shlex
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from pydantic import FiniteFloat

from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.errors import InputError, flag
from fairseq_lot.evaluation.results import read_lines_as
from fairseq_lot.experiment.spec import MetricScore
from fairseq_lot.modules.flat_options import add_attention_args, typed_options
from fairseq_lot.modules.places import listed, named_places
from fairseq_lot.modules.sites import attention_sites
from fairseq_lot.output.files import atomic_write, locked

# data of the calibration: none (new parameters as drawn), random pieces, text
DRAWN, PIECES, TEXT = CALIBRATIONS = ("", "pieces", "text")
# ranges of sentence lengths for the losses, by their largest number of source pieces
LENGTHS = (10, 20, 40, 80, 512, 1024, 2048, 4096, "more")
# values of settings that folders of earlier versions lack
_EARLIER = {"longest": 80, "valid_subset": "valid"}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of some sentences, with teacher forcing.

    Attributes:
        nats: sum over their target tokens.
        tokens: number of target tokens.
    """

    nats: float
    tokens: int

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One way to swap attention: a mechanism, its options and the data of its calibration.

    Attributes:
        attention: the mechanism.
        options: the mechanism's options, sites and places by their names on the command line, such as
            ``lot_num_pivots``.
        calibrated_on: ``"pieces"`` (random pieces), ``"text"`` (the data folder's text), or empty: not calibrated.
    """

    attention: str
    options: dict[str, bool | int | FiniteFloat | str]
    calibrated_on: str = DRAWN

    @property
    def key(self) -> tuple:
        """A hashable key, equal for ways that differ at most in the order of sites, places or options."""
        options = self.options | {"attention_sites": attention_sites(Namespace(**self.options))}
        if kept := listed(named_places(options.pop("keep_softmax", None))):
            options["keep_softmax"] = kept
        return self.attention, tuple(sorted(options.items())), self.calibrated_on

    @property
    def flags(self) -> str:
        """The options as flags of a command line."""
        return spelt(self.options)

    @property
    def words(self) -> str:
        """The mechanism, then its options as flags."""
        return f"{self.attention} {self.flags}".strip()


@dataclass(frozen=True, kw_only=True)
class SweepRow(AttentionSpec):
    """A point: the result of one way to swap in one base.

    Attributes:
        base: sha256 of the checkpoint that was swapped.
        epoch: number of epochs of its training; None if unknown.
        calibration_seconds: None if nothing was fitted.
        loss: nats per target token on the splits of ``--valid-subset``, over ``tokens`` tokens, with teacher forcing.
        bleu: tokenised BLEU on the test set with interval, signature and comparison with the base; None with --no-bleu.
        sacrebleu, chrf: scores of the same translations, detokenised; None with --no-bleu and in older files.
        balance: Δ(A), marginal error and mean shift, averaged over the encoder's heads; None in older files.
        by_length: the loss for each range of source lengths; keys are ``LENGTHS`` as text. Older files have fewer
            ranges or None.
        seed: seed of the calibration.
        commit, threads, device: the commit of this code, torch's CPU threads and the device of the measurement.
        cost: change of the predictions in nats a piece; None in older files.
        cost_by_place: the cost if only this place is swapped; None in older files.
    """

    base: str
    epoch: int | None
    calibration_seconds: FiniteFloat | None
    loss: FiniteFloat
    tokens: int
    bleu: MetricScore | None
    seed: int
    commit: str
    threads: int
    device: str
    sacrebleu: FiniteFloat | None = None
    chrf: FiniteFloat | None = None
    balance: dict[str, float] | None = None
    by_length: dict[str, Loss] | None = None
    cost: FiniteFloat | None = None
    cost_by_place: dict[str, float] | None = None


def spelt(options: dict[str, bool | int | float | str]) -> str:
    """Options as flags of a command line, in one text."""
    words = []
    for name, value in options.items():
        if isinstance(value, float):
            value = str(value).removesuffix(".0")
        words.append(flag(name) if value is True else f"{flag(name)} {str(value).lower()}")
    return " ".join(words)


def expand(text: str, given: str = "--try") -> list[AttentionSpec]:
    """Parse a value of ``--try``: ``"lot --lot-num-pivots 16/32"`` gives two ways, with 16 and with 32 pivots.

    Args:
        text: a mechanism and its flags; each combination of the values between slashes is one way.
        given: name of the option, for messages.

    Raises:
        InputError: an unknown mechanism or option.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"{given} {text!r}: {error}") from None
    if not words:
        raise InputError(f"{given} {text!r} has no mechanism; choose one of {', '.join(MECHANISMS)}")

    class Parser(ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise InputError(f"{given} {text!r}: {message}")

    parser = Parser(allow_abbrev=False, add_help=False)
    add_attention_args(parser, differential=False)
    ways = []
    # --lot-num-pivots 16/32 and --lot-num-pivots=16/32
    parted = [word.rpartition("=") for word in words[1:]]
    for way in itertools.product(*([name + sign + one for one in value.split("/")] for name, sign, value in parted)):
        options = typed_options(parser.parse_args(way))
        if "attention" in options:
            raise InputError(
                f"{given} {text!r} starts with the mechanism; leave out --attention {options['attention']}"
            )
        ways.append(AttentionSpec(attention=words[0], options=options))
    return ways


def read_points(file: Path) -> list[SweepRow]:
    """The points in a ``sweep.jsonl``; empty if the file does not exist, InputError if a line is invalid."""
    return [point for _, point in read_lines_as(SweepRow, file, "point")] if file.exists() else []


def check_settings(folder: Path, settings: dict) -> None:
    """Raise InputError if the points of a folder were made with other settings, as its ``settings.json`` says."""
    file = folder / "settings.json"
    try:
        before = _EARLIER | dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else settings
    except (ValueError, TypeError) as error:
        raise InputError(f"{file} cannot be read ({error}); remove it if the points are of this base") from error
    # the checksum of the data replaces the folder's name
    compared = {name: value for name, value in settings.items() if name != "data" or "sum of data" not in before}
    others = [name for name, value in compared.items() if before.get(name, value) != value]
    if others:
        different = " and ".join(f"{name} {before.get(name)}, not {settings[name]}" for name in others)
        raise InputError(f"{folder} has points with {different}; give another --out")


def add_point(folder: Path, settings: dict, point: SweepRow) -> list[SweepRow]:
    """Add a point to a folder; it replaces the point of the same base and way.

    Another sweep may write to the folder at the same time.

    Args:
        folder: the folder of ``sweep.jsonl`` and ``settings.json``.
        settings: the settings of all its points.
        point: the new point.

    Returns:
        All points of the folder.

    Raises:
        InputError: the folder has points with other settings, or cannot be written.
    """
    check_settings(folder, settings)
    with atomic_write(folder / "settings.json") as file:
        json.dump(settings, file, indent=1)
    with locked(folder / ".lock"):
        points = {(one.base, *one.key): one for one in [*read_points(folder / "sweep.jsonl"), point]}
        with atomic_write(folder / "sweep.jsonl") as file:
            file.writelines(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in points.values())
    return list(points.values())
