"""How far fine-tuned systems are behind fine-tuned softmax after each epoch, in nats of validation loss.

python docs/figures/fine_tuning.py results/iwslt14-65k.losses/fine-tuning.json
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fairseq_lot.output.figures import write_figure

CONTROL = "softmax"


def draw(losses):
    """A line for each system; the control is the line at 0."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    control = losses[CONTROL]
    axes.axhline(0, color="black", linewidth=0.8, linestyle=":", label=f"{CONTROL}, fine-tuned for as long")
    for name, valid in losses.items():
        if name != CONTROL:
            gaps = [valid[at] - control[at] for at in control if at in valid]
            axes.plot(range(1, len(gaps) + 1), gaps, "o-", label=name)
    axes.set_xlabel("epochs of fine-tuning")
    axes.set_ylabel("validation loss above softmax's\n(nats per target token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", frameon=False)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="losses by update, of notes/losses.py")
    parser.add_argument("--out", default=Path(__file__).with_suffix(".svg"), type=Path)
    args = parser.parse_args()
    write_figure(draw(json.loads(args.path.read_text(encoding="utf-8"))), args.out)
