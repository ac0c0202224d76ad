"""``fairseq-lot table``: scored systems as Markdown, backbone by mechanism, plug-and-play and fine-tuned."""

import argparse
from collections import Counter
from collections.abc import Iterable
from statistics import median

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.bootstrap import LEVEL
from fairseq_lot.evaluation.markdown import cell, markdown_row
from fairseq_lot.evaluation.results import BASE, FINE_TUNED, PLUG_AND_PLAY, MetricScore, Row, read_rows

BACKBONES = ("transformer", "diff_transformer")
MECHANISMS = ("softmax", "sinkhorn", "esp", "lot")
METRICS = {"tokenised": "tokenised BLEU", "sacrebleu": "sacreBLEU"}
_MISSING = "–"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("results", nargs="+", metavar="RESULTS.jsonl", help="files written by fairseq-lot score")
    parser.add_argument("--metric", choices=METRICS, default="tokenised", help="default: %(default)s, as the papers")
    parser.add_argument("--dataset", metavar="LABEL", help="only this dataset")


def run(args: argparse.Namespace) -> int:
    """Print the table, one for each dataset and size of the architecture.

    Raises:
        InputError: a results file is missing or broken, or there is nothing to show.
    """
    rows = read_systems(args.results)
    if args.dataset is not None:
        known = sorted({row.dataset for row in rows})
        rows = [row for row in rows if row.dataset == args.dataset]
        if not rows:
            raise InputError(f"no row of dataset {args.dataset!r}; there are: {', '.join(known) or 'none'}")
    if not rows:
        raise InputError(f"no row in {', '.join(args.results)}; score a system first with fairseq-lot score")
    print(render(rows, metric=args.metric), end="")
    return 0


def render(rows: Iterable[Row], *, metric: str = "tokenised") -> str:
    """Return the Markdown of all tables, parted by blank lines.

    Args:
        rows: scored systems; those of one dataset and size share a table.
        metric: ``tokenised`` or ``sacrebleu``.
    """
    tables: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        tables.setdefault((row.dataset, _size(row.architecture)), []).append(row)
    return "\n".join(_render_one(tables[key], metric) for key in sorted(tables))


def read_systems(paths: Iterable[str]) -> list[Row]:
    """Return the rows of all results files, each system once.

    Raises:
        InputError: a file is missing or broken, or two of them disagree about a system.
    """
    found: dict[tuple, tuple[Row, str]] = {}
    for path in paths:
        for row in read_rows(path):
            old, old_path = found.setdefault(row.key, (row, path))
            if old != row:
                raise InputError(f"{old_path} and {path} have different rows of one system: {row.key}; give only one")
    return [row for row, _ in found.values()]


def _size(architecture):
    """The architectures of the mechanisms differ in a prefix only: lot_transformer_small has the size small."""
    _, name, size = architecture.partition("transformer")
    return size.strip("_") if name else architecture


