"""Length and repetitions of translations, from outputs of fairseq-generate; FILE.json has the data.

python results/log/repeats.py FILE.json [--add NAME OUTPUT.out]... >FILE.md
"""

import numpy as np
from losses import keep_and_print  # the file beside this one

from fairseq_lot.output.files import read_lines
from fairseq_lot.output.tables import Table

N = 4


def repeated(texts):
    """The share of n-grams, over all texts, that already occurred earlier in the same text."""
    grams = [[tuple(text[i : i + N]) for i in range(len(text) - N + 1)] for text in texts]
    possible = sum(map(len, grams))
    return (possible - sum(len(set(own)) for own in grams)) / max(1, possible)


def measured(path):
    """The figures of one output, rounded as in the table."""
    lines = {kind: {} for kind in "HT"}  # H: translations, T: references
    for line in read_lines(path):
        kind, _, rest = line.partition("-")
        if kind in lines:
            number, *_, text = rest.split("\t")
            lines[kind].setdefault(number, text.split())  # the first one is the best of several translations
    ratios = [len(lines["H"][number]) / max(1, len(reference)) for number, reference in lines["T"].items()]
    shares = [*np.quantile(ratios, (0.1, 0.5, 0.9)), *(repeated(texts.values()) for texts in lines.values())]
    return [round(float(share), 3) for share in shares]


def table(outputs):
    """The table: a row for each output."""
    head = ["Translations", "Length: 1st decile", "median", "9th decile", f"{N}-grams repeated", "in the references"]
    rows = [[name, *(f"{share:.3f}" for share in shares)] for name, shares in outputs.items()]
    notes = [f"Length: divided by that of the reference. Repeated: {N}-grams that stand earlier in the same text."]
    return Table(head, rows, notes=notes, align="<" + ">" * 5).markdown()


if __name__ == "__main__":
    keep_and_print(__doc__, "OUTPUT.out", measured, table)
