"""``fairseq-lot sweep``: compare many ways to swap the attention of a model, or of several."""

import hashlib
import json
import math
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from fairseq.tasks.translation import TranslationTask
from tqdm import tqdm

from fairseq_lot.attention.registry import DEFAULT
from fairseq_lot.corpus.moses import detokenise
from fairseq_lot.errors import InputError, check_least
from fairseq_lot.evaluation.bleu import TOKENISED, chrf, measure, sacrebleu
from fairseq_lot.evaluation.hypotheses import check_joined
from fairseq_lot.inspection.diagnose import encoder_balance
from fairseq_lot.models.dictionaries import has_fingerprints, note_dictionaries
from fairseq_lot.modules.flat_options import add_options
from fairseq_lot.output.figures import write_figure
from fairseq_lot.output.files import atomic_write, read_lines
from fairseq_lot.output.provenance import current_commit
from fairseq_lot.plug_and_play.calibrate import (
    LONGEST,
    FitOptions,
    calibrate,
    compare,
    exact_up_to,
    how_to_fit,
    lengths_of_random,
)
from fairseq_lot.plug_and_play.points import (
    DRAWN,
    LENGTHS,
    PIECES,
    TEXT,
    AttentionSpec,
    Loss,
    SweepRow,
    add_point,
    check_settings,
    expand,
    read_points,
)
from fairseq_lot.plug_and_play.sentences import in_batches
from fairseq_lot.plug_and_play.swap import options_of_swap, swap_as_drawn, why_not_calibrated
from fairseq_lot.plug_and_play.sweep_table import draw, render, render_balance
from fairseq_lot.pretrained.checkpoint import Checkpoint, load_checkpoint
from fairseq_lot.pretrained.data_folder import check_lengths, check_not_empty
from fairseq_lot.pretrained.device import add_device_argument
from fairseq_lot.pretrained.languages import add_language_arguments, with_languages
from fairseq_lot.pretrained.loading import Loaded, load, load_data
from fairseq_lot.pretrained.translate import raw_of, references, translate_split

# default of --try
TRIES = ("sinkhorn", "sinkhorn --sinkhorn-epsilon 1 --sinkhorn-num-updates 3", "esp", "lot", "near_far")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("data", metavar="DATA", help="folder made by fairseq-preprocess; references are its text/test.LANG, else the "
        "target side of its test split")  # fmt: skip
    add(
        "--path",
        dest="paths",
        nargs="+",
        required=True,
        metavar="BASE.pt",
        help="trained checkpoint with softmax attention, plain or with a prior; or several of one training, each saved "
        "at the end of an epoch, to compare swaps by epoch",
    )
    add(
        "--out",
        metavar="FOLDER",
        help="folder for sweep.jsonl, sweep.md, balance.md, with several bases sweep.svg, and settings.json; a second "
        "call with the same settings goes on (default: BASE.sweep beside the first BASE.pt)",
    )
    add(
        "--try",
        dest="tries",
        action="append",
        metavar="WAY",
        help="a mechanism and its options in quotes, as in 'lot --lot-num-pivots 16/32 --attention-sites cross'; all "
        "values between slashes are tried. Default sites: the encoder, or those where the base has a prior. May be "
        "given several times; the base is always included. Default: " + "; ".join(TRIES),
    )
    of_fit = parser.add_mutually_exclusive_group().add_argument
    as_drawn = "only swaps as drawn; by default all that have new parameters are also calibrated"
    of_fit("--no-calibration", action="store_true", help=as_drawn)
    of_fit("--text", action="store_true", help="calibrate on random pieces and also on the text of DATA")
    add("--valid-subset", default="valid", metavar="SPLITS", help="splits to measure the loss on, separated by commas "
        "(default: %(default)s)")  # fmt: skip
    only = "random sentences of each of these splits, the same ones each time (default: all)"
    add("--sentences", type=int, metavar="N", help=only)
    add("--no-bleu", action="store_true", help="measure only the loss, which takes seconds")
    add("--beam", type=int, default=5, help="beam size for BLEU on the test set (default: %(default)s)")
    add_device_argument(parser)
    add_language_arguments(parser)
    add_options(parser.add_argument_group("calibration"), FitOptions)


