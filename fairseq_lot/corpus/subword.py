"""BPE of subword-nmt, as in fairseq's own recipes: learned and applied; the package is needed for nothing else."""

import contextlib
import io
import sys
from collections.abc import Iterable, Sequence

from tqdm import tqdm

from fairseq_lot.errors import InputError

CODES_NAME = "code"  # as fairseq's prepare-iwslt14.sh calls it


def _import():
    """The two halves of the package; InputError when it is not installed."""
    try:
        from subword_nmt import apply_bpe, learn_bpe
    except ImportError:
        raise InputError(
            "BPE by subword_nmt needs the package subword-nmt, which is not installed; run 'pip install subword-nmt'"
        ) from None
    return learn_bpe, apply_bpe


def learn_bpe(lines: Iterable[str], merges: int) -> bytes:
    """Learn the codes of a BPE; the same lines give the same bytes.

    Args:
        lines: sentences of all languages.
        merges: how often two pieces become one, not counting single characters.

    Raises:
        InputError: the text does not have so many pairs that occur twice, or subword-nmt is not installed.
    """
    learner, _ = _import()
    codes = io.StringIO()
    # on a terminal its progress bar is welcome; otherwise stderr is for errors
    quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    with quiet, contextlib.suppress(ValueError):
        learner.learn_bpe(lines, codes, merges)  # ValueError: no word has two characters
    learned = max(0, codes.getvalue().count("\n") - 1)  # the first line is the version
    if learned < merges:
        raise InputError(f"--vocab-size {merges} is too large for this text; give at most {learned}")
    return codes.getvalue().encode()


def encode_lines(codes: bytes, lines: Sequence[str], threads: int = 1, progress: tqdm | None = None) -> list[str]:
    """Return each line as its pieces, separated by single spaces, with ``@@`` where a word goes on."""
    _, applier = _import()
    bpe = applier.BPE(io.StringIO(codes.decode()))
    encoded = []
    for line in lines:
        encoded.append(bpe.segment(line))
        if progress is not None:
            progress.update()
    return encoded
