"""The joint BPE: exact round trip, determinism, and one clear line for every bad input."""

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
IN_GERMAN_AND_ENGLISH = ("--source", "de", "--target", "en")
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


@pytest.fixture
def folder(tmp_path):
    """A tokenised folder with the awkward lines in every split."""
    path = tmp_path / "text"
    path.mkdir()
    for split in ("train", "valid", "test"):
        for language, lines in LINES.items():
            (path / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def encode(folder, out, threads=1):
    words = ["--text", str(folder), "--out", str(out), "--vocab-size", "120", "--threads", str(threads)]
    return main(["encode", *words, *IN_GERMAN_AND_ENGLISH])


def run_encode(folder, out, capsys, *options):
    """Return the exit code and the lines on stderr."""
    code = main(
        ["encode", "--text", str(folder), "--out", str(out), "--vocab-size", "120", *IN_GERMAN_AND_ENGLISH, *options]
    )
    return code, capsys.readouterr().err.splitlines()


def test_decoding_gives_back_the_tokens(folder, tmp_path):
    out = tmp_path / "out"
    assert encode(folder, out) == 0
    for split in ("train", "valid", "test"):
        for language, lines in LINES.items():
            pieces = (out / f"{split}.{language}").read_text(encoding="utf-8").removesuffix("\n").split("\n")
            assert [post_process(line, "sentencepiece") for line in pieces] == [" ".join(s.split()) for s in lines]
    for language, lines in LINES.items():
        expected = "".join(" ".join(line.split()) + "\n" for line in lines)
        assert (out / "text" / f"test.{language}").read_text(encoding="utf-8") == expected
    processor = sentencepiece.SentencePieceProcessor(model_file=str(out / MODEL_NAME))
    assert processor.get_piece_size() == 120


def test_characters_outside_the_alphabet_survive_encoding():
    model = learn_bpe(LINES["en"], 80)
    (pieces,) = encode_lines(model, ["zebra 語 ß"])
    assert post_process(pieces, "sentencepiece") == "zebra 語 ß"


def test_escape_and_its_suffix_can_be_one_piece():
    (pieces,) = encode_lines(learn_bpe(["it &apos;s"] * 3, 21), ["it &apos;s"])
    assert "\u2581&apos;s" in pieces.split()


def test_same_text_gives_the_same_bytes(folder, tmp_path):
    for name, threads in (("a", 1), ("b", 2)):
        assert encode(folder, tmp_path / name, threads) == 0
    for file in (tmp_path / "a").glob("*.*"):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_other_languages_and_quiet_output(folder, tmp_path, capfd):
    for split in ("train", "valid", "test"):
        (folder / f"{split}.de").rename(folder / f"{split}.fr")
    command = ["encode", "--text", str(folder), "--out", str(tmp_path / "out"), "--vocab-size", "120"]
    assert main([*command, "--source", "fr", "--target", "en"]) == 0
    assert (tmp_path / "out" / "test.fr").is_file()
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


def test_subword_nmt_gives_back_the_tokens_too_and_says_nothing(folder, tmp_path, capsys):
    code, lines = run_encode(folder, tmp_path / "out", capsys, "--bpe", "subword_nmt", "--vocab-size", "20")
    assert code == 0 and lines == []
    assert (tmp_path / "out" / "code").read_text().startswith("#version")
    for language, wanted in LINES.items():
        pieces = (tmp_path / "out" / f"test.{language}").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        assert any("@@ " in line for line in pieces)
        assert [post_process(line, "subword_nmt") for line in pieces] == [" ".join(line.split()) for line in wanted]


@pytest.mark.parametrize("line", ["a@@ b", "b @@"])
def test_subword_nmt_refuses_its_own_mark(line, folder, tmp_path, capsys):
    (folder / "valid.en").write_text(f"good\n{line}\ngood\ngood\n")
    code, lines = run_encode(folder, tmp_path / "out", capsys, "--bpe", "subword_nmt")
    assert code == 2 and len(lines) == 1 and "valid.en, line 2: holds '@@'" in lines[0]


def test_subword_nmt_says_how_many_merges_there_are(folder, tmp_path, capsys):
    code, lines = run_encode(folder, tmp_path / "out", capsys, "--bpe", "subword_nmt", "--vocab-size", "1000")
    assert code == 2 and len(lines) == 1 and "--vocab-size 1000 is too large for this text; give at most " in lines[0]
    most = lines[0].split()[-1]
    assert run_encode(folder, tmp_path / "out", capsys, "--bpe", "subword_nmt", "--vocab-size", most) == (0, [])


def test_without_the_package_there_is_one_line_with_the_command(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "subword_nmt", None)
    code, lines = run_encode(folder, tmp_path / "out", capsys, "--bpe", "subword_nmt")
    assert code == 2 and len(lines) == 1 and "run 'pip install subword-nmt'" in lines[0]


def test_prefixes_and_held_out_pairs(tmp_path):
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
    with pytest.raises(InputError, match=f"cannot hold out {count} pairs of the 36 in .*all.de"):
        read_splits([tmp_path / "all", count, "1"], LANGUAGES, allow_empty={"train"})


def test_existing_folder_keeps_its_other_files(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes").write_text("mine")
    (out / "train.de").write_text("half a li")
    assert encode(folder, out) == 0
    assert (out / "notes").read_text() == "mine"
    assert len((out / "train.de").read_text(encoding="utf-8").splitlines()) >= 4


# what a file holds instead, and what the error says; None: the file is gone
DAMAGES = {
    "missing": ("valid.en", None, "valid.en is missing"),
    "counts": ("test.de", "eine\n" * 5, "test.de has 5 lines but"),
    "encoding": ("train.de", b"gut\nsch\xf6n\ngut\ngut\n", "train.de, line 2: not valid UTF-8"),
    "source": ("test.de", "gut\ngut\n \u00a0\ngut\n", "test.de, line 3: empty line"),
    "target": ("train.en", "\ngood\ngood\ngood\n", "train.en, line 1: empty line"),
    "reserved": ("train.en", "good\na \u2581 b\ngood\ngood\n", "train.en, line 2: holds '▁'"),
    "reference": ("raw/test.en", "One line.\n", "raw/test.en has 1 lines but the test set has 4"),
}


def damage(folder, name, content):
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(("name", "content", "expected"), DAMAGES.values(), ids=DAMAGES)
def test_bad_text_is_one_line(name, content, expected, folder, tmp_path, capsys):
    damage(folder, name, content)
    code, lines = run_encode(folder, tmp_path / "out", capsys)
    assert code == 2 and len(lines) == 1
    assert expected in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


def test_text_without_lines_is_one_line(folder, tmp_path, capsys):
    for language in LINES:
        damage(folder, f"valid.{language}", "")
    code, lines = run_encode(folder, tmp_path / "out", capsys)
    assert code == 2 and len(lines) == 1 and "valid.de has no lines" in lines[0]


@pytest.mark.parametrize(
    "size, expected",
    [
        ("0", "--vocab-size must be at least 1, got 0"),
        ("-3", "--vocab-size must be at least 1, got -3"),
        ("10", "--vocab-size 10 does not fit this text: Vocabulary size is smaller than required_chars. 10 vs "),
        (
            "100000",
            "--vocab-size 100000 does not fit this text: Vocabulary size too high (100000). Please set it ",
        ),
    ],
)
def test_bad_vocabulary_is_one_line(size, expected, folder, tmp_path, capfd):
    command = ["encode", "--text", str(folder), "--out", str(tmp_path / "out"), "--vocab-size", size]
    code = main([*command, *IN_GERMAN_AND_ENGLISH])
    lines = capfd.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1 and expected in lines[0]
    assert not (tmp_path / "out").exists()


def test_bad_folders_are_one_line(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for text, out, expected in (
        (tmp_path / "nowhere", tmp_path / "out", "is not a folder"),
        (folder, folder, "is the folder that is read"),
        (folder, tmp_path / "file", "cannot write"),
        (folder, tmp_path / "file" / "out", "cannot write"),
    ):
        code, lines = run_encode(text, out, capsys)
        assert code == 2 and len(lines) == 1 and expected in lines[0]


def test_a_failed_write_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    def full_disk(folder, *_):
        (folder / "train.de").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fairseq_lot.corpus.encode.write_splits", full_disk)
    assert encode(folder, tmp_path / "out") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]
