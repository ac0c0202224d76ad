"""``fairseq-lot sweep``: swap one model's attention in many ways, as it stands and calibrated, and compare."""

import hashlib
import itertools
import json
import shlex
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from fairseq_lot.attention.registry import DEFAULT, MECHANISMS
from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.bleu import TOKENISED, measure
from fairseq_lot.evaluation.hypotheses import read_matching
from fairseq_lot.evaluation.results import MetricScore
from fairseq_lot.evaluation.results import parse as parse_line
from fairseq_lot.modules.flat_options import add_attention_args, option_names
from fairseq_lot.output.files import atomic_write, read_lines
from fairseq_lot.output.provenance import current_commit
from fairseq_lot.plug_and_play.calibrate import add_fit_arguments, calibrate, check_fit_arguments
from fairseq_lot.plug_and_play.distillation import NothingToFit
from fairseq_lot.plug_and_play.swap import swap
from fairseq_lot.plug_and_play.sweep_table import draw, render
from fairseq_lot.pretrained.checkpoint import load_checkpoint, save_checkpoint
from fairseq_lot.pretrained.loading import Loaded, load

USER_DIR = str(Path(__file__).parents[1])


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("data", metavar="DATA", help="folder made by scripts/prepare_*.sh")
    add("--path", required=True, metavar="BASE.pt", help="pretrained checkpoint with softmax attention")
    add(
        "--out",
        required=True,
        metavar="FOLDER",
        help="sweep.jsonl, sweep.md, sweep.svg, and settings.json, which says what all calls must share; "
        "call again to go on",
    )
    add(
        "--try",
        dest="tries",
        action="append",
        required=True,
        metavar="WAY",
        help="a mechanism and its flat options in quotes, as in 'lot --lot-num-pivots 16/32 --attention-sites cross'; "
        "all values between slashes are tried. May be given several times; softmax, the base, is always there",
    )
    add("--no-calibration", action="store_true", help="only as they stand; else what has parameters is also calibrated")
    add("--no-bleu", action="store_true", help="only the loss on the validation set, which takes seconds")
    add("--beam", type=int, default=5, help="for BLEU on the test set (default: %(default)s)")
    add_fit_arguments(parser.add_argument_group("calibration"))


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way to swap, and what it gave: a line of sweep.jsonl.

    Attributes:
        attention, options: mechanism and flat options, as they were given.
        calibrated: the parameters were fitted, which took ``calibration_seconds``.
        loss: nats per target token on the validation set, teacher-forced; of ``tokens`` tokens.
        bleu: tokenised BLEU on the test set with interval, signature and comparison with the base; None if not asked.
        seed: of the calibration.
    """

    attention: str
    options: str
    calibrated: bool
    calibration_seconds: float | None
    loss: float
    tokens: int
    bleu: MetricScore | None
    seed: int
    commit: str
    threads: int

    @property
    def key(self) -> tuple:
        """What makes two points the same."""
        return self.attention, self.options, self.calibrated


def run(args: Namespace) -> int:
    """Measure what is missing, then write the table and the figure."""
    check_fit_arguments(args)
    if args.beam < 1:
        raise InputError(f"--beam must be at least 1, got {args.beam}")
    ways = list(dict.fromkeys([(DEFAULT, ""), *(way for text in args.tries for way in expand(text))]))
    states = [(False, way) for way in ways]
    if not args.no_calibration:
        states += [(True, way) for way in ways if way != (DEFAULT, "")]
    base = load_checkpoint(args.path)
    swapped = {
        way: swap(base, path=args.path, attention=way[0], **parse(*way)) for way in ways
    }  # all are checked first
    folder = Path(args.out)
    points = read_points(folder / "sweep.jsonl")
    settings = settings_of(args)
    check_settings(folder / "settings.json", settings)
    for calibrated, way in tqdm(states, unit="swap", disable=None):
        known = points.get((*way, calibrated))
        if known is not None and (args.no_bleu or known.bleu is not None):
            continue
        try:
            point = measure_way(args, way, swapped[way], calibrated=calibrated)
        except NothingToFit:
            continue
        points[point.key] = point
        with atomic_write(folder / "settings.json") as file:
            json.dump(settings, file, indent=1)
        with atomic_write(folder / "sweep.jsonl") as file:
            file.writelines(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in points.values())
    rows = [asdict(point) for point in points.values()]
    with atomic_write(folder / "sweep.md") as file:
        file.write(render(rows) + "\n")
    draw(rows, folder / "sweep.svg")
    print(render(rows))
    return 0


def expand(text: str) -> list[tuple[str, str]]:
    """``"lot --lot-num-pivots 16/32"`` as ``[("lot", "--lot-num-pivots 16"), ("lot", "--lot-num-pivots 32")]``."""
    try:
        attention, *words = shlex.split(text)
    except ValueError:
        raise InputError(f"--try {text!r} names no mechanism; choose one of {', '.join(MECHANISMS)}") from None
    ways = itertools.product(*(word.split("/") for word in words))
    found = [(attention, shlex.join(way)) for way in ways]
    for way in found:
        parse(*way)
    return found


def parse(attention: str, options: str) -> dict:
    """Flat options from the words of a command line."""

    class Parser(ArgumentParser):
        def error(self, message):
            raise InputError(f"--try '{attention} {options}': {message}")

    parser = Parser(allow_abbrev=False, add_help=False)
    add_attention_args(parser, differential=False)
    given = vars(parser.parse_args(shlex.split(options)))
    return {name: given[name] for name in option_names() if given.get(name) is not None and name != "attention"}


def read_points(file: Path) -> dict[tuple, Point]:
    """The points so far; InputError when a line is broken."""
    points = {}
    for number, line in enumerate(read_lines(file) if file.exists() else [], start=1):
        try:
            point = parse_line(Point, line, "point")
        except ValueError as error:
            raise InputError(f"{file}, line {number}: {error}; mend or remove the line") from error
        points[point.key] = point
    return points


def settings_of(args: Namespace) -> dict:
    """What all points of a folder share."""
    names = ("data", "beam", "split", "steps", "joint_steps", "learning_rate", "max_tokens", "held_out", "seed")
    base = hashlib.sha256(Path(args.path).read_bytes()).hexdigest()
    return {"base": base, **{name: getattr(args, name) for name in names}}


def check_settings(file: Path, settings: dict) -> None:
    """Raise InputError when the points of this folder were made with other settings."""
    if not file.exists():
        return
    try:
        before = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file} cannot be read ({error}); remove it if the points are of this base") from error
    for name, value in settings.items():
        if before.get(name) != value:
            old = before.get(name)
            raise InputError(f"{file.parent} holds a sweep with another {name}, {old}; give another --out")


def measure_way(args: Namespace, way: tuple[str, str], state: dict, *, calibrated: bool) -> Point:
    """Calibrate if asked, then the loss, then BLEU if asked."""
    folder = Path(args.out) / "work"
    checkpoint, seconds = folder / "swapped.pt", None
    save_checkpoint(state, checkpoint)
    if calibrated:
        started = time.perf_counter()
        done = calibrate(checkpoint, args.data, args)
        if not done.finished:
            raise KeyboardInterrupt
        state = done.state
        seconds = round(time.perf_counter() - started, 1)
        save_checkpoint(state, checkpoint)
    loss, tokens = validation_loss(load(checkpoint, args.data, "valid"))
    bleu = None if args.no_bleu else test_bleu(args, checkpoint, is_base=way == (DEFAULT, ""))
    checkpoint.unlink()
    return Point(
        attention=way[0],
        options=way[1],
        calibrated=calibrated,
        calibration_seconds=seconds,
        loss=loss,
        tokens=tokens,
        bleu=bleu,
        seed=args.seed,
        commit=current_commit(),
        threads=torch.get_num_threads(),
    )


def validation_loss(loaded: Loaded, max_tokens: int = 4096) -> tuple[float, int]:
    """Nats per target token, teacher-forced, over all sentences that the model has positions for; and their number."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    batches = loaded.dataset.batch_by_size(loaded.draw(None, 0), max_tokens=max_tokens)
    with torch.no_grad():
        for indices in tqdm(batches, desc="validation", unit="batch", leave=False, disable=None):
            sample = loaded.batch(indices)
            log_probs = loaded.model.get_normalized_probs(loaded.model(**sample["net_input"]), log_probs=True)
            target = sample["target"].unsqueeze(-1)
            real = target.ne(loaded.pad)
            total -= log_probs.gather(-1, target)[real].double().sum()
            tokens += int(real.sum())
    return total.item() / tokens, tokens


def test_bleu(args: Namespace, checkpoint: Path, *, is_base: bool) -> MetricScore:
    """Tokenised BLEU of the test set; the base's translations are kept for the comparison."""
    kept = checkpoint.with_name("base.out")  # measured first
    output = kept if is_base else checkpoint.with_name("swapped.out")
    command = [str(Path(sys.executable).with_name("fairseq-generate")), args.data, "--path", str(checkpoint)]
    command += ["--user-dir", USER_DIR, "--beam", str(args.beam), "--batch-size", "128", "--cpu"]
    command += ["--remove-bpe", "sentencepiece"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"fairseq-generate failed: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")
    with atomic_write(output) as file:
        file.write(done.stdout)
    reference = Path(args.data) / "text" / "test.en"
    references = read_lines(reference)
    base = None if is_base else read_matching(kept, references, reference)
    return measure(read_matching(output, references, reference), references, metric=TOKENISED, base=base)
