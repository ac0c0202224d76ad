"""``fairseq-lot curve``: what swaps cost, from the checkpoints of one training, against its epochs."""

import hashlib
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from fairseq_lot.errors import InputError, check_least
from fairseq_lot.output.files import atomic_write
from fairseq_lot.plug_and_play.calibrate import FitOptions, add_fit_arguments
from fairseq_lot.plug_and_play.curve_table import CurvePoint, draw, render
from fairseq_lot.plug_and_play.swap import why_not_calibrated
from fairseq_lot.plug_and_play.sweep import add_measuring_arguments, measure_way, swap_as, ways_of
from fairseq_lot.plug_and_play.sweep_points import DRAWN, PIECES, check_settings, read_points, write_points
from fairseq_lot.pretrained.checkpoint import load_checkpoint
from fairseq_lot.pretrained.device import choose_device
from fairseq_lot.pretrained.languages import typed_pair, with_languages


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("data", metavar="DATA", help="folder made by scripts/prepare_*.sh")
    add(
        "--path",
        dest="paths",
        nargs="+",
        required=True,
        metavar="EPOCH.pt",
        help="checkpoints of one training with softmax attention, each saved at the end of an epoch",
    )
    add_measuring_arguments(parser, "curve")
    add_fit_arguments(parser.add_argument_group("calibration, on random pieces"))
    parser.set_defaults(no_bleu=True)


@dataclass(frozen=True)
class Base:
    """One checkpoint of the training."""

    path: str
    epoch: int
    sum: str


def run(args: Namespace) -> int:
    """Measure what is missing, then write the table and the figure."""
    check_least(args, sentences=1)
    fitting, device, pair = FitOptions.of(args), choose_device(args.device), typed_pair(args)
    ways = ways_of(args.tries)
    bases = read_bases(args.paths)
    folder = Path(args.out)
    points = read_points(folder / "curve.jsonl", CurvePoint)
    settings = {"data": args.data, "sentences": args.sentences, "languages": pair and [*pair], **asdict(fitting)}
    check_settings(folder / "settings.json", settings)
    for base in bases:
        if any(point.epoch == base.epoch and point.base != base.sum for point in points.values()):
            raise InputError(f"{folder} holds points of another checkpoint of epoch {base.epoch}; give another --out")

    first = load_checkpoint(bases[0].path)
    # all are checked first
    fitted = [way for way in ways if why_not_calibrated(swap_as(first, way), bases[0].path) is None]
    todo = [(way, DRAWN) for way in ways] + [(way, PIECES) for way in fitted if not args.no_calibration]
    with tqdm(total=len(bases) * len(todo), unit="swap", disable=None) as progress:
        for base in bases:
            missing = [(way, calibration) for way, calibration in todo if (base.epoch, *way, calibration) not in points]
            progress.update(len(todo) - len(missing))
            if not missing:
                continue
            state = with_languages(load_checkpoint(base.path), base.path, pair)
            for way, calibration in missing:
                measured = measure_way(args, fitting, device, state, way, swap_as(state, way), calibration)
                point = CurvePoint(**vars(measured), epoch=base.epoch, base=base.sum)
                points[point.key] = point
                write_points(folder / "curve.jsonl", points.values(), settings)
                progress.update()
    shown = list(points.values())
    with atomic_write(folder / "curve.md") as file:
        file.write(render(shown) + "\n")
    draw(shown, folder / "curve.svg")
    print(render(shown))
    return 0


def read_bases(paths: list[str]) -> list[Base]:
    """The checkpoints in the order of their epochs; the same file under two names counts once.

    Raises:
        InputError: one cannot be read or does not stand at the end of an epoch, or two of one epoch differ.
    """
    found: dict[int, Base] = {}
    for path in paths:
        epoch = finished_epochs(load_checkpoint(path), path)
        base = Base(path, epoch, hashlib.sha256(Path(path).read_bytes()).hexdigest())
        other = found.setdefault(epoch, base)
        if other.sum != base.sum:
            raise InputError(
                f"{other.path} and {path} are both of epoch {epoch} and differ; give those of one training"
            )
    return [found[epoch] for epoch in sorted(found)]


def finished_epochs(state: dict, path: str) -> int:
    """How many epochs a checkpoint was trained for, as fairseq notes it for going on.

    Raises:
        InputError: it does not say, or was saved within an epoch.
    """
    extra = state.get("extra_state")
    position = extra.get("train_iterator") if isinstance(extra, dict) else None
    position = position if isinstance(position, dict) else {}
    following, done = position.get("epoch"), position.get("iterations_in_epoch")
    if type(following) is not int or type(done) is not int:
        raise InputError(f"{path} does not say its epoch; give checkpoints as fairseq-train saved them")
    if done or following < 2:
        raise InputError(f"{path} was saved within epoch {following}; give those saved at the end of an epoch")
    return following - 1
