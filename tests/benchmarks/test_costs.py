"""The model of what LOT's layer takes on an H100."""

import pytest

from benchmarks import costs
from benchmarks.__main__ import main


@pytest.mark.parametrize("way", ["forward", "both"])
@pytest.mark.parametrize("n", [512, 2048])
def test_it_gives_back_what_was_measured_without_parts(n, way, monkeypatch):
    monkeypatch.setattr(costs, "num_parts", lambda programs, n, *_: (1, n))
    before = costs.measured("lot", "lot r=32")
    _, launches, seconds = costs.predicted(n, way, before)
    assert seconds - launches * costs.LAUNCH == pytest.approx(before[n][way])


def test_the_table_has_every_length_and_direction(capsys):
    assert main(["costs"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [[way, n] for way in ("forward", "both") for n in ("512", "2048", "8192")]
    assert all(int(row[2]) >= costs.PROCESSORS for row in rows)
