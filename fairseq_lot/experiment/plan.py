"""Arguments and paths of an experiment's jobs, for the rules in ``workflow/Snakefile``."""

import itertools
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from fairseq_lot.experiment.spec import (
    BASE,
    CHOSEN,
    FINE_TUNED,
    PLAIN,
    PLUG_AND_PLAY,
    STAGES,
    Backbone,
    Experiment,
    Flags,
    Label,
    Stage,
    System,
    words,
)


class Plan:
    """The jobs of an experiment. Patterns are paths with the wildcards ``{seed}``, ``{backbone}`` and ``{system}``.

    Attributes:
        work: the experiment's folder.
        home: pattern of the folder for a seed and a backbone.
        own: pattern of a system's folder in ``home``; the base is the system "base".
        row: pattern of a row's files without their ending; it also has ``{stage}`` and ``{subset}``.
        base: pattern of the base's checkpoint.
        precision: precision of trainings and translations.
        half: the flag for this precision, none for fp32.
        pair: flags for the languages.
        pretrained: names of the systems that are trained from scratch, including "base" unless a checkpoint is given.
        plugged: names of the systems that are swapped into the base.
        tuned: names of the systems that are fine-tuned.
        controls: names of the systems that are the base itself, to be fine-tuned as the control.
        systems: names of the systems with rows, by stage.
        subsets: the test sets: the suffix in file names, such as ``.test1``, to the suffix of the dataset's name in
            tables, such as ``, news``; both may be empty.
    """

    def __init__(self, experiment: Experiment):
        self.experiment, systems = experiment, experiment.systems
        self.work = experiment.work.rstrip("/")
        self.home = self.work + "/seed{seed}/{backbone}"
        self.own = self.home + "/{system}"
        self.row = self.own + "/{stage}{subset}"
        self.base = experiment.base or self.home + "/base/checkpoint_best.pt"
        self.precision = experiment.precision or experiment.default_precision or "fp32"
        self.half = [] if self.precision == "fp32" else [f"--{self.precision}"]
        languages = zip(("source-lang", "target-lang"), experiment.languages or (), strict=False)
        self.pair = words(dict(languages))
        scratch = [name for name, system in systems.items() if system.from_scratch]
        plain = [name for name, system in systems.items() if system == PLAIN]
        self.pretrained = scratch if experiment.base else ["base", *scratch]
        self.controls = [experiment.control] if experiment.control else plain
        self.plugged = [name for name in systems if name not in scratch + self.controls]
        may_be_tuned = [] if experiment.finetune is None else self.plugged + self.controls
        self.tuned = [name for name in may_be_tuned if systems[name].finetune is not False]
        self.systems = dict(zip(STAGES, (["base"], scratch, self.plugged, self.tuned), strict=True))
        self.subsets = {
            "" if name == "test" else f".{name}": title and f", {title}" for name, title in experiment.test_sets.items()
        }

    def every(self, pattern: str, systems: Iterable[str]) -> list[str]:
        """The paths of a pattern for each seed, each backbone and these systems."""
        names = itertools.product(self.experiment.seeds, self.experiment.backbones, systems)
        return [pattern.format(seed=seed, backbone=backbone, system=system) for seed, backbone, system in names]

    @property
    def rows(self) -> list[str]:
        """The path of each row's files without their ending, in the order of the results."""
        folders = [
            (folder, stage) for stage, systems in self.systems.items() for folder in self.every(self.own, systems)
        ]
        return [f"{folder}/{stage}{subset}" for folder, stage in folders for subset in self.subsets]

    @property
    def making_data(self) -> str:
        """Shell commands that make the data folder if it is missing, then check all splits that are used."""
        data = self.experiment.data
        missing = shlex.quote(f"{data} is missing; make it with scripts/prepare_*.sh")
        prepare = self.experiment.prepare or f"echo {missing} && exit 2"
        lines = [f"[ -d {shlex.quote(data)} ] || {{ {prepare}\n}}"]
        for split in ("train", "valid", *self.experiment.test_sets):
            command = ["fairseq-lot", "check", data, "--split", split, *self.limits(split), *self.pair]
            lines.append(shlex.join(command))
        return "\n".join(lines)

    @property
    def comparing_base(self) -> str:
        """Shell commands that compare the dictionaries of the base at path ``$1`` with those of the test sets."""
        words = [[self.experiment.data, "--split", name, *self.pair] for name in self.experiment.test_sets]
        return "\n".join(f'fairseq-lot check --path "$1" {shlex.join(of_set)}' for of_set in words)

    @property
    def reporting(self) -> str:
        """Arguments of ``fairseq-lot report``: all training logs, and the models of the first seed and backbone."""
        logs = self.every(self.own + "/train.log", self.pretrained)
        logs += self.every(self.own + "/finetuned/train.log", self.tuned)
        swapped = self.every(self.own + "/swapped.pt", self.plugged)[: len(self.plugged)]
        given = {"--logs": logs, "--path": self.every(self.base, ["base"])[:1], "--compare": swapped}
        files = [word for flag, paths in given.items() if paths for word in (flag, *paths)]
        return shlex.join([*files, "--data", self.experiment.data, "--split", "test", *self.pair])

    def limits(self, split: str) -> list[str]:
        """Flags of ``fairseq-lot check``: the split's length limits, so that training or generation will not abort."""
        shared = self.experiment.pretrain or {}
        trainings = [own | shared for own in self.experiment.backbones.values()]
        skipped = any("skip-invalid-size-inputs-valid-test" in flags for flags in trainings)
        generate = self.experiment.generate
        is_translated = split.startswith("test") or (split == "valid" and generate.get("lenpen") == CHOSEN)
        if split == "train" or (skipped and not is_translated):  # fairseq skips longer ones
            return []
        calls = [*trainings, *[generate] * is_translated]
        limits = ("max-source-positions", "max-target-positions")
        return words({limit: min(int(flags.get(limit, 1024)) for flags in calls) for limit in limits})

    @property
    def training_threads(self) -> int:
        """CPU threads of a training from scratch: two if it is the only one, since all other jobs wait for it."""
        return 2 if len(self.every(self.own, self.pretrained)) == 1 else 1

    def job(self, seed: str, backbone: Backbone, system: str, stage: Stage = BASE, subset: str = "") -> "Job":
        """The job for these wildcards of the Snakefile."""
        return Job(self, seed, backbone, system, stage, subset)


