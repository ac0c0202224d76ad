"""The scores that the papers report, beside measured ones."""

from collections.abc import Iterable
from statistics import median

from fairseq_lot.evaluation.results import BASE, FINE_TUNED, PLUG_AND_PLAY, MetricScore, Row
from fairseq_lot.evaluation.systems import BACKBONES, MECHANISMS, by_system, label
from fairseq_lot.output.tables import MISSING, markdown_row

# Tokenised BLEU on IWSLT'14 De-En: plug-and-play and fine-tuned, medians of 4 runs [3, 4].
REPORTED = {
    ("transformer", "softmax"): (33.40, 34.61),
    ("transformer", "sinkhorn"): (33.36, 34.61),
    ("transformer", "esp"): (33.38, 34.64),
    ("transformer", "lot"): (33.29, 34.72),
    ("diff_transformer", "softmax"): (33.85, 34.78),
    ("diff_transformer", "sinkhorn"): (33.67, 34.81),
    ("diff_transformer", "esp"): (33.72, 34.83),
    ("diff_transformer", "lot"): (33.42, 34.91),
}


def render_beside_papers(rows: Iterable[Row]) -> str:
    """Return the Markdown: the reported scores and the medians of the rows, with differences to softmax.

    Args:
        rows: of one dataset and size; their tokenised BLEU is shown.
    """
    systems = by_system(rows)
    scores = {key: _scores(found) for key, found in systems.items()}
    lines = [
        "| Backbone | Mechanism | Papers: plug-and-play | Here | Papers: fine-tuned | Here |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for backbone in dict.fromkeys([*BACKBONES, *(key[0] for key in systems)]):
        control = scores.get((backbone, "softmax", ""), ({}, {}))
        for mechanism in dict.fromkeys([*MECHANISMS, *(key[1] for key in systems if key[0] == backbone)]):
            keys = [key for key in systems if key[:2] == (backbone, mechanism)]
            for key in keys or [(backbone, mechanism, "")]:
                # the papers' settings are the defaults
                reported = REPORTED.get(key[:2]) if not key[2] or len(keys) == 1 else None
                own = scores.get(key, ({}, {}))
                cells = [backbone, label(key, keys)]
                for stage in (0, 1):
                    cells += [_reported(reported, backbone, mechanism, stage), _measured(own[stage], control[stage])]
                lines.append(markdown_row(cells))
    return "\n".join(
        [
            *lines,
            "",
            "- Papers: IWSLT'14 De-En, 6+6 layers of width 512, 25 + 10 epochs, medians of 4 runs [3, 4].",
            "- In brackets: difference to softmax of the same stage; here the median over seeds of that of each seed. "
            "Where a system lacks seeds that softmax has, their number stands beside it.",
            "",
        ]
    )


def _scores(rows) -> tuple[dict[int, MetricScore], dict[int, MetricScore]]:
    """Scores by seed, plug-and-play and fine-tuned; of softmax the first are those of the base."""
    first = BASE if rows[0].mechanism == "softmax" else PLUG_AND_PLAY
    return tuple({row.seed: row.tokenised for row in rows if row.stage == stage} for stage in (first, FINE_TUNED))


def _reported(reported, backbone, mechanism, stage):
    if reported is None:
        return MISSING
    if mechanism == "softmax":
        return f"{reported[stage]:.2f}"
    return f"{reported[stage]:.2f} ({reported[stage] - REPORTED[backbone, 'softmax'][stage]:+.2f})"


def _measured(scores, control):
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


def _difference(metric, control):
    if metric.delta is not None and metric.base == control.score:
        return metric.delta  # of scores that were not rounded
    return round(metric.score - control.score, 2)
