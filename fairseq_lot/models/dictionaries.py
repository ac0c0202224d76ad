"""Fingerprints of a model's two dictionaries, stored in the arguments of its checkpoints.

A dictionary of the same size in another order fits all weights of a model but means other pieces. fairseq does not
notice.
"""

import hashlib
from contextlib import nullcontext
from typing import Any

from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf, open_dict

from fairseq_lot.errors import InputError

_SIDES = ("source", "target")


def fingerprint(dictionary: Dictionary) -> str:
    """A short hash of the symbols in their order; counts do not matter."""
    return hashlib.sha256("\n".join(dictionary.symbols).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def has_fingerprints(args: Any) -> bool:
    """Whether the arguments of a model have the fingerprints of its dictionaries."""
    return all(getattr(args, f"{side}_fingerprint", None) for side in _SIDES)


def note_dictionaries(args: Any, task: Any) -> None:
    """Write the fingerprints of a task's dictionaries into the arguments of a model, unless it has some.

    A model that is built without data gets none.
    """
    if isinstance(task, FairseqTask) and not has_fingerprints(args):
        with open_dict(args) if OmegaConf.is_config(args) else nullcontext():  # a config from fairseq-hydra-train
            for side in _SIDES:
                setattr(args, f"{side}_fingerprint", fingerprint(getattr(task, f"{side}_dictionary")))


def check_dictionaries(args: Any, task: Any, path: str) -> None:
    """Compare a task's dictionaries with the fingerprints in a model's arguments, if it has them.

    Args:
        args: the model's arguments.
        task: with the data's dictionaries.
        path: checkpoint of the model, for the message.

    Raises:
        InputError: other symbols, or another order.
    """
    for side in _SIDES:
        trained = getattr(args, f"{side}_fingerprint", None)
        dictionary = getattr(task, f"{side}_dictionary", None)
        if trained is None or dictionary is None or (now := fingerprint(dictionary)) == trained:
            continue
        options = getattr(task, "cfg", None) or task.args
        file = f"{options.data}/dict.{getattr(options, f'{side}_lang', None) or f'({side} language)'}.txt"
        raise InputError(
            f"{file} has other pieces than that of the training of {path}, or the same in another order (fingerprint "
            f"{now}, not {trained}); use the data folder of the training, or encode the text with its dictionaries "
            "(fairseq-preprocess --srcdict, --tgtdict)"
        )
