"""The compare command: differences over seeds against single paired tests, and its errors."""

import numpy as np
import pytest

from fairseq_lot.cli import main
from fairseq_lot.evaluation.bleu import TOKENISED, measure
from fairseq_lot.evaluation.compare import compare


def row(table, one, other):
    """The cells of one pair."""
    (cells,) = [cells for cells in table.rows if cells[:2] == [one, other]]
    return cells


def test_one_seed_is_the_paired_test_of_score(corpus):
    references, good, bad = corpus
    expected = measure(good, references, metric=TOKENISED, base=bad, samples=200)
    cells = row(compare({"good": [good], "bad": [bad]}, references, samples=200, seed=12345), "good", "bad")
    assert cells[2:4] == [f"{expected.score:.2f}", f"{expected.base:.2f}"]
    assert cells[4].startswith(f"{expected.delta:+.2f}* [")
    assert cells[5:] == [f"{expected.delta:+.2f}", f"{expected.p:.4f}"]


def test_seeds_are_averaged(corpus):
    references, good, bad = corpus
    table = compare({"X": [good, bad], "Y": [bad, good], "Z": [bad, bad]}, references, samples=200, seed=1)
    delta = measure(good, references, metric=TOKENISED, base=bad, samples=2).delta
    difference, by_seed, p = row(table, "X", "Y")[4:]
    assert difference.startswith("+0.00 [") and p == "1.0000"
    assert [float(x) for x in by_seed.split(", ")] == [delta, -delta]
    mean = float(row(table, "X", "Z")[4].split("*")[0])
    assert mean == pytest.approx(delta / 2, abs=0.011)
    low, high = (float(x) for x in row(table, "X", "Z")[4].partition("[")[2].strip("]").split(", "))
    assert low < mean < high
    assert "pairs that are compared: 3" in table.notes[1]


def test_several_seeds_narrow_no_interval_by_being_the_same(corpus):
    references, good, bad = corpus
    once = compare({"good": [good], "bad": [bad]}, references, samples=200, seed=1)
    twice = compare({"good": [good] * 2, "bad": [bad] * 2}, references, samples=200, seed=1)
    assert row(once, "good", "bad")[4] == row(twice, "good", "bad")[4]
    assert np.isfinite(float(row(twice, "good", "bad")[6]))


@pytest.fixture
def arguments(tmp_path, write_generated, corpus):
    references, good, bad = corpus
    reference = tmp_path / "reference.txt"
    reference.write_text("\n".join(references) + "\n", encoding="utf-8")
    good, bad = write_generated("good.txt", good), write_generated("bad.txt", bad)
    return ["compare", f"good={good}", f"bad={bad}", "--tokenised-reference", str(reference), "--bootstrap-samples=50"]


def test_command_prints_the_table(arguments, capsys):
    assert main(arguments) == 0
    assert "| good | bad | " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "value", "word"),
    [
        (1, "good", "NAME=FILE"),
        (1, "good=", "NAME=FILE"),
        (1, "bad=x", "given twice"),
        (1, "good=a.out,b.out", "equally many seeds"),
        (1, "good=missing.out", "missing.out"),
        (5, "--bootstrap-samples=0", "at least 1"),
    ],
)
def test_bad_input_is_one_line(arguments, capsys, place, value, word):
    arguments[place] = value
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("fairseq-lot: error: ") and err.count("\n") == 1 and word in err


def test_one_system_is_not_enough(arguments, capsys):
    del arguments[2]
    assert main(arguments) == 2
    assert "at least two" in capsys.readouterr().err
