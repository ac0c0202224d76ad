"""Training and validation curves from a log of fairseq-train."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from fairseq_lot.errors import InputError
from fairseq_lot.output.files import read_lines

# a name and its number, as in "nll_loss=10.79,", "| nll_loss 10.79 |" and, in JSON, '"valid_nll_loss": "10.79",'
_FIGURE = re.compile(r"""\b(valid_)?(nll_loss|loss|num_updates)"?[ =:] ?"?(-?[\d.]+(?:e[-+]?\d+)?)(?=[,| "]|$)""")
# lines with training means since the previous entry, and lines with means over a validation set
_ENTRY = re.compile(r"epoch \d+: +\d+ / \d+ |\{.*\}$")
_VALID = re.compile(r"\| valid on '([^']*)' subset \|")


@dataclass
class Curves:
    """Losses in bits per target token, by number of updates.

    Attributes:
        train: means over the updates since the previous log entry.
        valid: means over the validation set; with several sets, over the first one.
    """

    train: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)


def read_curves(path: str | Path) -> Curves:
    """The curves in a log of fairseq-train with ``--log-format`` simple or json; with tqdm only the validation curve.

    Raises:
        InputError: the log is missing or has no loss.
    """
    curves, subset = Curves(), None
    for line in read_lines(path):
        of_valid = _VALID.search(line)
        if of_valid and of_valid[1] != (subset := subset or of_valid[1]):
            continue
        if not of_valid and not _ENTRY.search(line):
            continue
        figures = {name: (prefix, float(number)) for prefix, name, number in _FIGURE.findall(line)}
        # fairseq's cross_entropy, which has no label smoothing, logs only "loss"
        prefix, loss = figures.get("nll_loss", figures.get("loss", ("", math.nan)))
        if "num_updates" in figures and math.isfinite(loss):
            curve = curves.valid if of_valid or prefix else curves.train
            curve[int(figures["num_updates"][1])] = loss
    if not (curves.train or curves.valid):
        raise InputError(f"{path} has no training loss; give a log of fairseq-train")
    return curves
