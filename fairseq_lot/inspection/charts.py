"""The figures of the report: BLEU and loss curves."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from fairseq_lot.experiment.spec import STAGES, Row
from fairseq_lot.inspection.training_log import Curves


def bleu_bars(rows: Sequence[Row]) -> Figure:
    """A bar chart of tokenised BLEU in percent with 95 % intervals, one bar per row."""
    figure = Figure(figsize=(8, 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    rows = sorted(rows, key=lambda row: (row.dataset, row.backbone, STAGES.index(row.stage), row.system))
    several = [name for name in ("dataset", "experiment", "seed") if len({getattr(row, name) for row in rows}) > 1]
    labels = []
    for line, row in enumerate(rows):
        score = row.tokenised
        around = [[max(0.0, score.score - score.low)], [max(0.0, score.high - score.score)]]
        axes.barh(line, score.score, xerr=around, color=f"C{STAGES.index(row.stage)}", capsize=3)
        parts = [row.backbone, row.system, row.stage]
        labels.append(" · ".join([*parts, *(f"{name} {getattr(row, name)}" for name in several)]))
    axes.set_yticks(range(len(rows)), labels, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("tokenised BLEU (%), bars: 95 % bootstrap interval")
    return figure


def loss_curves(trainings: dict[str, Curves]) -> Figure:
    """The loss curves of each training, in bits per target token, against the number of updates.

    Args:
        trainings: the curves by the name of the training.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, curves) in enumerate(trainings.items()):
        for points, dash, what in ((curves.train, ":", "training"), (curves.valid, "-", "validation")):
            if points:
                marker = "o" if what == "validation" else None
                label = f"{what}, {name}"  # the name comes second: matplotlib drops labels that begin with "_"
                axes.plot(*zip(*sorted(points.items()), strict=True), dash, marker=marker, color=f"C{i}", label=label)
    axes.set_xlabel("updates")
    axes.set_ylabel("loss (bits per target token)")
    for text in axes.legend(fontsize="small").get_texts():
        text.set_parse_math(False)
    return figure
