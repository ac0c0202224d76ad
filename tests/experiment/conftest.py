"""The entries of a tiny experiment's file."""

import copy

import pytest

TINY = {
    "experiment": "tiny", "dataset": "numbers", "size": "small", "backbones": {"transformer": {}}, "seeds": [1],
    "data": "data", "work": "work",
    "pretrain": {"lr": 0.003, "warmup-updates": 20, "dropout": 0.1, "max-tokens": 500, "max-epoch": 2},
    "finetune": {"lr": 0.0003, "max-tokens": 500, "max-epoch": 1},
    "generate": {"beam": 1},
    "systems": {
        "softmax": {"attention": "softmax"},
        "LOT ε=2": {"attention": "lot", "options": {"lot-epsilon": 2}, "calibrate": {"with": "pieces", "steps": 5}},
        "ESP from scratch": {"attention": "esp", "options": {"esp-num-slices": 2}, "from-scratch": True},
    },
}  # fmt: skip


@pytest.fixture
def tiny():
    """A function that makes the entries of an experiment; keywords replace some, None removes one."""

    def make(**changes):
        entries = copy.deepcopy(TINY) | {name.replace("_", "-"): value for name, value in changes.items()}
        return {name: value for name, value in entries.items() if value is not None}

    return make
