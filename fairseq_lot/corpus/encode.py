"""``fairseq-lot encode``: learn and apply a joint BPE of both languages, by sentencepiece or subword-nmt."""

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
SPACE = "\u2581"  # sentencepiece's mark of a space


def learn_bpe(lines: Iterable[str], vocab_size: int) -> bytes:
    """Learn a sentencepiece BPE that reproduces its text exactly: no normalisation, all characters kept.

    Args:
        lines: sentences of both languages.
        vocab_size: number of pieces, including sentencepiece's own three.

    Returns:
        The model file; the same lines give the same bytes.

    Raises:
        InputError: the vocabulary is smaller than the alphabet or larger than the text allows.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=max(vocab_size, 3),  # with less than its own three it gives an internal message
            character_coverage=1.0,
            normalization_rule_name="identity",
            split_by_unicode_script=False,  # Moses tokens are split already; "&apos;s" may be one piece
            max_sentence_length=1_000_000,  # bytes; the characters of longer lines would be missing
            num_threads=1,  # stored in the model file, which must not depend on the machine
            minloglevel=3,
        )
    except (RuntimeError, OSError, ValueError) as error:
        # drop sentencepiece's source location, and its advice about an option that encode does not have
        reason = " ".join(str(error).split()).rpartition("] ")[2].partition(" or decrease character_coverage")[0]
        raise InputError(f"--vocab-size {vocab_size} does not fit this text: {reason}") from None
    return model.getvalue()


def encode_lines(model: bytes, lines: Sequence[str], threads: int = 1) -> list[str]:
    """Encode each line by a sentencepiece model; pieces are separated by single spaces."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [
        " ".join(pieces)
        for pieces in processor.encode(list(lines), out_type=str, num_threads=min(threads, os.cpu_count() or 1))
    ]


def learn_codes(lines: Iterable[str], merges: int) -> bytes:
    """Learn the codes of subword-nmt's BPE, as fairseq's own recipes do.

    Args:
        lines: sentences of both languages.
        merges: number of merges.

    Returns:
        The file of the codes; the same lines give the same bytes.

    Raises:
        InputError: the text does not allow this many merges.
    """
    from subword_nmt import learn_bpe as learner

    codes = io.StringIO()
    # show its progress bar on a terminal only
    quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    with quiet, contextlib.suppress(ValueError):
        learner.learn_bpe(lines, codes, merges)  # ValueError: no word has two characters
    learned = max(0, codes.getvalue().count("\n") - 1)  # without the line of the version
    if learned < merges:
        raise InputError(f"--vocab-size {merges} is too large for this text; give at most {learned}")
    return codes.getvalue().encode()


def segment_lines(codes: bytes, lines: Sequence[str], threads: int = 1) -> list[str]:
    """Encode each line by subword-nmt's codes; pieces are separated by single spaces.

    A piece ends with ``@@`` if its word goes on.
    """
    from subword_nmt.apply_bpe import BPE

    segment = BPE(io.StringIO(codes.decode())).segment
    return [segment(line) for line in tqdm(lines, "encoding", unit=" lines", disable=None, leave=False)]


@dataclass(frozen=True)
class Bpe:
    """A kind of BPE.

    Attributes:
        file_name: name of the file that stores the learned model.
        learn: ``(lines, vocab_size) -> model``.
        encode: ``(model, lines, threads) -> lines of pieces``.
        reserved: regular expression of strings that must not occur in the text, because they mean something in pieces
            or are fairseq's own symbols.
    """

    file_name: str
    learn: Callable[[Iterable[str], int], bytes]
    encode: Callable[[bytes, Sequence[str], int], list[str]]
    reserved: str


BPES = {
    # fairseq reads <pad>, <s>, </s> and <unk> as its own symbols; sentencepiece would output only <pad> from text
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
    """Run ``fairseq-lot encode``: learn one BPE on both sides of train, then write the BPE and the pieces.

    ``out/text`` gets the test set before encoding, with single spaces. ``out/raw`` gets the untokenised reference
    ``raw/test.*`` if the text is a folder that has it.

    Raises:
        InputError: bad text, a vocabulary size that does not fit it, or an output that cannot be written.
    """
    check_least(args, vocab_size=1, threads=1)
    languages, bpe = (args.source, args.target), BPES[args.bpe]
    texts = read_splits(args.text, languages, out=args.out)
    for split, sides in texts.items():
        for language, lines in zip(languages, sides, strict=True):
            for line in lines:
                if mark := re.search(bpe.reserved, line):
                    where = f"{split}, {language}: {line!r:.80}"
                    raise InputError(f"{where} contains {mark[0]!r}, which the BPE or fairseq reserves; replace it")
    reference = Path(args.text[0]) / "raw" / f"test.{args.target}"
    if reference.exists():
        found, wanted = len(read_lines(reference)), len(texts["test"][1])
        if found != wanted:
            raise InputError(f"{reference} has {found} lines but the test set has {wanted}; correct or remove raw/")
    others = [other.file_name for other in BPES.values() if other is not bpe]
    for name in (*others, MARK, *(["raw"] if not reference.exists() else [])):
        if Path(args.out, name).exists():
            raise InputError(f"{args.out} has {name} of another text or BPE; give a new --out")
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
