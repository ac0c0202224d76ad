"""Reading fairseq checkpoints, with torch's safe loader and one-line errors."""

import copy
import io
import warnings
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import fairseq  # noqa: F401 - its import tells torch's safe loader about the types in checkpoints
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.utils import apply_to_sample

from fairseq_lot import models  # noqa: F401 - registers the architectures
from fairseq_lot.errors import InputError, first_line
from fairseq_lot.models.pluggable_transformer import PluggableTransformerModel

# a checkpoint by its path, or as load_checkpoint returned it
Checkpoint = str | Path | dict


class State(dict):
    """A checkpoint in memory: fairseq's own dictionary, whose ``repr`` is one line.

    A pickle of it holds a plain ordered dictionary, which torch's safe loader takes.
    """

    def __repr__(self) -> str:
        args = model_args(self, "checkpoint")
        numbers = sum(weight.numel() for weight in self["model"].values())
        return f"<checkpoint of {args.arch}: {args.attention} at {args.attention_sites}, {numbers:,} numbers>"

    def __reduce__(self) -> tuple:
        return OrderedDict, (), None, None, iter(self.items())


def read(checkpoint: Checkpoint) -> tuple[dict, str]:
    """A checkpoint that is given in either way, and its name for messages.

    Raises:
        InputError: it is neither, or not the checkpoint of a Transformer.
    """
    if isinstance(checkpoint, dict):
        _check(checkpoint, "checkpoint")
        return checkpoint, "checkpoint"
    if not isinstance(checkpoint, (str, Path)):
        raise InputError(
            f"a checkpoint is the path of a file, or what load_checkpoint or swap returned, not {checkpoint!r:.60}"
        )
    return load_checkpoint(checkpoint), str(checkpoint)


def load_checkpoint(path: str | Path) -> dict:
    """Load a fairseq checkpoint of a Transformer onto the CPU.

    Args:
        path: written by fairseq-train or ``fairseq-lot swap``.

    Returns:
        fairseq's own dictionary: ``cfg`` or ``args``, ``model``, ``extra_state``, ...

    Raises:
        InputError: missing, truncated, foreign, not a Transformer, or holding anything but data.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no checkpoint {path}")
    try:
        _check_sums(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's notes on foreign pickles; the error below says enough
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the damage leads to
        if "unsupported global" in str(error).lower():
            raise InputError(f"{path} holds objects other than tensors and settings, so it was not loaded") from error
        # torch's own text on a pickle advises to load it unsafely
        reason = "its pickle is damaged" if isinstance(error, UnpicklingError) else first_line(error)
        raise InputError(f"{path} is not a readable checkpoint, it may be truncated or foreign: {reason}") from error
    _check(state, path)
    return state


def _check(state: Any, path: str | Path) -> None:
    """Refuse what is not the checkpoint of a Transformer."""
    weights = state.get("model") if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise InputError(f"{path} is not a fairseq checkpoint: it holds no model weights")
    if getattr(weights.get("encoder.embed_tokens.weight"), "ndim", 0) != 2 or not all(type(k) is str for k in weights):
        raise InputError(
            f"{path} is not a fairseq checkpoint of a Transformer: its weights have no embedding of the source"
        )
    args = model_args(state, path)
    arch = getattr(args, "arch", None)
    model = ARCH_MODEL_REGISTRY.get(arch) if isinstance(arch, str) else None
    if model not in (TransformerModel, PluggableTransformerModel):
        raise InputError(f"{path} holds a model of architecture {arch!r}, neither fairseq's transformer* nor ours")
    _check_sizes(args, path)


def _check_sums(path: Path) -> None:
    """Refuse a file whose content is not what was written; torch itself does not verify the checksums."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} is wrong")


def _check_sizes(args: Namespace, path: str | Path) -> None:
    """The sizes of the model must be whole numbers; an argument that is not there has fairseq's default."""
    names = [
        f"{stack}_{size}" for stack in ("encoder", "decoder") for size in ("layers", "attention_heads", "embed_dim")
    ]
    for name in names:
        value = getattr(args, name, 1)
        if type(value) is not int or value < 1:
            raise InputError(f"{path} is damaged: its {name} is {value!r}, not a whole number of at least 1")
    positions = getattr(args, "max_source_positions", None)
    if positions is not None and type(positions) is not int:
        raise InputError(f"{path} is damaged: its max_source_positions is {positions!r}, not a whole number")


def model_args(state: dict, path: str | Path) -> Namespace:
    """The model's arguments inside ``state``, the same object, so that changes to it are kept."""
    cfg = state.get("cfg")
    args = cfg.get("model") if isinstance(cfg, dict) else state.get("args")
    if isinstance(args, dict):
        raise InputError(f"{path} was trained by fairseq-hydra-train; only models of fairseq-train are read")
    if not isinstance(args, Namespace):
        raise InputError(f"{path} is not a fairseq checkpoint of a Transformer: it holds no model arguments")
    return args


def with_own_arguments(state: dict) -> State:
    """The same checkpoint with arguments of its own, which may be changed; its weights are those of the other."""
    return State({**state, **{holder: copy.deepcopy(state.get(holder)) for holder in ("cfg", "args")}})


def saved_task(state: dict, path: str | Path) -> dict:
    """Options of the task that the checkpoint was trained on."""
    task = state["cfg"].get("task") if state.get("cfg") is not None else state.get("args")
    if not isinstance(task, (dict, Namespace)):
        raise InputError(f"{path} cannot be loaded: it does not say which task it was trained on")
    task = dict(task if isinstance(task, dict) else vars(task))
    # early versions of fairseq saved several folders, and truth values as words
    words = {"True": True, "False": False}
    task = {name: words.get(value, value) if isinstance(value, str) else value for name, value in task.items()}
    if isinstance(task.get("data"), list) and task["data"]:
        task["data"] = task["data"][0]
    return task


def saved_encoder(state: dict, kind: str) -> dict:
    """What the training was told about its text, for fairseq's encoders; empty if it was told nothing.

    Args:
        state: a checkpoint.
        kind: ``bpe`` or ``tokenizer``, as fairseq's options are called.

    Returns:
        The encoder's options by their names, its own name as ``_name``.
    """
    if state.get("cfg") is None:  # fairseq 0.10 and older
        options = dict(vars(state["args"]))
        options["_name"] = options.get(kind)
    else:
        options = state["cfg"].get(kind)
    return options if isinstance(options, dict) and isinstance(options.get("_name"), str) else {}


def serialised(state: dict) -> memoryview:
    """A checkpoint as it stands in a file; its tensors are on the CPU there."""
    buffer = io.BytesIO()
    torch.save(apply_to_sample(lambda tensor: tensor.cpu(), state), buffer)
    return buffer.getbuffer()
