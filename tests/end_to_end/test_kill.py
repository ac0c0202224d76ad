"""kill -9 at the worst moments: no file is half-written, and the next call continues as if nothing had happened."""

import contextlib
import json
import os
import re
import shutil
import termios

import pytest

from tests.end_to_end.conftest import BIN, contents, differing, fairseq_lot, train
from tests.end_to_end.deadly import finish, kill_when, killed, starter

pytestmark = pytest.mark.slow
SWAP = (BIN / "fairseq-lot", "swap", "--attention", "lot", "--no-calibrate")


@pytest.fixture
def start(tmp_path_factory):
    """A function that starts a command, which kills itself at the moment ``DIE_AT``."""
    return starter(tmp_path_factory.mktemp("deadly"))


def loss_curve(log):
    """The training and validation loss of each epoch, as logged last."""
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
    """A differential softmax model after a few updates, swapped to differential ESP."""
    base = train(data / "bin", folder, "--arch", "diff_transformer_small", "--share-all-embeddings", updates=5)
    fairseq_lot("swap", "--path", base, "--attention", "esp", *ESP.split(), "--out", folder / "swapped.pt")
    return folder / "swapped.pt"


@pytest.mark.parametrize("script", TRAININGS)
def test_training_goes_on_as_if_it_had_not_been_killed(script, start, data, tmp_path):
    words = [data / "bin"] if script == "pretrain" else [differential_esp(data, tmp_path / "base"), data / "bin"]

    def training(save, *flags, die_at=""):
        return start("bash", f"scripts/{script}.sh", *words, tmp_path / save, *TRAININGS[script], "--max-tokens", 1000,
                     "--max-epoch", 3, "--dropout", 0.1, "--warmup-updates", 9, *flags, DIE_AT=die_at)  # fmt: skip

    finish(training("whole"))
    assert (tmp_path / "whole" / "train.log").read_text().count("epoch 003 | valid") == 1, "each line is logged once"
    finish(training("killed", "--max-epoch", 1))
    killed(training("killed", die_at="write:1"))  # the second epoch's checkpoint is half written
    assert (tmp_path / "killed" / "checkpoint_best.pt.tmp").exists()
    killed(training("killed", die_at="copy:1"))  # half copied to checkpoint_last.pt
    log = tmp_path / "killed" / "train.log"
    kill_when(lambda: "epoch 002 | loss" in log.read_text(), training("killed"))
    assert "epoch 003 | valid" not in log.read_text()
    finish(training("killed"))

    expected = loss_curve(tmp_path / "whole" / "train.log")
    assert len(expected) == 6 and loss_curve(log) == expected
    assert not differing(*(tmp_path / save / "checkpoint_best.pt" for save in ("whole", "killed")))
    finish(training("killed"))
    assert loss_curve(log) == expected and log.read_text().count("epoch 003 | valid") == 1, "trained once"

    output = finish(training("killed", "--dropout", 0.3), 2)
    assert "was trained with" in output and "remove it" in output and output.count("\n") == 1
    if script == "finetune":
        words[0].touch()
        assert "was trained from another" in finish(training("killed"), 2)


def test_scoring_goes_on_and_follows_its_checkpoint(start, data, tmp_path):
    """score.sh is killed while it translates, then before it has scored; at last its checkpoint changes."""
    base, folder = tmp_path / "base", tmp_path / "data"
    shutil.copytree(data / "bin", folder, ignore=shutil.ignore_patterns("text"))
    shutil.copytree(data / "text", folder / "text")
    checkpoint = train(data / "bin", base, "--arch", "softmax_transformer_small", updates=5)
    out, row = tmp_path / "test.out", tmp_path / "test.jsonl"
    label = '{"system": "softmax", "settings": {"attention": "softmax"}, "stage": "base"}'

    def score(die_at=""):
        words = (checkpoint, folder, tmp_path / "test", "-", label, "--beam", 1, "--batch-size", 8)
        return start("bash", "scripts/score.sh", *words, DIE_AT=die_at)

    part = out.with_name("test.part")
    kill_when(lambda: part.exists() and part.stat().st_size > 0, score())
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
        output = finish(start("bash", "-c", f"cd tests && bash ../scripts/{script}.sh"), 2)
        assert f"{script}.sh: error: give " in output and output.count("\n") == 1


def unhidden(folder):
    """The files of a folder with their contents, without the hidden parts that a kill may leave."""
    return {path: content for path, content in contents(folder).items() if not path.name.startswith(".")}


@pytest.mark.parametrize("die_at", ["fsync", "replace"])
@pytest.mark.parametrize("command", ["swap", "score"])
def test_swap_and_score_leave_old_or_new_files_when_killed(command, die_at, start, stock_checkpoint, tmp_path):
    """Each command is killed, then runs through; another one, which replaces its files, is killed and runs through."""
    folder, reference = tmp_path / "out", tmp_path / "test.en"
    if command == "swap":
        files = [folder / "lot.pt"]
        first = (*SWAP, "--path", stock_checkpoint, "--out", *files)
        second = (*first, "--lot-num-pivots", 3)
    else:
        files = [folder / "r.jsonl", folder / "r.sentences.tsv"]
        reference.write_text("b c d e\n" * 9)
        for name, hypothesis in (("worse", "a b c d e"), ("better", "b c d e")):
            lines = "".join(f"T-{i}\tb c d e\nH-{i}\t-0.1\t{hypothesis}\n" for i in range(9))
            (tmp_path / name).write_text(lines)
        label = '{"system": "LOT", "settings": {"attention": "lot"}, "stage": "plug-and-play"}'
        words = ("--tokenised-reference", reference, "--out", files[0], "--label", label, "--generated")
        first, second = ((BIN / "fairseq-lot", "score", *words, tmp_path / name) for name in ("worse", "better"))
    before = {}
    for words in (first, second):
        killed(start(*words, DIE_AT=die_at))
        assert unhidden(folder) == before
        finish(start(*words))
        after = unhidden(folder)
        assert sorted(after) == files
        assert not any(before.get(path) == content for path, content in after.items())
        before = after


def test_calibrate_leaves_no_file_when_killed(start, data, stock_checkpoint, tmp_path):
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

    def calibrate(out, steps, **options):
        return start(*words, "--steps", steps, "--out", folder / out, **options)

    def is_fitting():
        with contextlib.suppress(BlockingIOError):
            shown.extend(os.read(terminal, 4096))
        return b"error per layer" in shown

    kill_when(is_fitting, calibrate("c.pt", 100_000, stderr=end))
    assert unhidden(folder) == {}
    killed(calibrate("c.pt", 5, DIE_AT="fsync"))
    assert unhidden(folder) == {}
    finish(calibrate("c.pt", 5))
    finish(calibrate("whole.pt", 5))
    assert not differing(folder / "c.pt", folder / "whole.pt")
