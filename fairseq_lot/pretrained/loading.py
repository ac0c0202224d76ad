"""Load a trained model, alone or with a split of its data."""

import contextlib
import copy
import dataclasses
import logging
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import ConcatDataset, Dictionary, LanguagePairDataset
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq.utils import apply_to_sample

from fairseq_lot.attention.registry import DEFAULT
from fairseq_lot.errors import InputError, first_line
from fairseq_lot.pretrained import pairs
from fairseq_lot.pretrained.checkpoint import Checkpoint, CheckpointLike, load_checkpoint
from fairseq_lot.pretrained.data_folder import (
    are_compared,
    check_data,
    check_embeddings,
    is_of_training,
    numbers,
    read_dictionary,
)
from fairseq_lot.pretrained.device import choose_device
from fairseq_lot.pretrained.languages import Pair, languages, with_languages
from fairseq_lot.pretrained.logs import quiet
from fairseq_lot.pretrained.multilingual import is_multilingual, set_up, source_symbols

# Features of training, switched off: they would hinder a fit and do not change outputs. Quantisation noise is not here:
# it is a layer of the model, inactive in eval mode.
_WITHOUT_TRAINING = {
    "checkpoint_activations": False,
    "offload_activations": False,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "encoder_embed_path": None,
    "decoder_embed_path": None,
}


