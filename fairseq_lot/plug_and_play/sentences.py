"""Sentences for a calibration: random pieces, a data folder, or a plain text file."""

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

# least number of pieces in a random sentence, without the end of sentence
SHORTEST = 4


@dataclass(frozen=True)
class Sentences:
    """Sentences to fit on, as fairseq's batches.

    Attributes:
        description: a phrase about the sentences that continues "calibrated on".
        text: name of the text; None: the sentences are random.
        held_out: a batch to measure errors on; its sentences are in no other batch.
        batches: an endless iterator over the other sentences, in random order.
    """

    description: str
    text: str | None
    held_out: dict
    batches: Iterator[dict]


def from_text(loaded: Loaded, name: str, *, max_tokens: int, held_out: int, seed: int) -> Sentences:
    """Batches of the loaded sentences, without those that are too long for the model.

    Args:
        loaded: the model with a split of a data folder, or with a file's sentences.
        name: the text's name, for messages and the description.
        max_tokens: most source pieces in a batch; a longer sentence is a batch of its own.
        held_out: number of sentences to measure errors on.
        seed: seed of the choice and the order of sentences.

    Raises:
        InputError: there are fewer than twice ``held_out`` sentences.
    """
    if not len(loaded.sentences):
        raise InputError(f"{name} has no sentence; give text that has some")
    held, others = loaded.draw(held_out, seed)
    if len(others) < held_out:
        raise InputError(f"{name} has {len(held) + len(others)} sentences; give a --held-out of at most half of them")
    batches = in_batches(loaded, others, max_tokens)

    def endless() -> Iterator[dict]:
        random = np.random.default_rng(seed)
        while True:
            yield from (loaded.batch(batches[i]) for i in random.permutation(len(batches)))

    return Sentences(f"text of {name}", name, loaded.batch(held), endless())


def in_batches(loaded: Loaded, indices: np.ndarray, max_tokens: int) -> list[Sequence[int]]:
    """Indices of sentences, grouped into batches.

    Args:
        loaded: the sentences.
        indices: the sentences to use.
        max_tokens: most pieces in a batch on a side, with pads; a longer sentence is a batch of its own.
    """
    short, long = loaded.sentences.filter_indices_by_size(indices, (max_tokens, max_tokens))
    return [*loaded.sentences.batch_by_size(short, max_tokens=max_tokens), *([index] for index in long)]


def is_text_file(data: str | Path) -> bool:
    """Whether this is a text file or a pipe, not a folder."""
    return Path(data).is_file() or Path(data).is_fifo()


def encoded(state: Checkpoint, file: str | Path, model: TransformerModel, **text: Any) -> Loaded:
    """The model with a plain text file as its sentences; blank lines are skipped.

    Args:
        state: the checkpoint.
        file: text in the source language, a sentence per line.
        model: the checkpoint's model.
        **text: options of :meth:`Text.of`; by default the encoding is found as for the model's own text.

    Raises:
        InputError: the file cannot be read, or the model's text encoding is not found.
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
    """Sequences of independent random pieces, without targets; no data are needed.

    For each batch a length n is drawn uniformly from ``shortest``, at least ``SHORTEST``, to ``longest``, at most the
    model's limit. The lengths in the batch are uniform from 3n/4 to n, and at least ``shortest``.

    Args:
        model: gives the dictionary, the largest length and the device.
        counted: dictionary whose counts give the probabilities; None: all pieces are equally likely.
        shortest, longest: pieces in the shortest and in the longest sequence, without the end of sentence.
        max_tokens: most source pieces in a batch.
        held_out: number of sequences to measure errors on.
        seed: seed of the pieces and lengths.
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
        """A batch of sequences of these lengths, each with an end of sentence."""
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
    """The task with the dictionaries of a checkpoint's training; None if they no longer exist or do not fit."""
    try:
        return load_data(state, None, None)[0]
    except InputError:
        return None


def note_training(state: Checkpoint) -> None:
    """Write fingerprints of the training's dictionaries into the checkpoint's arguments.

    Nothing is written if they are there already, or if the dictionaries no longer exist.
    """
    task = None if has_fingerprints(state.model_args) else task_of_training(state)
    if task is not None:
        note_dictionaries(state.model_args, task)
