"""Read translations from the output of fairseq-generate."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_lot.errors import InputError
from fairseq_lot.output.files import read_bytes, split_lines

_SKIPPED = re.compile(r"(\d+) samples have invalid sizes and will be skipped")
_HYPOTHESIS = re.compile(r"H-([0-9]{1,9})\t([^\t]*)\t(.*)")
_SCORES_OF_PIECES = re.compile(r"P-([0-9]{1,9})\t(.*)")
_WHOLE = (
    "a row is of the whole test set: shorten or remove them on both sides, or translate with larger "
    "--max-source-positions and --max-target-positions, without --skip-invalid-size-inputs-valid-test"
)


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One of several translations of a sentence.

    Attributes:
        text: its words.
        score: its log probability, to base 2, divided by ``pieces ** lenpen``, as fairseq prints it.
        pieces: its length in pieces, including the end of sentence.
    """

    text: str
    score: float
    pieces: int


def read_hypotheses(path: str | Path, sentences: int) -> tuple[list[str], set[str]]:
    """Read an output of ``fairseq-generate``, which lists the sentences by length, between log lines.

    Args:
        path: the output.
        sentences: number of sentences in the corpus.

    Returns:
        The best tokenised hypothesis of each sentence, in corpus order; the lines of sources and references.

    Raises:
        InputError: the file is missing or cut off, or its sentences are not those of the corpus, each once.
    """
    hypotheses: dict[int, str] = {}
    given = set()  # sources and references
    for place, line in _lines(path):
        if match := _HYPOTHESIS.fullmatch(line):
            sentence = int(match[1])
            if sentence in hypotheses:
                raise InputError(f"{place}: sentence {sentence} has several H- lines; generate it once, with --nbest 1")
            hypotheses[sentence] = _words(match[3], place)
        elif re.match(r"[ST]-\d", line):
            given.add(line)
    _check_whole(hypotheses, sentences, path)
    return [hypotheses[sentence] for sentence in range(sentences)], given


def read_nbest(path: str | Path, sentences: int, *, part: bool = False) -> dict[int, list[Hypothesis]]:
    """Read an output of ``fairseq-generate --nbest``.

    Args:
        path: the output.
        sentences: number of sentences in the corpus.
        part: the output may lack sentences of the corpus.

    Returns:
        The hypotheses of each sentence, the best first, by the sentence's number, in corpus order.

    Raises:
        InputError: the file is missing or cut off, or its sentences are not those of the corpus.
    """
    found: dict[int, list[Hypothesis]] = {}
    last: tuple[str, float] | None = None  # from an H- line whose P- line comes next
    for place, line in _lines(path):
        if match := _HYPOTHESIS.fullmatch(line):
            last = _words(match[3], place), float(match[2])
        elif (match := _SCORES_OF_PIECES.fullmatch(line)) and last is not None:
            own = Hypothesis(text=last[0], score=last[1], pieces=len(match[2].split()))
            found.setdefault(int(match[1]), []).append(own)
            last = None
    if not (part and found and max(found) < sentences):
        _check_whole(found, sentences, path)
    return {sentence: found[sentence] for sentence in sorted(found)}


def _lines(path: str | Path) -> Iterator[tuple[str, str]]:
    """The complete lines of an output: for each its place, for messages, and its text.

    Raises:
        InputError: fairseq-generate skipped sentences.
    """
    raw = read_bytes(path)
    for number, line in enumerate(split_lines(raw[: raw.rfind(b"\n") + 1], path), start=1):
        place = f"{path}, line {number}"
        if skipped := _SKIPPED.search(line):
            raise InputError(f"{place}: fairseq-generate left out {skipped[1]} sentences that are too long; {_WHOLE}")
        yield place, line


def _words(text: str, place: str) -> str:
    """The text of a hypothesis; InputError if it has pieces instead of words."""
    if _piece(text):
        raise InputError(f"{place}: still has pieces; generate with --remove-bpe sentencepiece or subword_nmt")
    return " ".join(text.split())


def _check_whole(hypotheses: dict, sentences: int, path: str | Path) -> None:
    """Raise InputError unless the keys of ``hypotheses`` are the numbers 0 to ``sentences`` - 1."""
    if not hypotheses or hypotheses.keys() != set(range(sentences)):
        found = f"{len(hypotheses)} whole H- lines, the last of sentence {max(hypotheses, default=0)}"
        missing = [sentence for sentence in range(sentences) if sentence not in hypotheses]
        lacking = ", ".join(f"H-{sentence}" for sentence in missing[:10]) + ", ..." * (len(missing) > 10)
        missed = lacking and f" (missing: {lacking})"
        raise InputError(
            f"{path} has {found}, but the reference has {sentences} lines{missed}: it is cut off, or of another test "
            "set, or sentences that are too long were left out; run fairseq-generate again, without --quiet; "
            f"{_WHOLE}"
        )


def check_joined(lines: Sequence[str], name: str | Path) -> None:
    """Raise InputError if references or translations, called ``name`` in the message, have pieces instead of words."""
    for number, line in enumerate(lines, start=1):
        if piece := _piece(line):
            raise InputError(
                f"{name}, line {number}: has pieces, such as {piece!r}, where words are compared; join them"
            )


def _piece(line: str) -> str | None:
    """The first word of a line that is a piece of sentencepiece or subword-nmt; None if there is none."""
    marked = (word for word in line.split() if "\u2581" in word or (word.endswith("@@") and word != "@@"))
    return next(marked, None)
