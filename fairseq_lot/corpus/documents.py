"""``fairseq-lot documents``: join sentences to documents for training and testing."""

import math
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from itertools import groupby, islice, repeat
from pathlib import Path

import numpy as np

from fairseq_lot.corpus.parallel import SPLITS, language_code, output_folder, read_parallel, write_splits
from fairseq_lot.errors import InputError, check_least
from fairseq_lot.output.files import read_lines

SENTENCES = (1, 16)  # least and largest number of sentences in a training document
PIECES = 512  # largest number of pieces in a training document
LONGEST = 2048  # the same with --names
SHORTEST = 16  # least limit at which a training document is cut at random, with --names
MARK = "documents.txt"  # this file marks a folder whose sentences are joined
POSITIONS = 1000  # largest number of pieces in a test document: models have 1,024 positions


def spans(sides: list[list[str]], sizes: Iterator[int], most: int) -> Iterator[slice]:
    """Cut a text into documents of consecutive pairs.

    Args:
        sides: the lines of both languages, as pieces separated by spaces.
        sizes: number of pairs in each document.
        most: largest number of pieces in a document on a side. A document that would exceed it ends earlier; it has at
            least one pair.

    Yields:
        The slice of pairs of each document.
    """
    lengths, start = np.array([[len(line.split()) for line in side] for side in sides]), 0
    while start < lengths.shape[1]:
        fitting = lengths[:, start : start + next(sizes)].cumsum(1).max(0) <= most
        end = start + max(1, int(fitting.sum()))
        yield slice(start, end)
        start = end


def join_folder(folder: Path, languages: tuple[str, str], tests: list[int], seed: int) -> None:
    """Join the sentences in a folder of ``fairseq-lot encode``; its files are replaced.

    Documents of train and valid have a random number of sentences; train is shuffled first. The sentences of
    the test set become one test set for each number in ``tests``: test, test1, test2, ...

    Args:
        folder: the folder.
        languages: of the source and the target.
        tests: for each test set, the number of sentences in a document.
        seed: seed of the order and the numbers of sentences.

    Raises:
        InputError: the sentences are joined already, or :func:`read_parallel` refuses the text.
    """
    refuse_joined(folder)
    generator = random.Random(seed)
    texts = {split: read_parallel(folder / split, languages) for split in SPLITS}
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
            write_test(folder, out, number, list(spans(texts["test"], repeat(size), POSITIONS)))


def write_names(folder: Path, names: dict[str, list[str]]) -> None:
    """Write ``{split}.names``, one line per pair: the name of its document."""
    for split, lines in names.items():
        (folder / f"{split}.names").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_names(folder: Path, counts: dict[str, int]) -> dict[str, list[str]]:
    """Read the files of :func:`write_names`: for each split the document's name of each pair.

    Args:
        folder: the folder of the files.
        counts: number of pairs in each split.

    Raises:
        InputError: a file has another number of lines.
    """
    names = {}
    for split, count in counts.items():
        names[split] = read_lines(folder / f"{split}.names")
        if len(names[split]) != count:
            raise InputError(f"{folder / split}.names has {len(names[split])} lines, {split} has {count} pairs")
    return names


def named_spans(sides: list[list[str]], names: list[str], limits: Iterator[int]) -> Iterator[slice]:
    """Cut a text into its documents, and documents into parts.

    Args:
        sides: the lines of both languages, as pieces separated by spaces.
        names: the document of each pair.
        limits: for each part the largest number of pieces on a side; a part has at least one pair.

    Yields:
        The slice of pairs of each part.
    """
    start = 0
    for _, group in groupby(names):
        end = start + len(list(group))
        while start < end:
            (span,) = islice(spans([side[start:end] for side in sides], repeat(end - start), next(limits)), 1)
            yield slice(start, start + span.stop)
            start += span.stop


