"""Read, check and write parallel text in files {train,valid,test}.{source,target}."""

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
Texts = dict[str, list[list[str]]]  # for each split the lines of both languages


def language_code(text: str) -> str:
    """A language code from the command line: two or three letters, else ArgumentTypeError."""
    if not (text.isalpha() and len(text) in (2, 3)):
        raise ArgumentTypeError(f"expected a language code such as en, got {text!r}")
    return text


def add_text_arguments(parser: ArgumentParser, name: str, kind: str) -> None:
    """Add the options for the text that a command reads: ``--NAME``, ``--source`` and ``--target``.

    Args:
        parser: parser of the command.
        name: name of the option for the text.
        kind: an adjective for the text in the help, such as "tokenised".
    """
    parser.add_argument(
        f"--{name}",
        required=True,
        nargs="+",
        metavar=("DIR", "PREFIX"),
        help=f"{kind} text: a folder with {{train,valid,test}}.LANG, or a prefix for each of the three; a number N "
        "instead of the second or third prefix holds out N pairs of the first, evenly spread",
    )
    for side in ("source", "target"):
        text = f"{side} language: the ending of the file names"
        parser.add_argument(f"--{side}", required=True, type=language_code, metavar="LANG", help=text)


def read_splits(
    sources: Sequence[str | Path],
    languages: Sequence[str],
    *,
    out: str | Path | None = None,
    allow_empty: Collection[str] = (),
) -> Texts:
    """Read train, valid and test by :func:`read_parallel`.

    Args:
        sources: a folder, or a prefix for each split. A number N instead of the second or third prefix takes N pairs
            out of train, evenly spread.
        languages: source and target language.
        out: the folder that the command will write; it must be another one.
        allow_empty: splits that may have empty lines, which are kept.

    Returns:
        For each split the lines of both languages.

    Raises:
        InputError: bad arguments, or :func:`read_parallel` refuses the text.
    """
    if len(set(languages)) != 2:
        raise InputError(f"both languages are {languages[0]!r}; give two different ones")
    if len(sources) == 1:
        folder = Path(sources[0])
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder; give one with {{train,valid,test}} in two languages")
        sources = [folder / split for split in SPLITS]
    prefixes = [Path(str(source)) for source in sources]
    written = [] if out is None else [Path(out).resolve(), Path(out, "raw").resolve()]
    if any(prefix.name in SPLITS and prefix.parent.resolve() in written for prefix in prefixes):
        raise InputError(f"--out {out} is the folder of the input; choose another one")
    if len(sources) != len(SPLITS):
        raise InputError(f"got {len(sources)} prefixes; give one folder, or a prefix for each of {', '.join(SPLITS)}")
    texts: Texts = {}
    for split, name in zip(SPLITS, map(str, sources), strict=True):
        if split != "train" and name.isdecimal():
            texts["train"], texts[split] = _hold_out(texts["train"], int(name), f"{sources[0]}.{languages[0]}")
        else:
            texts[split] = read_parallel(name, languages, allow_empty=split in allow_empty)
    return texts


def _hold_out(sides: list[list[str]], count: int, path: str) -> tuple[list[list[str]], list[list[str]]]:
    """Take ``count`` evenly spread pairs out of a text; pairs with an empty side stay.

    Returns:
        The remaining pairs, then the pairs taken out, each as the lines of both languages.
    """
    full = [number for number, pair in enumerate(zip(*sides, strict=True)) if all(pair)]
    if not 1 <= count < len(full):
        raise InputError(f"cannot hold out {count} of the {len(full)} pairs in {path}; hold out and leave at least one")
    held = {full[number * len(full) // count] for number in range(count)}
    kept, out = (
        [[line for number, line in enumerate(side) if (number in held) == wanted] for side in sides]
        for wanted in (False, True)
    )
    return kept, out


def read_parallel(prefix: str | Path, languages: Sequence[str], *, allow_empty: bool = False) -> list[list[str]]:
    """Read two files whose lines translate each other.

    Each run of white space becomes one space, no-break spaces included: fairseq splits at them.

    Args:
        prefix: the files are ``{prefix}.{language}``, optionally compressed as ``.xz`` or ``.gz``.
        languages: of the two files.
        allow_empty: keep empty lines, for a caller that drops such pairs.

    Returns:
        The lines of each file.

    Raises:
        InputError: a file is missing or empty, a line is not UTF-8, binary or empty, or the line counts differ.
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
            raise InputError(f"{path}, line {binary}: contains a NUL character; give a text file")
        if not allow_empty and "" in lines:
            raise InputError(f"{path}, line {lines.index('') + 1}: empty line; remove it from both languages")
    return sides


@contextlib.contextmanager
def output_folder(out: str | Path) -> Iterator[Path]:
    """Context manager: an empty folder whose files move to ``out`` if the block ends without an error.

    A missing ``out`` appears in one rename. In an existing one, new files replace files of the same name; others stay.

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
    """Write ``{split}.{language}`` for each split and language, in UTF-8 with Unix line ends."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, sides in texts.items():
        for language, lines in zip(languages, sides, strict=True):
            with open(folder / f"{split}.{language}", "w", encoding="utf-8", newline="\n") as file:
                file.writelines(line + "\n" for line in lines)
