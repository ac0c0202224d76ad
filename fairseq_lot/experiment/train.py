"""Run fairseq-train for ``scripts/pretrain.sh`` and ``scripts/finetune.sh``.

A stopped training resumes. A folder belongs to the data and flags of its training; others are refused.
"""

import hashlib
import re
import subprocess
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from fairseq_lot import cli
from fairseq_lot.errors import InputError
from fairseq_lot.experiment.flags import take
from fairseq_lot.output.files import atomic_write

_WITH_WARM_UP = {"cosine", "fixed", "inverse_sqrt", "polynomial_decay", "reduce_lr_on_plateau"}


def build_parser() -> ArgumentParser:
    """The parser of both scripts; the first word is the script's name."""
    parser = cli.OneLineParser(prog="train", description=__doc__, allow_abbrev=False)
    scripts = parser.add_subparsers(required=True)
    for run, arguments in ((pretrain, ("data", "out")), (finetune, ("swapped", "data", "out"))):
        script = scripts.add_parser(f"{run.__name__}.sh", add_help=False, allow_abbrev=False)
        for argument in arguments:
            script.add_argument(argument)
        script.add_argument("flags", nargs=REMAINDER)
        script.set_defaults(run=run)
    return parser


def pretrain(args: Namespace) -> None:
    """Train a model from scratch, as ``scripts/pretrain.sh DATA OUT FLAGS``."""
    own = "--arch lot_transformer_small --attention softmax --lr-scheduler inverse_sqrt --lr 0.0005"
    if take("lr-scheduler", args.flags, "inverse_sqrt")[0] in _WITH_WARM_UP:  # others do not have the flag
        own += " --warmup-updates 4000"
    own += " --dropout 0.3 --max-tokens 4096 --max-epoch 25 --seed 1"
    train(args.data, Path(args.out), [*own.split(), *args.flags])


def finetune(args: Namespace) -> None:
    """Fine-tune a swapped checkpoint, or the base as the control: ``scripts/finetune.sh SWAPPED DATA OUT FLAGS``."""
    swapped, out = Path(args.swapped), Path(args.out)
    if not swapped.is_file():
        raise InputError(f"there is no checkpoint {swapped}; make it with fairseq-lot swap")
    stat = swapped.stat()
    when = datetime.fromtimestamp(stat.st_mtime_ns // 10**9).astimezone()
    start = f"{stat.st_size} {when:%F %T}.{stat.st_mtime_ns % 10**9:09} {when:%z}"
    if _checkpoints(out) and _noted(out, "start") not in (None, start):
        raise InputError(f"{out} was trained from another {swapped}; remove it to train again")
    own = "--lr-scheduler fixed --lr 0.00005 --dropout 0.3 --max-tokens 4096 --max-epoch 10 --seed 1"
    base = ["--arch", "pluggable_transformer", "--finetune-from-model", args.swapped]
    train(args.data, out, [*base, *own.split(), *args.flags], start=start)


def train(data: str, out: Path, flags: Sequence[str], start: str | None = None) -> None:
    """Run fairseq-train, unless the training has ended; a stopped training, or one with more epochs now, resumes.

    Args:
        data: folder made by fairseq-preprocess.
        out: folder of the checkpoints. It also has notes on their origin, ``data``, ``data.sum``, ``flags``, ``start``,
            and ``finished`` once the training has ended.
        flags: of fairseq-train; they override the common ones.
        start: identifies the checkpoint that a fine-tuning starts from; None: a training from scratch.

    Raises:
        InputError: ``out`` belongs to another training or cannot be written, or a flag would reset part of a training
            that resumes.
    """
    data = data.rstrip("/")
    if not Path(data).is_dir():
        raise InputError(f"there is no folder {data}; make it with scripts/prepare_*.sh")
    notes = {"data": data, "data.sum": sum_of(data), "flags": " ".join(flags)}
    if start is not None:
        notes["start"] = start
    if _checkpoints(out):  # without one nothing was trained, whatever was asked for
        _refuse_other(out, notes)
        # fairseq would go on after --patience has stopped it, and where there is no checkpoint_last.pt
        if (out / "finished").is_file() and _noted(out, "flags") in (None, notes["flags"]):
            print(f"{out} is trained already")
            return
        _refuse_to_begin_again(out, flags)
    own = [f"--{_embeddings(data)}", "--save-dir", str(out), *["--optimizer", "adam", "--weight-decay", "0.0001"]]
    own += ["--criterion", "label_smoothed_cross_entropy"]
    if take("optimizer", flags, "adam")[0] == "adam":  # others do not have the flag
        own += ["--adam-betas", "(0.9, 0.98)"]
    if take("criterion", flags, "label_smoothed_")[0].startswith("label_smoothed_"):
        own += ["--label-smoothing", "0.1"]
    own += ["--distributed-world-size", "1", "--no-epoch-checkpoints", "--log-interval", "100"]
    # a sentence that is too long would stop the training after an epoch
    _call("fairseq-lot", "check", data, "--training", *own, *flags)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "finished").unlink(missing_ok=True)
        for name, text in notes.items():
            _note(out, name, text)
    except (OSError, InputError) as error:
        raise InputError(f"cannot write in {out}; free space or give another folder") from error
    _call("fairseq-train", data, "--user-dir", "fairseq_lot", "--log-file", f"{out}/train.log", *own, *flags)
    if not _has(flags, "--stop-time-hours"):  # fairseq then stops early, to go on later
        _note(out, "finished", f"{datetime.now():%F %T}")


