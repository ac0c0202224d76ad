"""What ``fairseq-lot sweep`` shows: a table, and a figure of loss and BLEU against the number of pivots."""

import re
from pathlib import Path

from matplotlib.figure import Figure

from fairseq_lot.attention.registry import DEFAULT
from fairseq_lot.evaluation.bootstrap import LEVEL
from fairseq_lot.output.figures import as_bytes
from fairseq_lot.output.files import atomic_write
from fairseq_lot.output.tables import markdown_row


def render(rows: list[dict]) -> str:
    """The points as a Markdown table, in the order in which mechanisms were given, calibrated after as they stand."""
    base = next((row for row in rows if row["attention"] == DEFAULT and not row["options"]), None)
    attentions = list(dict.fromkeys(row["attention"] for row in rows))
    order = {(row["attention"], row["options"]): i for i, row in reversed(list(enumerate(rows)))}
    lines = [
        "| Mechanism | Options | Calibrated | Validation loss | Δ | BLEU | Δ |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(
        rows,
        key=lambda row: (
            attentions.index(row["attention"]),
            order[row["attention"], row["options"]],
            row["calibrated"],
        ),
    ):
        calibrated = f"{row['calibration_seconds']:.0f} s" if row["calibrated"] else "–"
        change = "–" if row is base or base is None else f"{row['loss'] - base['loss']:+.4f}"
        loss = f"{row['loss']:.4f}"
        lines.append(
            markdown_row([row["attention"], row["options"] or "–", calibrated, loss, change, *_bleu(row["bleu"])])
        )
    return "\n".join([*lines, "", *notes(rows)])


def _bleu(bleu):
    if bleu is None:
        return "–", "–"
    score = f"{bleu['score']:.2f} [{bleu['low']:.2f}, {bleu['high']:.2f}]"
    if bleu["delta"] is None:
        return score, "–"
    return score, f"{bleu['delta']:+.2f}{'*' if bleu['p'] < LEVEL else ''} (p = {bleu['p']:.4f})"


def notes(rows: list[dict]) -> list[str]:
    """How to read the table."""

    def all_of(name):
        return ", ".join(dict.fromkeys(str(row[name]) for row in rows))

    signatures = dict.fromkeys(row["bleu"]["signature"] for row in rows if row["bleu"])
    return [
        f"- Validation loss: nats per target token, teacher-forced, {all_of('tokens')} tokens. Δ: against the base.",
        "- BLEU: tokenised, with 95 % bootstrap interval; "
        f"p: paired bootstrap test against the base, * where p < {LEVEL}.",
        *(f"- Signature: `{signature}`" for signature in signatures),
        f"- Device: CPU, threads: {all_of('threads')}. Commit: {all_of('commit')}. Calibration seed: {all_of('seed')}.",
    ]


def draw(rows: list[dict], path: Path) -> None:
    """Loss and BLEU against the number of pivots, where there are pivots; other mechanisms as lines across."""
    measures = {"validation loss (nats per token)": lambda row: row["loss"]}
    if any(row["bleu"] for row in rows):
        measures["BLEU (tokenised, test set)"] = lambda row: row["bleu"] and row["bleu"]["score"]
    figure = Figure(figsize=(5.5 * len(measures) + 2, 4.5), layout="constrained")
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for axes, (title, value) in zip(panels, measures.items(), strict=True):
        for i, (label, of_curve) in enumerate(_curves(rows).items()):
            points = [(pivots, value(row)) for pivots, row in of_curve if value(row) is not None]
            style = {"color": f"C{i % 10}", "label": label}
            if points and points[0][0] is None:
                axes.axhline(points[0][1], linestyle="-" if label == DEFAULT else ":", **style)
            elif points:
                dash = "-" if of_curve[0][1]["calibrated"] else "--"
                axes.plot(*zip(*sorted(points), strict=True), marker="o", linestyle=dash, **style)
                axes.set_xscale("log", base=2)
        axes.set_ylabel(title)
        axes.set_xlabel("number of pivots r")
    # every row has a loss, so the first panel has every curve
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False)
    with atomic_write(path, "wb") as file:
        file.write(as_bytes(figure, "svg"))


def _curves(rows):
    """Rows that differ in the number of pivots alone: label → (number or None, row)."""
    curves: dict[str, list] = {}
    for row in rows:
        pivots = re.search(r"-num-pivots[ =](\d+)", row["options"])
        rest = re.sub(r"--\S+-num-pivots[ =]\d+", "", row["options"]).split()
        label = " ".join([row["attention"], *rest, *(["(calibrated)"] if row["calibrated"] else [])])
        curves.setdefault(label, []).append((int(pivots[1]) if pivots else None, row))
    return curves
