"""Joint BPE, sentencepiece's or subword-nmt's: learned on both languages of a tokenised text and applied to it."""

import io
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
from tqdm import tqdm

from fairseq_lot.corpus import subword
from fairseq_lot.corpus.parallel import add_text_arguments, check_output, output_folder, read_splits, write_lines
from fairseq_lot.errors import InputError
from fairseq_lot.output.files import read_lines

MODEL_NAME = "sentencepiece.bpe.model"
CHUNK = 2000  # lines per call into sentencepiece, so that the progress bar moves
SPACE = "\u2581"  # what sentencepiece writes for a space


def learn_bpe(lines: Iterable[str], vocab_size: int) -> bytes:
    """Learn a BPE model that reproduces its text exactly (identity normalisation, every character kept).

    Args:
        lines: sentences of all languages.
        vocab_size: number of pieces, with sentencepiece's own three.

    Returns:
        the serialised model; the same lines give the same bytes.

    Raises:
        InputError: the vocabulary is smaller than the alphabet or larger than the text allows.
    """
    if vocab_size < 1:
        raise InputError(f"--vocab-size {vocab_size} is not a vocabulary; give at least 1 (usual: 1000 to 32000)")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0,
            normalization_rule_name="identity",
            split_by_unicode_script=False,  # Moses tokens are split already; "&apos;s" may be one piece
            max_sentence_length=1_000_000,  # bytes; longer lines would be left out of the alphabet
            num_threads=1,  # part of the model file: the same everywhere
            minloglevel=3,
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise InputError(_explain(vocab_size, str(error))) from None
    return model.getvalue()


def _explain(vocab_size: int, message: str) -> str:
    """Return the one-line form of an error of sentencepiece's trainer."""
    too_high = re.search(r"value <= (\d+)", message)
    if too_high:
        return f"--vocab-size {vocab_size} is too large for this text; give at most {too_high.group(1)}"
    too_low = re.search(r"required_chars\D*\d+ vs (\d+)", message)
    if too_low:
        return f"--vocab-size {vocab_size} is too small for this text's alphabet; give at least {too_low.group(1)}"
    return f"sentencepiece cannot learn --vocab-size {vocab_size} from this text: {' '.join(message.split())}"


def encode_lines(model: bytes, lines: Sequence[str], threads: int = 1, progress: tqdm | None = None) -> list[str]:
    """Return each line as its pieces, separated by single spaces."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    encoded: list[str] = []
    for start in range(0, len(lines), CHUNK):
        chunk = list(lines[start : start + CHUNK])
        encoded.extend(" ".join(pieces) for pieces in processor.encode(chunk, out_type=str, num_threads=threads))
        if progress is not None:
            progress.update(len(chunk))
    return encoded


@dataclass(frozen=True)
class Bpe:
    """A way to learn pieces and to apply them.

    Attributes:
        file_name: what the learned model is kept as.
        learn: ``(lines, vocab_size) -> model``.
        encode: ``(model, lines, threads, progress) -> lines of pieces``.
        reserved: finds what the text must not hold, since joining the pieces would take it for a mark of its own.
        mark: that mark, in words.
    """

    file_name: str
    learn: Callable[[Iterable[str], int], bytes]
    encode: Callable[..., list[str]]
    reserved: re.Pattern
    mark: str


BPES = {
    "sentencepiece": Bpe(MODEL_NAME, learn_bpe, encode_lines, re.compile(SPACE), "the character U+2581 (a space)"),
    "subword_nmt": Bpe(
        subword.CODES_NAME, subword.learn_bpe, subword.encode_lines, re.compile(r"@@( |$)"), "@@ at the end of a token"
    ),
}


def _check_text(texts: dict[str, list[list[str]]], languages: Sequence[str], bpe: Bpe) -> None:
    """Refuse lines that would not be the same after their pieces are joined."""
    for split, sides in texts.items():
        for language, lines in zip(languages, sides, strict=True):
            for number, line in enumerate(lines, start=1):
                if bpe.reserved.search(line):
                    raise InputError(
                        f"{split}.{language}, line {number}: holds {bpe.mark}, which the BPE uses itself; replace it"
                    )


def encode_text(
    text: Sequence[str | Path],
    out: str | Path,
    vocab_size: int,
    languages: Sequence[str],
    *,
    bpe: str = "sentencepiece",
    threads: int = 1,
) -> None:
    """Learn one BPE on both sides of train, and write it and the pieces to the folder ``out``.

    ``out/text`` gets the test set as it was encoded, with single spaces: what joining the pieces gives back. Where the
    text is a folder with an untokenised reference ``raw/test.*``, ``out/raw`` gets it.

    Args:
        text: see :func:`~fairseq_lot.corpus.parallel.read_splits`.
        out: folder to write.
        vocab_size: sentencepiece: pieces; subword_nmt: merges.
        languages: source and target.
        bpe: a key of ``BPES``.
        threads: of sentencepiece's encoding.

    Raises:
        InputError: bad text, a vocabulary that does not fit it, or an output that cannot be written.
    """
    if vocab_size < 1 or threads < 1:
        raise InputError(f"--vocab-size {vocab_size} --threads {threads}: both must be at least 1")
    check_output(text, out)
    kind = BPES[bpe]
    texts = read_splits(text, languages)
    _check_text(texts, languages, kind)
    reference = Path(text[0]) / "raw" / f"test.{languages[1]}"
    if reference.exists():
        found, wanted = len(read_lines(reference)), len(texts["test"][1])
        if found != wanted:
            raise InputError(f"{reference} has {found} lines but the test set has {wanted}; mend or remove raw/")
    train = [line for side in texts["train"] for line in side]
    with tqdm(train, desc=f"learning {vocab_size} pieces", unit=" lines", disable=None, leave=False) as lines:
        model = kind.learn(lines, vocab_size)
    total = sum(len(side) for sides in texts.values() for side in sides)
    with tqdm(total=total, desc="encoding", unit=" lines", disable=None) as progress:
        encoded = {
            split: [kind.encode(model, lines, threads, progress) for lines in sides] for split, sides in texts.items()
        }
    with output_folder(out) as folder:
        for split, sides in encoded.items():
            for language, lines in zip(languages, sides, strict=True):
                write_lines(folder / f"{split}.{language}", lines)
        for language, lines in zip(languages, texts["test"], strict=True):
            write_lines(folder / "text" / f"test.{language}", lines)
        if reference.exists():
            (folder / "raw").mkdir()
            shutil.copyfile(reference, folder / "raw" / reference.name)
        (folder / kind.file_name).write_bytes(model)


def add_arguments(parser) -> None:
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


def run(args) -> None:
    """Run ``fairseq-lot encode``."""
    languages = (args.source, args.target)
    encode_text(args.text, args.out, args.vocab_size, languages, bpe=args.bpe, threads=args.threads)
