"""What balance costs: BLEU of every swap of a sweep against how evenly its heads treat the keys.

python docs/figures/balance.py results/iwslt14-65k.small.epoch32.near_far.seed1
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from fairseq_lot.output.figures import write_figure
from fairseq_lot.plug_and_play.points import DRAWN, read_points

MARKERS = {DRAWN: ("o", "as drawn"), "pieces": ("s", "fitted without data"), "text": ("^", "fitted on text")}


def draw(points):
    """A mark for each way to swap: colours are mechanisms with their options, forms how they were fitted."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    colours = {}
    for point in points:
        if point is points[0]:  # the base is measured first
            axes.axhline(point.bleu.score, color="black", linewidth=0.8, linestyle=":", label="softmax's BLEU")
        colour = colours.setdefault(point.words, f"C{len(colours)}")
        marker, _ = MARKERS[point.calibrated_on]
        axes.plot(point.balance["imbalance"], point.bleu.score, marker, color=colour)
    for way, colour in colours.items():
        axes.plot([], [], "-", color=colour, label=way)
    for marker, label in MARKERS.values():
        axes.plot([], [], marker, color="0.5", label=label)
    axes.set_xlabel("Δ(A), mean over the heads of the encoder: 0 is balanced")
    axes.set_ylabel("BLEU (tokenised, test set)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", fontsize="small", frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a sweep; points without BLEU are left out")
    parser.add_argument("--out", default=Path(__file__).with_suffix(".svg"), type=Path)
    args = parser.parse_args()
    points = [point for point in read_points(args.folder / "sweep.jsonl") if point.bleu and point.balance]
    if not points:
        parser.error(f"{args.folder} has no point with BLEU and balance; give the folder of a sweep")
    write_figure(draw(points), args.out)


if __name__ == "__main__":
    main()
