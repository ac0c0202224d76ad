"""``fairseq-lot libreoffice``: split LibreOffice's help, German-English, by pages into train, valid and test.

A split by paragraphs would test on pages that were partly trained on.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fairseq_lot.corpus.documents import write_names
from fairseq_lot.corpus.parallel import SPLITS, Texts, output_folder, write_splits
from fairseq_lot.errors import InputError, check_least
from fairseq_lot.output.files import read_lines

LANGUAGES = ("de", "en")
# Pages are sorted by length: every eighth goes to test, every 32nd to valid.
TEST_EVERY, VALID_EVERY = 8, 32
Page = list[tuple[str, str]]  # pairs of paragraphs


def read_pages(path: str | Path) -> dict[str, Page]:
    """Read pages from a file with lines of page name, German and English, separated by tabs.

    Raises:
        InputError: the file cannot be read, or a line does not have three non-empty parts.
    """
    pages: dict[str, Page] = {}
    for number, line in enumerate(read_lines(path), start=1):
        parts = line.split("\t")
        if len(parts) != 3 or not all(part.strip() for part in parts):
            raise InputError(f"{path}, line {number}: expected page, German and English, separated by tabs")
        pages.setdefault(parts[0], []).append((parts[1], parts[2]))
    return pages


def split_pages(pages: dict[str, Page]) -> dict[str, list[str]]:
    """The page names of each split, chosen so that each split has short and long pages."""
    by_length = sorted(pages, key=lambda name: (-sum(len(english.split()) for _, english in pages[name]), name))
    split_of = {}
    for rank, name in enumerate(by_length):
        held_out = {TEST_EVERY // 2: "test", 0: "valid" if rank % VALID_EVERY == 0 else "train"}
        split_of[name] = held_out.get(rank % TEST_EVERY, "train")
    return {split: [name for name in pages if split_of[name] == split] for split in SPLITS}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fairseq-lot libreoffice``."""
    add = parser.add_argument
    add("pairs", metavar="PAIRS", help="lines of page, German and English; examples/libreoffice-help/pairs.tsv.xz")
    add("--out", required=True, metavar="DIR", help="folder for raw {train,valid,test}.{de,en} and .names of the pages")
    add("--max-words", type=int, metavar="N", help="drop pairs with more words on a side (default: no limit)")
    add("--chapters", action="store_true", help="names are folders of pages: documents are joined from all of them")
    add("--test-pairs", type=int, metavar="N", help="keep N test pairs, evenly spread (default: all)")


def run(args: Namespace) -> None:
    """Run ``fairseq-lot libreoffice``: write the raw text of the splits, with the page name of each pair."""
    check_least(args, max_words=1, test_pairs=1)
    pages = read_pages(args.pairs)
    if args.max_words is not None:
        pages = {
            name: [pair for pair in pairs if max(len(side.split()) for side in pair) <= args.max_words]
            for name, pairs in pages.items()
        }
    texts: Texts = {}
    names: dict[str, list[str]] = {}
    for split, kept in split_pages(pages).items():
        pairs = [(name, *pair) for name in kept for pair in pages[name]]
        if not pairs:
            raise InputError(f"no pair is left for {split}; give more pages, or a larger --max-words")
        if split == "test" and args.test_pairs is not None and args.test_pairs < len(pairs):
            pairs = [pairs[number * len(pairs) // args.test_pairs] for number in range(args.test_pairs)]
        names[split] = [name.rpartition("/")[0] or name if args.chapters else name for name, _, _ in pairs]
        texts[split] = [[pair[side] for pair in pairs] for side in (1, 2)]
    with output_folder(args.out) as folder:
        write_splits(folder, texts, LANGUAGES)
        write_names(folder, names)
