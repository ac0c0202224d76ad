"""Takes the sentence pairs that a list of hashes names from a training set: IWSLT'14's 65k subset from all of it.

python scripts/subset.py config/iwslt14-65k.pairs TEXT OUT       # prepare_iwslt14.sh does it where PAIRS is given

A hash is of the characters of a pair without the spaces between them, so it does not depend on how they were parted
into tokens. The pairs keep the order of the list. Validation and test set are copied, the latter with its raw text.
"""

import argparse
import hashlib
import html
import sys
from pathlib import Path

from fairseq_lot.errors import InputError
from fairseq_lot.output.files import atomic_write, read_bytes, read_lines, refuse_same

LANGUAGES = "de", "en"
SIZE = 5  # bytes of a hash


def hash_of(pair: tuple[str, ...]) -> bytes:
    """What stands for a pair in a list."""
    kept = ("".join(html.unescape(sentence).lower().split()) for sentence in pair)
    return hashlib.blake2b("\t".join(kept).encode(), digest_size=SIZE).digest()


def pairs_of(folder: Path) -> list[tuple[str, ...]]:
    """The training set of a folder."""
    sides = [read_lines(folder / f"train.{language}") for language in LANGUAGES]
    if len(sides[0]) != len(sides[1]):
        raise InputError(f"{folder} has {len(sides[0])} and {len(sides[1])} lines of training text; prepare it again")
    return list(zip(*sides, strict=True))


def chosen(hashes: bytes, pairs: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The pairs that a list names, each once, in its order."""
    by_hash = {hash_of(pair): pair for pair in reversed(pairs)}
    wanted = (hashes[at : at + SIZE] for at in range(0, len(hashes), SIZE))
    return [by_hash[one] for one in wanted if one in by_hash]


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
    refuse_same({"LIST": args.list, "TEXT": args.folder, "OUT": args.out})
    pairs = pairs_of(args.folder)
    if args.make:
        with atomic_write(args.list, "wb") as file:
            file.writelines(dict.fromkeys(map(hash_of, pairs)))
        return
    hashes = read_bytes(args.list)
    if not hashes or len(hashes) % SIZE:
        raise InputError(f"{args.list} has {len(hashes)} bytes, which are no hashes of {SIZE}; get it again")
    found, total = chosen(hashes, pairs), len(hashes) // SIZE
    if not found:
        raise InputError(f"{args.folder} has none of the {total} pairs of {args.list}; give the text it was made from")
    copied = [f"{split}.{language}" for split in ("valid", "test") for language in LANGUAGES]
    copied += [name for name in ("raw/test.de", "raw/test.en") if (args.folder / name).is_file()]
    files = {name: read_bytes(args.folder / name) for name in copied}
    for language, sentences in zip(LANGUAGES, zip(*found, strict=True), strict=True):
        files[f"train.{language}"] = "".join(f"{sentence}\n" for sentence in sentences).encode()
    for name, text in files.items():
        with atomic_write(args.out / name, "wb") as file:
            file.write(text)
    print(f"{args.out}: {len(found)} of {total} pairs")


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        print(f"subset.py: error: {error}", file=sys.stderr)
        sys.exit(2)
