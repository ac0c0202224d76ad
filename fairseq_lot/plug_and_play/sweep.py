"""``fairseq-lot sweep``: swap one model's attention in many ways, as it stands and calibrated, and compare."""

import hashlib
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from fairseq_lot.attention.registry import DEFAULT
from fairseq_lot.errors import check_least
from fairseq_lot.evaluation.bleu import TOKENISED, measure
from fairseq_lot.evaluation.results import MetricScore
from fairseq_lot.output.files import atomic_write, read_lines
from fairseq_lot.output.provenance import current_commit
from fairseq_lot.plug_and_play.calibrate import FitOptions, add_fit_arguments, calibrate
from fairseq_lot.plug_and_play.swap import swap, why_not_calibrated
from fairseq_lot.plug_and_play.sweep_points import (
    DRAWN,
    PIECES,
    TEXT,
    Point,
    check_settings,
    expand,
    parse,
    read_points,
    write_points,
)
from fairseq_lot.plug_and_play.sweep_table import draw, render
from fairseq_lot.pretrained.checkpoint import load_checkpoint
from fairseq_lot.pretrained.device import add_device_argument, choose_device
from fairseq_lot.pretrained.languages import add_language_arguments, typed_pair, with_languages
from fairseq_lot.pretrained.loading import Loaded, load, load_data
from fairseq_lot.pretrained.translate import references, translate_split

BASE = (DEFAULT, "")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("data", metavar="DATA", help="folder made by fairseq-preprocess; translations are compared with its "
        "text/test.LANG, else with the target side of its test split")  # fmt: skip
    add("--path", required=True, metavar="BASE.pt", help="pretrained checkpoint with softmax attention")
    add_measuring_arguments(parser, "sweep")
    add("--text", action="store_true", help="calibrate on the text of DATA, too, not on random pieces alone")
    add("--no-bleu", action="store_true", help="only the loss on the validation set, which takes seconds")
    add("--beam", type=int, default=5, help="for BLEU on the test set (default: %(default)s)")
    add_fit_arguments(parser.add_argument_group("calibration"))


