"""Read files, and write them so that each is complete or absent."""

import contextlib
import fcntl
import gzip
import itertools
import lzma
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from fairseq_lot.errors import InputError, first_line


def refuse_same(paths: Mapping[str, str | Path | None]) -> None:
    """Raise InputError if two options name the same file: one would overwrite the other.

    Args:
        paths: the file by the name of its option; None: the option is not given.
    """
    given = [(option, path) for option, path in paths.items() if path is not None]
    for (one, path), (other, same) in itertools.combinations(given, 2):
        if Path(path).resolve() == Path(same).resolve():
            raise InputError(f"{one} and {other} are both {path}; give another file")


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: str = "w") -> Iterator[IO]:
    """Context manager: open a file that appears under its name if the block ends without an error.

    The contents go to a temporary file in the same folder; it is synced and renamed at the end, removed after an error.
    So a kill or a full disk never leaves half a file.

    Args:
        path: the file; a missing folder is created, a link is followed. A special file, such as /dev/stdout, is
            written directly.
        mode: ``"w"`` (UTF-8 text) or ``"wb"``.

    Raises:
        InputError: the folder or the file cannot be written (no permission, full disk, ...).
    """
    path, encoding = Path(path), None if "b" in mode else "utf-8"
    if path.exists() and not path.is_file():
        temporary = path
    else:
        path = Path(os.path.realpath(path))
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode, encoding=encoding) as file:
            yield file
            if temporary != path:
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)
    except OSError as error:
        if error.filename is not None and Path(error.filename) not in (path, temporary, *path.parents):
            raise InputError(f"{first_line(error)}; {path} was not changed") from error
        raise InputError(f"cannot write {path}: {error.strerror or error}; nothing was changed there") from error
    finally:
        if temporary != path:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


@contextlib.contextmanager
def locked(path: str | Path) -> Iterator[int]:
    """Context manager: hold the lock of a file; wait while another process has it.

    Args:
        path: the file; it is created if it is missing.

    Yields:
        The file descriptor. A child process that inherits it keeps the lock if this process is killed.
    """
    with open(path, "a") as lock:
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 text file, without line ends; ``.xz`` and ``.gz`` are decompressed.

    Raises:
        InputError: the file is missing or damaged, or a line is not UTF-8; the message has its number.
    """
    return split_lines(read_bytes(path), path)


def read_bytes(path: str | Path) -> bytes:
    """The contents of a file; ``.xz`` and ``.gz`` are decompressed. InputError if it is missing or damaged."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        return {".xz": lzma.decompress, ".gz": gzip.decompress}.get(path.suffix, bytes)(raw)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def split_lines(raw: bytes, name: str | Path) -> list[str]:
    """The lines of UTF-8 text, without line ends and byte-order mark; InputError if a line is not UTF-8.

    Args:
        raw: the text.
        name: name of the file, for the message.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{name}, line {number}: not valid UTF-8; convert it with iconv") from None
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []
