"""The swaps that a sweep tries, and the tables and figures of their results."""

import json
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context

import pytest
from sacrebleu.metrics import BLEU, CHRF

from fairseq_lot.errors import InputError
from fairseq_lot.experiment.spec import MetricScore
from fairseq_lot.output.figures import as_bytes
from fairseq_lot.plug_and_play.points import (
    LENGTHS,
    AttentionSpec,
    Loss,
    SweepRow,
    add_point,
    check_settings,
    expand,
    read_points,
)
from fairseq_lot.plug_and_play.sweep import (
    BaseCheckpoint,
    check_bases,
    of_detokenised,
    read_base,
    sum_of_splits,
    swap_as,
)
from fairseq_lot.plug_and_play.sweep_table import draw, render, render_balance
from fairseq_lot.pretrained.checkpoint import Checkpoint


def bleu(score, delta=None):
    comparison = {} if delta is None else {"base": score - delta, "delta": delta, "p": 0.01}
    return MetricScore(score=score, low=score - 1, high=score + 1, signature="nrefs:1", **comparison)


def point(attention, options=None, *, on="", loss=2.0, epoch=None, **others):
    fields = {"calibration_seconds": 7.4 if on else None, "tokens": 900, "bleu": None, "seed": 1}
    fields |= {"commit": "c0ffee", "threads": 1, "device": "CPU", "base": f"sum of {epoch}"} | others
    return SweepRow(attention=attention, options=options or {}, calibrated_on=on, loss=loss, epoch=epoch, **fields)


def cells(text):
    """The cells of a Markdown table, line by line, its head first."""
    head, _, *lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in (head, *lines)]


POINTS = [
    point("softmax", bleu=bleu(30.0)),
    point("lot", {"lot_num_pivots": 16}, loss=2.25, bleu=bleu(28.5, -1.5)),
    point("sinkhorn", {"sinkhorn_epsilon": 1.0}, loss=2.01),
    point("lot", {"lot_num_pivots": 32}, loss=2.125, bleu=bleu(29.0, -1.0)),
    point("lot", {"lot_num_pivots": 16}, on="text", loss=2.0625, bleu=bleu(29.9, -0.1)),
]


def test_slashes_stand_for_every_combination():
    assert expand("lot") == [AttentionSpec(attention="lot", options={})]
    assert expand("lot --lot-num-pivots=8/16") == expand("lot --lot-num-pivots 8/16")
    assert expand("lot --lot-num-pivots 8/16 --attention-sites encoder/encoder,cross") == [
        AttentionSpec(attention="lot", options={"lot_num_pivots": r, "attention_sites": sites})
        for r in (8, 16)
        for sites in ("encoder", "encoder,cross")
    ]


def test_options_are_read_as_on_the_command_line():
    (way,) = expand("lot --lot-num-pivots 8 --lot-learn-masses false --attention-sites cross")
    assert way.options == {"lot_num_pivots": 8, "lot_learn_masses": False, "attention_sites": "cross"}
    for words, message in (
        ("lot --lot-num-pivots many", "'lot "),
        ("lot --lot-pivots 8", "'lot "),
        ("lot 8", "'lot "),
        ("", "has no mechanism"),
        ("lot --attention-sites 'cross", "--try .*: No closing quotation"),
        ("lot --attention sinkhorn", "starts with the mechanism; leave out --attention sinkhorn"),
    ):
        with pytest.raises(InputError, match=message):
            expand(words)


def test_options_are_shown_as_on_the_command_line_and_their_order_does_not_matter():
    (way,) = expand("lot --lot-epsilon 1e-3 --lot-num-pivots 8 --lot-learn-pivots false --lot-learn-masses")
    (other,) = expand("lot --lot-learn-masses yes --lot-learn-pivots no --lot-num-pivots 8 --lot-epsilon 0.001")
    assert way.key == other.key != expand("lot --lot-num-pivots 8")[0].key
    for words in ("--lot-num-pivots 8", "--lot-epsilon 0.001", "--lot-learn-pivots false", "--lot-learn-masses"):
        assert f" {words} " in f" {way.flags} "
    assert "true" not in way.flags
    assert expand("sinkhorn --sinkhorn-epsilon 1")[0].flags == "--sinkhorn-epsilon 1"


