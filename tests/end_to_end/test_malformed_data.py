"""Damaged data folders, text that is no text, archives and results with broken lines: one line, nothing changed."""

import gzip
import json
import random
import shutil
from dataclasses import MISSING, fields

import pytest

from fairseq_lot.evaluation.results import Label
from tests.corpus.test_iwslt14 import files, pack
from tests.end_to_end.conftest import contents, fairseq_lot, refuse

GARBAGE = random.Random(1).randbytes(3000)


def refuse_and_keep(capsys, folder, *words, naming=()):
    """Refused with one line, and no file in the folder appears or changes."""
    before = contents(folder)
    refuse(capsys, *words, naming=naming)
    assert contents(folder) == before


BINARY = {
    "empty": lambda whole: b"",
    "first-byte": lambda whole: whole[:1],
    "half": lambda whole: whole[: len(whole) // 2],
    "without-its-end": lambda whole: whole[:-1],
    "garbage": lambda whole: GARBAGE,
    "garbage-of-the-same-size": lambda whole: random.Random(2).randbytes(len(whole)),
    "text": lambda whole: b"this is a text\n" * 40,
}


@pytest.mark.fast_if(lambda split, name, damage: name == ("de.idx" if split == "test" else "en.bin"))
@pytest.mark.parametrize("damage", BINARY)
@pytest.mark.parametrize("name", ["de.bin", "de.idx", "en.bin", "en.idx"])
@pytest.mark.parametrize("split", ["test", "valid"])
def test_binary_files(split, name, damage, data, stock_checkpoint, tmp_path, capsys):
    folder = tmp_path / "bin"
    shutil.copytree(data / "bin", folder, ignore=shutil.ignore_patterns("train*", "text"))
    file = folder / f"{split}.de-en.{name}"
    file.write_bytes(BINARY[damage](file.read_bytes()))
    words = {
        "test": ("check", folder),
        "valid": ("diagnose", folder, "--path", stock_checkpoint, "--json", tmp_path / "o.json"),
    }[split]
    refuse_and_keep(capsys, tmp_path, *words)


DICTIONARIES = {
    "empty": lambda whole: b"",
    "garbage": lambda whole: GARBAGE,
    "half": lambda whole: whole[: len(whole) // 2],
    "doubled": lambda whole: whole + whole,
    "longer": lambda whole: whole + b"more 1\n",
    "without-counts": lambda whole: b"\n".join(line.split()[0] for line in whole.splitlines()),
    "counts-that-are-words": lambda whole: b"\n".join(line.split()[0] + b" many" for line in whole.splitlines()),
}


@pytest.mark.fast_if(lambda command, damage: command == "check" or damage == "half")
@pytest.mark.parametrize("damage", DICTIONARIES)
@pytest.mark.parametrize("command", ["check", "diagnose", "calibrate"])
def test_dictionaries(command, damage, data, stock_checkpoint, tmp_path, capsys):
    folder = tmp_path / "bin"
    shutil.copytree(data / "bin", folder, ignore=shutil.ignore_patterns("text"))
    file = folder / "dict.de.txt"
    file.write_bytes(DICTIONARIES[damage](file.read_bytes()))
    out = ("--out", tmp_path / "o.pt") if command == "calibrate" else ()
    refuse_and_keep(capsys, tmp_path, command, folder, "--path", stock_checkpoint, *out)


TEXT = {
    "garbage": lambda whole: GARBAGE,
    "latin-1": lambda whole: whole + "größe\n".encode("latin-1"),
    "utf-16": lambda whole: whole.decode().encode("utf-16"),
    "empty": lambda whole: b"",
    "shorter": lambda whole: whole[: len(whole) // 2],
    "line-of-spaces": lambda whole: b" \t \n" * whole.count(b"\n"),
    "nul-bytes": lambda whole: b"\0\n" * whole.count(b"\n"),
}


@pytest.mark.fast_if(lambda command, name, damage: name == ("test.en" if command == "encode" else "train.de"))
@pytest.mark.parametrize("damage", TEXT)
@pytest.mark.parametrize("name", ["train.de", "valid.en", "test.de", "test.en"])
@pytest.mark.parametrize("command", ["tokenise", "encode"])
def test_text(command, name, damage, data, tmp_path, capsys):
    source = {"tokenise": data / "raw", "encode": data / "text"}[command]
    folder = tmp_path / "in"
    shutil.copytree(source, folder)
    file = folder / name
    file.write_bytes(TEXT[damage](file.read_bytes()))
    words = {
        "tokenise": ("tokenise", "--raw", folder, "--out", tmp_path / "out"),
        "encode": ("encode", "--text", folder, "--out", tmp_path / "out", "--vocab-size", 300),
    }[command]
    refuse_and_keep(capsys, tmp_path, *words)


WHOLE = pack(files())
ARCHIVES = {
    "empty": b"",
    "garbage": GARBAGE,
    "garbage-in-gzip": gzip.compress(GARBAGE),
    "empty-archive": pack({}),
    "of-other-files": pack({"de-en/readme.txt": b"hello"}),
    "garbage-inside": pack({"texts/de/en/de-en.tgz": GARBAGE}),
    "members-of-garbage": pack(files() | {"de-en/train.tags.de-en.de": GARBAGE}),
    **{f"cut-{n}-tenths": WHOLE[: n * len(WHOLE) // 10] for n in range(1, 10)},
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives(name, tmp_path, capsys):
    (tmp_path / "de-en.tgz").write_bytes(ARCHIVES[name])
    refuse_and_keep(capsys, tmp_path, "iwslt14", "--archive", tmp_path / "de-en.tgz", "--out", tmp_path / "out")


def test_members_outside_of_the_archive_are_not_written(tmp_path):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    names = ("../../evil", str(tmp_path / "evil"), "de-en/../../evil")
    (folder / "de-en.tgz").write_bytes(pack(files() | dict.fromkeys(names, b"no")))
    fairseq_lot("iwslt14", "--archive", folder / "de-en.tgz", "--out", folder / "out")
    written = {path.relative_to(folder) for path in contents(tmp_path)}
    assert {path.parts[0] for path in written} == {"de-en.tgz", "out"} and not list(tmp_path.rglob("evil*"))


LINES = {
    "garbage": GARBAGE,
    "not-json": b"hello\n",
    "cut-off": b'{"dataset": "toy", "architec',
    "number": b"3\n",
    "list": b"[1, 2]\n",
    "null": b"null\n",
    "text": b'"text"\n',
    "empty-object": b"{}\n",
    "deep": b"[" * 100_000 + b"\n",
    "unknown-fields": b'{"a": 1}\n',
}


def spoiled(row, **changes):
    return (json.dumps({**row, **changes}) + "\n").encode()


def broken_rows(row):
    """One line for each field whose value is of another type, and for each that is missing."""
    wrong = {name: spoiled(row, **{name: ["a", "list"]}) for name in row}
    missing = {f"no-{name}": spoiled({key: row[key] for key in row if key != name}) for name in row}
    return {**LINES, **wrong, **missing}


SCORE = {"score": 30.0, "low": 29.0, "high": 31.0, "signature": "s", "base": 29.5, "delta": 0.5, "p": 0.2}
ROW = {
    "dataset": "unnamed", "experiment": "by hand", "backbone": "transformer", "system": "m",
    "settings": {"attention": "lot"}, "training": {}, "stage": "base", "seed": 1, "precision": "unknown",
    "sentences": 2, "tokenised": SCORE, "sacrebleu": SCORE, "reference": "raw",
    "bootstrap_samples": 10, "bootstrap_seed": 1, "device": "cpu", "seconds": 1.0, "commit": "c", "command": "x",
}  # fmt: skip
POINT = {
    "attention": "softmax", "options": {"softmax_prior": "alibi"}, "base": "a", "epoch": 1, "calibration_seconds": None,
    "loss": 2.0, "tokens": 10, "bleu": SCORE, "seed": 1, "commit": "c", "threads": 1, "device": "CPU",
}  # fmt: skip
LABEL = json.dumps({"system": "m", "settings": {"attention": "lot"}, "stage": "base"})
TRANSLATION = b"T-0\tb\nH-0\t-0.1\ta\nT-1\tb\nH-1\t-0.1\tb\n"


def scoring(folder, generated=TRANSLATION):
    (folder / "test.out").write_bytes(generated)
    (folder / "test.en").write_bytes(b"a\nb\n")
    files = ("--generated", folder / "test.out", "--tokenised-reference", folder / "test.en")
    return ("score", *files, "--label", LABEL, "--out", folder / "r.jsonl")


# what a label may leave out, a row may, too
MAY_BE_MISSING = {
    f"no-{field.name}" for field in fields(Label) if (field.default, field.default_factory) != (MISSING,) * 2
}


@pytest.mark.parametrize("command", ["score", "table"])
@pytest.mark.parametrize("name", [name for name in broken_rows(ROW) if name not in MAY_BE_MISSING])
def test_results(name, command, tmp_path, capsys):
    (tmp_path / "r.jsonl").write_bytes(spoiled(ROW) + broken_rows(ROW)[name])
    words = {"score": scoring(tmp_path), "table": ("table", tmp_path / "r.jsonl")}[command]
    refuse_and_keep(capsys, tmp_path, *words)


@pytest.mark.parametrize("name", [*broken_rows(POINT), "bleu-text", "bleu-of-words", "loss-text", "loss-nan"])
def test_sweeps(name, data, stock_checkpoint, tmp_path, capsys):
    more = {
        "bleu-text": spoiled(POINT, bleu="30"),
        "bleu-of-words": spoiled(POINT, bleu={**SCORE, "delta": "much"}),
        "loss-text": spoiled(POINT, loss="2.0"),
        "loss-nan": spoiled(POINT, loss=float("nan")),
    }
    (tmp_path / "sweep.jsonl").write_bytes({**broken_rows(POINT), **more}[name])
    words = ("sweep", data / "bin", "--path", stock_checkpoint, "--out", tmp_path, "--try", "softmax", "--no-bleu")
    refuse_and_keep(capsys, tmp_path, *words, naming=["sweep.jsonl, line 1"])


GENERATED = {
    "empty": b"",
    "garbage": GARBAGE,
    "no-sentence": b"hello\n",
    "cut-off": TRANSLATION[:-2],
    "without-its-last": TRANSLATION[:-12],
    "first-missing": TRANSLATION[TRANSLATION.index(b"T-1") :],
    "twice": TRANSLATION * 2,
    "one-more": TRANSLATION + b"T-2\tb\nH-2\t-0.1\ta\n",
    "no-number": TRANSLATION + b"H-x\t-0.1\ta\n",
    "huge-number": TRANSLATION + b"H-99999999999999999999\t-0.1\ta\n",
    "pieces": TRANSLATION.replace(b"\ta", "\t\u2581a".encode()),
    "latin-1": TRANSLATION.replace(b"\ta", b"\t\xe4"),
}


@pytest.mark.parametrize("name", GENERATED)
def test_translations(name, tmp_path, capsys):
    words = scoring(tmp_path, GENERATED[name])
    refuse_and_keep(capsys, tmp_path, *words)


@pytest.mark.parametrize("name", GENERATED)
def test_translations_of_the_base(name, tmp_path, capsys):
    (tmp_path / "base.out").write_bytes(GENERATED[name])
    refuse_and_keep(capsys, tmp_path, *scoring(tmp_path), "--baseline-generated", tmp_path / "base.out")


def test_translations_that_are_whole_are_scored(tmp_path):
    (tmp_path / "base.out").write_bytes(TRANSLATION)
    fairseq_lot(*scoring(tmp_path), "--baseline-generated", tmp_path / "base.out")
    assert (tmp_path / "r.jsonl").exists()
