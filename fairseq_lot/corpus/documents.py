"""``fairseq-lot documents``: sentences joined to documents, to train on and to test."""

import random
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import numpy as np

from fairseq_lot.corpus.parallel import language_code, output_folder, read_parallel, write_splits
from fairseq_lot.errors import InputError, check_least
from fairseq_lot.output.files import read_lines

SENTENCES = (1, 16)  # least and most of a document to train on
PIECES = 512  # most of a document to train on
MARK = "documents.txt"  # says that the sentences are joined
POSITIONS = 1000  # pieces of a document to test, at most: models have 1,024 positions


def spans(sides: list[list[str]], sizes: Iterator[int], most: int) -> Iterator[slice]:
    """The pairs of each document: as many as its size says, or as have at most ``most`` pieces on either side."""
    lengths, start = np.array([[len(line.split()) for line in side] for side in sides]), 0
    while start < lengths.shape[1]:
        fitting = lengths[:, start : start + next(sizes)].cumsum(1).max(0) <= most
        end = start + max(1, int(fitting.sum()))
        yield slice(start, end)
        start = end


def join_folder(folder: Path, languages: tuple[str, str], tests: list[int], seed: int) -> None:
    """Join the sentences in a folder of ``fairseq-lot encode``, whose files are replaced.

    The pairs of train are shuffled. Documents of train and valid have a random number of sentences. The sentences of
    the test set become one test set for each number in ``tests``: test, test1, test2, ...

    Raises:
        InputError: they are joined already, or the text is not as it must be.
    """
    if (folder / MARK).exists():
        raise InputError(
            f"{folder / MARK} is there: these sentences are joined already; encode into a new folder first"
        )
    generator = random.Random(seed)
    texts = {split: read_parallel(folder / split, languages) for split in ("train", "valid", "test")}
    pairs = list(zip(*texts["train"], strict=True))
    generator.shuffle(pairs)
    texts["train"] = [list(side) for side in zip(*pairs, strict=True)]
    with output_folder(folder) as out:
        (out / MARK).write_text(f"sentences of a test document: {tests}, seed: {seed}\n", encoding="utf-8")
        for split in ("train", "valid"):
            documents = list(spans(texts[split], iter(lambda: generator.randint(*SENTENCES), None), PIECES))
            joined = [[" ".join(lines[span]) for span in documents] for lines in texts[split]]
            write_splits(out, {split: joined}, languages)
        for number, size in enumerate(tests):
            documents = list(spans(texts["test"], repeat(size), POSITIONS))
            for path in folder.rglob("test.*"):  # pieces, tokens, raw text
                lines, name = read_lines(path), f"test{number or ''}{path.suffix}"
                file = out / path.relative_to(folder).with_name(name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("".join(" ".join(lines[span]) + "\n" for span in documents), encoding="utf-8")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of fairseq-lot encode; its files are replaced")
    for side in ("source", "target"):
        parser.add_argument(f"--{side}", required=True, type=language_code, metavar="LANG", help=f"{side} language")
    tests = (
        "consecutive sentences of a document to test, a test set for each number (default: 1 4 16 64); none has more "
        f"than {POSITIONS} pieces"
    )
    parser.add_argument("--tests", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N", help=tests)
    parser.add_argument("--seed", type=int, default=1, help="of the order and the sizes (default: %(default)s)")


def run(args: Namespace) -> None:
    """Run ``fairseq-lot documents``."""
    check_least(args, seed=0)
    if min(args.tests) < 1:
        raise InputError(f"--tests must be at least 1, got {min(args.tests)}")
    join_folder(args.folder, (args.source, args.target), args.tests, args.seed)
