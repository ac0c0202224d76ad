"""The figure of the cost that ``fairseq-lot swap`` prints, against the loss that swaps add on text.

python docs/figures/cost.py results/iwslt14-65k.small.cost results/sym-math.cost

The folders are sweeps of a 65k base after 16 epochs, and of a model of formulas that was trained elsewhere:

    fairseq-lot sweep DATA --path BASE.pt --out FOLDER --no-bleu --sentences 600 --steps 100 --joint-steps 50 \\
        --held-out 32 --try ...

The rows of a folder name the values of --try.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from fairseq_lot.output.figures import write_figure
from fairseq_lot.plug_and_play.cost import DEFAULT_NATS
from fairseq_lot.plug_and_play.points import DRAWN, read_points

MARKERS = {DRAWN: "o", "pieces": "s", "text": "^"}
# least loss on the logarithmic part of the scale; smaller differences count as none
LEAST = 1e-3


def draw(folders):
    """The figure: a panel for each sweep, colours for mechanisms with options, marker shapes for calibration."""
    figure = Figure(figsize=(13, 7), layout="constrained")
    for axes, folder in zip(figure.subplots(1, len(folders), squeeze=False)[0], folders, strict=True):
        base, *points = read_points(folder / "sweep.jsonl")
        colours = {}
        for point in points:
            colour = colours.setdefault(point.words, f"C{len(colours) % 10}")
            face = "white" if list(colours).index(point.words) >= 10 else colour
            style = {"color": colour, "markerfacecolor": face}
            axes.plot(point.cost, point.loss - base.loss, MARKERS[point.calibrated_on], clip_on=False, **style)
        for number, way in enumerate(colours):
            face = "white" if number >= 10 else colours[way]
            axes.plot([], [], "o", color=colours[way], markerfacecolor=face, label=way)
        axes.axvline(DEFAULT_NATS, color="0.7", linewidth=0.8, linestyle=":")
        axes.axhline(0, color="0.7", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=LEAST)
        axes.set_ylim(-2 * LEAST, 1)
        axes.set_title(folder.name)
        axes.set_xlabel("cost: KL(base ‖ swap), nats a piece, without text")
        axes.set_ylabel("what the swap adds to the loss on text, nats a piece")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize="x-small", frameon=False, loc="upper left", bbox_to_anchor=(0, -0.12))
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="of sweeps; circles are as drawn, squares fitted")
    parser.add_argument("--out", default=Path(__file__).with_suffix(".svg"), type=Path)
    args = parser.parse_args()
    write_figure(draw(args.folders), args.out)


if __name__ == "__main__":
    main()
