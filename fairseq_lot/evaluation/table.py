"""``fairseq-lot table``: scored systems as Markdown, backbone by system, plug-and-play and fine-tuned."""

import argparse
import json
from collections.abc import Iterable, Sequence
from statistics import median

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.bootstrap import LEVEL
from fairseq_lot.evaluation.results import (
    BASE,
    FINE_TUNED,
    FROM_SCRATCH,
    PLUG_AND_PLAY,
    MetricScore,
    Row,
    at_stage,
    by_system,
    mechanism_order,
    read_rows,
    tables,
)
from fairseq_lot.output.tables import MISSING, Table

METRICS = {"tokenised": "tokenised BLEU", "sacrebleu": "sacreBLEU"}
_NOTE = (
    "In brackets: difference to softmax of the same stage; of what was measured here, the median over seeds. "
    "'1 of 2 seeds' marks incomplete runs."
)
# Tokenised BLEU on IWSLT'14 De-En, medians of 4 runs [ESPFormer, LOTFormer]. What stands beside esp is measured with
# Table 12's values, in the units of the released modules.
_REPORTED = {
    ("transformer", "softmax"): {PLUG_AND_PLAY: 33.40, FINE_TUNED: 34.61},
    ("transformer", "sinkhorn"): {PLUG_AND_PLAY: 33.36, FINE_TUNED: 34.61},
    ("transformer", "esp"): {PLUG_AND_PLAY: 33.38, FINE_TUNED: 34.64},
    ("transformer", "lot"): {PLUG_AND_PLAY: 33.29, FINE_TUNED: 34.72},
    ("diff_transformer", "softmax"): {PLUG_AND_PLAY: 33.85, FINE_TUNED: 34.78},
    ("diff_transformer", "sinkhorn"): {PLUG_AND_PLAY: 33.67, FINE_TUNED: 34.81},
    ("diff_transformer", "esp"): {PLUG_AND_PLAY: 33.72, FINE_TUNED: 34.83},
    ("diff_transformer", "lot"): {PLUG_AND_PLAY: 33.42, FINE_TUNED: 34.91},
}
_NAMES = {"sinkhorn": "Sinkhorn", "esp": "ESP", "lot": "LOT"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("results", nargs="+", metavar="RESULTS.jsonl", help="rows of fairseq-lot score")
    parser.add_argument("--metric", choices=METRICS, default="tokenised", help="default: %(default)s, as the papers")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--medians", action="store_true", help="show medians only, the backbones side by side")
    shown.add_argument("--papers", action="store_true", help="show medians only, beside what the papers report")


def run(args: argparse.Namespace) -> int:
    """Print the table, one for each experiment and test set.

    Raises:
        InputError: a results file is missing or broken, or there is nothing to show.
    """
    if args.papers and args.metric != "tokenised":
        raise InputError(f"the papers report tokenised BLEU; leave out --metric {args.metric} or --papers")
    rows = read_rows(args.results)
    if not rows:
        raise InputError(f"no row in {', '.join(args.results)}; score a system first with fairseq-lot score")
    found = result_tables(rows, metric=args.metric, papers=args.papers, medians=args.medians)
    print("\n\n".join(table.markdown() for table in found))
    return 0


def result_tables(
    rows: Iterable[Row], *, metric: str = "tokenised", papers: bool = False, medians: bool = False
) -> list[Table]:
    """The tables, one for each experiment and test set.

    Args:
        rows: scored systems.
        metric: ``tokenised`` or ``sacrebleu``.
        papers: medians of tokenised BLEU beside the papers' instead.
        medians: medians of both backbones side by side instead.
    """
    return [(_papers if papers else _medians if medians else _full)(part, metric) for part in tables(rows)]


def _heading(rows: Sequence[Row], metric: str) -> str:
    sentences = _listed(row.sentences for row in rows)
    return f"**{rows[0].dataset}**, {rows[0].experiment}, {sentences} sentences, {METRICS[metric]}"


def _stages(rows: Sequence[Row]) -> list[str]:
    """The stages that have columns: those that were run, and one for the base."""
    run = {row.stage for row in rows}
    if BASE in run and FROM_SCRATCH not in run:
        run.add(PLUG_AND_PLAY)
    return [stage for stage in (FROM_SCRATCH, PLUG_AND_PLAY, FINE_TUNED) if stage in run]


def _scores(rows: Iterable[Row], stage: str, metric: str) -> dict[int, MetricScore]:
    """Scores of a system at a stage, by seed."""
    return {seed: getattr(row, metric) for seed, row in at_stage(rows, stage).items()}


def _control(systems: dict[tuple[str, str], list[Row]], backbone: str) -> list[Row]:
    """The rows of the backbone's softmax without options: the base, and the base fine-tuned for as long."""
    plain = {"attention": "softmax"}
    return next((own for (place, _), own in systems.items() if place == backbone and own[0].settings == plain), [])


def _full(rows: Sequence[Row], metric: str) -> Table:
    """Scores with intervals, differences to the base with tests, and to the control."""
    systems, stages = by_system(rows), _stages(rows)
    lines = []
    for (backbone, system), own in systems.items():
        cells = [backbone, system]
        for stage in stages:
            is_base = stage != FINE_TUNED and any(row.stage == BASE for row in own)
            scores = list(_scores(own, stage, metric).values())
            cells += [_score(scores), MISSING if is_base else _difference(scores)]
        if FINE_TUNED in stages:
            control = _scores(_control(systems, backbone), FINE_TUNED, metric)
            cells.append(_to_control(_scores(own, FINE_TUNED, metric), control))
        lines.append(cells)
    head = ["Backbone", "System", *(title for stage in stages for title in (stage.capitalize(), "Δ vs. base"))]
    head += ["Δ vs. control"] * (FINE_TUNED in stages)
    return Table(head, lines, heading=_heading(rows, metric), notes=_notes(rows, metric))


def _score(found: list[MetricScore]) -> str:
    if not found:
        return MISSING
    low, high = min(metric.low for metric in found), max(metric.high for metric in found)
    seeds = "" if len(found) == 1 else f" ({len(found)} seeds)"
    return f"{median(metric.score for metric in found):.2f} [{low:.2f}, {high:.2f}]{seeds}"


def _difference(found: list[MetricScore]) -> str:
    compared = [(metric.delta, metric.p) for metric in found if metric.delta is not None and metric.p is not None]
    if not compared:
        return MISSING
    deltas, ps = zip(*compared, strict=True)
    significant = sum(p < LEVEL for p in ps)
    text = f"{median(deltas):+.2f}"
    if significant == len(compared) and min(deltas) * max(deltas) > 0:
        text += "*"
    if len(compared) == 1:
        return f"{text} (p = {ps[0]:.4f})"
    return f"{text} ({min(deltas):+.2f} to {max(deltas):+.2f}; p < {LEVEL} in {significant} of {len(compared)})"


def _to_control(found: dict[int, MetricScore], control: dict[int, MetricScore]) -> str:
    """The median difference of seeds that both have, and its range; the control itself has none."""
    differences = [found[seed].score - control[seed].score for seed in found if seed in control]
    if not differences or found == control:
        return MISSING
    text = f"{median(differences):+.2f}"
    return text if len(differences) == 1 else f"{text} ({min(differences):+.2f} to {max(differences):+.2f})"


def _notes(rows: Sequence[Row], metric: str) -> list[str]:
    """How to read the table and where it comes from."""
    samples = sorted({(row.bootstrap_samples, row.bootstrap_seed) for row in rows})
    notes = [
        f"[low, high]: 95 % bootstrap interval. p: paired bootstrap test against the base, * where p < {LEVEL}. "
        + "; ".join(f"{number} resamples, seed {seed}" for number, seed in samples)
        + ".",
        "softmax: plug-and-play is the base itself, fine-tuned the control, "
        "the base fine-tuned for the same epochs. Δ vs. control: to the control of the same seed, not tested here "
        "(fairseq-lot compare does).",
    ]
    if len({row.seed for row in rows}) > 1:
        notes.append(
            "Several seeds: median [lowest, highest bound of the seeds' intervals]; median Δ (lowest to highest), "
            f"* where p < {LEVEL} for every seed, in the same direction."
        )
    settings = {system: own[0].settings for (_, system), own in by_system(rows).items()}
    trainings = {own[0].backbone: own[0].training for own in by_system(rows).values()}
    return [
        *notes,
        f"Systems: {_valued(settings)}",
        f"Training: {_valued(trainings)}",
        f"Signature: {', '.join(sorted({f'`{getattr(row, metric).signature}`' for row in rows}))}",
        f"References: {_listed(row.reference for row in rows) if metric == 'sacrebleu' else 'Moses tokens'}",
        f"Device: {'; '.join(sorted({row.device for row in rows}))}",
        f"Commit: {_listed(row.commit for row in rows)}",
        f"Seeds: {_listed(row.seed for row in rows)}",
    ]


def _valued(values: dict) -> str:
    """Names with their settings, as the rows have them."""
    return "; ".join(f"{name}: `{json.dumps(value, ensure_ascii=False)}`" for name, value in values.items())


def _medians(rows: Sequence[Row], metric: str) -> Table:
    """A line for each system, a column for each backbone and stage."""
    systems = by_system(rows)
    columns = [(backbone, stage) for backbone in dict.fromkeys(key[0] for key in systems) for stage in _stages(rows)]
    lines = [
        [name, *(_median(systems, (backbone, name), stage, metric) for backbone, stage in columns)]
        for name in dict.fromkeys(row.system for row in sorted(rows, key=mechanism_order))
    ]
    head = ["System", *(f"{backbone}: {stage}" for backbone, stage in columns)]
    return Table(head, lines, heading=_heading(rows, metric), notes=[_NOTE])


def _median(systems, key, stage, metric):
    """The median of a system's scores and the median of their differences to the control's, seed by seed."""
    scores = _scores(systems.get(key, []), stage, metric)
    control = _scores(_control(systems, key[0]), stage, metric)
    if not scores:
        return MISSING
    text = f"{median(metric.score for metric in scores.values()):.2f}"
    differences = [_minus(score, control[seed]) for seed, score in scores.items() if seed in control]
    if scores == control or not differences:
        return text
    lacking = "" if scores.keys() >= control.keys() else f", {len(scores)} of {len(control)} seeds"
    return f"{text} ({median(differences):+.2f}{lacking})"


def _minus(metric: MetricScore, control: MetricScore) -> float:
    if metric.delta is not None and metric.base == control.score:
        return metric.delta  # of scores that were not rounded
    return round(metric.score - control.score, 2)


def _papers(rows: Sequence[Row], metric: str) -> Table:
    """The reported scores and the medians of the rows, with differences to softmax."""
    systems = by_system(rows)
    # the papers' settings are the defaults
    shown = [(*key, own[0].settings["attention"] if len(own[0].settings) == 1 else "") for key, own in systems.items()]
    measured = {(backbone, attention) for backbone, _, attention in shown}
    shown += [(backbone, "", attention) for backbone, attention in _REPORTED if (backbone, attention) not in measured]
    lines = []
    for backbone, system, attention in sorted(shown, key=lambda one: one[0] != "transformer"):
        scores, key = _REPORTED.get((backbone, attention)), (backbone, system)
        cells = [backbone, system or _NAMES.get(attention, attention)]
        for stage in (PLUG_AND_PLAY, FINE_TUNED):
            cells += [_reported(scores, backbone, stage), _median(systems, key, stage, metric)]
        lines.append(cells)
    return Table(
        ["Backbone", "System", "Papers: plug-and-play", "Here", "Papers: fine-tuned", "Here"],
        lines,
        heading=_heading(rows, metric),
        notes=[
            "Papers: IWSLT'14 De-En, 6+6 layers of width 512, 25 + 10 epochs, medians of 4 runs "
            "[ESPFormer, LOTFormer].",
            _NOTE,
        ],
    )


def _reported(scores, backbone, stage):
    if scores is None:
        return MISSING
    softmax = _REPORTED[backbone, "softmax"]
    change = "" if scores is softmax else f" ({scores[stage] - softmax[stage]:+.2f})"
    return f"{scores[stage]:.2f}{change}"


def _listed(values):
    return ", ".join(str(value) for value in sorted(set(values)))
