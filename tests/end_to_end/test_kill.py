"""kill -9 at the worst moments: nothing is half-written, and the next call goes on as if nothing had happened."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.end_to_end.conftest import BIN, ROOT, contents, weights_of

# Python runs this at its start: the process kills itself at the named moment.
DEADLY = """
import builtins, io, os, shutil

moment, _, times = os.environ.get("DIE_AT", "").partition(":")
left = int(times or 1)
original_open = builtins.open


def due():
    global left
    left -= 1
    return left == 0


def die():
    os.kill(os.getpid(), 9)


def copyfile(source, target):  # half a copy
    data = original_open(source, "rb").read()
    if not due():
        return original_open(target, "wb").write(data) and target
    with original_open(target, "wb") as file:
        file.write(data[: len(data) // 2])
    die()


class Half(io.FileIO):
    def write(self, data):
        super().write(bytes(data)[: len(data) // 2])
        die()


def open_(file, mode="r", *args, **kwargs):
    deadly = str(file).endswith("checkpoint_best.pt.tmp") and mode == "wb" and due()
    return Half(file, "wb") if deadly else original_open(file, mode, *args, **kwargs)


if moment == "copy":
    shutil.copyfile = copyfile
elif moment == "write":
    builtins.open = open_
elif moment:
    setattr(os, moment, lambda *args, **kwargs: die())
"""


@pytest.fixture
def start(tmp_path):
    """Start a command in a process group of its own, which dies at the given moment."""
    (tmp_path / "deadly").mkdir()
    (tmp_path / "deadly" / "sitecustomize.py").write_text(DEADLY)
    path = os.pathsep.join([str(tmp_path / "deadly"), str(ROOT)])

    def start(*words, die_at="", **variables):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "VIRTUAL_ENV": sys.prefix, "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": path, "DIE_AT": die_at, **{name: str(value) for name, value in variables.items()},
        }  # fmt: skip
        return subprocess.Popen(
            [str(word) for word in words], env=environment, cwd=ROOT, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    return start


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    return output


def killed(process):
    """It must have died as it was told to, and not have ended by itself."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode in (-9, 137), (process.returncode, output[-3000:])


def kill_when(process, condition):
    while not condition():
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def loss_curve(log):
    """The losses of each epoch on both sets, as they were logged last."""
    curve = {}
    for line in log.read_text().splitlines():
        if found := re.search(r"epoch (\d+) \|( valid .*\|)? loss ([\d.]+) \|", line):
            curve[found[1], bool(found[2])] = found[3]
    return curve


@pytest.mark.slow
def test_pretraining_goes_on_as_if_it_had_not_been_killed(start, data, tmp_path):
    settings = {"DATA": data / "bin", "SIZE": "small", "EPOCHS": 3, "MAX_TOKENS": 1000, "DEVICE": "cpu"}

    def pretrain(save, die_at=""):
        return start("bash", "scripts/pretrain.sh", SAVE=tmp_path / save, die_at=die_at, **settings)

    finish(pretrain("whole"))
    killed(pretrain("killed", die_at="write:2"))  # the second epoch's checkpoint is half written
    assert (tmp_path / "killed" / "checkpoint_best.pt.tmp").exists()
    killed(pretrain("killed", die_at="copy:1"))  # half copied to checkpoint_last.pt
    log = tmp_path / "killed" / "train.log"
    kill_when(pretrain("killed"), lambda: "epoch 002 | loss" in log.read_text())
    assert "epoch 003 | valid" not in log.read_text()
    finish(pretrain("killed"))

    expected = loss_curve(tmp_path / "whole" / "train.log")
    assert len(expected) == 6 and loss_curve(log) == expected
    weights = [weights_of(tmp_path / save / "checkpoint_best.pt") for save in ("whole", "killed")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert "is finished" in finish(pretrain("killed"))


def unhidden(folder):
    """Files that have their name; a kill leaves at most a hidden part beside them."""
    return {path: content for path, content in contents(folder).items() if not path.name.startswith(".")}


@pytest.mark.parametrize("die_at", ["fsync", "replace"])
def test_swap(die_at, start, stock_checkpoint, tmp_path):
    out = tmp_path / "out" / "lot.pt"
    words = (BIN / "fairseq-lot", "swap", "--path", stock_checkpoint, "--attention", "lot", "--out", out)
    killed(start(*words, die_at=die_at))
    assert unhidden(out.parent) == {}
    finish(start(*words))
    assert list(unhidden(out.parent)) == [out]
    before = out.read_bytes()
    killed(start(*words, "--lot-num-pivots", 3, die_at=die_at))
    assert unhidden(out.parent) == {out: before}


@pytest.mark.slow
def test_calibrate(start, data, stock_checkpoint, tmp_path):
    swapped, folder = tmp_path / "lot.pt", tmp_path / "out"
    finish(start(BIN / "fairseq-lot", "swap", "--path", stock_checkpoint, "--attention", "lot", "--out", swapped))
    words = [BIN / "fairseq-lot", "calibrate", data / "bin", "--path", swapped, "--held-out", 8]

    def calibrate(out, steps, die_at=""):
        return start(*words, "--steps", steps, "--out", folder / out, die_at=die_at)

    kill_when(calibrate("c.pt", 100_000), lambda: folder.exists() and any(folder.iterdir()))
    assert unhidden(folder) == {}
    killed(calibrate("c.pt", 5, die_at="fsync"))
    assert unhidden(folder) == {}
    finish(calibrate("c.pt", 5))
    finish(calibrate("whole.pt", 5))
    weights = [weights_of(folder / name) for name in ("c.pt", "whole.pt")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize("die_at", ["fsync", "replace"])
def test_score(die_at, start, tmp_path):
    (tmp_path / "test.out").write_text("".join(f"T-{i}\tb c d e\nH-{i}\t-0.1\ta b c d e\n" for i in range(9)))
    (tmp_path / "test.en").write_text("b c d e\n" * 9)
    results = tmp_path / "results" / "r.jsonl"

    def score(seed, die_at=""):
        return start(
            BIN / "fairseq-lot", "score", "--generated", tmp_path / "test.out", "--results", results,
            "--tokenised-reference", tmp_path / "test.en", "--dataset", "toy", "--architecture", "a",
            "--backbone", "b", "--mechanism", "m", "--stage", "base", "--seed", seed, die_at=die_at,
        )  # fmt: skip

    killed(score(1, die_at=die_at))
    assert unhidden(results.parent) == {}
    finish(score(1))
    before = results.read_bytes()
    killed(score(2, die_at=die_at))
    assert unhidden(results.parent) == {results: before}
    finish(score(2))
    assert results.read_bytes().startswith(before) and results.read_bytes().count(b"\n") == 2
