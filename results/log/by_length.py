"""BLEU and chrF by length of the documents.

python results/log/by_length.py results/libreoffice.jsonl >results/libreoffice.short.md
"""

import sys

from fairseq_lot.evaluation.results import read_rows
from fairseq_lot.output.tables import Table


def main():
    """Print a row for each system, with a column for each test set."""
    rows = read_rows(sys.argv[1:])
    sets = list(dict.fromkeys(row.dataset for row in rows))
    titles = [name.split(", ")[-1] for name in sets]
    lines = []
    for system in dict.fromkeys(row.system for row in rows):
        cells = []
        for dataset in sets:
            (row,) = [row for row in rows if (row.system, row.dataset) == (system, dataset)]
            mark = "*" if row.tokenised.p is not None and row.tokenised.p < 0.05 else ""
            cells.append(f"{row.tokenised.score:.2f}{mark} / {row.chrf:.1f}")
        lines.append([system, *cells])
    notes = [
        "Tokenised BLEU / chrF, beam 5, the length penalty chosen on validation.",
        "Asterisk: p < 0.05 against the base in a paired bootstrap test.",
    ]
    print(Table(["System", *titles], lines, notes=notes, align="<" + ">" * len(titles)).markdown())


if __name__ == "__main__":
    main()
