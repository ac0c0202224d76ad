"""Refuses an experiment that would fail later: reads it as JSON, and checks the schema, then flags and mechanisms."""

import contextlib
import copy
import functools
import io
import itertools
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from fairseq_lot.errors import InputError
from fairseq_lot.experiment.train import sum_of

SCHEMA = Path(__file__).with_name("schema.yaml")
# flags that the workflow gives, from what the experiment says elsewhere
GIVEN = {"user-dir", "source-lang", "target-lang", "fp16", "bf16"}
GIVEN_TRAINING = GIVEN | {"arch", "seed", "save-dir", "restore-file", "finetune-from-model", "log-file"}
GIVEN_TRANSLATING = GIVEN | {"path", "gen-subset", "model-overrides", "results-path"}
# flags after which there is no checkpoint of a whole training, or no translation of each sentence
NOTHING_SAVED = {"no-save", "disable-validation", "checkpoint-suffix", "stop-time-hours"}
NOT_ONE_EACH = {"quiet", "nbest", "num-shards", "shard-id", "score-reference", "skip-invalid-size-inputs-valid-test"}
# flags with which a training that goes on is another one
NOT_RESUMED = {f"reset-{what}" for what in ("dataloader", "lr-scheduler", "meters", "optimizer")}
NOT_RESUMED |= {"no-save-optimizer-state", "continue-once"}


def words(flags: dict[str, Any]) -> list[str]:
    """Flags of a config file as words of a command line; ``true`` is the flag alone."""
    return [
        f"--{name}" if value is True else f"--{name}={'false' if value is False else value}"
        for name, value in flags.items()
    ]


def test_sets(config: dict[str, Any]) -> dict[str, str]:
    """What tables call each test set; "test" alone if the experiment names none."""
    return config.get("tests") or {"test": ""}


def attention_flags(system: dict[str, Any]) -> dict[str, Any]:
    """The flags of a system's mechanism, the same for swap and fairseq-train."""
    sites = {"attention-sites": system["sites"]} if "sites" in system else {}
    return {"attention": system["attention"], **sites, **system.get("options", {})}


def lengths(config: dict[str, Any], split: str) -> list[str]:
    """Flags of ``fairseq-lot check``: the longest sentences on which no training and no translation stops."""
    trainings = [own | config.get("pretrain", {}) for own in config["backbones"].values()]
    skipped = any("skip-invalid-size-inputs-valid-test" in flags for flags in trainings)
    if split == "train" or (split == "valid" and skipped):  # fairseq leaves out longer ones
        return []
    calls = [*trainings, *[config.get("generate", {})] * (split != "valid")]
    limits = ("max-source-positions", "max-target-positions")
    return words({limit: min(int(flags.get(limit, 1024)) for flags in calls) for limit in limits})


def check(config: dict[str, Any]) -> None:
    """Check the experiment of a config file.

    Raises:
        InputError: it is not as the schema says, or a flag or a mechanism is unknown or wrong.
    """
    _check_schema(config)
    _check_data(config)
    _check_starting_points(config)
    _check_places(config)
    for name, system in config["systems"].items():
        _check_system(name, system, config)
    _check_models(config)


def _check_schema(config: dict[str, Any]) -> None:
    """Raise InputError where the experiment is not as the schema says."""
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(config))
    if error:
        known = error.validator == "pattern" and error.schema.get("description")
        message = f"{error.instance!r} {known}" if known else error.message
        raise InputError(f"{', '.join(map(str, error.absolute_path)) or 'the experiment'}: {message}")
    for seed in config["seeds"]:
        if not isinstance(seed, int):  # 1.0 is an integer to a schema, and another folder than 1
            raise InputError(f"seeds: {seed} is not written as an integer; write {seed:.0f}")


def _check_data(config: dict[str, Any]) -> None:
    """Raise InputError where the data are not those of earlier jobs, or the test sets cannot be found or told apart."""
    done, folder = Path(config["work"], "data.done"), Path(config["data"])
    if done.is_file() and (data := done.read_text(encoding="utf-8").strip()) not in ("", config["data"]):
        way_out = f"give another folder as work, or remove {done} if the text is the same"
        raise InputError(f"data: {done.parent} was made from {data}, not {config['data']}; {way_out}")
    for name in test_sets(config):
        if folder.is_dir() and not any(folder.glob(f"{name}.*")):
            raise InputError(
                f"tests: {folder} has no {name}; leave it out, or remove {folder} and {done} to make it again"
            )
    titles = list(test_sets(config).values())
    for title in titles:
        if titles.count(title) > 1:
            raise InputError(f"tests: two are called {title!r}, so tables could not tell them apart; rename one")
    _refuse_new_data(config["work"], folder)


