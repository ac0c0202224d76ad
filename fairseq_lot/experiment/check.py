"""Check an experiment before anything is trained, and refuse one that would fail later.

It refuses entries that contradict each other, unknown flags, and models that cannot be built.
"""

import contextlib
import copy
import io
import itertools
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml
from fairseq import options

from fairseq_lot.errors import InputError
from fairseq_lot.experiment.score import read_generation_flags
from fairseq_lot.experiment.spec import Calibration, Experiment, Flags, System, words
from fairseq_lot.experiment.train import sum_of
from fairseq_lot.models import pluggable_transformer  # noqa: F401 (registers the architectures)
from fairseq_lot.models.fairseq_hooks import refuse_to_lose
from fairseq_lot.modules.flat_options import DEFAULTS, add_attention_args, add_options, option_names, typed_options
from fairseq_lot.modules.sites import can_be_fitted
from fairseq_lot.plug_and_play.calibrate import FitOptions
from fairseq_lot.plug_and_play.swap import write_attention_args
from fairseq_lot.pretrained.loading import untrained

# flags that the plan sets from other entries of the experiment
GIVEN = {"user-dir", "source-lang", "target-lang", "fp16", "bf16"}
GIVEN_TRAINING = GIVEN | {"arch", "seed", "save-dir", "restore-file", "finetune-from-model", "log-file"}
GIVEN_TRAINING |= {name.replace("_", "-") for name in option_names()}
GIVEN_TRANSLATING = GIVEN | {"path", "gen-subset", "model-overrides", "results-path"}
# flags that leave no checkpoint of a complete training, or not one translation per sentence
NOTHING_SAVED = {"no-save", "disable-validation", "checkpoint-suffix", "stop-time-hours"}
NOT_ONE_EACH = {"quiet", "nbest", "num-shards", "shard-id", "score-reference", "skip-invalid-size-inputs-valid-test"}
# flags that make a resumed training differ from an uninterrupted one
NOT_RESUMED = {f"reset-{what}" for what in ("dataloader", "lr-scheduler", "meters", "optimizer")}
NOT_RESUMED |= {"no-save-optimizer-state", "continue-once"}


def check(experiment: Experiment) -> None:
    """Check an experiment before anything is made.

    Raises:
        InputError: an entry contradicts another one, the data or earlier trainings, or a flag or a mechanism is unknown
            or wrong.
    """
    _check_data(experiment)
    _check_starting_points(experiment)
    _check_places(experiment)
    for name, system in experiment.systems.items():
        _check_system(name, system, experiment)
    _check_models(experiment)


def _check_data(experiment: Experiment) -> None:
    """Raise InputError if the data differ from earlier jobs' data, or a test set is missing or has a duplicate name."""
    done, folder = Path(experiment.work, "data.done"), Path(experiment.data)
    if done.is_file() and (data := done.read_text(encoding="utf-8").strip()) not in ("", experiment.data):
        way_out = f"give another folder as work, or remove {done} if the text is the same"
        raise InputError(f"data: {done.parent} was made from {data}, not {experiment.data}; {way_out}")
    for name in experiment.test_sets:
        if folder.is_dir() and not any(folder.glob(f"{name}.*")):
            raise InputError(
                f"tests: {folder} has no {name}; leave it out, or remove {folder} and {done} to make it again"
            )
    titles = list(experiment.test_sets.values())
    for title in titles:
        if titles.count(title) > 1:
            raise InputError(f"tests: two are called {title!r}, so tables could not tell them apart; rename one")
    _refuse_new_data(experiment.work, folder)


def _check_starting_points(experiment: Experiment) -> None:
    """Raise InputError if a system, the base or the control has no defined training to start from."""
    systems = experiment.systems
    trained = [name for name, system in systems.items() if system.from_scratch]
    if experiment.pretrain is None and (trained or experiment.base is None):
        raise InputError(f"pretrain: missing, so nothing says how {(trained or ['the base'])[0]} is trained")
    if experiment.control is not None:
        if experiment.control not in systems:
            raise InputError(f"control: no system is called {experiment.control!r}; name one of {', '.join(systems)}")
        others = systems[experiment.control].as_written.keys() - {"attention", "sites", "options"}
        if others:
            remove = f"remove {', '.join(sorted(others))}"
            raise InputError(f"systems.{experiment.control}: the base is trained so; {remove}")
    if experiment.base is not None:
        _refuse_base(experiment.base, seed=experiment.seeds, backbone=experiment.backbones)


