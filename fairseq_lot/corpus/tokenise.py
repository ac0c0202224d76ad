"""``fairseq-lot tokenise``: Moses tokenisation, lower-casing and cleaning of raw parallel text."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from fairseq_lot.corpus.moses import tokenise_lines
from fairseq_lot.corpus.parallel import add_text_arguments, output_folder, read_splits, write_splits
from fairseq_lot.errors import InputError, check_least

MAX_RATIO = 1.5  # both as in fairseq's IWSLT'14 recipe
MAX_TOKENS = 175


def clean_indices(
    source: Sequence[str], target: Sequence[str], *, max_ratio: float = MAX_RATIO, max_tokens: int = MAX_TOKENS
) -> list[int]:
    """Indices of the pairs that cleaning keeps, by the rules of Moses' clean-corpus-n.

    A pair is dropped if a side is empty or has more than ``max_tokens`` tokens, or if one side has more than
    ``max_ratio`` times as many tokens as the other.

    Args:
        source, target: lines of tokens, separated by spaces.
        max_ratio, max_tokens: the limits.
    """
    kept = []
    for index, pair in enumerate(zip(source, target, strict=True)):
        shorter, longer = sorted(len(line.split()) for line in pair)
        if shorter >= 1 and longer <= max_tokens and longer / shorter <= max_ratio:
            kept.append(index)
    return kept


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
    """Run ``fairseq-lot tokenise``: tokenise all splits, clean train and valid, copy the test set to ``out/raw``."""
    check_least(args, max_ratio=1, max_tokens=1)
    languages, cleaned = (args.source, args.target), () if args.no_clean else ("train", "valid")
    texts = read_splits(args.raw, languages, out=args.out, allow_empty=cleaned)
    dropped, tokenised = {}, {}
    for split, sides in texts.items():
        pair = [tokenise_lines(lines, language) for lines, language in zip(sides, languages, strict=True)]
        if split in cleaned:
            kept = clean_indices(*pair, max_ratio=args.max_ratio, max_tokens=args.max_tokens)
            dropped[split] = len(pair[0]) - len(kept)
            pair = [[lines[index] for index in kept] for lines in pair]
        if not pair[0]:
            raise InputError(f"no pair of {split} passes the cleaning; give --no-clean or wider limits")
        for lines, language in zip(pair, languages, strict=True):
            if "" in lines:  # a line of control characters; its number is unknown if pairs were held out
                raw = " and ".join(f"{side[lines.index('')]!r:.80}" for side in sides)
                raise InputError(f"{split}: in the pair {raw} the {language} line has no token; remove the pair")
        tokenised[split] = pair
    with output_folder(args.out) as folder:
        write_splits(folder, tokenised, languages)
        write_splits(folder / "raw", {"test": texts["test"]}, languages)
    for split, count in dropped.items():
        print(f"cleaning dropped {count} pairs of {split}", file=sys.stderr)
