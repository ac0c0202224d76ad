"""Joint sentencepiece BPE: learned on both languages of a tokenised folder and applied to it."""

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece
from tqdm import tqdm

from fairseq_lot.corpus.parallel import (
    SPLITS,
    add_language_arguments,
    check_folders,
    output_folder,
    read_parallel,
    write_lines,
)
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
    encoded = []
    for start in range(0, len(lines), CHUNK):
        chunk = list(lines[start : start + CHUNK])
        encoded.extend(" ".join(pieces) for pieces in processor.encode(chunk, out_type=str, num_threads=threads))
        if progress is not None:
            progress.update(len(chunk))
    return encoded


def _read_folder(folder: Path, languages: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Return the lines of each (split, language), checked."""
    texts = {}
    for split in SPLITS:
        for language, lines in zip(languages, read_parallel(folder, split, languages), strict=True):
            for number, line in enumerate(lines, start=1):
                if SPACE in line:
                    raise InputError(
                        f"{folder / f'{split}.{language}'}, line {number}: holds the character U+2581, which "
                        "sentencepiece keeps for spaces; replace it by an underscore"
                    )
            texts[split, language] = lines
    reference = folder / "raw" / f"test.{languages[1]}"
    if reference.exists():
        found, wanted = len(read_lines(reference)), len(texts["test", languages[1]])
        if found != wanted:
            raise InputError(f"{reference} has {found} lines but the test set has {wanted}; mend or remove raw/")
    return texts


def encode_folder(
    text: str | Path, out: str | Path, vocab_size: int, languages: Sequence[str] = ("de", "en"), threads: int = 1
) -> None:
    """Learn one BPE model on both train files of ``text`` and write model and pieces to ``out``.

    ``out/text`` gets the test set as it was encoded, with single spaces: what decoding gives back.

    Raises:
        InputError: bad text, a vocabulary that does not fit it, or an output that cannot be written.
    """
    if vocab_size < 1 or threads < 1:
        raise InputError(f"--vocab-size {vocab_size} --threads {threads}: both must be at least 1")
    text = Path(text)
    check_folders(text, out)
    texts = _read_folder(text, languages)
    train = [line for language in languages for line in texts["train", language]]
    with tqdm(train, desc=f"learning {vocab_size} pieces", unit=" lines", disable=None, leave=False) as lines:
        model = learn_bpe(lines, vocab_size)
    with tqdm(total=sum(map(len, texts.values())), desc="encoding", unit=" lines", disable=None) as progress:
        encoded = {key: encode_lines(model, lines, threads, progress) for key, lines in texts.items()}
    with output_folder(out) as folder:
        for (split, language), lines in encoded.items():
            write_lines(folder / f"{split}.{language}", lines)
        for language in languages:
            write_lines(folder / "text" / f"test.{language}", texts["test", language])
        (folder / MODEL_NAME).write_bytes(model)


def add_arguments(parser) -> None:
    """Add the options of ``fairseq-lot encode``."""
    parser.add_argument(
        "--text", required=True, metavar="DIR", help="tokenised folder: {train,valid,test} per language"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help=f"folder for {MODEL_NAME} and the encoded files")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="number of pieces, e.g. 10000")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="encoding threads (default: %(default)s)")
    add_language_arguments(parser)


def run(args) -> None:
    """Run ``fairseq-lot encode``."""
    encode_folder(args.text, args.out, args.vocab_size, (args.source, args.target), args.threads)
