"""Score a checkpoint on a test set: translate by fairseq-generate, then write a row by ``fairseq-lot score``.

``scripts/score.sh`` runs it. A row is of the whole test set: a sentence that the model or the flags cannot take is
refused before anything is translated.
"""

import ast
import math
import os
import re
import subprocess
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from fairseq import options
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.tasks.translation import TranslationTask

from fairseq_lot import cli
from fairseq_lot.errors import InputError
from fairseq_lot.evaluation import length_penalty, score
from fairseq_lot.evaluation.hypotheses import check_joined, read_nbest
from fairseq_lot.experiment.flags import take
from fairseq_lot.experiment.spec import CHOSEN
from fairseq_lot.output.files import atomic_write, locked
from fairseq_lot.pretrained.checkpoint import Checkpoint, load_checkpoint
from fairseq_lot.pretrained.data_folder import check_lengths
from fairseq_lot.pretrained.device import describe_device
from fairseq_lot.pretrained.fairseq_flags import read_flags
from fairseq_lot.pretrained.languages import typed_pair, with_languages
from fairseq_lot.pretrained.loading import load, load_data
from fairseq_lot.pretrained.text import joins, piece_kind
from fairseq_lot.pretrained.translate import raw_of, references, text_of

_EVERY = "lenpen-every"
_VALID = "valid"
_SKIP = "--skip-invalid-size-inputs-valid-test"


def build_parser() -> ArgumentParser:
    """The parser of ``scripts/score.sh``."""
    parser = cli.OneLineParser(prog="score.sh", description=__doc__, add_help=False, allow_abbrev=False)
    for name in ("checkpoint", "data", "out", "base", "label"):
        parser.add_argument(name)
    parser.add_argument("flags", nargs=REMAINDER)
    parser.set_defaults(run=run)
    return parser


def run(args: Namespace) -> None:
    """Translate the test set unless that was done before, then write the row ``OUT.jsonl``."""
    checkpoint, data, base = args.checkpoint, args.data, None if args.base == "-" else args.base
    if not Path(checkpoint).is_file():
        raise InputError(f"there is no checkpoint {checkpoint}")
    if base is not None and not Path(base).is_file():
        raise InputError(f"there are no translations of the base, {base}; score the base first, or give -")
    score.read_label(args.label)
    defaults = [data, "--gen-subset", "test", "--path", checkpoint, "--beam", "5", "--batch-size", "128"]
    typed = read_generation_flags([*defaults, *args.flags])
    state, pair = load_checkpoint(checkpoint), typed_pair(typed)
    # load the model: its loss may show that the data has other dictionaries than its training
    loaded = load(state, data, typed.gen_subset, needs_target=False, device="cpu", pair=pair)
    task, dataset = loaded.task, loaded.sentences
    del loaded
    lines = references(task, dataset, typed.gen_subset)
    check_whole(typed, state, dataset)
    own = [] if pair else ["--source-lang", task.cfg.source_lang, "--target-lang", task.cfg.target_lang]
    joined = remove_bpe(typed.post_process, task.target_dictionary, f"{data}/dict.{task.cfg.target_lang}.txt")
    command = ["fairseq-generate", data, "--user-dir", "fairseq_lot", *defaults[1:], *own, *joined]
    made = {"inputs": [checkpoint, f"{data.rstrip('/')}/"], "cpu": typed.cpu}
    flags, lenpen = args.flags, None
    if typed.lenpen == CHOSEN:
        _, flags = take("lenpen", flags)
        _, flags = take(_EVERY, flags)
        _, of_all = take("gen-subset", flags)
        out = Path(args.out.removesuffix(f".{typed.gen_subset}") + f".{_VALID}")  # the same for all test sets
        lenpen = choose_lenpen(typed, state, [*command, *of_all], out, **made)
        flags += ["--lenpen", f"{lenpen:g}"]
    command += flags
    translate(command, Path(args.out), **made)
    words = ["--generated", f"{args.out}.out", "--out", f"{args.out}.jsonl", "--label", args.label]
    words += ["--tokenised-reference", reference_file(task, typed.gen_subset, lines, args.out)]
    words += ["--target-lang", task.cfg.target_lang, f"--command={' '.join(command)}"]
    words += [] if lenpen is None else [f"--lenpen={lenpen}"]
    more = {"raw-reference": raw_of(task, typed.gen_subset), "baseline-generated": base}
    words += [word for name, file in more.items() if file is not None for word in (f"--{name}", str(file))]
    seconds = re.findall(r" tokens\) in ([\d.]+)s \(", Path(f"{args.out}.err").read_text("utf-8", "replace"))
    words += ["--device", Path(f"{args.out}.device").read_text().strip(), *(f"--seconds={x}" for x in seconds[-1:])]
    parser = ArgumentParser()
    score.add_arguments(parser)
    score.run(parser.parse_args(words))


