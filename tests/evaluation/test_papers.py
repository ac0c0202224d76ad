"""Reported beside measured scores."""

from fairseq_lot.cli import main
from fairseq_lot.evaluation.results import put_row
from fairseq_lot.evaluation.table import render


def test_medians_and_differences_to_softmax_of_the_same_seed(make_row):
    rows = [make_row(seed=seed, score=30.0 + seed) for seed in (1, 2)]
    rows += [make_row(stage="fine-tuned", seed=seed, score=35.0 + seed) for seed in (1, 2)]
    rows += [make_row(mechanism="lot", stage="plug-and-play", seed=s, score=30.0 + 3 * s) for s in (1, 2)]
    rows += [make_row(mechanism="lot", stage="fine-tuned", seed=2, score=36.5)]
    rows += [make_row(mechanism="lot", options="--calibrate", stage="fine-tuned", seed=2, score=37.25)]
    rows += [make_row(mechanism="alibi", stage="plug-and-play", score=12.0)]
    lines = render(rows, papers=True).splitlines()
    assert lines[0].startswith("**toy**, transformer_small, protocol quick, 500 sentences, tokenised BLEU")
    assert lines[4:12] == [
        "| transformer | softmax (base) | 33.40 | 31.50 | 34.61 | 36.50 |",
        "| transformer | sinkhorn | 33.36 (-0.04) | – | 34.61 (+0.00) | – |",
        "| transformer | esp | 33.38 (-0.02) | – | 34.64 (+0.03) | – |",
        "| transformer | lot | 33.29 (-0.11) | 34.50 (+3.00) | 34.72 (+0.11) | 36.50 (-0.50, 1 of 2 seeds) |",
        "| transformer | lot: --calibrate | – | – | – | 37.25 (+0.25, 1 of 2 seeds) |",
        "| transformer | alibi | – | 12.00 (-19.00, 1 of 2 seeds) | – | – |",
        "| diff_transformer | softmax (base) | 33.85 | – | 34.78 | – |",
        "| diff_transformer | sinkhorn | 33.67 (-0.18) | – | 34.81 (+0.03) | – |",
    ]


def test_without_a_control_there_is_no_difference(make_row):
    text = render([make_row(mechanism="esp", stage="fine-tuned", score=33.0)], papers=True)
    assert "| transformer | esp | 33.38 (-0.02) | – | 34.64 (+0.03) | 33.00 |" in text


def test_the_papers_have_tokenised_scores_only(make_row, tmp_path, capsys):
    put_row(tmp_path / "results.jsonl", make_row())
    command = ["table", str(tmp_path / "results.jsonl"), "--papers"]
    assert main(command) == 0
    assert "| transformer | softmax (base) | 33.40 | 30.00 |" in capsys.readouterr().out
    assert main([*command, "--metric", "sacrebleu"]) == 2
    assert "--metric sacrebleu" in capsys.readouterr().err
