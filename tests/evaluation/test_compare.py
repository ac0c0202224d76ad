"""The compare command: differences over several seeds, compared with single paired tests, and its errors."""

import numpy as np
import pytest

from fairseq_lot.cli import main
from fairseq_lot.evaluation.bleu import TOKENISED, corpus_score, measure, sentence_statistics
from fairseq_lot.evaluation.compare import compare
from fairseq_lot.evaluation.results import format_statistics, read_rows, read_statistics


@pytest.fixture
def compared(corpus):
    """A function that compares systems; a system is a list with the translations of each seed."""

    def compared(samples=200, seed=1, **systems):
        statistics = {
            name: {n: sentence_statistics(x, corpus[0], metric=TOKENISED) for n, x in enumerate(runs, start=1)}
            for name, runs in systems.items()
        }
        return compare(statistics, "signature", samples=samples, seed=seed)

    return compared


def row(table, one, other):
    """The cells of one pair."""
    (cells,) = [cells for cells in table.rows if cells[:2] == [one, other]]
    return cells


def test_with_one_seed_compare_gives_the_paired_test_of_score(corpus, compared):
    references, good, bad = corpus
    expected = measure(good, references, metric=TOKENISED, base=bad, samples=200)
    cells = row(compared(good=[good], bad=[bad], seed=12345), "good", "bad")
    assert cells[2:4] == [f"{expected.score:.2f}", f"{expected.base:.2f}"]
    assert cells[4].startswith(f"{expected.delta:+.2f}* [")
    assert cells[5:] == [f"{expected.delta:+.2f}", f"{expected.p:.4f}"]


def test_seeds_are_averaged(corpus, compared):
    references, good, bad = corpus
    table = compared(X=[good, bad], Y=[bad, good], Z=[bad, bad])
    delta = measure(good, references, metric=TOKENISED, base=bad, samples=2).delta
    difference, by_seed, p = row(table, "X", "Y")[4:]
    assert difference.startswith("+0.00 [") and p == "1.0000"
    assert [float(x) for x in by_seed.split(", ")] == [delta, -delta]
    mean = float(row(table, "X", "Z")[4].split("*")[0])
    assert mean == pytest.approx(delta / 2, abs=0.011)
    low, high = (float(x) for x in row(table, "X", "Z")[4].partition("[")[2].strip("]").split(", "))
    assert low < mean < high
    assert "pairs that are compared: 3" in table.notes[1]


def test_identical_seeds_do_not_narrow_the_interval(corpus, compared):
    _, good, bad = corpus
    once = compared(good=[good], bad=[bad])
    twice = compared(good=[good] * 2, bad=[bad] * 2)
    assert row(once, "good", "bad")[4] == row(twice, "good", "bad")[4]


def test_systems_without_a_common_seed_are_not_compared(corpus):
    statistics = sentence_statistics(corpus[1], corpus[0], metric=TOKENISED)
    assert compare({"LOT": {1: statistics}, "ESP": {2: statistics}}, "signature", samples=2, seed=1).rows == []


