"""``fairseq-lot curve`` as a user runs it: two epochs, then a third, then nothing again."""

import json

import pytest
import torch

from fairseq_lot.pretrained.checkpoint import load_checkpoint
from tests.end_to_end.conftest import contents, fairseq_lot, refuse


@pytest.fixture
def epochs(stock_checkpoint, tmp_path):
    """Checkpoints of the stock model as if each were of another epoch, the earlier the less trained."""
    paths = {}
    for epoch in (1, 2, 4):
        state = load_checkpoint(stock_checkpoint)
        state["extra_state"]["train_iterator"].update(epoch=epoch + 1, iterations_in_epoch=0)
        state["model"] = {name: value * (1 - 0.5 / epoch) for name, value in state["model"].items()}
        paths[epoch] = tmp_path / f"checkpoint{epoch}.pt"
        torch.save(state, paths[epoch])
    return paths


def test_a_curve_goes_on_and_keeps_to_one_training(data, stock_checkpoint, epochs, tmp_path, capsys):
    out = tmp_path / "curve"
    words = ["curve", data / "bin", "--out", out, "--sentences", 20, "--try", "lot --lot-num-pivots 4"]
    words += ["--try", "sinkhorn", "--steps", 2, "--joint-steps", 1, "--held-out", 8]
    fairseq_lot(*words, "--path", epochs[2], epochs[1], epochs[2])
    points = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    ways = [("softmax", False), ("lot", False), ("sinkhorn", False), ("lot", True)]
    found = [(point["epoch"], point["attention"], point["calibrated"]) for point in points]
    assert found == [(epoch, *way) for epoch in (1, 2) for way in ways]
    assert len({point["loss"] for point in points}) == 8 and len({point["tokens"] for point in points}) == 1
    table = (out / "curve.md").read_text()
    assert table == capsys.readouterr().out and "| Epoch 1 | Epoch 2 |" in table and (out / "curve.svg").exists()

    fairseq_lot(*words, "--path", epochs[4], "--no-calibration")
    after = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    assert after[:8] == points and [point["epoch"] for point in after[8:]] == [4, 4, 4]
    kept = contents(out)
    fairseq_lot(*words, "--path", *epochs.values(), "--no-calibration")
    assert contents(out) == kept

    other = tmp_path / "other.pt"
    torch.save(load_checkpoint(epochs[2]) | {"another": 1}, other)
    capsys.readouterr()
    for more, words_of_refusal in (
        (["--path", other], "another checkpoint of epoch 2"),
        (["--path", other, epochs[2]], "both of epoch 2"),
        (["--path", stock_checkpoint], "saved within epoch"),
        (["--path", epochs[1], "--sentences", 21], "another sentences, 20"),
        (["--path", epochs[1], "--sentences", 0], "--sentences must be at least 1"),
        (["--path", epochs[1], "--try", "lots", "--no-calibration"], "unknown attention mechanism 'lots'"),
    ):
        refuse(capsys, *words, *more, naming=[words_of_refusal])
    assert contents(out) == kept
