"""Tests by a model's loss on a few sentence pairs whether it was trained with other dictionaries.

With a dictionary in another order a trained model is sure of wrong pieces: its loss is above that of a guess, and far
above its own entropy. A model that has learnt little has a loss near its entropy with any dictionary: that is
inconclusive. docs/training.md has the numbers behind the limits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.models.transformer import TransformerModel

_PAIRS = 64
_PIECES = 4096  # largest number of pieces in all pairs, source and target, to bound the time for long documents
_BATCH = 512  # pieces in a batch; each needs log probabilities of the whole vocabulary
# A model is sure of wrong pieces if its loss exceeds the entropy of its predictions by more nats than this. Models of
# few updates have at most 1.4, with any dictionary; trained models with another order have at least 1.8.
_SURE = 1.5
# Sources count as ignored if the loss is more than this share of the loss with other sources; trained models have 0.85.
_SAME = 0.95


@dataclass(frozen=True)
class Losses:
    """Mean losses over the target pieces of some pairs, in nats; the end of sentence does not count.

    Attributes:
        model: loss of the model, with teacher forcing.
        entropy: entropy of its predictions: the loss that it expects.
        counts: loss of a guess by the counts in the target dictionary.
        uniform: loss of a uniform guess among all pieces.
        other_sources: loss of the model when each target gets the source of another pair; infinite if not measured.
    """

    model: float
    entropy: float
    counts: float
    uniform: float
    other_sources: float = math.inf

    @property
    def guess(self) -> float:
        """Loss of the better of the two guesses."""
        return min(self.counts, self.uniform)

    @property
    def shows_others(self) -> bool:
        """Whether the model was trained with other dictionaries, or on another kind of text."""
        return self.model >= self.guess and self.model - self.entropy > _SURE

    @property
    def tells_nothing(self) -> bool:
        """Whether the model predicts no better than a guess but is not sure of its predictions either."""
        return self.model >= self.guess and not self.shows_others

    @property
    def ignores_sources(self) -> bool:
        """Whether sources of other pairs serve as well: then nothing is known about the source dictionary."""
        return self.model > _SAME * self.other_sources


@torch.no_grad()
def measure(
    model: TransformerModel,
    dataset: LanguagePairDataset,
    batch: Callable[..., dict],
    dictionary: Dictionary,
    *,
    other_sources: bool,
) -> Losses | None:
    """Measure the losses on up to 64 random pairs that are not too long for the model.

    Args:
        model: in eval mode.
        dataset: the pairs.
        batch: function from indices of the dataset to fairseq's batch.
        dictionary: dictionary of the targets.
        other_sources: also measure the loss with sources of other pairs.

    Returns:
        The losses; None if no pair fits or a loss is not finite.
    """
    order, _ = dataset.filter_indices_by_size(np.random.default_rng(1).permutation(len(dataset)), model.max_positions())
    order = order[:_PAIRS]
    sizes = dataset.src_sizes[order] + dataset.tgt_sizes[order]
    order = order[: max(1, int((np.cumsum(sizes) <= _PIECES).sum()))]
    order = order[np.argsort(dataset.tgt_sizes[order], kind="stable")]
    if not len(order):
        return None
    counts = torch.tensor(dictionary.count, dtype=torch.float64).clamp(min=0) + 1
    by_counts = -(counts / counts.sum()).log()
    longest = int(max(dataset.src_sizes[order].max(), dataset.tgt_sizes[order].max()))
    pieces, sums = 0, torch.zeros(3 + other_sources, dtype=torch.float64)
    for indices in dataset.batch_by_size(order, max_tokens=max(_BATCH, 2 * longest)):
        sample = batch(indices)
        target = sample["target"]
        real = target.ne(dictionary.pad()) & target.ne(dictionary.eos())
        log_probs = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)
        found = [
            -_at(log_probs, target),
            -(log_probs.exp() * log_probs).sum(-1),
            by_counts.to(target.device)[target],
        ]
        if other_sources:
            others = dict(sample["net_input"])
            for name in ("src_tokens", "src_lengths"):
                others[name] = others[name].roll(1, 0)
            found.append(-_at(model.get_normalized_probs(model(**others), log_probs=True), target))
        sums += torch.stack([values[real].double().sum() for values in found]).cpu()
        pieces += int(real.sum())
    if not pieces or not sums.isfinite().all():
        return None
    loss, entropy, guess, *others_loss = (sums / pieces).tolist()
    return Losses(loss, entropy, guess, math.log(len(dictionary)), *others_loss)


def _at(log_probs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The log probability of each target piece, ``(bsz, tgt_len)``."""
    return log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
