"""``fairseq-lot calibrate`` and ``swap --calibrate`` as a user runs them."""

import json
import shutil

import pytest
import torch

from fairseq_lot.plug_and_play.checkpoint import load_checkpoint
from tests.end_to_end.conftest import command, fairseq_lot, generate, hypotheses, refuse

FIT = ("--steps", 12, "--joint-steps", 4, "--held-out", 16, "--max-tokens", 300)


@pytest.fixture(scope="module")
def swapped(stock_checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("swapped") / "lot.pt"
    fairseq_lot("swap", "--path", stock_checkpoint, "--attention", "lot", "--lot-num-pivots", 6, "--out", out)
    return out


@pytest.fixture(scope="module")
def calibrated(data, swapped, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated")
    done = command(
        "fairseq-lot", "calibrate", data / "bin", "--path", swapped, "--out", folder / "lot.pt", *FIT,
        "--json", folder / "errors.json",
    )  # fmt: skip
    return folder, done


def test_only_what_was_added_changes_and_the_errors_fall(swapped, calibrated):
    folder, done = calibrated
    before, after = load_checkpoint(swapped)["model"], load_checkpoint(folder / "lot.pt")["model"]
    assert list(before) == list(after)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed and all(key.endswith(("mechanism.pivots", "mechanism.mass_logits")) for key in changed)
    report = json.loads((folder / "errors.json").read_text())
    heads = report["heads"]
    assert sum(head["after"] for head in heads) < sum(head["before"] for head in heads)
    layers = {(head["site"], head["layer"]) for head in heads}
    assert layers == {("encoder", layer) for layer in range(len(layers))}
    assert report["output"]["after"] <= report["output"]["before"] and report["steps"] == [12, 4]
    assert "before → after" in done.stdout and str(folder / "lot.pt") in done.stdout


def test_the_calibrated_file_translates(data, swapped, calibrated):
    folder, _ = calibrated
    ours = hypotheses(generate(data / "bin", folder / "lot.pt"))
    assert len(ours) == 120 and ours != hypotheses(generate(data / "bin", swapped))


def test_swap_can_calibrate_at_once(data, stock_checkpoint, calibrated, tmp_path):
    folder, _ = calibrated
    out = tmp_path / "lot.pt"
    fairseq_lot(
        "swap", "--path", stock_checkpoint, "--attention", "lot", "--lot-num-pivots", 6, "--out", out,
        "--calibrate", data / "bin", *FIT,
    )  # fmt: skip
    ours, expected = load_checkpoint(out)["model"], load_checkpoint(folder / "lot.pt")["model"]
    assert list(ours) == list(expected)
    assert all(torch.equal(ours[key], expected[key]) for key in ours)


def test_source_side_alone_is_enough(data, swapped, tmp_path):
    shutil.copytree(data / "bin", tmp_path / "bin")
    for file in (tmp_path / "bin").glob("train.de-en.en.*"):
        file.unlink()
    out = tmp_path / "lot.pt"
    command("fairseq-lot", "calibrate", tmp_path / "bin", "--path", swapped, "--out", out, *FIT)
    before, after = load_checkpoint(swapped)["model"], load_checkpoint(out)["model"]
    assert any(not torch.equal(before[key], after[key]) for key in before if key.endswith("pivots"))


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--steps", 0), "--steps must be at least 1, got 0"),
        (("--joint-steps", -1), "--joint-steps must be at least 0, got -1"),
        (("--learning-rate", "nan"), "--learning-rate must be a finite number greater than 0, got nan"),
        (("--held-out", 151), "train has 300 sentences; --held-out takes half of them at most"),
        (("--split", "nowhere"), "nowhere.de-en.de.bin is missing"),
        (("--path", "absent.pt"), "there is no checkpoint absent.pt"),
        (("--out", "{swapped}"), "give another file"),
        (("--out", "/proc/no/lot.pt"), "/proc/no/lot.pt"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(flags, words, data, swapped, tmp_path, capsys):
    flags = [str(flag).format(swapped=swapped) for flag in flags]
    base = ["--path", swapped, "--out", tmp_path / "lot.pt", *FIT]
    refuse(capsys, "calibrate", data / "bin", *base, *flags, naming=[words])
    assert not list(tmp_path.iterdir())


def test_nothing_to_calibrate_is_said(data, stock_checkpoint, tmp_path):
    out = tmp_path / "sinkhorn.pt"
    done = command(
        "fairseq-lot", "swap", "--path", stock_checkpoint, "--attention", "sinkhorn", "--out", out,
        "--calibrate", data / "bin", *FIT, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "nothing to calibrate" in done.stderr and not out.exists()
