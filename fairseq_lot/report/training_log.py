"""Training and validation curves from what fairseq-train logs."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from fairseq_lot.errors import InputError
from fairseq_lot.output.files import read_lines

# of a name and its number, as in "nll_loss=10.79," and in "| nll_loss 10.79 |"
_FIGURE = re.compile(r"(\w+)[ =](-?[\d.]+(?:e[-+]?\d+)?)(?=[,| ]|$)")
_INNER = re.compile(r"epoch \d+: +\d+ / \d+ (.*)")
_VALID = re.compile(r"\| valid on '[^']*' subset (\|.*)")
_EVENTS = "events.out.tfevents"


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
        path: a log of fairseq-train in ``--log-format`` simple or json (of tqdm the validation alone), or a folder
            written by ``--tensorboard-logdir``.

    Raises:
        InputError: it is missing, holds no curve, or the reader of tensorboard is not installed.
    """
    path = Path(path)
    if path.is_dir() or path.name.startswith(_EVENTS):
        curves = _read_events(path)
    else:
        curves = Curves()
        for line in read_lines(path):
            _take_line(curves, line)
    if not (curves.train or curves.valid):
        raise InputError(f"{path} holds no loss of a training; give a log of fairseq-train")
    return curves


def _take_line(curves, line):
    """Keep the loss of a line that has one."""
    brace = line.find("{")
    if brace >= 0 and line.endswith("}"):
        try:
            figures = json.loads(line[brace:])
        except ValueError:
            return
        for prefix, curve in (("", curves.train), ("valid_", curves.valid)):
            _put(curve, figures, prefix)
        return
    for pattern, curve in ((_INNER, curves.train), (_VALID, curves.valid)):
        if found := pattern.search(line):
            _put(curve, dict(_FIGURE.findall(found[1])))


def _put(curve, figures, prefix=""):
    """Keep the loss of an entry; fairseq's cross_entropy has no smoothing to take out, and logs ``loss`` alone."""
    loss = figures.get(f"{prefix}nll_loss", figures.get(f"{prefix}loss"))
    try:
        updates, loss = int(figures.get(f"{prefix}num_updates")), float(loss)
    except (TypeError, ValueError):
        return
    if math.isfinite(loss):
        curve[updates] = loss


def _read_events(path):
    """Read tensorboard files; fairseq writes one folder for each of train_inner, train and valid."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise InputError(f"{path}: tensorboard is not installed; pip install tensorboard, or give train.log") from None
    curves = Curves()
    for file in sorted(path.rglob(f"{_EVENTS}*")) if path.is_dir() else [path]:
        events = EventAccumulator(str(file))
        events.Reload()
        curve = {"train_inner": curves.train, "valid": curves.valid}.get(file.parent.name)
        loss = next((name for name in ("nll_loss", "loss") if name in events.Tags()["scalars"]), None)
        if curve is not None and loss is not None:
            for event in events.Scalars(loss):
                _put(curve, {"num_updates": event.step, "loss": event.value})
    return curves
