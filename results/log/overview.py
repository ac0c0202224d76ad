"""BLEU of every system at every stage, minus the BLEU of softmax after as many epochs: the small models' tables.

``--flagship`` prints the table of the model of 6+6 layers; README's table, ``--short``, has two columns of it.

python results/log/overview.py >results/iwslt14-65k.overview.md
python results/log/overview.py --short >results/iwslt14-65k.short.md
python results/log/overview.py --flagship >results/iwslt14-65k-medium.short.md
python results/log/overview.py --figure docs/figures/overview.svg
"""

import argparse
import functools
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fairseq_lot.evaluation.bleu import LEVEL, SAMPLES, SEED
from fairseq_lot.evaluation.compare import differences
from fairseq_lot.evaluation.results import at_stage, by_system, is_at, mechanism_order, read_rows, read_statistics
from fairseq_lot.experiment.spec import BASE, FINE_TUNED, FROM_SCRATCH, PLUG_AND_PLAY
from fairseq_lot.output.figures import write_figure
from fairseq_lot.output.tables import MISSING, Table

RESULTS = Path(__file__).resolve().parents[2] / "results"
CONTROL = "softmax"
FLAGSHIP = "iwslt14-65k-medium"
OF_32, OF_16 = {"A": "iwslt14-65k.near_far", "B": "iwslt14-65k"}, {"": "iwslt14-65k.fine-tuning"}
SCRATCH = {"": "iwslt14-65k.from-scratch.16-epochs"}
# title, stage, files of rows by the base's letter; if a system is in two files, the first one counts
COLUMNS = (
    ("Plugged in, base of 32 epochs", PLUG_AND_PLAY, OF_32),
    ("then fine-tuned, 2 epochs", FINE_TUNED, OF_32),
    ("Fine-tuned for 10 epochs, base of 16", FINE_TUNED, OF_16),
    ("From scratch, 16 epochs", FROM_SCRATCH, SCRATCH),
)
SINKHORN_NOTE = "Sinkhorn has ε = 0.1 and 15 updates, ESPFormer's setting for translation; at ε = 1 it has 3."
NOTES = (
    "Tokenised BLEU minus softmax's after as many epochs: the mean of two seeds, in parentheses each; or one seed.",
    f"[low, high]: 95 % interval by a bootstrap of the test sentences; asterisk: p < {LEVEL} in a paired test by it.",
    f"{SINKHORN_NOTE} A and B are two trainings of the base.",
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
LARGE_COLUMNS = {PLUG_AND_PLAY: "6+6 layers: plugged in", FINE_TUNED: "then fine-tuned"}
SHORT_COLUMNS = {
    COLUMNS[0][0]: "3+3 layers: plugged in",
    COLUMNS[1][0]: "then fine-tuned",
    COLUMNS[3][0]: "3+3 layers: from scratch",
}
FLAGSHIP_STAGES = {PLUG_AND_PLAY: "plugged in", FINE_TUNED: "then fine-tuned, 2 epochs"}
FLAGSHIP_NOTES = (
    "Tokenised BLEU, and minus softmax's at this stage; sacreBLEU and chrF of detokenised text. Beam 5.",
    NOTES[1],
    "Cost: what `swap` said before any translation, in nats a piece on random sentences (results/log/costs.py).",
    SINKHORN_NOTE,
    "Length: of the translations, divided by that of the references.",
    "lenpen: the length penalty, chosen for each system on a seventh of validation.",
)
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


def softmax_bleu(name, stage):
    """Mean BLEU of the control over the seeds of a file, at a stage."""
    rows, _ = read(name)
    by_seed = [at_stage(own, stage) for (_, system), own in by_system(rows).items() if system == CONTROL]
    return np.mean([row.tokenised.score for found in by_seed for row in found.values()])


def short_table():
    """The table of README.md, without intervals: BLEU of softmax, then a row for each system of SHORT."""
    large = [ahead(FLAGSHIP, stage)[0] for stage in LARGE_COLUMNS]
    softmax = [softmax_bleu(FLAGSHIP, stage) for stage in LARGE_COLUMNS]
    softmax += [
        softmax_bleu(next(iter(files.values())), stage) for title, stage, files in COLUMNS if title in SHORT_COLUMNS
    ]
    rows = [["softmax", "n²", *(f"{bleu:.2f} BLEU" for bleu in softmax)]]
    for attention, time, system in SHORT:
        small = overview()[system]
        found = [one.get(system) for one in large]
        found += [small[title][1] if title in small else None for title in SHORT_COLUMNS]
        rows.append([attention, time, *(f"{one.mean:+.2f}{one.star}" if one else MISSING for one in found)])
    return Table(["attention", "time in n", *LARGE_COLUMNS.values(), *SHORT_COLUMNS.values()], rows).markdown()


def flagship_table():
    """The table of the model of 6+6 layers: for each stage softmax, then the systems in the order of mechanisms."""
    rows, _ = read(FLAGSHIP)
    costs = json.loads((RESULTS / f"{FLAGSHIP}.costs.json").read_text(encoding="utf-8"))
    lines = []
    for stage, title in FLAGSHIP_STAGES.items():
        found, order = ahead(FLAGSHIP, stage)
        there = (row for row in rows if is_at(row, stage))
        lines += [
            [
                "base" if row.stage == BASE else title,
                row.system,
                f"{row.tokenised.score:.2f}",
                str(found.get(row.system, MISSING)),
                f"{costs[row.system]:.4f}" if row.stage == PLUG_AND_PLAY else MISSING,
                f"{row.sacrebleu.score:.2f}",
                f"{row.chrf:.1f}",
                f"{row.length:.3f}",
                f"{row.lenpen:g}",
            ]
            for row in sorted(there, key=lambda row: (*order[row.system], row.system))
        ]
    head = ["Stage", "System", "BLEU", "minus softmax's", "cost", "sacreBLEU", "chrF", "Length", "lenpen"]
    return Table(head, lines, notes=FLAGSHIP_NOTES, align="<<>>>>>>>").markdown()


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
    parser.add_argument("--flagship", action="store_true", help="print the table of the model of 6+6 layers")
    args = parser.parse_args()
    if args.figure:
        write_figure(draw(), args.figure)
    else:
        print(flagship_table() if args.flagship else short_table() if args.short else table())
