"""Folders of parallel text: {train,valid,test}.{source,target}, checked when read, complete when written."""

import contextlib
import os
import shutil
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from pathlib import Path

from fairseq_lot.errors import InputError
from fairseq_lot.output.files import read_lines

SPLITS = ("train", "valid", "test")


def language_code(text: str) -> str:
    """A language code from the command line, two or three letters."""
    if not (text.isalpha() and len(text) in (2, 3)):
        raise ArgumentTypeError(f"expected a language code such as en, got {text!r}")
    return text


def add_language_arguments(parser) -> None:
    """Add ``--source`` and ``--target``, the two file name endings of a folder."""
    for name, language in (("source", "de"), ("target", "en")):
        text = f"{name} language (default: %(default)s)"
        parser.add_argument(f"--{name}", default=language, type=language_code, metavar="LANG", help=text)


def check_folders(read: str | Path, out: str | Path) -> None:
    """Refuse a missing input folder, an output that is no folder, and an output that is the input.

    Raises:
        InputError: naming the folder.
    """
    read, out = Path(read), Path(out)
    if not read.is_dir():
        raise InputError(f"{read} is not a folder; give one that holds {{train,valid,test}} in two languages")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} exists and is not a folder; choose another --out")
    if read.resolve() == out.resolve():
        raise InputError(f"--out {out} is the folder that is read; choose another one")


def read_parallel(folder: str | Path, split: str, languages: Sequence[str], *, allow_empty=False) -> list[list[str]]:
    """Read one split of a folder, its lines paired and its spaces single.

    Every run of white space (also no-break spaces, as fairseq splits on them) becomes one space.

    Args:
        folder: the folder of ``{split}.{language}`` files.
        split: ``train``, ``valid`` or ``test``.
        languages: source and target, the endings of the file names.
        allow_empty: keep empty lines, for a caller that drops such pairs.

    Returns:
        one list of lines per language, all of the same length.

    Raises:
        InputError: a file is missing or without lines, a line is not UTF-8, binary or empty, counts differ.
    """
    paths = [Path(folder) / f"{split}.{language}" for language in languages]
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path} is missing; the folder needs {{train,valid,test}}.{{{','.join(languages)}}}")
    sides = [[" ".join(line.split()) for line in read_lines(path)] for path in paths]
    counts = [len(lines) for lines in sides]
    if len(set(counts)) != 1:
        raise InputError(
            f"{paths[0]} has {counts[0]} lines but {paths[1]} has {counts[1]}; line n of one must translate line n "
            "of the other"
        )
    if not counts[0]:
        raise InputError(f"{paths[0]} has no lines; give at least one sentence pair")
    for path, lines in zip(paths, sides, strict=True):
        binary = next((number for number, line in enumerate(lines, start=1) if "\0" in line), None)
        if binary is not None:
            raise InputError(f"{path}, line {binary}: holds a NUL character, so it is no text; give a text file")
        if not allow_empty and "" in lines:
            raise InputError(f"{path}, line {lines.index('') + 1}: empty line; remove it from both languages")
    return sides


@contextlib.contextmanager
def output_folder(out: str | Path) -> Iterator[Path]:
    """Yield an empty folder whose files move to ``out`` only when the block ends without an error.

    A missing ``out`` appears in one rename. In an existing one the new files replace those of the
    same name and nothing else is touched.

    Raises:
        InputError: the folder or a file cannot be written (no permission, full disk, ...).
    """
    out = Path(out)
    temporary = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.", suffix=".part"))
        inner = temporary / "new"
        inner.mkdir()
        yield inner
        if out.exists():
            for file in sorted(path for path in inner.rglob("*") if path.is_file()):
                target = out / file.relative_to(inner)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
        else:
            os.replace(inner, out)
    except OSError as error:
        raise InputError(
            f"cannot write {out}: {error.strerror or error}; choose another --out or free space"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write lines as UTF-8 text with Unix line ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(line + "\n" for line in lines)
