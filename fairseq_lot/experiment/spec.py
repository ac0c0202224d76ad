"""The only definition of an experiment (``config/*.yaml``), of its systems, and of the rows of its results."""

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    NonNegativeInt,
    Tag,
    ValidationError,
    field_serializer,
    model_validator,
)

from fairseq_lot.errors import InputError

Stage = Literal["base", "from scratch", "plug-and-play", "fine-tuned"]
STAGES: tuple[Stage, ...] = get_args(Stage)
BASE, FROM_SCRATCH, PLUG_AND_PLAY, FINE_TUNED = STAGES
Backbone = Literal["transformer", "diff_transformer"]
Precision = Literal["fp32", "fp16", "bf16"]
CHOSEN = "chosen"  # the value of lenpen that stands for the best one on validation


def _matches(pattern: str, fault: str) -> AfterValidator:
    """A pydantic check: refuse a text that does not match a pattern. The message is the text, then ``fault``."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} {fault}")
        return text

    return AfterValidator(check)


def _check_flag(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"the value of a flag is true, false, a number or a text, not {value!r}")
    return value


def _check_different(values: list) -> list:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value!r} stands twice; remove one")
    return values


_FLAG = _matches("[a-z][a-z0-9-]*", "is no flag; write its name in small letters, without the dashes before it")
Flag = Annotated[bool | int | float | str, BeforeValidator(_check_flag)]
#: Flags of a command, as ``max-epoch: 3``; ``true`` is the flag alone.
Flags = dict[Annotated[str, _FLAG], Flag]
#: Flags, or false: without this stage.
FlagsOrFalse = Annotated[
    Annotated[Flags, Tag("[flags]")] | Annotated[Literal[False], Tag("[false]")],
    Discriminator(lambda value: "[false]" if value is False else "[flags]"),
]
#: A text that is not empty.
Text = Annotated[str, _matches(r"(?s).*\S.*", "is empty; give a text")]
Name = Annotated[
    str,
    _matches(
        r"[^/{}:'\"\\.\s]([^/{}:\"\\\n\t]*[^/{}:\"\\\s])?",
        r"""is empty, has one of / { } : " \ in it, or a space around it, or begins with . or '; give another name""",
    ),
]
#: The name is part of paths, and of the text that snakemake passes to jobs on a cluster, where commas separate.
SystemName = Annotated[
    str,
    _matches(
        r"[^/{}<>:,$`'\"\\.\s]([^/{}<>:,$`\"\\\n\t]{0,98}[^/{}<>:,$`\"\\\s])?",
        "has one of / { } < > : , $ ` \" \\ in it, or a space around it, or begins with . or ', or has more than 100 "
        "characters; give another name",
    ),
    _matches("(?!base$).*", "is what the base is called; give another name"),
]
Folder = Annotated[str, _matches("[^{}<>]+", "is empty or has one of { } < > in it; give another folder")]
BasePath = Annotated[
    str,
    _matches(
        r"([^{}<>]|\{seed\}|\{backbone\})+",
        "has braces that are not {seed} or {backbone}, or < or >; give another path",
    ),
]
Language = Annotated[str, _matches("[A-Za-z][A-Za-z0-9_-]*", "is no name of a language; write it as in the data")]
Languages = Annotated[list[Language], Field(min_length=2, max_length=2), AfterValidator(_check_different)]
TestSet = Annotated[str, _matches("test[0-9]*", "is no test set of the data; they are called test, test1, test2, ...")]


class _Strict(BaseModel):
    """Base class: unknown entries and wrong types are refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        if isinstance(given, Mapping) and cls.model_config.get("extra") == "forbid":
            for name in given:
                if name not in known:
                    near = difflib.get_close_matches(str(name), known, n=1)
                    way_out = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                    raise ValueError(f"unknown entry {name!r}; {way_out}")
        return given


class _Written(_Strict):
    """Base class for files that people write: names have dashes, and empty entries are refused."""

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_").replace("_", "-"))

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            for name, value in given.items():
                if value is None:
                    raise ValueError(f"{name} is empty; give a value or remove it")
        return given


class Calibration(_Written):
    """The calibration of a system. Further entries are flags of the fit, see ``fairseq-lot calibrate --help``.

    Attributes:
        with_: the sentences to fit on: random pieces, or the text of the data; ``with`` in files.
        split: split of the text; default: train.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: Flags

    with_: Literal["pieces", "text"]
    split: Literal["train", "valid"] | None = None

    @property
    def flags(self) -> Flags:
        """Flags of the fit."""
        return {**({"split": self.split} if self.split else {}), **self.__pydantic_extra__}


