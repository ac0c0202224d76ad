"""``fairseq-lot iwslt14``: raw train, valid and test text from the archive of IWSLT'14 German-English.

The splits follow fairseq's prepare-iwslt14.sh. The training pairs are cleaned; every 23rd remaining pair goes to valid.
The test set is five TED sets in a fixed order. fairseq gets 160,239, 7,283 and 6,750 pairs. Cleaning counts Moses
tokens, and sacremoses splits a few words differently from Moses' Perl script. So a few pairs that fairseq keeps may be
dropped or the reverse, and then later pairs move between train and valid.
"""

import http.client
import io
import re
import shutil
import sys
import tarfile
import urllib.request
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection
from pathlib import Path

from tqdm import tqdm

from fairseq_lot.corpus.moses import tokenise_lines
from fairseq_lot.corpus.parallel import Texts, output_folder, write_splits
from fairseq_lot.corpus.tokenise import clean_indices
from fairseq_lot.errors import InputError
from fairseq_lot.output.files import atomic_write, split_lines

LANGUAGES = ("de", "en")
TRAIN = "train.tags.de-en"
TEST = (
    "IWSLT14.TED.dev2010.de-en",
    "IWSLT14.TEDX.dev2012.de-en",
    "IWSLT14.TED.tst2010.de-en",
    "IWSLT14.TED.tst2011.de-en",
    "IWSLT14.TED.tst2012.de-en",
)
NESTED = "de-en.tgz"  # inside 2014-01.tgz as texts/de/en/de-en.tgz
MEMBERS = tuple(
    [f"{TRAIN}.{language}" for language in LANGUAGES]
    + [f"{name}.{language}.xml" for name in TEST for language in LANGUAGES]
)
VALID_EVERY = 23
METADATA = re.compile(r"<(url|talkid|keywords)>|^\s*</?(speaker|translator|reviewer|transcript|doc)\b[^>]*>")
TEXT_TAGS = re.compile(r"</?(title|description)>")
SEGMENT_TAGS = re.compile(r"<seg id=\"[0-9]*\">|</seg>")
Sentences = Callable[[list[str]], list[str]]  # of the lines of a file
BROKEN = (tarfile.TarError, EOFError, OSError, zlib.error)


def fetch(url: str, path: str | Path) -> None:
    """Download a file; it appears under its name only when it is complete.

    Raises:
        InputError: the download fails or ends early.
    """
    way_out = "try again, or fetch it yourself and give its path as ARCHIVE, or a tokenised folder as TOKENISED"
    with atomic_write(path, "wb") as file:
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                length = int(response.headers.get("Content-Length") or 0)
                with tqdm.wrapattr(response, "read", length or None, desc="downloading", disable=None) as body:
                    shutil.copyfileobj(body, file)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise InputError(f"cannot download {url} ({error}); {way_out}") from None
        if file.tell() < length:
            raise InputError(f"{url} ended after {file.tell()} of {length} bytes; {way_out}")


def read_members(archive: str | Path) -> dict[str, bytes]:
    """The contents of the archive's files in ``MEMBERS``, by name; nothing is unpacked on disk.

    Raises:
        InputError: the archive is missing, truncated or not IWSLT'14's.
    """
    archive = Path(archive)
    if not archive.is_file():
        raise InputError(f"{archive} is not a file; give the archive de-en.tgz or 2014-01.tgz")
    try:
        with tarfile.open(archive, "r:gz") as tar:
            found = _collect(tar, {*MEMBERS, NESTED})
        if NESTED in found:
            with tarfile.open(fileobj=io.BytesIO(found[NESTED]), mode="r:gz") as tar:
                found = _collect(tar, MEMBERS)
    except BROKEN as error:
        raise InputError(
            f"{archive} is truncated or not a .tgz archive ({error}); remove it and download it again"
        ) from None
    missing = [name for name in MEMBERS if name not in found]
    if missing:
        raise InputError(
            f"{archive} lacks {missing[0]} ({len(missing)} of {len(MEMBERS)} files missing); give IWSLT'14's "
            "de-en.tgz or 2014-01.tgz"
        )
    return found


def _collect(tar: tarfile.TarFile, names: Collection[str]) -> dict[str, bytes]:
    """The contents of the named regular files of a tar archive, found by file name in any folder."""
    found = {}
    for member in tqdm(tar, desc="reading the archive", unit=" files", disable=None, leave=False):
        name = member.name.rpartition("/")[2]
        file = tar.extractfile(member) if name in names else None
        if file is not None:
            found[name] = file.read()
    return found


def train_lines(lines: list[str]) -> list[str]:
    """The sentences of a train.tags file. Titles and descriptions stay; tags and metadata are removed."""
    return [" ".join(TEXT_TAGS.sub("", line).split()) for line in lines if not METADATA.search(line)]


def test_lines(lines: list[str]) -> list[str]:
    """The sentences of an XML test set, with typewriter apostrophes."""
    segments = (SEGMENT_TAGS.sub("", line) for line in lines if "<seg id" in line)
    return [" ".join(segment.replace("\u2019", "'").split()) for segment in segments]


def _sides(members: dict[str, bytes], name: str, ending: str, sentences: Sentences) -> list[list[str]]:
    """The German and the English sentences of the files ``{name}.{language}{ending}``; InputError if counts differ.

    Args:
        members: contents of the archive's files.
        name, ending: parts of the file names.
        sentences: function from the lines of a file to its sentences.
    """
    files = [f"{name}.{language}{ending}" for language in LANGUAGES]
    german, english = (sentences(split_lines(members[file], f"{file} in the archive")) for file in files)
    if len(german) != len(english) or not german:
        counts = f"{len(german)} German and {len(english)} English lines"
        raise InputError(f"{name} in the archive has {counts}; download it again")
    return [german, english]


def split_archive(archive: str | Path) -> Texts:
    """The raw German and English lines of train, valid and test.

    Raises:
        InputError: the archive is missing, truncated or not IWSLT'14's, or its two sides differ in length.
    """
    members = read_members(archive)
    pair = _sides(members, TRAIN, "", train_lines)
    tests = [_sides(members, name, ".xml", test_lines) for name in TEST]
    kept = clean_indices(*map(tokenise_lines, pair, LANGUAGES))
    valid = kept[VALID_EVERY - 1 :: VALID_EVERY]
    train = sorted({*kept}.difference(valid))
    return {
        "train": [[side[index] for index in train] for side in pair],
        "valid": [[side[index] for index in valid] for side in pair],
        "test": [[line for lines in sides for line in lines] for sides in zip(*tests, strict=True)],
    }


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fairseq-lot iwslt14``."""
    parser.add_argument("--archive", required=True, metavar="PATH", help="de-en.tgz or 2014-01.tgz")
    parser.add_argument("--url", metavar="URL", help="download the archive from here if it does not exist")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for raw {train,valid,test}.{de,en}")


def run(args: Namespace) -> None:
    """Run ``fairseq-lot iwslt14``: write the raw text of the splits.

    The archive is downloaded first if it is missing and ``--url`` is given.
    """
    if args.url is not None and not Path(args.archive).exists():
        fetch(args.url, args.archive)
    splits = split_archive(args.archive)
    with output_folder(args.out) as folder:
        write_splits(folder, splits, LANGUAGES)
    counts = ", ".join(f"{split} {len(sides[0]):,}" for split, sides in splits.items())
    print(f"IWSLT'14 De-En pairs: {counts}", file=sys.stderr)
