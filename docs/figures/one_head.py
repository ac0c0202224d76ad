"""The README's figure: one head of a trained encoder with softmax, Sinkhorn, calibrated LOT, calibrated near_far.

After ``bash scripts/quickstart.sh``:

    python docs/figures/one_head.py checkpoints/quickstart/seed1/transformer/base/checkpoint_best.pt data-bin/help
"""

import argparse
from pathlib import Path

from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

import fairseq_lot
from fairseq_lot.inspection.capture import capture
from fairseq_lot.output.figures import write_figure
from fairseq_lot.plug_and_play.swap import swap_as_drawn

COLOURS = "Blues"


def weights_of(checkpoint, args):
    """The pieces of the sentence, with the head's attention matrix A as an array."""
    model = fairseq_lot.Translator(checkpoint, args.data)
    with capture(model.loaded.model) as seen:
        model.translate([args.sentence])
    attention = next(one for one in seen if (one.site, one.layer) == ("encoder", args.layer))
    pieces = [piece.replace("\u2581", "") for piece in model.text.encode([args.sentence])[0]]
    return [*pieces, "</s>"], attention.weights[0, args.head].numpy()


def draw(panels, pieces):
    """The figure: for each panel the matrix A as a map, below bars of the sums of its columns."""
    figure = Figure(figsize=(13, 4.1), layout="constrained")
    axes = figure.subplots(2, len(panels), sharex="col", sharey="row", height_ratios=(1, 4))
    scale = PowerNorm(0.5, vmin=0, vmax=max(weights.max() for weights in panels.values()))
    for column, (name, weights) in enumerate(panels.items()):
        bars, plane = axes[:, column]
        bars.bar(range(len(pieces)), weights.sum(0), color="0.6")
        bars.axhline(1, color="black", linewidth=0.8, linestyle=":")
        bars.set_title(name, fontsize=10)
        bars.spines[["top", "right"]].set_visible(False)
        plane.imshow(weights, norm=scale, cmap=COLOURS, aspect="auto", interpolation="nearest")
        plane.set_xticks(range(len(pieces)), pieces, rotation=90, fontsize=8)
        plane.set_yticks(range(len(pieces)), pieces, fontsize=8)
        plane.set_xlabel("key")
        plane.tick_params(length=0)
    axes[0, 0].set_ylabel("received")
    axes[1, 0].set_ylabel("query")
    figure.colorbar(ScalarMappable(scale, COLOURS), ax=axes[1], label="A")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("data")
    parser.add_argument("--sentence", default="Klicken Sie auf die Schaltfläche, um das Fenster zu schließen.")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--head", type=int, default=0)
    parser.add_argument("--out", default=Path(__file__).with_suffix(".svg"), type=Path)
    args = parser.parse_args()
    sinkhorn = swap_as_drawn(args.base, attention="sinkhorn", sinkhorn_epsilon=1.0, sinkhorn_num_updates=15)
    lot = swap_as_drawn(args.base, attention="lot", lot_num_pivots=32)
    checkpoints = {
        "softmax": args.base,
        "Sinkhorn, ε = 1, 15 updates": sinkhorn,
        "LOT, 32 pivots, calibrated": fairseq_lot.calibrate(lot).state,
        "near_far, calibrated": fairseq_lot.calibrate(swap_as_drawn(args.base)).state,
    }
    panels = {}
    for name, checkpoint in checkpoints.items():
        pieces, panels[name] = weights_of(checkpoint, args)
    write_figure(draw(panels, pieces), args.out)


if __name__ == "__main__":
    main()
