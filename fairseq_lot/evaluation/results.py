"""Rows of ``results/*.jsonl``: one scored system per line. The field names stand here and nowhere else."""

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from fairseq_lot.errors import InputError
from fairseq_lot.output.files import atomic_write, read_lines

BASE, PLUG_AND_PLAY, FINE_TUNED = STAGES = ("base", "plug-and-play", "fine-tuned")
PRECISIONS = ("fp32", "fp16", "bf16")
KEY = ("dataset", "architecture", "backbone", "mechanism", "options", "stage", "seed", "protocol")


@dataclass(frozen=True, kw_only=True)
class MetricScore:
    """One BLEU score with its 95 % bootstrap interval and its paired test against the base.

    Args:
        score, low, high: BLEU and the bounds of its interval, in percent.
        signature: sacreBLEU's signature.
        base, delta, p: BLEU of the base, score minus base, and the p-value; None without a base.
    """

    score: float
    low: float
    high: float
    signature: str
    base: float | None = None
    delta: float | None = None
    p: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One scored system; the fields are written in this order, and those of ``KEY`` tell it from others."""

    dataset: str
    architecture: str
    backbone: str
    mechanism: str
    options: str
    stage: str
    seed: int
    protocol: str = "quick"  # how it was trained, scripts/lib/protocols.sh; older rows do not say
    sentences: int
    tokenised: MetricScore
    sacrebleu: MetricScore
    reference: str
    bootstrap_samples: int
    bootstrap_seed: int
    device: str
    precision: str = "unknown"  # of the translations; older rows do not say
    seconds: float | None
    commit: str
    command: str

    @property
    def key(self) -> tuple:
        """What makes two rows the same system."""
        return tuple(getattr(self, name) for name in KEY)


def format_row(row: Row) -> str:
    """Return the row as one line of JSON without a line end.

    Raises:
        InputError: a text cannot be written as UTF-8.
    """
    line = json.dumps(asdict(row), ensure_ascii=False, allow_nan=False)
    try:
        line.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"an option is not valid UTF-8: {error.object[max(0, error.start - 20) : error.end]!r}"
        ) from error
    return line


def parse_row(line: str) -> Row:
    """Return the row in one line of JSON.

    Raises:
        ValueError: the line is not a JSON object with exactly the fields of a row and their types.
    """
    return parse(Row, line, "row")


def parse(kind: type, line: str, name: str) -> Any:
    """Return an instance of a dataclass from one line of JSON, every field checked.

    Raises:
        ValueError: the line is not a JSON object with the fields of ``kind`` (those with a default may be missing)
            and their types.
    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a line of JSON ({error})") from error
    return _build(kind, values, name)


def read_rows(path: str | Path) -> list[Row]:
    """Return the rows of a results file; blank lines are skipped.

    Raises:
        InputError: the file is missing, or a line is broken (the message gives its number).
    """
    return [row for row in _parse_lines(path) if row is not None]


def put_row(path: str | Path, row: Row) -> None:
    """Write a row into a results file: in the place of the row with the same key, else at the end.

    All other lines are kept byte for byte. The file is replaced as a whole, so that a kill leaves the
    old one, and the folder is locked meanwhile, so that two commands do not lose each other's row.

    Raises:
        InputError: a line of the file is broken, or the file cannot be written; nothing is changed.
    """
    put_line(Path(path), format_row(row), row.key, lambda path: [old and old.key for old in _parse_lines(path)])


def put_line(path: Path, line: str, key: tuple, read_keys: Callable[[Path], list[tuple | None]]) -> None:
    """Write a line into a file as :func:`put_row` does.

    Args:
        path: the file.
        line: the new line, without its end.
        key: of the line.
        read_keys: returns the keys of the file's lines, None for a blank one.

    Raises:
        InputError: as there.
    """
    new_line = line.encode("utf-8")
    with _locked(path.parent):
        lines = []
        if path.exists():
            keys = read_keys(path)
            lines = path.read_bytes().split(b"\n")[: len(keys)]
            same = [index for index, old in enumerate(keys) if old == key]
            if same:
                lines[same[0]] = new_line
                lines = [line for index, line in enumerate(lines) if index not in same[1:]]
            else:
                lines.append(new_line)
        else:
            lines = [new_line]
        with atomic_write(path, "wb") as file:
            file.write(b"".join(line + b"\n" for line in lines))


def _parse_lines(path):
    """Return one row, or None for a blank line, per line of the file."""
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            rows.append(parse_row(line) if line.strip() else None)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}; fix or remove the line") from error
    return rows


def _build(kind, values, name):
    if not isinstance(values, dict):
        raise ValueError(f"the {name} is not a JSON object")
    hints = get_type_hints(kind)
    required = {field.name for field in fields(kind) if field.default is MISSING}
    for problem, names in (("lacks", required - values.keys()), ("has the unknown", values.keys() - hints.keys())):
        if names:
            raise ValueError(f"the {name} {problem} {', '.join(sorted(names))}")
    built = {key: _convert(values[key], hints[key], key) for key in hints if key in values}
    if built.get("stage", BASE) not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)}, not {built['stage']!r}")
    return kind(**built)


def _convert(value, hint, name):
    if get_origin(hint) is dict:
        kinds = get_args(get_args(hint)[1])
        if not isinstance(value, dict) or any(type(one) not in kinds for one in value.values()):
            names = ", ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{name} must be an object with values of type {names}, not {str(value)[:40]!r}")
        return value
    if hint is MetricScore or (hint == MetricScore | None and value is not None):
        return _build(MetricScore, value, name)
    if hint in (float, float | None) and type(value) is int and abs(value) < 1e15:
        value = float(value)
    infinite = isinstance(value, float) and not math.isfinite(value)
    if isinstance(value, bool) != (hint is bool) or not isinstance(value, hint) or infinite:
        wanted = getattr(hint, "__name__", str(hint))
        raise ValueError(f"{name} must be of type {wanted}, not {str(value)[:40]!r}")
    return value


@contextlib.contextmanager
def _locked(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"cannot write into {folder}: {error.strerror}") from error
    try:
        # Some network file systems have no locks; there a single writer is safe all the same.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
