"""Moses tokenisation, lower-casing and cleaning of raw parallel text."""

import sys
from collections.abc import Sequence
from pathlib import Path

from sacremoses import MosesTokenizer
from tqdm import tqdm

from fairseq_lot.corpus.parallel import add_text_arguments, check_output, output_folder, read_splits, write_lines
from fairseq_lot.errors import InputError

MAX_RATIO = 1.5  # with MAX_TOKENS the setting of fairseq's IWSLT'14 recipe
MAX_TOKENS = 175


def tokenise_lines(lines: Sequence[str], language: str, progress: tqdm | None = None) -> list[str]:
    """Return each line as lower-cased Moses tokens with escapes (``&apos;``), separated by single spaces."""
    tokeniser = MosesTokenizer(language)
    tokenised = []
    for line in lines:
        tokenised.append(" ".join(tokeniser.tokenize(line, escape=True)).lower())
        if progress is not None:
            progress.update()
    return tokenised


def clean_indices(
    source: Sequence[str], target: Sequence[str], max_ratio: float = MAX_RATIO, max_tokens: int = MAX_TOKENS
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


def check_limits(max_ratio: float, max_tokens: int) -> None:
    """Refuse limits that no pair can meet.

    Raises:
        InputError: naming the limit.
    """
    if not max_ratio >= 1:
        raise InputError(f"--max-ratio {max_ratio} drops every pair; give at least 1 (default {MAX_RATIO})")
    if max_tokens < 1:
        raise InputError(f"--max-tokens {max_tokens} drops every pair; give at least 1 (default {MAX_TOKENS})")


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
    check_limits(max_ratio, max_tokens)
    check_output(raw, out)
    cleaned = ("train", "valid") if clean else ()
    texts = read_splits(raw, languages, allow_empty=cleaned)
    dropped = {}
    tokenised = {}
    with tqdm(total=2 * sum(len(sides[0]) for sides in texts.values()), unit=" lines", disable=None) as progress:
        for split, sides in texts.items():
            progress.set_description(f"tokenising {split}")
            pair = [tokenise_lines(lines, language, progress) for lines, language in zip(sides, languages, strict=True)]
            if split in cleaned:
                source, target = pair
                kept = clean_indices(source, target, max_ratio, max_tokens)
                dropped[split] = len(source) - len(kept)
                pair = [[lines[index] for index in kept] for lines in pair]
            tokenised[split] = pair
    for split, pair in tokenised.items():
        _check_tokenised(split, pair, languages)
    with output_folder(out) as folder:
        for split, pair in tokenised.items():
            for lines, language in zip(pair, languages, strict=True):
                write_lines(folder / f"{split}.{language}", lines)
        for lines, language in zip(texts["test"], languages, strict=True):
            write_lines(folder / "raw" / f"test.{language}", lines)
    return dropped


def _check_tokenised(split: str, pair: Sequence[Sequence[str]], languages: Sequence[str]) -> None:
    """Refuse a split that cleaning emptied, and a line of control characters that leaves no token."""
    if not pair[0]:
        raise InputError(f"no pair of {split} passes the cleaning; give --no-clean or wider limits")
    for lines, language in zip(pair, languages, strict=True):
        if "" in lines:
            number = lines.index("") + 1
            raise InputError(f"{split}.{language}, line {number}: no token in it; remove it from both")


def add_arguments(parser) -> None:
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


def run(args) -> None:
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