class System(_Written):
    """One model of an experiment.

    Attributes:
        attention: the mechanism, as ``fairseq-lot swap --help`` names it.
        options: options of the mechanism, such as ``lot-num-pivots``.
        sites: the sites with this attention: encoder, cross, decoder, separated by commas; default: encoder.
        calibrate: fit the mechanism to the base's softmax; None: it stays as initialised.
        finetune: flags that differ from the fine-tuning of the other systems; false: the system is only plugged in.
        from_scratch: train it with this attention from scratch.
    """

    attention: Text
    options: Flags = {}
    sites: str | None = None
    calibrate: Calibration | None = None
    finetune: FlagsOrFalse | None = None
    from_scratch: bool = False

    @property
    def flags(self) -> Flags:
        """Flags of the mechanism, the same for ``fairseq-lot swap`` and fairseq-train."""
        sites: Flags = {} if self.sites is None else {"attention-sites": self.sites}
        return {"attention": self.attention, **sites, **self.options}

    @property
    def as_written(self) -> dict[str, Any]:
        """The entries that are set, by their names in files."""
        return self.model_dump(by_alias=True, exclude_unset=True)


PLAIN = System(attention="softmax")


class Experiment(_Written):
    """An experiment, as in ``config/NAME.yaml``.

    Attributes:
        experiment: its name in tables.
        dataset: the name of the data in tables.
        data: folder made by prepare_*.sh or fairseq-preprocess.
        prepare: the command that makes missing data.
        tests: the test sets of the data with their names in tables; default: only "test".
        languages: source and target, for data of several pairs.
        work: folder of checkpoints, logs, rows and the table.
        report: also make the HTML page of ``fairseq-lot report``.
        size: small has 3+3 layers of width 128, medium 6+6 of width 256, iwslt_de_en 6+6 of width 512.
        precision: precision of training and translation; default: ``default_precision``, else fp32.
        default_precision: the precision in a Snakemake profile, for all experiments that give none.
        backbones: the Transformers to swap in, each with its own flags of fairseq-train, which must not be in pretrain
            or finetune.
        seeds: seeds of the trainings; all jobs run once for each seed.
        base: the checkpoint whose attention is swapped; without it a base is trained with the flags of pretrain.
        control: the system that the base is trained as; default: plain softmax.
        pretrain: flags of fairseq-train; not needed with a base if no system is from scratch.
        finetune: flags of fairseq-train; without them nothing is fine-tuned.
        generate: flags of fairseq-generate; ``lenpen: chosen`` takes the length penalty that is best on validation.
        systems: the systems by their names in tables, folders and logs.
    """

    experiment: Name
    dataset: Name
    data: Text
    prepare: str | None = None
    tests: dict[TestSet, Name] = {}
    languages: Languages | None = None
    work: Folder
    report: bool = False
    size: Literal["small", "medium", "iwslt_de_en"]
    precision: Precision | None = None
    default_precision: Precision | None = None
    backbones: Annotated[dict[Backbone, Flags], Field(min_length=1)]
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1), AfterValidator(_check_different)]
    base: BasePath | None = None
    control: SystemName | None = None
    pretrain: Flags | None = None
    finetune: Flags | None = None
    generate: Flags = {}
    systems: Annotated[dict[SystemName, System], Field(min_length=1)]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Experiment":
        """The experiment of a config file; InputError if an entry is wrong."""
        try:
            return cls.model_validate(config)
        except ValidationError as error:
            place, fault = first_fault(error)
            raise InputError(f"{place or 'the experiment'}: {fault}") from None

    @property
    def test_sets(self) -> dict[str, str]:
        """Name in tables by test set; empty for a single test set without a name."""
        return self.tests or {"test": ""}

    def model(self, backbone: Backbone) -> Flags:
        """Flags of fairseq-train for the architecture and the size of a backbone."""
        return {"arch": f"{'lot_' * (backbone == 'transformer')}{backbone}_{self.size}", **self.backbones[backbone]}

    @property
    def trained_as(self) -> System:
        """The system that the base is trained as."""
        return PLAIN if self.control is None else self.systems[self.control]


