"""Checks of a data folder made by fairseq-preprocess: it is complete, readable and fits a checkpoint."""

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset
from fairseq.data.indexed_dataset import _code_to_dtype, infer_dataset_impl
from fairseq.tasks.translation import TranslationTask

from fairseq_lot.errors import InputError
from fairseq_lot.models.dictionaries import check_dictionaries, has_fingerprints
from fairseq_lot.models.misfit import other_dictionary
from fairseq_lot.pretrained.checkpoint import Checkpoint

_WAY_OUT = "make it with fairseq-preprocess, see scripts/prepare_*.sh"


@dataclass(frozen=True)
class Side:
    """One language of a split.

    Attributes:
        sizes: length of each sentence in pieces, including the end of sentence.
        unknown: number of pieces that are not in the dictionary.
    """

    sizes: np.ndarray
    unknown: int


def check_data(data: str | Path, *, split: str, source: str, target: str, needs_target: bool = True) -> dict[str, Side]:
    """Check that a split is complete and readable.

    Args:
        data: the data folder.
        split: name of the split.
        source, target: the languages.
        needs_target: if false, the split may lack its target side.

    Returns:
        The sides by language, source first.

    Raises:
        InputError: a file is missing or damaged, or the sides differ in length.
    """
    if not re.fullmatch(r"\w+", split):
        raise InputError(f"--split must name a split such as train, valid or test, not {split!r}")
    data = Path(data)
    names = [f"{split}.{source}-{target}", f"{split}.{target}-{source}"]  # fairseq uses a folder in both directions
    name = next((name for name in names if (data / f"{name}.{source}.idx").exists()), names[0])
    sides: dict[str, Side] = {}
    for lang in (source, target):
        dictionary, prefix = read_dictionary(data, lang), data / f"{name}.{lang}"
        files = [Path(f"{prefix}.{kind}") for kind in ("bin", "idx")]
        if lang == target and not needs_target and not files[0].exists():
            continue
        for file in files:
            if not file.is_file():
                raise InputError(f"{data} is not a complete data folder: {file.name} is missing; {_WAY_OUT}")
        try:
            sides[lang] = _read(prefix, dictionary)
        except Exception as error:  # damage leads to errors of any type
            raise InputError(f"{prefix}.bin or .idx is damaged ({error}); make {data} again") from error
    n, m = (len(sides.get(lang, sides[source]).sizes) for lang in (source, target))
    if n != m:
        raise InputError(f"{data}: {split} has {n} {source} and {m} {target} sentences; make it again")
    if not n:
        raise InputError(f"{data}: {split} is empty")
    return sides


def splits_of(data: str | Path, source: str, target: str) -> list[str]:
    """The names of the splits of a language pair: train, valid and test first, then others such as test1.

    Raises:
        InputError: there are none.
    """
    names = f"({source}-{target}|{target}-{source}).({source}|{target})"
    found = {file.name.partition(".")[0] for file in Path(data).iterdir() if re.search(rf"\.{names}\.idx$", file.name)}
    if not found:
        raise InputError(f"{data} has no sentences of {source} and {target}; {_WAY_OUT}")
    first = ("train", "valid", "test")
    return sorted(found, key=lambda split: (first.index(split) if split in first else len(first), split))


def _read(prefix: Path, dictionary: Dictionary) -> Side:
    """One side of a split; ValueError if a piece is not in the dictionary or the two files disagree."""
    if infer_dataset_impl(str(prefix)) != "mmap":
        dataset = load_indexed_dataset(str(prefix), dictionary)
        unknown = sum(int(dataset[i].eq(dictionary.unk()).sum()) for i in range(len(dataset)))
        return Side(np.asarray(dataset.sizes), unknown)
    # not by fairseq's reader: after an error it prints another traceback when it is deleted
    header = Path(f"{prefix}.idx").read_bytes()
    _, version, code, number = struct.unpack_from("<9sQBQ", header)
    sizes = np.frombuffer(header, np.int32, number, struct.calcsize("<9sQBQ"))
    if version != 1 or len(header) != struct.calcsize("<9sQBQ") + 12 * number or sizes.min(initial=1) < 1:
        raise ValueError("the index is not as fairseq-preprocess writes it")
    pieces = np.fromfile(f"{prefix}.bin", np.dtype(_code_to_dtype[code]))
    if Path(f"{prefix}.bin").stat().st_size != pieces.nbytes or len(pieces) != sizes.sum(dtype=np.int64):
        raise ValueError(f"the index counts {sizes.sum(dtype=np.int64)} pieces, the other file has {len(pieces)}")
    if number and not (pieces.min() >= 0 and pieces.max() < len(dictionary)):
        raise ValueError(f"piece {pieces.max()}, but the dictionary has {len(dictionary)} symbols")
    return Side(sizes, int(np.count_nonzero(pieces == dictionary.unk())))


def check_not_empty(sources: np.ndarray, *, where: str) -> None:
    """Raise InputError if a source is empty.

    Args:
        sources: their lengths, including the end of sentence.
        where: the data, for the message.
    """
    empty = np.flatnonzero(sources <= 1)
    if len(empty):
        raise InputError(f"{where}: sentence {numbers(empty)} is empty; remove it from both sides")


