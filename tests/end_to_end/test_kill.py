"""kill -9 at the worst moments: nothing is half-written, and the next call goes on as if nothing had happened."""

import contextlib
import json
import os
import re
import shutil
import termios

import pytest
import torch

from tests.end_to_end.conftest import BIN, contents, fairseq_lot, train, weights_of
from tests.end_to_end.deadly import finish, kill_when, killed, refused, starter

pytestmark = pytest.mark.slow
SWAP = (BIN / "fairseq-lot", "swap", "--attention", "lot", "--no-calibrate")


@pytest.fixture
def start(tmp_path_factory):
    return starter(tmp_path_factory.mktemp("deadly"))


def loss_curve(log):
    """The losses of each epoch on both sets, as they were logged last."""
    curve = {}
    for line in log.read_text().splitlines():
        if found := re.search(r"epoch (\d+) \|( valid .*\|)? loss ([\d.]+) \|", line):
            curve[found[1], bool(found[2])] = found[3]
    return curve


ESP = "--esp-anneal 0.5 --esp-num-slices 4 --esp-slicer learnable"
TRAININGS = {
    "pretrain": ("--arch", "lot_transformer_small"),
    "finetune": ("--arch", "diff_transformer_small", "--attention", "esp", *ESP.split()),
}


def differential_esp(data, folder):
    """A differential base of a few updates, with ESP in its place."""
    base = train(data / "bin", folder, "--arch", "diff_transformer_small", "--share-all-embeddings", updates=5)
    fairseq_lot("swap", "--path", base, "--attention", "esp", *ESP.split(), "--out", folder / "swapped.pt")
    return folder / "swapped.pt"


