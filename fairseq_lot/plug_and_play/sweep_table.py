"""Tables and the figure of ``fairseq-lot sweep``."""

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fairseq_lot.evaluation.bleu import LEVEL
from fairseq_lot.inspection.diagnose import BALANCE
from fairseq_lot.inspection.per_head import MEASURES
from fairseq_lot.output.tables import MISSING, Table
from fairseq_lot.plug_and_play.points import CALIBRATIONS, DRAWN, PIECES, TEXT, SweepRow

_CALIBRATED = {DRAWN: MISSING, PIECES: "without data", TEXT: "on text"}
_NOTE = {DRAWN: "", PIECES: "(calibrated without data)", TEXT: "(calibrated)"}
_AS_DIAGNOSE = (
    "Δ(A), marginal error and mean shift as `fairseq-lot diagnose` has them: means over the heads of the encoder, up "
    "to 64 sentences."
)
_COST = (
    "Cost: mean KL(base ‖ swap) of the next piece in nats, on the base's own translations of sentences that were not "
    "fitted on: random ones, or, where it is calibrated on text, of that text."
)
_DETOKENISED = {"sacrebleu": "sacreBLEU", "chrf": "chrF"}
# the points of one way, by the checksums of their bases
Line = dict[str, SweepRow]


def _lines(points: list[SweepRow]) -> list[Line]:
    """The points of each way, sorted by epoch.

    The base is the first way. Ways of one mechanism are neighbours; without a fit comes before calibrated.
    """
    lines: dict[tuple, Line] = {}
    for point in sorted(points, key=lambda point: point.epoch or 0):
        lines.setdefault(point.key, {})[point.base] = point
    attentions = list(dict.fromkeys(point.attention for point in points))
    ways = list(dict.fromkeys(point.key[:2] for point in points))  # the base is measured first

    def order(key: tuple) -> tuple:
        attention, options, calibrated_on = key
        given = ways.index((attention, options)), CALIBRATIONS.index(calibrated_on)
        return (attention, options) != ways[0], attentions.index(attention), *given

    return [lines[key] for key in sorted(lines, key=order)]


def _epochs(points: list[SweepRow]) -> dict[str, int | None]:
    """The epoch of each base, by the base's checksum, in ascending order."""
    return dict(sorted({point.base: point.epoch for point in points}.items(), key=lambda item: item[1] or 0))


def render(points: list[SweepRow]) -> str:
    """The points as a Markdown table, with a row for each way.

    With several bases there is a column for each epoch: the loss of softmax, and differences to it in the other rows.
    """
    lines, epochs = _lines(points), _epochs(points)
    softmax, several = lines[0], len(epochs) > 1
    head, with_cost = ["Mechanism", "Options", "Calibrated"], any(point.cost is not None for point in points)
    if several:
        with_bleu = any(point.bleu for point in points)
        head += [f"Epoch {epoch}" for epoch in epochs.values()]
        head += [f"Cost, epoch {epoch}" for epoch in epochs.values() if with_cost]
        head += [f"BLEU, epoch {epoch}" for epoch in epochs.values() if with_bleu]
    else:
        head += ["Validation loss", "Δ", *(["Cost"] if with_cost else []), "BLEU", "Δ"]
    detokenised = {
        name: title for name, title in _DETOKENISED.items() if any(getattr(point, name) is not None for point in points)
    }
    for title in detokenised.values():
        head += [f"{title}, epoch {epoch}" for epoch in epochs.values()] if several else [title]
    both = {point.calibrated_on for point in points} >= {PIECES, TEXT}
    rows = []
    for line in lines:
        point = next(iter(line.values()))
        calibrated = _CALIBRATED[point.calibrated_on]
        if not several and point.calibration_seconds is not None:
            seconds = f"{point.calibration_seconds:.0f} s"
            calibrated = f"{calibrated}, {seconds}" if both or point.calibrated_on == PIECES else seconds
        cells = [_cells(line.get(base), softmax.get(base)) for base in epochs]
        if several:  # the base's row has its figures, other rows have differences
            losses = [loss if added == MISSING else added for loss, added, *_ in cells]
            costs = [cost for _, _, cost, *_ in cells]
            scores = [score if added == MISSING else added for *_, score, added in cells]
            found = [*losses, *(costs if with_cost else []), *(scores if with_bleu else [])]
        else:
            (found,) = cells
            found = found if with_cost else [*found[:2], *found[3:]]
        others = [getattr(line.get(base), name, None) for name in detokenised for base in epochs]
        found = [*found, *(MISSING if score is None else f"{score:.2f}" for score in others)]
        rows.append([point.attention, point.flags or MISSING, calibrated, *found])
    return Table(head, rows, notes=_notes(points, several)).markdown()


