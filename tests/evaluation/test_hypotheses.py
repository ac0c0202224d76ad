"""Reading the output of fairseq-generate."""

import lzma

import pytest

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.hypotheses import read_hypotheses


@pytest.fixture
def read(tmp_path):
    """A function that reads a text as fairseq-generate's output for this number of sentences."""

    def read(text, sentences=2):
        path = tmp_path / "generated.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_hypotheses(path, sentences)[0]

    return read


def test_hypotheses_are_in_the_order_of_the_corpus(write_generated, read):
    hypotheses = [f"sentence {number} ." for number in range(25)]
    path = write_generated("some.txt", hypotheses)
    assert read_hypotheses(path, 25)[0] == hypotheses
    lines = sorted(path.read_text(encoding="utf-8").splitlines())
    assert read("\n".join(lines) + "\n", 25) == hypotheses


def test_h_lines_are_enough_hypotheses_may_be_empty_and_spaces_are_normalised(read):
    assert read("H-1\t-0.5\t\nH-0\t-inf\t a  b\u2028c @@ \n") == ["a b c @@", ""]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 whole H- lines, the last of sentence 0, but the reference has 2 lines"),
        ("2024-01-01 | INFO | fairseq_cli.generate | loading\nGenerate test\n", "has 0 whole H- lines"),
        ("H-0\t-1\ta\n", "has 1 whole H- lines, the last of sentence 0, but the reference has 2 lines"),
        ("H-0\t-1\ta\nH-1\t-1\tb", "has 1 whole H- lines, the last of sentence 0, but the reference has 2"),
        ("H-0\t-1\ta\nH-1\t-1\n", "has 1 whole H- lines, the last of sentence 0"),
        ("H-999999999\t-1\tc\n", "the last of sentence 999999999, but the reference has 2 lines"),
        ("H-0\t-1\ta\nD-0\t-1\ta\nH-0\t-2\tb\n", "line 3: sentence 0 has several H- lines; generate it once"),
        ("H-0\t-1\t\u2581a b\n", "line 1: still has pieces; generate with --remove-bpe sentencepiece"),
        ("H-0\t-1\ta@@ b\n", "line 1: still has pieces; generate with --remove-bpe"),
        ("H-1\t-1\ta\n", "but the reference has 2 lines (missing: H-0): it is cut off"),
        ("H-0\t-1\ta\n2 samples have invalid sizes and will be skipped, max", "has 1 whole H- lines"),
        (
            "H-0\t-1\ta\n2 samples have invalid sizes and will be skipped, max\n",
            "line 2: fairseq-generate left out 2 sent",
        ),
        (b"H-0\t-1\ta\nH-1\t-1\t\xff\n", "line 2: not valid UTF-8"),
    ],
)
def test_bad_output_is_refused_in_one_line(read, tmp_path, text, message):
    with pytest.raises(InputError) as caught:
        read(text)
    assert str(caught.value).startswith(str(tmp_path)) and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_sentences_there_is_nothing_to_score(read):
    with pytest.raises(InputError, match="has 0 whole H- lines, .* but the reference has 0 lines"):
        read("", sentences=0)


def test_compressed_output_is_read_and_refused_if_cut_off(write_generated, tmp_path):
    path = tmp_path / "generated.txt.xz"
    path.write_bytes(lzma.compress(write_generated("two.txt", ["zero", "one two"]).read_bytes()))
    assert read_hypotheses(path, 2)[0] == ["zero", "one two"]
    path.write_bytes(lzma.compress(b"H-0\t-1\ta\nH-1\t-1\tb"))
    with pytest.raises(InputError, match="is cut off"):
        read_hypotheses(path, 2)


def test_output_cut_off_anywhere_is_refused_or_has_all_translations(write_generated, read):
    hypotheses = ["zero", "one two"]
    text = write_generated("two.txt", hypotheses).read_text(encoding="utf-8")
    refused = 0
    for length in range(len(text) + 1):
        try:
            assert read(text[:length]) == hypotheses
        except InputError:
            refused += 1
    assert refused > max(map(text.index, hypotheses))
