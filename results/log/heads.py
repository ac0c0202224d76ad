"""The encoder's heads after training: a table with a row for each file of ``fairseq-lot diagnose --json``.

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
    """Sorting key of files: numbers in a name are compared as numbers, so 4 epochs come before 16."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.stem)]


def table(paths):
    """For each file the means over the encoder's heads, and the figures of the head with the least entropy."""
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
