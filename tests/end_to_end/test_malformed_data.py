"""Damaged data folders, text files and sweeps are refused with one line, and nothing changes.

tests/corpus and tests/evaluation do the same with archives, translations and results.
"""

import json
import random
import shutil

import pytest

from tests.end_to_end.conftest import refuse_and_keep
from tests.end_to_end.test_malformed_checkpoints import words_of

GARBAGE = random.Random(1).randbytes(3000)
ANY = {
    "empty": lambda whole: b"",
    "garbage": lambda whole: GARBAGE,
    "half": lambda whole: whole[: len(whole) // 2],
}
BINARY = ANY | {
    "first-byte": lambda whole: whole[:1],
    "without-its-end": lambda whole: whole[:-1],
    "garbage-of-the-same-size": lambda whole: random.Random(2).randbytes(len(whole)),
    "text": lambda whole: b"this is a text\n" * 40,
}
DICTIONARIES = ANY | {
    "doubled": lambda whole: whole + whole,
    "longer": lambda whole: whole + b"more 1\n",
    "without-counts": lambda whole: b"\n".join(line.split()[0] for line in whole.splitlines()),
    "counts-that-are-words": lambda whole: b"\n".join(line.split()[0] + b" many" for line in whole.splitlines()),
}
TEXT = ANY | {
    "latin-1": lambda whole: whole + "größe\n".encode("latin-1"),
    "utf-16": lambda whole: whole.decode().encode("utf-16"),
    "line-of-spaces": lambda whole: b" \t \n" * whole.count(b"\n"),
    "nul-bytes": lambda whole: b"\0\n" * whole.count(b"\n"),
}


def damaged(data, file, damage):
    """Copy a folder of the corpus and damage ``file`` in the copy; return the copy."""
    shutil.copytree(data / file.parent.name, file.parent, ignore=shutil.ignore_patterns("text"))
    file.write_bytes(damage(file.read_bytes()))
    return file.parent


@pytest.mark.fast_if(lambda split, name, damage: name == ("de.idx" if split == "test" else "en.bin"))
@pytest.mark.parametrize("damage", BINARY)
@pytest.mark.parametrize("name", ["de.bin", "de.idx", "en.bin", "en.idx"])
@pytest.mark.parametrize("split", ["test", "valid"])
def test_damaged_binary_files_are_refused(split, name, damage, data, stock_checkpoint, tmp_path, capsys):
    folder = damaged(data, tmp_path / "bin" / f"{split}.de-en.{name}", BINARY[damage])
    words = words_of("check" if split == "test" else "diagnose", folder, stock_checkpoint, tmp_path)
    refuse_and_keep(capsys, tmp_path, *words, naming=[f"{split}.de-en.{name[:2]}"])


@pytest.mark.fast_if(lambda command, damage: command == "check" or damage == "half")
@pytest.mark.parametrize("damage", DICTIONARIES)
@pytest.mark.parametrize("command", ["check", "diagnose", "calibrate"])
def test_damaged_dictionaries_are_refused(command, damage, data, lot_checkpoint, tmp_path, capsys):
    folder = damaged(data, tmp_path / "bin" / "dict.de.txt", DICTIONARIES[damage])
    words = words_of(command, folder, lot_checkpoint, tmp_path)
    refuse_and_keep(capsys, tmp_path, *words, naming=[folder])


@pytest.mark.parametrize("damage", TEXT)
@pytest.mark.parametrize(
    "command, name", [("tokenise --raw", "raw/train.de"), ("encode --vocab-size 300 --text", "text/test.en")]
)
def test_damaged_text_is_refused(command, name, damage, data, tmp_path, capsys):
    folder = damaged(data, tmp_path / name, TEXT[damage])
    refuse_and_keep(capsys, tmp_path, *command.split(), folder, "--out", tmp_path / "out")


POINT = {
    "attention": "softmax", "options": {"softmax_prior": "alibi"}, "base": "a", "epoch": 1, "calibration_seconds": None,
    "loss": 2.0, "tokens": 10, "bleu": {"score": 30.0, "low": 29.0, "high": 31.0, "signature": "s"}, "seed": 1,
    "commit": "c", "threads": 1, "device": "CPU",
}  # fmt: skip
# lines that are no points: text, other JSON, a missing field, a field of another type, NaN
LINES = [GARBAGE, b"hello\n", b"3\n", b"null\n", b"{}\n", b"[" * 100_000 + b"\n", b'{"a": 1}\n']
LINES += [json.dumps({name: POINT[name] for name in POINT if name != left_out}).encode() for left_out in POINT]
LINES += [json.dumps(POINT | {name: ["a", "list"]}).encode() for name in POINT]
LINES += [json.dumps(POINT | change).encode() for change in ({"bleu": "30"}, {"loss": "2.0"}, {"loss": float("nan")})]


def test_damaged_lines_of_a_sweep_are_refused(data, stock_checkpoint, tmp_path, capsys):
    words = ("sweep", data / "bin", "--path", stock_checkpoint, "--out", tmp_path, "--try", "softmax", "--no-bleu")
    for line in LINES:
        (tmp_path / "sweep.jsonl").write_bytes(line)
        refuse_and_keep(capsys, tmp_path, *words, naming=["sweep.jsonl, line 1"])
