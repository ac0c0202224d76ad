"""Heads of the encoder after training: a line for each file of ``fairseq-lot diagnose --json``, named after the file.

python docs/notes/heads.py results/iwslt14-65k.small.heads/*.json >results/iwslt14-65k.small.heads/heads.md
"""

import json
import sys
from pathlib import Path
from statistics import fmean

from fairseq_lot.output.tables import Table


def table(paths):
    """Means over the heads of the encoder, and the sharpest head."""
    lines = []
    for path in map(Path, paths):
        report = json.loads(path.read_text(encoding="utf-8"))
        heads = [row for row in report["rows"] if row["site"] == "encoder"]
        mean = {
            name: fmean(row[name] for row in heads) for name in ("entropy", "effective_rank", "imbalance", "mean_shift")
        }
        sharpest, error = min(heads, key=lambda row: row["entropy"]), fmean(row["marginal_error"] for row in heads)
        cells = mean["entropy"], sharpest["entropy"], mean["effective_rank"], sharpest["effective_rank"]
        lines.append([path.stem, *(f"{cell:.2f}" for cell in (*cells, mean["imbalance"], error, mean["mean_shift"]))])
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
    print(table(sys.argv[1:]))
