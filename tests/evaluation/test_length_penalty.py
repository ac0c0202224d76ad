"""Reranking the hypotheses of a beam search, and choosing the length penalty on validation."""

import pytest
from sacrebleu.metrics import BLEU

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.hypotheses import Hypothesis, read_nbest
from fairseq_lot.evaluation.length_penalty import GRID, choose, rank

REFERENCES = ["a b c d e f", "g h i j k", "l m n o"]


def hypothesis(text, total):
    """A translation with one piece a word and ``total`` as its log-probability."""
    pieces = len(text.split()) + 1
    return Hypothesis(text=text, score=total / pieces, pieces=pieces)


def test_the_grid_has_fairseqs_default_and_values_on_both_sides_of_it():
    assert GRID[0] == 0.5 and GRID[-1] == 3 and 1 in GRID and list(GRID) == sorted(set(GRID))


@pytest.mark.parametrize(("lenpen", "best"), [(0.5, 0), (1, 0), (1.5, 1), (2, 1), (3, 1)])
def test_a_larger_penalty_prefers_longer_translations(lenpen, best):
    """-2/3^L against -4/5^L: equal where (5/3)^L = 2, L = 1.36."""
    nbest = [[hypothesis("a b", -2), hypothesis("a b c d", -4)]]
    assert rank(nbest, lenpen) == [best]
    assert rank([nbest[0][::-1]], lenpen) == [1 - best], "in any order"


def test_the_first_of_equal_scores_is_the_best_as_in_fairseqs_output():
    equal = [hypothesis("a b", -2), hypothesis("a c", -2)]
    assert rank([equal], 2) == [0]
    never = [hypothesis("a b", float("-inf")), hypothesis("a b c", float("-inf"))]  # --match-source-len
    assert rank([never], 3) == [0]


def test_the_chosen_penalty_has_the_best_bleu_of_the_grid():
    """Each sentence has a short, a right and a long translation, which win at different penalties."""
    long = [f"{reference} x y z" for reference in REFERENCES]
    short = [reference[:5] for reference in REFERENCES]
    nbest = [
        [hypothesis(one, total) for one, total in zip(three, (-3.0, -4.0, -12.0), strict=True)]
        for three in zip(short, REFERENCES, long, strict=True)
    ]
    lenpen, scores = choose(nbest, REFERENCES)
    bleu = BLEU(tokenize="none", force=True)
    for own, score in scores.items():
        texts = [nbest[sentence][place].text for sentence, place in enumerate(rank(nbest, own))]
        assert score == pytest.approx(bleu.corpus_score(texts, [REFERENCES]).score)
    assert list(scores) == list(GRID) and scores[lenpen] == max(scores.values()) == pytest.approx(100)
    assert scores[0.5] < 50 and scores[3] < 90 and 0.5 < lenpen < 3


@pytest.mark.parametrize("texts", [("a b c d", "a b c d e f"), ("x", "y z")], ids=["one of some", "all are equal"])
def test_among_penalties_of_equal_bleu_the_nearest_to_the_default_is_chosen(texts):
    nbest = [[hypothesis(text, -len(text.split())) for text in texts]]
    lenpen, scores = choose(nbest, ["a b c d e f"])
    best = [one for one in GRID if scores[one] == max(scores.values())]
    assert len(best) > 1 and lenpen == min(best, key=lambda one: abs(one - 1))


def written(tmp_path, *lines):
    path = tmp_path / "nbest.out"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_all_hypotheses_are_read_with_their_lengths(tmp_path):
    one = ["H-1\t-0.5\ta  b", "D-1\t-0.5\ta b", "P-1\t-0.1 -0.2 -0.3", "H-1\t-inf\tc", "D-1\t-inf\tc", "P-1\t-0.1 -0.2"]
    other = ["S-0\tx", "T-0\ty", "H-0\t-1.5\t", "D-0\t-1.5\t", "P-0\t-1.5", "Generate test with beam=2"]
    found = read_nbest(written(tmp_path, *one, *other), 2)
    assert found == {
        0: [Hypothesis(text="", score=-1.5, pieces=1)],
        1: [Hypothesis(text="a b", score=-0.5, pieces=3), Hypothesis(text="c", score=float("-inf"), pieces=2)],
    }
    assert list(found) == [0, 1], "in corpus order"


def test_a_part_of_the_corpus_is_read_only_where_it_is_expected(tmp_path):
    file = written(tmp_path, "H-3\t-1\ta", "P-3\t-1 -1", "H-1\t-1\tb", "P-1\t-1 -1")
    found = read_nbest(file, 5, part=True)
    assert {sentence: one.text for sentence, (one,) in found.items()} == {1: "b", 3: "a"} and list(found) == [1, 3]
    for given in ({"sentences": 5}, {"sentences": 3, "part": True}):
        with pytest.raises(InputError, match="but the reference has"):
            read_nbest(file, **given)
    with pytest.raises(InputError, match="has 0 whole H- lines"):
        read_nbest(written(tmp_path, "Generate valid"), 5, part=True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["H-0\t-1\ta", "P-0\t-1 -1"], "but the reference has 2 lines (missing: H-1)"),
        (["H-0\t-1\ta", "P-0\t-1 -1", "H-1\t-1\ta"], "but the reference has 2 lines (missing: H-1)"),
        (["H-0\t-1\ta@@ b", "P-0\t-1 -1"], "line 1: still has pieces"),
        (["2 samples have invalid sizes and will be skipped"], "line 1: fairseq-generate left out 2 sentences"),
    ],
)
def test_bad_output_is_refused_in_one_line(tmp_path, lines, message):
    with pytest.raises(InputError) as caught:
        read_nbest(written(tmp_path, *lines), 2)
    assert message in str(caught.value) and "\n" not in str(caught.value)
