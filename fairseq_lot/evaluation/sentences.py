"""Counts of every sentence that BLEU is made of, kept beside the rows of a results file for later comparisons."""

import base64
import json
import lzma
from pathlib import Path

import numpy as np

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.bleu import corpus_score
from fairseq_lot.evaluation.results import Label, Row
from fairseq_lot.output.files import read_lines

_ORDERS = np.arange(4)


def path_of(results: str | Path) -> Path:
    """The file of the counts: beside ``NAME.jsonl`` it is ``NAME.sentences.tsv``."""
    return Path(results).with_suffix(".sentences.tsv")


def format_statistics(row: Label, statistics: np.ndarray) -> str:
    """The key of a row and its counts, from ``sentence_statistics`` of Moses tokens, as one line without its end."""
    return f"{json.dumps(row.key, ensure_ascii=False)}\t{encode(statistics)}"


def read_statistics(results: str | Path, rows: list[Row]) -> dict[tuple, np.ndarray]:
    """The counts of those rows that have them, by their keys.

    Raises:
        InputError: a line is broken, or its counts do not give the score of the row.
    """
    path = path_of(results)
    kept, found = {}, {}
    for number, line in enumerate(read_lines(path) if path.exists() else [], start=1):
        key, _, coded = line.partition("\t")
        try:
            kept[tuple(json.loads(key))] = decode(coded)
        except (ValueError, TypeError, lzma.LZMAError) as error:
            raise InputError(f"{path}, line {number}: {error}; fix or remove the line") from error
    for row in rows:
        if row.key in kept:
            found[row.key] = statistics = kept[row.key]
            if len(statistics) != row.sentences or round(corpus_score(statistics), 2) != row.tokenised.score:
                raise InputError(
                    f"{path} has the counts of other translations than {results} for {row.key}; score again"
                )
    return found


def encode(statistics: np.ndarray) -> str:
    """The counts as text: numbers of possible n-grams follow from the length and are left out."""
    length, reference, counts = statistics[:, 0], statistics[:, 1], statistics[:, 2:6]
    columns = np.column_stack([reference, length, counts]).T
    return base64.b64encode(lzma.compress(columns.astype("<u2").tobytes())).decode("ascii")


def decode(text: str) -> np.ndarray:
    """The counts that :func:`encode` has written."""
    columns = np.frombuffer(lzma.decompress(base64.b64decode(text)), dtype="<u2").reshape(6, -1).astype(float)
    reference, length, counts = columns[0], columns[1], columns[2:]
    possible = np.maximum(length - _ORDERS[:, None], 0)
    return np.vstack([length, reference, counts, possible]).T