@pytest.mark.parametrize("one, other", [("decoder,encoder", "encoder, decoder"), ("encoder", None)])
def test_the_order_of_sites_does_not_matter(one, other):
    ways = [
        AttentionSpec(attention="lot", options={"attention_sites": sites} if sites else {}) for sites in (one, other)
    ]
    assert ways[0].key == ways[1].key != AttentionSpec(attention="lot", options={"attention_sites": "cross"}).key


def test_points_are_read_back_and_broken_lines_named(tmp_path):
    file = tmp_path / "sweep.jsonl"
    assert read_points(file) == []
    file.write_text("".join(json.dumps(asdict(one)) + "\n" for one in POINTS))
    assert read_points(file) == POINTS
    for line in ("{", "[]", '{"attention": "lot"}'):
        file.write_text(json.dumps(asdict(POINTS[0])) + "\n" + line + "\n")
        with pytest.raises(InputError, match="line 2"):
            read_points(file)


@pytest.mark.slow
def test_two_sweeps_in_one_folder_lose_no_point(tmp_path):
    """Two processes add points at the same time. A point of the same base and swap replaces the old one."""
    folder, settings = tmp_path / "sweep", {"seed": 1}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as sweeps:
        added = [point("lot", {"lot_num_pivots": r}, epoch=epoch) for r in range(1, 21) for epoch in (1, 2)]
        list(sweeps.map(partial(add_point, folder, settings), added))
    found = read_points(folder / "sweep.jsonl")
    assert sorted(found, key=str) == sorted(added, key=str)
    assert add_point(folder, settings, replace(found[3], loss=1.5))[3].loss == 1.5
    assert len(read_points(folder / "sweep.jsonl")) == len(added)
    with pytest.raises(InputError, match="has points with seed 1, not 2"):
        add_point(folder, {"seed": 2}, added[0])


@pytest.mark.parametrize("damaged", [b"[1]", b"{", b"\xff"])
def test_damaged_settings_are_named(damaged, tmp_path):
    (tmp_path / "settings.json").write_bytes(damaged)
    with pytest.raises(InputError, match="settings.json cannot be read .* remove it if the points are of this base"):
        check_settings(tmp_path, {})


def test_the_table_groups_points_by_mechanism_and_compares_them_with_softmax():
    _, *rows = cells(render(POINTS))
    assert [row[:3] for row in rows] == [
        ["softmax", "–", "–"],
        ["lot", "--lot-num-pivots 16", "–"],
        ["lot", "--lot-num-pivots 16", "7 s"],
        ["lot", "--lot-num-pivots 32", "–"],
        ["sinkhorn", "--sinkhorn-epsilon 1", "–"],
    ]
    assert [row[4] for row in rows] == ["–", "+0.2500", "+0.0625", "+0.1250", "+0.0100"]
    assert rows[2][5:] == ["29.90 [28.90, 30.90]", "-0.10* (p = 0.0100)"] and rows[4][5:] == ["–", "–"]


def test_the_table_has_sacrebleu_and_chrf_if_a_point_has_them():
    of_lot = replace(POINTS[1], sacrebleu=28.75, chrf=50.5)
    head, softmax, lot, *_ = cells(render([POINTS[0], of_lot, *POINTS[2:]]))
    assert head[-4:] == ["BLEU", "Δ", "sacreBLEU", "chrF"]
    assert softmax[-2:] == ["–", "–"] and lot[-2:] == ["28.75", "50.50"]
    assert "- sacreBLEU and chrF are of detokenised text." in render([of_lot])
    assert "sacreBLEU" not in render(POINTS)
    head, softmax, *_ = cells(render([replace(EPOCHS[0], sacrebleu=30.5, chrf=50.5), *EPOCHS[1:]]))
    assert head[-4:] == [f"{score}, epoch {epoch}" for score in ("sacreBLEU", "chrF") for epoch in (1, 2)]
    assert softmax[-4:] == ["–", "30.50", "–", "50.50"]