@dataclass(frozen=True)
class BaseCheckpoint:
    """A checkpoint whose attention is swapped.

    Attributes:
        path: of the checkpoint.
        sum: its sha256 in hexadecimal.
        epoch: number of epochs of its training; None if unknown.
        way: the base without a swap: the softmax of its training.
    """

    path: str
    sum: str
    epoch: int | None
    way: AttentionSpec = field(default=AttentionSpec(attention=DEFAULT, options={}), compare=False)


def run(args: Namespace) -> None:
    """Run ``fairseq-lot sweep``: measure the points that the folder lacks, write the tables and the figure.

    The figure is only drawn for several bases.
    """
    check_least(args, sentences=1, beam=1)
    folder = Path(args.out or f"{Path(args.paths[0]).with_suffix('')}.sweep")
    fitting = how_to_fit(args, args.data if args.text else None, pieces=True)
    device, languages = fitting.pop("device"), fitting.pop("languages")
    test = {name: getattr(args, name) for name in ("data", "valid_subset", "sentences", "beam")}
    valid = args.valid_subset.split(",")
    settings = {**test, "languages": languages and list(languages), **fitting}
    settings["longest"] = args.longest or LONGEST  # each way has its own default
    settings["sum of data"] = sum_of_splits(Path(args.data), valid)
    how: dict[str, Any] = {**test, "fitting": fitting, "device": device}
    bases = sorted(dict.fromkeys(map(read_base, args.paths)), key=lambda base: base.epoch or 0)
    points = read_points(folder / "sweep.jsonl")
    check_settings(folder, settings)
    # the first point of a folder is the base's own
    check_bases(
        [*(BaseCheckpoint(f"a point in {folder}", point.base, point.epoch, points[0]) for point in points), *bases]
    )
    calibrations = [] if args.no_calibration else [PIECES, TEXT][: 1 + args.text]
    state = with_languages(load_checkpoint(bases[0].path), languages)
    most = most_tokens_of(state, args.data, valid if args.no_bleu else [*valid, "test"])
    ways = ways_to_try(args.tries, bases[0], calibrations, longest=args.longest, tokens=most)
    done = {(point.base, *point.key) for point in points if point.bleu or args.no_bleu}
    todo = {base: [way for way in ways if (base.sum, *way.key) not in done] for base in bases}
    for base in filter(todo.get, bases):
        check_whole(with_languages(load_checkpoint(base.path), languages), args.data, valid, bleu=not args.no_bleu)
    with tqdm(total=len(bases) * len(ways), unit="swap", disable=None) as progress:
        for base, missing in todo.items():
            progress.update(len(ways) - len(missing))
            if not missing:
                continue
            state = with_languages(load_checkpoint(base.path), languages).with_own_arguments()
            if not has_fingerprints(state.model_args):  # check the data once, with the base
                note_dictionaries(state.model_args, load(state, args.data, valid[0], device=device).task)
            digest = hashlib.sha256(json.dumps([base.sum, {**settings, "data": None}]).encode()).hexdigest()
            translations = None if args.no_bleu else folder / "work" / f"{digest[:16]}.txt"
            for way in missing:
                points = add_point(folder, settings, measured(base, state, way, translations=translations, **how))
                progress.update()
    for name, table in {"sweep.md": render(points), "balance.md": render_balance(points)}.items():
        if table:
            with atomic_write(folder / name) as file:
                file.write(table + "\n")
            print(table)
    if len({point.base for point in points}) > 1:
        write_figure(draw(points), folder / "sweep.svg")