def _check_starting_points(config: dict[str, Any]) -> None:
    """Raise InputError where nothing says what a system starts from."""
    trained = [name for name, system in config["systems"].items() if system.get("from-scratch")]
    if "pretrain" not in config and (trained or "base" not in config):
        raise InputError(f"pretrain: missing, so nothing says how {(trained or ['the base'])[0]} is trained")
    if "control" in config:
        if (control := config["control"]) not in config["systems"]:
            raise InputError(f"control: no system is called {control!r}; name one of {', '.join(config['systems'])}")
        if others := config["systems"][control].keys() - {"attention", "sites", "options"}:
            raise InputError(f"systems, {control}: the base is trained so; remove {', '.join(sorted(others))}")
    if "base" in config:
        _refuse_base(config["base"], seed=config["seeds"], backbone=config["backbones"])


@functools.cache
def _given_training() -> set[str]:
    """Flags of a training that the workflow gives."""
    # not above: Snakefile imports this file, and fairseq changes how its process logs
    from fairseq_lot.modules.flat_options import option_names

    return GIVEN_TRAINING | {name.replace("_", "-") for name in option_names()}


def _check_places(config: dict[str, Any]) -> None:
    """Raise InputError where a flag stands at a stage at which it has no place."""
    given = _given_training()
    for backbone, own in config["backbones"].items():
        for stage in ("pretrain", "finetune"):
            _refuse(f"backbones, {backbone}", own, set(config.get(stage, {})), f"{stage} says it for all")
        _refuse(f"backbones, {backbone}", own, {name for name in given if not name.startswith("differential-")})
    for stage in ("pretrain", "finetune"):
        _refuse_training(stage, config.get(stage, {}))
    _refuse("generate", config.get("generate", {}), GIVEN_TRANSLATING)
    _refuse("generate", config.get("generate", {}), NOT_ONE_EACH, "each sentence has one translation, which is scored")


def _check_system(name: str, system: dict[str, Any], config: dict[str, Any]) -> None:
    """Raise InputError where a system says what is not used, or what contradicts the experiment."""
    for stage in ("calibrate", "finetune"):
        if stage in system and system.get("from-scratch"):
            raise InputError(f"systems, {name}, {stage}: not used by a system from scratch; remove it")
    if "finetune" in system and "finetune" not in config:
        raise InputError(f"systems, {name}, finetune: not used where the experiment has no finetune; remove it")
    if "control" not in config:
        is_plain = system["attention"] == "softmax" and not system.get("options") and not system.get("from-scratch")
        if is_plain and len(system) > 1:
            raise InputError(
                f"systems, {name}: plain softmax is the control, the base fine-tuned as the others are; remove "
                f"{', '.join(sorted(system.keys() - {'attention'}))}"
            )
        if name == "softmax" and not is_plain:
            raise InputError("systems, softmax: the base and the control are called so; give another name")
    _refuse(f"systems, {name}, options", system.get("options", {}), {"attention", "attention-sites"})
    _refuse_training(f"systems, {name}, finetune", system.get("finetune") or {})
    if "calibrate" in system:
        _check_calibration(name, system, config)


def _check_calibration(name: str, system: dict[str, Any], config: dict[str, Any]) -> None:
    """Raise InputError where a system cannot be calibrated to the base, or not so."""
    from fairseq_lot.modules.flat_options import DEFAULTS

    if "control" in config:
        base = config["systems"][config["control"]]
        sites = (named.get("sites", DEFAULTS["attention_sites"]) for named in (system, base))
        own, of_base = (set(named.replace(" ", "").split(",")) for named in sites)
        if base["attention"] != "softmax" or (base.get("options") and not own <= {"cross", *of_base}):
            fits = f"fits to softmax, and with a prior at the sites of {config['control']} and at cross alone"
            raise InputError(f"systems, {name}, calibrate: {fits}; name these sites, or remove it")
    one, other = ("split", "text") if system["calibrate"]["with"] == "pieces" else ("longest", "random pieces")
    _refuse(f"systems, {name}, calibrate", system["calibrate"], {one}, f"it is of {other}")


def _check_models(config: dict[str, Any]) -> None:
    """Raise InputError where fairseq does not take the flags of a stage, or a system's model cannot be built."""
    from fairseq import options

    from fairseq_lot.models import pluggable_transformer  # noqa: F401 (registers the architectures)
    from fairseq_lot.models.fairseq_hooks import refuse_to_lose

    def train(given: list[str]) -> Namespace:
        nowhere = f"--save-dir={os.devnull}/none"  # a checkpoint in fairseq's default folder would be read
        parser = options.get_training_parser()
        args = options.parse_args_and_arch(parser, ["DATA", nowhere, *given])
        if args.lr_scheduler == "inverse_sqrt" and args.warmup_updates < 1:  # fairseq divides by it
            parser.error("inverse_sqrt begins with a warm-up; give warmup-updates of at least 1, or lr-scheduler fixed")
        return args

    def translate(given: list[str]) -> Namespace:
        return options.parse_args_and_arch(options.get_generation_parser(), ["DATA", "--path=CKPT", *given])

    for backbone, own in config["backbones"].items():
        shape = {"arch": f"{'lot_' * (backbone == 'transformer')}{backbone}_{config['size']}", **own}
        scheduler = {"lr-scheduler": "inverse_sqrt"}  # pretrain.sh's default
        model = _parse(f"pretrain, {backbone}", train, scheduler | shape | config.get("pretrain", {}))
        tuning = shape | config.get("finetune", {})
        tuned = _parse(f"finetune, {backbone}", train, tuning)
        for name, system in config["systems"].items():
            own = tuned
            if system.get("finetune"):
                own = _parse(f"systems, {name}, finetune", train, tuning | system["finetune"])
            try:
                built = _build(system, copy.copy(model))
                args = model if system.get("from-scratch") else own
                # as fairseq's configuration has them, which takes half a second to make
                refuse_to_lose(built, Namespace(common=args, ema=args, criterion=Namespace(_name=args.criterion)))
            except Exception as error:  # fairseq's are of sizes that do not fit, or of files that are not there
                raise InputError(f"systems, {name}: {' '.join(str(error).split())}") from None
    _parse("generate", translate, config.get("generate", {}))