def sum_of(data: str | Path) -> str:
    """A checksum of a data folder: its dictionaries and the index of train."""
    found = hashlib.sha256()
    for pattern in ("dict.*.txt", "train.*.idx"):
        for file in sorted(Path(data).glob(pattern)):
            found.update(file.read_bytes())
    return found.hexdigest()


def _refuse_other(out: Path, notes: dict[str, str]) -> None:
    """Raise InputError if the checkpoints in a folder are from another training than the new notes describe."""
    data, old = notes["data"], _noted(out, "flags") or notes["flags"]
    goes_on = (out / "checkpoint_last.pt").is_file() and _is_longer(old, notes["flags"])
    if old != notes["flags"] and not goes_on:
        raise InputError(f"{out} was trained with '{old}', not '{notes['flags']}'; remove it or give another folder")
    if _noted(out, "data") not in (None, data):
        same = f"{out}/data if the text is the same"
        raise InputError(f"{out} was trained on {_noted(out, 'data')}, not {data}; remove it, or {same}")
    if _noted(out, "data.sum") not in (None, notes["data.sum"]):
        raise InputError(f"{data} was made again since {out} was trained on it; remove {out} or give another folder")


def _refuse_to_begin_again(out: Path, flags: Sequence[str]) -> None:
    """Raise InputError if fairseq-train would not resume fully from the checkpoints in a folder."""
    if not (out / "checkpoint_last.pt").is_file() and _noted(out, "flags") is None:
        unknown = f"{out} has checkpoints that were not trained here, and no checkpoint_last.pt"
        raise InputError(f"{unknown}; give another folder")
    if _has(flags, "--reset-") or _has(flags, "--no-save-optimizer-state"):
        again = f"{out} would begin again in part, by --reset-* or --no-save-optimizer-state"
        raise InputError(f"{again}; remove it to train again")


def _is_longer(old: str, new: str) -> bool:
    """Whether the new flags are the old ones with a larger ``--max-epoch``, without ``--patience``."""
    epochs = re.compile(r" --max-epoch[ =](\d+)")
    one, other = (([0, *map(int, epochs.findall(f" {flags}"))])[-1] for flags in (old, new))
    same = epochs.sub("", f" {old}") == epochs.sub("", f" {new}")
    return same and other > one and "--patience" not in old  # which may have stopped it before its epochs


def _embeddings(data: str) -> str:
    """Name of the fairseq flag that shares embeddings: all embeddings if both languages have one dictionary."""
    dictionaries = [file.read_bytes() for file in Path(data).glob("dict.*.txt")]
    shared = len(dictionaries) == 2 and dictionaries[0] == dictionaries[1]
    return "share-all-embeddings" if shared else "share-decoder-input-output-embed"


def _has(flags: Sequence[str], beginning: str) -> bool:
    return any(word.startswith(beginning) for word in flags)


def _checkpoints(out: Path) -> list[Path]:
    return list(out.glob("checkpoint*.pt"))


def _noted(out: Path, name: str) -> str | None:
    """The text of the note ``name`` from an earlier call; None if there is none."""
    file = out / name
    return file.read_text(encoding="utf-8").rstrip("\n") if file.is_file() else None


def _note(out: Path, name: str, text: str) -> None:
    with atomic_write(out / name) as file:
        file.write(text + "\n")


def _call(*command: str) -> None:
    """Run a command; exit with its exit code if it fails. The command inherits the lock that ``job.sh`` holds."""
    code = subprocess.run(command, close_fds=False, check=False).returncode
    if code:
        sys.exit(code if code > 0 else 128 - code)  # of a signal as a shell has it


if __name__ == "__main__":
    sys.exit(cli.run(build_parser, sys.argv[1:], next(iter(sys.argv[1:]), "train")))
