"""What ``fairseq-lot sweep`` shows: a table, and a figure of loss and BLEU against the number of pivots."""

import re
from pathlib import Path

from matplotlib.figure import Figure

from fairseq_lot.attention.registry import DEFAULT
from fairseq_lot.evaluation.bootstrap import LEVEL
from fairseq_lot.evaluation.results import MetricScore
from fairseq_lot.output.figures import write_figure
from fairseq_lot.output.tables import MISSING, Table
from fairseq_lot.plug_and_play.sweep_points import DRAWN, PIECES, TEXT, Point

_CALIBRATED = {DRAWN: MISSING, PIECES: "without data", TEXT: "on text"}


def render(points: list[Point]) -> str:
    """The points as a Markdown table, in the order in which mechanisms were given, calibrated after as they stand."""
    base = next((point for point in points if point.attention == DEFAULT and not point.options), None)
    attentions = list(dict.fromkeys(point.attention for point in points))
    ways = list(dict.fromkeys((point.attention, point.options) for point in points))

    def order(point):
        way = (point.attention, point.options)
        return attentions.index(point.attention), ways.index(way), list(_CALIBRATED).index(point.calibration)

    several = {point.calibration for point in points} >= {PIECES, TEXT}
    rows = []
    for point in sorted(points, key=order):
        calibrated = _CALIBRATED[point.calibration]
        if point.calibrated:
            seconds = f"{point.calibration_seconds:.0f} s"
            calibrated = f"{calibrated}, {seconds}" if several or point.calibration == PIECES else seconds
        change = MISSING if base in (point, None) else f"{point.loss - base.loss:+.4f}"
        cells = [point.attention, point.options or MISSING, calibrated, f"{point.loss:.4f}", change]
        rows.append([*cells, *_bleu(point.bleu)])
    head = ["Mechanism", "Options", "Calibrated", "Validation loss", "Δ", "BLEU", "Δ"]
    return Table(head, rows, notes=notes(points)).markdown()


def _bleu(bleu: MetricScore | None):
    if bleu is None:
        return MISSING, MISSING
    score = f"{bleu.score:.2f} [{bleu.low:.2f}, {bleu.high:.2f}]"
    if bleu.delta is None:
        return score, MISSING
    return score, f"{bleu.delta:+.2f}{'*' if bleu.p < LEVEL else ''} (p = {bleu.p:.4f})"


def notes(points: list[Point]) -> list[str]:
    """How to read the table."""

    def all_of(name):
        return ", ".join(dict.fromkeys(str(getattr(point, name)) for point in points))

    signatures = dict.fromkeys(point.bleu.signature for point in points if point.bleu)
    return [
        f"Validation loss: nats per target token, teacher-forced, {all_of('tokens')} tokens. Δ: against the base.",
        "BLEU: tokenised, with 95 % bootstrap interval; "
        f"p: paired bootstrap test against the base, * where p < {LEVEL}.",
        *(f"Signature: `{signature}`" for signature in signatures),
        f"Device: {all_of('device')}, threads: {all_of('threads')}. Commit: {all_of('commit')}. "
        f"Calibration seed: {all_of('seed')}.",
    ]


def draw(points: list[Point], path: Path) -> None:
    """Loss and BLEU against the number of pivots, where there are pivots; other mechanisms as lines across."""
    measures = {"validation loss (nats per token)": lambda point: point.loss}
    if any(point.bleu for point in points):
        measures["BLEU (tokenised, test set)"] = lambda point: point.bleu and point.bleu.score
    figure = Figure(figsize=(5.5 * len(measures) + 2, 4.5), layout="constrained")
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for axes, (title, value) in zip(panels, measures.items(), strict=True):
        for i, (label, of_curve) in enumerate(_curves(points).items()):
            line = [(pivots, value(point)) for pivots, point in of_curve if value(point) is not None]
            style = {"color": f"C{i % 10}", "label": label}
            if line and line[0][0] is None:
                axes.axhline(line[0][1], linestyle="-" if label == DEFAULT else ":", **style)
            elif line:
                dash = "-" if of_curve[0][1].calibrated else "--"
                axes.plot(*zip(*sorted(line), strict=True), marker="o", linestyle=dash, **style)
                axes.set_xscale("log", base=2)
        axes.set_ylabel(title)
        axes.set_xlabel("number of pivots r")
    # every point has a loss, so the first panel has every curve
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False)
    write_figure(figure, path)


def _curves(points):
    """Points that differ in the number of pivots alone: label → (number or None, point)."""
    curves: dict[str, list] = {}
    for point in points:
        pivots = re.search(r"-num-pivots[ =](\d+)", point.options)
        rest = re.sub(r"--\S+-num-pivots[ =]\d+", "", point.options).split()
        note = {DRAWN: [], PIECES: ["(calibrated without data)"], TEXT: ["(calibrated)"]}[point.calibration]
        curve = curves.setdefault(" ".join([point.attention, *rest, *note]), [])
        curve.append((int(pivots[1]) if pivots else None, point))
    return curves
