"""What a calibration runs on: random pieces, the sentences of a data folder, or those of a plain text file."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.data.data_utils import collate_tokens
from fairseq.models.transformer import TransformerModel
from tqdm import tqdm

from fairseq_lot.errors import InputError
from fairseq_lot.output.files import read_lines
from fairseq_lot.pretrained.checkpoint import saved_encoder, saved_task
from fairseq_lot.pretrained.languages import languages
from fairseq_lot.pretrained.loading import Loaded, load_data, on_device
from fairseq_lot.pretrained.multilingual import add_language_symbols, source_symbols
from fairseq_lot.pretrained.text import Text, indices

# pieces of a random sentence, both included; the end of sentence comes to them
SHORTEST, LONGEST = 4, 80


class Sentences(Protocol):
    """An endless supply of batches, and some sentences that are in none of them; samples are fairseq's.

    Attributes:
        description: what they are, in words that follow "calibrated on".
        held_out: the sentences to measure errors on.
    """

    description: str
    held_out: dict

    def batches(self) -> Iterator[dict]:
        """Batches to fit to, in random order, over and over."""


class TextSentences:
    """Sentences of one split of a data folder, or of a file.

    Args:
        loaded: a model with these sentences; those that it has no positions for are left out.
        name: of the folder or the file.
        max_tokens: pieces in a batch.
        held_out: sentences to measure errors on.
        seed: of what is drawn.

    Raises:
        InputError: the split is smaller than twice ``held_out``.
    """

    def __init__(self, loaded: Loaded, name: str, *, max_tokens: int, held_out: int, seed: int):
        indices = loaded.draw(None, seed)
        if len(indices) < 2 * held_out:
            raise InputError(f"{name} has {len(indices)} sentences; --held-out takes half of them at most")
        chosen = loaded.draw(held_out, seed)
        self.description = f"text of {name}"
        self.held_out = loaded.batch(chosen)
        self._loaded, self._seed = loaded, seed
        fitted = indices[~np.isin(indices, chosen)]
        self._batches = list(loaded.sentences.batch_by_size(fitted, max_tokens=max_tokens))

    def batches(self) -> Iterator[dict]:
        generator = np.random.default_rng(self._seed)
        while True:
            for i in generator.permutation(len(self._batches)):
                yield self._loaded.batch(self._batches[i])


def encoded(state: dict, path: str | Path, file: str | Path, model: TransformerModel) -> Loaded:
    """A model with the sentences of a plain text file, in pieces as they are made for it; blank lines are left out.

    Raises:
        InputError: the file cannot be read, or what made the pieces of the model's text is not here.
    """
    lines = read_lines(file)
    try:
        task, _ = load_data(state, path, None, None)
    except InputError as error:
        raise InputError(
            f"{file} is plain text, of which pieces are made as in the folder that {path} was trained on: {error}"
        ) from None
    encoders = {kind: saved_encoder(state, kind) for kind in ("bpe", "tokenizer")}
    loaded = Loaded(model, task, None, str(path), encoders)
    pieces = filter(None, Text.of(loaded).encode(tqdm(lines, desc=Path(file).name, leave=False, disable=None)))
    start, dictionary = source_symbols(task), task.source_dictionary
    sources = [torch.tensor([*start, *indices(sentence, dictionary)]) for sentence in pieces]
    dataset = LanguagePairDataset(sources, [len(source) for source in sources], dictionary)
    return replace(loaded, dataset=dataset)


class RandomPieces:
    """Sequences of random pieces, as they stand in no text: the checkpoint alone is enough.

    A batch holds sequences of nearly one length, which is drawn uniformly between ``SHORTEST`` and ``LONGEST``, or
    what the model has positions for; pieces are independent of each other. There is no target side.

    Args:
        model: whose pieces they are.
        counted: dictionary to draw by its counts; None: every piece is equally likely.
        max_tokens: source pieces in a batch.
        held_out: sequences to measure errors on.
        seed: of everything that is drawn.
    """

    def __init__(
        self,
        model: TransformerModel,
        counted: Dictionary | None = None,
        *,
        max_tokens: int,
        held_out: int,
        seed: int,
    ):
        how = "all equally likely" if counted is None else "by the dictionary's counts"
        self.description = f"random pieces, {how}"
        symbols = model.encoder.dictionary
        self._pad, self._eos = symbols.pad(), symbols.eos()
        likely = np.ones(len(symbols)) if counted is None else np.asarray(counted.count, float).clip(min=0)
        likely[: symbols.nspecial] = 0
        if not likely.any():
            likely[symbols.nspecial :] = 1
        self._likely = likely / likely.sum()
        self._device = next(model.parameters()).device
        self._longest = min(LONGEST, model.max_positions()[0] - 1)
        self._max_tokens, self._seed = max_tokens, seed
        random = np.random.default_rng([seed, 0])
        self.held_out = self._sample(self._lengths(random, held_out), random)

    def batches(self) -> Iterator[dict]:
        random = np.random.default_rng([self._seed, 1])
        while True:
            (longest,) = self._lengths(random, 1)
            number = max(1, self._max_tokens // (longest + 1))
            yield self._sample(random.integers(max(1, longest * 3 // 4), longest + 1, number), random)

    def _lengths(self, random, number):
        return random.integers(min(SHORTEST, self._longest), self._longest + 1, number)

    def _sample(self, lengths, random):
        """fairseq's sample of sequences of these lengths, each with its end of sentence."""
        drawn = random.choice(len(self._likely), int(lengths.sum()), p=self._likely)
        sequences = [
            torch.from_numpy(np.append(pieces, self._eos)) for pieces in np.split(drawn, np.cumsum(lengths)[:-1])
        ]
        net_input = {
            "src_tokens": collate_tokens(sequences, self._pad, left_pad=True),
            "src_lengths": torch.from_numpy(lengths + 1),
        }
        return on_device({"net_input": net_input}, self._device)


def dictionary_of_training(state: dict, path: str | Path, size: int) -> Dictionary | None:
    """The source dictionary that a checkpoint was trained with; None unless it is still there, of this size."""
    saved = saved_task(state, path)
    try:
        folder = Path(saved["data"])
        source, _ = languages(saved, folder, path)
        found = add_language_symbols(Dictionary.load(str(folder / f"dict.{source}.txt")), saved, path)
    except Exception:  # there is none, or none that can be read: pieces are then drawn uniformly
        return None
    return found if len(found) == size else None
