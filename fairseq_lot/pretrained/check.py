"""``fairseq-lot check``: find errors in data and flags within seconds, before a long run stops at them."""

from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fairseq import options
from fairseq.data import Dictionary
from fairseq.data.data_utils import raise_if_valid_subsets_unintentionally_ignored
from fairseq.models.transformer import DEFAULT_MAX_SOURCE_POSITIONS, DEFAULT_MAX_TARGET_POSITIONS

from fairseq_lot.errors import InputError, check_least, flag
from fairseq_lot.pretrained.data_folder import (
    Side,
    check_data,
    check_lengths,
    check_not_empty,
    numbers,
    read_dictionary,
    splits_of,
    too_long,
)
from fairseq_lot.pretrained.fairseq_flags import read_flags
from fairseq_lot.pretrained.languages import add_language_arguments, languages, typed_pair
from fairseq_lot.pretrained.loading import load
from fairseq_lot.pretrained.text import joins, piece_kind

_SIDES = ("source", "target")
_LIMITS = ("max_source_positions", "max_target_positions")
_DEFAULTS = (DEFAULT_MAX_SOURCE_POSITIONS, DEFAULT_MAX_TARGET_POSITIONS)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("data", metavar="DATA", help="folder made by fairseq-preprocess")
    parser.add_argument("--path", metavar="CKPT.pt", help="does DATA fit this checkpoint?")
    text = "train, valid or test (default: test with --path, else all splits, with advice for a first training)"
    parser.add_argument("--split", help=text)
    for side in _SIDES:
        text = f"longest {side} allowed, in pieces with the end of sentence (default: the checkpoint's)"
        parser.add_argument(f"--max-{side}-positions", type=int, metavar="N", help=text)
    add_language_arguments(parser)
    parser.add_argument(
        "--training",
        nargs=REMAINDER,
        metavar="FLAGS",
        help="all further words are flags of fairseq-train: would this training stop at a sentence of DATA, and which "
        "sentences would it skip?",
    )


def run(args: Namespace) -> None:
    """Run ``fairseq-lot check``: print one line per split; InputError at the first problem."""
    if args.training is not None:
        others = ("path", "split", *_LIMITS, "source_lang", "target_lang")
        given = [flag(name) for name in others if getattr(args, name) is not None]
        if given:
            raise InputError(f"{', '.join(given)} cannot be used with --training; put flags of the training after it")
        _check_training(args.data, args.training)
        return
    check_least(args, max_source_positions=1, max_target_positions=1)
    pair, limits = typed_pair(args), [args.max_source_positions, args.max_target_positions]
    source, target = pair or ("", "")
    if args.path is None:
        source, target = pair or languages({}, args.data, None)
        dictionaries = [read_dictionary(args.data, language) for language in (source, target)]
        splits = [args.split] if args.split is not None else splits_of(args.data, source, target)
    else:
        splits = [args.split or "test"]
    found: dict[str, list[Side]] = {}
    for split in splits:
        if args.path is not None:
            loaded = load(args.path, args.data, split, device="cpu", pair=pair)
            source, target = loaded.task.cfg.source_lang, loaded.task.cfg.target_lang
            limits = [typed or own for typed, own in zip(limits, loaded.model.max_positions(), strict=True)]
        found[split] = sides = list(check_data(args.data, split=split, source=source, target=target).values())
        where = f"{args.data}, split {split}"
        check_not_empty(sides[0].sizes, where=where)
        check_lengths([side.sizes for side in sides], limits, where=where)
    for split, sides in found.items():
        print(f"{args.data}: {_describe(split, sides)}")
    if args.path is None and args.split is None:
        for line in _advice(source, target, dictionaries, list(found.values())):
            print(line)


def _describe(split: str, sides: Sequence[Side]) -> str:
    """A line about a split: number of sentences, the longest one on each side, share of unknown pieces."""
    longest = " and ".join(
        f"{side.sizes.max() - 1} pieces ({name}, sentence {side.sizes.argmax() + 1})"
        for name, side in zip(_SIDES, sides, strict=True)
    )
    unknown = " and ".join(
        f"{side.unknown / max(side.sizes.sum() - len(side.sizes), 1):.2%} ({name})"
        for name, side in zip(_SIDES, sides, strict=True)
        if side.unknown
    )
    unknown = unknown and f"; unknown pieces: {unknown}"
    return f"{split} has {len(sides[0].sizes)} sentences, the longest {longest}{unknown}"


