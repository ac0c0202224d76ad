"""How far systems are behind softmax that was trained for as long: in nats after each epoch, and if asked in BLEU.

python docs/figures/gaps.py results/iwslt14-65k.losses/fine-tuning.json --out docs/figures/fine_tuning.svg \\
    --results results/iwslt14-65k.fine-tuning.jsonl results/iwslt14-65k.fine-tuning.epochs.jsonl --seed 1
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fairseq_lot.evaluation.bleu import SAMPLES, SEED
from fairseq_lot.evaluation.compare import differences
from fairseq_lot.evaluation.results import read_rows, read_statistics
from fairseq_lot.experiment.spec import BASE, FINE_TUNED
from fairseq_lot.output.figures import write_figure

CONTROL = "softmax"


def read_one_seed(path, seed=None):
    """The rows of a file that are of one seed, None: of its only one; several would need several points."""
    rows = [row for row in read_rows([path]) if seed in (None, row.seed)]
    if len({row.seed for row in rows}) != 1:
        raise SystemExit(f"{path} has {'several seeds' if rows else f'no seed {seed}'}; give rows of one")
    return rows


def read_counts(paths, seed):
    """For each system the counts of its translations after so many epochs, 0: as plugged in; those of one seed."""
    found = {}
    for path in paths:
        rows = read_one_seed(path, seed)
        statistics = read_statistics(path, rows)
        for row in rows:
            epochs = row.training["finetune"]["max-epoch"] if row.stage == FINE_TUNED else 0
            found.setdefault(CONTROL if row.stage == BASE else row.system, {})[epochs] = statistics[row.key]
    return found


def draw_losses(axes, losses):
    """Validation losses above those of the control of the same seed, dashed for another than the first; colours."""
    colours = {}
    for name, valid in losses.items():
        system, comma, seed = name.partition(", seed ")
        if system != CONTROL:
            control = losses[CONTROL + comma + seed]
            gaps = [valid[at] - control[at] for at in control if at in valid]
            style = {"color": colours.get(system), "linestyle": "--" if seed else "-"}
            label = f"_{name}" if system in colours else name
            (line,) = axes.plot(range(1, len(gaps) + 1), gaps, marker="o", markersize=3, label=label, **style)
            colours.setdefault(system, line.get_color())
    if any(", seed " in name for name in losses):
        axes.plot([], [], "k--", label="seed 2")
    axes.set_ylabel("validation loss above softmax's\n(nats per target token)")
    return colours


def difference(ours, theirs):
    """BLEU of some counts minus that of others, and the bounds of its 95 % interval by the paired bootstrap."""
    (found,) = differences({"ours": {1: ours}, "theirs": {1: theirs}}, samples=SAMPLES, seed=SEED)
    return found.mean, found.low, found.high


def draw_scores(axes, counts, colours):
    """BLEU below the control's, with 95 % intervals of the paired bootstrap."""
    control = counts.pop(CONTROL)
    for shift, (name, by_epochs) in enumerate(counts.items()):
        epochs = sorted(by_epochs)
        gaps, low, high = np.array([difference(control[at], by_epochs[at]) for at in epochs]).T
        at = [epoch + 0.12 * (shift - 1) for epoch in epochs]
        axes.errorbar(at, gaps, (gaps - low, high - gaps), fmt="o-", capsize=2, color=colours.get(name))
    axes.set_ylabel("BLEU below softmax's")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("losses", type=Path, help="by update, of notes/losses.py")
    parser.add_argument("--out", required=True, type=Path, metavar="FIGURE.svg")
    parser.add_argument("--results", nargs="+", default=[], help="rows of fine-tuned systems, with their counts beside")
    parser.add_argument("--seed", type=int, help="of these rows, where they have several")
    args = parser.parse_args()
    panels = 2 if args.results else 1
    figure = Figure(figsize=(6.5 * panels, 4.5), layout="constrained")
    left, *right = figure.subplots(1, panels, squeeze=False)[0]
    colours = draw_losses(left, json.loads(args.losses.read_text(encoding="utf-8")))
    for axes in right:
        draw_scores(axes, read_counts(args.results, args.seed), colours)
    for axes in (left, *right):
        axes.axhline(0, color="black", linewidth=0.8, linestyle=":", label=f"{CONTROL}, trained for as long")
        axes.set_xlabel("epochs of fine-tuning" if args.results else "epochs")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    labels = left.get_legend_handles_labels()
    figure.legend(*labels, loc="outside upper center", ncols=2, fontsize="small", frameon=False)
    write_figure(figure, args.out)


if __name__ == "__main__":
    main()
