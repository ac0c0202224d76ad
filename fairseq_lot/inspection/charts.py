"""The static figures of the report: BLEU, curves, and the maps of one sentence."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure

from fairseq_lot.evaluation.results import STAGES, Row
from fairseq_lot.inspection.maps import restore
from fairseq_lot.inspection.training_log import Curves


def bleu_bars(rows: Sequence[Row]) -> Figure:
    """Tokenised BLEU of every row with its 95 % interval."""
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
    """Training and validation loss of each training against its updates."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, curves) in enumerate(trainings.items()):
        for points, dash, what in ((curves.train, ":", "training"), (curves.valid, "-", "validation")):
            if points:
                marker = "o" if what == "validation" else None
                label = f"{what}, {name}"  # matplotlib leaves out labels that begin with "_"
                axes.plot(*zip(*sorted(points.items()), strict=True), dash, marker=marker, color=f"C{i}", label=label)
    axes.set_xlabel("updates")
    axes.set_ylabel("loss (bits per target token)")
    for text in axes.legend(fontsize="small").get_texts():
        text.set_parse_math(False)
    return figure


def map_grid(maps: dict, site: str, layer: int) -> Figure:
    """All heads of one layer on the first sentence, a row of panels per model, on one scale."""
    shown = maps["sentences"][0]
    of_models = {
        name: [one for one in heads if (one["site"], one["layer"]) == (site, layer)]
        for name, heads in zip(maps["models"], shown["maps"], strict=True)
    }
    rows = {name: heads for name, heads in of_models.items() if heads}  # some models may have fewer layers
    source, target = shown["source"], shown["target"]
    queries, keys = source if site == "encoder" else target, source
    if site == "decoder":  # with --cross-self-attention the source stands before the target
        keys = [*source, *target][-rows[next(iter(rows))][0]["map"]["columns"] :]
    scale = _scale([head["map"] for heads in rows.values() for head in heads])

    columns = max(map(len, rows.values()))
    figure = Figure(figsize=(2.4 * columns + 1.5, 2.6 * len(rows) + 0.6), layout="constrained")
    panels = figure.subplots(len(rows), columns, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    for (name, heads), row in zip(rows.items(), panels, strict=True):
        for head, axes in zip(heads, row[: len(heads)], strict=True):
            axes.set_axis_on()
            axes.imshow(restore(head["map"]), norm=scale, aspect="auto", interpolation="nearest")
            axes.set_title(f"head {head['head']}, Δ(A) = {head['imbalance']:.2f}", fontsize=7)
            axes.set(xticks=[], yticks=[])
            axes.tick_params(length=0)
        _name(row[0].set_yticks, queries)
        row[0].set_ylabel(f"{name} ({heads[0]['attention']})\nquery", fontsize=7, parse_math=False)
    for axes in panels[-1][: len(heads)]:
        _name(axes.set_xticks, keys, rotation=90)
        axes.set_xlabel("key", fontsize=7)
    figure.colorbar(ScalarMappable(scale), ax=panels, label="A (share of the query's attention)", shrink=0.6)
    return figure


def _scale(maps: Sequence[dict]) -> Normalize:
    """One scale for all maps; as on the page small shares are to be seen, but a signed map has no root."""
    low, high = min(one["low"] for one in maps), max(one["high"] for one in maps)
    return PowerNorm(0.5, vmin=low, vmax=high) if low >= 0 else Normalize(low, high)


def _name(set_ticks: Callable, tokens: Sequence[str], **style: Any) -> None:
    """Name the tokens along an axis; of more than 60 only every second, third, ..., so that no name is below 2.5 pt."""
    step = -(-len(tokens) // 60)
    named = range(0, len(tokens), step)
    set_ticks(named, tokens[::step], fontsize=min(6, 150 / len(named)), parse_math=False, **style)
