"""Annealing in real trainings: mechanisms learn the epoch at each start and after resuming, and checkpoints keep it."""

import pytest
from fairseq import checkpoint_utils

from fairseq_lot import models  # noqa: F401 - registers the architectures
from fairseq_lot.errors import InputError
from fairseq_lot.pretrained.checkpoint import load_checkpoint
from tests.end_to_end.conftest import edited, train

# 300 sentences make about 10 updates an epoch
FLAGS = ("--arch", "esp_transformer_small", "--esp-sort-temperature", 0.1, "--esp-anneal", 0.5, "--max-tokens", 4000)
FLAGS += ("--encoder-layers", 2, "--decoder-layers", 1, "--esp-num-slices", 4)


def epochs(weights):
    """The epochs that mechanisms keep in a model's weights."""
    return [int(value) for key, value in weights.items() if key.endswith(".epoch")]


def loaded(checkpoint, data, **overrides):
    """Load a checkpoint as fairseq does; return its model and its task."""
    overrides = {"data": str(data / "bin"), **overrides}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], overrides)
    return model, task


@pytest.fixture(scope="module")
def resumed(data, tmp_path_factory):
    """The checkpoint of a training of two epochs that was resumed for a third."""
    save = tmp_path_factory.mktemp("annealed")
    checkpoint = train(data / "bin", save, *FLAGS, "--max-epoch", 2, updates=1000)
    assert epochs(load_checkpoint(checkpoint)["model"]) == [2, 2]
    return train(data / "bin", save, *FLAGS, "--max-epoch", 3, updates=1000)


def test_a_resumed_training_goes_on_counting_epochs(resumed, data):
    assert epochs(load_checkpoint(resumed)["model"]) == [3, 3]
    assert epochs(loaded(resumed, data)[0].state_dict()) == [3, 3]


def test_checkpoints_without_an_epoch_load(resumed, data, tmp_path):
    with edited(resumed, tmp_path / "old.pt") as state:
        state["model"] = {key: value for key, value in state["model"].items() if not key.endswith(".epoch")}
    assert epochs(loaded(tmp_path / "old.pt", data)[0].state_dict()) == [1, 1]
    assert not epochs(loaded(resumed, data, esp_anneal=1.0)[0].state_dict())


def test_differential_attention_passes_the_epoch_on(resumed, data, tmp_path):
    with edited(resumed, tmp_path / "differential.pt") as state:
        state["cfg"]["model"].differential = True
    model, task = loaded(tmp_path / "differential.pt", data)
    task.begin_epoch(5, model)
    assert epochs(model.state_dict()) == [5, 5]


@pytest.mark.parametrize("start", [("--finetune-from-model",), ("--reset-dataloader", "--restore-file")])
def test_a_fine_tuning_says_that_annealing_begins_again(start, resumed, data, tmp_path, caplog):
    train(data / "bin", tmp_path, *FLAGS, *start, resumed, updates=1)
    assert "annealing begins again, in the first epoch at --esp-sort-temperature 0.1" in caplog.text


def test_annealing_does_not_go_with_a_moving_average(data, tmp_path):
    with pytest.raises(InputError, match="--store-ema would average the epoch that --esp-anneal counts"):
        train(data / "bin", tmp_path, *FLAGS, "--store-ema", updates=1)
