"""The table command: its exact Markdown and its errors."""
# ruff: noqa: E501 - tables have long lines

import pytest

from fairseq_lot.cli import main
from fairseq_lot.evaluation.table import result_tables
from fairseq_lot.experiment.spec import MetricScore
from fairseq_lot.inspection.charts import bleu_bars
from tests.evaluation.conftest import write_rows

EXPECTED = """\
**toy**, short, 500 sentences, tokenised BLEU

| Backbone | System | Plug-and-play | sacreBLEU | Δ vs. base | Fine-tuned | sacreBLEU | Δ vs. base | Δ vs. control |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| transformer | softmax | 30.00 [29.00, 31.00] | 30.50 | – | 30.75 [29.75, 31.75] | 31.25 | +0.75* (p = 0.0310) | – |
| transformer | Sinkhorn | 29.90 [28.90, 30.90] | 30.40 | -0.10 (p = 0.4000) | – | – | – | – |
| transformer | LOT r=16 | 20.00 [19.00, 21.00] | 20.50 | -10.00* (p = 0.0010) | – | – | – | – |
| transformer | LOT r=32 | 29.00 [28.00, 30.00] | 29.50 | -1.00 (p = 0.0500) | 31.00 [30.00, 32.00] | 31.50 | – | +0.25 |
| transformer | alibi | 10.00 [9.00, 11.00] | 10.50 | – | – | – | – | – |
| diff_transformer | ESP | – | – | – | 33.00 [32.00, 34.00] | 33.50 | – | – |

- [low, high]: 95 % bootstrap interval. p: paired bootstrap test against the base, * where p < 0.05. \
1000 resamples, seed 12345.
- softmax: plug-and-play is the base itself, fine-tuned the control, the base fine-tuned for the same epochs. \
Δ vs. control: to the control of the same seed, not tested here (fairseq-lot compare does).
- sacreBLEU and chrF are of detokenised text.
- Systems: softmax: attention softmax; Sinkhorn: attention sinkhorn; \
LOT r=16: attention lot; LOT r=32: attention lot; \
alibi: attention alibi; ESP: attention esp
- Training: transformer: size small; diff_transformer: size small
- Signature: `tok:none`
- References: as in the data
- Device: cpu
- Commit: abc1234
- Seeds: 1
"""


@pytest.fixture
def rows(make_row):
    """One seed, given in another order than the table's."""
    small = {"training": {"size": "small"}}
    return [
        make_row("alibi", stage="plug-and-play", score=10.0, **small),
        make_row("ESP", backbone="diff_transformer", stage="fine-tuned", score=33.0, **small),
        make_row("LOT r=32", stage="fine-tuned", score=31.0, **small),
        make_row("LOT r=32", stage="plug-and-play", score=29.0, delta=-1.0, p=0.05, **small),
        make_row("LOT r=16", stage="plug-and-play", score=20.0, delta=-10.0, p=0.001, **small),
        make_row("Sinkhorn", stage="plug-and-play", score=29.9, delta=-0.1, p=0.4, **small),
        make_row(stage="fine-tuned", score=30.75, delta=0.75, p=0.031, **small),
        make_row(**small),
    ]


def render(rows, **options):
    return "\n\n".join(table.markdown() for table in result_tables(rows, **options))


def test_the_control_is_the_fine_tuned_base_whatever_its_attention(make_row):
    alibi = {"attention": "softmax", "options": {"softmax-prior": "alibi"}}
    rows = [
        make_row("softmax", stage="plug-and-play", score=20.0, settings={"attention": "softmax"}),
        make_row("ALiBi", stage="base", score=25.0, settings=alibi),
        make_row("ALiBi", stage="fine-tuned", score=26.0, settings=alibi),
        make_row("LOT", stage="fine-tuned", score=25.5, settings={"attention": "lot"}),
    ]
    full = render(rows)
    assert "- ALiBi: plug-and-play is the base itself, fine-tuned the control" in full
    line = next(line for line in full.splitlines() if line.startswith("| transformer | LOT"))
    assert line.endswith("| -0.50 |")


def test_the_command_prints_exactly_this_markdown(rows, tmp_path, capsys):
    one, two = write_rows(tmp_path / "one.jsonl", *rows[:5]), write_rows(tmp_path / "two.jsonl", *rows[3:])
    assert main(["table", str(one), str(two)]) == 0
    assert capsys.readouterr().out == EXPECTED


