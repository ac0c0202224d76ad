"""A trained model together with the sentences it is to run on."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fairseq import checkpoint_utils
from fairseq.data import LanguagePairDataset
from fairseq.tasks import FairseqTask
from torch import nn

from fairseq_lot.errors import InputError
from fairseq_lot.pretrained.check import check_data, check_dictionary
from fairseq_lot.pretrained.checkpoint import load_checkpoint


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, its task, and one split of its data, or none."""

    model: nn.Module
    task: FairseqTask
    dataset: LanguagePairDataset | None
    path: str

    @property
    def pad(self) -> int:
        """The symbol of a pad."""
        return self.task.source_dictionary.pad()

    def draw(self, sentences: int | None, seed: int) -> np.ndarray:
        """Indices of random sentences that the model has positions for, all of them if None, the shortest first."""
        fitting, _ = self.dataset.filter_indices_by_size(np.arange(len(self.dataset)), self.model.max_positions())
        if not len(fitting):
            raise InputError(f"{self.path} takes no more than {self.model.max_positions()} pieces: no sentence fits")
        drawn = np.random.default_rng(seed).permutation(fitting)[:sentences]
        return drawn[np.argsort(self.dataset.src_sizes[drawn], kind="stable")]

    def batch(self, indices: Iterable[int]) -> dict:
        """fairseq's sample of these sentences."""
        return self.dataset.collater([self.dataset[int(i)] for i in indices])


def load(
    path: str | Path, data: str | Path | None, split: str | None, *, needs_target: bool = True, **overrides
) -> Loaded:
    """Load a model and a split of its data.

    Args:
        path: a checkpoint.
        data: folder made by fairseq-preprocess; None: the one that the checkpoint was trained on.
        split: train, valid or test; None: the dictionaries alone.
        needs_target: refuse a split that has its source side alone.
        **overrides: arguments of the model or its task that differ from the saved ones.

    Raises:
        InputError: either is missing or damaged, or they do not fit each other.
    """
    logging.getLogger("fairseq").setLevel(logging.WARNING)  # its notes on every file that it reads
    state = load_checkpoint(path)  # the safe loader; fairseq reads the same file again
    try:
        saved = _saved_task(state)
        source, target = saved["source_lang"], saved["target_lang"]
        if data is None:
            data = saved["data"]
            if not Path(data).is_dir():
                raise InputError(f"{path} was trained on {data}, which is not here; name its folder with --data")
        if split is not None:
            check_data(data, split=split, source=source, target=target, needs_target=needs_target)
        check_dictionary(data, source, state, path)
        models, _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(path)], arg_overrides={"data": str(data), **overrides}
        )
        dataset = None
        if split is not None:
            task.load_dataset(split)
            dataset = task.dataset(split)
    except InputError:
        raise
    except Exception as error:  # whatever a checkpoint of other options or another time leads to
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} cannot be loaded with the data in {data}: {reason}") from error
    model = models[0].eval()
    for block in model.encoder.layers:
        block.can_use_fastpath = False  # fairseq 0.12.2's fast path never calls self_attn
    return Loaded(model, task, dataset, str(path))


def _saved_task(state):
    """Options of the task that the checkpoint was trained on."""
    task = state["cfg"]["task"] if state.get("cfg") is not None else vars(state["args"])
    return task if isinstance(task, dict) else vars(task)
