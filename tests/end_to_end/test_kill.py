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
    "pretrain": {"BACKBONE": "transformer"},
    "finetune": {"BACKBONE": "diff_transformer", "ATTENTION": "esp", "OPTIONS": ESP},
}


def differential_esp(data, folder):
    """A differential base of a few updates, with ESP in its place."""
    base = train(data / "bin", folder, "--arch", "diff_transformer_small", "--share-all-embeddings", updates=5)
    fairseq_lot("swap", "--path", base, "--attention", "esp", *ESP.split(), "--out", folder / "swapped.pt")
    return folder / "swapped.pt"


@pytest.mark.parametrize("script", TRAININGS)
def test_training_goes_on_as_if_it_had_not_been_killed(script, start, data, tmp_path):
    settings = {"DATA": data / "bin", "SIZE": "small", "MAX_TOKENS": 1000, "DEVICE": "cpu"}
    settings |= {"EPOCHS": 3, "FINETUNE_EPOCHS": 3, "BEST": "loss"} | TRAININGS[script]
    if script == "finetune":
        settings["SWAPPED"] = differential_esp(data, tmp_path / "base")

    def training(save, die_at="", **more):
        return start("bash", f"scripts/stages/{script}.sh", SAVE=tmp_path / save, die_at=die_at, **settings | more)

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
    assert "is finished" in finish(training("killed"))

    output = refused(training("killed", DROPOUT=0.3))
    assert "was made with" in output and "remove it" in output
    if script == "finetune":
        settings["SWAPPED"].touch()
        assert "was trained from an earlier" in refused(training("killed"))


def test_scoring_goes_on_and_follows_its_checkpoint(start, data, tmp_path):
    """score.sh, killed while it translates and before it has scored; then again, after its checkpoint has changed."""
    base, folder = tmp_path / "base", tmp_path / "data"
    shutil.copytree(data / "bin", folder, ignore=shutil.ignore_patterns("text"))
    shutil.copytree(data / "text", folder / "text")
    (folder / "description.txt").write_text("synthetic")
    checkpoint = train(data / "bin", base, "--arch", "softmax_transformer_small", updates=5)
    out, results = tmp_path / "test.out", tmp_path / "r.jsonl"
    settings = {"CKPT": checkpoint, "DATA": folder, "OUT": out, "RESULTS": results, "SIZE": "small", "DEVICE": "cpu"}

    def score(die_at="", **more):
        return start("bash", "scripts/stages/score.sh", die_at=die_at, BEAM=1, BATCH=8, **settings | more)

    part = out.with_name("test.out.part")
    kill_when(score(), lambda: part.exists() and part.stat().st_size > 0)
    assert not out.exists() and not results.exists()
    killed(score(die_at="replace"))
    assert out.exists() and not results.exists()
    translated = out.stat().st_mtime_ns
    finish(score())
    assert out.stat().st_mtime_ns == translated and results.read_text().count("\n") == 1
    assert "is scored" in finish(score())

    before = json.loads(results.read_text())
    finish(score(RESULTS=tmp_path / "again.jsonl"))
    again = json.loads((tmp_path / "again.jsonl").read_text())
    assert again == before and out.stat().st_mtime_ns == translated, "stored translations give the same row"
    shutil.copy(train(data / "bin", tmp_path / "more", "--arch", "softmax_transformer_small", updates=60), checkpoint)
    finish(score())
    assert out.stat().st_mtime_ns > translated
    after = json.loads(results.read_text())
    assert after["tokenised"] != before["tokenised"]


def test_scripts_say_what_is_missing_from_any_folder(start):
    for script in ("finetune", "plug_and_play", "score"):
        output = refused(start("bash", "-c", f"cd tests && bash ../scripts/stages/{script}.sh"))
        assert "is not set" in output and output.count("\n") == 1


def test_a_swap_follows_its_base_and_keeps_to_its_options(start, stock_checkpoint, tmp_path):
    base, out = tmp_path / "base.pt", tmp_path / "lot.pt"
    shutil.copy(stock_checkpoint, base)

    def swap(options=""):
        return start("bash", "scripts/stages/plug_and_play.sh", BASE=base, OUT=out, OPTIONS=options, CALIBRATE="no")

    finish(swap())
    first = out.stat().st_mtime_ns
    assert "exists" in finish(swap()) and out.stat().st_mtime_ns == first
    assert "was made with" in refused(swap("--lot-epsilon 0.5"))
    base.touch()
    finish(swap())
    assert out.stat().st_mtime_ns > first


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
    terminal, end = os.openpty()  # where progress is shown
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
    both = unhidden(results.parent)
    assert both.keys() == {results, results.with_name("r.sentences.tsv")}
    killed(score(2, die_at=die_at))
    assert unhidden(results.parent) == both
    finish(score(2))
    for path in both:
        assert path.read_bytes().startswith(both[path]) and path.read_bytes().count(b"\n") == 2
