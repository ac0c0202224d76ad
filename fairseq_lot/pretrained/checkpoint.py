"""Read fairseq checkpoints by torch's safe loader, with one-line errors."""

import copy
import io
import warnings
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import fairseq  # noqa: F401 - its import allows the types in checkpoints for torch's safe loader
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.transformer import (
    DEFAULT_MAX_SOURCE_POSITIONS,
    DEFAULT_MAX_TARGET_POSITIONS,
    TransformerModel,
)
from fairseq.utils import apply_to_sample, split_paths

from fairseq_lot import models  # noqa: F401 - registers the architectures
from fairseq_lot.attention.options import SITES
from fairseq_lot.attention.registry import DEFAULT, describe
from fairseq_lot.errors import InputError, first_line
from fairseq_lot.models.architecture import refuse_renamed
from fairseq_lot.models.pluggable_transformer import PluggableTransformerModel
from fairseq_lot.modules.flat_options import mechanism_options
from fairseq_lot.modules.sites import UNKNOWN_SITES, attention_sites, named_sites, sites_in_words


class Checkpoint(dict):
    """A checkpoint in memory: fairseq's own dictionary with a ``repr`` of one line.

    It is pickled as a plain ordered dictionary, which torch's safe loader accepts.

    Attributes:
        path: the file that it was read from, for messages.
    """

    def __init__(self, content: dict, path: str = "checkpoint") -> None:
        super().__init__(content)
        self.path = path

    def __repr__(self) -> str:
        args = self.model_args
        numbers = sum(weight.numel() for weight in self["model"].values())
        attention = getattr(args, "attention", None)
        ours = f"{attention} at {sites_in_words(args)}" if attention else "fairseq's own attention"
        return f"<checkpoint of {args.arch}: {ours}, {numbers:,} numbers>"

    def __reduce__(self) -> tuple:
        return OrderedDict, (), None, None, iter(self.items())

    def settings(self, kind: str) -> Any:
        """The settings of ``model``, ``task``, ``bpe`` or ``tokenizer``; fairseq 0.10 has all of them in ``args``."""
        cfg = self.get("cfg")
        return cfg.get(kind) if isinstance(cfg, dict) else self.get("args")

    @property
    def model_args(self) -> Namespace:
        """The model's arguments: the object itself, so changing it changes the checkpoint."""
        args = self.settings("model")
        if isinstance(args, dict):
            raise InputError(f"{self.path} was trained by fairseq-hydra-train; only models of fairseq-train are read")
        if not isinstance(args, Namespace):
            raise InputError(f"{self.path} is not a fairseq checkpoint of a Transformer: it has no model arguments")
        return args

    @property
    def max_positions(self) -> tuple[int, int]:
        """The lengths of the longest source and the longest target, in pieces, including the end of sentence."""
        source, target = (getattr(self.model_args, f"max_{side}_positions", None) for side in ("source", "target"))
        return source or DEFAULT_MAX_SOURCE_POSITIONS, target or DEFAULT_MAX_TARGET_POSITIONS

    def attention_of_training(self) -> tuple[str, str]:
        """The attention of the training and its sites, separated by commas.

        A swap notes both in the checkpoint. Without a swap they are the checkpoint's own.
        """
        args = self.model_args
        if hasattr(args, "trained_attention"):  # written by a swap; some old ones lack the sites
            return args.trained_attention, getattr(args, "trained_sites", UNKNOWN_SITES)
        attention = getattr(args, "attention", None) or DEFAULT
        return describe(attention, mechanism_options(args, attention)), ",".join(attention_sites(args))

    def how_trained(self) -> str:
        """The trained attention and its sites, in words for messages."""
        return "trained with {} attention at {}".format(*self.attention_of_training())

    def softmax_of_training(self) -> dict[str, Any] | None:
        """Model arguments that give the swapped sites the softmax of their training; None if there is no such softmax.

        Empty for plain softmax. For softmax with a prior they name the prior and all sites that have it.
        """
        attention, where = self.attention_of_training()
        if attention == DEFAULT:
            return {}
        if attention != describe(DEFAULT, {"prior": "alibi"}) or where == UNKNOWN_SITES:
            return None
        swapped, with_prior = attention_sites(self.model_args), named_sites(where)
        if not {"cross", *with_prior}.issuperset(swapped):
            return None  # some swapped sites of self-attention were trained with the prior, others without
        sites = ",".join(site for site in SITES if site in swapped or site in with_prior)
        return {"attention_sites": sites, "softmax_prior": "alibi", "keep_softmax": None}

    def task_options(self) -> dict[str, Any]:
        """The options of the task that the checkpoint was trained on."""
        task = self.settings("task")
        if not isinstance(task, (dict, Namespace)):
            raise InputError(f"{self.path} cannot be loaded: it does not say on which task it was trained")
        task = dict(task if isinstance(task, dict) else vars(task))
        # early versions of fairseq saved several folders, and booleans as words
        words = {"True": True, "False": False}
        task = {name: words.get(value, value) if isinstance(value, str) else value for name, value in task.items()}
        data = task.get("data")
        if data:  # with several folders, the first one has the dictionaries, valid and test
            task["data"] = data[0] if isinstance(data, list) else split_paths(data)[0]
        return task

    def encoders(self) -> dict[str, dict]:
        """The options of fairseq's text encoders that the training was given.

        Returns:
            For ``bpe`` and ``tokenizer`` the encoder's options by name, with the encoder's own name as ``_name``; empty
            if the training was given none.
        """
        encoders = {}
        for kind in ("bpe", "tokenizer"):
            options = self.settings(kind)
            if isinstance(options, Namespace):
                options = vars(options) | {"_name": getattr(options, kind, None)}
            encoders[kind] = options if isinstance(options, dict) and isinstance(options.get("_name"), str) else {}
        return encoders

    def with_own_arguments(self) -> "Checkpoint":
        """A copy with its own arguments, which may be changed; the weights are shared."""
        return Checkpoint(self | {holder: copy.deepcopy(self.get(holder)) for holder in ("cfg", "args")}, self.path)

    def drop_averages(self) -> None:
        """Drop the moving averages, which do not fit changed weights: ``--store-ema`` starts at the loaded weights."""
        extra = self.get("extra_state")
        if isinstance(extra, dict):
            kept = {name: value for name, value in extra.items() if not name.startswith("ema")}
            self["extra_state"] = {**kept, "ema": {}}

    def serialised(self) -> memoryview:
        """The bytes of the checkpoint's file, with its tensors on the CPU."""
        buffer = io.BytesIO()
        torch.save(apply_to_sample(lambda tensor: tensor.cpu(), self), buffer)
        return buffer.getbuffer()


