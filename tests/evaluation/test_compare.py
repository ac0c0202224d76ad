"""The compare command: differences over seeds against single paired tests, and its errors."""

import numpy as np
import pytest

from fairseq_lot.cli import main
from fairseq_lot.evaluation.bleu import TOKENISED, measure, sentence_statistics
from fairseq_lot.evaluation.compare import compare
from fairseq_lot.evaluation.sentences import decode, encode


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
        (5, "--results=results.jsonl", "either --results"),
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


@pytest.fixture
def scored(tmp_path, write_generated, corpus):
    """A function that scores a system into results.jsonl; the file comes back."""
    references, good, bad = corpus
    reference = tmp_path / "reference.txt"
    reference.write_text("\n".join(references) + "\n", encoding="utf-8")

    def score(mechanism, sentences, *, seed=1, stage="fine-tuned", options="", backbone="transformer"):
        code = main([
            "score", f"--generated={write_generated('generated.txt', sentences)}", f"--tokenised-reference={reference}",
            f"--results={tmp_path / 'results.jsonl'}", "--dataset=toy", "--architecture=transformer_small",
            f"--backbone={backbone}", f"--mechanism={mechanism}", f"--options={options}", f"--stage={stage}",
            f"--seed={seed}", "--bootstrap-samples=2", "--commit=abc1234", "--protocol=papers", "--target-lang=en",
        ])  # fmt: skip
        assert code == 0
        return tmp_path / "results.jsonl"

    return score


def test_stored_counts_give_the_table_of_the_translations(scored, corpus, capsys):
    references, good, bad = corpus
    worse = ["no .", *bad[1:]]
    for seed, sentences in ((1, good), (2, bad)):
        scored("lot", sentences, seed=seed, options="--lot-num-pivots 16")
        scored("softmax", bad, seed=seed)
    results = scored("esp", worse, seed=2)
    scored("esp", worse, backbone="diff_transformer")
    scored("sinkhorn", worse, stage="plug-and-play")
    capsys.readouterr()
    assert main(["compare", f"--results={results}", "--bootstrap-samples=100"]) == 0
    shown = capsys.readouterr().out
    direct = compare(
        {"softmax": [bad] * 2, "lot --lot-num-pivots 16": [good, bad]}, references, samples=100, seed=12345
    )
    (pair,) = direct.rows
    heading, _, *lines = shown.splitlines()
    assert heading == "**toy**, protocol papers, transformer, fine-tuned"
    assert direct.notes[0] in shown and f"| {' | '.join(pair)} |" in lines
    assert [line.split(" | ")[:2] for line in lines[2:5]] == [
        ["| softmax", "esp"], ["| softmax", "lot --lot-num-pivots 16"], ["| esp", "lot --lot-num-pivots 16"]
    ]  # fmt: skip
    by_seed = lines[2].split(" | ")[5]
    assert by_seed.endswith(" (seed 2)") and by_seed.count(",") == 0


def test_counts_must_be_there_and_belong_to_their_rows(scored, corpus, capsys):
    _, good, bad = corpus
    results = scored("lot", good)
    counts = results.with_name("results.sentences.tsv")
    only_lot = counts.read_text()
    scored("softmax", bad)
    both = counts.read_text()

    def refused(*words):
        assert main(["compare", f"--results={results}", "--bootstrap-samples=10"]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and all(word in err for word in words)

    capsys.readouterr()
    counts.write_text(only_lot)
    refused("no two systems of stage fine-tuned", str(counts))
    counts.write_text(both.replace('"softmax"', '"other"').replace('"lot"', '"softmax"').replace('"other"', '"lot"'))
    refused("counts of other translations", "score again")
    counts.write_text(only_lot + "[]\tnonsense\n")
    refused(f"{counts}, line 2: ")
    assert main(["score", f"--results={results}", "--generated=x", "--tokenised-reference=x.en", "--dataset=a",
                 "--architecture=a", "--backbone=a", "--mechanism=a", "--stage=base", "--seed=1"]) == 2  # fmt: skip
    assert "line 2" in capsys.readouterr().err, "before the work"


def test_counts_are_kept_exactly(corpus):
    references, good, _ = corpus
    statistics = sentence_statistics(["", "no", *good[2:]], references, metric=TOKENISED)
    coded = encode(statistics)
    assert np.array_equal(decode(coded), statistics) and len(coded) < statistics.size * 2


def test_one_system_is_not_enough(arguments, capsys):
    del arguments[2]
    assert main(arguments) == 2
    assert "at least two" in capsys.readouterr().err