@pytest.mark.parametrize("script", TRAININGS)
def test_training_goes_on_as_if_it_had_not_been_killed(script, start, data, tmp_path):
    words = [data / "bin"] if script == "pretrain" else [differential_esp(data, tmp_path / "base"), data / "bin"]

    def training(save, *flags, die_at=""):
        return start("bash", f"scripts/{script}.sh", *words, tmp_path / save, *TRAININGS[script], "--max-tokens", 1000,
                     "--max-epoch", 3, "--dropout", 0.1, "--warmup-updates", 9, *flags, die_at=die_at)  # fmt: skip

    finish(training("whole"))
    killed(training("killed", die_at="write:2"))  # the second epoch's checkpoint is half written
    assert (tmp_path / "killed" / "checkpoint_best.pt.tmp").exists()
    killed(training("killed", die_at="copy:1"))  # half copied to checkpoint_last.pt
    log = tmp_path / "killed" / "train.log"
    kill_when(training("killed"), lambda: "epoch 002 | loss" in log.read_text())
    assert "epoch 003 | valid" not in log.read_text()
    finish(training("killed"))

    expected = loss_curve(tmp_path / "whole" / "train.log")
    assert len(expected) == 6 and loss_curve(log) == expected
    weights = [weights_of(tmp_path / save / "checkpoint_best.pt") for save in ("whole", "killed")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    finish(training("killed"))
    assert loss_curve(log) == expected and log.read_text().count("epoch 003 | valid") == 1, "trained once"

    output = refused(training("killed", "--dropout", 0.3))
    assert "was trained with" in output and "remove it" in output and output.count("\n") == 1
    if script == "finetune":
        words[0].touch()
        assert "was trained from an earlier" in refused(training("killed"))


def test_scoring_goes_on_and_follows_its_checkpoint(start, data, tmp_path):
    """score.sh, killed while it translates and before it has scored; then again, after its checkpoint has changed."""
    base, folder = tmp_path / "base", tmp_path / "data"
    shutil.copytree(data / "bin", folder, ignore=shutil.ignore_patterns("text"))
    shutil.copytree(data / "text", folder / "text")
    checkpoint = train(data / "bin", base, "--arch", "softmax_transformer_small", updates=5)
    out, row = tmp_path / "test.out", tmp_path / "test.jsonl"
    label = '{"system": "softmax", "settings": {"attention": "softmax"}, "stage": "base"}'

    def score(die_at=""):
        words = (checkpoint, folder, tmp_path / "test", "-", label, "--beam", 1, "--batch-size", 8)
        return start("bash", "scripts/score.sh", *words, die_at=die_at)

    part = out.with_name("test.part")
    kill_when(score(), lambda: part.exists() and part.stat().st_size > 0)
    assert not out.exists() and not row.exists()
    killed(score(die_at="replace"))
    assert out.exists() and not row.exists()
    translated = out.stat().st_mtime_ns
    finish(score())
    before = json.loads(row.read_text())
    finish(score())
    assert json.loads(row.read_text()) == before and out.stat().st_mtime_ns == translated, "the same row"
    shutil.copy(train(data / "bin", tmp_path / "more", "--arch", "softmax_transformer_small", updates=60), checkpoint)
    finish(score())
    assert out.stat().st_mtime_ns > translated
    assert json.loads(row.read_text())["tokenised"] != before["tokenised"]


def test_scripts_say_what_is_missing_from_any_folder(start):
    for script in ("pretrain", "finetune", "plug_and_play", "score"):
        output = refused(start("bash", "-c", f"cd tests && bash ../scripts/{script}.sh"))
        assert f"{script}.sh: error: give " in output and output.count("\n") == 1


def unhidden(folder):
    """Files that have their name; a kill leaves at most a hidden part beside them."""
    return {path: content for path, content in contents(folder).items() if not path.name.startswith(".")}


@pytest.mark.parametrize("die_at", ["fsync", "replace"])
def test_swap(die_at, start, stock_checkpoint, tmp_path):
    out = tmp_path / "out" / "lot.pt"
    words = (*SWAP, "--path", stock_checkpoint, "--out", out)
    killed(start(*words, die_at=die_at))
    assert unhidden(out.parent) == {}
    finish(start(*words))
    assert list(unhidden(out.parent)) == [out]
    before = out.read_bytes()
    killed(start(*words, "--lot-num-pivots", 3, die_at=die_at))
    assert unhidden(out.parent) == {out: before}


def test_calibrate(start, data, stock_checkpoint, tmp_path):
    swapped, folder = tmp_path / "lot.pt", tmp_path / "out"
    finish(start(*SWAP, "--path", stock_checkpoint, "--out", swapped))
    words = [BIN / "fairseq-lot", "calibrate", data / "bin", "--path", swapped, "--held-out", 8, "--joint-steps", 3]
    try:
        terminal, end = os.openpty()  # where progress is shown
    except OSError as error:
        pytest.skip(f"no terminal can be had here ({error}); mount devpts at /dev/pts")
    termios.tcsetwinsize(end, (24, 200))
    os.set_blocking(terminal, False)
    shown = bytearray()

    def calibrate(out, steps, die_at="", **options):
        return start(*words, "--steps", steps, "--out", folder / out, die_at=die_at, **options)

    def is_fitting():
        with contextlib.suppress(BlockingIOError):
            shown.extend(os.read(terminal, 4096))
        return b"error per layer" in shown

    kill_when(calibrate("c.pt", 100_000, stderr=end), is_fitting)
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
    row = tmp_path / "results" / "r.jsonl"

    def score(generated, die_at=""):
        label = '{"system": "LOT", "settings": {"attention": "lot"}, "stage": "plug-and-play"}'
        return start(
            BIN / "fairseq-lot", "score", "--generated", tmp_path / generated, "--out", row, "--label", label,
            "--tokenised-reference", tmp_path / "test.en", die_at=die_at,
        )  # fmt: skip

    killed(score("test.out", die_at=die_at))
    assert unhidden(row.parent) == {}
    finish(score("test.out"))
    both = unhidden(row.parent)
    assert both.keys() == {row, row.with_name("r.sentences.tsv")}
    (tmp_path / "better.out").write_text("".join(f"T-{i}\tb c d e\nH-{i}\t-0.1\tb c d e\n" for i in range(9)))
    killed(score("better.out", die_at=die_at))
    assert unhidden(row.parent) == both
    finish(score("better.out"))
    assert all(path.read_bytes() != both[path] for path in both)
