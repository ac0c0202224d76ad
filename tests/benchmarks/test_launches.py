"""The time of a kernel launch, measured without a GPU."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="no triton: pip install -e '.[kernels-test]'"
    ),
]


def test_our_launcher_is_faster_than_tritons():
    command = [sys.executable, "-m", "benchmarks", "launches", "--repeats", "40"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "ward |" in line]
    names = ("near_far with tangents", "near_far at cross", "lot", "lot, sentences of two parts", "convolution of lot")
    names += ("sinkhorn", "solver of Sinkhorn and SeT")
    assert [row[0] for row in rows] == [name for name in names for _ in range(2)]
    assert [int(row[2]) for row in rows] == [3, 4, 1, 1, 2, 2, 5, 6, 1, 1, 1, 1, 1, 1]
    assert all(float(ours) < float(theirs) for *_, ours, theirs, _ in rows)