def test_text_is_detokenised_before_it_is_scored(tmp_path):
    task = Namespace(cfg=Namespace(data=tmp_path, target_lang="en"))
    lines, ours = ["it is the cat &apos;s , you see .", "the end ."], ["it is a cat &apos;s , you see .", "end ."]
    of_ours, plain = ["it is a cat's, you see.", "end."], ["it is the cat's, you see.", "the end."]

    def expected(references):
        scores = (metric.corpus_score(of_ours, [references]).score for metric in (BLEU(lowercase=True), CHRF()))
        return dict(zip(("sacrebleu", "chrf"), (round(score, 2) for score in scores), strict=True))

    assert of_detokenised(ours, lines, task) == expected(plain)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "test.en").write_text("It is the cat's - you see.\nThe end.\n")
    raw = expected(["It is the cat's - you see.", "The end."])
    assert of_detokenised(ours, lines, task) == raw != expected(plain)
    (tmp_path / "raw" / "test.en").write_text("The end.\n")
    with pytest.raises(InputError, match="raw/test.en has 1 lines, the test set 2 sentences; mend or remove the file"):
        of_detokenised(ours, lines, task)


EPOCHS = [
    point("softmax", loss=3.0, epoch=2, bleu=bleu(30.0)),
    point("lot", loss=3.25, epoch=2, bleu=bleu(28.5, -1.5)),
    point("lot", loss=3.125, epoch=2, on="pieces"),
    point("sinkhorn", {"sinkhorn_epsilon": 1.0}, loss=2.75, epoch=2),
    point("softmax", loss=4.0, epoch=1),
    point("lot", loss=4.5, epoch=1),
]


def test_the_table_of_several_bases_has_a_column_for_each_epoch():
    assert cells(render([replace(one, bleu=None) for one in EPOCHS])) == [
        ["Mechanism", "Options", "Calibrated", "Epoch 1", "Epoch 2"],
        ["softmax", "–", "–", "4.0000", "3.0000"],
        ["lot", "–", "–", "+0.5000", "+0.2500"],
        ["lot", "–", "without data", "–", "+0.1250"],
        ["sinkhorn", "--sinkhorn-epsilon 1", "–", "–", "-0.2500"],
    ]
    head, softmax, lot, *_ = [line[5:] for line in cells(render(EPOCHS))]
    assert head == ["BLEU, epoch 1", "BLEU, epoch 2"]
    assert (softmax, lot) == (["–", "30.00 [29.00, 31.00]"], ["–", "-1.50* (p = 0.0100)"])


def test_the_figure_of_several_bases_has_a_line_for_each_swap():
    picture = as_bytes(draw(EPOCHS), "svg").decode()
    words = ("softmax", "lot", "lot (calibrated without data)", "sinkhorn --sinkhorn-epsilon 1", "1", "2")
    assert all(f">{word}<" in picture for word in words) and "epochs of pretraining" in picture
    of_base, of_swaps = ([line.get_xydata().tolist() for line in axes.lines] for axes in draw(EPOCHS).axes)
    assert of_base == [[[1, 4.0], [2, 3.0]]]
    assert of_swaps[1:] == [[[1, 0.5], [2, 0.25]], [[2, 0.125]], [[2, -0.25]]], "the first line is the one at zero"


def test_points_of_other_data_or_settings_are_refused(tmp_path):
    (tmp_path / "text").mkdir()
    found = [sum_of_splits(tmp_path, ["valid"])]
    for name in ("dict.de.txt", "test.de-en.de.bin", "valid.de-en.en.idx", "text/test.en", "train.de-en.de.idx"):
        (tmp_path / name).write_text("made again")
        found.append(sum_of_splits(tmp_path, ["valid"]))
    assert len({*found}) == 6 and sum_of_splits(tmp_path, ["valid"]) == found[-1]
    (tmp_path / "test4.de-en.de.bin").write_text("another split")
    assert sum_of_splits(tmp_path, ["valid"]) == found[-1] != sum_of_splits(tmp_path, ["valid", "test4"])
    (tmp_path / "settings.json").write_text(json.dumps({"beam": 5}))
    check_settings(tmp_path, {"beam": 5, "sum of data": found[0], "longest": 80})  # an older version wrote fewer
    with pytest.raises(InputError, match="has points with longest 80, not 512"):
        check_settings(tmp_path, {"beam": 5, "longest": 512})
    check_settings(tmp_path, {"beam": 5, "valid_subset": "valid"})
    with pytest.raises(InputError, match="has points with valid_subset valid, not test1"):
        check_settings(tmp_path, {"beam": 5, "valid_subset": "test1"})
    (tmp_path / "settings.json").write_text(json.dumps({"beam": 5, "data": "bin"}))  # an earlier version without sums
    with pytest.raises(InputError, match="has points with data bin, not other"):
        check_settings(tmp_path, {"beam": 5, "sum of data": found[0], "data": "other"})
    (tmp_path / "settings.json").write_text(json.dumps({"beam": 5, "sum of data": found[1], "data": "bin"}))
    check_settings(tmp_path, {"beam": 5, "sum of data": found[1], "data": "moved/bin/"})
    with pytest.raises(InputError, match="has points with sum of data "):
        check_settings(tmp_path, {"beam": 5, "sum of data": found[0]})


