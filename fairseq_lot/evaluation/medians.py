"""Medians over seeds, with differences to softmax."""

from collections.abc import Iterable
from statistics import median

from fairseq_lot.evaluation.results import FINE_TUNED, PLUG_AND_PLAY, MetricScore, Row
from fairseq_lot.evaluation.systems import at_stage, by_system, label, table_order
from fairseq_lot.output.tables import MISSING, Table

NOTE = (
    "In brackets: difference to softmax of the same stage; of what was measured here, the median over seeds. "
    "A system that lacks seeds which softmax has says how many it has."
)


def median_table(rows: Iterable[Row], heading: str, metric: str = "tokenised") -> Table:
    """A row for each mechanism, two columns for each backbone.

    Args:
        rows: of one table.
        heading: the line above the table.
        metric: ``tokenised`` or ``sacrebleu``.
    """
    systems = by_system(rows)
    backbones = list(dict.fromkeys(backbone for backbone, _, _ in systems))
    names = {key[1:]: label(key, systems) for key in systems}
    columns = [(backbone, stage) for backbone in backbones for stage in (PLUG_AND_PLAY, FINE_TUNED)]
    lines = []
    for system in sorted(names, key=lambda system: table_order(("", *system))):
        cells = [
            measured(
                by_seed(systems.get((backbone, *system), []), stage, metric),
                by_seed(systems.get((backbone, "softmax", ""), []), stage, metric),
            )
            for backbone, stage in columns
        ]
        lines.append([names[system], *cells])
    head = ["Mechanism", *(f"{backbone}: {stage}" for backbone, stage in columns)]
    return Table(head, lines, heading=heading, notes=[NOTE])


def by_seed(rows: Iterable[Row], stage: str, metric: str = "tokenised") -> dict[int, MetricScore]:
    """Scores of a system at a stage, by seed; softmax is not plugged in: its scores there are those of the base."""
    return {row.seed: getattr(row, metric) for row in at_stage(rows, stage)}


def measured(scores: dict[int, MetricScore], control: dict[int, MetricScore]) -> str:
    """The median of some scores and the median of their differences to the control's, seed by seed."""
    if not scores:
        return MISSING
    text = f"{median(metric.score for metric in scores.values()):.2f}"
    if scores == control:
        return text
    differences = [_difference(metric, control[seed]) for seed, metric in scores.items() if seed in control]
    if not differences:
        return text
    lacking = "" if scores.keys() >= control.keys() else f", {len(scores)} of {len(control)} seeds"
    return f"{text} ({median(differences):+.2f}{lacking})"


def _difference(metric: MetricScore, control: MetricScore) -> float:
    if metric.delta is not None and metric.base == control.score:
        return metric.delta  # of scores that were not rounded
    return round(metric.score - control.score, 2)