def join_named(folder: Path, languages: tuple[str, str], names_in: Path, tests: list[int], seed: int) -> None:
    """Join the paragraphs of named documents in a folder of ``fairseq-lot encode``; its files are replaced.

    Train has each paragraph three times: alone, in parts of documents of random length, and in documents of at most
    ``LONGEST`` pieces. Valid has such documents. ``test`` has each test paragraph alone. ``test1``, ``test2``, ... have
    the test documents, cut where they have more pieces than ``tests`` allows.

    Args:
        folder: the folder.
        languages: of the source and the target.
        names_in: folder with ``{train,valid,test}.names``.
        tests: for each test set from ``test1`` on, the largest number of pieces in a document.
        seed: seed of the random lengths.

    Raises:
        InputError: the paragraphs are joined already, names and pairs differ in number, or :func:`read_parallel`
            refuses the text.
    """
    refuse_joined(folder)
    generator = random.Random(seed)
    texts = {split: read_parallel(folder / split, languages) for split in SPLITS}
    names = read_names(names_in, {split: len(sides[0]) for split, sides in texts.items()})

    def random_limit() -> int:
        return round(math.exp(generator.uniform(math.log(SHORTEST), math.log(LONGEST))))

    def joined(split: str, limits: Iterator[int]) -> list[list[str]]:
        found = list(named_spans(texts[split], names[split], limits))
        return [[" ".join(lines[span]) for span in found] for lines in texts[split]]

    with output_folder(folder) as out:
        (out / MARK).write_text(f"pieces of a test document: {tests}, seed: {seed}\n", encoding="utf-8")
        parts = [texts["train"], joined("train", iter(random_limit, None)), joined("train", repeat(LONGEST))]
        write_splits(out, {"train": [sum(sides, []) for sides in zip(*parts, strict=True)]}, languages)
        write_splits(out, {"valid": joined("valid", repeat(LONGEST))}, languages)
        for number, most in enumerate([0, *tests]):
            write_test(folder, out, number, list(named_spans(texts["test"], names["test"], repeat(most))))


def refuse_joined(folder: Path) -> None:
    """Raise InputError if the sentences of a folder are joined already."""
    if (folder / MARK).exists():
        raise InputError(f"{folder / MARK} exists: these sentences are joined already; encode into a new folder first")


def write_test(folder: Path, out: Path, number: int, documents: list[slice]) -> None:
    """Write one test set: the joined pieces, tokens and raw text of the test set in ``folder``.

    Args:
        folder: folder with the sentences.
        out: folder to write to.
        number: 0 for ``test``, else N for ``testN``.
        documents: slice of the sentences in each document.
    """
    for path in folder.rglob("test.*"):
        lines, name = read_lines(path), f"test{number or ''}{path.suffix}"
        file = out / path.relative_to(folder).with_name(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(" ".join(lines[span]) + "\n" for span in documents), encoding="utf-8")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of fairseq-lot encode; its files are replaced")
    for side in ("source", "target"):
        parser.add_argument(f"--{side}", required=True, type=language_code, metavar="LANG", help=f"{side} language")
    parser.add_argument(
        "--names",
        type=Path,
        metavar="DIR",
        help="folder with {train,valid,test}.names, the document of each pair; only pairs of one document are joined",
    )
    tests = (
        f"one test set for each number: sentences in a document (default: 1 4 16 64), at most {POSITIONS} pieces. "
        "With --names: largest number of pieces in a document (default: 512 1024 2048)"
    )
    parser.add_argument("--tests", type=int, nargs="+", metavar="N", help=tests)
    parser.add_argument("--seed", type=int, default=1, help="of the random order and sizes (default: %(default)s)")


def run(args: Namespace) -> None:
    """Run ``fairseq-lot documents``: replace the sentences in the folder by documents."""
    check_least(args, seed=0)
    tests = args.tests or ([1, 4, 16, 64] if args.names is None else [512, 1024, 2048])
    if min(tests) < 1:
        raise InputError(f"--tests must be at least 1, got {min(tests)}")
    languages = args.source, args.target
    if args.names is None:
        join_folder(args.folder, languages, tests, args.seed)
    else:
        join_named(args.folder, languages, args.names, tests, args.seed)