def check_whole(state: Checkpoint, data: str, valid: Iterable[str], *, bleu: bool) -> None:
    """Raise InputError if a validation set or, with ``bleu``, the test set has sentences that the model cannot take."""
    dataset: Any
    for split in valid:
        _, dataset = load_data(state, data, split)
        check_lengths([dataset.src_sizes, dataset.tgt_sizes], state.max_positions, where=f"{data}, split {split}")
    if bleu:  # the model does not read the targets
        task, dataset = load_data(state, data, "test")
        check_not_empty(dataset.src_sizes, where=f"{data}, split test")
        check_lengths([dataset.src_sizes], state.max_positions, where=f"{data}, split test")
        check_joined(references(task, dataset, "test"), "the references of the test set")


def sum_of_splits(data: Path, valid: Iterable[str]) -> str:
    """A checksum of the files that a sweep reads in a data folder.

    Of train only the index is read, which has the lengths of its sentences.
    """
    kinds = ("dict.*", "*.idx", "test.*", "text/test.*", *(f"{split}.*" for split in valid))
    files = {file for kind in kinds for file in data.glob(kind)}
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files) if file.is_file()}
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def most_tokens_of(state: Checkpoint, data: str, splits: Iterable[str]) -> int:
    """The length in tokens of the longest sentence of these splits, on either side."""
    loaded = [load_data(state, data, split)[1] for split in splits]
    sides = [sizes for dataset in loaded if dataset for sizes in (dataset.src_sizes, dataset.tgt_sizes)]
    return max(int(sizes.max(initial=0)) for sizes in sides)


def ways_to_try(
    tries: Iterable[str] | None,
    base: BaseCheckpoint,
    calibrations: Sequence[str],
    *,
    longest: int | None = None,
    tokens: int | None = None,
) -> list[AttentionSpec]:
    """The ways to measure: the base itself, the ways of ``--try``, and calibrated versions of those that can be fitted.

    Args:
        tries: values of ``--try``; None: ``TRIES``, without those that do not work with the base.
        base: the base.
        calibrations: the data to calibrate on, some of ``CALIBRATIONS``; empty: calibrate nothing.
        longest: pieces in the longest random sentence of a calibration; None: the default.
        tokens: length of the longest sentence to measure on. Attention that equals softmax up to this length is not
            calibrated. None: unknown.

    Raises:
        InputError: a way is invalid, or cannot be fitted on sentences of this length.
    """
    sites = {name: value for name, value in base.way.options.items() if name == "attention_sites"}
    state, ways, fitted = load_checkpoint(base.path), {base.way.key: base.way}, []
    if calibrations:
        lengths_of_random(state, longest)
    for words, way, swapped in _swapped_ways(tries, state, sites):
        is_new = ways.setdefault(way.key, way) is way
        shows = tokens is None or exact_up_to(swapped) < tokens
        if is_new and shows and calibrations and why_not_calibrated(swapped) is None:
            try:
                lengths_of_random(swapped, longest)
            except InputError as error:
                raise InputError(f"--try {words!r}: {error}") from None
            fitted.append(way)
    return [*ways.values(), *(replace(way, calibrated_on=one) for one in calibrations for way in fitted)]


def _swapped_ways(
    tries: Iterable[str] | None, state: Checkpoint, sites: dict[str, Any]
) -> Iterator[tuple[str, AttentionSpec, Checkpoint]]:
    """For each way in the values of ``--try``: the value, the way, and the swapped checkpoint without a fit."""
    for words in TRIES if tries is None else tries:
        for way in expand(words):
            way = replace(way, options={**sites, **options_of_swap(way.attention), **way.options})
            try:
                swapped = swap_as(state, way)
            except InputError as error:
                if tries is not None:
                    raise InputError(f"--try {words!r}: {error}") from None
                print(f"{words} is left out: {error}", file=sys.stderr)
            else:
                yield words, way, swapped


def swap_as(base: Checkpoint, way: AttentionSpec) -> Checkpoint:
    """The base, swapped in one way without a fit: new parameters have their initial values."""
    swapped = swap_as_drawn(base, attention=way.attention, **way.options)
    swapped.path = base.path  # for messages
    return swapped


