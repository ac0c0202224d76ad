"""Moses tokenisation, lower-casing and cleaning of raw parallel text."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from sacremoses import MosesTokenizer
from tqdm import tqdm

from fairseq_lot.corpus.parallel import add_text_arguments, check_output, output_folder, read_splits, write_splits
from fairseq_lot.errors import InputError

MAX_RATIO = 1.5  # with MAX_TOKENS the setting of fairseq's IWSLT'14 recipe
MAX_TOKENS = 175


def tokenise_lines(lines: Sequence[str], language: str) -> list[str]:
    """Return each line as lower-cased Moses tokens with escapes (``&apos;``), separated by single spaces."""
    tokenise = MosesTokenizer(language).tokenize
    shown = tqdm(lines, f"tokenising {language}", unit=" lines", disable=None, leave=False)
    return [" ".join(tokenise(line, escape=True)).lower() for line in shown]


def clean_indices(
    source: Sequence[str], target: Sequence[str], *, max_ratio: float = MAX_RATIO, max_tokens: int = MAX_TOKENS
) -> list[int]:
    """Return the indices of the pairs worth training on.

    A pair is dropped when a side is empty or has more than ``max_tokens`` tokens, or when one side
    has more than ``max_ratio`` times the tokens of the other (as Moses' clean-corpus-n).
    """
    kept = []
    for index, pair in enumerate(zip(source, target, strict=True)):
        shorter, longer = sorted(len(line.split()) for line in pair)
        if shorter >= 1 and longer <= max_tokens and longer / shorter <= max_ratio:
            kept.append(index)
    return kept


def tokenise_folder(
    raw: Sequence[str | Path],
    out: str | Path,
    languages: Sequence[str],
    *,
    clean: bool = True,
    max_ratio: float = MAX_RATIO,
    max_tokens: int = MAX_TOKENS,
) -> dict[str, int]:
    """Tokenise ``raw`` into the folder ``out``; the untouched test set goes to ``out/raw``, line by line the same.

    Args:
        raw: see :func:`~fairseq_lot.corpus.parallel.read_splits`.
        out: folder to write.
        languages: source and target.
        clean: drop pairs of train and valid (never of test) that ``clean_indices`` does not keep.
        max_ratio: see ``clean_indices``.
        max_tokens: see ``clean_indices``.

    Returns:
        the number of dropped pairs of each cleaned split.

    Raises:
        InputError: bad text, or an output that cannot be written.
    """
    if not max_ratio >= 1:
        raise InputError(f"--max-ratio {max_ratio} drops every pair; give at least 1 (default {MAX_RATIO})")
    if max_tokens < 1:
        raise InputError(f"--max-tokens {max_tokens} drops every pair; give at least 1 (default {MAX_TOKENS})")
    check_output(raw, out)
    cleaned = ("train", "valid") if clean else ()
    texts = read_splits(raw, languages, allow_empty=cleaned)
    dropped, tokenised = {}, {}
    for split, sides in texts.items():
        pair = [tokenise_lines(lines, language) for lines, language in zip(sides, languages, strict=True)]
        if split in cleaned:
            kept = clean_indices(*pair, max_ratio=max_ratio, max_tokens=max_tokens)
            dropped[split] = len(pair[0]) - len(kept)
            pair = [[lines[index] for index in kept] for lines in pair]
        _check_tokenised(split, pair, languages)
        tokenised[split] = pair
    with output_folder(out) as folder:
        write_splits(folder, tokenised, languages)
        write_splits(folder / "raw", {"test": texts["test"]}, languages)
    return dropped


def _check_tokenised(split: str, pair: Sequence[Sequence[str]], languages: Sequence[str]) -> None:
    """Refuse a split that cleaning emptied, and a line of control characters that leaves no token."""
    if not pair[0]:
        raise InputError(f"no pair of {split} passes the cleaning; give --no-clean or wider limits")
    for lines, language in zip(pair, languages, strict=True):
        if "" in lines:
            raise InputError(f"{split}.{language}, line {lines.index('') + 1}: no token in it; remove it from both")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fairseq-lot tokenise``."""
    add_text_arguments(parser, "raw", "untokenised")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the tokenised files")
    parser.add_argument("--no-clean", action="store_true", help="keep every pair of train and valid")
    parser.add_argument(
        "--max-ratio", type=float, default=MAX_RATIO, help="drop pairs of a higher length ratio (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, help="drop pairs with more tokens (default: %(default)s)"
    )


def run(args: Namespace) -> None:
    """Run ``fairseq-lot tokenise``."""
    dropped = tokenise_folder(
        args.raw,
        args.out,
        (args.source, args.target),
        clean=not args.no_clean,
        max_ratio=args.max_ratio,
        max_tokens=args.max_tokens,
    )
    for split, count in dropped.items():
        print(f"cleaning dropped {count} pairs of {split}", file=sys.stderr)
