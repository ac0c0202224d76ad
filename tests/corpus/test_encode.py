"""The joint BPE: exact round trip, determinism, and one clear line for every bad input."""

import os
import re
import sys
from itertools import pairwise

import pytest
import sentencepiece
from fairseq.data.data_utils import post_process

from fairseq_lot.cli import main
from fairseq_lot.corpus.encode import MODEL_NAME, encode_lines, learn_bpe
from fairseq_lot.corpus.parallel import read_splits
from fairseq_lot.errors import InputError

LANGUAGES = ("de", "en")
LINES = {
    "de": [
        "ich habe &quot; gut &quot; gesagt , d&apos; accord ?",
        "  ﬁnale  straße mit\u00a0leerraum \u2028 und ½ ﬀ ",
        "das kostet 1,000 &#91; euro &#93; -- &lt; s &gt; !",
        "schön , daß du um 10 : 05 uhr kommst …",
    ],
    "en": [
        "i said &quot; good &quot; , didn &apos;t i ?",
        "a ﬁne  street with\u00a0a space \u2028 and ½ ﬀ",
        "that costs 1,000 &#91; euros &#93; &amp; more @-@ or less !",
        "nice that you &apos;re coming at 10 : 05 ...",
    ],
}
BY_SUBWORD_NMT = ("--bpe", "subword_nmt")


