"""``fairseq-lot translate``: translate sentences by one model, or by two side by side."""

import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

import torch
from fairseq.data import LanguagePairDataset
from fairseq.tasks.translation import TranslationTask
from tqdm import tqdm

from fairseq_lot.errors import InputError, flag
from fairseq_lot.output.files import read_lines
from fairseq_lot.pretrained.checkpoint import CheckpointLike
from fairseq_lot.pretrained.data_folder import check_lengths, check_not_empty
from fairseq_lot.pretrained.device import add_device_argument
from fairseq_lot.pretrained.languages import Pair, add_language_arguments, typed_pair
from fairseq_lot.pretrained.loading import Loaded, load
from fairseq_lot.pretrained.multilingual import language_symbols
from fairseq_lot.pretrained.text import Text, add_text_arguments, piece_kind, text_options

_BATCH = 32  # sentences at a time


class Translator:
    """A trained model that translates raw sentences.

    Args:
        checkpoint: its path, or the result of ``swap`` or ``calibrate``.
        data: its data folder; None: the one that it was trained on.
        split: a split to load with its sentences, which are pieces; ``text`` and :meth:`translate` are then refused.
            None: only the dictionaries.
        beam: size of the beam.
        device: of the model; None: a GPU if there is one.
        languages: source and target; None: the checkpoint's, else from the file names in ``data``.
        **text: the options ``bpe``, ``bpe_codes``, ``tokenizer``, ``tokenised`` and ``pieces`` of
            :meth:`fairseq_lot.pretrained.text.Text.of`; by default the encoding is found automatically.

    Raises:
        InputError: a file is missing or damaged, or the files do not fit each other.
    """

    def __init__(
        self,
        checkpoint: CheckpointLike,
        data: str | Path | None = None,
        *,
        split: str | None = None,
        beam: int = 5,
        device: str | torch.device | None = None,
        languages: Pair | None = None,
        **text: Any,
    ) -> None:
        if not isinstance(beam, int) or beam < 1:
            raise InputError(f"--beam must be at least 1, got {beam!r}")
        told = [flag(name) for name, value in text.items() if value]
        if split is not None and told:
            raise InputError(f"{', '.join(told)} cannot be used with a split, whose sentences are pieces; leave it out")
        self.loaded = load(checkpoint, data, split, needs_target=False, device=device, pair=languages)
        if split is None:
            self.text = Text.of(self.loaded, **text)
        else:
            self.text = Text.of_pieces(self.loaded.task)
        self._beam = beam

    def symbols(self, pieces: Sequence[str], where: str) -> torch.Tensor:
        """The encoder's input for a sentence: indices ``(len,)``, with the end of sentence.

        Args:
            pieces: the pieces of the sentence.
            where: name of the sentence in the message.

        Raises:
            InputError: the sentence is too long for the model.
        """
        symbols = self.loaded.source(pieces)
        limit, length = self.loaded.model.max_positions()[0], len(symbols)
        if length > limit:
            raise InputError(f"{where}: {length} pieces with the end of sentence, the model takes {limit}; shorten it")
        return symbols

    def search(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The best translation of each source. Both are indices ``(len,)`` with the end of sentence."""
        found = dict(self.loaded.with_sources(sources).translate(self._beam, _BATCH))
        return [found[i] for i in range(len(sources))]

    def spell(self, target: torch.Tensor) -> str:
        """A translation of :meth:`search` as text."""
        return self.text.decode(_string(self.loaded.task, target))

    @overload
    def translate(self, sentences: str, first_line: int = 1) -> str: ...

    @overload
    def translate(self, sentences: list[str], first_line: int = 1) -> list[str]: ...

    def translate(self, sentences: str | list[str], first_line: int = 1) -> str | list[str]:
        """Translate one sentence or a list of sentences; the translation of a blank sentence is empty.

        Args:
            sentences: one sentence or a list.
            first_line: number of the first sentence, for messages.

        Returns:
            The translation, or a list with one per sentence.

        Raises:
            InputError: an argument has another type, the text is invalid, a sentence is too long for the model, or a
                split was loaded.
        """
        if self.loaded.sentences is not None:
            raise InputError("a Translator with a split cannot translate text; make one without split")
        if isinstance(sentences, str):
            return self.translate([sentences], first_line)[0]
        if not isinstance(sentences, list):
            raise InputError(f"sentences must be a string or a list of strings, not {type(sentences).__name__}")
        for line, sentence in enumerate(sentences, start=first_line):
            if not isinstance(sentence, str):
                raise InputError(f"line {line}: a sentence must be a string, not {type(sentence).__name__}")
            if re.search("[\ud800-\udfff]", sentence):
                raise InputError(f"line {line}: {sentence!r:.60} is not UTF-8 (a surrogate); convert it with iconv")
        encoded = self.text.encode(sentences, first_line)
        translations = [""] * len(encoded)
        filled = [i for i, pieces in enumerate(encoded) if pieces]
        if filled:
            sources = [self.symbols(encoded[i], f"line {first_line + i}") for i in filled]
            for i, target in zip(filled, self.search(sources), strict=True):
                translations[i] = self.spell(target)
        return translations


def _string(task: TranslationTask, target: torch.Tensor, joined: str | None = None, **how: bool) -> str:
    """The words of a target, without language symbols; arguments as for ``Dictionary.string``."""
    return task.target_dictionary.string(target, joined, extra_symbols_to_ignore=language_symbols(task), **how)


def translate_split(loaded: Loaded, *, beam: int) -> list[str]:
    """Translate each sentence of the loaded split; pieces are joined to words.

    Returns:
        The translations as lines of tokens, in the order of the split.

    Raises:
        InputError: a sentence is empty or too long for the model.
    """
    task, dataset = loaded.task, loaded.sentences
    check_not_empty(dataset.src_sizes, where=str(task.cfg.data))
    check_lengths([dataset.src_sizes], loaded.model.max_positions(), where=str(task.cfg.data))
    joined = piece_kind(task.target_dictionary)
    shown = tqdm(loaded.translate(beam), "test", total=len(dataset), unit="sentence", leave=False, disable=None)
    translations = {i: _string(task, target, joined) for i, target in shown}
    return [translations[i] for i in range(len(dataset))]


def references(task: TranslationTask, dataset: LanguagePairDataset, split: str) -> list[str]:
    """The references of a split, as lines of tokens.

    They come from the file :func:`text_of`. Without it they are the split's target side, with pieces joined to words;
    a piece that is not in the dictionary is ``<<unk>>`` there, which no translation contains.

    Raises:
        InputError: the file and the split differ in length, or there is neither a file nor a target side.
    """
    file = text_of(task, split)
    if file is None:
        if dataset.tgt is None:
            raise InputError(
                f"{task.cfg.data}: {split} has no target side and no text/{split}.{task.cfg.target_lang}; add either"
            )
        joined = piece_kind(task.target_dictionary)
        return [_string(task, dataset.tgt[i], joined, escape_unk=True) for i in range(len(dataset))]
    lines = read_lines(file)
    if len(lines) != len(dataset):
        raise InputError(f"{file} has {len(lines)} lines, the split {len(dataset)} sentences; correct or remove it")
    return lines


def raw_of(task: TranslationTask, split: str) -> Path | None:
    """The file of a split's untokenised references, ``raw/SPLIT.LANGUAGE`` in the data folder; None: there is none."""
    file = Path(task.cfg.data) / "raw" / f"{split}.{task.cfg.target_lang}"
    return file if file.is_file() else None


def text_of(task: TranslationTask, split: str) -> Path | None:
    """The file of a split's references, ``text/SPLIT.LANGUAGE`` in the data folder; None if it does not exist."""
    file = Path(task.cfg.data) / "text" / f"{split}.{task.cfg.target_lang}"
    return file if file.exists() else None


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("sentences", nargs="*", metavar="SENTENCE", help="source sentences; default: the lines of standard input")
    add("--path", required=True, metavar="CKPT.pt", help="checkpoint: ours or fairseq's transformer*")
    add("--compare", metavar="OTHER.pt", help="also print this checkpoint's translations, after a tab")
    add("--data", metavar="DATA", help="data folder; default: the one of the training")
    add("--beam", type=int, default=5, metavar="N", help="default: %(default)s")
    add_device_argument(parser)
    add_language_arguments(parser)
    add_text_arguments(parser.add_argument_group("from sentences to pieces"))


def run(args: Namespace) -> None:
    """Run ``fairseq-lot translate``: line by line on a terminal, else in batches; ``--compare`` prints a header."""
    paths = list(filter(None, (args.path, args.compare)))
    shared = {"beam": args.beam, "device": args.device, "languages": typed_pair(args)}
    models = [Translator(path, args.data, **shared, **text_options(args)) for path in paths]
    if args.compare is not None:
        print(*paths, sep="\t")
    typed = not args.sentences and sys.stdin.isatty()
    # bytes that are not UTF-8 become surrogates; translate refuses these with the line's number
    lines = args.sentences or (
        raw.decode("utf-8", "surrogateescape").removeprefix("\ufeff").rstrip("\r\n") for raw in sys.stdin.buffer
    )
    lines, line = iter(lines), 1
    while batch := list(islice(lines, 1 if typed else _BATCH)):
        try:
            columns = [model.translate(batch, line) for model in models]
        except InputError as error:
            if not typed:
                raise
            print(error, file=sys.stderr)  # on a terminal the user may try again
            columns = []
        for translations in zip(*columns, strict=True):
            print(*translations, sep="\t", flush=True)
        line += len(batch)
