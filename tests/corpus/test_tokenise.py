"""Moses tokens, cleaning of train and valid only, and the raw test set beside them."""

from pathlib import Path

import pytest

from fairseq_lot.cli import main
from fairseq_lot.corpus.tokenise import clean_indices, tokenise_lines

GERMAN = ["Das ist ein Haus.", "Es ist schön, nicht wahr?", "Er sagt: „Gut“.", "Ja."]
ENGLISH = ["That's a house.", "It is nice, isn't it?", 'He says: "Good" & more.', "Yes, of course, why not?"]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "raw text"
    path.mkdir()
    for split in ("train", "valid", "test"):
        (path / f"{split}.de").write_text("\n".join(GERMAN) + "\n", encoding="utf-8")
        (path / f"{split}.en").write_text("\n".join(ENGLISH) + "\n", encoding="utf-8")
    return path


def lines_of(path):
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def run_tokenise(folder, out, *options):
    return main(["tokenise", "--raw", str(folder), "--out", str(out), "--source", "de", "--target", "en", *options])


def test_moses_tokens_in_lower_case():
    assert tokenise_lines(ENGLISH[:3], "en") == [
        "that &apos;s a house .",
        "it is nice , isn &apos;t it ?",
        "he says : &quot; good &quot; &amp; more .",
    ]
    assert tokenise_lines(["Es ist schön, Herr Dr. Groß!"], "de") == ["es ist schön , herr dr. groß !"]


def test_cleaning_rules():
    pairs = [("a b", "a b"), ("", "a"), ("a", ""), ("a b", "a b c"), ("a b", "a b c d"), ("a b c d", "a b")]
    assert clean_indices(*zip(*pairs, strict=True)) == [0, 3]
    assert clean_indices(["a " * 175, "a " * 176], ["b " * 175, "b " * 176]) == [0]
    assert clean_indices(["a b", "a b c"], ["a b c d", "a b c"], max_ratio=2, max_tokens=3) == [1]


def test_cleaning_leaves_the_test_set_alone(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_tokenise(folder, out) == 0
    error = capsys.readouterr().err.splitlines()
    assert error == ["cleaning dropped 1 pairs of train", "cleaning dropped 1 pairs of valid"]
    assert len(lines_of(out / "train.de")) == len(lines_of(out / "valid.en")) == 3
    assert len(lines_of(out / "test.de")) == len(lines_of(out / "test.en")) == 4
    assert lines_of(out / "raw" / "test.en") == ENGLISH
    assert lines_of(out / "raw" / "test.de") == GERMAN


def test_no_clean_keeps_every_pair(folder, tmp_path, capsys):
    assert run_tokenise(folder, tmp_path / "out", "--no-clean") == 0
    assert capsys.readouterr().err == ""
    assert len(lines_of(tmp_path / "out" / "train.de")) == 4


def test_an_empty_side_is_cleaned_in_train_and_refused_elsewhere(folder, tmp_path, capsys):
    (folder / "train.de").write_text("\n".join(["", *GERMAN[1:]]) + "\n", encoding="utf-8")
    assert run_tokenise(folder, tmp_path / "clean") == 0
    assert len(lines_of(tmp_path / "clean" / "train.de")) == 2
    capsys.readouterr()
    assert run_tokenise(folder, tmp_path / "out", "--no-clean") == 2
    assert "train.de, line 1: empty line" in capsys.readouterr().err
    (folder / "test.en").write_text("\n".join([*ENGLISH[:3], " "]) + "\n", encoding="utf-8")
    assert run_tokenise(folder, tmp_path / "out") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "test.en, line 4: empty line" in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [("tokenise", "--raw"), ("encode", "--vocab-size", "40", "--text")])
@pytest.mark.parametrize(
    "prefixes", [("train", "valid", "test"), ("../all", "1", "../raw text/test"), ("../all", "1", "raw/test")]
)
def test_text_that_would_be_replaced_is_refused(command, prefixes, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    for side in ("de", "en"):
        for path in (f"../all.{side}", f"raw/test.{side}"):
            Path(path).parent.mkdir(exist_ok=True)
            Path(path).write_bytes(Path(f"test.{side}").read_bytes())
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    assert main([*command, *prefixes, "--out", str(folder), "--source", "de", "--target", "en"]) == 2
    assert "is the folder that is read" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before


@pytest.mark.parametrize(
    "name, content, options, expected",
    [
        ("test.de", b"gut\nsch\xf6n\ngut\ngut\n", (), "test.de, line 2: not valid UTF-8"),
        ("valid.de", b"gut\n", (), "valid.de has 1 lines but"),
        ("train.de", None, (), "train.de is missing"),
        ("test.de", b"gut\n\x01\ngut\ngut\n", (), "test.de, line 2: no token in it"),
        ("train.en", b"a\n" * 3 + b"b\n", ("--max-ratio", "1"), "passes the cleaning"),
        ("train.de", b"a\n" * 4, ("--max-ratio", "0.5"), "--max-ratio must be at least 1, got 0.5"),
        ("train.de", b"a\n" * 4, ("--max-ratio", "nan"), "--max-ratio must be at least 1, got nan"),
        ("train.de", b"a\n" * 4, ("--max-tokens", "0"), "--max-tokens must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line(name, content, options, expected, folder, tmp_path, capsys):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    assert run_tokenise(folder, tmp_path / "out", *options) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and expected in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw text"]
