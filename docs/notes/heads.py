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
        lines.append([
            path.stem, f"{mean['entropy']:.2f}", f"{sharpest['entropy']:.2f}", f"{mean['effective_rank']:.1f}",
            f"{sharpest['effective_rank']:.1f}", f"{mean['imbalance']:.2f}", f"{error:.2f}", f"{mean['mean_shift']:.3f}",
        ])  # fmt: skip
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
    notes = [f"Means over the encoder's heads, {report['sentences']} sentences of {report['split']}; entropy in nats."]
    return Table(head, lines, notes=notes, align="<" + ">" * 7).markdown()


if __name__ == "__main__":
    print(table(sys.argv[1:]))