@dataclass(frozen=True)
class Loaded:
    """A loaded model with its task and data.

    Attributes:
        model: in eval mode.
        task: fairseq's task, with the dictionaries.
        sentences: the loaded split, a ``LanguagePairDataset``; None if only the dictionaries were loaded.
        path: path of the checkpoint, for messages.
        encoders: the training's options of ``bpe`` and ``tokenizer``, see
            :meth:`~fairseq_lot.pretrained.checkpoint.Checkpoint.encoders`.
    """

    model: TransformerModel
    task: TranslationTask
    sentences: Any
    path: str
    encoders: dict[str, dict] = field(default_factory=dict)

    @property
    def pad(self) -> int:
        """The index of the padding symbol."""
        return self.task.source_dictionary.pad()

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    def left_out(self) -> np.ndarray:
        """Indices of the sentences that are too long for the model."""
        everything = np.arange(len(self.sentences))
        return np.asarray(self.sentences.filter_indices_by_size(everything, self.model.max_positions())[1], int)

    def draw(self, sentences: int | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw random sentences among those that are not too long for the model.

        Args:
            sentences: how many to draw; None: all.
            seed: seed of the draw.

        Returns:
            Indices of the drawn sentences, and of the remaining ones; the shortest first in both.

        Raises:
            InputError: all sentences are too long.
        """
        left_out = self.left_out()
        fitting = np.setdiff1d(np.arange(len(self.sentences)), left_out)
        most = self.model.max_positions()
        if not len(fitting):
            raise InputError(f"{self.path} takes at most {most} pieces: no sentence fits; give shorter sentences")
        if len(left_out):
            left = f"{len(left_out)} of {len(self.sentences)} sentences are left out: {numbers(left_out)}"
            print(f"{self.path} takes at most {most} pieces: {left}", file=sys.stderr)
        order = np.random.default_rng(seed).permutation(fitting)
        parts = np.split(order, [len(order) if sentences is None else sentences])
        drawn, others = (part[np.argsort(self.sentences.src_sizes[part], kind="stable")] for part in parts)
        return drawn, others

    def source(self, pieces: Sequence[str]) -> torch.Tensor:
        """The encoder's input for a sentence of these pieces: indices ``(len,)``, with the end of sentence.

        For a multilingual model it may start with the symbol of a language.
        """
        dictionary = self.task.source_dictionary
        return torch.tensor([*source_symbols(self.task), *map(dictionary.index, pieces), dictionary.eos()])

    def with_sources(self, sources: Sequence[torch.Tensor]) -> "Loaded":
        """The same model with other sentences, without targets.

        Args:
            sources: encoder inputs as made by :meth:`source`.
        """
        lengths, dictionary = [len(source) for source in sources], self.task.source_dictionary
        dataset = LanguagePairDataset(sources, lengths, dictionary, tgt_dict=self.task.target_dictionary)
        return replace(self, sentences=dataset)

    @torch.no_grad()
    def translate(self, beam: int, batch: int = 128) -> Iterator[tuple[int, torch.Tensor]]:
        """Translate all sentences, the longest first; a note on stderr says how many reached the length limit.

        Args:
            beam: size of the beam.
            batch: number of sentences at a time.

        Yields:
            The index of a sentence, and the indices of its best translation with the end of sentence.

        Raises:
            InputError: no score is finite.
        """
        generator = self.task.build_generator([self.model], Namespace(beam=beam))
        cut, limit = 0, min(generator.max_len_b, generator.max_len - 1)
        by_length = self.sentences.src_sizes.argsort(kind="stable")[::-1]
        for start in range(0, len(by_length), batch):
            sample = self.batch(by_length[start : start + batch])
            with _weights_unread(self.model), refuse_overflow(self.path):
                found = self.task.inference_step(generator, [self.model], sample)
            for i, hypotheses in zip(sample["id"].tolist(), found, strict=True):
                cut += len(hypotheses[0]["tokens"]) > limit
                yield i, hypotheses[0]["tokens"].cpu()
        if cut:
            print(
                f"{self.path}: {cut} translations have {limit} pieces, the limit, and may be cut off; "
                "fairseq-generate has --max-len-a and --max-len-b",
                file=sys.stderr,
            )

    def batch(self, indices: Iterable[int]) -> dict:
        """fairseq's batch of these sentences, on the model's device."""
        return on_device(self.sentences.collater([self.sentences[int(i)] for i in indices]), self.device)


@contextlib.contextmanager
def _weights_unread(model: TransformerModel) -> Iterator[None]:
    """Context manager: as in fairseq-generate, decoder layers return no weights of cross-attention unless asked."""
    wanted = [(layer, layer.need_attn) for layer in model.decoder.layers]
    try:
        for layer, _ in wanted:
            layer.need_attn = False
        yield
    finally:
        for layer, before in wanted:
            layer.need_attn = before


@contextlib.contextmanager
def refuse_overflow(name: str) -> Iterator[None]:
    """Context manager: turn the AssertionError of fairseq's search into an InputError.

    The search raises it if no score is finite.

    Args:
        name: of the model, for the message.
    """
    try:
        yield
    except AssertionError as error:
        reason = "no score of a next piece is finite: its weights overflow"
        raise InputError(f"{name} cannot translate: {reason}; give an earlier checkpoint") from error


def on_device(sample: dict, device: torch.device) -> dict:
    """fairseq's batch with its tensors on a device."""
    return apply_to_sample(lambda tensor: tensor.to(device), sample)


def build(state: Checkpoint, *, device: str | torch.device | None = "cpu", **overrides: Any) -> TransformerModel:
    """Build the model of a checkpoint in eval mode, without training features such as activation checkpointing.

    No data are needed: the symbols of its dictionaries are numbers.

    Args:
        state: the checkpoint.
        device: of the model; None: the CPU, where it is built.
        overrides: model arguments that replace the saved ones.

    Raises:
        InputError: the weights do not fit the arguments, or are not finite.
    """
    args = copy.deepcopy(state.model_args)
    for name, value in {**_WITHOUT_TRAINING, **overrides}.items():
        setattr(args, name, value)
    weights = state["model"]
    try:
        source = weights["encoder.embed_tokens.weight"]
        model = untrained(args, len(source), len(weights.get("decoder.embed_tokens.weight", source)))
        model.load_state_dict(dict(weights))
    except InputError as error:
        raise InputError(f"{state.path}: {error}") from None
    except Exception as error:  # a checkpoint of other options or versions leads to errors of any type
        raise InputError(f"{state.path} cannot be loaded: {first_line(error)}") from error
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise InputError(f"{state.path}: {name} is not finite; give an earlier checkpoint")
    return model.eval().to(device)


def untrained(args: Namespace, source: int, target: int) -> TransformerModel:
    """A new model with these arguments and random weights.

    Args:
        args: the model's arguments, including ``arch``.
        source, target: sizes of the source and the target dictionary; their symbols are numbers.
    """
    dictionaries = []
    for symbols in (source, target):
        dictionaries.append(dictionary := Dictionary())
        for number in range(dictionary.nspecial, symbols):
            dictionary.add_symbol(str(number))
    task = Namespace(source_dictionary=dictionaries[0], target_dictionary=dictionaries[1])
    return ARCH_MODEL_REGISTRY[args.arch].build_model(args, task)


def load(
    checkpoint: CheckpointLike,
    data: str | Path | None,
    split: str | None,
    *,
    needs_target: bool = True,
    device: str | torch.device | None = None,
    pair: Pair | None = None,
) -> Loaded:
    """Load a model and a split of its data.

    Args:
        checkpoint: its path, or the checkpoint in memory.
        data: folder made by fairseq-preprocess; None: the one that the checkpoint was trained on.
        split: train, valid, test or another split; None: only the dictionaries.
        needs_target: a split without its target side is refused.
        device: of the model; None: a GPU if there is one.
        pair: source and target language; None: the checkpoint's, else from the names of the data's files.

    Raises:
        InputError: a file is missing or damaged, or data and checkpoint do not fit each other.
    """
    state = with_languages(load_checkpoint(checkpoint), pair)
    task, dataset = load_data(state, data, split, needs_target=needs_target)
    loaded = Loaded(build(state, device=choose_device(device)), task, dataset, state.path, state.encoders())
    check_pairs(state, loaded)
    return loaded


def check_pairs(state: Checkpoint, loaded: Loaded, as_trained: TransformerModel | None = None) -> None:
    """Refuse data with other dictionaries than the training's, judged by the model's loss.

    Nothing is done if the dictionaries themselves can be compared. If the loss is inconclusive, a line on stderr says
    so.

    Args:
        state: the checkpoint.
        loaded: the model with its data.
        as_trained: the model with the attention that it was trained with; None: it is built here.

    Raises:
        InputError: the loss shows other dictionaries: the model is sure of wrong pieces.
    """
    task, dataset = loaded.task, loaded.sentences
    if are_compared(state, task):
        return
    unknown = "there are no pairs of sentences to try it on"
    if dataset is not None and dataset.tgt is not None:
        model = as_trained or _as_trained(state, loaded)
        is_joined = model.encoder.embed_tokens is model.decoder.embed_tokens  # then the targets test both languages
        is_joined &= task.source_dictionary == task.target_dictionary
        losses = pairs.measure(model, dataset, loaded.batch, task.target_dictionary, other_sources=not is_joined)
        if losses is None:
            return  # the caller will refuse such pairs
        by_guess = f"{losses.model:.2f} nats a piece, where a guess has {losses.guess:.2f}"
        source, target = (f"dict.{language}.txt" for language in (task.cfg.source_lang, task.cfg.target_lang))
        if losses.shows_others:
            raise InputError(
                f"{loaded.path} cannot predict the targets in {task.cfg.data}: {by_guess}, and the model is sure of "
                f"others (its entropy is {losses.entropy:.2f}). {source} or {target} has other pieces than in its "
                "training, or the same in another order, or the text is of another kind; use the data folder of the "
                "training, or encode the text with its dictionaries (fairseq-preprocess --srcdict, --tgtdict)"
            )
        if losses.tells_nothing:
            unknown = f"its loss is {by_guess}"
        elif losses.ignores_sources:
            unknown = (
                f"{target} fits; for {source} the loss is inconclusive: {losses.model:.2f} nats a piece, with the "
                f"sources of other sentences {losses.other_sources:.2f}"
            )
        else:
            return
    if not is_of_training(state, task):
        print(
            f"{loaded.path}: it is not known whether {task.cfg.data} has the dictionaries of its training; {unknown}",
            file=sys.stderr,
        )


def _as_trained(state: Checkpoint, loaded: Loaded) -> TransformerModel:
    """The model as it was trained: a swapped one with its softmax again, since a swap may cost much quality.

    The loaded model itself if it was not swapped, or if its training was not with softmax.
    """
    softmax = state.softmax_of_training()
    if softmax is None or not hasattr(state.model_args, "trained_attention"):
        return loaded.model
    return build(state, device=loaded.device, **{"attention": DEFAULT, "softmax_prior": None, **softmax})


def load_data(
    state: Checkpoint, data: str | Path | None, split: str | None, *, needs_target: bool = True
) -> tuple[TranslationTask, LanguagePairDataset | None]:
    """The checkpoint's task with a data folder, and the split's sentences or None; arguments as for :func:`load`.

    Raises:
        InputError: the folder is missing or damaged, or does not fit the checkpoint.
    """
    saved, path = state.task_options(), state.path
    if data is None:
        data = saved.get("data")
        if not isinstance(data, str) or not Path(data).is_dir():
            raise InputError(
                f"{path} was trained on {data}, which does not exist here; give its data folder (translate, report: "
                "--data; swap, calibrate: instead of a text file)"
            )
    source, target = languages(saved, data, path)
    if split is not None:
        check_data(data, split=split, source=source, target=target, needs_target=needs_target)
    else:
        for language in (source, target):
            read_dictionary(data, language)
    known = {option.name for option in dataclasses.fields(TranslationConfig)}
    chosen: dict[str, Any] = {"data": str(data), "source_lang": source, "target_lang": target}
    chosen |= {"dataset_impl": None, "num_batch_buckets": 0}  # detect the format; buckets are for training only
    try:
        with quiet("fairseq", logging.WARNING):  # it logs each file that it reads
            if is_multilingual(saved):
                task = set_up(copy.deepcopy(saved) | chosen)
            else:
                options = {name: value for name, value in saved.items() if name in known} | chosen
                task = TranslationTask.setup_task(TranslationConfig(**options))
            if split is not None:
                task.load_dataset(split)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # a folder of other options or versions leads to errors of any type
        raise InputError(f"{path} cannot be loaded with the data in {data}: {first_line(error)}") from error
    check_embeddings(task, state)
    dataset = None if split is None else task.dataset(split)
    return task, dataset.datasets[0] if isinstance(dataset, ConcatDataset) else dataset  # multilingual: one pair
