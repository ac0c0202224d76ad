"""BLEU of every system at every stage, minus the BLEU of softmax after as many epochs.

python results/log/overview.py >results/iwslt14-65k.overview.md
python results/log/overview.py --short >results/iwslt14-65k.short.md
python results/log/overview.py --figure docs/figures/overview.svg
"""

import argparse
import functools
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fairseq_lot.evaluation.bleu import LEVEL, SAMPLES, SEED
from fairseq_lot.evaluation.compare import differences
from fairseq_lot.evaluation.results import at_stage, by_system, mechanism_order, read_rows, read_statistics
from fairseq_lot.experiment.spec import FINE_TUNED, FROM_SCRATCH, PLUG_AND_PLAY
from fairseq_lot.output.figures import write_figure
from fairseq_lot.output.tables import MISSING, Table

RESULTS = Path(__file__).resolve().parents[2] / "results"
CONTROL = "softmax"
OF_32, OF_16 = {"A": "iwslt14-65k.near_far", "B": "iwslt14-65k"}, {"": "iwslt14-65k.fine-tuning"}
SCRATCH = {"": "iwslt14-65k.from-scratch.16-epochs"}
# title, stage, files of rows by the base's letter; if a system is in two files, the first one counts
COLUMNS = (
    ("Plugged in, base of 32 epochs", PLUG_AND_PLAY, OF_32),
    ("then fine-tuned, 2 epochs", FINE_TUNED, OF_32),
    ("Fine-tuned for 10 epochs, base of 16", FINE_TUNED, OF_16),
    ("From scratch, 16 epochs", FROM_SCRATCH, SCRATCH),
)
NOTES = (
    "Tokenised BLEU minus softmax's after as many epochs: the mean of two seeds, in parentheses each; or one seed.",
    f"[low, high]: 95 % interval by a bootstrap of the test sentences; asterisk: p < {LEVEL} in a paired test by it.",
    "Sinkhorn has ε = 0.1 and 15 updates, ESPFormer's setting for translation; at ε = 1 it has 3. A and B are two "
    "trainings of the base.",
)
# panels of the figure: heading, labels of its columns
PANELS = (
    ("Plugged into a trained model", {COLUMNS[0][0]: "as swapped, base of 32 epochs", COLUMNS[1][0]: COLUMNS[1][0]}),
    ("Trained from scratch, 16 epochs", {COLUMNS[3][0]: COLUMNS[3][0]}),
)
# rows of the short table: attention, its time in n, the system
SHORT = (
    ("near_far, calibrated without data", "linear", "near_far"),
    ("LOT, calibrated without data", "linear", "LOT calibrated without data"),
    ("LOT, as drawn", "linear", "LOT"),
    ("Sinkhorn, ε = 0.1, 15 updates (ESPFormer's for translation)", "n²", "Sinkhorn"),
    ("Sinkhorn, ε = 1, 3 updates", "n²", "Sinkhorn ε=1"),
    ("Sinkhorn, ε = 1, 15 updates", "n²", "Sinkhorn ε=1 with 15 updates"),
    ("softmax with ALiBi, a preference for near tokens", "n²", "softmax with ALiBi"),
    ("ESP", "n³", "ESP"),
)
SHORT_COLUMNS = {COLUMNS[0][0]: "plugged in", COLUMNS[1][0]: "then fine-tuned", COLUMNS[3][0]: "from scratch"}
STYLES = ({"color": "C0"}, {"color": "C1", "markerfacecolor": "white"})


@functools.cache
def read(name):
    """The rows of a file, with the counts of their sentences."""
    path = RESULTS / f"{name}.jsonl"
    rows = read_rows([path])
    return rows, read_statistics(path, rows)


def ahead(name, stage):
    """Each system's difference to the control; each system's place in the order of mechanisms."""
    rows, statistics = read(name)
    counts = {
        system: {seed: statistics[row.key] for seed, row in at_stage(own, stage).items()}
        for (_, system), own in by_system(rows).items()
    }
    control = counts.pop(CONTROL)
    found = {}
    for system, by_seed in counts.items():
        if by_seed:
            (found[system],) = differences({system: by_seed, CONTROL: control}, samples=SAMPLES, seed=SEED)
    return found, {row.system: mechanism_order(row)[:2] for row in rows}


