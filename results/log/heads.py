"""Heads of the encoder after training: a line for each file of ``fairseq-lot diagnose --json``, named after the file.

python results/log/heads.py results/iwslt14-65k.small.heads/*.json >results/iwslt14-65k.small.heads/heads.md
"""

import argparse
import json
import re
from pathlib import Path
from statistics import fmean

from fairseq_lot.inspection.diagnose import BALANCE
from fairseq_lot.output.tables import Table

MEASURES = ("entropy", "effective_rank", *BALANCE)


def by_number(path):
    """What files are sorted by: numbers in a name count as numbers, so 4 epochs stand before 16."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.stem)]


def table(paths):
    """Means over the heads of the encoder, and the sharpest head."""
    lines = []
    for path in sorted(map(Path, paths), key=by_number):
        report = json.loads(path.read_text(encoding="utf-8"))
        heads = [row for row in report["rows"] if row["site"] == "encoder"]
        sharpest = min(heads, key=lambda row: row["entropy"])
        entropy, rank, *balance = (fmean(row[name] for row in heads) for name in MEASURES)
        cells = entropy, sharpest["entropy"], rank, sharpest["effective_rank"], *balance
        lines.append([path.stem, *(f"{cell:.2f}" for cell in cells)])
    head = [
        "Model",
        "Entropy",
        "of the sharpest",
        "Eff. rank",
        "of the sharpest",
        "Δ(A)",
        "Marginal error",
        "Mean shift",
    ]
    means = f"Means over the encoder's heads, {report['sentences']} sentences of {report['split']}; entropy in nats."
    return Table(head, lines, notes=[means], align="<" + ">" * 7).markdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", metavar="FILE.json")
    print(table(parser.parse_args().paths))