def add_measuring_arguments(parser: ArgumentParser, name: str) -> None:
    """Add the options of a command that measures ways to swap, and keeps them in files of that name."""
    add = parser.add_argument
    add(
        "--out",
        required=True,
        metavar="FOLDER",
        help=f"{name}.jsonl, {name}.md, {name}.svg, and settings.json, which says what all calls must share; "
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
    add(
        "--sentences",
        type=int,
        metavar="N",
        help="of the validation set, the same random ones each time (default: all)",
    )
    add_device_argument(parser)
    add_language_arguments(parser)


def ways_of(tries: Iterable[str]) -> list[tuple[str, str]]:
    """The ways that a command line names, each once, after softmax."""
    return list(dict.fromkeys([BASE, *(way for text in tries for way in expand(text))]))


def swap_as(base: dict, way: tuple[str, str]) -> dict:
    """A checkpoint with its attention swapped in one way."""
    return swap(base, attention=way[0], **parse(*way))


def run(args: Namespace) -> int:
    """Measure what is missing, then write the table and the figure."""
    fitting, device = FitOptions.of(args), choose_device(args.device)
    check_least(args, sentences=1, beam=1)
    ways = ways_of(args.tries)
    base = with_languages(load_checkpoint(args.path), args.path, typed_pair(args))
    # all are checked first
    swapped = {way: swap_as(base, way) for way in ways}
    calibrations = [] if args.no_calibration else [PIECES, *([TEXT] if args.text else [])]
    todo = [(way, DRAWN) for way in ways] + [
        (way, calibration)
        for calibration in calibrations
        for way in ways
        if why_not_calibrated(swapped[way], args.path) is None
    ]
    folder = Path(args.out)
    points = read_points(folder / "sweep.jsonl")
    settings = settings_of(args, fitting)
    check_settings(folder / "settings.json", settings)
    for way, calibration in tqdm(todo, unit="swap", disable=None):
        known = points.get((*way, calibration))
        if known is not None and (args.no_bleu or known.bleu is not None):
            continue
        point = measure_way(args, fitting, device, base, way, swapped[way], calibration)
        points[point.key] = point
        write_points(folder / "sweep.jsonl", points.values(), settings)
    shown = list(points.values())
    with atomic_write(folder / "sweep.md") as file:
        file.write(render(shown) + "\n")
    draw(shown, folder / "sweep.svg")
    print(render(shown))
    return 0


def settings_of(args: Namespace, fitting: FitOptions) -> dict:
    """What all points of a folder share."""
    base = hashlib.sha256(Path(args.path).read_bytes()).hexdigest()
    typed = {} if args.source_lang is None else {"languages": [args.source_lang, args.target_lang]}
    settings = {"base": base, "data": args.data, "sentences": args.sentences, "beam": args.beam}
    return settings | typed | asdict(fitting)


def measure_way(
    args: Namespace,
    fitting: FitOptions,
    device: torch.device,
    base: dict,
    way: tuple[str, str],
    state: dict,
    calibration: str,
) -> Point:
    """Calibrate if asked, then the loss, then BLEU if asked."""
    seconds = None
    if calibration != DRAWN:
        started = time.perf_counter()
        data = args.data if calibration == TEXT else None
        done = calibrate(state, data, device=device, **asdict(fitting))
        state, seconds = done.state, round(time.perf_counter() - started, 1)
    loss, tokens = validation_loss(load(state, args.data, "valid", device=device), args.sentences)
    bleu = None
    if not args.no_bleu:
        bleu = bleu_on_test_set(args, base, None if way == BASE else state, device)
    return Point(
        attention=way[0],
        options=way[1],
        calibrated=calibration != DRAWN,
        calibration_seconds=seconds,
        loss=loss,
        tokens=tokens,
        bleu=bleu,
        seed=fitting.seed,
        commit=current_commit(),
        threads=torch.get_num_threads(),
        calibrated_on=calibration,
        device="CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
    )


@torch.no_grad()
def validation_loss(loaded: Loaded, sentences: int | None = None, max_tokens: int = 4096) -> tuple[float, int]:
    """Nats per target token, teacher-forced, over so many random sentences, or all that fit; and their tokens."""
    total, tokens = torch.zeros((), dtype=torch.float64, device=loaded.device), 0
    batches = loaded.dataset.batch_by_size(loaded.draw(sentences, 0), max_tokens=max_tokens)
    for indices in tqdm(batches, desc="validation", unit="batch", leave=False, disable=None):
        sample = loaded.batch(indices)
        log_probs = loaded.model.get_normalized_probs(loaded.model(**sample["net_input"]), log_probs=True)
        target = sample["target"].unsqueeze(-1)
        real = target.ne(loaded.pad)
        total -= log_probs.gather(-1, target)[real].double().sum()
        tokens += int(real.sum())
    return total.item() / tokens, tokens


def translations_of_base(args: Namespace, base: dict, device: torch.device) -> list[str]:
    """The base's translations of the test set, kept beside the points: all others are compared with them."""
    kept = Path(args.out) / "work" / "base.txt"
    if not kept.exists():
        translations = translate_split(load(base, args.data, "test", device=device), beam=args.beam)
        with atomic_write(kept) as file:
            file.writelines(line + "\n" for line in translations)
    return read_lines(kept)


def bleu_on_test_set(args: Namespace, base: dict, state: dict | None, device: torch.device) -> MetricScore:
    """Tokenised BLEU of the test set with its comparison with the base; of the base itself where ``state`` is None."""
    compared_with = references(args.data, "test", *load_data(base, args.path, args.data, "test"))
    of_base = translations_of_base(args, base, device)
    if state is None:
        return measure(of_base, compared_with, metric=TOKENISED)
    translations = translate_split(load(state, args.data, "test", device=device), beam=args.beam)
    return measure(translations, compared_with, metric=TOKENISED, base=of_base)