def _advice(
    source: str, target: str, dictionaries: Sequence[Dictionary], splits: Sequence[Sequence[Side]]
) -> list[str]:
    """Lines for the user: the flags that fairseq-train and fairseq-generate need for a data folder.

    Args:
        source, target: the languages.
        dictionaries: source and target dictionary.
        splits: both sides of each split.
    """
    joined = dictionaries[0].symbols == dictionaries[1].symbols
    sizes = ", ".join(dict.fromkeys(f"{len(dictionary)} symbols" for dictionary in dictionaries))
    kinds = [piece_kind(dictionary) for dictionary in dictionaries]
    named = " and ".join(dict.fromkeys("words" if kind is None else f"pieces of {kind}" for kind in kinds))
    longest = [max(int(sides[i].sizes.max()) for sides in splits) for i in range(2)]
    training = [f"--source-lang {source} --target-lang {target}"]
    training.append("--share-all-embeddings" if joined else "--share-decoder-input-output-embed")
    needed = [
        f"{flag(name)} {most}"
        for name, most, default in zip(_LIMITS, longest, _DEFAULTS, strict=True)
        if most > default
    ]
    translating = [*([] if kinds[1] is None else [f"--remove-bpe {kinds[1]}"]), *needed]
    lines = [
        f"{source} to {target}, {'one joined dictionary' if joined else 'two dictionaries'} ({sizes}), {named}",
        f"fairseq-train: {' '.join([*training, *needed])}, and a batch of at least {max(longest)} --max-tokens",
    ]
    if translating:
        lines.append(f"fairseq-generate: {' '.join(translating)}")
    if needed:
        lines.append(
            "without these positions fairseq-train skips longer pairs of train, and stops at longer pairs of valid"
        )
    return lines


def _check_training(data: str, flags: Sequence[str]) -> None:
    """Print the sentences that a training would skip; refuse those at which it would stop.

    Args:
        data: the data folder.
        flags: of fairseq-train. A checkpoint that they name also gives sizes and languages.

    Raises:
        InputError: the training would stop at a sentence, or data or flags are wrong.
    """
    if not any(word.partition("=")[0] in ("--arch", "-a") for word in flags):
        raise InputError("--training needs the flags of fairseq-train, including --arch")
    args = read_flags(options.get_training_parser(), [data, *flags], "fairseq-train")
    if args.task != "translation":
        print(f"{data}: not checked, because --task {args.task} makes its own sentences")
        return
    source, target = typed_pair(args) or languages({}, data, None)
    try:
        raise_if_valid_subsets_unintentionally_ignored(Namespace(dataset=args, task=args))
    except ValueError as error:
        raise InputError(f"{data}: {' '.join(str(error).split())}") from error
    kind = piece_kind(read_dictionary(data, target))
    if args.eval_bleu and args.eval_bleu_remove_bpe and not joins(args.eval_bleu_remove_bpe, kind):
        raise InputError(
            f"--eval-bleu-remove-bpe {args.eval_bleu_remove_bpe} does not fit {data}/dict.{target}.txt, which has "
            f"{'words' if kind is None else f'pieces of {kind}'}; give {kind or 'none'}"
        )
    # architectures set these only if they are typed
    limits = [getattr(args, name, None) or default for name, default in zip(_LIMITS, _DEFAULTS, strict=True)]

    def sizes_of(split: str) -> list[np.ndarray]:
        sides = check_data(data, split=split, source=source, target=target)
        sizes = [side.sizes for side in sides.values()]
        return [sizes[0].clip(max=limits[0]), sizes[1]] if args.truncate_source else sizes

    for split in _parts(data, args.train_subset, source, target, combine=True):
        sizes = sizes_of(split)
        most = [limit if args.max_tokens is None else min(limit, args.max_tokens) for limit in limits]
        left_out = np.flatnonzero(too_long(sizes, most))
        takes = f"{most[0]} pieces of the source or {most[1]} of the target"
        if len(left_out) == len(sizes[0]):
            raise InputError(f"{data}: all pairs of {split} are longer than {takes}, the limits of this training")
        if len(left_out):
            print(
                f"{data}: fairseq-train skips {len(left_out)} of {len(sizes[0])} pairs of {split}, longer than "
                f"{takes}: {numbers(left_out)}"
            )
    valid = [] if args.disable_validation else args.valid_subset.split(",")
    for split in [part for name in valid for part in _parts(data, name, source, target, args.combine_valid_subsets)]:
        sizes, where = sizes_of(split), f"{data}, split {split}"
        left_out = too_long(sizes, limits)
        if args.skip_invalid_size_inputs_valid_test and left_out.any():
            shown = numbers(np.flatnonzero(left_out))
            print(f"{data}: fairseq-train skips {left_out.sum()} of {len(left_out)} pairs of {split}: {shown}")
            sizes = [np.where(left_out, 1, lengths) for lengths in sizes]
        check_lengths(sizes, limits, where=where)
        if args.max_tokens_valid is not None:
            most = [args.max_tokens_valid] * 2
            check_lengths(sizes, most, where=where, takes="a batch has", way_out="give a larger --max-tokens-valid")


def _parts(data: str, split: str, source: str, target: str, combine: bool | None) -> list[str]:
    """The split's name and, with ``combine``, the splits that fairseq adds to it: valid1, valid2, ..."""
    names, there = [split], splits_of(data, source, target) if combine and Path(data).is_dir() else []
    while (more := f"{split}{len(names)}") in there:
        names.append(more)
    return names
