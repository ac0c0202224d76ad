"""Validation losses of several trainings side by side, from the logs of fairseq-train, in nats per target token.

python docs/notes/losses.py 'softmax=BASE/train.log' 'LOT=checkpoints/from-scratch/.../train.log' >FILE.md
"""

import math
import sys

from fairseq_lot.inspection.training_log import read_curves
from fairseq_lot.output.tables import MISSING, Table


def table(trainings):
    """A line for each training, given as NAME=LOG, and a column for each update that the first one was validated at."""
    named = (training.split("=", 1) for training in trainings)
    curves = {name: read_curves(log).valid for name, log in named}
    updates = next(iter(curves.values()))
    rows = [
        [name, *(f"{valid[at] * math.log(2):.4f}" if at in valid else MISSING for at in updates)]
        for name, valid in curves.items()
    ]
    return Table(["Attention", *(f"{at} updates" for at in updates)], rows, align="<" + ">" * len(updates)).markdown()


if __name__ == "__main__":
    print(table(sys.argv[1:]))