@dataclass(frozen=True, kw_only=True)
class MetricScore:
    """One BLEU score with its 95 % bootstrap interval and its paired test against the base.

    Attributes:
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

    def __str__(self) -> str:
        return f"{self.score:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Label(_Strict):
    """The system, stage and seed of a row.

    Attributes:
        dataset, experiment, backbone, system: names in tables.
        settings: definition of the system.
        training: the experiment's size and base, and the flags of the backbone, pretraining and fine-tuning.
        stage: "base", "from scratch", "plug-and-play" or "fine-tuned".
        seed: seed of the training.
        precision: precision of the translations.
    """

    dataset: Text = "unnamed"
    experiment: Text = "by hand"
    backbone: Text = "transformer"
    system: Text
    settings: System
    training: dict[str, str | Flags] = {}
    stage: Stage
    seed: int = 1
    precision: Precision | Literal["unknown"] = "unknown"

    @field_serializer("settings")
    def _write(self, settings: System) -> dict[str, Any]:
        return settings.as_written

    @property
    def key(self) -> tuple[str, str, str, str, str, int]:
        """The fields that identify a row."""
        return self.dataset, self.experiment, self.backbone, self.system, self.stage, self.seed

    @property
    def line(self) -> str:
        """One line of JSON, without a line end."""
        return json.dumps(self.model_dump(), ensure_ascii=False, allow_nan=False)


def _is_none(value: Any) -> bool:
    return value is None


class Row(Label):
    """A scored system; the fields are written in this order.

    Attributes:
        sentences: number of sentences in the test set.
        length: number of tokens in all translations divided by that in the references; BLEU penalises values below 1.
            None in old rows.
        tokenised, sacrebleu: BLEU of the tokens and of the detokenised text.
        chrf: sacreBLEU's chrF of the detokenised text; None in old rows, and then not written.
        reference: the origin of the detokenised references.
        bootstrap_samples, bootstrap_seed: number and seed of the bootstrap's resamples.
        device, seconds: where the test set was translated, and how long fairseq-generate took; None: unknown.
        lenpen: the length penalty of the beam search if it was chosen on validation, else None and not written.
        commit: commit of this code.
        command: the command that translated.
    """

    sentences: int
    length: FiniteFloat | None = None
    tokenised: MetricScore
    sacrebleu: MetricScore
    chrf: FiniteFloat | None = Field(None, exclude_if=_is_none)
    reference: str
    bootstrap_samples: int
    bootstrap_seed: int
    device: str
    seconds: FiniteFloat | None
    lenpen: FiniteFloat | None = Field(None, exclude_if=_is_none)
    commit: str
    command: str


def words(flags: Mapping[str, Flag]) -> list[str]:
    """Flags as words of a command line, ``--name`` or ``--name=value``."""
    return [
        f"--{name}" if value is True else f"--{name}={'false' if value is False else value}"
        for name, value in flags.items()
    ]


def first_fault(error: ValidationError) -> tuple[str, str]:
    """The first error as two texts: its place, such as ``systems.LOT.sites``, and the reason with the value."""
    first: Any = error.errors(include_url=False)[0]
    place, value = [part for part in first["loc"] if part not in ("[flags]", "[false]")], repr(first["input"])
    if place[-1:] == ["[key]"]:
        place = place[:-2]
    if first["type"] == "value_error":
        fault = str(first["ctx"]["error"])
    elif first["type"] == "missing":
        fault = "required, but not there"
    elif first["msg"].startswith("Input "):
        expected = first["msg"].removeprefix("Input ").partition(" or instance of ")[0]
        fault = f"{expected}, not {value if len(value) <= 80 else value[:80] + '...'}"
    else:
        fault = first["msg"].replace(" after validation", "")
    return ".".join(map(str, place)), fault
