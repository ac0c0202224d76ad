"""Files of results: ``NAME.jsonl`` has a scored system per line, ``NAME.sentences.tsv`` the counts of its sentences."""

import base64
import bz2
import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.bleu import corpus_score
from fairseq_lot.experiment.spec import BASE, FINE_TUNED, Label, Row, first_fault
from fairseq_lot.output.files import read_lines

Kind = TypeVar("Kind")
_FIRST = ("softmax", "near_far", "sinkhorn", "esp", "lot")  # the order of tables, before other mechanisms


def parse(kind: type[Kind], line: str, name: str) -> Kind:
    """An instance of a pydantic model or a dataclass from one line of JSON, with all fields checked.

    Args:
        kind: the class.
        line: the JSON.
        name: what the object is called in the message.

    Raises:
        ValueError: the line is not a JSON object with the fields of ``kind`` and their types; a field with a default
            may be missing. The message is one line.
    """
    extra: Literal["forbid"] | None = "forbid" if dataclasses.is_dataclass(kind) else None  # models do so themselves
    try:
        return TypeAdapter(kind).validate_json(line, strict=True, extra=extra)
    except ValidationError as error:
        place, fault = first_fault(error)
        raise ValueError(f"the {name} is wrong{f' at {place}' if place else ''}: {fault}") from None


def read_lines_as(kind: type[Kind], path: str | Path, name: str) -> Iterator[tuple[str, Kind]]:
    """Parse each line of a file by :func:`parse`; blank lines are skipped.

    Yields:
        The place of the line, for messages, and its object.

    Raises:
        InputError: the file is missing, or a line is invalid; the message has its number.
    """
    for number, line in enumerate(read_lines(path), start=1):
        place = f"{path}, line {number}"
        try:
            if line.strip():
                yield place, parse(kind, line, name)
        except ValueError as error:
            raise InputError(f"{place}: {error}; fix or remove the line") from error


def read_rows(paths: Iterable[str | Path]) -> list[Row]:
    """The rows of results files; a row that occurs several times is read once.

    Raises:
        InputError: as for :func:`read_lines_as`, or one name has two different systems, trainings, test sets or rows.
    """
    found: dict[tuple, tuple[Any, str]] = {}
    rows: dict[tuple, Row] = {}
    for path in paths:
        for place, row in read_lines_as(Row, path, "row"):
            rows.setdefault(row.key, row)
            named = {
                ("system", row.experiment, row.system): row.settings,
                ("training", row.experiment, row.backbone): row.training,
                ("sentences", row.dataset, row.experiment): row.sentences,
                ("row", *row.key): row,
            }
            for key, value in named.items():
                old, at = found.setdefault(key, (value, place))
                if old != value:
                    raise InputError(f"{at} and {place} have different values of {key}; give one of them another name")
    return list(rows.values())


def tables(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows grouped into tables; a table has one experiment on one test set."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.dataset, row.experiment), []).append(row)
    return list(found.values())


def by_system(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows by ``(backbone, system)``, in the order of the tables: by mechanism, then by name."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.backbone != "transformer", row.backbone, mechanism_order(row))):
        found.setdefault((row.backbone, row.system), []).append(row)
    return found


def mechanism_order(row: Row) -> tuple[int, str, str]:
    """Sort key for the systems of a backbone."""
    attention = row.settings.attention
    return [*_FIRST, attention].index(attention), attention, row.system


def is_at(row: Row, stage: str) -> bool:
    """Whether a row belongs to a stage. The base's rows belong to all stages but fine-tuned."""
    return row.stage == stage or (row.stage == BASE and stage != FINE_TUNED)


def at_stage(rows: Iterable[Row], stage: str) -> dict[int, Row]:
    """The rows of a stage by seed."""
    return {row.seed: row for row in rows if is_at(row, stage)}


def path_of(results: str | Path) -> Path:
    """The path of the counts for the rows in ``NAME.jsonl``: ``NAME.sentences.tsv`` in the same folder."""
    return Path(results).with_suffix(".sentences.tsv")


def format_statistics(row: Label, statistics: np.ndarray) -> str:
    """The counts of a row as one line, without the line end.

    The line has the key of the row, then the lengths and the matching n-grams of each sentence, compressed.

    Args:
        row: the row.
        statistics: :func:`~fairseq_lot.evaluation.bleu.sentence_statistics` of its tokenised translations.
    """
    counts = bz2.compress(statistics[:, :6].astype("<u4").tobytes())
    return f"{json.dumps(row.key, ensure_ascii=False)}\t{base64.b85encode(counts).decode('ascii')}"


def read_statistics(results: str | Path, rows: list[Row]) -> dict[tuple, np.ndarray]:
    """The sentence statistics of the rows, by the rows' keys; rows without counts are left out.

    Args:
        results: the file of the rows, ``NAME.jsonl``.
        rows: its rows.

    Raises:
        InputError: a line is invalid, or its counts do not give the score of the row.
    """
    path = path_of(results)
    kept: dict[tuple, np.ndarray] = {}
    for number, line in enumerate(read_lines(path) if path.exists() else [], start=1):
        try:
            key, counts = line.split("\t")
            found = np.frombuffer(bz2.decompress(base64.b85decode(counts)), "<u4").reshape(-1, 6).astype(float)
            possible = np.maximum(found[:, :1] - np.arange(4), 0)  # n-grams of a translation of that length
            kept[tuple(json.loads(key))] = np.hstack([found, possible])
        except (ValueError, TypeError, OSError) as error:
            raise InputError(f"{path}, line {number}: no counts of a row ({error}); score again") from error
    for row in rows:
        if row.key in kept and round(corpus_score(kept[row.key]), 2) != row.tokenised.score:
            raise InputError(f"{path} has the counts of other translations than {results} for {row.key}; score again")
    return {row.key: kept[row.key] for row in rows if row.key in kept}
