"""What ``fairseq-lot curve`` keeps of each swap, and shows: a table and a figure against the epochs of the base."""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fairseq_lot.attention.registry import DEFAULT
from fairseq_lot.output.figures import write_figure
from fairseq_lot.output.tables import MISSING, Table
from fairseq_lot.plug_and_play.sweep_points import DRAWN, PIECES, Point

_CALIBRATED = {DRAWN: "", PIECES: "calibrated without data"}


@dataclass(frozen=True, kw_only=True)
class CurvePoint(Point):
    """One way to swap at one epoch: a line of curve.jsonl.

    Attributes:
        epoch: epochs that the base was trained for.
        base: sha256 of its checkpoint.
    """

    epoch: int
    base: str

    @property
    def key(self) -> tuple:
        """What makes two points the same."""
        return self.epoch, *super().key


def _by_way(points: list[CurvePoint]) -> dict[tuple, dict[int, CurvePoint]]:
    """The points of each curve by epoch: softmax first, then in the given order, calibrated after as it stands."""
    curves: dict[tuple, dict[int, CurvePoint]] = {}
    ways = list(dict.fromkeys((point.attention, point.options) for point in points))
    order = {way: (way != (DEFAULT, ""), place) for place, way in enumerate(ways)}
    for point in sorted(points, key=lambda p: (order[p.attention, p.options], p.calibrated, p.epoch)):
        curves.setdefault((point.attention, point.options, point.calibration), {})[point.epoch] = point
    return curves


def render(points: list[CurvePoint]) -> str:
    """The points as a Markdown table, a column for each epoch: softmax's loss, and how much each swap adds."""
    curves = _by_way(points)
    epochs = sorted({point.epoch for point in points})
    softmax = curves[DEFAULT, "", DRAWN]
    rows = []
    for (attention, options, calibration), curve in curves.items():
        cells = [attention, options or MISSING, _CALIBRATED[calibration] or MISSING]
        for epoch in epochs:
            if epoch not in curve:
                cells.append(MISSING)
            elif curve is softmax:
                cells.append(f"{curve[epoch].loss:.4f}")
            else:
                cells.append(f"{curve[epoch].loss - softmax[epoch].loss:+.4f}")
        rows.append(cells)

    def all_of(name):
        return ", ".join(dict.fromkeys(str(getattr(point, name)) for point in points))

    notes = [
        f"Validation loss in nats per target token, teacher-forced, {all_of('tokens')} tokens: of softmax, the base, "
        "and what each swap of the same checkpoint adds.",
        f"Device: {all_of('device')}, threads: {all_of('threads')}. Commit: {all_of('commit')}. "
        f"Calibration seed: {all_of('seed')}.",
    ]
    head = ["Mechanism", "Options", "Calibrated", *(f"Epoch {epoch}" for epoch in epochs)]
    return Table(head, rows, notes=notes).markdown()


def draw(points: list[CurvePoint], path: Path) -> None:
    """Softmax's loss, and what swaps add, against the epochs on a logarithmic axis."""
    curves = _by_way(points)
    epochs = sorted({point.epoch for point in points})
    softmax = curves[DEFAULT, "", DRAWN]
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    loss, cost = figure.subplots(1, 2)
    for number, ((attention, options, calibration), curve) in enumerate(curves.items()):
        label = " ".join(words for words in (attention, options, _CALIBRATED[calibration]) if words)
        style = {"color": f"C{number % 10}", "marker": "o", "linestyle": "-" if calibration else "--", "label": label}
        if curve is softmax:
            loss.plot(list(curve), [point.loss for point in curve.values()], **style | {"linestyle": "-"})
        else:
            cost.plot(list(curve), [point.loss - softmax[epoch].loss for epoch, point in curve.items()], **style)
    loss.set_ylabel("validation loss of softmax (nats per token)")
    cost.set_ylabel("what the swap adds (nats per token)")
    cost.axhline(0, color="0.7", linewidth=0.8)
    for axes in (loss, cost):
        axes.set_xscale("log", base=2)
        axes.set_xticks(epochs, [str(epoch) for epoch in epochs])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("epochs of pretraining")
    figure.legend(loc="outside right center", fontsize="small", frameon=False)
    write_figure(figure, path)
