"""What a curve keeps and shows of swaps at several epochs."""

import json
from dataclasses import asdict

import pytest

from fairseq_lot.errors import InputError
from fairseq_lot.plug_and_play.curve import finished_epochs
from fairseq_lot.plug_and_play.curve_table import CurvePoint, draw, render
from fairseq_lot.plug_and_play.sweep_points import read_points


def point(epoch, attention, loss, options="", *, calibrated_on=""):
    return CurvePoint(
        epoch=epoch, base=f"sum of {epoch}", attention=attention, options=options, calibrated=bool(calibrated_on),
        calibration_seconds=None, loss=loss, tokens=900, bleu=None, seed=1, commit="c0ffee", threads=1,
        calibrated_on=calibrated_on or "text",
    )  # fmt: skip


POINTS = [
    point(2, "softmax", 3.0),
    point(2, "lot", 3.25),
    point(2, "lot", 3.125, calibrated_on="pieces"),
    point(2, "sinkhorn", 2.75, "--sinkhorn-epsilon 1.0"),
    point(1, "softmax", 4.0),
    point(1, "lot", 4.5),
]


def test_the_table_has_a_column_for_each_epoch():
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in render(POINTS).splitlines()[:6]]
    assert lines[0] == ["Mechanism", "Options", "Calibrated", "Epoch 1", "Epoch 2"]
    assert lines[2:] == [
        ["softmax", "–", "–", "4.0000", "3.0000"],
        ["lot", "–", "–", "+0.5000", "+0.2500"],
        ["lot", "–", "calibrated without data", "–", "+0.1250"],
        ["sinkhorn", "--sinkhorn-epsilon 1.0", "–", "–", "-0.2500"],
    ]


def test_points_are_read_back(tmp_path):
    file = tmp_path / "curve.jsonl"
    file.write_text("".join(json.dumps(asdict(one)) + "\n" for one in POINTS))
    points = read_points(file, CurvePoint)
    assert list(points.values()) == POINTS and (2, "lot", "", "pieces") in points


def test_the_figure_has_a_line_for_each_way(tmp_path):
    draw(POINTS, tmp_path / "curve.svg")
    picture = (tmp_path / "curve.svg").read_text()
    for words in ("softmax", "lot", "lot calibrated without data", "sinkhorn --sinkhorn-epsilon 1.0", "1", "2"):
        assert f">{words}<" in picture
    draw(POINTS, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == picture


def test_epochs_are_those_that_are_finished():
    def state(**position):
        return {"extra_state": {"train_iterator": position}}

    assert finished_epochs(state(epoch=8, iterations_in_epoch=0), "x.pt") == 7
    for position, words in (
        ({"epoch": 8, "iterations_in_epoch": 3}, "x.pt was saved within epoch 8"),
        ({"epoch": 1, "iterations_in_epoch": 0}, "x.pt was saved within epoch 1"),
        ({"epoch": 8}, "x.pt does not say its epoch"),
    ):
        with pytest.raises(InputError, match=words):
            finished_epochs(state(**position), "x.pt")
    for broken in (None, {"train_iterator": [8]}):
        with pytest.raises(InputError, match="does not say its epoch"):
            finished_epochs({"extra_state": broken}, "x.pt")
