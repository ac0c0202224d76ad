"""Medians of our rows beside the papers' scores."""

from fairseq_lot.cli import main
from fairseq_lot.evaluation.table import result_tables
from tests.evaluation.conftest import write_rows

CALIBRATED = {"attention": "lot", "calibrate": {"with": "text"}}


def lines(rows, **options):
    (table,) = result_tables(rows, **options)
    return table.markdown().splitlines()


def test_lines_have_medians_and_differences_from_softmax_of_the_same_seed(make_row):
    rows = [make_row(seed=seed, score=30.0 + seed) for seed in (1, 2)]
    rows += [make_row(stage="fine-tuned", seed=seed, score=35.0 + seed) for seed in (1, 2)]
    rows += [make_row("LOT", stage="plug-and-play", seed=s, score=30.0 + 3 * s) for s in (1, 2)]
    rows += [make_row("LOT", stage="fine-tuned", seed=2, score=36.5)]
    rows += [make_row("LOT calibrated", settings=CALIBRATED, stage="fine-tuned", seed=2, score=37.25)]
    rows += [make_row("alibi", stage="plug-and-play", score=12.0)]
    shown = lines(rows, papers=True)
    assert shown[0] == "**toy**, short, 500 sentences, tokenised BLEU"
    assert shown[4:12] == [
        "| transformer | softmax | 33.40 | 31.50 | 34.61 | 36.50 |",
        "| transformer | LOT | 33.29 (-0.11) | 34.50 (+3.00) | 34.72 (+0.11) | 36.50 (-0.50, 1 of 2 seeds) |",
        "| transformer | LOT calibrated | – | – | – | 37.25 (+0.25, 1 of 2 seeds) |",
        "| transformer | alibi | – | 12.00 (-19.00, 1 of 2 seeds) | – | – |",
        "| transformer | Sinkhorn | 33.36 (-0.04) | – | 34.61 (+0.00) | – |",
        "| transformer | ESP | 33.38 (-0.02) | – | 34.64 (+0.03) | – |",
        "| diff_transformer | softmax | 33.85 | – | 34.78 | – |",
        "| diff_transformer | Sinkhorn | 33.67 (-0.18) | – | 34.81 (+0.03) | – |",
    ]


def test_a_system_with_a_papers_name_but_other_settings_has_a_line_of_its_own(make_row):
    slices = {"attention": "esp", "options": {"esp-num-slices": 8}}
    shown = lines([make_row("ESP", settings=slices, stage="fine-tuned", score=33.0)], papers=True)
    assert shown[4] == "| transformer | ESP | – | – | – | 33.00 |"
    assert "| transformer | ESP | 33.38 (-0.02) | – | 34.64 (+0.03) | – |" in shown


def test_without_a_control_there_is_no_difference(make_row):
    shown = lines([make_row("ESP", stage="fine-tuned", score=33.0)], papers=True)
    assert "| transformer | ESP | 33.38 (-0.02) | – | 34.64 (+0.03) | 33.00 |" in shown


def test_papers_are_compared_only_in_tokenised_bleu(make_row, tmp_path, capfd, refused):
    command = ["table", str(write_rows(tmp_path / "results.jsonl", make_row())), "--papers"]
    assert main(command) == 0
    assert "| transformer | softmax | 33.40 | 30.00 |" in capfd.readouterr().out
    refused([*command, "--metric", "sacrebleu"], "--metric sacrebleu")