@pytest.fixture
def scored(tmp_path, make_row, corpus):
    """A function that adds a system's row to results.jsonl and its counts to the file beside it; returns the path."""

    def score(system, sentences, *, references=corpus[0], stage="fine-tuned", **values):
        statistics = sentence_statistics(sentences, references, metric=TOKENISED)
        row = make_row(system, stage=stage, score=round(corpus_score(statistics), 2), **values)
        for name, line in (
            ("results.jsonl", row.line),
            ("results.sentences.tsv", format_statistics(row, statistics)),
        ):
            with open(tmp_path / name, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        return tmp_path / "results.jsonl"

    return score


def test_stored_counts_give_the_same_table_as_the_translations(scored, corpus, compared, capfd):
    _, good, bad = corpus
    worse = ["no .", *bad[1:]]
    for seed, sentences in ((1, good), (2, bad)):
        scored("LOT r=16", sentences, seed=seed, chrf=50.0 + seed)
        scored("softmax", bad, seed=seed, chrf=50.25)
    results = scored("ESP", worse, seed=2)
    scored("ESP", worse, backbone="diff_transformer")
    scored("Sinkhorn", worse, stage="plug-and-play")
    assert main(["compare", str(results), "--bootstrap-samples=100"]) == 0
    heading, _, *lines = capfd.readouterr().out.splitlines()
    assert heading == "**toy**, short, transformer, fine-tuned"
    assert "- Tokenised BLEU, 151 sentences, `tok:none`." in lines
    (pair,) = compared(samples=100, seed=12345, **{"softmax": [bad] * 2, "LOT r=16": [good, bad]}).rows
    first, second, third = (line.strip("| ").split(" | ") for line in lines[2:5])
    assert (first[:2], second[:-2], third[:2]) == (["softmax", "ESP"], pair, ["ESP", "LOT r=16"])
    assert second[-1] == "-1.25" and first[-1] == third[-1] == "–", "the mean of two seeds; no chrF in ESP's row"
    scores = {(row.system, row.seed): row.sacrebleu.score for row in read_rows([results]) if row.stage == "fine-tuned"}
    changes = [scores["softmax", seed] - scores["LOT r=16", seed] for seed in (1, 2)]
    assert second[-2] == f"{sum(changes) / 2:+.2f}" and first[-2] == f"{scores['softmax', 2] - scores['ESP', 2]:+.2f}"
    assert lines[0].endswith("| p | in sacreBLEU | in chrF |")
    assert "- In sacreBLEU and chrF: the mean difference, of detokenised text." in lines
    assert first[5].endswith(" (seed 2)") and first[5].count(",") == 0
    assert main(["compare", str(results), "--bootstrap-samples=100", "--against=softmax"]) == 0
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("| ")][2:] == lines[2:4]


def test_counts_must_be_there_and_belong_to_their_rows(scored, corpus, refused):
    _, good, bad = corpus
    results = scored("LOT", good)
    counts = results.with_name("results.sentences.tsv")
    only_lot = counts.read_text()
    scored("softmax", bad)
    both = counts.read_text()
    command = ["compare", results, "--bootstrap-samples=10"]
    counts.write_text(only_lot)
    refused(command, "no two systems of stage fine-tuned", counts, "score them once more")
    refused([*command, "--against=ESP"], "none of them is 'ESP'")
    counts.unlink()
    refused(command, "no two systems of stage fine-tuned", counts)
    counts.write_text(both.replace('"softmax"', '"other"').replace('"LOT"', '"softmax"').replace('"other"', '"LOT"'))
    refused(command, "counts of other translations", "score again")
    counts.write_text(only_lot + "[]\tnonsense\n")
    refused(command, f"{counts}, line 2: ")
    line = only_lot.strip()
    for broken in (line[:-5], f"{line}\tmore", line.split("\t")[0], f'"LOT"{line[line.index("]") + 1 :]}'[1:]):
        counts.write_text(f"{line}\n{broken}\n")
        refused(command, f"{counts}, line 2: no counts of a row", "score again")
    refused(["compare", results, "--bootstrap-samples=0"], "--bootstrap-samples", "0")
    refused(["compare", "missing.jsonl"], "missing.jsonl")
    results.unlink()
    counts.unlink()
    scored("LOT", good, seed=1)
    scored("ESP", bad, seed=2)
    refused(command, "no two systems of stage fine-tuned", "counts of one seed")


def test_a_row_without_counts_is_named(scored, corpus, capfd):
    _, good, bad = corpus
    for name in ("LOT", "softmax", "ESP"):
        results = scored(name, good if name == "LOT" else bad)
    counts = results.with_name("results.sentences.tsv")
    counts.write_text("".join(line for line in counts.open() if '"ESP"' not in line))
    assert main(["compare", str(results), "--bootstrap-samples=10"]) == 0
    assert capfd.readouterr().err == f"{counts} lacks counts of ESP (seed 1): left out\n"


def test_systems_scored_on_different_references_are_not_compared(scored, corpus, refused):
    references, good, bad = corpus
    scored("LOT", good)
    results = scored("softmax", bad, references=["another one", *references[1:]])
    refused(["compare", results], "softmax, LOT were scored on different references")


def test_counts_are_kept_exactly(scored, corpus):
    references, good, _ = corpus
    long = ["word " * 40_000, *references[1:]]
    systems = {"short": ["", "no", *good[2:]], "long": [long[0], *good[1:]]}
    for system, sentences in systems.items():
        results = scored(system, sentences, references=long)
    found = read_statistics(results, read_rows([results]))
    for (_, _, _, system, *_), kept in found.items():
        assert np.array_equal(kept, sentence_statistics(systems[system], long, metric=TOKENISED))
    assert len(found) == 2