def _render_one(rows, metric):
    first = rows[0]
    sentences = _listed(row.sentences for row in rows)
    lines = [
        f"**{cell(first.dataset)}**, {_listed(row.architecture for row in rows)}, {sentences} sentences, "
        f"{METRICS[metric]}",
        "",
        "| Backbone | Mechanism | Plug-and-play | Δ vs. base | Fine-tuned | Δ vs. base |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    systems: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.stage != BASE or row.mechanism == "softmax":
            systems.setdefault((row.backbone, row.mechanism, row.options), []).append(row)
    for key in sorted(systems, key=_place):
        backbone, mechanism, options = key
        alone = len({other for other in systems if other[:2] == key[:2]}) == 1
        name = "softmax (base)" if mechanism == "softmax" else mechanism
        label = name if alone or not options else f"{name}: {options}"
        cells = [backbone, label, *_cells(systems[key], metric)]
        lines.append(markdown_row(cells))
    return "\n".join([*lines, "", *_notes(rows, metric)]) + "\n"


def _place(key):
    backbone, mechanism, options = key
    return (_rank(BACKBONES, backbone), backbone, _rank(MECHANISMS, mechanism), mechanism, options)


def _rank(known, name):
    return known.index(name) if name in known else len(known)


def _cells(rows, metric):
    """Return the four cells of one system."""
    scores = {stage: [getattr(row, metric) for row in rows if row.stage == stage] for stage in _stages(rows)}
    cells = []
    for stage in (PLUG_AND_PLAY, FINE_TUNED):
        if stage == PLUG_AND_PLAY and scores.get(BASE):
            cells += [_score(scores[BASE]), _MISSING]
        else:
            found = scores.get(stage, [])
            cells += [_score(found), _difference(found)]
    return cells


def _stages(rows):
    return {row.stage for row in rows}


def _score(found: list[MetricScore]) -> str:
    if not found:
        return _MISSING
    values = [metric.score for metric in found]
    if len(values) == 1:
        return f"{values[0]:.2f} [{found[0].low:.2f}, {found[0].high:.2f}]"
    low, high = min(metric.low for metric in found), max(metric.high for metric in found)
    return f"{median(values):.2f} [{low:.2f}, {high:.2f}] ({len(values)} seeds)"


def _difference(found: list[MetricScore]) -> str:
    compared = [metric for metric in found if metric.delta is not None and metric.p is not None]
    if not compared:
        return _MISSING
    significant = sum(metric.p < LEVEL for metric in compared)
    deltas = [metric.delta for metric in compared]
    text = f"{median(deltas):+.2f}"
    if significant == len(compared):
        text += "*"
    if len(compared) == 1:
        return f"{text} (p = {compared[0].p:.4f})"
    return f"{text} ({min(deltas):+.2f} to {max(deltas):+.2f}; p < {LEVEL} in {significant} of {len(compared)})"


def _notes(rows, metric):
    """Return the lines below the table: how to read it and where it comes from."""
    scratch = sorted({row.mechanism for row in rows if row.stage == BASE and row.mechanism != "softmax"})
    shown = [row for row in rows if row.stage != BASE or row.mechanism == "softmax"]
    runs = Counter((row.backbone, row.mechanism, row.options, row.stage) for row in shown)
    bootstrap = sorted({(row.bootstrap_samples, row.bootstrap_seed) for row in rows})
    notes = [
        f"[low, high]: 95 % bootstrap interval. p: paired bootstrap test against the base, * where p < {LEVEL}. "
        + "; ".join(f"{samples} resamples, seed {seed}" for samples, seed in bootstrap)
        + ".",
        "softmax (base): plug-and-play is the base itself, fine-tuned the control, "
        "the base fine-tuned for the same epochs.",
    ]
    if max(runs.values(), default=0) > 1:
        notes.append(
            "Several seeds: median [lowest, highest bound of the seeds' intervals]; median Δ (lowest to highest), "
            f"* where p < {LEVEL} for every seed."
        )
    options = sorted({f"{row.mechanism}: `{row.options}`" for row in shown if row.options})
    if options:
        notes.append(f"Options: {'; '.join(options)}")
    if scratch:
        notes.append(f"Not shown: rows of stage base with {', '.join(scratch)}, which have no softmax base.")
    notes += [
        f"Signature: {_quoted(getattr(row, metric).signature for row in rows)}",
        f"References: {_listed(row.reference for row in rows) if metric == 'sacrebleu' else 'Moses tokens'}",
        f"Device: {_listed(row.device for row in rows)}",
        f"Commit: {_listed(row.commit for row in rows)}",
        f"Seeds: {_listed(row.seed for row in rows)}",
    ]
    return [f"- {' '.join(note.split())}" for note in notes]


def _listed(values):
    return ", ".join(str(value) for value in sorted(set(values)))


def _quoted(values):
    return ", ".join(f"`{value}`" for value in sorted(set(values)))