def _check_places(experiment: Experiment) -> None:
    """Raise InputError if a flag is given at a stage that does not allow it."""
    stages = {"pretrain": experiment.pretrain or {}, "finetune": experiment.finetune or {}}
    for backbone, own in experiment.backbones.items():
        for stage, flags in stages.items():
            _refuse(f"backbones.{backbone}", own, set(flags), f"{stage} says it for all")
        given = {name for name in GIVEN_TRAINING if not name.startswith("differential-")}
        _refuse(f"backbones.{backbone}", own, given)
    for stage, flags in stages.items():
        _refuse_training(stage, flags)
    _refuse("generate", experiment.generate, GIVEN_TRANSLATING)
    _refuse("generate", experiment.generate, NOT_ONE_EACH, "each sentence has one translation, which is scored")


def _check_system(name: str, system: System, experiment: Experiment) -> None:
    """Raise InputError if a system has entries that are not used or contradict the experiment."""
    place = f"systems.{name}"
    for stage, said in (("calibrate", system.calibrate), ("finetune", system.finetune)):
        if said is not None and system.from_scratch:
            raise InputError(f"{place}.{stage}: not used by a system from scratch; remove it")
    if system.finetune is not None and experiment.finetune is None:
        raise InputError(f"{place}.finetune: not used where the experiment has no finetune; remove it")
    if experiment.control is None:
        is_plain = system.attention == "softmax" and not system.options and not system.from_scratch
        if is_plain and (others := system.as_written.keys() - {"attention"}):
            raise InputError(
                f"{place}: plain softmax is the control, the base fine-tuned as the others are; remove "
                f"{', '.join(sorted(others))}"
            )
        if name == "softmax" and not is_plain:
            raise InputError("systems.softmax: the base and the control are called so; give another name")
    _refuse(f"{place}.options", system.options, {"attention", "attention-sites"})
    _refuse_training(f"{place}.finetune", system.finetune or {})
    if system.calibrate is not None:
        _check_calibration(f"{place}.calibrate", system, system.calibrate, experiment)


def _check_calibration(place: str, system: System, calibration: Calibration, experiment: Experiment) -> None:
    """Raise InputError if a system cannot be calibrated to the base, or an option is not used by this fit."""
    base = experiment.trained_as
    own, of_base = (
        set((one.sites or DEFAULTS["attention_sites"]).replace(" ", "").split(",")) for one in (system, base)
    )
    if base.attention != "softmax" or (base.options and not own <= {"cross", *of_base}):
        fits = f"fits to softmax, and with a prior at the sites of {experiment.control} and at cross alone"
        raise InputError(f"{place}: {fits}; name these sites, or remove it")
    one, other = ("split", "text") if calibration.with_ == "pieces" else ("longest", "random pieces")
    _refuse(place, calibration.flags, {one}, f"it is of {other}")


def _check_models(experiment: Experiment) -> None:
    """Raise InputError if fairseq refuses the flags of a stage, or a system's model cannot be built."""

    def train(given: list[str]) -> Namespace:
        nowhere = f"--save-dir={os.devnull}/none"  # a checkpoint in fairseq's default folder would be read
        parser = options.get_training_parser()
        args = options.parse_args_and_arch(parser, ["DATA", nowhere, *given])
        if args.lr_scheduler == "inverse_sqrt" and args.warmup_updates < 1:  # fairseq divides by it
            parser.error("inverse_sqrt begins with a warm-up; give warmup-updates of at least 1, or lr-scheduler fixed")
        return args

    for backbone in experiment.backbones:
        shape = experiment.model(backbone)
        scheduler: Flags = {"lr-scheduler": "inverse_sqrt"}  # pretrain.sh's default
        model = _parse(f"pretrain ({backbone})", train, scheduler | shape | (experiment.pretrain or {}))
        tuning = shape | (experiment.finetune or {})
        tuned = _parse(f"finetune ({backbone})", train, tuning)
        for name, system in experiment.systems.items():
            args = tuned
            if system.finetune:
                args = _parse(f"systems.{name}.finetune", train, tuning | system.finetune)
            _check_model(f"systems.{name}", system, model, model if system.from_scratch else args)
    try:
        read_generation_flags(["DATA", "--path=CKPT", *words(experiment.generate)])
    except InputError as error:
        raise InputError(f"generate: {error}") from None