@dataclass(frozen=True)
class Job:
    """A job for one system of an experiment, or for one of its rows.

    Attributes:
        plan: the plan of the experiment.
        seed, backbone, name: the values of the wildcards; ``name`` is the system's, or "base".
        stage: stage of the row.
        subset: suffix of the row's test set in file names, a key of ``plan.subsets``.
    """

    plan: Plan
    seed: str
    backbone: Backbone
    name: str
    stage: Stage
    subset: str

    @property
    def system(self) -> System:
        """The definition of the system; the base has the definition that it is trained as."""
        experiment = self.plan.experiment
        return experiment.trained_as if self.name == "base" else experiment.systems[self.name]

    @property
    def pretraining(self) -> str:
        """Flags of ``pretrain.sh``, quoted for a shell."""
        return self._training(self.plan.experiment.pretrain)

    @property
    def finetuning(self) -> str:
        """Flags of ``finetune.sh``, quoted for a shell."""
        return self._training({**(self.plan.experiment.finetune or {}), **(self.system.finetune or {})})

    @property
    def plugging(self) -> str:
        """Flags of ``fairseq-lot swap``, quoted for a shell."""
        fit, how = self.system.calibrate, ["--no-calibrate"]
        if fit is not None:
            how = [f"--calibrate={self.plan.experiment.data}", *self.plan.pair] if fit.with_ == "text" else []
            how += words(fit.flags)
        # experiments also measure swaps that are too expensive to use
        return shlex.join(["--budget=none", *words(self.system.flags), *how])

    @property
    def translating(self) -> str:
        """Flags of ``score.sh``, quoted for a shell."""
        subset = words({"gen-subset": self.subset[1:]} if self.subset else {})
        return shlex.join([*subset, *self.plan.pair, *self.plan.half, *words(self.plan.experiment.generate)])

    @property
    def start(self) -> str:
        """The path of the checkpoint that the fine-tuning starts from."""
        return self._at(self.plan.base if self.name in self.plan.controls else self.plan.own + "/swapped.pt")

    @property
    def start_done(self) -> str:
        """The path of the file that exists once :attr:`start` is complete."""
        return self._at(self.plan.home + "/base.done") if self.name in self.plan.controls else self.start

    @property
    def scored(self) -> str:
        """The path of the checkpoint that is scored for the row."""
        if self.stage == BASE:
            return self._at(self.plan.base)
        own = {PLUG_AND_PLAY: "/swapped.pt", FINE_TUNED: "/finetuned/checkpoint_best.pt"}
        return self._at(self.plan.own + own.get(self.stage, "/checkpoint_best.pt"))

    @property
    def scored_done(self) -> str:
        """The path of the file that exists once :attr:`scored` is complete."""
        own = {PLUG_AND_PLAY: "/swapped.pt", FINE_TUNED: "/finetuned.done"}
        return self._at(self.plan.own + own.get(self.stage, ".done"))

    def of_base(self, ending: str) -> str | None:
        """The path of the base's file with this ending on the same test set; None for the base itself."""
        return None if self.stage == BASE else self._at(f"{self.plan.home}/base/base{self.subset}{ending}")

    @property
    def label(self) -> str:
        """The label of the row as JSON, for ``score.sh``."""
        experiment = self.plan.experiment
        shared = experiment.model_dump(include={"size", "base", "pretrain", "finetune"}, exclude_unset=True)
        label = Label(
            dataset=experiment.dataset + self.plan.subsets[self.subset],
            experiment=experiment.experiment,
            backbone=self.backbone,
            system=(self.plan.controls or ["softmax"])[0] if self.stage == BASE else self.name,
            settings=self.system,
            training={**shared, "backbone": experiment.backbones[self.backbone]},
            stage=self.stage,
            seed=int(self.seed),
            precision=self.plan.precision,
        )
        return label.line

    def _training(self, flags: Flags | None) -> str:
        own = words({**self.plan.experiment.model(self.backbone), **self.system.flags})
        return shlex.join([*own, *self.plan.pair, *self.plan.half, f"--seed={self.seed}", *words(flags or {})])

    def _at(self, pattern: str) -> str:
        return pattern.format(seed=self.seed, backbone=self.backbone, system=self.name)


def state_of(path: str) -> str:
    """Size and modification time of a file as text; it differs if another file, even an older one, replaces it."""
    stat = os.stat(path)
    return str((stat.st_size, int(stat.st_mtime)))
