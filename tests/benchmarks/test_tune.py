"""``python -m benchmarks tune``: its search on stub kernels, and its tables, which kernels read."""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks import tune
from benchmarks.__main__ import main
from fairseq_lot.errors import InputError
from fairseq_lot.kernels import blocks
from fairseq_lot.kernels.blocks import Blocks

CPU = torch.device("cpu")
DEFAULT = Blocks(16, 4, 3)
NAME = "key_forward 16 32 64 64"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the tables; tables that were read before are forgotten."""
    monkeypatch.setenv(blocks.VARIABLE, str(tmp_path))
    for cache in (blocks.tuned, blocks._of_device):
        cache.cache_clear()
    yield tmp_path
    for cache in (blocks.tuned, blocks._of_device):
        cache.cache_clear()


def write(folder, **changed):
    """Write a table whose only entry has a block of 32."""
    entry = {**DEFAULT._asdict(), "block": 32}
    (folder / "cpu.json").write_text(json.dumps({"device": "cpu", "kernels": {NAME: entry}, **changed}))


def ask(kernel="key_forward", sizes=(16, 32, 64, 64)):
    """The blocks that a kernel gets."""
    return blocks.tuned(kernel, CPU, sizes, DEFAULT)


def test_without_a_table_or_an_entry_the_defaults_hold(folder):
    assert ask() == DEFAULT
    write(folder)
    blocks.tuned.cache_clear()
    blocks._of_device.cache_clear()
    assert ask() == Blocks(32, 4, 3)
    assert ask("query_forward") == DEFAULT and ask(sizes=(32, 32, 64, 64)) == DEFAULT


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"device": "NVIDIA H100"}, "it is for 'NVIDIA H100'"),
        ({"kernels": None}, "it has no kernels"),
        ({"kernels": {NAME: {**DEFAULT._asdict(), "block": 48}}}, "block of 'key_forward 16 32 64 64' is 48"),
        ({"kernels": {NAME: {"block": 16, "warps": 4}}}, "stages of 'key_forward 16 32 64 64' is None"),
        ({"kernels": {"flash 16": DEFAULT._asdict()}}, "there is no kernel 'flash 16'"),
    ],
    ids=str,
)
def test_a_broken_or_foreign_table_is_named_once_and_the_defaults_hold(changed, reason, folder):
    write(folder, **changed)
    with pytest.warns(UserWarning, match=f"cpu.json is no table for cpu: {reason}; its kernels run with def") as warned:
        assert ask() == DEFAULT
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask("query_forward") == DEFAULT
    with pytest.raises(ValueError, match=f"^{reason}$"):
        blocks.read("cpu")


def test_a_table_that_is_no_json_is_named(folder):
    (folder / "cpu.json").write_text('{"device": ')
    with pytest.warns(UserWarning, match="cpu.json is no table for cpu: Expecting value"):
        assert ask() == DEFAULT


class Kernels:
    """Two stub kernels whose time depends on their blocks alone."""

    def __init__(self, wrong=(), broken=()):
        self.wrong, self.broken, self.timed = wrong, broken, []
        self.work = tune.Work(self.forward, self.both, self.error)

    def forward(self):
        self.used = ask()

    def both(self):
        self.forward()
        self.of_gradient = blocks.tuned("key_backward", CPU, (16, 32, 64, 64), DEFAULT)

    def error(self):
        self.both()
        if self.used in self.broken:
            raise RuntimeError("out of resource: shared memory\nand more")
        return 1.5 if self.used in self.wrong else 0.5

    def time(self, work, device):
        work()
        self.timed.append(self.used)
        seconds = {16: 9.0, 32: 5.0, 64: 1.0}[self.used.block] + 0.1 * self.used.warps
        return seconds + (self.of_gradient.stages if work == self.both else 0)


def run(kernels, limit=60.0):
    table = blocks.read("cpu")
    tuner = tune.Tuner(table, CPU, limit, timed=kernels.time)
    tuner.tune(kernels.work)
    return tuner, json.loads((Path(os.environ[blocks.VARIABLE]) / "cpu.json").read_text())


def test_the_fastest_correct_blocks_are_written_and_read():
    kernels = Kernels(wrong=[Blocks(64, 4, 3)], broken=[Blocks(32, 8, 3)])
    tuner, table = run(kernels)
    entry = table["kernels"][NAME]
    assert {field: entry[field] for field in Blocks._fields} == {"block": 32, "warps": 2, "stages": 3}
    assert entry["tried"]["64 4 3"] == "wrong"
    assert entry["tried"]["32 8 3"] == "RuntimeError: out of resource: shared memory"
    assert not {Blocks(64, 4, 3), Blocks(32, 8, 3)} & set(kernels.timed)
    assert ask() == Blocks(32, 2, 3)
    assert blocks.tuned("key_backward", CPU, (16, 32, 64, 64), DEFAULT).stages == 1
    row = tuner.rows()[0]
    assert row[:3] == [NAME, "16 4 3", "32 2 3"] and row[-2:] == [1, 1]


def test_the_search_stops_in_time_and_continues_where_it_stopped(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tune, "monotonic", lambda: now[0])
    first = Kernels()

    def slow(work, device):
        now[0] += 1
        return Kernels.time(first, work, device)

    first.time = slow
    with pytest.raises(tune.Stopped):
        run(first, limit=1.5)
    # the table has the faster of the two candidates that were tried
    assert ask() == Blocks(32, 4, 3) and len(first.timed) == 2
    now[0] = 0.0
    second = Kernels()
    _, table = run(second)
    assert not set(first.timed) & set(second.timed[: len(second.timed) // 2])
    assert (table["kernels"][NAME]["block"], table["kernels"][NAME]["warps"]) == (64, 2)
    third = Kernels()
    assert run(third)[1] == table and not third.timed


def test_a_test_that_does_not_launch_the_kernel_is_an_error():
    kernels = Kernels()
    kernels.work = kernels.work._replace(error=lambda: 0.0)
    with pytest.raises(
        InputError, match="^key_forward 16 32 64 64 is not launched by the problem that should test it$"
    ):
        run(kernels)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "there is no GPU; --rehearse runs without one"),
        (["--mechanism", "flash"], "invalid choice: 'flash'"),
    ],
)
def test_no_gpu_and_an_unknown_mechanism_are_refused(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        code = main(["tune", *argv])
    except SystemExit as exit:
        code = exit.code
    assert code == 2 and message in capsys.readouterr().err


def test_a_rehearsal_needs_a_folder(capsys, monkeypatch):
    monkeypatch.delenv(blocks.VARIABLE)
    assert main(["tune", "--rehearse"]) == 2
    assert "--rehearse needs a folder for its table: FAIRSEQ_LOT_TUNED=FOLDER" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton: pip install -e '.[kernels-test]'")
def test_a_rehearsal_tunes_in_the_interpreter(folder):
    command = [sys.executable, "-m", "benchmarks", "tune", "--rehearse", "--mechanism", "lot", "near_far", "set"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
    entries = json.loads((folder / "cpu.json").read_text())["kernels"]
    kernels = {"key_forward", "query_forward", "query_backward", "key_backward", "solve_forward", "solve_backward"}
    kernels |= {"convolve", "convolve_backward", "summarise_keys", "merge", "attend", "query_gradients"}
    kernels |= {"key_gradients", "next_token", "attend_expected", "expected_forward", "expected_backward"}
    assert {name.split()[0] for name in entries} == kernels
    assert all(type(time) is float for entry in entries.values() for time in entry["tried"].values())
