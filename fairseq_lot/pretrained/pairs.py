"""Whether the loss of a model on a few pairs of sentences shows that it was trained with other dictionaries.

A dictionary in another order makes a trained model sure of the wrong pieces: its loss is above that of a guess, and far
above its own entropy. A model that has learnt little has a loss near its entropy, with any dictionary, so it tells
nothing. docs/training.md has the numbers behind the limits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.models.transformer import TransformerModel

_PAIRS = 64
_PIECES = 4096  # in all pairs together, source and target, so that long documents take no longer
_BATCH = 512  # pieces; log probabilities of the whole vocabulary are stored for each
# nats by which a loss exceeds the entropy of the predictions: at most 1.4 in models of few updates, with any
# dictionary, and at least 1.8 in trained ones with another order
_SURE = 1.5
_SAME = 0.95  # share of the loss with other sources above which the sources count as unread: trained models have 0.85


@dataclass(frozen=True)
class Losses:
    """Means over the target pieces of some pairs without the end of sentence, in nats.

    Attributes:
        model: of the model, teacher-forced.
        entropy: of its predictions, which is the loss that it expects.
        counts: of a guess by the counts in the target dictionary.
        uniform: of a guess among all pieces.
        other_sources: of the model where each target stands beside the source of another pair; infinite where that
            was not measured.
    """

    model: float
    entropy: float
    counts: float
    uniform: float
    other_sources: float = math.inf

    @property
    def guess(self) -> float:
        """The better guess of the two."""
        return min(self.counts, self.uniform)

    @property
    def shows_others(self) -> bool:
        """Whether the model was trained with other dictionaries, or on quite another text."""
        return self.model >= self.guess and self.model - self.entropy > _SURE

    @property
    def tells_nothing(self) -> bool:
        """Whether the model predicts no better than a guess, and does not claim to."""
        return self.model >= self.guess and not self.shows_others

    @property
    def ignores_sources(self) -> bool:
        """Whether the sources of other pairs serve as well, so that nothing is known of the source dictionary."""
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
    """Measure up to 64 random pairs that the model has positions for; None: there are none, or no finite loss.

    Args:
        batch: makes fairseq's sample from indices of the dataset.
        dictionary: of the targets.
        other_sources: measure these, too.
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
    """The entries of the targets."""
    return log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