@functools.cache
def overview():
    """The base's letter with the difference, by system and column; systems have the order of mechanisms."""
    lines, order = {}, {}
    for title, stage, files in COLUMNS:
        for letter, name in files.items():
            found, orders = ahead(name, stage)
            for system, difference in found.items():
                line = system.removesuffix(" from scratch")
                order[line] = *orders[system], line
                lines.setdefault(line, {}).setdefault(title, (letter, difference))
    return {system: lines[system] for system in sorted(lines, key=order.get)}


def cell(letter, difference):
    each = [f"{ahead:+.2f}" for ahead in difference.by_seed.values()]
    return f"{letter} {difference} ({', '.join(each) if len(each) > 1 else '1 seed'})".strip()


def table():
    """The table: a row for each system, a column for each stage."""
    titles = [title for title, *_ in COLUMNS]
    rows = [
        [system, *(cell(*found[title]) if title in found else MISSING for title in titles)]
        for system, found in overview().items()
    ]
    return Table(["System", *titles], rows, notes=NOTES).markdown()


def softmax_bleu(title):
    """Mean BLEU of the control over seeds, for a column, in the column's first file."""
    stage, files = next((stage, files) for found, stage, files in COLUMNS if found == title)
    rows, _ = read(next(iter(files.values())))
    by_seed = [at_stage(own, stage) for (_, system), own in by_system(rows).items() if system == CONTROL]
    return np.mean([row.tokenised.score for found in by_seed for row in found.values()])


def short_table():
    """The table of README.md, without intervals: BLEU of softmax, then a row for each system of SHORT."""
    softmax = [f"{softmax_bleu(title):.2f} BLEU" for title in SHORT_COLUMNS]
    rows = [["softmax", "n²", *softmax]] + [
        [
            attention,
            time,
            *(
                f"{found[title][1].mean:+.2f}{found[title][1].star}" if title in found else MISSING
                for title in SHORT_COLUMNS
            ),
        ]
        for attention, time, system in SHORT
        for found in [overview()[system]]
    ]
    return Table(["attention", "time in n", *SHORT_COLUMNS.values()], rows).markdown()


def draw():
    """The figure: a panel for each of PANELS, a line for each system, the best on top, numbers on the right."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    for axes, (heading, labels) in zip(figure.subplots(2, 1), PANELS, strict=True):
        first = next(iter(labels))
        lines = [(name, cells) for name, cells in overview().items() if first in cells]
        lines.sort(key=lambda line: line[1][first][1].mean)
        for column, ((title, label), style) in enumerate(zip(labels.items(), STYLES, strict=False)):
            at = [(place, cells[title][1]) for place, (_, cells) in enumerate(lines) if title in cells]
            means, low, high = np.array([(found.mean, found.low, found.high) for _, found in at]).T
            marks = {"fmt": "o", "markersize": 4, "capsize": 2, "label": label, **style}
            places = [place + 0.15 - 0.3 * column for place, _ in at]
            axes.errorbar(means, places, xerr=(means - low, high - means), **marks)
            beside = {"transform": axes.get_yaxis_transform(), "va": "center", "color": style["color"]}
            for place, found in at:
                axes.text(1.02 + 0.11 * column, place, f"{found.mean:+.2f}{found.star}", **beside)
        seeds = [len(cells[first][1].by_seed) for _, cells in lines]
        names = [name if number > 1 else f"{name} (one seed)" for (name, _), number in zip(lines, seeds, strict=True)]
        axes.set_yticks(range(len(lines)), names)
        axes.axvline(0, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(heading)
        axes.set_xlabel("BLEU minus softmax's")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", type=Path, metavar="FILE.svg", help="draw instead of printing the table")
    parser.add_argument("--short", action="store_true", help="print the table of README.md")
    args = parser.parse_args()
    if args.figure:
        write_figure(draw(), args.figure)
    else:
        print(short_table() if args.short else table())
