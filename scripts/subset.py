"""Takes the sentence pairs that a list of hashes names from a training set: IWSLT'14's 65k subset from all of it.

bash scripts/prepare_iwslt14.sh
python scripts/subset.py config/iwslt14-65k.pairs data-bin/iwslt14.de-en/text iwslt14-65k

A hash is of the letters and digits of a pair, so other tokens of the same sentences are found, too. The pairs keep the
order of the list. Validation and test set are copied.
"""

import argparse
import hashlib
import html
import shutil
import sys
from pathlib import Path

from fairseq_lot.errors import InputError
from fairseq_lot.output.files import atomic_write, read_bytes, read_lines

LANGUAGES = "de", "en"
SIZE = 5  # bytes of a hash


def hash_of(pair: tuple[str, ...]) -> bytes:
    """What stands for a pair in a list."""
    kept = ("".join(filter(str.isalnum, html.unescape(sentence).lower())) for sentence in pair)
    return hashlib.blake2b("\t".join(kept).encode(), digest_size=SIZE).digest()


def pairs_of(folder: Path) -> list[tuple[str, ...]]:
    """The training set of a folder."""
    sides = [read_lines(folder / f"train.{language}") for language in LANGUAGES]
    if len(sides[0]) != len(sides[1]):
        raise InputError(f"{folder} has {len(sides[0])} and {len(sides[1])} lines of training text; prepare it again")
    return list(zip(*sides, strict=True))


def chosen(hashes: bytes, pairs: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The pairs that a list names, each once, in its order."""
    by_hash: dict[bytes, list[tuple[str, ...]]] = {}
    for pair in dict.fromkeys(pairs):
        by_hash.setdefault(hash_of(pair), []).append(pair)
    wanted = (by_hash.get(hashes[at : at + SIZE], []) for at in range(0, len(hashes), SIZE))
    return [found.pop(0) for found in wanted if found]


def main() -> None:
    """Write the folder, or with ``--make`` the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path, metavar="LIST", help="hashes of the pairs, one after the other")
    parser.add_argument("folder", type=Path, metavar="TEXT", help="tokenised {train,valid,test}.{de,en}")
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?", help="the new folder, of the same form")
    parser.add_argument("--make", action="store_true", help="write LIST, of all pairs of TEXT, instead of OUT")
    args = parser.parse_args()
    if args.make == (args.out is not None):
        parser.error("give either OUT or --make")
    pairs = pairs_of(args.folder)
    if args.make:
        with atomic_write(args.list, "wb") as file:
            file.writelines(map(hash_of, pairs))
        return
    hashes = read_bytes(args.list)
    found, total = chosen(hashes, pairs), len(hashes) // SIZE
    if not found:
        raise InputError(f"{args.folder} has none of the {total} pairs of {args.list}; give the text it was made from")
    args.out.mkdir(parents=True, exist_ok=True)
    for language, sentences in zip(LANGUAGES, zip(*found, strict=True), strict=True):
        for split in ("valid", "test"):
            shutil.copyfile(args.folder / f"{split}.{language}", args.out / f"{split}.{language}")
        with atomic_write(args.out / f"train.{language}") as file:
            file.writelines(f"{sentence}\n" for sentence in sentences)
    print(f"{args.out}: {len(found)} of {total} pairs")


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        print(f"subset.py: error: {error}", file=sys.stderr)
        sys.exit(2)
