"""scripts/smoke.py, the smoke test for GPU machines, on the CPU."""

import re
import sys

import pytest
import torch

from fairseq_lot.attention.registry import MECHANISMS
from tests.conftest import program


@pytest.fixture(scope="module")
def smoke():
    path = sys.path[:]
    module = program("scripts/smoke.py")
    sys.path[:] = path
    return module


def test_the_allowed_error_follows_from_the_cpu_and_from_one_rounding(smoke):
    exact = [torch.ones(4).double()] * 2
    usual = [x * 1.01 for x in exact]
    found = [exact[0] * 1.04, exact[1] * 1.05]
    assert smoke.judge(found, exact, usual, torch.float32) == ["4.0e-02", "FAILED: 5.0e-02, more than 4.0e-02"]
    rounded = [x * 1.0009 for x in exact]
    assert smoke.judge(rounded, exact, exact, torch.float16) == ["9.0e-04", "9.0e-04"]
    assert all("FAILED" in said for said in smoke.judge(rounded, exact, exact, torch.float32))
    assert "FAILED" in smoke.judge([exact[0] * torch.nan], exact[:1], usual[:1], torch.float32)[0]


@pytest.mark.slow
def test_the_smoke_test_sees_a_fault(smoke, monkeypatch, capsys):
    assert smoke.main(["--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "| lot, query_updates 1, causal" in said and "not run: " in said and re.search(r"\n0 of \d+ failed\n$", said)
    real, calls = smoke.results, []

    def broken(*arguments):
        """Double the gradients of one call: softmax in float32 on the device."""
        calls.append(arguments)
        values, grads = real(*arguments)
        return values, grads * (2 if len(calls) == 3 * 3 * list(MECHANISMS).index("softmax") + 1 else 1)

    monkeypatch.setattr(smoke, "results", broken)
    assert smoke.main(["--device", "cpu"]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "FAILED" in line)
    assert [cell.strip() for cell in line.split("|")[1:3]] == ["softmax", "fp32"]


def test_an_absent_device_is_refused_in_one_line(smoke, capsys):
    with pytest.raises(SystemExit, match="2"):
        smoke.main(["--device", "toaster"])
    assert "--device 'toaster' cannot be used here" in capsys.readouterr().err
