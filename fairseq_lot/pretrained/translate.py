"""``fairseq-lot translate``: sentences in, translations out, of one model or of two side by side."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm

from fairseq_lot.errors import InputError
from fairseq_lot.pretrained.check import check_lengths
from fairseq_lot.pretrained.checkpoint import Checkpoint
from fairseq_lot.pretrained.device import add_device_argument, choose_device
from fairseq_lot.pretrained.loading import Loaded, load, on_device
from fairseq_lot.pretrained.text import Text, indices

_BATCH = 32  # piped sentences at a time


class Translator:
    """A trained model that takes sentences as people write them.

    Args:
        checkpoint: its path, or what ``swap`` or ``calibrate`` returned.
        data: its data folder, with the sentencepiece model; None: the one it was trained on.
        beam: size of the beam.
        tokenised: sentences come as Moses tokens, translations leave as such.
        device: to run on; None: a GPU when there is one.

    Raises:
        InputError: a file is missing or damaged, or they do not fit each other.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        data: str | Path | None = None,
        *,
        beam: int = 5,
        tokenised: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        if beam < 1:
            raise InputError(f"--beam must be at least 1, got {beam}")
        self.loaded = load(checkpoint, data, None, device=device)
        task = self.loaded.task
        self.text = Text.of(task.cfg.data, task.cfg.source_lang, task.cfg.target_lang, tokenised=tokenised)
        self._generator = task.build_generator([self.loaded.model], Namespace(beam=beam))

    def translate(self, sentences: Sequence[str], first_line: int = 1) -> list[str]:
        """One translation per sentence; a blank one stays blank.

        Raises:
            InputError: a sentence is longer than the model's positions; ``first_line`` numbers the first one.
        """
        encoded = self.text.encode(sentences)
        translations = [""] * len(encoded)
        filled = [i for i, pieces in enumerate(encoded) if pieces]
        if filled:
            sources = [self.symbols(encoded[i], f"line {first_line + i}") for i in filled]
            for i, target in zip(filled, self.search(sources), strict=True):
                translations[i] = self.text.decode(self.loaded.task.target_dictionary.string(target))
        return translations

    def symbols(self, pieces: Sequence[str], where: str) -> torch.Tensor:
        """``(len,)``: what the encoder reads, end of sentence included; refused if it is too long."""
        limit, length = self.loaded.model.max_positions()[0], len(pieces) + 1
        if length > limit:
            raise InputError(f"{where}: {length} pieces with the end of sentence, the model takes {limit}; shorten it")
        return indices(pieces, self.loaded.task.source_dictionary)

    @torch.no_grad()
    def search(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The best hypothesis for each source, both as symbols with the end of sentence."""
        task = self.loaded.task
        dataset = task.build_dataset_for_inference(list(sources), [len(source) for source in sources])
        sample = on_device(dataset.collater([dataset[i] for i in range(len(sources))]), self.loaded.device)
        found = task.inference_step(self._generator, [self.loaded.model], sample)
        by_id = dict(zip(sample["id"].tolist(), found, strict=True))
        return [by_id[i][0]["tokens"].cpu() for i in range(len(sources))]


@torch.no_grad()
def translate_split(loaded: Loaded, *, beam: int, batch: int = 128) -> list[str]:
    """The translation of every sentence of a split, pieces joined to words, in the order of the corpus.

    Raises:
        InputError: a sentence is longer than the model's positions.
    """
    task, dataset = loaded.task, loaded.dataset
    check_lengths(dataset.src_sizes, loaded.model.max_positions()[0], where=str(task.cfg.data))
    generator = task.build_generator([loaded.model], Namespace(beam=beam))
    translations = [""] * len(dataset)
    by_length = dataset.src_sizes.argsort(kind="stable")[::-1]
    with tqdm(total=len(dataset), desc="test", unit="sentence", leave=False, disable=None) as bar:
        for start in range(0, len(dataset), batch):
            sample = loaded.batch(by_length[start : start + batch])
            found = task.inference_step(generator, [loaded.model], sample)
            for i, hypotheses in zip(sample["id"].tolist(), found, strict=True):
                translations[i] = task.target_dictionary.string(hypotheses[0]["tokens"], "sentencepiece")
            bar.update(len(sample["id"]))
    return translations


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("sentences", nargs="*", metavar="SENTENCE", help="what to translate; default: the lines of standard input")
    add("--path", required=True, metavar="CKPT.pt", help="checkpoint: ours or fairseq's transformer*")
    add("--compare", metavar="OTHER.pt", help="print its translations as well, after a tab")
    add("--data", metavar="DATA", help="data folder with sentencepiece.bpe.model; default: that of the training")
    add("--beam", type=int, default=5, metavar="N", help="default: %(default)s")
    add_device_argument(parser)
    add("--tokenised", action="store_true", help="lines are lower-cased Moses tokens, and so are the translations")


def run(args: Namespace) -> int:
    """Translate line by line on a terminal, in batches elsewhere; with ``--compare`` a header says which is which."""
    paths = [path for path in (args.path, args.compare) if path is not None]
    device = choose_device(args.device)
    models = [Translator(path, args.data, beam=args.beam, tokenised=args.tokenised, device=device) for path in paths]
    if args.compare is not None:
        print(*paths, sep="\t")
    typed = not args.sentences and sys.stdin.isatty()
    line = 1
    for batch in _batches(args.sentences or _typed_lines(), 1 if typed else _BATCH):
        try:
            columns = [model.translate(batch, line) for model in models]
        except InputError as error:
            if not typed:
                raise
            print(error, file=sys.stderr)  # a person who types may try again
            columns = []
        for translations in zip(*columns, strict=True):
            print(*translations, sep="\t", flush=True)
        line += len(batch)
    return 0


def _batches(lines, size) -> Iterator[list[str]]:
    lines = iter(lines)
    while batch := list(islice(lines, size)):
        yield batch


def _typed_lines() -> Iterator[str]:
    """The lines of standard input, as soon as they come."""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise InputError(f"standard input, line {number}: not valid UTF-8; convert it with iconv") from None
