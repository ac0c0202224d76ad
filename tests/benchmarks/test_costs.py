"""Predicted times of layers on an H100."""

import pytest

from benchmarks import costs
from benchmarks.__main__ import main


@pytest.mark.parametrize("way", ["forward", "both"])
@pytest.mark.parametrize("n", [512, 2048])
def test_without_split_tokens_the_prediction_equals_the_measurement(n, way, monkeypatch):
    monkeypatch.setattr(costs, "num_parts", lambda programs, n, *_: (1, n))
    before = costs.measured("lot", "lot r=32")
    _, launches, seconds = costs.predicted(n, way, before)
    assert seconds - launches * costs.LAUNCH == pytest.approx(before[n][way])


def test_the_table_has_every_length_and_direction(capsys):
    assert main(["costs"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    of_lot = "512", "1024", "2048", "8192", "32768"
    lengths = {"LOT": of_lot, "near_far": of_lot[1:], "Sinkhorn, 15 updates": ("128",)}
    assert [row[:3] for row in rows] == [
        [name, way, n] for name, of_name in lengths.items() for way in ("forward", "both") for n in of_name
    ]
    assert all(int(row[3]) >= costs.PROCESSORS for row in rows)
    assert {row[2] for row in rows if row[5].startswith("≈")} == {"1024", "32768"}


def test_the_time_of_softmax_is_linear_in_the_length_and_in_the_tokens():
    softmax = {n: {"both": 3.0 + n} for n in (2048, 8192)}
    assert costs.softmax_seconds(1024, "both", softmax) == 3 + 1024
    assert costs.softmax_seconds(8192, "both", softmax) == 3 + 8192
    assert costs.softmax_seconds(4 * 8192, "both", softmax) == 3 + 4 * 4 * 8192


def test_longer_sentences_add_merging_alone_and_updates_add_no_products():
    # each block merges the sums of all chunks, so merging alone grows with the length
    assert costs.near_far(8192)["forward"].half == pytest.approx(costs.near_far(2048)["forward"].half, rel=0.02)
    assert costs.near_far(8192)["forward"].tf32 > costs.near_far(2048)["forward"].tf32
    one, other = (costs.sinkhorn(128, updates)["forward"] for updates in (3, 15))
    assert one.half == other.half and one.powers * 4 == other.powers


def test_the_slowest_resource_counts_in_full_and_the_others_half():
    work = costs.Work(launches=2, half=costs.HALF, tf32=0, powers=0, other=costs.OTHER / 2, moved=costs.BYTES / 2)
    assert work.seconds == pytest.approx(2 * costs.LAUNCH + 1 + 0.5)