# path of a checkpoint, or a checkpoint in memory
CheckpointLike = str | Path | dict


def load_checkpoint(checkpoint: CheckpointLike) -> Checkpoint:
    """Load a fairseq checkpoint of a Transformer as fairseq's own dictionary: ``cfg`` or ``args``, ``model``, ...

    Args:
        checkpoint: its path, or a checkpoint in memory.

    Raises:
        InputError: the file is missing, damaged or foreign, contains objects other than data, or is no Transformer.
    """
    if isinstance(checkpoint, dict):
        state, path = checkpoint, getattr(checkpoint, "path", "checkpoint")
    elif isinstance(checkpoint, (str, Path)):
        state, path = _load(Path(checkpoint)), str(checkpoint)
    else:
        raise InputError(
            f"not a checkpoint: {checkpoint!r:.60}; give the path of a file, or the result of load_checkpoint or swap"
        )
    weights = state.get("model") if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not all(type(k) is str and torch.is_tensor(v) for k, v in weights.items()):
        raise InputError(f"{path} is not a fairseq checkpoint: it has no model weights")
    if getattr(weights.get("encoder.embed_tokens.weight"), "ndim", 0) != 2:
        raise InputError(f"{path} is not a fairseq checkpoint of a Transformer: it has no source embedding")
    state = Checkpoint(state, path)
    arch = getattr(state.model_args, "arch", None)
    model = ARCH_MODEL_REGISTRY.get(arch) if isinstance(arch, str) else None
    if model not in (TransformerModel, PluggableTransformerModel):
        raise InputError(
            f"{path} has the architecture {arch!r}; give a model of fairseq's transformer or of fairseq_lot"
        )
    refuse_renamed(state.model_args, path)
    return state


def _load(path: Path) -> Any:
    """The contents of the file."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a checkpoint; give a file, such as {path / 'checkpoint_best.pt'}")
    if not path.is_file():
        raise InputError(f"there is no checkpoint {path}")
    try:
        if zipfile.is_zipfile(path):  # torch does not verify the checksums
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} is wrong")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's notes on foreign pickles
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damage leads to errors of any type
        if "unsupported global" in str(error).lower():
            raise InputError(
                f"{path} contains objects other than tensors and settings, so it was not loaded"
            ) from error
        # torch's own text advises to load a pickle unsafely
        reason = "its pickle is damaged" if isinstance(error, UnpicklingError) else first_line(error)
        raise InputError(f"{path} is not a readable checkpoint, it may be truncated or foreign: {reason}") from error
