"""What ``fairseq-lot sweep`` shows: a table and a figure, of one base or against the epochs of several."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fairseq_lot.attention.registry import DEFAULT, mechanism_class
from fairseq_lot.evaluation.bleu import LEVEL
from fairseq_lot.inspection.diagnose import BALANCE
from fairseq_lot.inspection.per_head import MEASURES
from fairseq_lot.output.tables import MISSING, Table
from fairseq_lot.plug_and_play.points import CALIBRATIONS, DRAWN, LENGTHS, PIECES, TEXT, Point, spelt

_CALIBRATED = {DRAWN: MISSING, PIECES: "without data", TEXT: "on text"}
_NOTE = {DRAWN: "", PIECES: "(calibrated without data)", TEXT: "(calibrated)"}
_MEANS = "means over the heads of the encoder, 64 sentences."
_ADDED = "what the swap adds (nats per token)"
# of one way, its points by the sums of their bases
Line = dict[str, Point]
# of a figure: the points of each curve by the title of the panel and the name of the curve
Panels = dict[str, dict[tuple[str, bool], list[tuple[Any, float]]]]


def _lines(points: list[Point]) -> list[Line]:
    """The points of each way, by epoch: softmax first, ways of a mechanism together, calibrated after as it stands."""
    lines: dict[tuple, Line] = {}
    for point in sorted(points, key=lambda point: point.epoch or 0):
        lines.setdefault(point.key, {})[point.base] = point
    attentions = list(dict.fromkeys(point.attention for point in points))
    ways = list(dict.fromkeys(point.key[:2] for point in points))

    def order(key: tuple) -> tuple:
        attention, options, calibrated_on = key
        given = ways.index((attention, options)), CALIBRATIONS.index(calibrated_on)
        return (attention, options) != (DEFAULT, ()), attentions.index(attention), *given

    return [lines[key] for key in sorted(lines, key=order)]


def _softmax(lines: list[Line]) -> Line:
    """The bases themselves."""
    return lines[0] if next(iter(lines[0].values())).is_base else {}


def _epochs(points: list[Point]) -> dict[str, int | None]:
    """The epochs of the bases, in ascending order, by their sums."""
    return dict(sorted({point.base: point.epoch for point in points}.items(), key=lambda item: item[1] or 0))


def render(points: list[Point]) -> str:
    """The points as a Markdown table; of several bases a column for each epoch: softmax's loss, what each swap adds."""
    lines, epochs = _lines(points), _epochs(points)
    softmax, several = _softmax(lines), len(epochs) > 1
    head = ["Mechanism", "Options", "Calibrated"]
    if several:
        with_bleu = any(point.bleu for point in points)
        head += [f"Epoch {epoch}" for epoch in epochs.values()]
        head += [f"BLEU, epoch {epoch}" for epoch in epochs.values() if with_bleu]
    else:
        head += ["Validation loss", "Δ", "BLEU", "Δ"]
    both = {point.calibrated_on for point in points} >= {PIECES, TEXT}
    rows = []
    for line in lines:
        point = next(iter(line.values()))
        calibrated = _CALIBRATED[point.calibrated_on]
        if not several and point.calibration_seconds is not None:
            seconds = f"{point.calibration_seconds:.0f} s"
            calibrated = f"{calibrated}, {seconds}" if both or point.calibrated_on == PIECES else seconds
        cells = [_cells(line.get(base), softmax.get(base)) for base in epochs]
        if several:  # of the base itself the figure, of swaps what they add
            losses = [loss if added == MISSING else added for loss, added, *_ in cells]
            scores = [score if added == MISSING else added for *_, score, added in cells]
            found = [*losses, *(scores if with_bleu else [])]
        else:
            (found,) = cells
        rows.append([point.attention, point.flags or MISSING, calibrated, *found])
    return Table(head, rows, notes=_notes(points, several)).markdown()


def render_balance(points: list[Point]) -> str:
    """How balanced the plans are, and of one base where they lose, as a Markdown table; empty for older points."""
    if not any(point.balance or point.by_length for point in points):
        return ""
    if len(_epochs(points)) > 1:
        return _balance_by_epoch(points)
    points = [point for line in _lines(points) for point in line.values()]
    base = next((point for point in points if point.is_base), None)
    head = ["Mechanism", "Options", "Calibrated", *(MEASURES[measure][0] for measure in BALANCE)]
    head += [f"≤ {most}" for most in LENGTHS[:-1]] + [LENGTHS[-1]]
    rows = []
    for point in points:
        row = [point.attention, point.flags or MISSING, _CALIBRATED[point.calibrated_on]]
        for measure in BALANCE:
            row.append(f"{point.balance[measure]:{MEASURES[measure][1]}}" if point.balance else MISSING)
        for most, loss in (point.by_length or dict.fromkeys(map(str, LENGTHS))).items():
            of_base = base.by_length[most] if base and base.by_length else None
            if not loss or not loss.tokens or not of_base:
                row.append(MISSING)
            elif point is base:
                row.append(f"{loss.mean:.4f}")
            else:
                row.append(f"{loss.mean - of_base.mean:+.4f}")
        rows.append(row)
    notes = [
        f"Δ(A), marginal error and mean shift as `fairseq-lot diagnose` has them: {_MEANS}",
        "The rest: validation loss of softmax, and what each swap adds, by the pieces of the source sentence.",
    ]
    return Table(head, rows, notes=notes).markdown()


