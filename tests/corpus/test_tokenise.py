"""Moses tokens, cleaning of train and valid only, and the raw test set beside them."""

from pathlib import Path

import pytest

from fairseq_lot.cli import main
from fairseq_lot.corpus.moses import detokenise, tokenise_lines
from fairseq_lot.corpus.tokenise import clean_indices

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


@pytest.fixture
def words(folder, tmp_path):
    """The tokenise command with its required options."""
    return ["tokenise", "--raw", str(folder), "--out", str(tmp_path / "out"), "--source", "de", "--target", "en"]


def test_moses_tokens_in_lower_case():
    assert tokenise_lines(ENGLISH[:3], "en") == [
        "that &apos;s a house .",
        "it is nice , isn &apos;t it ?",
        "he says : &quot; good &quot; &amp; more .",
    ]
    assert tokenise_lines(["Es ist schön, Herr Dr. Groß!"], "de") == ["es ist schön , herr dr. groß !"]


@pytest.mark.parametrize("code", ["en", "EN", "eng", "en_XX", "eng_Latn", "en-GB"])
def test_every_code_of_a_language_selects_its_rules(code):
    assert tokenise_lines(ENGLISH[1:2], code) == ["it is nice , isn &apos;t it ?"]
    assert detokenise(["it is nice , isn &apos;t it ?"], language=code) == ["it is nice, isn't it?"]


def test_an_unknown_code_selects_no_rules_of_a_language():
    assert tokenise_lines(ENGLISH[1:2], "target") == ["it is nice , isn &apos; t it ?"]


def test_cleaning_drops_empty_long_and_unequal_pairs():
    pairs = [("a b", "a b"), ("", "a"), ("a", ""), ("a b", "a b c"), ("a b", "a b c d"), ("a b c d", "a b")]
    assert clean_indices(*zip(*pairs, strict=True)) == [0, 3]
    assert clean_indices(["a " * 175, "a " * 176], ["b " * 175, "b " * 176]) == [0]
    assert clean_indices(["a b", "a b c"], ["a b c d", "a b c"], max_ratio=2, max_tokens=3) == [1]


def test_cleaning_leaves_the_test_set_alone(words, tmp_path, capfd):
    out = tmp_path / "out"
    assert main(words) == 0
    assert capfd.readouterr().err == "cleaning dropped 1 pairs of train\ncleaning dropped 1 pairs of valid\n"
    assert len(lines_of(out / "train.de")) == len(lines_of(out / "valid.en")) == 3
    assert len(lines_of(out / "test.de")) == len(lines_of(out / "test.en")) == 4
    assert lines_of(out / "raw" / "test.en") == ENGLISH
    assert lines_of(out / "raw" / "test.de") == GERMAN


@pytest.mark.parametrize(("options", "kept"), [(["--max-ratio", "9"], 4), (["--max-tokens", "7"], 1)])
def test_the_limits_of_cleaning_can_be_typed(options, kept, words, tmp_path):
    assert main([*words, *options]) == 0
    assert len(lines_of(tmp_path / "out" / "train.de")) == kept


def test_no_clean_keeps_every_pair(words, tmp_path, capfd):
    assert main([*words, "--no-clean"]) == 0
    assert capfd.readouterr().err == ""
    assert len(lines_of(tmp_path / "out" / "train.de")) == 4


def test_an_empty_side_is_cleaned_in_train_and_refused_elsewhere(folder, words, tmp_path, refused):
    (folder / "train.de").write_text("\n".join(["", *GERMAN[1:]]) + "\n", encoding="utf-8")
    assert main([*words, "--out", str(tmp_path / "clean")]) == 0
    assert len(lines_of(tmp_path / "clean" / "train.de")) == 2
    refused([*words, "--no-clean"], "train.de, line 1: empty line")
    (folder / "test.en").write_text("\n".join([*ENGLISH[:3], " "]) + "\n", encoding="utf-8")
    refused(words, "test.en, line 4: empty line")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [("tokenise", "--raw"), ("encode", "--vocab-size", "40", "--text")])
@pytest.mark.parametrize(
    "prefixes", [("train", "valid", "test"), ("../all", "1", "../raw text/test"), ("../all", "1", "raw/test")]
)
def test_an_output_that_would_replace_its_input_is_refused(command, prefixes, folder, refused, monkeypatch):
    monkeypatch.chdir(folder)
    for side in ("de", "en"):
        for path in (f"../all.{side}", f"raw/test.{side}"):
            Path(path).parent.mkdir(exist_ok=True)
            Path(path).write_bytes(Path(f"test.{side}").read_bytes())
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    words = [*command, *prefixes, "--out", folder, "--source", "de", "--target", "en"]
    refused(words, "is the folder of the input")
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before


@pytest.mark.parametrize(
    "name, content, options, expected",
    [
        ("test.de", b"gut\nsch\xf6n\ngut\ngut\n", (), "test.de, line 2: not valid UTF-8"),
        ("valid.de", b"gut\n", (), "valid.de has 1 lines but"),
        ("train.de", None, (), "train.de is missing"),
        ("test.de", b"gut\n\x01\ngut\ngut\n", (), r"test: in the pair '\x01' and "),
        ("train.en", b"a\n" * 3 + b"b\n", ("--max-ratio", "1"), "passes the cleaning"),
        ("train.de", b"a\n" * 4, ("--max-ratio", "0.5"), "--max-ratio must be at least 1, got 0.5"),
        ("train.de", b"a\n" * 4, ("--max-ratio", "nan"), "--max-ratio must be at least 1, got nan"),
        ("train.de", b"a\n" * 4, ("--max-tokens", "0"), "--max-tokens must be at least 1, got 0"),
    ],
)
def test_bad_input_is_refused_in_one_line(name, content, options, expected, folder, words, tmp_path, refused):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    refused([*words, *options], expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw text"]
