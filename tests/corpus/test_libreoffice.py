"""LibreOffice's help: split by pages, joined within pages."""

import pytest

from fairseq_lot.cli import main
from fairseq_lot.corpus import documents
from fairseq_lot.corpus.libreoffice import read_pages, split_pages
from tests.conftest import ROOT

PAIRS = ROOT / "examples" / "libreoffice-help" / "pairs.tsv.xz"
PAIR = ("--source", "de", "--target", "en")


@pytest.fixture
def pages(tmp_path):
    """A file of 64 pages of 1 to 7 paragraphs; a paragraph is its language and page, its number and three letters."""
    lines = []
    for page in range(64):
        for number in range(page % 7 + 1):
            lines.append("\t".join([f"page{page}", *(f"{side}{page} {number} x y z" for side in ("de", "en"))]))
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


def lines_of(path):
    return path.read_text(encoding="utf-8").splitlines()


def test_every_page_is_in_one_split(pages, tmp_path):
    assert main(["libreoffice", str(pages), "--out", str(tmp_path / "raw")]) == 0
    names = {split: lines_of(tmp_path / "raw" / f"{split}.names") for split in ("train", "valid", "test")}
    kept = [set(found) for found in names.values()]
    assert [len(found) for found in kept] == [54, 2, 8] and set.union(*kept) == {f"page{i}" for i in range(64)}
    for split, found in names.items():
        for language in ("de", "en"):
            lines = lines_of(tmp_path / "raw" / f"{split}.{language}")
            assert [line.split()[0] for line in lines] == [name.replace("page", language) for name in found]


def test_pages_of_a_chapter_share_a_name(pages, tmp_path):
    pages.write_text("".join(f"{'a/b' if 'page1' in line else 'c'}/{line}\n" for line in lines_of(pages)))
    for words, chapters in (((), False), (("--chapters",), True)):
        out = tmp_path / str(chapters)
        assert main(["libreoffice", str(pages), "--out", str(out), *words]) == 0
        names = {name for split in ("train", "valid", "test") for name in lines_of(out / f"{split}.names")}
        assert names == {"a/b", "c"} if chapters else len(names) == 64


def test_every_split_of_the_real_text_has_short_and_long_pages():
    pages = read_pages(PAIRS)
    words = {name: sum(len(english.split()) for _, english in pairs) for name, pairs in pages.items()}
    assert len(pages) == 2379 and sum(map(len, pages.values())) == 29531
    for names in split_pages(pages).values():
        lengths = sorted(words[name] for name in names)
        assert lengths[0] < 20 and lengths[-1] > 1_500


def test_long_pairs_are_left_out(pages, tmp_path):
    pages.write_text(pages.read_text() + "page1\t" + "de1 " * 6 + "\t" + "en1 " * 6 + "\n")
    assert main(["libreoffice", str(pages), "--out", str(tmp_path / "raw"), "--max-words", "5"]) == 0
    found = [line for split in ("train", "valid", "test") for line in lines_of(tmp_path / "raw" / f"{split}.en")]
    assert len(found) == len(pages.read_text().splitlines()) - 1 and max(len(line.split()) for line in found) == 5


def test_a_smaller_test_set_is_spread_evenly_over_the_whole_one(pages, tmp_path):
    for words, out in (((), "all"), (("--test-pairs", "3"), "few"), (("--test-pairs", "999"), "enough")):
        assert main(["libreoffice", str(pages), "--out", str(tmp_path / out), *words]) == 0
    every, few, enough = (lines_of(tmp_path / out / "test.de") for out in ("all", "few", "enough"))
    assert few == [every[0], every[len(every) // 3], every[2 * len(every) // 3]] and enough == every
    assert len(lines_of(tmp_path / "few" / "test.names")) == 3
    assert lines_of(tmp_path / "few" / "train.de") == lines_of(tmp_path / "all" / "train.de")


@pytest.mark.parametrize("line", ["page\tonly two", "page\t\tenglish", "page\tde\ten\tmore"])
def test_a_line_of_another_form_is_refused_in_one_line(pages, tmp_path, refused, line):
    pages.write_text(pages.read_text() + line + "\n")
    number = len(pages.read_text().splitlines())
    refused(
        ["libreoffice", pages, "--out", tmp_path / "raw"], f"{pages}, line {number}: expected page, German and English"
    )
    assert not (tmp_path / "raw").exists()


def test_a_limit_that_leaves_no_pair_is_refused_in_one_line(pages, tmp_path, refused):
    refused(["libreoffice", pages, "--out", tmp_path / "raw", "--max-words", "1"], "no pair is left for train")


@pytest.fixture
def encoded(pages, tmp_path):
    """A folder like encode's, with words as pieces, and the raw folder with the names of the pages."""
    assert main(["libreoffice", str(pages), "--out", str(tmp_path / "raw")]) == 0
    folder = tmp_path / "bpe"
    (folder / "text").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        for language in ("de", "en"):
            text = (tmp_path / "raw" / f"{split}.{language}").read_text()
            (folder / f"{split}.{language}").write_text(text)
            if split == "test":
                (folder / "text" / f"{split}.{language}").write_text(text)
    return folder, tmp_path / "raw"


def paragraphs(lines):
    """Page and number of each paragraph in each document."""
    words = [line.split() for line in lines]
    return [[(one[i][2:], one[i + 1]) for i in range(0, len(one), 5)] for one in words]


def test_paragraphs_are_joined_only_within_pages(encoded):
    folder, raw = encoded
    before = {split: paragraphs(lines_of(folder / f"{split}.en")) for split in ("train", "valid", "test")}
    assert main(["documents", str(folder), *PAIR, "--names", str(raw), "--tests", "10", "1000"]) == 0
    for split, times in (("train", 3), ("valid", 1), ("test", 1), ("test1", 1), ("test2", 1)):
        sides = [lines_of(folder / f"{split}.{language}") for language in ("de", "en")]
        found = [paragraphs(lines) for lines in sides]
        assert found[0] == found[1] and all(len({page for page, _ in document}) == 1 for document in found[0])
        one_by_one = before[split.rstrip("12")]
        assert sorted(sum(found[0], [])) == sorted(sum(one_by_one, []) * times)
        if split.startswith("test"):
            assert lines_of(folder / "text" / f"{split}.en") == sides[1]
    longest = [
        max(len(line.split()) for line in lines_of(folder / f"{name}.de")) for name in ("test", "test1", "test2")
    ]
    assert longest == [5, 10, 35], "one, two and up to seven paragraphs"
    assert len(lines_of(folder / "test2.de")) == 8, "whole pages"


def test_the_seed_decides_where_pages_are_cut(encoded, monkeypatch, tmp_path):
    folder, raw = encoded
    monkeypatch.setattr(documents, "SHORTEST", 5)
    monkeypatch.setattr(documents, "LONGEST", 40)
    files, found = {path: path.read_text() for path in folder.glob("*.*")}, []
    for seed in "112":
        (folder / documents.MARK).unlink(missing_ok=True)
        for path, text in files.items():
            path.write_text(text)
        assert main(["documents", str(folder), *PAIR, "--names", str(raw), "--seed", seed]) == 0
        found.append((folder / "train.de").read_text())
    assert found[0] == found[1] != found[2]


def test_names_of_another_text_are_refused_in_one_line(encoded, refused):
    folder, raw = encoded
    (raw / "valid.names").write_text("page1\n")
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    refused(["documents", folder, *PAIR, "--names", raw], f"{raw / 'valid'}.names has 1 lines, valid has")
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before
