"""The benchmark command: what it counts, what it leaves out, what it writes, and what it refuses."""

import csv
import math

import pytest
import torch

from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.benchmark.contenders import Contender, mechanisms, peer
from fairseq_lot.benchmark.measure import Figures, LiveTensors, first_seconds, peak_memory
from fairseq_lot.benchmark.render import crossings, render
from fairseq_lot.cli import main

PEER = "def build(*, num_heads, head_dim, num_pivots):\n    return lambda q, k, v: v * num_pivots\n"
SMALL = ["--tokens", "8", "--num-heads", "2", "--head-dim", "4", "--repeats", "1", "--warm-up", "0"]


def rows(**times):
    """Figures of contenders at lengths 1, 2, 4, ...; all three measures have the same number."""
    return {(name, 2**i): Figures(x, x, x) for name, row in times.items() for i, x in enumerate(row)}


def test_live_tensors_are_counted_and_views_and_dead_ones_are_not():
    x = torch.zeros(1000)
    with LiveTensors() as live:
        y = x + 1
        y.view(10, 100)[2:] += 1
        for _ in range(5):
            z = y * 2  # one more while the one before is still bound
        del y, z
        x + 1
    assert live.peak == 3 * 4000


def test_attention_that_makes_a_square_matrix_needs_memory_for_it():
    def attend(q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    peaks = []
    for n in (50, 200):
        inputs = [torch.randn(1, 1, n, 2, requires_grad=True) for _ in range(3)]
        peaks.append(peak_memory(attend, inputs, torch.randn(1, 1, n, 2)))
    assert peaks[0] >= 50 * 50 * 4
    assert 12 < peaks[1] / peaks[0] < 17


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to"), MemoryError()])
def test_what_does_not_fit_in_memory_is_left_out(error, tmp_path, monkeypatch, capsys):
    def attend(q, k, v):
        if q.size(2) > 2:
            raise error
        return v * 1

    inputs = [torch.zeros(1, 1, 4, 2, requires_grad=True) for _ in range(3)]
    assert first_seconds(attend, inputs, torch.ones(1, 1, 4, 2)) == math.inf
    large = Contender("large", None, lambda *_: attend)
    monkeypatch.setattr("fairseq_lot.benchmark.bench.mechanisms", lambda *_: [large])
    assert main(["bench", "--out", str(tmp_path), "--lengths", "2", "4", *SMALL]) == 0
    lines = (tmp_path / "bench.csv").read_text().splitlines()[1:]
    found = [(row["contender"], row["length"]) for row in csv.DictReader(lines)]
    assert ("large", "2") in found and ("large", "4") not in found


def test_every_mechanism_is_there_and_those_with_pivots_once_for_every_rank():
    found = mechanisms(None, 2, 4, [3, 5])
    assert {one.name for one in found} == set(MECHANISMS)
    assert [one.num_pivots for one in found if one.name == "lot"] == [3, 5]
    assert [one.label for one in mechanisms(["lot:num_pivots=7,num_updates=2"], 2, 4, [3])] == ["lot num_updates=2 r=7"]
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    for one in found:
        assert one.build(torch.device("cpu"), torch.float32)(q, k, v).shape == v.shape


def test_crossings_are_lengths_from_which_on_it_stays_ahead():
    table = rows(sdpa=[1, 2, 4, 8], late=[2, 1, 5, 7], never=[2, 3, 5, 9], always=[0.5, 1, 2, 4], stopped=[2, 1])
    late, never, always, stopped = crossings(table)
    assert "forward from N = 8" in late
    assert "forward nowhere" in never
    assert "forward + backward from N = 1" in always
    assert "forward from N = 2" in stopped
    assert "| late | 2e+03 (0.5) | 1e+03 (2) | 5e+03 (0.8) | 7e+03 (1.1) |" in render("", table)
    assert "| stopped | 2e+03 (0.5) | 1e+03 (2) | – | – |" in render("", table)


def test_command_writes_table_figures_and_crossings(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "peer.py").write_text(PEER)
    out = tmp_path / "out"
    words = ["--lengths", "4", "2", "--num-pivots", "2", "--peer", f"other={tmp_path / 'other'}", "--mechanism", "lot"]
    assert main(["bench", "--out", str(out), *SMALL, *words, "--threads", "1"]) == 0
    lines = (out / "bench.csv").read_text().splitlines()
    assert all(word in lines[0] for word in ("1 threads", "torch", "commit", "float32", "warm-up 0", "quartile of 1"))
    table = list(csv.DictReader(lines[1:]))
    names = ["sdpa", "lot r=2", "other r=2", "products alone r=2"]
    assert [(row["contender"], row["length"]) for row in table] == [(name, n) for n in "24" for name in names]
    assert all(float(row["forward_seconds"]) > 0 and int(row["peak_bytes"]) > 0 for row in table)
    assert capsys.readouterr().out.strip() == (out / "bench.md").read_text().strip()
    figure = (out / "bench.svg").read_text()
    assert all(name in figure for name in names)


def test_what_is_slow_is_left_out_at_longer_lengths(tmp_path):
    words = ["--mechanism", "softmax", "--lengths", "2", "4", "--patience", "0"]
    assert main(["bench", "--out", str(tmp_path), *SMALL, *words]) == 0
    assert {row.split(",")[1] for row in (tmp_path / "bench.csv").read_text().splitlines()[2:]} == {"2"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mechanism", "lots"], "'lots'"),
        (["--mechanism", "lot:pivots=3"], "'pivots'"),
        (["--mechanism", "lot:num_pivots"], "'num_pivots'"),
        (["--peer", "nowhere"], "'nowhere'"),
        (["--lengths", "0"], "--lengths"),
        (["--repeats", "0"], "--repeats"),
        (["--device", "abacus"], "'abacus'"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, capsys, words, message):
    assert main(["bench", "--out", str(tmp_path / "out"), *SMALL, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_peer_that_fails_is_named(tmp_path):
    (tmp_path / "peer.py").write_text("import no_such_module_here\n")
    with pytest.raises(ValueError, match="no_such_module_here"):
        peer(f"broken={tmp_path}", 2, 4, 3)
