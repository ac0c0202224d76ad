"""The static figures of the report: BLEU, curves, and the maps of one sentence."""

from collections.abc import Sequence

from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure

from fairseq_lot.evaluation.results import STAGES, Row
from fairseq_lot.report.maps import restore
from fairseq_lot.report.training_log import Curves


def bleu_bars(rows: Sequence[Row]) -> Figure:
    """Tokenised BLEU of every row with its 95 % interval."""
    figure = Figure(figsize=(8, 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    rows = sorted(rows, key=lambda row: (row.dataset, row.backbone, STAGES.index(row.stage), row.mechanism))
    several = len({row.dataset for row in rows}) > 1
    seeds = len({row.seed for row in rows}) > 1
    for place, row in enumerate(rows):
        score = row.tokenised
        around = [[max(0.0, score.score - score.low)], [max(0.0, score.high - score.score)]]
        axes.barh(place, score.score, xerr=around, color=f"C{STAGES.index(row.stage)}", capsize=3)
    labels = [
        " · ".join(
            [
                *([row.dataset] if several else []),
                row.backbone,
                f"{row.mechanism} {row.options}".strip(),
                row.stage,
                *([f"seed {row.seed}"] if seeds else []),
            ]
        )
        for row in rows
    ]
    axes.set_yticks(range(len(rows)), labels)
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
                label = f"{name}, {what}"
                axes.plot(*zip(*sorted(points.items()), strict=True), dash, marker=marker, color=f"C{i}", label=label)
    axes.set_xlabel("updates")
    axes.set_ylabel("loss (bits per target token)")
    axes.legend(fontsize="small")
    return figure


def map_grid(maps: dict, sentence: int, site: str, layer: int) -> Figure:
    """All heads of one layer, a row of panels per model, on one scale."""
    chosen = [
        [map_ for map_ in of_model if (map_["site"], map_["layer"]) == (site, layer)]
        for of_model in maps["sentences"][sentence]["maps"]
    ]
    columns = max(map(len, chosen))
    figure = Figure(figsize=(2.4 * columns + 1.5, 2.6 * len(chosen) + 0.6), layout="constrained")
    panels = figure.subplots(len(chosen), columns, squeeze=False)
    source, target = (maps["sentences"][sentence][side] for side in ("source", "target"))
    queries, keys = {"encoder": (source, source), "cross": (target, source), "decoder": (target, target)}[site]
    low = min(map_["map"]["low"] for of_model in chosen for map_ in of_model)
    high = max(map_["map"]["high"] for of_model in chosen for map_ in of_model)
    # as on the page, small shares are to be seen; a signed map has no root
    norm = PowerNorm(0.5, vmin=low, vmax=high) if low >= 0 else Normalize(low, high)
    for place, (name, of_model, row) in enumerate(zip(maps["models"], chosen, panels, strict=True), start=1):
        for axes in row[len(of_model) :]:
            axes.set_axis_off()
        for map_, axes in zip(of_model, row, strict=False):
            drawn = axes.imshow(restore(map_["map"]), norm=norm, aspect="auto", interpolation="nearest")
            axes.set_title(f"head {map_['head']}, Δ(A) = {map_['imbalance']:.2f}", fontsize=7)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.tick_params(length=0)
            if place == len(panels):
                _name(axes.set_xticks, keys, rotation=90)
            if map_ is of_model[0]:
                _name(axes.set_yticks, queries)
        row[0].set_ylabel(f"{name} ({of_model[0]['attention']})\nquery", fontsize=7)
    for axes in panels[-1]:
        axes.set_xlabel("key", fontsize=7)
    figure.colorbar(drawn, ax=panels, label="A (share of the query's attention)", shrink=0.6)
    return figure


def _name(set_ticks, tokens, **style):
    """Name the tokens along an axis; of more than 60 only every second, third, ..., so that no name is below 2.5 pt."""
    step = -(-len(tokens) // 60)
    named = range(0, len(tokens), step)
    set_ticks(named, tokens[::step], fontsize=min(6, 150 / len(named)), **style)
