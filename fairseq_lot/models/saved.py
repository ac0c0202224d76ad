"""Read a checkpoint's settings before fairseq loads it."""

import zipfile
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_lot.errors import InputError, first_line


@dataclass(frozen=True)
class Saved:
    """A checkpoint without its weights.

    Attributes:
        path: its file.
        model: arguments of its model.
        task: options of the task that it was trained on.
        has_optimiser: it has the state of an optimiser.
    """

    path: str
    model: Namespace
    task: dict[str, Any]
    has_optimiser: bool


def read_saved(path: str) -> Saved:
    """A checkpoint's settings, read without its weights if the format allows it; InputError if it cannot be read."""
    saved, _ = _read(path)
    return saved


def read_with_weights(path: str) -> tuple[Namespace, dict[str, Tensor]]:
    """The arguments and the weights of a checkpoint's model; InputError if it cannot be read."""
    saved, state = _read(path)
    return saved.model, state["model"]


def _read(path):
    """The settings of a checkpoint, and the whole contents of the file."""
    try:
        # the present format is mapped into memory: tensors are not read
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        cfg = state["cfg"] if state.get("cfg") is not None else dict.fromkeys(("model", "task"), state["args"])
        model, task = ({} if one is None else one for one in (cfg["model"], cfg.get("task")))
        model, task = (dict(one if isinstance(one, dict) else vars(one)) for one in (model, task))
    except Exception as error:  # damage leads to errors of any type
        raise InputError(f"{path} cannot be read as a checkpoint: {first_line(error)}") from error
    return Saved(path, Namespace(**model), task, state.get("last_optimizer_state") is not None), state