def read_base(path: str) -> BaseCheckpoint:
    """Read a base: its checksum, its softmax, and the number of epochs from fairseq's notes for resuming.

    Raises:
        InputError: it cannot be read, or was not trained with softmax.
    """
    state = load_checkpoint(path)
    softmax = state.softmax_of_training()
    if softmax is None:
        raise InputError(f"{path} was {state.how_trained()}; give a base trained with {DEFAULT}, before any swap")
    options = {name: value for name, value in softmax.items() if value is not None}
    try:
        position = state["extra_state"]["train_iterator"]
        epochs = position["epoch"] - 1 if position["iterations_in_epoch"] == 0 else 0
    except (KeyError, TypeError):  # no such notes, or in another form
        epochs = 0
    way = AttentionSpec(attention=DEFAULT, options=options)
    return BaseCheckpoint(path, hashlib.sha256(Path(path).read_bytes()).hexdigest(), epochs or None, way)


def check_bases(bases: Iterable[BaseCheckpoint]) -> None:
    """Raise InputError unless all bases have the same softmax and different epochs.

    Checkpoints of one training meet this. Tables label checkpoints by epoch, so epochs must be unique.
    """
    different = {base.sum: base for base in bases}.values()
    if len({base.way.key for base in different}) > 1:
        found = ", ".join(f"{base.path} ({base.way.flags or 'plain'})" for base in different)
        raise InputError(
            f"several checkpoints must have the same softmax, unlike {found}; give checkpoints of one training, or "
            "another --out"
        )
    epochs = {base.epoch for base in different}
    if len(different) > 1 and (None in epochs or len(epochs) < len(different)):
        found = ", ".join(f"{base.path} (epoch {base.epoch or 'unknown'})" for base in different)
        raise InputError(
            f"several checkpoints must be saved at the end of different epochs, unlike {found}; give checkpoints of "
            "one training, or another --out"
        )


def measured(
    base: BaseCheckpoint,
    state: Checkpoint,
    way: AttentionSpec,
    *,
    data: str,
    valid_subset: str,
    sentences: int | None,
    beam: int,
    fitting: dict[str, Any],
    device: torch.device,
    translations: Path | None,
) -> SweepRow:
    """Measure one way with one base: swap, calibrate if the way says so, then BLEU and loss.

    Args:
        base: the base.
        state: its checkpoint.
        way: the way to swap.
        data, valid_subset, sentences, beam, device: see the command's options.
        fitting: arguments of :func:`calibrate`.
        translations: file of the base's translations of the test set, one a line; it is written if it does not exist.
            None: no BLEU.

    Raises:
        InputError: the loss is not finite.
    """
    swapped, seconds, is_base = swap_as(state, way), None, way.key == base.way.key
    if way.calibrated_on != DRAWN:
        started = time.perf_counter()
        text = data if way.calibrated_on == TEXT else None
        done = calibrate(swapped, text, device=device, **fitting)
        swapped, cost = done.state, done.cost
        seconds = round(time.perf_counter() - started, 1)
    else:
        cost = compare(swapped, state, device=device, **fitting).cost()
    scores: dict[str, Any] = {"bleu": None}
    if translations is not None:
        loaded = load(swapped, data, "test", device=device)
        if not translations.exists():
            of_base = loaded if is_base else load(swap_as(state, base.way), data, "test", device=device)
            with atomic_write(translations) as file:
                file.writelines(line + "\n" for line in translate_split(of_base, beam=beam))
        kept = read_lines(translations)
        ours, others = (kept, None) if is_base else (translate_split(loaded, beam=beam), kept)
        check_joined(ours, f"{base.path} as {way.words}")
        lines = references(loaded.task, loaded.sentences, "test")
        scores["bleu"] = measure(ours, lines, metric=TOKENISED, base=others)
        scores |= of_detokenised(ours, lines, loaded.task)
    first, *more = valid_subset.split(",")
    loaded = load(swapped, data, first, device=device)
    of_others = [replace(loaded, sentences=load_data(swapped, data, split)[1]) for split in more]
    losses = [validation_losses(split, sentences) for split in (loaded, *of_others)]
    by_length = {most: total(one[most] for one in losses) for most in losses[0]}
    whole = total(by_length.values())
    if not math.isfinite(whole.mean):
        remedy = "give another checkpoint" if is_base else "leave this way out"
        raise InputError(f"{base.path} as {way.words}: the loss is {whole.mean}; {remedy}")
    return SweepRow(
        **vars(way),
        base=base.sum,
        epoch=base.epoch,
        calibration_seconds=seconds,
        loss=whole.mean,
        tokens=whole.tokens,
        **scores,
        seed=fitting["seed"],
        commit=current_commit(),
        threads=torch.get_num_threads(),
        cost=cost.nats,
        cost_by_place=cost.by_place,
        device="CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
        balance=encoder_balance(loaded),
        by_length=by_length,
    )


