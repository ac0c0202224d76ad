"""What a calibration runs on: random pieces, the sentences of a data folder, or those of a plain text file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.data.data_utils import collate_tokens
from fairseq.models.transformer import TransformerModel
from fairseq.tasks.translation import TranslationTask
from tqdm import tqdm

from fairseq_lot.errors import InputError
from fairseq_lot.models.dictionaries import has_fingerprints, note_dictionaries
from fairseq_lot.output.files import read_lines
from fairseq_lot.pretrained.checkpoint import Checkpoint
from fairseq_lot.pretrained.loading import Loaded, load_data, on_device
from fairseq_lot.pretrained.text import Text

# pieces of a random sentence; the end of sentence comes to them
SHORTEST = 4


@dataclass(frozen=True)
class Sentences:
    """Samples of fairseq's to fit to, and some sentences that are in none of them.

    Attributes:
        description: what they are, in words that follow "calibrated on".
        text: where the text is from; None: they are random.
        held_out: the sentences to measure errors on.
        batches: in random order, over and over.
    """

    description: str
    text: str | None
    held_out: dict
    batches: Iterator[dict]


def from_text(loaded: Loaded, name: str, *, max_tokens: int, held_out: int, seed: int) -> Sentences:
    """Sentences of one split of a data folder, or of a file, that the model has positions for.

    Args:
        max_tokens: source pieces in a batch; a sentence that has more is a batch.
        held_out: how many sentences to measure errors on.

    Raises:
        InputError: there are fewer than twice ``held_out``.
    """
    if not len(loaded.sentences):
        raise InputError(f"{name} has no sentence; give text that has some")
    held, others = loaded.draw(held_out, seed)
    if len(others) < held_out:
        raise InputError(f"{name} has {len(held) + len(others)} sentences; --held-out takes half of them at most")
    batches = in_batches(loaded, others, max_tokens)

    def endless() -> Iterator[dict]:
        random = np.random.default_rng(seed)
        while True:
            yield from (loaded.batch(batches[i]) for i in random.permutation(len(batches)))

    return Sentences(f"text of {name}", name, loaded.batch(held), endless())


def in_batches(loaded: Loaded, indices: np.ndarray, max_tokens: int) -> list[Sequence[int]]:
    """The sentences in batches of at most so many pieces; a sentence that has more is alone in one."""
    short, long = loaded.sentences.filter_indices_by_size(indices, (max_tokens, max_tokens))
    return [*loaded.sentences.batch_by_size(short, max_tokens=max_tokens), *([index] for index in long)]


def is_text_file(data: str | Path) -> bool:
    """Whether this is no folder, but text itself, perhaps through a pipe."""
    return Path(data).is_file() or Path(data).is_fifo()


def encoded(state: Checkpoint, file: str | Path, model: TransformerModel, **text: Any) -> Loaded:
    """A model with the sentences of a plain text file, in pieces as they are made for it; blank lines are left out.

    Raises:
        InputError: the file cannot be read, or what made the pieces of the model's text is not here.
    """
    lines = read_lines(file)
    task, _ = load_data(state, None, None)
    loaded = Loaded(model, task, None, state.path, state.encoders())
    pieces = filter(None, Text.of(loaded, **text).encode(tqdm(lines, desc=Path(file).name, leave=False, disable=None)))
    return loaded.with_sources([loaded.source(sentence) for sentence in pieces])


def random_pieces(
    model: TransformerModel,
    counted: Dictionary | None = None,
    *,
    shortest: int = 1,
    longest: int,
    max_tokens: int,
    held_out: int,
    seed: int,
) -> Sentences:
    """Sequences of random pieces, as they stand in no text: the checkpoint alone is enough.

    A batch holds sequences of nearly one length, which is drawn uniformly between ``SHORTEST``, or ``shortest`` if that
    is more, and ``longest``, or what the model has positions for; pieces are independent of each other. There is no
    target side.

    Args:
        counted: dictionary to draw by its counts; None: every piece is equally likely.
        shortest, longest: pieces of the shortest and of the longest sequence, without the end of sentence.
        max_tokens: source pieces in a batch.
        held_out: how many sequences to measure errors on.
    """
    symbols, device = model.encoder.dictionary, next(model.parameters()).device
    likely = np.ones(len(symbols)) if counted is None else np.asarray(counted.count, float).clip(min=0)
    likely[: symbols.nspecial] = 0
    if not likely.any():
        likely[symbols.nspecial :] = 1
    likely /= likely.sum()
    most = min(longest, model.max_positions()[0] - 1)
    least = min(max(SHORTEST, shortest), most)

    def sample(lengths: np.ndarray, random: np.random.Generator) -> dict:
        """Sequences of these lengths, each with its end of sentence."""
        drawn = np.split(random.choice(len(likely), int(lengths.sum()), p=likely), np.cumsum(lengths)[:-1])
        sequences = [torch.from_numpy(np.append(pieces, symbols.eos())) for pieces in drawn]
        tokens = collate_tokens(sequences, symbols.pad(), left_pad=True)
        return on_device({"net_input": {"src_tokens": tokens, "src_lengths": torch.from_numpy(lengths + 1)}}, device)

    def endless() -> Iterator[dict]:
        random = np.random.default_rng([seed, 1])
        while True:
            length = int(random.integers(least, most + 1))
            number = max(1, max_tokens // (length + 1))
            yield sample(random.integers(max(min(shortest, length), length * 3 // 4), length + 1, number), random)

    random = np.random.default_rng([seed, 0])
    how = "all equally likely" if counted is None else "by the dictionary's counts"
    held_out_sample = sample(random.integers(least, most + 1, held_out), random)
    lengths = f"{least} to {most}" if shortest > SHORTEST else f"up to {most}"
    return Sentences(f"random pieces, {lengths} at a time, {how}", None, held_out_sample, endless())


def task_of_training(state: Checkpoint) -> TranslationTask | None:
    """The task with the dictionaries of a checkpoint's training; None unless they are there, of the same size."""
    try:
        return load_data(state, None, None)[0]
    except InputError:  # there is none, or none that can be read
        return None


def note_training(state: Checkpoint) -> None:
    """Write the fingerprints of the dictionaries of the training into the arguments, where they can be found."""
    task = None if has_fingerprints(state.model_args) else task_of_training(state)
    if task is not None:
        note_dictionaries(state.model_args, task)
