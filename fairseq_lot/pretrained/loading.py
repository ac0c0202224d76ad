"""A trained model, alone or together with the sentences it is to run on."""

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

# What saves memory or regularises in fairseq-train: it hinders a fit, and changes no measurement. Quantisation noise is
# not here: its layer is a part of the model, and its noise is not made in eval mode.
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
    """A model in eval mode, its task, and one split of its data, or none.

    Attributes:
        sentences: the split, a ``LanguagePairDataset``.
        encoders: what its training was told about ``bpe`` and ``tokenizer``, see
            :func:`~fairseq_lot.pretrained.checkpoint.saved_encoders`.
    """

    model: TransformerModel
    task: TranslationTask
    sentences: Any
    path: str
    encoders: dict[str, dict] = field(default_factory=dict)

    @property
    def pad(self) -> int:
        """The symbol of a pad."""
        return self.task.source_dictionary.pad()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def left_out(self) -> np.ndarray:
        """Indices of the sentences that are longer than the model takes."""
        everything = np.arange(len(self.sentences))
        return np.asarray(self.sentences.filter_indices_by_size(everything, self.model.max_positions())[1], int)

    def draw(self, sentences: int | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of random sentences that the model has positions for (None: of all), and of the others.

        The shortest are first in both.
        """
        left_out = self.left_out()
        fitting = np.setdiff1d(np.arange(len(self.sentences)), left_out)
        most = self.model.max_positions()
        if not len(fitting):
            raise InputError(f"{self.path} takes no more than {most} pieces: no sentence fits")
        if len(left_out):
            left = f"{len(left_out)} of {len(self.sentences)} sentences are left out: {numbers(left_out)}"
            print(f"{self.path} has positions for {most} pieces: {left}", file=sys.stderr)
        order = np.random.default_rng(seed).permutation(fitting)
        parts = np.split(order, [len(order) if sentences is None else sentences])
        drawn, others = (part[np.argsort(self.sentences.src_sizes[part], kind="stable")] for part in parts)
        return drawn, others

    def source(self, pieces: Sequence[str]) -> torch.Tensor:
        """``(len,)``: what the encoder reads where a sentence has these pieces, end of sentence included."""
        dictionary = self.task.source_dictionary
        return torch.tensor([*source_symbols(self.task), *map(dictionary.index, pieces), dictionary.eos()])

    def with_sources(self, sources: Sequence[torch.Tensor]) -> "Loaded":
        """The same model with these sources as its sentences, and no target side."""
        lengths, dictionary = [len(source) for source in sources], self.task.source_dictionary
        dataset = LanguagePairDataset(sources, lengths, dictionary, tgt_dict=self.task.target_dictionary)
        return replace(self, sentences=dataset)

    @torch.no_grad()
    def translate(self, beam: int, batch: int = 128) -> Iterator[tuple[int, torch.Tensor]]:
        """Each sentence and its best translation, with the end of sentence; so many at a time, the longest first."""
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
        """fairseq's sample of these sentences, on the model's device."""
        return on_device(self.sentences.collater([self.sentences[int(i)] for i in indices]), self.device)


@contextlib.contextmanager
def _weights_unread(model: TransformerModel) -> Iterator[None]:
    """Let the decoder leave out the weights of its cross-attention, as ``fairseq-generate`` does."""
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
    """Name the model in whose scores there is no number: fairseq's search then asserts that it has come to an end."""
    try:
        yield
    except AssertionError as error:
        reason = "no score of a next piece is a finite number, so its weights overflow"
        raise InputError(f"{name} cannot translate: {reason}; give an earlier checkpoint") from error


def on_device(sample: dict, device: torch.device) -> dict:
    """fairseq's sample with its tensors on a device."""
    return apply_to_sample(lambda tensor: tensor.to(device), sample)


def build(state: Checkpoint, *, device: str | torch.device | None = "cpu", **overrides: Any) -> TransformerModel:
    """The model of a checkpoint, in eval mode and without what only trainings need, such as checkpointed activations.

    No data is needed: its dictionaries hold numbers for symbols. ``overrides`` are arguments of the model that differ
    from the saved ones.

    Raises:
        InputError: its weights do not fit its arguments, or are not finite.
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
    except Exception as error:  # whatever a checkpoint of other options or another time leads to
        raise InputError(f"{state.path} cannot be loaded: {first_line(error)}") from error
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise InputError(f"{state.path} has numbers in {name} that are not finite; give an earlier checkpoint")
    return model.eval().to(device)


def untrained(args: Namespace, source: int, target: int) -> TransformerModel:
    """A model of these arguments, with so many symbols in its dictionaries, of which numbers are the names."""
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
        data: folder made by fairseq-preprocess; None: the one that the checkpoint was trained on.
        split: train, valid or test; None: the dictionaries alone.
        needs_target: refuse a split that has its source side alone.
        device: None: a GPU when there is one.
        pair: source and target language; None: those of the checkpoint, else those in the names of the data's files.

    Raises:
        InputError: either is missing or damaged, or they do not fit each other.
    """
    state = with_languages(load_checkpoint(checkpoint), pair)
    task, dataset = load_data(state, data, split, needs_target=needs_target)
    loaded = Loaded(build(state, device=choose_device(device)), task, dataset, state.path, state.encoders())
    check_pairs(state, loaded)
    return loaded


def check_pairs(state: Checkpoint, loaded: Loaded, as_trained: TransformerModel | None = None) -> None:
    """Refuse data for which nothing tells the dictionaries of the training, where the loss on pairs shows others.

    A line on stderr says that nothing could be told.

    Args:
        as_trained: the model with the attention of its training; None: it is built.

    Raises:
        InputError: the model is sure of the wrong pieces.
    """
    task, dataset = loaded.task, loaded.sentences
    if are_compared(state, task):
        return
    unknown = "there are no pairs of sentences to try it on"
    if dataset is not None and dataset.tgt is not None:
        model = as_trained or _as_trained(state, loaded)
        is_joined = model.encoder.embed_tokens is model.decoder.embed_tokens  # of one dictionary the targets tell all
        is_joined &= task.source_dictionary == task.target_dictionary
        losses = pairs.measure(model, dataset, loaded.batch, task.target_dictionary, other_sources=not is_joined)
        if losses is None:
            return  # what is to be done with them refuses them
        by_guess = f"{losses.model:.2f} nats a piece, where a guess has {losses.guess:.2f}"
        source, target = (f"dict.{language}.txt" for language in (task.cfg.source_lang, task.cfg.target_lang))
        if losses.shows_others:
            raise InputError(
                f"{loaded.path} cannot predict the targets in {task.cfg.data}: {by_guess} and the model is sure of "
                f"others (its entropy is {losses.entropy:.2f}); {source} or {target} has other pieces than that of its "
                "training, or the same in another order, or this is another kind of text: use the data folder that it "
                "was trained on, or encode the text with its dictionaries (fairseq-preprocess --srcdict, --tgtdict)"
            )
        if losses.tells_nothing:
            unknown = f"its loss is {by_guess}"
        elif losses.ignores_sources:
            unknown = (
                f"{target} fits, and of {source} the loss does not tell: {losses.model:.2f} nats a piece, with the "
                f"sources of other sentences {losses.other_sources:.2f}"
            )
        else:
            return
    if not is_of_training(state, task):
        print(
            f"{loaded.path}: whether {task.cfg.data} has the dictionaries of its training is not known; {unknown}",
            file=sys.stderr,
        )


def _as_trained(state: Checkpoint, loaded: Loaded) -> TransformerModel:
    """The model with the softmax of its training where that was swapped, which may cost any quality; else itself."""
    softmax = state.softmax_of_training()
    if softmax is None or not hasattr(state.model_args, "trained_attention"):
        return loaded.model
    return build(state, device=loaded.device, **{"attention": DEFAULT, "softmax_prior": None, **softmax})


def load_data(
    state: Checkpoint, data: str | Path | None, split: str | None, *, needs_target: bool = True
) -> tuple[TranslationTask, LanguagePairDataset | None]:
    """The task that a checkpoint was trained on, with a data folder and perhaps a split; arguments as for :func:`load`.

    Raises:
        InputError: the folder is missing or damaged, or does not fit the checkpoint.
    """
    saved, path = state.task_options(), state.path
    if data is None:
        data = saved.get("data")
        if not isinstance(data, str) or not Path(data).is_dir():
            raise InputError(
                f"{path} was trained on {data}, which is not here; give its folder (translate and report: with --data, "
                "swap and calibrate: in place of a text file)"
            )
    source, target = languages(saved, data, path)
    if split is not None:
        check_data(data, split=split, source=source, target=target, needs_target=needs_target)
    else:
        for language in (source, target):
            read_dictionary(data, language)
    known = {option.name for option in dataclasses.fields(TranslationConfig)}
    chosen: dict[str, Any] = {"data": str(data), "source_lang": source, "target_lang": target}
    chosen |= {"dataset_impl": None, "num_batch_buckets": 0}  # the format is the folder's, buckets are of a training
    try:
        with quiet("fairseq", logging.WARNING):  # its notes on every file that it reads
            if is_multilingual(saved):
                task = set_up(copy.deepcopy(saved) | chosen)
            else:
                options = {name: value for name, value in saved.items() if name in known} | chosen
                task = TranslationTask.setup_task(TranslationConfig(**options))
            if split is not None:
                task.load_dataset(split)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # whatever a folder of other options or another time leads to
        raise InputError(f"{path} cannot be loaded with the data in {data}: {first_line(error)}") from error
    check_embeddings(task, state)
    dataset = None if split is None else task.dataset(split)
    return task, dataset.datasets[0] if isinstance(dataset, ConcatDataset) else dataset  # multilingual: of one pair
