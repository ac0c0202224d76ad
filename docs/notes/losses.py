"""Validation losses of several trainings side by side, from the logs of fairseq-train, in nats per target token.

python docs/notes/losses.py 'softmax=BASE/train.log' 'LOT=checkpoints/from-scratch/.../train.log' >FILE.md
"""

import argparse
import math

from fairseq_lot.inspection.training_log import read_curves
from fairseq_lot.output.tables import MISSING, Table


def named(training):
    """``NAME=LOG`` as two."""
    name, log = training.split("=", 1)
    return name, log


def table(trainings):
    """A line for each training (name, log) and a column for each update that the first one was validated at."""
    curves = {name: read_curves(log).valid for name, log in trainings}
    updates = next(iter(curves.values()))
    rows = [
        [name, *(f"{valid[at] * math.log(2):.4f}" if at in valid else MISSING for at in updates)]
        for name, valid in curves.items()
    ]
    return Table(["Attention", *(f"{at} updates" for at in updates)], rows, align="<" + ">" * len(updates)).markdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainings", nargs="+", type=named, metavar="NAME=LOG")
    print(table(parser.parse_args().trainings))
