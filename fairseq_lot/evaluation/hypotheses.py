"""The translations in the output of ``fairseq-generate``."""

import re
from pathlib import Path

from fairseq_lot.errors import InputError
from fairseq_lot.output.files import read_lines

_KINDS = ("H", "D", "P", "S", "T")
_LINE = re.compile(r"([A-Z])-([0-9]{1,9})\t(.*)")
_AGAIN = "run fairseq-generate again"


def read_hypotheses(path: str | Path) -> list[str]:
    """Return the 1-best tokenised hypotheses of a ``fairseq-generate`` output in corpus order.

    The output lists the sentences by length, not in the order of the corpus, between lines of its log.

    Args:
        path: what ``fairseq-generate --remove-bpe sentencepiece`` printed, or at least its H- lines.

    Returns:
        One string of space-separated tokens per sentence, for the ids 0 to n-1.

    Raises:
        InputError: the file is missing, empty or cut off, or an id is missing or doubled.
    """
    hypotheses: dict[int, str] = {}
    seen: dict[str, set[int]] = {}
    for number, line in enumerate(read_lines(path), start=1):
        if line[:1] not in _KINDS or line[1:2] != "-":
            continue
        match = _LINE.match(line)
        if match is None:
            raise InputError(f"{path}, line {number}: broken {line[:2]} line {line[:40]!r}; {_AGAIN}")
        kind, sentence = match[1], int(match[2])
        seen.setdefault(kind, set()).add(sentence)
        if kind == "H":
            if sentence in hypotheses:
                raise InputError(f"{path}: sentence {sentence} has several H- lines; generate it once, with --nbest 1")
            hypotheses[sentence] = _tokens(match[3], path, number, sentence)
    if not hypotheses:
        raise InputError(f"{path}: no H- line; it must be the output of fairseq-generate, without --quiet")
    _refuse_gaps(path, seen)
    _refuse_cut_line(path, max(hypotheses))
    return [hypotheses[sentence] for sentence in range(len(hypotheses))]


def read_matching(path: str | Path, references: list[str], reference_path: str | Path) -> list[str]:
    """Return what :func:`read_hypotheses` does, one translation for each reference.

    Raises:
        InputError: as there, or the numbers of sentences differ.
    """
    hypotheses = read_hypotheses(path)
    if len(hypotheses) != len(references):
        problem = "is cut off" if len(hypotheses) < len(references) else "belongs to another test set"
        raise InputError(
            f"{path} ends with sentence {len(hypotheses) - 1}, but {reference_path} has {len(references)} lines: "
            f"the output {problem}, or the reference is the wrong one"
        )
    return hypotheses


def _tokens(text, path, number, sentence):
    score, tab, tokens = text.partition("\t")
    if not tab:
        raise InputError(f"{path}, line {number}: sentence {sentence} has the score {score!r} but no text; {_AGAIN}")
    if "\u2581" in tokens:
        raise InputError(
            f"{path}, line {number}: sentence {sentence} still has sentencepiece pieces; "
            "generate with --remove-bpe sentencepiece"
        )
    return " ".join(tokens.split())


def _refuse_gaps(path, seen):
    """Every kind of line that occurs must occur for every sentence that any line mentions."""
    total = 1 + max(max(ids) for ids in seen.values())
    for kind in _KINDS:
        ids = seen.get(kind)
        if ids is not None and len(ids) < total:
            first = next(sentence for sentence in range(total) if sentence not in ids)
            raise InputError(
                f"{path}: sentence {first} has no {kind}- line ({total - len(ids)} of {total} lack it); "
                f"the file is incomplete, {_AGAIN}"
            )


def _refuse_cut_line(path, last):
    with open(path, "rb") as file:
        file.seek(-1, 2)
        if file.read() != b"\n":
            raise InputError(f"{path}: its last line, after sentence {last}, is cut off; {_AGAIN}")
