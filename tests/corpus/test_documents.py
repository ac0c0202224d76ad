"""Sentences joined to documents: each sentence once, alike in both languages, up to the lengths asked for."""

import shutil

import pytest

from fairseq_lot.cli import main
from fairseq_lot.corpus import documents

SPLITS = {"train": 300, "valid": 40, "test": 21}
COMMAND = ["documents", "--source", "de", "--target", "en"]


@pytest.fixture
def folder(tmp_path):
    """Pieces, tokens and raw text as encode writes them; a sentence has 1 to 5 German and 7 to 11 English pieces."""
    path = tmp_path / "bpe"
    for part in ("text", "raw"):
        (path / part).mkdir(parents=True)
    for split, count in SPLITS.items():
        for language, more in (("de", 1), ("en", 7)):
            lines = [" ".join([f"{split}{i}"] + ["x"] * (i % 5 + more - 1)) for i in range(count)]
            (path / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    for name in ("text/test.de", "text/test.en", "raw/test.en"):
        (path / name).write_text("".join(f"Test{i}.\n" for i in range(SPLITS["test"])))
    return path


def join(folder, *words):
    return main([*COMMAND, str(folder), *words])


def sentences(path):
    """The names of the sentences in each document."""
    return [[word for word in line.split() if word != "x"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_every_sentence_is_in_one_document_and_documents_keep_to_the_limit_of_pieces(folder, split, monkeypatch):
    monkeypatch.setattr(documents, "PIECES", 60)
    before = [name for (name,) in sentences(folder / f"{split}.en")]
    assert join(folder) == 0
    found = sentences(folder / f"{split}.en")
    assert found == sentences(folder / f"{split}.de")
    names = [name for document in found for name in document]
    assert sorted(names) == sorted(before) and (names == before) == (split == "valid")
    pieces = [len(line.split()) for line in (folder / f"{split}.en").read_text().splitlines()]
    assert 50 < max(pieces) <= 60 and len({len(document) for document in found}) > 3


def test_the_test_set_its_tokens_and_its_raw_text_are_joined_to_each_size(folder):
    assert join(folder, "--tests", "1", "4", "16") == 0
    for name, size in (("test", 1), ("test1", 4), ("test2", 16)):
        expected = [[f"{i}" for i in range(start, min(21, start + size))] for start in range(0, 21, size)]
        for path in (f"{name}.de", f"{name}.en", f"text/{name}.de", f"text/{name}.en", f"raw/{name}.en"):
            found = [[x.lower().removeprefix("test").rstrip(".") for x in one] for one in sentences(folder / path)]
            assert found == expected, path


def test_documents_of_the_test_set_fit_into_a_models_positions(folder, monkeypatch):
    monkeypatch.setattr(documents, "POSITIONS", 40)
    assert join(folder, "--tests", "16") == 0
    pieces = [len(line.split()) for line in (folder / "test.en").read_text().splitlines()]
    assert 30 < max(pieces) <= 40


def test_a_sentence_that_is_too_long_is_a_document_of_its_own():
    sides = [["x " * 5, "x", "x " * 9, "x"], ["x"] * 4]
    found = [(span.start, span.stop) for span in documents.spans(sides, iter([4] * 4), 6)]
    assert found == [(0, 2), (2, 3), (3, 4)]


def test_the_seed_decides_which_sentences_are_joined(folder, tmp_path):
    found = []
    for number, seed in enumerate("112"):
        copy = shutil.copytree(folder, tmp_path / str(number))
        assert join(copy, "--seed", seed) == 0
        found.append((copy / "train.de").read_bytes())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("words", [[], ["--tests", "4"]])
def test_documents_are_not_joined_again(folder, refused, words):
    assert join(folder, *words) == 0
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    refused([*COMMAND, folder, *words], "documents.txt exists: these sentences are joined already")
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before


@pytest.mark.parametrize("words", [["--tests", "0"], ["--seed", "-1"]])
def test_bad_numbers_are_refused_in_one_line_and_nothing_changes(folder, words, refused):
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    refused([*COMMAND, folder, *words], f"{words[0]} must be at least")
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before
