"""From sentences to pieces and back: which encoder and files are used, and what is guessed from the dictionary."""

import io
import sys
from argparse import Namespace

import pytest
from fairseq.data import Dictionary
from sacremoses import MosesDetokenizer

from fairseq_lot.corpus.encode import MODEL_NAME, encode_lines, learn_bpe
from fairseq_lot.corpus.moses import tokenise_lines
from fairseq_lot.errors import InputError
from fairseq_lot.pretrained.checkpoint import Checkpoint
from fairseq_lot.pretrained.text import Text, _is_raw, piece_kind

RAW = [
    "Der alte Mann liest ein gutes Buch.",
    'Die Frau sagt: "Das ist ein alter Mann!"',
    "Er geht's langsam an, die Frau - nicht.",
]
TOKENS = tokenise_lines(RAW, "de")


def dictionary_of(lines):
    """The dictionary that fairseq-preprocess makes of these lines."""
    dictionary = Dictionary()
    for line in lines:
        for piece in line.split():
            dictionary.add_symbol(piece)
    dictionary.finalize()
    return dictionary


def encoded(text, lines):
    return [" ".join(pieces) for pieces in text.encode(lines)]


def model(data, lines, targets=None, **encoders):
    """The parts of a loaded model that ``Text`` reads; its dictionaries are of these lines."""
    source = dictionary_of(lines)
    target = source if targets is None else dictionary_of(targets)
    cfg = Namespace(data=str(data), source_lang="de", target_lang="en")
    return Namespace(task=Namespace(cfg=cfg, source_dictionary=source, target_dictionary=target), encoders=encoders)


@pytest.fixture(scope="module")
def sentencepiece():
    """The bytes of a sentencepiece model, and ``TOKENS`` in its pieces."""
    pieces = learn_bpe(TOKENS, 40)
    return pieces, encode_lines(pieces, TOKENS)


@pytest.fixture(scope="module")
def subwords():
    """Codes of subword-nmt, and ``TOKENS`` in their pieces."""
    learn = pytest.importorskip("subword_nmt.learn_bpe", reason="pip install subword-nmt")
    apply = pytest.importorskip("subword_nmt.apply_bpe")
    codes = io.StringIO()
    learn.learn_bpe(io.StringIO("\n".join(TOKENS)), codes, 15)
    codes.seek(0)
    bpe = apply.BPE(codes)
    return codes.getvalue(), [bpe.process_line(line) for line in TOKENS]


def test_a_folder_made_by_encode_needs_no_options(sentencepiece, tmp_path):
    (tmp_path / MODEL_NAME).write_bytes(sentencepiece[0])
    text = Text.of(model(tmp_path, sentencepiece[1]))
    assert encoded(text, RAW) == sentencepiece[1], "as encode made the corpus"
    english = MosesDetokenizer("en")
    assert [text.decode(line) for line in sentencepiece[1]] == [english.detokenize(line.split()) for line in TOKENS]
    assert text.encode(["", "  "]) == [[], []]
    tokenised = Text.of(model(tmp_path, sentencepiece[1]), tokenised=True)
    assert encoded(tokenised, TOKENS) == sentencepiece[1]
    assert [tokenised.decode(line) for line in sentencepiece[1]] == TOKENS


@pytest.mark.parametrize("name", ["code", "codes", "bpecodes", "bpe.codes"])
def test_codes_of_subword_nmt_are_found_in_the_folder(name, subwords, tmp_path):
    (tmp_path / name).write_text(subwords[0], encoding="utf-8")
    text = Text.of(model(tmp_path, subwords[1]))
    assert any("@@ " in line for line in subwords[1])
    assert encoded(text, RAW) == subwords[1]
    assert text.decode(subwords[1][0]) == "der alte mann liest ein gutes buch."


def test_whole_words_need_no_file(tmp_path):
    text = Text.of(model(tmp_path, TOKENS, ["the@@ re", "a house"]))
    assert encoded(text, RAW) == TOKENS
    assert text.decode("hou@@ se .") == "house.", "the target may have pieces of another kind"