def _refuse_new_data(work: str, data: Path) -> None:
    """Raise InputError where the data of a training were made anew under their name; train.py has noted a sum."""
    noted = sorted(Path(work).glob("seed*/*/**/data.sum"))
    if noted and data.is_dir():
        now = sum_of(data)
        for file in noted:
            if file.read_text(encoding="utf-8").strip() != now:
                way_out = f"give another folder as work, or remove {file.parent}"
                raise InputError(f"data: {data} was made again since {file.parent} was trained on it; {way_out}")


def _refuse_base(path: str, **places: Collection[Any]) -> None:
    """Raise InputError where a checkpoint to plug into is missing, or stands for several seeds or backbones."""
    for name, values in places.items():
        if len(values) > 1 and f"{{{name}}}" not in path:
            way_out = f"write {{{name}}} into the path, or give one {name}"
            raise InputError(f"base: one checkpoint for several {name}s; {way_out}")
    for chosen in itertools.product(*places.values()):
        base = Path(path.format(**dict(zip(places, chosen, strict=True))))
        if not base.exists() or base.is_dir():
            raise InputError(f"base: {base} is not there, or a folder; train it, or say pretrain instead")


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would silently keep the last, or that YAML takes for no text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        names = [key.value for key in keys]
        for key in keys:
            if names.count(key.value) > 1:
                raise InputError(f"{key.value} stands twice in line {node.start_mark.line + 1} and below; rename one")
            if key.tag != "tag:yaml.org,2002:str":
                raise InputError(f"{key.value} in line {key.start_mark.line + 1} is no text; write '{key.value}'")
        return super().construct_mapping(node, deep)


def _refuse(place: str, flags: dict[str, Any], given: set[str], why: str = "the experiment says it elsewhere") -> None:
    """Raise InputError where there is a flag that has no place there."""
    for name in flags:
        if name in given:
            raise InputError(f"{place}: {name} has no place here, {why}; remove it")


def _refuse_training(place: str, flags: dict[str, Any]) -> None:
    """Raise InputError where a training has a flag of the workflow's, or one that leaves nothing to score or resume."""
    _refuse(place, flags, _given_training())
    _refuse(place, flags, NOTHING_SAVED, "the best checkpoint of a whole training is scored")
    _refuse(place, flags, NOT_RESUMED, "a training that was stopped has to go on as if it had not been")


def _parse(place: str, parse: Callable[[list[str]], Namespace], flags: dict[str, Any]) -> Namespace:
    """What a parser makes of flags; InputError with argparse's message."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            return parse(words(flags))
        except SystemExit:
            raise InputError(f"{place}: {printed.getvalue().strip().partition('error: ')[2]}") from None


def _build(system: dict[str, Any], model: Namespace) -> Any:
    """A model of these arguments with the system's mechanisms and few symbols."""
    from fairseq_lot.modules.flat_options import add_attention_args, add_options, typed_options
    from fairseq_lot.modules.sites import can_be_fitted
    from fairseq_lot.plug_and_play.calibrate import FitOptions
    from fairseq_lot.plug_and_play.swap import write_attention_args
    from fairseq_lot.pretrained.loading import untrained

    attention, fit = (ArgumentParser(allow_abbrev=False, add_help=False) for _ in range(2))
    add_attention_args(attention, differential=False)
    add_options(fit, FitOptions)
    given = _parse("options", attention.parse_args, attention_flags(system))
    calibrate = {name: value for name, value in system.get("calibrate", {}).items() if name != "with"}
    FitOptions.of(_parse("calibrate", fit.parse_args, calibrate))
    write_attention_args(model, **typed_options(given))
    built = untrained(model, 8, 8)
    if "calibrate" in system and not can_be_fitted(built):
        raise InputError("calibrate: this attention has no parameters that a fit could change; remove it")
    return built


def main() -> int:
    """Check what comes on standard input, and the files that it is from; 2 and one line when it is wrong."""
    try:
        for path in sys.argv[1:]:
            try:
                yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
            except InputError as error:
                raise InputError(f"{path}: {error}") from None
        check(json.load(sys.stdin))
    except InputError as error:
        print(f"snakemake: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
