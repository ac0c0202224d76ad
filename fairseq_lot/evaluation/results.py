"""Rows of ``*.jsonl``: one scored system per line. The field names stand here and nowhere else."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import Required, TypedDict

from fairseq_lot.errors import InputError
from fairseq_lot.output.files import read_lines

Stage = Literal["base", "from scratch", "plug-and-play", "fine-tuned"]
STAGES: tuple[Stage, ...] = ("base", "from scratch", "plug-and-play", "fine-tuned")
BASE, FROM_SCRATCH, PLUG_AND_PLAY, FINE_TUNED = STAGES
Precision = Literal["fp32", "fp16", "bf16", "unknown"]
Name = Annotated[str, Field(pattern=r"\S")]
Flags = dict[str, bool | int | FiniteFloat | str]
Kind = TypeVar("Kind")

#: What a system is, as config/*.yaml has it; workflow/schema.yaml says what the entries mean.
System = TypedDict(
    "System",
    {
        "attention": Required[Name],
        "options": Flags,
        "sites": str,
        "calibrate": Flags,
        "finetune": Flags,
        "from-scratch": bool,
    },
    total=False,
)


class Training(TypedDict, total=False):
    """How the systems of an experiment are trained: size, flags of the backbone and of both trainings."""

    size: str
    backbone: Flags
    pretrain: Flags
    finetune: Flags


@dataclass(frozen=True, kw_only=True)
class MetricScore:
    """One BLEU score with its 95 % bootstrap interval and its paired test against the base.

    Args:
        score, low, high: BLEU and the bounds of its interval, in percent.
        signature: sacreBLEU's signature.
        base, delta, p: BLEU of the base, score minus base, and the p-value; None without a base.
    """

    score: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    signature: str
    base: FiniteFloat | None = None
    delta: FiniteFloat | None = None
    p: FiniteFloat | None = None


@dataclass(frozen=True, kw_only=True)
class Label:
    """Which system a row is about.

    Attributes:
        dataset, experiment, system: the names that people read.
        settings: what that system is.
        training: how the systems of the experiment are trained.
        seed: of the training.
        precision: of the translations.
    """

    dataset: Name = "unnamed"
    experiment: Name = "by hand"
    backbone: Name = "transformer"
    system: Name
    settings: System
    training: Training = dataclasses.field(default_factory=Training)
    stage: Stage
    seed: int = 1
    precision: Precision = "unknown"

    @property
    def key(self) -> tuple[str, str, str, str, str, int]:
        """What tells a row from others."""
        return self.dataset, self.experiment, self.backbone, self.system, self.stage, self.seed


@dataclass(frozen=True, kw_only=True)
class Row(Label):
    """A scored system; the fields are written in this order."""

    sentences: int
    tokenised: MetricScore
    sacrebleu: MetricScore
    reference: str
    bootstrap_samples: int
    bootstrap_seed: int
    device: str
    seconds: FiniteFloat | None
    commit: str
    command: str


def format_row(row: Row) -> str:
    """The row as one line of JSON without a line end."""
    return json.dumps(asdict(row), ensure_ascii=False, allow_nan=False)


def parse(kind: type[Kind], line: str, name: str) -> Kind:
    """An instance of a dataclass from one line of JSON, every field checked.

    Raises:
        ValueError: the line is not a JSON object with the fields of ``kind`` (a field with a default may be missing)
            and their types. The message is one line.
    """
    try:
        from_json(line, allow_inf_nan=False)
        return TypeAdapter(kind).validate_json(line, strict=True, extra="forbid")
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"the {name} is wrong{f' at {where}' if where else ''}: {first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"not a line of JSON ({error})") from None


def read_rows(paths: Iterable[str | Path]) -> list[Row]:
    """The rows of results files, each once; blank lines are skipped.

    Raises:
        InputError: a file is missing, a line is broken (the message gives its number), or one name stands for two
            systems, trainings or rows.
    """
    found: dict[tuple, tuple[Any, str]] = {}
    rows = {}

    def same(key: tuple, value: object, place: str) -> None:
        old, old_place = found.setdefault(key, (value, place))
        if old != value:
            raise InputError(f"{old_place} and {place} have different values of {key}; give one of them another name")

    for path in paths:
        for number, line in enumerate(read_lines(path), start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = parse(Row, line, "row")
            except ValueError as error:
                raise InputError(f"{place}: {error}; fix or remove the line") from error
            same(("system", row.experiment, row.system), row.settings, place)
            same(("training", row.experiment, row.backbone), row.training, place)
            same(("row", *row.key), row, place)
            rows[row.key] = row
    return list(rows.values())


def tables(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each table: those of one experiment on one test set."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.dataset, row.experiment), []).append(row)
    return list(found.values())


def by_system(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each backbone and system, in the order of the tables: by mechanism, then by name."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.backbone != "transformer", row.backbone, mechanism_order(row))):
        found.setdefault((row.backbone, row.system), []).append(row)
    return found


def mechanism_order(row: Row) -> tuple[bool, int, str, str]:
    """What the systems of a backbone are sorted by."""
    known, attention = ("softmax", "near_far", "sinkhorn", "esp", "lot"), row.settings["attention"]
    return attention not in known, known.index(attention) if attention in known else 0, attention, row.system


def at_stage(rows: Iterable[Row], stage: str) -> dict[int, Row]:
    """The rows of a stage by seed; a base stands where other systems are plugged in or trained from scratch."""
    return {row.seed: row for row in rows if row.stage == stage or (row.stage == BASE and stage != FINE_TUNED)}
