"""Training and validation curves from what fairseq-train logs."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq_lot.errors import InputError
from fairseq_lot.output.files import read_lines

# of a name and its number, as in "nll_loss=10.79," and in "| nll_loss 10.79 |"
_FIGURE = re.compile(r"(\w+)[ =](-?[\d.]+(?:e[-+]?\d+)?)(?=[,| ]|$)")
_INNER = re.compile(r"epoch \d+: +\d+ / \d+ (.*)")
_VALID = re.compile(r"\| valid on '[^']*' subset (\|.*)")


@dataclass
class Curves:
    """Loss in bits per target token against the number of updates, which are the keys.

    Attributes:
        train: means since the entry before.
        valid: means over the validation set.
    """

    train: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)


def read_curves(path: str | Path) -> Curves:
    """Read the curves of one training.

    Args:
        path: a log of fairseq-train in ``--log-format`` simple or json (of tqdm the validation alone).

    Raises:
        InputError: it is missing or holds no curve.
    """
    curves = Curves()
    for line in read_lines(path):
        brace = line.find("{")
        if brace >= 0 and line.endswith("}"):
            try:
                entry = json.loads(line[brace:])
            except ValueError:
                continue
            _put(curves.train, entry)
            _put(curves.valid, entry, "valid_")
        elif found := _INNER.search(line):
            _put(curves.train, dict(_FIGURE.findall(found[1])))
        elif found := _VALID.search(line):
            _put(curves.valid, dict(_FIGURE.findall(found[1])))
    if not (curves.train or curves.valid):
        raise InputError(f"{path} holds no loss of a training; give a log of fairseq-train")
    return curves


def _put(curve: dict[int, float], entry: dict[str, Any], prefix: str = "") -> None:
    """Keep the loss of an entry; fairseq's cross_entropy has no smoothing to take out, and logs ``loss`` alone."""
    loss: Any = entry.get(f"{prefix}nll_loss", entry.get(f"{prefix}loss"))
    try:
        updates, loss = int(entry[f"{prefix}num_updates"]), float(loss)
    except (KeyError, TypeError, ValueError):
        return
    if math.isfinite(loss):
        curve[updates] = loss