def _balance_by_epoch(points: list[Point]) -> str:
    """Δ(A) of each way, a column for each epoch of the base."""
    epochs = _epochs(points)
    rows = []
    for line in _lines(points):
        way, found = next(iter(line.values())), [line[base].balance if base in line else None for base in epochs]
        cells = [f"{one['imbalance']:{MEASURES['imbalance'][1]}}" if one else MISSING for one in found]
        rows.append([way.attention, way.flags or MISSING, _CALIBRATED[way.calibrated_on], *cells])
    head = ["Mechanism", "Options", "Calibrated", *(f"Δ(A), epoch {epoch}" for epoch in epochs.values())]
    return Table(head, rows, notes=[f"Δ(A) as `fairseq-lot diagnose` has it: {_MEANS}"]).markdown()


def _cells(point: Point | None, base: Point | None) -> list[str]:
    """Loss and what it is more than the base's, BLEU and what it is more."""
    if point is None:
        return [MISSING] * 4
    bleu, more_loss, more_bleu = point.bleu, MISSING, MISSING
    if base is not None and base is not point:
        more_loss = f"{point.loss - base.loss:+.4f}"
    if bleu is not None and bleu.delta is not None and bleu.p is not None:
        more_bleu = f"{bleu.delta:+.2f}{'*' if bleu.p < LEVEL else ''} (p = {bleu.p:.4f})"
    return [f"{point.loss:.4f}", more_loss, str(bleu or MISSING), more_bleu]


def _notes(points: list[Point], several: bool) -> list[str]:
    """How to read the table."""

    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(getattr(point, name)) for point in points))

    signatures = dict.fromkeys(point.bleu.signature for point in points if point.bleu)
    of_several = "Of softmax, the base, and what each swap of the same checkpoint adds."
    bleu = "BLEU: tokenised, with 95 % bootstrap interval; p: paired bootstrap test against the base, * where p <"
    return [
        f"Validation loss: nats per target token, teacher-forced, {all_of('tokens')} tokens. "
        + (of_several if several else "Δ: against the base."),
        *([f"{bleu} {LEVEL}."] if signatures or not several else []),
        *(f"Signature: `{signature}`" for signature in signatures),
        f"Device: {all_of('device')}, threads: {all_of('threads')}. Commit: {all_of('commit')}. "
        f"Calibration seed: {all_of('seed')}.",
    ]


def draw(points: list[Point]) -> Figure:
    """Of one base loss and BLEU against the number of pivots, of several what swaps add against the epochs."""
    epochs = _epochs(points)
    several = len(epochs) > 1
    panels = _against_epochs(points, epochs) if several else _against_pivots(points)
    figure = Figure(figsize=(5.5 * len(panels) + 2, 4.5), layout="constrained")
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name, line in curves.items():
            label, calibrated = name
            style = {"color": f"C{names.index(name) % 10}", "label": label}
            if line[0][0] is None:
                axes.axhline(line[0][1], linestyle="-" if label == DEFAULT else ":", **style)
            else:
                dash = "-" if calibrated or label == DEFAULT else "--"
                axes.plot(*zip(*sorted(line), strict=True), marker="o", linestyle=dash, **style)
                axes.set_xscale("log", base=2)
        axes.set_ylabel(title)
        axes.set_xlabel("epochs of pretraining" if several else "number of pivots r")
        if several:
            axes.set_xticks(list(epochs.values()), [str(epoch) for epoch in epochs.values()])
            axes.xaxis.set_minor_locator(NullLocator())
            if title == _ADDED:
                axes.axhline(0, color="0.7", linewidth=0.8)
    shown = {name: line for axes in figure.axes for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown, loc="outside right center", fontsize="small", frameon=False)
    return figure


def _name(point: Point, options: dict) -> tuple[str, bool]:
    """What the legend calls a curve, and whether it is of calibrated models."""
    label = " ".join(filter(None, [point.attention, spelt(options), _NOTE[point.calibrated_on]]))
    return label, bool(point.calibrated_on)


def _against_pivots(points: list[Point]) -> Panels:
    """A curve for each way whose points differ in the number of pivots; ways without pivots go across."""
    panels: Panels = {}
    for point in points:
        rest = dict(point.options)
        default = getattr(mechanism_class(point.attention).options_class, "num_pivots", None)
        pivots = rest.pop(f"{point.attention}_num_pivots", default)
        measures = {"validation loss (nats per token)": point.loss}
        if point.bleu:
            measures["BLEU (tokenised, test set)"] = point.bleu.score
        for title, value in measures.items():
            panels.setdefault(title, {}).setdefault(_name(point, rest), []).append((pivots, value))
    return panels


def _against_epochs(points: list[Point], epochs: dict[str, int | None]) -> Panels:
    """Softmax's loss, and what swaps add to it."""
    lines = _lines(points)
    softmax, panels = _softmax(lines), Panels()
    for line in lines:
        for base, point in line.items():
            title = "validation loss of softmax (nats per token)" if line is softmax else _ADDED
            loss = point.loss - (0 if line is softmax else softmax[base].loss)
            curves = panels.setdefault(title, {})
            curves.setdefault(_name(point, point.options), []).append((epochs[base], loss))
    return panels