@pytest.fixture
def folder(tmp_path):
    """A tokenised folder with the awkward lines in every split."""
    path = tmp_path / "text"
    path.mkdir()
    for split in ("train", "valid", "test"):
        for language, lines in LINES.items():
            (path / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def words(folder, tmp_path):
    """The encode command with its required options; options appended to it override them."""
    pair = ["--source", "de", "--target", "en"]
    return ["encode", "--text", str(folder), "--out", str(tmp_path / "out"), "--vocab-size", "120", *pair]


@pytest.mark.parametrize(
    ("options", "kind"), [((), "sentencepiece"), ((*BY_SUBWORD_NMT, "--vocab-size", "20"), "subword_nmt")]
)
def test_decoding_gives_back_the_tokens_and_nothing_is_printed(options, kind, words, tmp_path, capfd):
    assert main([*words, *options]) == 0
    assert capfd.readouterr() == ("", "")
    for language, lines in LINES.items():
        expected = [" ".join(line.split()) for line in lines]
        for split in ("train", "valid", "test"):
            path = tmp_path / "out" / f"{split}.{language}"
            pieces = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
            assert [post_process(line, kind) for line in pieces] == expected
            assert any("@@ " in line for line in pieces) == (kind == "subword_nmt")
        tokens = (tmp_path / "out" / "text" / f"test.{language}").read_text(encoding="utf-8")
        assert tokens == "".join(f"{line}\n" for line in expected)
    if kind == "subword_nmt":
        assert (tmp_path / "out" / "code").read_text().startswith("#version")
    else:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out" / MODEL_NAME))
        assert processor.get_piece_size() == 120


def test_characters_outside_the_alphabet_survive_encoding():
    model = learn_bpe(LINES["en"], 80)
    (pieces,) = encode_lines(model, ["zebra 語 ß"])
    assert post_process(pieces, "sentencepiece") == "zebra 語 ß"


def test_an_escape_and_its_suffix_can_be_one_piece():
    (pieces,) = encode_lines(learn_bpe(["it &apos;s"] * 3, 21), ["it &apos;s"])
    assert "\u2581&apos;s" in pieces.split()


def test_same_text_gives_the_same_bytes(words, tmp_path):
    for name, threads in (("a", "1"), ("b", "2")):
        assert main([*words, "--out", str(tmp_path / name), "--threads", threads]) == 0
    for file in (tmp_path / "a").glob("*.*"):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


@pytest.mark.parametrize("line, mark", [("a@@ b", "@@"), ("b @@", "@@"), ("a</s> b", "</s>"), ("<unk>", "<unk>")])
def test_subword_nmt_refuses_text_that_looks_like_its_pieces_or_symbols(line, mark, folder, words, refused):
    (folder / "valid.en").write_text(f"good\n{line}\ngood\ngood\n")
    refused([*words, *BY_SUBWORD_NMT], f"valid, en: '{line}' contains '{mark}'")


def test_without_subword_nmt_the_error_names_the_command_that_installs_it(words, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "subword_nmt", None)
    refused([*words, *BY_SUBWORD_NMT], "run 'pip install subword-nmt'")


def test_pairs_held_out_from_a_prefix_are_spread_evenly_and_not_empty(tmp_path):
    for language in LANGUAGES:
        (tmp_path / f"all.{language}").write_text("".join(f"{language} {n}\n" if n % 10 else "\n" for n in range(40)))
    splits = read_splits([tmp_path / "all", 4, 3], LANGUAGES, allow_empty={"train"})
    assert [len(sides[0]) for sides in splits.values()] == [33, 4, 3]
    for source, target in splits.values():
        assert [line[2:] for line in source] == [line[2:] for line in target]
    held = [line for split in ("valid", "test") for line in splits[split][0]]
    assert "" not in held and not {*held} & {*splits["train"][0]}
    places = sorted(int(line.split()[1]) for line in splits["valid"][0])
    assert all(6 <= later - earlier <= 14 for earlier, later in pairwise(places))


@pytest.mark.parametrize("count", ["0", "36", "100"])
def test_too_many_held_out_pairs_are_refused(count, tmp_path):
    for language in LANGUAGES:
        (tmp_path / f"all.{language}").write_text("".join(f"{n}\n" if n else "\n" for n in range(37)))
    with pytest.raises(InputError, match=f"cannot hold out {count} of the 36 pairs in .*all.de"):
        read_splits([tmp_path / "all", count, "1"], LANGUAGES, allow_empty={"train"})


def test_existing_folder_keeps_its_other_files(words, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes").write_text("mine")
    (out / "train.de").write_text("half a li")
    assert main(words) == 0
    assert (out / "notes").read_text() == "mine"
    assert len((out / "train.de").read_text(encoding="utf-8").splitlines()) >= 4


@pytest.mark.parametrize("stale", ["raw", "code", "documents.txt"])
def test_a_folder_that_would_keep_parts_of_another_text_is_refused(stale, words, tmp_path, refused):
    (tmp_path / "out" / stale).mkdir(parents=True)
    refused(words, f"out has {stale} of another text or BPE; give a new --out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [stale]


# files, their new content (None: they are removed), and the error
DAMAGES = {
    "missing": (["valid.en"], None, "valid.en is missing"),
    "empty": (["valid.de", "valid.en"], "", "valid.de has no lines"),
    "counts": (["test.de"], "eine\n" * 5, "test.de has 5 lines but"),
    "encoding": (["train.de"], b"gut\nsch\xf6n\ngut\ngut\n", "train.de, line 2: not valid UTF-8"),
    "source": (["test.de"], "gut\ngut\n \u00a0\ngut\n", "test.de, line 3: empty line"),
    "target": (["train.en"], "\ngood\ngood\ngood\n", "train.en, line 1: empty line"),
    "reserved": (["train.en"], "good\na \u2581 b\ngood\ngood\n", "train, en: 'a ▁ b' contains '▁'"),
    "padding": (["train.en"], "good\na<pad>\ngood\ngood\n", "train, en: 'a<pad>' contains '<pad>'"),
    "reference": (["raw/test.en"], "One line.\n", "raw/test.en has 1 lines but the test set has 4"),
}


@pytest.mark.parametrize(("names", "content", "expected"), DAMAGES.values(), ids=DAMAGES)
def test_bad_text_is_refused_in_one_line(names, content, expected, folder, words, tmp_path, refused):
    (folder / "raw").mkdir()
    for name in names:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(words, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


@pytest.mark.parametrize("size", ["0", "-3"])
def test_a_vocabulary_without_a_piece_is_refused(size, words, tmp_path, refused):
    refused([*words, "--vocab-size", size], f"--vocab-size must be at least 1, got {size}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "size", "expected"),
    [
        ((), "1", "does not fit this text: Vocabulary size is smaller than required_chars. 3 vs "),
        ((), "10", "does not fit this text: Vocabulary size is smaller than required_chars. 10 vs "),
        ((), "100000", "does not fit this text: Vocabulary size too high (100000). Please set it to a value <= "),
        (BY_SUBWORD_NMT, "1000", "is too large for this text; give at most "),
    ],
)
def test_the_size_that_the_message_gives_works(options, size, expected, words, tmp_path, refused):
    line = refused([*words, *options, "--vocab-size", size], f"--vocab-size {size} {expected}")
    assert "character_coverage" not in line, "encode has no such option"
    assert not (tmp_path / "out").exists()
    fitting = re.match(r"\d+", line.partition(expected)[2])[0]
    assert main([*words, *options, "--vocab-size", fitting]) == 0


def test_bad_folders_are_refused_in_one_line(folder, words, tmp_path, refused):
    (tmp_path / "file").write_text("")
    refused([*words, "--text", tmp_path / "nowhere"], "is not a folder")
    refused([*words, "--out", folder], "is the folder of the input")
    refused([*words, "--out", tmp_path / "file"], "cannot write")
    refused([*words, "--out", tmp_path / "file" / "out"], "cannot write")


def test_a_new_folder_appears_in_one_rename(words, tmp_path, monkeypatch, refused):
    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fails)
    refused(words, "Input/output error")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


def test_a_failed_write_leaves_nothing(words, tmp_path, monkeypatch, refused):
    def full_disk(folder, *_):
        (folder / "train.de").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fairseq_lot.corpus.encode.write_splits", full_disk)
    refused(words, "No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]