def check_lengths(
    sizes: Sequence[np.ndarray],
    limits: Sequence[int | None],
    *,
    where: str,
    takes: str = "the model takes",
    way_out: str = "train with a larger {flags}",
) -> None:
    """Raise InputError if sentences are longer than a limit; the message has their numbers and ways out.

    Args:
        sizes: for the source, and the target if it is limited: the length of each sentence in pieces, including the
            end of sentence.
        limits: the largest length for each side; None: no limit.
        where: the data, for the message.
        takes: words before the limit in the message.
        way_out: how to raise the limit; ``{flags}`` stands for the flags of the sides with such sentences.
    """
    found, flags, several = [], [], False
    for side, lengths, limit in zip(("source", "target"), sizes, limits, strict=False):
        longer = np.flatnonzero(too_long([lengths], [limit]))
        if len(longer):
            has = f"have up to {lengths.max()}" if len(longer) > 1 else f"has {lengths.max()}"
            found.append(
                f"{side} {numbers(longer)} of {len(lengths)} {has} pieces with the end of sentence, {takes} {limit}"
            )
            flags.append(f"--max-{side}-positions")
            several |= len(longer) > 1
    if found:
        it = "them" if several or len(found) > 1 else "it"
        way_out = way_out.format(flags=" and ".join(flags))
        raise InputError(f"{where}: {'; '.join(found)}; shorten {it}, or remove {it} from both sides, or {way_out}")


def too_long(sizes: Iterable[np.ndarray], limits: Iterable[int | None]) -> np.ndarray:
    """For each sentence, whether it is too long on at least one side, ``(sentences,)`` bool.

    Args:
        sizes: for each side the length of each sentence.
        limits: the largest length for each side; None: no limit.
    """
    longer = [lengths > (np.inf if limit is None else limit) for lengths, limit in zip(sizes, limits, strict=False)]
    return np.any(longer, axis=0)


def numbers(indices: Sequence[int] | np.ndarray, most: int = 10) -> str:
    """Sentence numbers as text, counted from 1: "29, 30".

    Args:
        indices: of the sentences, counted from 0.
        most: how many numbers are listed; "and N more" stands for the rest.
    """
    shown, more = ", ".join(str(int(i) + 1) for i in indices[:most]), len(indices) - most
    return f"{shown} and {more} more" if more > 0 else shown


def read_dictionary(data: str | Path, lang: str) -> Dictionary:
    """The dictionary of a language; InputError if it is missing or damaged."""
    file = Path(data) / f"dict.{lang}.txt"
    if not file.is_file():  # list the others: the language may be wrong
        there = ", ".join(sorted(other.name for other in Path(data).glob("dict.*.txt")))
        there = f" (there is {there})" if there else ""
        raise InputError(f"{data} is not a complete data folder: {file.name} is missing{there}; {_WAY_OUT}")
    try:
        return Dictionary.load(str(file))
    except Exception as error:
        raise InputError(f"{file} is not a fairseq dictionary: {error}") from error


def check_embeddings(task: TranslationTask, state: Checkpoint) -> None:
    """Raise InputError if the dictionaries are known to differ from the training's.

    Each embedding must have a row for each symbol. The symbols are compared with the fingerprints in the checkpoint,
    else with the dictionaries of the training's data folder if it still exists.
    """
    sides = {"encoder": task.source_dictionary, "decoder": task.target_dictionary}
    languages = (task.cfg.source_lang, task.cfg.target_lang)
    for (stack, symbols), language in zip(sides.items(), languages, strict=True):
        embedding = state["model"].get(f"{stack}.embed_tokens.weight")
        if embedding is not None and len(embedding) != len(symbols):
            dictionary = f"{task.cfg.data}/dict.{language}.txt"
            raise InputError(other_dictionary(state.path, len(embedding), dictionary, len(symbols)))
    check_dictionaries(state.model_args, task, state.path)
    if has_fingerprints(state.model_args) or (trained_on := _folder_of_training(state, task)) is None:
        return
    for language in languages:
        before, now = (read_dictionary(data, language).symbols for data in (trained_on, task.cfg.data))
        if before != now:
            raise InputError(
                f"{task.cfg.data}/dict.{language}.txt has other pieces than the one in {trained_on}, on which "
                f"{state.path} was trained; use that folder, or move it away if it was made again"
            )


def are_compared(state: Checkpoint, task: TranslationTask) -> bool:
    """Whether :func:`check_embeddings` could compare the symbols with those of the training."""
    return has_fingerprints(state.model_args) or _folder_of_training(state, task) is not None


def is_of_training(state: Checkpoint, task: TranslationTask) -> bool:
    """Whether the data folder is the one in the checkpoint; it may have been made again since the training."""
    trained_on = state.task_options().get("data")
    return isinstance(trained_on, str) and Path(trained_on).resolve() == Path(task.cfg.data).resolve()


def _folder_of_training(state: Checkpoint, task: TranslationTask) -> str | None:
    """The data folder of the training, if it is another one and still has both dictionaries; else None."""
    trained_on = state.task_options().get("data")
    names = [f"dict.{language}.txt" for language in (task.cfg.source_lang, task.cfg.target_lang)]
    if is_of_training(state, task) or not isinstance(trained_on, str):
        return None
    return trained_on if all(Path(trained_on, name).is_file() for name in names) else None
