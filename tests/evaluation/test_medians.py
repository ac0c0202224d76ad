"""Medians, the backbones side by side."""

import pytest

from fairseq_lot.cli import main
from fairseq_lot.evaluation.results import put_row
from fairseq_lot.evaluation.table import render


def test_a_row_for_each_mechanism_and_two_columns_for_each_backbone(make_row):
    diff = {"architecture": "diff_transformer_small", "backbone": "diff_transformer"}
    rows = [make_row(seed=seed, score=30.0 + seed) for seed in (1, 2)]
    rows += [make_row(stage="fine-tuned", seed=seed, score=35.0 + seed) for seed in (1, 2)]
    rows += [make_row(mechanism="lot", stage="plug-and-play", seed=s, score=30.0 + 3 * s) for s in (1, 2)]
    rows += [make_row(mechanism="lot", options="--calibrate", stage="fine-tuned", seed=2, score=37.25)]
    rows += [make_row(**diff), make_row(**diff, mechanism="esp", stage="plug-and-play", score=29.5)]
    lines = render(rows, medians=True).splitlines()
    assert lines[0].startswith(
        "**toy**, diff_transformer_small, transformer_small, protocol quick, 500 sentences, tokenised BLEU"
    )
    assert lines[2:8] == [
        "| Mechanism | transformer: plug-and-play | transformer: fine-tuned "
        "| diff_transformer: plug-and-play | diff_transformer: fine-tuned |",
        "| --- | --- | --- | --- | --- |",
        "| softmax (base) | 31.50 | 36.50 | 30.00 | – |",
        "| esp | – | – | 29.50 (-0.50) | – |",
        "| lot | 34.50 (+3.00) | – | – | – |",
        "| lot: --calibrate | – | 37.25 (+0.25, 1 of 2 seeds) | – | – |",
    ]


def test_medians_of_sacrebleu(make_row):
    row = make_row()
    expected = f"| softmax (base) | {row.sacrebleu.score:.2f} | – |"
    assert row.sacrebleu.score != row.tokenised.score and expected in render([row], metric="sacrebleu", medians=True)


def test_either_medians_or_papers(make_row, tmp_path, capsys):
    put_row(tmp_path / "results.jsonl", make_row())
    command = ["table", str(tmp_path / "results.jsonl"), "--medians"]
    assert main(command) == 0
    assert "| softmax (base) | 30.00 | – |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--papers"])
    assert "not allowed with" in capsys.readouterr().err
