"""How far fine-tuned systems are ahead of fine-tuned softmax, by the length of the documents that are translated.

python docs/figures/documents.py results/iwslt14-65k.documents-tuned.jsonl --out docs/figures/documents.svg
"""

import argparse
from pathlib import Path

import numpy as np
from gaps import CONTROL, difference, read_one_seed  # the file beside this one
from matplotlib.figure import Figure

from fairseq_lot.evaluation.results import read_statistics
from fairseq_lot.experiment.spec import FINE_TUNED
from fairseq_lot.output.figures import write_figure


def read_gaps(path):
    """By system and test set, how far BLEU is above the control's, and the bounds of its 95 % interval."""
    rows = [row for row in read_one_seed(path) if row.stage == FINE_TUNED]
    statistics = read_statistics(path, rows)
    counts = {(row.system, row.dataset): statistics[row.key] for row in rows}
    found = {}
    for (system, dataset), ours in counts.items():
        if system != CONTROL:
            by_test = found.setdefault(system, {})
            by_test[dataset.rpartition(", ")[2]] = difference(ours, counts[CONTROL, dataset])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="rows of one experiment with several test sets, counts beside them")
    parser.add_argument("--out", required=True, type=Path, metavar="FIGURE.svg")
    args = parser.parse_args()
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for shift, (system, by_test) in enumerate(read_gaps(args.results).items()):
        gaps, low, high = np.array(list(by_test.values())).T
        at = np.arange(len(gaps)) + 0.06 * shift
        axes.errorbar(at, gaps, (gaps - low, high - gaps), fmt="o-", capsize=2, label=system)
    axes.set_xticks(range(len(by_test)), [name.replace(" at a time", "\nat a time") for name in by_test])
    axes.axhline(0, color="black", linewidth=0.8, linestyle=":", label=f"{CONTROL}, fine-tuned for as long")
    axes.set_ylabel("BLEU above softmax's")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", frameon=False)
    write_figure(figure, args.out)


if __name__ == "__main__":
    main()
