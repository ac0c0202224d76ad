"""Selects sentence pairs of a training set by a list of their hashes, such as IWSLT'14's 65k subset.

python scripts/subset.py config/iwslt14-65k.pairs TEXT OUT       # as in prepare_iwslt14.sh with PAIRS

A hash is of the characters of a pair in lower case without spaces, so it does not depend on the tokenisation. The pairs
have the order of the list. The validation set and the test set are copied, with the test set's raw text if it is there.
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
    """The hash of a pair, as in a list."""
    kept = ("".join(html.unescape(sentence).lower().split()) for sentence in pair)
    return hashlib.blake2b("\t".join(kept).encode(), digest_size=SIZE).digest()


def pairs_of(folder: Path) -> list[tuple[str, ...]]:
    """The sentence pairs of a folder's training set."""
    sides = [read_lines(folder / f"train.{language}") for language in LANGUAGES]
    if len(sides[0]) != len(sides[1]):
        raise InputError(f"{folder} has {len(sides[0])} and {len(sides[1])} lines of training text; prepare it again")
    return list(zip(*sides, strict=True))


def chosen(hashes: bytes, pairs: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The pairs whose hashes are in the list, each once, in the list's order."""
    by_hash = {hash_of(pair): pair for pair in reversed(pairs)}
    wanted = (hashes[at : at + SIZE] for at in range(0, len(hashes), SIZE))
    return [by_hash[one] for one in wanted if one in by_hash]


def main() -> None:
    """Write the folder OUT; with ``--make`` write the list."""
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
