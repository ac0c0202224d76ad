"""The ways that a sweep tries, and how it shows what they gave."""

import json
from dataclasses import asdict

import pytest

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.results import MetricScore
from fairseq_lot.plug_and_play.sweep_points import Point, expand, parse, read_points
from fairseq_lot.plug_and_play.sweep_table import draw, render


def bleu(score, delta=None):
    low, high = score - 1, score + 1
    comparison = {} if delta is None else {"base": score - delta, "delta": delta, "p": 0.01}
    return MetricScore(score=score, low=low, high=high, signature="nrefs:1", **comparison)


def point(attention, options="", *, calibrated=False, loss=2.0, **others):
    fields = {"calibration_seconds": 7.4 if calibrated else None, "tokens": 900, "bleu": None, "seed": 1}
    fields |= {"commit": "c0ffee", "threads": 1} | others
    return Point(attention=attention, options=options, calibrated=calibrated, loss=loss, **fields)


POINTS = [
    point("softmax", bleu=bleu(30.0)),
    point("lot", "--lot-num-pivots 16", loss=2.25, bleu=bleu(28.5, -1.5)),
    point("sinkhorn", "--sinkhorn-epsilon 1.0", loss=2.01),
    point("lot", "--lot-num-pivots 32", loss=2.125, bleu=bleu(29.0, -1.0)),
    point("lot", "--lot-num-pivots 16", calibrated=True, loss=2.0625, bleu=bleu(29.9, -0.1)),
]


def test_slashes_stand_for_every_combination():
    assert expand("lot") == [("lot", "")]
    assert expand("lot --lot-num-pivots 8/16 --attention-sites encoder/encoder,cross") == [
        ("lot", f"--lot-num-pivots {r} --attention-sites {sites}")
        for r in (8, 16)
        for sites in ("encoder", "encoder,cross")
    ]


def test_options_are_read_as_on_the_command_line():
    assert parse("lot", "--lot-num-pivots 8 --lot-learn-masses false --attention-sites cross") == {
        "lot_num_pivots": 8,
        "lot_learn_masses": False,
        "attention_sites": "cross",
    }
    for options in ("--lot-num-pivots many", "--lot-pivots 8", "8"):
        with pytest.raises(InputError, match="--try 'lot "):
            parse("lot", options)
    with pytest.raises(InputError, match="names no mechanism"):
        expand("")


def test_points_are_read_back_and_broken_lines_named(tmp_path):
    file = tmp_path / "sweep.jsonl"
    assert read_points(file) == {}
    file.write_text("".join(json.dumps(asdict(one)) + "\n" for one in POINTS))
    assert list(read_points(file).values()) == POINTS
    for line in ("{", "[]", '{"attention": "lot"}'):
        file.write_text(json.dumps(asdict(POINTS[0])) + "\n" + line + "\n")
        with pytest.raises(InputError, match="line 2"):
            read_points(file)


def test_the_table_groups_and_compares():
    lines = render(POINTS).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:7]]
    assert [row[:3] for row in cells] == [
        ["softmax", "–", "–"],
        ["lot", "--lot-num-pivots 16", "–"],
        ["lot", "--lot-num-pivots 16", "7 s"],
        ["lot", "--lot-num-pivots 32", "–"],
        ["sinkhorn", "--sinkhorn-epsilon 1.0", "–"],
    ]
    assert [row[4] for row in cells] == ["–", "+0.2500", "+0.0625", "+0.1250", "+0.0100"]
    assert cells[2][5:] == ["29.90 [28.90, 30.90]", "-0.10* (p = 0.0100)"] and cells[4][5:] == ["–", "–"]


@pytest.mark.parametrize("number", [1, 4, 5])
def test_the_figure_has_a_curve_for_each_way(number, tmp_path):
    draw(POINTS[:number], tmp_path / "sweep.svg")
    picture = (tmp_path / "sweep.svg").read_text()
    assert "validation loss (nats per token)" in picture and "number of pivots r" in picture
    for words in {1: ["softmax"], 4: ["lot", "sinkhorn --sinkhorn-epsilon 1.0"], 5: ["lot (calibrated)"]}[number]:
        assert f">{words}<" in picture
    assert ("lot (calibrated)" in picture) == (number == 5)
    draw(POINTS[:number], tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == picture