def read_generation_flags(words: Sequence[str]) -> Namespace:
    """Parse a command line as fairseq-generate does, but allow "chosen" as ``--lenpen`` and then ``--lenpen-every``.

    Args:
        words: the command line, without the command.

    Raises:
        InputError: fairseq-generate would refuse it, or no length penalty can be chosen with these flags.
    """
    lenpen, others = take("lenpen", words)
    is_chosen = lenpen == CHOSEN
    every, others = take(_EVERY, others, "1") if is_chosen else ("", list(words))
    typed = read_flags(options.get_generation_parser(), others, "fairseq-generate")
    if is_chosen:
        refuse_choice(typed)
        if re.fullmatch("[1-9][0-9]{0,5}", every) is None:
            raise InputError(f"--{_EVERY} must be a whole number of at least 1, got {every!r}")
        typed.lenpen, typed.lenpen_every = CHOSEN, int(every)
    return typed


def refuse_choice(typed: Namespace) -> None:
    """Raise InputError if no length penalty can be chosen on validation with these flags of fairseq-generate."""
    reason = None
    if typed.beam < 2:
        reason = f"a beam of {typed.beam} has one translation of a sentence; give --beam 2 or more, or a number"
    elif typed.unnormalized:
        reason = "with --unnormalized no score is divided by a length; leave out one of the two"
    elif typed.score_reference:
        reason = "with --score-reference nothing is translated; leave out one of the two"
    elif typed.gen_subset == _VALID:
        reason = f"it is chosen on {_VALID}, so a row of {_VALID} would be too good; give a number"
    if reason is not None:
        raise InputError(f"--lenpen {CHOSEN}: {reason}")


def choose_lenpen(
    typed: Namespace, state: Checkpoint, command: Sequence[str], out: Path, *, inputs: Sequence[str], cpu: bool
) -> float:
    """The length penalty with the best BLEU on the validation set, or a part of it, translated if it was not yet.

    The part is each ``--lenpen-every``-th batch. Batches are sorted by length, so it has sentences of every length.

    Args:
        typed: parsed flags of fairseq-generate.
        state: the checkpoint.
        command: the command that translates the test set, without a length penalty.
        out: start of the file names for the validation set, see :func:`translate`.
        inputs, cpu: as for :func:`translate`.
    """
    task, dataset = load_data(with_languages(state, typed_pair(typed)), typed.data, _VALID, needs_target=False)
    lines = references(task, dataset, _VALID)
    check_joined(lines, f"the references of {_VALID} in {typed.data}")
    check_whole(Namespace(**vars(typed) | {"gen_subset": _VALID}), state, dataset)
    best = ["--gen-subset", _VALID, "--lenpen", "1", "--nbest", str(typed.beam)]
    part = typed.lenpen_every > 1
    if part:
        batches = math.ceil(len(lines) / typed.batch_size)
        if batches < 3 * typed.lenpen_every:  # short, middle and long sentences
            raise InputError(
                f"--{_EVERY} {typed.lenpen_every} leaves fewer than three of the {batches} batches of {_VALID}; "
                f"give at most {max(batches // 3, 1)}, or a smaller --batch-size"
            )
        # fairseq-generate translates the share of the first of so many processes, and starts no process
        best += ["--distributed-world-size", str(typed.lenpen_every), "--distributed-rank", "0"]
    translate([*command, *best], out, inputs=inputs, cpu=cpu)
    nbest = read_nbest(f"{out}.out", len(lines), part=part)
    lenpen, scores = length_penalty.choose([*nbest.values()], [lines[sentence] for sentence in nbest])
    shown = ", ".join(f"{one:g}: {score:.2f}" for one, score in scores.items())
    where = f"{len(nbest)} of {len(lines)} sentences of {_VALID}" if part else _VALID
    print(f"--lenpen {lenpen:g} is the best on {where}; BLEU by --lenpen: {shown}")
    return lenpen


