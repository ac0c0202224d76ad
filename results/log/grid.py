"""near_far's loss minus softmax's, by window W and number of features r: a table for each T and calibration.

python results/log/grid.py results/NAME/sweep.jsonl >results/NAME/grid.md
"""

import argparse
from pathlib import Path

from fairseq_lot.attention.registry import build_options
from fairseq_lot.output.tables import MISSING, Table
from fairseq_lot.plug_and_play.points import DRAWN, PIECES, TEXT, read_points

FITTED = {DRAWN: "as drawn", PIECES: "fitted without data", TEXT: "fitted on text"}


def tables(path):
    """The tables of a sweep of one base: one for each number of updates and kind of calibration."""
    points = read_points(path)
    softmax = points[0].loss  # the base is measured first
    found = {}
    for point in points:
        if point.attention == "near_far" and "attention_sites" not in point.options:
            flat = {name.removeprefix("near_far_"): value for name, value in point.options.items()}
            options = build_options("near_far", **flat)
            cells = found.setdefault((options.num_updates, point.calibrated_on), {})
            cells[options.num_features, options.window] = point.loss - softmax
    windows = sorted({window for cells in found.values() for _, window in cells})
    for (updates, fitted), cells in sorted(found.items()):
        rows = [
            [r, *(f"{cells[r, window]:+.4f}" if (r, window) in cells else MISSING for window in windows)]
            for r in sorted({r for r, _ in cells})
        ]
        head = ["r", *(f"W = {window}" for window in windows)]
        yield Table(head, rows, heading=f"T = {updates}, {FITTED[fitted]}", align=">" * len(head))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, metavar="SWEEP.jsonl")
    print("\n\n".join(table.markdown() for table in tables(parser.parse_args().sweep)))