def test_an_option_wins_over_the_checkpoint_and_the_checkpoint_over_the_folder(subwords, sentencepiece, tmp_path):
    codes, lines = subwords
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    data.mkdir()
    elsewhere.mkdir()
    (elsewhere / "mine").write_text(codes, encoding="utf-8")
    saved = {"_name": "subword_nmt", "bpe_codes": str(elsewhere / "mine"), "bpe_separator": "@@"}
    (data / "code").write_text("#version: 0.2\nq q\n", encoding="utf-8")  # splits words into letters
    by_folder = encoded(Text.of(model(data, lines), tokenised=True), TOKENS)
    by_checkpoint = encoded(Text.of(model(data, lines, bpe=saved), tokenised=True), TOKENS)
    by_option = encoded(Text.of(model(data, lines), bpe_codes=elsewhere / "mine", tokenised=True), TOKENS)
    assert by_checkpoint == by_option == lines and by_folder[0].startswith("d@@ e@@ r ")
    # the checkpoint's file was moved into the folder
    (elsewhere / "mine").rename(data / "mine")
    assert encoded(Text.of(model(data, lines, bpe=saved), tokenised=True), TOKENS) == lines
    model_file = tmp_path / "spm"
    model_file.write_bytes(sentencepiece[0])
    sampled = {"_name": "sentencepiece", "sentencepiece_model": str(model_file)}
    sampled |= {"sentencepiece_enable_sampling": True, "sentencepiece_alpha": 0.5}
    text = Text.of(model(data, sentencepiece[1], bpe=sampled), tokenised=True)
    assert encoded(text, TOKENS) == sentencepiece[1], "sampling is only for training"
    # an option names another encoder than the checkpoint
    (data / MODEL_NAME).write_bytes(sentencepiece[0])
    text = Text.of(model(data, sentencepiece[1], bpe=saved), bpe="sentencepiece")
    assert encoded(text, RAW) == sentencepiece[1]


def test_sentencepiece_of_untokenised_text_needs_no_tokenizer(tmp_path):
    raw = ["Der Mann, die Frau, das Kind.", "Das Kind, der Mann, die Frau."]
    pieces = learn_bpe(raw * 9, 40)
    (tmp_path / MODEL_NAME).write_bytes(pieces)
    lines = encode_lines(pieces, raw)
    text = Text.of(model(tmp_path, lines))
    assert text.tokenizer is None and encoded(text, raw) == lines
    assert text.decode(lines[0]) == raw[0]
    assert Text.of(model(tmp_path, lines), tokenizer="moses").tokenizer is not None


@pytest.mark.parametrize(
    ("counts", "raw"),
    [
        ({",": 50, ".": 40, "\u2581": 20}, True),
        ({"\u2581,": 50, "\u2581.": 40, ",": 2, ".": 9}, False),
        ({",": 50, ".": 40, "\u2581": 100}, False),  # Moses tokens, whose marks are pieces of their own
        ({",": 100, ".": 100, "\u2581a": 100}, False),  # all counts are equal, so nothing is known
        ({",": 1, ".": 1, "\u2581a": 5000}, False),
    ],
)
def test_punctuation_without_a_space_before_it_shows_untokenised_text(counts, raw):
    dictionary = Dictionary()
    for symbol, count in counts.items():
        dictionary.add_symbol(symbol, n=count)
    assert _is_raw(dictionary) == raw


def test_the_tokenizer_comes_from_the_options_or_else_from_the_checkpoint(sentencepiece, tmp_path):
    (tmp_path / MODEL_NAME).write_bytes(sentencepiece[0])
    lines, moses, dashes, none = sentencepiece[1], "buch-buch .", "buch @-@ buch .", "buch-buch."
    with_dashes = {"_name": "moses", "moses_no_dash_splits": False}
    bpe = {"_name": "sentencepiece", "sentencepiece_model": str(tmp_path / MODEL_NAME)}
    for saved, options, expected in (
        ({}, {}, moses),
        ({"tokenizer": with_dashes}, {}, dashes),
        ({"tokenizer": with_dashes}, {"tokenizer": "space"}, none),
        ({"bpe": bpe}, {}, none),  # a training with a BPE but no tokenizer
        ({"bpe": bpe, "tokenizer": with_dashes}, {}, dashes),
        ({"bpe": bpe}, {"bpe": "sentencepiece"}, moses),
    ):
        (pieces,) = Text.of(model(tmp_path, lines, **saved), **options).encode(["Buch-buch."])
        assert "".join(pieces).replace("\u2581", " ").strip() == expected, (saved, options)


