"""How far every system is ahead of softmax that was trained for as long, at every stage.

python docs/notes/overview.py >results/iwslt14-65k.overview.md
python docs/notes/overview.py --short >results/iwslt14-65k.overview.short.md
"""

import argparse
import functools
import re
from pathlib import Path

from fairseq_lot.evaluation.bleu import LEVEL, SAMPLES, SEED
from fairseq_lot.evaluation.compare import compare, unpunished
from fairseq_lot.evaluation.results import (
    FINE_TUNED,
    FROM_SCRATCH,
    PLUG_AND_PLAY,
    at_stage,
    by_system,
    mechanism_order,
    read_rows,
    read_statistics,
)
from fairseq_lot.output.tables import MISSING, Table

RESULTS = Path(__file__).resolve().parents[2] / "results"
CONTROL = "softmax"
OF_32, OF_16 = {"A": "iwslt14-65k.near_far", "B": "iwslt14-65k"}, {"": "iwslt14-65k.fine-tuning"}
SCRATCH = {"": "iwslt14-65k.from-scratch.16-epochs"}
# title, stage, and by the letter of the base each file that has rows; of a system that is in two the first counts
COLUMNS = (
    ("Plugged in, base of 32 epochs", PLUG_AND_PLAY, OF_32),
    ("then fine-tuned, 2 epochs", FINE_TUNED, OF_32),
    ("Plugged in, base of 16 epochs", PLUG_AND_PLAY, OF_16),
    ("then fine-tuned, 10 epochs", FINE_TUNED, OF_16),
    ("From scratch, 16 epochs", FROM_SCRATCH, SCRATCH),
    ("from scratch, without the brevity penalty", FROM_SCRATCH, SCRATCH),
)
UNPUNISHED = COLUMNS[-1][0]
NOTES = (
    "Tokenised BLEU minus softmax's, after as many epochs. Means of two seeds, (1): of one.",
    f"Asterisk: p < {LEVEL} in a paired bootstrap test of the sentences.",
    "Sinkhorn: at the papers' ε = 0.1, with 15 updates. At ε = 1 it has 3. An update makes one side of the plan exact. "
    "A and B are two trainings of the base.",
    "BLEU punishes translations that are shorter than the references. The last column leaves this brevity penalty out.",
)
INTERVALS = "[low, high]: 95 % interval by the same bootstrap."


@functools.cache
def read(name):
    """The rows of a file and the counts of their sentences."""
    path = RESULTS / f"{name}.jsonl"
    rows = read_rows([path])
    return rows, read_statistics(path, rows)


def differences(name, stage, *, punished):
    """By system what ``fairseq-lot compare`` prints, the other way round; and by system its place among mechanisms."""
    rows, statistics = read(name)
    counts = {
        system: {seed: statistics[row.key] for seed, row in at_stage(own, stage).items()}
        for (_, system), own in by_system(rows).items()
    }
    if not punished:
        counts = {system: unpunished(by_seed) for system, by_seed in counts.items()}
    control = counts.pop(CONTROL)
    found = {}
    for system, by_seed in counts.items():
        if by_seed:
            pair = {system: by_seed, CONTROL: control}
            ((*_, cell, _, _),) = compare(pair, "", samples=SAMPLES, seed=SEED).rows
            found[system] = cell if len(by_seed) > 1 else f"{cell} (1)"
    return found, {row.system: mechanism_order(row)[:2] for row in rows}


def table(*, short=False):
    """A line for each system, a column for each stage; the short one has no intervals."""
    lines, order = {}, {}
    for title, stage, files in COLUMNS:
        for letter, name in files.items():
            found, orders = differences(name, stage, punished=title != UNPUNISHED)
            for system, cell in found.items():
                line = system.removesuffix(" from scratch")
                order[line] = *orders[system], line
                cell = re.sub(r" \[.*\]", "", cell) if short else cell
                lines.setdefault(line, {}).setdefault(title, f"{letter} {cell}".strip())
    titles = [title for title, *_ in COLUMNS]
    rows = [
        [system, *(lines[system].get(title, MISSING) for title in titles)] for system in sorted(lines, key=order.get)
    ]
    return Table(["System", *titles], rows, notes=NOTES if short else [*NOTES, INTERVALS]).markdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="without intervals")
    print(table(short=parser.parse_args().short))