def render_balance(points: list[SweepRow]) -> str:
    """The balance of the plans as a Markdown table; with one base also the loss by length.

    Empty if no point has these figures, as in older files.
    """
    if not any(point.balance or point.by_length for point in points):
        return ""
    if len(_epochs(points)) > 1:
        return _balance_by_epoch(points)
    points = [point for line in _lines(points) for point in line.values()]
    base = points[0]
    head = ["Mechanism", "Options", "Calibrated", *(MEASURES[measure][0] for measure in BALANCE)]
    ranges = [most for most, loss in (base.by_length or {}).items() if loss.tokens]
    head += [f"≤ {most}" if most.isdecimal() else most for most in ranges]
    rows = []
    for point in points:
        row = [point.attention, point.flags or MISSING, _CALIBRATED[point.calibrated_on]]
        for measure in BALANCE:
            row.append(f"{point.balance[measure]:{MEASURES[measure][1]}}" if point.balance else MISSING)
        for most in ranges:
            of_base, loss = ((one.by_length or {}).get(most) for one in (base, point))
            if of_base is None or loss is None:
                row.append(MISSING)
            else:
                row.append(f"{loss.mean:.4f}" if point is base else f"{loss.mean - of_base.mean:+.4f}")
        rows.append(row)
    notes = [
        _AS_DIAGNOSE,
        "The rest: loss of softmax, and what each swap adds, by the pieces of the source sentence.",
    ]
    return Table(head, rows, notes=notes).markdown()


def _balance_by_epoch(points: list[SweepRow]) -> str:
    """The balance of the plans as a Markdown table, with a column for each epoch."""
    epochs, rows = _epochs(points), []
    for measure in BALANCE:
        name, form = MEASURES[measure][:2]
        for line in _lines(points):
            way, found = next(iter(line.values())), [line[base].balance if base in line else None for base in epochs]
            cells = [f"{one[measure]:{form}}" if one else MISSING for one in found]
            rows.append([name, way.attention, way.flags or MISSING, _CALIBRATED[way.calibrated_on], *cells])
    head = ["Measure", "Mechanism", "Options", "Calibrated", *(f"Epoch {epoch}" for epoch in epochs.values())]
    return Table(head, rows, notes=[_AS_DIAGNOSE]).markdown()


def _cells(point: SweepRow | None, base: SweepRow | None) -> list[str]:
    """A point as cells: loss, loss minus the base's, cost of the swap, BLEU, BLEU minus the base's."""
    if point is None:
        return [MISSING] * 5
    bleu, more_loss, more_bleu = point.bleu, MISSING, MISSING
    if base is not None and base is not point:
        more_loss = f"{point.loss - base.loss:+.4f}"
    if bleu is not None and bleu.delta is not None and bleu.p is not None:
        more_bleu = f"{bleu.delta:+.2f}{'*' if bleu.p < LEVEL else ''} (p = {bleu.p:.4f})"
    cost = MISSING if point.cost is None or point is base else f"{point.cost:.4f}"
    return [f"{point.loss:.4f}", more_loss, cost, str(bleu or MISSING), more_bleu]


def _notes(points: list[SweepRow], several: bool) -> list[str]:
    """Notes below the table: definitions, signature, device, commit."""

    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(getattr(point, name)) for point in points))

    signatures = dict.fromkeys(point.bleu.signature for point in points if point.bleu)
    of_several = "Of softmax, the base, and what each swap of the same checkpoint adds."
    bleu = "BLEU: tokenised, with 95 % bootstrap interval; p: paired bootstrap test against the base, * where p <"
    return [
        f"Validation loss: nats per target token, teacher-forced, {all_of('tokens')} tokens. "
        + (of_several if several else "Δ: against the base."),
        *([_COST] if any(point.cost is not None for point in points) else []),
        *([f"{bleu} {LEVEL}."] if signatures or not several else []),
        *(["sacreBLEU and chrF are of detokenised text."] if any(point.chrf is not None for point in points) else []),
        *(f"Signature: `{signature}`" for signature in signatures),
        *_exact(points),
        f"Device: {all_of('device')}, threads: {all_of('threads')}. Commit: {all_of('commit')}. "
        f"Calibration seed: {all_of('seed')}.",
    ]


def _exact(points: list[SweepRow]) -> list[str]:
    """A note about near_far that is exact on short sentences, if there is any."""
    exact = {point.options.get("near_far_exact_up_to") or 0 for point in points if point.attention == "near_far"} - {0}
    if not exact:
        return []
    lengths = ", ".join(map(str, sorted(exact)))
    return [
        f"near_far is exact on sentences of up to {lengths} tokens: with one update and the base's prior its row is "
        "the base's there, and where all are so short it is not calibrated. "
        "`--try 'near_far --near-far-exact-up-to 0'` measures its linear form."
    ]


def draw(points: list[SweepRow]) -> Figure:
    """The figure: the loss of softmax, and the swaps' differences to it, against the epochs of the bases."""
    lines, epochs = _lines(points), _epochs(points)
    softmax = lines[0]
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    of_base, of_swaps = figure.subplots(1, 2)
    of_base.set_ylabel("loss of softmax (nats per token)")
    of_swaps.set_ylabel("loss of the swap minus softmax's (nats per token)")
    of_swaps.axhline(0, color="0.7", linewidth=0.8)
    for number, line in enumerate(lines):
        way = next(iter(line.values()))
        losses = [point.loss - (0 if line is softmax else softmax[base].loss) for base, point in line.items()]
        (of_base if line is softmax else of_swaps).plot(
            [point.epoch or 0 for point in line.values()],
            losses,
            "o-" if way.calibrated_on or line is softmax else "o--",
            color=f"C{number % 10}",
            label=f"{way.words} {_NOTE[way.calibrated_on]}".strip(),
        )
    for axes in (of_base, of_swaps):
        axes.set_xlabel("epochs of pretraining")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(epochs.values()), [str(epoch) for epoch in epochs.values()])
        axes.xaxis.set_minor_locator(NullLocator())
    figure.legend(loc="outside right center", fontsize="small", frameon=False)
    return figure
