"""Validation losses of several trainings side by side, in nats per target token; FILE.json has the data.

python results/log/losses.py results/iwslt14-65k.losses/FILE.json [--add NAME LOG]... >FILE.md
"""

import argparse
import json
import math
from pathlib import Path

from fairseq_lot.inspection.training_log import read_curves
from fairseq_lot.output.files import atomic_write
from fairseq_lot.output.tables import MISSING, Table


def of_log(log):
    """The validation losses of a training's log, by number of updates, rounded as in tables."""
    return {str(at): round(bits * math.log(2), 4) for at, bits in sorted(read_curves(log).valid.items())}


def table(trainings):
    """A row for each training, a column for each epoch of the first one, which was validated after every epoch."""
    updates = list(next(iter(trainings.values())))
    rows = [
        [name, *(f"{valid[at]:.4f}" if at in valid else MISSING for at in updates)] for name, valid in trainings.items()
    ]
    epochs = (f"{int(at) / int(updates[0]):g}" for at in updates)
    notes = [f"Nats per target token. An epoch has {updates[0]} updates."]
    return Table(["After epoch", *epochs], rows, notes=notes, align="<" + ">" * len(updates)).markdown()


def keep_and_print(description, kind, measure, show):
    """Add ``measure(path)`` of each file of ``--add`` to FILE.json, then print ``show`` of its whole content."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("path", type=Path, metavar="FILE.json")
    parser.add_argument("--add", nargs=2, action="append", default=[], metavar=("NAME", kind))
    args = parser.parse_args()
    kept = json.loads(args.path.read_text(encoding="utf-8")) if args.path.exists() else {}
    if not (kept or args.add):
        parser.error(f"there is no {args.path}; give --add NAME {kind}")
    if args.add:
        kept |= {name: measure(path) for name, path in args.add}
        with atomic_write(args.path) as file:
            file.write(json.dumps(kept, ensure_ascii=False, indent=1) + "\n")
    print(show(kept))


if __name__ == "__main__":
    keep_and_print(__doc__, "LOG", of_log, table)