def _check_model(place: str, system: System, model: Namespace, trained: Namespace) -> None:
    """Raise InputError if the model of a system cannot be built, fitted or trained.

    Args:
        place: the system's place in the file, for the message.
        system: the system.
        model: arguments of fairseq-train for the base.
        trained: arguments of fairseq-train for the system's own training.
    """
    attention, fit = (ArgumentParser(allow_abbrev=False, add_help=False) for _ in range(2))
    add_attention_args(attention, differential=False)
    add_options(fit, FitOptions)
    given = _parse(f"{place}.options", attention.parse_args, system.flags)
    fitted = _parse(f"{place}.calibrate", fit.parse_args, system.calibrate.flags if system.calibrate else {})
    try:
        FitOptions.of(fitted)
        args = copy.copy(model)
        write_attention_args(args, **typed_options(given))
        built = untrained(args, 8, 8)
        # as fairseq's configuration has them, which takes half a second to make
        refuse_to_lose(built, Namespace(common=trained, ema=trained, criterion=Namespace(_name=trained.criterion)))
    except Exception as error:  # fairseq's are of sizes that do not fit, or of files that are not there
        raise InputError(f"{place}: {' '.join(str(error).split())}") from None
    if system.calibrate and not can_be_fitted(built):
        raise InputError(f"{place}.calibrate: this attention has no parameters that a fit could change; remove it")


def _refuse_new_data(work: str, data: Path) -> None:
    """Raise InputError if a data folder has changed since a training in ``work`` used it.

    The checksum that ``train.py`` noted beside each training is compared.
    """
    noted = sorted(Path(work).glob("seed*/*/**/data.sum"))
    if noted and data.is_dir():
        now = sum_of(data)
        for file in noted:
            if file.read_text(encoding="utf-8").strip() != now:
                way_out = f"give another folder as work, or remove {file.parent}"
                raise InputError(f"data: {data} was made again since {file.parent} was trained on it; {way_out}")


def _refuse_base(path: str, **places: Collection[Any]) -> None:
    """Raise InputError if the base's checkpoint is missing, or one checkpoint stands for several seeds or backbones.

    Args:
        path: the path, with ``{seed}`` and ``{backbone}`` where it depends on them.
        **places: the values of ``seed`` and ``backbone``.
    """
    for name, values in places.items():
        if len(values) > 1 and f"{{{name}}}" not in path:
            way_out = f"write {{{name}}} into the path, or give one {name}"
            raise InputError(f"base: one checkpoint for several {name}s; {way_out}")
    for chosen in itertools.product(*places.values()):
        base = Path(path.format(**dict(zip(places, chosen, strict=True))))
        if not base.exists() or base.is_dir():
            raise InputError(f"base: {base} is not there, or a folder; train it, or say pretrain instead")


def _refuse(place: str, flags: Flags, given: set[str], why: str = "the experiment says it elsewhere") -> None:
    """Raise InputError if one of ``flags`` is not allowed in this entry of the experiment.

    Args:
        place: the entry, for the message.
        flags: the flags of the entry.
        given: names of the flags that are not allowed.
        why: the reason, for the message.
    """
    for name in flags:
        if name in given:
            raise InputError(f"{place}: {name} has no place here, {why}; remove it")


def _refuse_training(place: str, flags: Flags) -> None:
    """Raise InputError if a training has a flag that the plan sets, or one that leaves nothing to score or resume."""
    _refuse(place, flags, GIVEN_TRAINING)
    _refuse(place, flags, NOTHING_SAVED, "the best checkpoint of a whole training is scored")
    _refuse(place, flags, NOT_RESUMED, "a training that was stopped has to go on as if it had not been")


def _parse(place: str, parse: Callable[[list[str]], Namespace], flags: Flags) -> Namespace:
    """Parse flags; InputError with argparse's message if they are wrong."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            return parse(words(flags))
        except SystemExit:
            raise InputError(f"{place}: {printed.getvalue().strip().partition('error: ')[2]}") from None


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, of which YAML silently keeps the last, and keys that are not texts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        names = [key.value for key in keys]
        for key in keys:
            if names.count(key.value) > 1:
                raise InputError(f"{key.value} stands twice in line {node.start_mark.line + 1} and below; rename one")
            if key.tag != "tag:yaml.org,2002:str":
                raise InputError(f"{key.value} in line {key.start_mark.line + 1} is no text; write '{key.value}'")
        return super().construct_mapping(node, deep)


def check_file(path: str) -> None:
    """Raise InputError if a YAML file has duplicate keys, or keys that are not texts."""
    try:
        yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def main() -> int:
    """Check the config files on the command line, then the experiment that stdin has as JSON.

    Returns:
        The exit code: 0 if all are right, else 2.
    """
    try:
        for path in sys.argv[1:]:
            check_file(path)
        check(Experiment.of(json.load(sys.stdin)))
    except InputError as error:
        print(f"snakemake: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
