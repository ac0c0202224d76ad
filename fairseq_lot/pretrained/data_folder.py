"""A data folder of fairseq-preprocess: whether it is complete and readable, and fits a checkpoint."""

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset
from fairseq.data.indexed_dataset import _code_to_dtype, infer_dataset_impl
from fairseq.tasks.translation import TranslationTask

from fairseq_lot.errors import InputError
from fairseq_lot.pretrained.checkpoint import State

_WAY_OUT = "make it with fairseq-preprocess, see scripts/prepare_*.sh"


def check_data(
    data: str | Path, *, split: str, source: str, target: str, needs_target: bool = True
) -> dict[str, np.ndarray]:
    """Check that a split is complete and readable, or its source side where it has no other and needs none.

    Returns:
        By language, source first, lengths in pieces, the end of sentence included.

    Raises:
        InputError: a file is missing or damaged, or the sides differ in length.
    """
    if not re.fullmatch(r"\w+", split):
        raise InputError(f"--split must name a split such as train, valid or test, not {split!r}")
    data = Path(data)
    names = [f"{split}.{source}-{target}", f"{split}.{target}-{source}"]  # fairseq also translates the other way round
    name = next((name for name in names if (data / f"{name}.{source}.idx").exists()), names[0])
    sizes: dict[str, np.ndarray] = {}
    for lang in (source, target):
        dictionary, prefix = read_dictionary(data, lang), data / f"{name}.{lang}"
        files = [Path(f"{prefix}.{kind}") for kind in ("bin", "idx")]
        if lang == target and not needs_target and not files[0].exists():
            continue
        for file in files:
            if not file.is_file():
                raise InputError(f"{data} is not a complete data folder: {file.name} is missing; {_WAY_OUT}")
        try:
            sizes[lang] = _sizes(prefix, dictionary)
        except Exception as error:  # whatever reading garbage raises
            raise InputError(f"{prefix}.bin or .idx is damaged ({error}); make {data} again") from error
    n, m = len(sizes[source]), len(sizes.get(target, sizes[source]))
    if n != m:
        raise InputError(f"{data}: {split} has {n} {source} and {m} {target} sentences; make it again")
    if not n:
        raise InputError(f"{data}: {split} is empty")
    return sizes


def _sizes(prefix: Path, dictionary: Dictionary) -> np.ndarray:
    """Lengths of all sentences; ValueError when a piece is not in the dictionary, or the two files disagree."""
    if infer_dataset_impl(str(prefix)) != "mmap":
        return np.asarray(load_indexed_dataset(str(prefix), dictionary).sizes)
    # read by hand: when fairseq's reader fails half-way, it prints a traceback at its end as well
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
    return sizes


def check_lengths(sizes: np.ndarray, limit: int | None, *, where: str, side: str = "source") -> None:
    """Refuse empty sources, and sentences longer than the model's positions on that side."""
    empty = np.flatnonzero(sizes <= 1)
    if side == "source" and len(empty):
        raise InputError(f"{where}: sentence {empty[0] + 1} is empty; remove it from both sides")
    if limit is not None and sizes.max() > limit:
        line = int(sizes.argmax())
        raise InputError(
            f"{where}: {side} {line + 1} has {sizes[line]} pieces with the end of sentence, the model takes {limit}; "
            f"shorten it, or train with a larger --max-{side}-positions"
        )


def read_dictionary(data: str | Path, lang: str) -> Dictionary:
    """The dictionary of a language; InputError if it is missing or damaged."""
    file = Path(data) / f"dict.{lang}.txt"
    if not file.is_file():  # say which there are: the language may be the wrong one
        there = ", ".join(sorted(other.name for other in Path(data).glob("dict.*.txt")))
        there = f" (there is {there})" if there else ""
        raise InputError(f"{data} is not a complete data folder: {file.name} is missing{there}; {_WAY_OUT}")
    try:
        return Dictionary.load(str(file))
    except Exception as error:
        raise InputError(f"{file} is not a fairseq dictionary: {error}") from error


def check_embeddings(task: TranslationTask, state: State, trained_on: Any) -> None:
    """Either embedding must have a row for each symbol, else fairseq fails deep inside; the symbols must be the same.

    Args:
        trained_on: the folder of the training, whose dictionaries are compared if it is still there.
    """
    sides = {"encoder": task.source_dictionary, "decoder": task.target_dictionary}
    for (stack, symbols), language in zip(sides.items(), (task.cfg.source_lang, task.cfg.target_lang), strict=True):
        embedding = state["model"].get(f"{stack}.embed_tokens.weight")
        if embedding is not None and len(embedding) != len(symbols):
            raise InputError(
                f"{state.path} was trained with {len(embedding)} symbols, but {task.cfg.data}/dict.{language}.txt has "
                f"{len(symbols)}; use the data folder that it was trained on"
            )
        elsewhere = isinstance(trained_on, str) and trained_on != task.cfg.data
        if elsewhere and Path(trained_on, f"dict.{language}.txt").is_file():
            before, now = (read_dictionary(data, language).symbols for data in (trained_on, task.cfg.data))
            if before != now:
                raise InputError(
                    f"{task.cfg.data}/dict.{language}.txt has other pieces than that of {trained_on}, on which "
                    f"{state.path} was trained; use that folder, or move it away if it was made again"
                )