@pytest.mark.parametrize(
    "position, epoch",
    [
        ({"epoch": 8, "iterations_in_epoch": 0}, 7),
        ({"epoch": 8, "iterations_in_epoch": 3}, None),
        ({"epoch": 1, "iterations_in_epoch": 0}, None),
        ({"epoch": 8}, None),
        ({"epoch": True, "iterations_in_epoch": 0}, None),
        ([8], None),
    ],
)
def test_only_a_base_saved_at_the_end_of_an_epoch_has_an_epoch(position, epoch, tmp_path, monkeypatch):
    (tmp_path / "x.pt").write_bytes(b"x")
    state = Checkpoint({"args": Namespace(arch="transformer"), "extra_state": {"train_iterator": position}})
    monkeypatch.setattr("fairseq_lot.plug_and_play.sweep.load_checkpoint", lambda path: state)
    assert read_base(str(tmp_path / "x.pt")).epoch == epoch


def test_messages_name_the_file_that_was_swapped(monkeypatch):
    monkeypatch.setattr("fairseq_lot.plug_and_play.sweep.swap_as_drawn", lambda base, **options: Checkpoint({}))
    assert swap_as(Checkpoint({}, "base.pt"), AttentionSpec(attention="lot", options={})).path == "base.pt"


def test_several_bases_must_be_of_different_epochs():
    one, two, again = (
        BaseCheckpoint("one.pt", "a", 1),
        BaseCheckpoint("two.pt", "b", 2),
        BaseCheckpoint("copy.pt", "a", 1),
    )
    check_bases([BaseCheckpoint("alone.pt", "a", None)])
    check_bases([one, two, again])
    with pytest.raises(InputError, match=r"one.pt \(epoch 1\), .*other.pt \(epoch 1\)"):
        check_bases([one, two, BaseCheckpoint("other.pt", "c", 1)])
    with pytest.raises(InputError, match=r"within.pt \(epoch unknown\)"):
        check_bases([one, BaseCheckpoint("within.pt", "c", None)])


def test_balance_and_losses_by_length_have_a_table_if_they_were_measured():
    balance = {"imbalance": 1.25, "marginal_error": 3e-8, "mean_shift": 0.5}
    losses = {str(most): Loss(nats=0.0, tokens=0) for most in LENGTHS} | {"10": Loss(nats=20.0, tokens=10)}
    losses |= {"more": Loss(nats=30.0, tokens=10)}
    other = {"10": Loss(nats=21.0, tokens=10)}  # of an earlier version, with other ranges
    some = [
        point("softmax", balance=balance, by_length=losses),
        point("lot", balance=balance, by_length=other),
        point("set"),
    ]
    rows = render_balance(some).splitlines()
    assert rows[0].endswith("| Δ(A) | marginal error | mean shift | ≤ 10 | more |")
    assert rows[2].endswith("| 1.250 | 3.0e-08 | 0.5000 | 2.0000 | 3.0000 |")
    assert rows[3].endswith("| 1.250 | 3.0e-08 | 0.5000 | +0.1000 | – |")
    assert rows[4].endswith("| – | – | – | – | – |")
    assert render_balance([point("softmax"), point("lot")]) == ""
    rows = render_balance([*some[:2], point("lot", epoch=2, balance={**balance, "imbalance": 0.5})]).splitlines()
    assert rows[0] == "| Measure | Mechanism | Options | Calibrated | Epoch None | Epoch 2 |"
    assert rows[2:4] == ["| Δ(A) | softmax | – | – | 1.250 | – |", "| Δ(A) | lot | – | – | 1.250 | 0.500 |"]
    assert rows[5] == "| marginal error | lot | – | – | 3.0e-08 | 3.0e-08 |"
    assert rows[7] == "| mean shift | lot | – | – | 0.5000 | 0.5000 |"
