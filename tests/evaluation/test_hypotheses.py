"""Reading the output of fairseq-generate."""

import pytest

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.hypotheses import read_hypotheses

TWO = "".join(
    f"S-{sentence}\tein\nT-{sentence}\tone\nH-{sentence}\t-0.5\t{text}\nD-{sentence}\t-0.5\t{text}\nP-{sentence}\t-0.5\n"
    for sentence, text in ((1, "one two"), (0, "zero"))
)


def refused(tmp_path, text):
    path = tmp_path / "generated.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_hypotheses(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message


def test_corpus_order_whatever_the_order_of_the_lines(write_generated, tmp_path):
    hypotheses = [f"sentence {number} ." for number in range(25)]
    path = write_generated("generated.txt", hypotheses)
    assert read_hypotheses(path) == hypotheses
    lines = sorted(path.read_text(encoding="utf-8").splitlines())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read_hypotheses(path) == hypotheses


def test_h_lines_alone_an_empty_hypothesis_and_spaces(tmp_path):
    path = tmp_path / "generated.txt"
    path.write_text("H-1\t-0.5\t\nH-0\t-inf\t a  b\u2028c \n", encoding="utf-8")
    assert read_hypotheses(path) == ["a b c", ""]


@pytest.mark.parametrize("text", ["", "2024-01-01 | INFO | fairseq_cli.generate | loading\n", "Generate test\n"])
def test_no_hypothesis(tmp_path, text):
    assert "no H- line" in refused(tmp_path, text)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="cannot read .*absent.txt"):
        read_hypotheses(tmp_path / "absent.txt")


def test_missing_id(tmp_path):
    assert "sentence 1 has no H- line (1 of 3 lack it)" in refused(tmp_path, "H-2\t-1\tc\nH-0\t-1\ta\n")


def test_huge_id_is_refused_at_once(tmp_path):
    assert "sentence 0 has no H- line" in refused(tmp_path, "H-999999999\t-1\tc\n")


def test_doubled_id(tmp_path):
    assert "sentence 0 has several H- lines" in refused(tmp_path, "H-0\t-1\ta\nD-0\t-1\ta\nH-0\t-2\tb\nD-0\t-2\tb\n")


def test_pieces_left(tmp_path):
    assert "--remove-bpe sentencepiece" in refused(tmp_path, "H-0\t-1\t\u2581a b\n")


def test_not_utf_8(tmp_path):
    path = tmp_path / "generated.txt"
    path.write_bytes(b"H-0\t-1\ta\nH-1\t-1\t\xff\n")
    with pytest.raises(InputError, match="line 2"):
        read_hypotheses(path)


@pytest.mark.parametrize("length", range(len(TWO)))
def test_cut_off_anywhere(tmp_path, length):
    refused(tmp_path, TWO[:length])


def test_uncut(tmp_path):
    path = tmp_path / "generated.txt"
    path.write_text(TWO, encoding="utf-8")
    assert read_hypotheses(path) == ["zero", "one two"]