def of_detokenised(translations: list[str], lines: list[str], task: TranslationTask) -> dict[str, float]:
    """sacreBLEU and chrF of detokenised translations of the test set.

    Args:
        translations: as tokens, one per sentence.
        lines: the references as tokens; they are detokenised and used if the data folder has no untokenised ones.
        task: gives the data folder and the target language.

    Returns:
        The scores in percent, ``sacrebleu`` and ``chrf``.

    Raises:
        InputError: the untokenised references have another number of lines.
    """
    language, raw = task.cfg.target_lang, raw_of(task, "test")
    plain = detokenise(lines, language=language) if raw is None else read_lines(raw)
    if len(plain) != len(lines):
        raise InputError(f"{raw} has {len(plain)} lines, the test set {len(lines)} sentences; mend or remove the file")
    ours = detokenise(translations, language=language)
    return {"sacrebleu": sacrebleu(ours, plain, language), "chrf": chrf(ours, plain)}


@torch.no_grad()
def validation_losses(loaded: Loaded, sentences: int | None = None, max_tokens: int = 4096) -> dict[str, Loss]:
    """The loss with teacher forcing, for each range of source lengths.

    Args:
        loaded: the model with a split.
        sentences: number of random sentences; None: all that are not too long.
        max_tokens: most pieces in a batch.

    Returns:
        The loss of each range. Keys are ``LENGTHS`` as text: the largest length in source pieces, or "more".
    """
    limits = torch.tensor(LENGTHS[:-1], device=loaded.device)
    nats = torch.zeros(len(LENGTHS), dtype=torch.float64, device=loaded.device)
    tokens = torch.zeros_like(nats)
    batches = in_batches(loaded, loaded.draw(sentences, 0)[0], max_tokens)
    for indices in tqdm(batches, desc="validation", unit="batch", leave=False, disable=None):
        sample = loaded.batch(indices)
        log_probs = loaded.model.get_normalized_probs(loaded.model(**sample["net_input"]), log_probs=True)
        target = sample["target"].unsqueeze(-1)
        real = target.ne(loaded.pad)
        of_sentences = log_probs.gather(-1, target).masked_fill(~real, 0.0).double().sum((1, 2))
        pieces = sample["net_input"]["src_lengths"] - 1  # without the end of the sentence
        where = torch.bucketize(pieces, limits)
        nats.index_add_(0, where, -of_sentences)
        tokens.index_add_(0, where, real.sum((1, 2)).double())
    of_ranges = zip(LENGTHS, nats.tolist(), tokens.tolist(), strict=True)
    return {str(most): Loss(nats=total, tokens=int(count)) for most, total, count in of_ranges}


def total(losses: Iterable[Loss]) -> Loss:
    """The sum of several losses: the loss over all their sentences."""
    parts = list(losses)
    return Loss(nats=sum(part.nats for part in parts), tokens=sum(part.tokens for part in parts))
