"""Parallel text in files {train,valid,test}.{source,target}, checked when read, complete when written."""

import contextlib
import os
import shutil
import tempfile
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from fairseq_lot.errors import InputError
from fairseq_lot.output.files import read_lines

SPLITS = ("train", "valid", "test")
Texts = dict[str, list[list[str]]]  # of each split the lines of both sides


def language_code(text: str) -> str:
    """A language code from the command line, two or three letters."""
    if not (text.isalpha() and len(text) in (2, 3)):
        raise ArgumentTypeError(f"expected a language code such as en, got {text!r}")
    return text


def add_text_arguments(parser: ArgumentParser, name: str, kind: str) -> None:
    """Add what text a command reads, as option ``name``, and its two languages."""
    parser.add_argument(
        f"--{name}",
        required=True,
        nargs="+",
        metavar=("DIR", "PREFIX"),
        help=f"{kind} text: a folder of {{train,valid,test}} per language, or a prefix for each of the three; a number "
        "in place of the second or third holds out as many pairs of the first, evenly spread",
    )
    for side in ("source", "target"):
        text = f"{side} language, by which the file names end"
        parser.add_argument(f"--{side}", required=True, type=language_code, metavar="LANG", help=text)


def read_splits(
    sources: Sequence[str | Path],
    languages: Sequence[str],
    *,
    out: str | Path | None = None,
    allow_empty: Collection[str] = (),
) -> Texts:
    """Read train, valid and test, each as :func:`read_parallel` does.

    Args:
        sources: a folder, or a prefix for each split. A number in place of the second or third: so many pairs of the
            first, evenly spread, which are not trained on.
        out: what will be written, which must be another folder.
        allow_empty: splits whose empty lines are kept.

    Raises:
        InputError: the text is not as it must be.
    """
    if len(set(languages)) != 2:
        raise InputError(f"both languages are {languages[0]!r}; give two different ones")
    if len(sources) == 1:
        folder = Path(sources[0])
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder; give one that holds {{train,valid,test}} in two languages")
        sources = [folder / split for split in SPLITS]
    prefixes = [Path(str(source)) for source in sources]
    written = [] if out is None else [Path(out).resolve(), Path(out, "raw").resolve()]
    if any(prefix.name in SPLITS and prefix.parent.resolve() in written for prefix in prefixes):
        raise InputError(f"--out {out} is the folder that is read; choose another one")
    if len(sources) != len(SPLITS):
        raise InputError(f"{len(sources)} names of text; give one folder, or a prefix for each of {', '.join(SPLITS)}")
    texts: Texts = {}
    for split, name in zip(SPLITS, map(str, sources), strict=True):
        if split != "train" and name.isdecimal():
            texts["train"], texts[split] = _hold_out(texts["train"], int(name), f"{sources[0]}.{languages[0]}")
        else:
            texts[split] = read_parallel(name, languages, allow_empty=split in allow_empty)
    return texts


def _hold_out(sides: list[list[str]], count: int, path: str) -> tuple[list[list[str]], list[list[str]]]:
    """Part a text in two, of which the second has ``count`` evenly spread pairs, none with an empty side."""
    full = [number for number, pair in enumerate(zip(*sides, strict=True)) if all(pair)]
    if not 1 <= count < len(full):
        raise InputError(f"cannot hold out {count} pairs of the {len(full)} in {path}; give a number in between")
    held = {full[number * len(full) // count] for number in range(count)}
    kept, out = (
        [[line for number, line in enumerate(side) if (number in held) == wanted] for side in sides]
        for wanted in (False, True)
    )
    return kept, out


def read_parallel(prefix: str | Path, languages: Sequence[str], *, allow_empty: bool = False) -> list[list[str]]:
    """Read two files, their lines paired and their spaces single.

    Every run of white space (also no-break spaces, as fairseq splits on them) becomes one space.

    Args:
        prefix: the files are ``{prefix}.{language}``, or compressed, with ``.xz`` or ``.gz`` behind.
        allow_empty: keep empty lines, for a caller that drops such pairs.

    Raises:
        InputError: a file is missing or without lines, a line is not UTF-8, binary or empty, counts differ.
    """
    paths = []
    for language in languages:
        there = [path for end in ("", ".xz", ".gz") if (path := Path(f"{prefix}.{language}{end}")).is_file()]
        if not there:
            raise InputError(f"{prefix}.{language} is missing; the text needs {prefix}.{{{','.join(languages)}}}")
        paths.append(there[0])
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
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.", suffix=".part") as temporary:
            new = Path(temporary, "new")
            new.mkdir()
            yield new
            if out.exists():
                shutil.copytree(new, out, copy_function=os.replace, dirs_exist_ok=True)
            else:
                os.replace(new, out)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"cannot write {out}: {reason}; choose another --out or free space") from error


def write_splits(folder: Path, texts: Texts, languages: Sequence[str]) -> None:
    """Write ``{split}.{language}`` for each side of each split: UTF-8 with Unix line ends."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, sides in texts.items():
        for language, lines in zip(languages, sides, strict=True):
            with open(folder / f"{split}.{language}", "w", encoding="utf-8", newline="\n") as file:
                file.writelines(line + "\n" for line in lines)
