"""The epoch reaches the mechanisms in real trainings: at each start, after resuming, and in a checkpoint."""

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_lot import models  # noqa: F401 - registers the architectures
from fairseq_lot.pretrained.checkpoint import load_checkpoint
from tests.end_to_end.conftest import train

# 300 sentences make about 10 updates an epoch
FLAGS = ("--arch", "esp_transformer_small", "--esp-sort-temperature", 0.1, "--esp-anneal", 0.5, "--max-tokens", 4000)
FLAGS += ("--encoder-layers", 2, "--decoder-layers", 1, "--esp-num-slices", 4)


def epochs(checkpoint):
    weights = load_checkpoint(checkpoint)["model"]
    return {int(value) for key, value in weights.items() if key.endswith(".mechanism.epoch")}


def loaded_epochs(checkpoint, data, **overrides):
    overrides = {"data": str(data / "bin"), **overrides}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], overrides)
    return [int(value) for key, value in model.state_dict().items() if key.endswith(".mechanism.epoch")]


@pytest.fixture(scope="module")
def resumed(data, tmp_path_factory):
    """Trained for two epochs, then resumed for a third."""
    save = tmp_path_factory.mktemp("annealed")
    checkpoint = train(data / "bin", save, *FLAGS, "--max-epoch", 2, updates=1000)
    assert epochs(checkpoint) == {2}
    return train(data / "bin", save, *FLAGS, "--max-epoch", 3, updates=1000)


def test_training_counts_epochs_also_when_resumed(resumed, data):
    assert epochs(resumed) == {3}
    assert loaded_epochs(resumed, data) == [3, 3]


def test_checkpoints_without_an_epoch_load(resumed, data, tmp_path):
    state = load_checkpoint(resumed)
    state["model"] = {key: value for key, value in state["model"].items() if not key.endswith(".epoch")}
    torch.save(state, tmp_path / "old.pt")
    assert loaded_epochs(tmp_path / "old.pt", data) == [1, 1]
    assert not loaded_epochs(resumed, data, esp_anneal=1.0)


def test_differential_attention_passes_the_epoch_on(resumed, data):
    overrides = {"data": str(data / "bin"), "differential": True}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(resumed)], overrides)
    task.begin_epoch(5, model)
    epochs = [int(value) for key, value in model.state_dict().items() if key.endswith(".mechanism.inner.epoch")]
    assert epochs == [5, 5]
