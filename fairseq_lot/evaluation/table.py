"""``fairseq-lot table``: scored systems as Markdown, backbone by mechanism, plug-and-play and fine-tuned."""

import argparse
from collections import Counter
from collections.abc import Iterable
from statistics import median

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.bootstrap import LEVEL
from fairseq_lot.evaluation.medians import by_seed, median_table
from fairseq_lot.evaluation.papers import beside_papers
from fairseq_lot.evaluation.results import BASE, FINE_TUNED, PLUG_AND_PLAY, MetricScore, Row
from fairseq_lot.evaluation.systems import by_system, label, only, read_systems, tables
from fairseq_lot.output.tables import MISSING, Table

METRICS = {"tokenised": "tokenised BLEU", "sacrebleu": "sacreBLEU"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("results", nargs="+", metavar="RESULTS.jsonl", help="files written by fairseq-lot score")
    parser.add_argument("--metric", choices=METRICS, default="tokenised", help="default: %(default)s, as the papers")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--medians", action="store_true", help="show medians only, the backbones side by side")
    shown.add_argument("--papers", action="store_true", help="show medians only, beside what the papers report")
    parser.add_argument("--dataset", metavar="LABEL", help="only this dataset")
    parser.add_argument("--protocol", metavar="LABEL", help="only this protocol")


def run(args: argparse.Namespace) -> int:
    """Print the table, one for each dataset, size of the architecture and protocol.

    Raises:
        InputError: a results file is missing or broken, or there is nothing to show.
    """
    if args.papers and args.metric != "tokenised":
        raise InputError(f"the papers report tokenised BLEU; leave out --metric {args.metric} or --papers")
    rows = only(read_systems(args.results), dataset=args.dataset, protocol=args.protocol)
    if not rows:
        raise InputError(f"no row in {', '.join(args.results)}; score a system first with fairseq-lot score")
    print(render(rows, metric=args.metric, papers=args.papers, medians=args.medians))
    return 0


def render(rows: Iterable[Row], **options) -> str:
    """Return the Markdown of all tables; arguments as for :func:`result_tables`."""
    return "\n\n".join(table.markdown() for table in result_tables(rows, **options))


def result_tables(
    rows: Iterable[Row], *, metric: str = "tokenised", papers: bool = False, medians: bool = False
) -> list[Table]:
    """Return the tables, one for each dataset, size of the architecture and protocol.

    Args:
        rows: scored systems.
        metric: ``tokenised`` or ``sacrebleu``.
        papers: medians of tokenised BLEU beside the papers' instead.
        medians: medians of both backbones side by side instead.
    """

    def table(part):
        heading = _heading(part, metric)
        if papers:
            return beside_papers(part, heading)
        return median_table(part, heading, metric) if medians else _result_table(part, metric)

    return [table(part) for part in tables(rows)]


def _heading(rows, metric):
    sentences = _listed(row.sentences for row in rows)
    return (
        f"**{rows[0].dataset}**, {_listed(row.architecture for row in rows)}, protocol {rows[0].protocol}, "
        f"{sentences} sentences, {METRICS[metric]}"
    )


def _result_table(rows, metric):
    systems = by_system(rows)
    return Table(
        ["Backbone", "Mechanism", "Plug-and-play", "Δ vs. base", "Fine-tuned", "Δ vs. base", "Δ vs. control"],
        [
            [key[0], label(key, systems), *_cells(found, systems.get((key[0], "softmax", ""), []), metric)]
            for key, found in systems.items()
        ],
        heading=_heading(rows, metric),
        notes=_notes(rows, metric),
    )


def _cells(rows, softmax, metric):
    """Return the five cells of one system; ``softmax`` are the rows of its base and control."""
    scores = {stage: [getattr(row, metric) for row in rows if row.stage == stage] for stage in _stages(rows)}
    cells = []
    for stage in (PLUG_AND_PLAY, FINE_TUNED):
        if stage == PLUG_AND_PLAY and scores.get(BASE):
            cells += [_score(scores[BASE]), MISSING]
        else:
            found = scores.get(stage, [])
            cells += [_score(found), _difference(found)]
    return [*cells, _to_control(by_seed(rows, FINE_TUNED, metric), by_seed(softmax, FINE_TUNED, metric))]


def _stages(rows):
    return {row.stage for row in rows}


def _score(found: list[MetricScore]) -> str:
    if not found:
        return MISSING
    values = [metric.score for metric in found]
    if len(values) == 1:
        return f"{values[0]:.2f} [{found[0].low:.2f}, {found[0].high:.2f}]"
    low, high = min(metric.low for metric in found), max(metric.high for metric in found)
    return f"{median(values):.2f} [{low:.2f}, {high:.2f}] ({len(values)} seeds)"


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
    if len(differences) == 1:
        return text
    return f"{text} ({min(differences):+.2f} to {max(differences):+.2f})"


def _notes(rows, metric):
    """Return the notes below the table: how to read it and where it comes from."""
    scratch = sorted({row.mechanism for row in rows if row.stage == BASE and row.mechanism != "softmax"})
    shown = [row for row in rows if row.stage != BASE or row.mechanism == "softmax"]
    runs = Counter((row.backbone, row.mechanism, row.options, row.stage) for row in shown)
    bootstrap = sorted({(row.bootstrap_samples, row.bootstrap_seed) for row in rows})
    notes = [
        f"[low, high]: 95 % bootstrap interval. p: paired bootstrap test against the base, * where p < {LEVEL}. "
        + "; ".join(f"{samples} resamples, seed {seed}" for samples, seed in bootstrap)
        + ".",
        "softmax (base): plug-and-play is the base itself, fine-tuned the control, "
        "the base fine-tuned for the same epochs. Δ vs. control: to the control of the same seed, not tested here "
        "(fairseq-lot compare does).",
    ]
    if max(runs.values(), default=0) > 1:
        notes.append(
            "Several seeds: median [lowest, highest bound of the seeds' intervals]; median Δ (lowest to highest), "
            f"* where p < {LEVEL} for every seed, in the same direction."
        )
    options = sorted({f"{row.mechanism}: `{row.options}`" for row in shown if row.options})
    if options:
        notes.append(f"Options: {'; '.join(options)}")
    if scratch:
        notes.append(f"Not shown: rows of stage base with {', '.join(scratch)}, which have no softmax base.")
    notes += [
        f"Signature: {_quoted(getattr(row, metric).signature for row in rows)}",
        f"References: {_listed(row.reference for row in rows) if metric == 'sacrebleu' else 'Moses tokens'}",
        f"Device: {'; '.join(sorted({row.device for row in rows}))}",
        f"Commit: {_listed(row.commit for row in rows)}",
        f"Seeds: {_listed(row.seed for row in rows)}",
    ]
    return notes


def _listed(values):
    return ", ".join(str(value) for value in sorted(set(values)))


def _quoted(values):
    return ", ".join(f"`{value}`" for value in sorted(set(values)))
