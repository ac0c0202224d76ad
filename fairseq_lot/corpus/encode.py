"""Joint BPE, sentencepiece's or subword-nmt's: learned on both languages of a tokenised text and applied to it."""

import contextlib
import io
import os
import re
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
from tqdm import tqdm

from fairseq_lot.corpus.documents import MARK
from fairseq_lot.corpus.parallel import add_text_arguments, output_folder, read_splits, write_splits
from fairseq_lot.errors import InputError, check_least
from fairseq_lot.output.files import read_lines

MODEL_NAME = "sentencepiece.bpe.model"
SPACE = "\u2581"  # what sentencepiece writes for a space


def learn_bpe(lines: Iterable[str], vocab_size: int) -> bytes:
    """Learn a BPE model that reproduces its text exactly (identity normalisation, every character kept).

    Args:
        lines: sentences of all languages; the same ones give the same bytes.
        vocab_size: number of pieces, with sentencepiece's own three.

    Raises:
        InputError: the vocabulary is smaller than the alphabet or larger than the text allows.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=max(vocab_size, 3),  # it has three of its own, and with fewer gives an internal message
            character_coverage=1.0,
            normalization_rule_name="identity",
            split_by_unicode_script=False,  # Moses tokens are split already; "&apos;s" may be one piece
            max_sentence_length=1_000_000,  # bytes; longer lines would be left out of the alphabet
            num_threads=1,  # part of the model file: the same everywhere
            minloglevel=3,
        )
    except (RuntimeError, OSError, ValueError) as error:
        # without sentencepiece's place in its code, and without an option of its own that encode does not have
        reason = " ".join(str(error).split()).rpartition("] ")[2].partition(" or decrease character_coverage")[0]
        raise InputError(f"--vocab-size {vocab_size} does not fit this text: {reason}") from None
    return model.getvalue()


def encode_lines(model: bytes, lines: Sequence[str], threads: int = 1) -> list[str]:
    """Return each line as its pieces, separated by single spaces."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [
        " ".join(pieces)
        for pieces in processor.encode(list(lines), out_type=str, num_threads=min(threads, os.cpu_count() or 1))
    ]


def learn_codes(lines: Iterable[str], merges: int) -> bytes:
    """Learn the codes of subword-nmt's BPE, as in fairseq's own recipes; the same lines give the same bytes.

    Raises:
        InputError: the text does not have so many pairs that occur twice.
    """
    from subword_nmt import learn_bpe as learner

    codes = io.StringIO()
    # on a terminal its progress bar is welcome; otherwise stderr is for errors
    quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    with quiet, contextlib.suppress(ValueError):
        learner.learn_bpe(lines, codes, merges)  # ValueError: no word has two characters
    learned = max(0, codes.getvalue().count("\n") - 1)  # the first line is the version
    if learned < merges:
        raise InputError(f"--vocab-size {merges} is too large for this text; give at most {learned}")
    return codes.getvalue().encode()


def segment_lines(codes: bytes, lines: Sequence[str], threads: int = 1) -> list[str]:
    """Return each line as its pieces, separated by single spaces, with ``@@`` where a word goes on."""
    from subword_nmt.apply_bpe import BPE

    segment = BPE(io.StringIO(codes.decode())).segment
    return [segment(line) for line in tqdm(lines, "encoding", unit=" lines", disable=None, leave=False)]


@dataclass(frozen=True)
class Bpe:
    """A way to learn pieces and to apply them.

    Attributes:
        file_name: what the learned model is kept as.
        learn: ``(lines, vocab_size) -> model``.
        encode: ``(model, lines, threads) -> lines of pieces``.
        reserved: finds what the text must not hold, since pieces or symbols are spelt so.
    """

    file_name: str
    learn: Callable[[Iterable[str], int], bytes]
    encode: Callable[[bytes, Sequence[str], int], list[str]]
    reserved: str


BPES = {
    # fairseq reads <pad>, <s>, </s> and <unk> as symbols of its own; of these sentencepiece makes the first alone
    "sentencepiece": Bpe(MODEL_NAME, learn_bpe, encode_lines, f"{SPACE}|<pad>"),
    "subword_nmt": Bpe("code", learn_codes, segment_lines, r"@@(?= |$)|<(s|pad|/s|unk)>(?!\S)"),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fairseq-lot encode``."""
    files = ", ".join(bpe.file_name for bpe in BPES.values())
    add_text_arguments(parser, "text", "tokenised")
    parser.add_argument("--out", required=True, metavar="DIR", help=f"folder for the BPE ({files}) and the pieces")
    parser.add_argument("--bpe", choices=BPES, default="sentencepiece", help="default: %(default)s")
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="pieces (subword_nmt: merges), e.g. 10000"
    )
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="encoding threads of sentencepiece (default: %(default)s)"
    )


def run(args: Namespace) -> None:
    """Learn one BPE on both sides of train, and write it and the pieces.

    ``out/text`` gets the test set as it was encoded, with single spaces: what joining the pieces gives back. Where the
    text is a folder with an untokenised reference ``raw/test.*``, ``out/raw`` gets it.

    Raises:
        InputError: bad text, a vocabulary that does not fit it, or an output that cannot be written.
    """
    check_least(args, vocab_size=1, threads=1)
    languages, bpe = (args.source, args.target), BPES[args.bpe]
    texts = read_splits(args.text, languages, out=args.out)
    for split, sides in texts.items():
        for language, lines in zip(languages, sides, strict=True):
            for line in lines:
                if mark := re.search(bpe.reserved, line):
                    where = f"{split}, {language}: {line!r:.80}"
                    raise InputError(f"{where} holds {mark[0]!r}, which the BPE or fairseq uses itself; replace it")
    reference = Path(args.text[0]) / "raw" / f"test.{args.target}"
    if reference.exists():
        found, wanted = len(read_lines(reference)), len(texts["test"][1])
        if found != wanted:
            raise InputError(f"{reference} has {found} lines but the test set has {wanted}; mend or remove raw/")
    others = [other.file_name for other in BPES.values() if other is not bpe]
    for name in (*others, MARK, *(["raw"] if not reference.exists() else [])):
        if Path(args.out, name).exists():
            raise InputError(f"{args.out} has {name} of another text or BPE, which would stay; give a new --out")
    train = [line for side in texts["train"] for line in side]
    shown = tqdm(train, f"learning {args.vocab_size} pieces", unit=" lines", disable=None, leave=False)
    model = bpe.learn(shown, args.vocab_size)
    encoded = {split: [bpe.encode(model, lines, args.threads) for lines in sides] for split, sides in texts.items()}
    with output_folder(args.out) as folder:
        write_splits(folder, encoded, languages)
        write_splits(folder / "text", {"test": texts["test"]}, languages)
        if reference.exists():
            (folder / "raw").mkdir()
            shutil.copyfile(reference, folder / "raw" / reference.name)
        (folder / bpe.file_name).write_bytes(model)