@pytest.mark.parametrize(
    "words, expected",
    [
        ("ein haus", "das &quot; haus-boot &quot;"),
        ("ein haus " * 1000 + "ẞ", "das &quot; haus-boot &quot;"),
        ("ein Haus", "Das &quot; Haus-Boot &quot;"),
        ('ein " haus', 'das " haus-boot "'),
        ("ein ' haus", 'das " haus-boot "'),
        ("ein @-@ haus", "das &quot; haus @-@ boot &quot;"),
    ],
    ids=["lower", "lower-with-a-slip", "cased", "not-escaped", "not-escaped-apostrophe", "dashes"],
)
def test_case_escapes_and_dashes_are_guessed_from_the_dictionary(words, expected, tmp_path):
    (pieces,) = Text.of(model(tmp_path, [words])).encode(['Das "Haus-Boot"'])
    assert " ".join(pieces) == expected


@pytest.mark.parametrize(
    "lines, kind",
    [
        (["\u2581das \u2581hau s"], "sentencepiece"),
        (["d a s \u2581 h a u s"], "sentencepiece"),
        (["das hau@@ s"], "subword_nmt"),
        (["das haus"], None),
        (["das haus"] * 1000 + ["\u2581 x@@ @@"], None),
        (["@@ das haus"], None),
        ([], None),
    ],
    ids=["sentencepiece", "characters", "subword-nmt", "words", "words-with-marks", "word-of-marks", "empty"],
)
def test_the_kind_of_pieces_is_guessed_from_the_dictionary(lines, kind):
    assert piece_kind(dictionary_of(lines)) == kind


def test_bad_encoders_are_refused_with_one_line(sentencepiece, subwords, tmp_path, monkeypatch, capsys):
    data = tmp_path / "data"
    data.mkdir()
    paths = {name: tmp_path / name for name in ("codes", "counts", "three", "garbage")}
    paths["codes"].write_text(subwords[0])
    paths["counts"].write_bytes(b"e r 12\nd er 3\n")
    paths["three"].write_bytes(b"#version: 0.2\na b c\n")
    paths["garbage"].write_bytes(b"\xff\xfe\x00")
    of_models, of_codes = sentencepiece[1], subwords[1]
    monkeypatch.setitem(sys.modules, "fastBPE", None)
    for lines, options, words in [
        (of_models, {}, [data, MODEL_NAME, "--bpe-codes"]),
        (of_codes, {}, [data, "code", "--bpe-codes"]),
        (of_codes, {"bpe": "magic"}, ["--bpe magic"]),
        (of_codes, {"tokenizer": "magic", "bpe_codes": paths["codes"]}, ["--tokenizer magic"]),
        (of_codes, {"bpe_codes": tmp_path / "gone"}, ["--bpe-codes", "gone"]),
        (TOKENS, {"bpe_codes": paths["codes"]}, ["--bpe-codes", "--bpe"]),
        (of_codes, {"bpe_codes": paths["three"]}, [paths["three"], "invalid line"]),
        (of_codes, {"bpe_codes": paths["garbage"]}, [paths["garbage"]]),
        (of_models, {"bpe_codes": paths["garbage"]}, [paths["garbage"]]),
        (of_codes, {"bpe_codes": paths["counts"]}, [paths["counts"], "pip install fastBPE"]),
        (of_models, {"bpe": "subword_nmt", "bpe_codes": paths["codes"]}, [paths["codes"], data, "dict.de.txt"]),
        (TOKENS, {"bpe": "gpt2", "bpe_codes": paths["codes"]}, ["--bpe-codes"]),
    ]:
        with pytest.raises(InputError) as caught:
            Text.of(model(data, lines), **options)
        message = str(caught.value)
        assert "\n" not in message and all(str(word) in message for word in words), (options, message)
    assert capsys.readouterr() == ("", "")


def test_the_encoders_of_a_training_are_read_from_new_and_early_checkpoints():
    bpe = {"_name": "subword_nmt", "bpe_codes": "code"}
    assert Checkpoint({"cfg": {"bpe": bpe, "tokenizer": None}}).encoders() == {"bpe": bpe, "tokenizer": {}}
    assert Checkpoint({"cfg": {"bpe": {"_name": None}}}).encoders() == {"bpe": {}, "tokenizer": {}}
    early = Checkpoint({"args": Namespace(bpe="subword_nmt", bpe_codes="code")})
    named = {"_name": "subword_nmt", "bpe": "subword_nmt", "bpe_codes": "code"}
    assert early.encoders() == {"bpe": named, "tokenizer": {}}


@pytest.mark.parametrize("code", ["en", "eng", "en_XX"])
def test_the_tokenizer_knows_a_language_by_each_of_its_codes(code, tmp_path):
    loaded = model(tmp_path, TOKENS)
    loaded.task.cfg.source_lang = code
    assert Text.of(loaded, tokenizer="moses").tokenizer.encode("It isn't.").split()[1:3] == ["isn", "&apos;t"]