def test_the_table_can_show_sacrebleu_first(rows, tmp_path, capsys):
    text = render(rows, metric="sacrebleu")
    assert "| transformer | softmax | 30.50 [29.00, 31.00] | 30.00 | – |" in text
    assert "- Signature: `tok:13a`\n- References: raw\n" in text
    assert main(["table", "--metric=sacrebleu", str(write_rows(tmp_path / "rows.jsonl", *rows))]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_several_seeds_give_the_median(make_row):
    rows = [make_row(seed=seed, score=30.0 + seed) for seed in (1, 2, 3, 4)]
    for system, of_seeds in {
        "LOT": [(30.9, 0.9, 0.01), (31.2, 0.2, 0.3), (34.4, 1.4, 0.01), (35.0, 1.0, 0.02)],
        "ESP": [(40.0, 9.0, 0.001)] * 2,
        "Sinkhorn": [(40.0, 2.0, 0.001), (40.0, -1.0, 0.001)],
    }.items():
        for seed, (score, delta, p) in enumerate(of_seeds, start=1):
            rows.append(make_row(system, stage="fine-tuned", seed=seed, score=score, delta=delta, p=p))
    text = render(rows)
    for line in (
        "| softmax | 32.50 [30.00, 35.00] (4 seeds) | 33.00 | – | – | – | – | – |",
        "| LOT | – | – | – | 32.80 [29.90, 36.00] (4 seeds) | 33.30 | +0.95 (+0.20 to +1.40; p < 0.05 in 3 of 4) | – |",
        "| ESP | – | – | – | 40.00 [39.00, 41.00] (2 seeds) | 40.50 | +9.00* (+9.00 to +9.00; p < 0.05 in 2 of 2) | – |",
        "| Sinkhorn | – | – | – | 40.00 [39.00, 41.00] (2 seeds) | 40.50 | +0.50 (-1.00 to +2.00; p < 0.05 in 2 of 2) | – |",
    ):
        assert f"{line}\n" in text
    assert "- Several seeds: median [lowest, highest bound" in text
    assert text.endswith("- Seeds: 1, 2, 3, 4")


def test_differences_are_from_the_control_of_the_same_seed(make_row):
    tuned = [make_row(stage="fine-tuned", seed=seed, score=30.0 + seed) for seed in (1, 2, 3)]
    rows = [make_row("LOT", stage="fine-tuned", seed=seed, score=31.0) for seed in (2, 3, 4)]
    seeds = "-1.50 (-2.00 to -1.00; 2 of 3 seeds)"
    assert f"| LOT | 31.00 [30.00, 32.00] (3 seeds) | 31.50 | – | {seeds} |" in render([*tuned, *rows])


def test_differences_from_the_base_and_from_the_control_are_told_apart(make_row):
    tuned = [make_row(stage="fine-tuned", score=31.0, delta=1.0, p=0.01)]
    tuned += [make_row("LOT", stage="fine-tuned", score=30.5, delta=0.5, p=0.2)]
    lot = "| LOT | 30.00 [29.00, 31.00] | 30.50 | -0.01 (p = 0.9000) | 30.50 [29.50, 31.50] | 31.00 | +0.50 (p = 0.2000) |"
    plugged = make_row("LOT", stage="plug-and-play", score=30.0, delta=-0.01, p=0.9)
    assert f"{lot} -0.50 |" in render([make_row(), plugged, *tuned])


def test_chosen_length_penalties_stand_beside_the_scores_by_seed(make_row):
    rows = [make_row(seed=seed, chrf=50.0, lenpen=lenpen) for seed, lenpen in ((2, 1.0), (1, 1.25))]
    rows += [make_row("LOT", stage="plug-and-play", chrf=50.0, lenpen=2.5), make_row("ESP", stage="fine-tuned")]
    rows += [make_row("ESP", stage="plug-and-play", seed=seed, lenpen=lenpen) for seed, lenpen in ((1, None), (2, 3.0))]
    text = render(rows)
    both = "| Plug-and-play | sacreBLEU | chrF | lenpen | Δ vs. base | Fine-tuned | sacreBLEU | chrF | lenpen | Δ vs. base |"
    assert both in text
    assert "| softmax | 30.00 [29.00, 31.00] (2 seeds) | 30.50 | 50.00 | 1.25, 1 | – | – | – | – | – | – |" in text
    assert (
        "| ESP | 30.00 [29.00, 31.00] (2 seeds) | 30.50 | – | –, 3 | – | 30.00 [29.00, 31.00] | 30.50 | – | – |" in text
    )
    assert "| LOT | 30.00 [29.00, 31.00] | 30.50 | 50.00 | 2.5 | – |" in text
    assert "- lenpen: the length penalty of the beam search, chosen on validation" in text
    assert "lenpen" not in render([make_row(chrf=50.0)])


def test_half_precision_is_noted_below_the_table(make_row):
    assert "- Precision: bf16\n" in render([make_row(precision="bf16")])
    assert "Precision" not in render([make_row()]) + render([make_row(precision="unknown")])


def test_a_system_with_the_controls_score_is_not_taken_for_the_control(make_row):
    text = render([make_row(stage="fine-tuned"), make_row("LOT", stage="fine-tuned")])
    assert "| softmax | 30.00 [29.00, 31.00] | 30.50 | – | – |" in text
    assert "| LOT | 30.00 [29.00, 31.00] | 30.50 | – | +0.00 |" in text


def test_experiments_and_datasets_have_tables_of_their_own(make_row):
    rows = [make_row(), make_row(dataset="another | one"), make_row(experiment="long"), make_row("LOT", seed=2)]
    found = result_tables(rows)
    headings = [table.heading.split(", 500")[0] for table in found]
    assert headings == ["**toy**, short", "**another | one**, short", "**toy**, long"]
    assert [len(table.rows) for table in found] == [2, 1, 1]


def test_lengths_stand_beside_the_scores(make_row):
    lengths = {1: 0.9, 2: 0.92, 3: 1.0}
    rows = [make_row(seed=seed, length=length) for seed, length in lengths.items()]
    text = render(
        [*rows, make_row("LOT", stage="fine-tuned", length=None), make_row("ESP", stage="fine-tuned", length=1.1)]
    )
    assert "| Plug-and-play | sacreBLEU | Length | Δ vs. base | Fine-tuned | sacreBLEU | Length | Δ vs. base |" in text
    assert "| softmax | 30.00 [29.00, 31.00] (3 seeds) | 30.50 | 0.920 | – | – | – | – |" in text
    assert "| LOT | – | – | – | – | 30.00 [29.00, 31.00] | 30.50 | – | – |" in text
    assert "| ESP | – | – | – | – | 30.00 [29.00, 31.00] | 30.50 | 1.100 | – |" in text
    assert "- Length: of the translations" in text and "Length" not in render([make_row()])


def test_chrf_stands_beside_the_scores_where_a_row_has_it(make_row):
    text = render([make_row(chrf=50.0), make_row("LOT", stage="plug-and-play", chrf=None)])
    assert "| Plug-and-play | sacreBLEU | chrF | Δ vs. base |" in text
    assert "| softmax | 30.00 [29.00, 31.00] | 30.50 | 50.00 | – |" in text
    assert "| LOT | 30.00 [29.00, 31.00] | 30.50 | – | – |" in text
    assert "chrF |" not in render([make_row()])


def test_models_trained_from_scratch_stand_beside_the_base(make_row):
    scratch = {"attention": "lot", "from-scratch": True}
    rows = [make_row(), make_row("LOT from scratch", settings=scratch, stage="from scratch", delta=-2.0, p=0.001)]
    assert "control" not in render(rows)
    assert render(rows).splitlines()[2:6] == [
        "| Backbone | System | From scratch | sacreBLEU | Δ vs. base |",
        "| --- | --- | --- | --- | --- |",
        "| transformer | softmax | 30.00 [29.00, 31.00] | 30.50 | – |",
        "| transformer | LOT from scratch | 30.00 [29.00, 31.00] | 30.50 | -2.00* (p = 0.0010) |",
    ]


def test_bars_are_the_scores_with_their_intervals(make_row):
    score = MetricScore(score=30.0, low=28.0, high=30.5, signature="tok:none")
    (axes,) = bleu_bars([make_row("LOT", stage="fine-tuned", score=32.0), make_row(tokenised=score)]).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["transformer · softmax · base", "transformer · LOT · fine-tuned"]
    assert [bar.get_width() for bar in axes.patches] == [30, 32]
    intervals = [line[:, 0].tolist() for lines in axes.collections for line in lines.get_segments()]
    assert intervals == [[28, 30.5], [31, 33]]


def test_bad_files_are_refused_in_one_line(make_row, tmp_path, refused):
    full, other = (write_rows(tmp_path / f"{score}.jsonl", make_row(score=score)) for score in (30.0, 31.0))
    empty, broken = write_rows(tmp_path / "empty.jsonl"), tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    refused(["table", empty], "no row in", empty)
    refused(["table", tmp_path / "absent.jsonl"], "cannot read", "absent.jsonl")
    refused(["table", broken], f"{broken}, line 1", "required, but not there")
    refused(["table", full, other], full, other, "different values")