def check_whole(typed: Namespace, state: Checkpoint, dataset: LanguagePairDataset) -> None:
    """Raise InputError if fairseq-generate would skip sentences of a test set, or stop at one.

    Args:
        typed: parsed flags of fairseq-generate.
        state: the checkpoint.
        dataset: the test set.
    """
    where, without = f"{typed.data}, split {typed.gen_subset}", ""
    if typed.skip_invalid_size_inputs_valid_test:
        without = f"; a row is of the whole test set, so leave out {_SKIP}"
    overrides = ast.literal_eval(typed.model_overrides)
    sides = ("max_source_positions", "max_target_positions")
    model = [overrides.get(name, own) for name, own in zip(sides, state.max_positions, strict=True)]
    sizes = [dataset.src_sizes] if dataset.tgt_sizes is None else [dataset.src_sizes, dataset.tgt_sizes]
    if typed.truncate_source:
        sizes[0] = sizes[0].clip(max=typed.max_source_positions)
    check_lengths(sizes, model, where=where, way_out=f"train with a larger {{flags}} and translate with it{without}")
    flags = [getattr(typed, name) for name in sides]
    way_out = f"give a larger {{flags}}{without}"
    check_lengths(sizes, flags, where=where, takes="fairseq-generate takes", way_out=way_out)
    if typed.max_tokens is not None:
        most = [typed.max_tokens] * 2
        check_lengths(sizes, most, where=where, takes="--max-tokens is", way_out="give a larger --max-tokens")


def remove_bpe(typed: str | None, dictionary: Dictionary, file: str) -> list[str]:
    """The words ``--remove-bpe KIND`` that make fairseq-generate join pieces to words; empty if pieces are words.

    Args:
        typed: the value of ``--remove-bpe`` on the command line, if any.
        dictionary: dictionary of the targets, whose pieces show the kind.
        file: its file, for the message.

    Raises:
        InputError: the typed value would leave pieces or join words.
    """
    kind = piece_kind(dictionary)
    if typed is not None and not joins(typed, kind):
        pieces = "words" if kind is None else f"pieces of {kind}"
        raise InputError(f"--remove-bpe {typed} does not join what is in {file}, {pieces}; leave it out")
    return [] if kind is None else ["--remove-bpe", kind]


def translate(command: Sequence[str], out: Path, *, inputs: Sequence[str], cpu: bool) -> None:
    """Write the stdout of a command to ``OUT.out``, unless the same command made it from the same files.

    ``OUT.device`` names the device and ``OUT.err`` has the command's log. A second process waits for the first.

    Args:
        command: the command.
        out: start of the file names, ``OUT``.
        inputs: files and folders that the command reads.
        cpu: the command runs on the CPU.

    Raises:
        InputError: the command fails, or a file cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with locked(f"{out}.lock") as lock:
            _translate(command, out, inputs, cpu, lock)
    except OSError as error:
        way_out = "free space or give another OUT"
        raise InputError(f"cannot write in {out.parent} ({error.strerror}); {way_out}") from error


def _translate(command: Sequence[str], out: Path, inputs: Sequence[str], cpu: bool, lock: int) -> None:
    """:func:`translate` for the process that has the lock; the command inherits the lock."""
    output, part, made_by, errors, device = (
        Path(f"{out}.{name}") for name in ("out", "part", "command", "err", "device")
    )
    made_from = "\n".join([" ".join(command), *_states(inputs)])
    noted = made_by.read_text(encoding="utf-8").strip() if made_by.is_file() else None
    if not output.is_file() or noted != made_from:
        output.unlink(missing_ok=True)
        with open(part, "wb") as to, open(errors, "wb") as log:
            code = subprocess.run(command, stdout=to, stderr=log, check=False, pass_fds=[lock]).returncode
        if code:
            said = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise InputError(f"fairseq-generate failed: {said[-1] if said else f'exit code {code}'}")
        device.write_text(describe_device(cpu) + "\n", encoding="utf-8")
        made_by.write_text(made_from + "\n", encoding="utf-8")
        part.rename(output)
    if not device.is_file():  # translated before devices were noted
        device.write_text(describe_device(cpu) + "\n", encoding="utf-8")


def _states(paths: Sequence[str]) -> list[str]:
    """Name, size and modification time of each file as text; of a folder, of each file in it."""
    states = []
    for path in paths:
        files = [entry.path for entry in os.scandir(path)] if os.path.isdir(path) else [path]
        for file in filter(os.path.isfile, files):
            stat = os.stat(file)
            states.append(f"{file} {stat.st_size} {stat.st_mtime_ns}")
    return sorted(states)


def reference_file(task: TranslationTask, split: str, lines: list[str], out: str) -> str:
    """The path of the references: the data folder's file, else ``OUT.LANGUAGE``, which is written here.

    Args:
        task: gives the data folder and the target language.
        split: name of the split.
        lines: the references.
        out: start of the file name, ``OUT``.
    """
    file = text_of(task, split)
    if file is None:
        file = Path(f"{out}.{task.cfg.target_lang}")
        with atomic_write(file) as written:
            written.writelines(line + "\n" for line in lines)
    return str(file)


if __name__ == "__main__":
    sys.exit(cli.run(build_parser, sys.argv[1:], "score.sh"))
