"""``fairseq-lot table``: a Markdown table of scored systems, plug-and-play and fine-tuned."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.bleu import LEVEL
from fairseq_lot.evaluation.results import at_stage, by_system, read_rows, tables
from fairseq_lot.experiment.spec import BASE, FINE_TUNED, FROM_SCRATCH, PLAIN, PLUG_AND_PLAY, MetricScore, Row, System
from fairseq_lot.output.tables import MISSING, Table

METRICS = {"tokenised": "tokenised BLEU", "sacrebleu": "sacreBLEU"}
OTHER = {"tokenised": "sacrebleu", "sacrebleu": "tokenised"}  # the second BLEU in a table
# Tokenised BLEU on IWSLT'14 De-En, plug-and-play and fine-tuned, medians of 4 runs [ESPFormer, LOTFormer]. Our esp in
# the same table has Table 12's values, in the units of the released modules.
_REPORTED = {
    ("transformer", "softmax"): (33.40, 34.61),
    ("transformer", "sinkhorn"): (33.36, 34.61),
    ("transformer", "esp"): (33.38, 34.64),
    ("transformer", "lot"): (33.29, 34.72),
    ("diff_transformer", "softmax"): (33.85, 34.78),
    ("diff_transformer", "sinkhorn"): (33.67, 34.81),
    ("diff_transformer", "esp"): (33.72, 34.83),
    ("diff_transformer", "lot"): (33.42, 34.91),
}
_LENPEN = (
    "lenpen: the length penalty of the beam search, chosen on validation by tokenised BLEU for each system and seed."
)
_NAMES = {"sinkhorn": "Sinkhorn", "esp": "ESP", "lot": "LOT"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("results", nargs="+", metavar="RESULTS.jsonl", help="rows of fairseq-lot score")
    parser.add_argument("--metric", choices=METRICS, default="tokenised", help="default: %(default)s, as the papers")
    parser.add_argument("--papers", action="store_true", help="show medians only, beside what the papers report")


def run(args: argparse.Namespace) -> None:
    """Run ``fairseq-lot table``: print a table for each experiment and test set."""
    if args.papers and args.metric != "tokenised":
        raise InputError(f"the papers report tokenised BLEU; leave out --metric {args.metric} or --papers")
    rows = read_rows(args.results)
    if not rows:
        raise InputError(f"no row in {', '.join(args.results)}; score a system first with fairseq-lot score")
    found = result_tables(rows, metric=args.metric, papers=args.papers)
    print("\n\n".join(table.markdown() for table in found))


def result_tables(rows: Iterable[Row], *, metric: str = "tokenised", papers: bool = False) -> list[Table]:
    """The tables, one for each experiment and test set.

    Args:
        rows: scored systems.
        metric: ``tokenised`` or ``sacrebleu``.
        papers: make other tables: medians of tokenised BLEU beside the scores in the papers.
    """
    show = _papers if papers else _full
    found = []
    for part in tables(rows):
        heading = f"**{part[0].dataset}**, {part[0].experiment}, {part[0].sentences} sentences, "
        found.append(show(_Systems(part, metric), heading + METRICS[metric]))
    return found


class _Systems:
    """The rows of one table, and their scores by one metric.

    Attributes:
        rows: by ``(backbone, system)``, the key of the methods, in the order of the table.
        stages: the stages that get columns: all that were run; the base is shown under plug-and-play or from scratch.
        with_length: some row has the length of its translations.
        with_chrf: some row has chrF.
        with_lenpen: some row has a chosen length penalty.
    """

    def __init__(self, rows: Sequence[Row], metric: str):
        self.rows, self.metric = by_system(rows), metric
        self.with_length = any(row.length is not None for row in rows)
        self.with_chrf = any(row.chrf is not None for row in rows)
        self.with_lenpen = any(row.lenpen is not None for row in rows)
        run = {row.stage for row in rows}
        if BASE in run and FROM_SCRATCH not in run:
            run.add(PLUG_AND_PLAY)
        self.stages = [stage for stage in (FROM_SCRATCH, PLUG_AND_PLAY, FINE_TUNED) if stage in run]

    def scores(self, key: tuple[str, str], stage: str) -> dict[int, MetricScore]:
        """The scores of a system at a stage, by seed."""
        return {seed: getattr(row, self.metric) for seed, row in at_stage(self.rows.get(key, []), stage).items()}

    def length(self, key: tuple[str, str], stage: str) -> str:
        """The median of ``Row.length`` of a system's rows, as text."""
        rows = at_stage(self.rows.get(key, []), stage).values()
        lengths = [row.length for row in rows if row.length is not None]
        return f"{median(lengths):.3f}" if lengths else MISSING

    def lenpen(self, key: tuple[str, str], stage: str) -> str:
        """The length penalties that were chosen for a system, by seed."""
        rows = sorted(at_stage(self.rows.get(key, []), stage).items())
        chosen = [MISSING if row.lenpen is None else f"{row.lenpen:g}" for _, row in rows]
        return ", ".join(chosen) if set(chosen) - {MISSING} else MISSING

    def others(self, key: tuple[str, str], stage: str) -> list[str]:
        """The medians of a system's scores by the other metrics: the other BLEU, then chrF if a row has it."""
        rows = at_stage(self.rows.get(key, []), stage).values()
        scores = [[getattr(row, OTHER[self.metric]).score for row in rows]]
        if self.with_chrf:
            scores.append([row.chrf for row in rows if row.chrf is not None])
        return [f"{median(found):.2f}" if found else MISSING for found in scores]

    def control(self, backbone: str) -> tuple[str, str]:
        """The key of the control: the system of the base, else plain softmax, else two empty texts."""
        own = {key: rows for key, rows in self.rows.items() if key[0] == backbone}
        base = [key for key, rows in own.items() if any(row.stage == BASE for row in rows)]
        plain = [key for key, rows in own.items() if rows[0].settings == PLAIN]
        return next(iter(base + plain), ("", ""))

    def differences(self, key: tuple[str, str], stage: str) -> list[float]:
        """Score minus the control's score for each seed that both have; empty for the control itself."""
        control = self.control(key[0])
        theirs = {} if key == control else self.scores(control, stage)
        return [_minus(score, theirs[seed]) for seed, score in self.scores(key, stage).items() if seed in theirs]

    def median(self, key: tuple[str, str], stage: str) -> str:
        """The median of a system's scores as text; in brackets the median of :meth:`differences`."""
        scores, control = self.scores(key, stage), self.scores(self.control(key[0]), stage)
        if not scores:
            return MISSING
        text = f"{median(metric.score for metric in scores.values()):.2f}"
        differences = self.differences(key, stage)
        if not differences:
            return text
        most = max(len(scores), len(control))
        lacking = "" if len(differences) == most else f", {len(differences)} of {most} seeds"
        return f"{text} ({median(differences):+.2f}{lacking})"


def _minus(metric: MetricScore, control: MetricScore) -> float:
    if metric.delta is not None and metric.base == control.score:
        return metric.delta  # computed from scores before rounding
    return round(metric.score - control.score, 2)


def _full(systems: _Systems, heading: str) -> Table:
    """The full table of scores with intervals.

    It also has differences to the base, with tests, and differences to the control.
    """
    lines = []
    for key, own in systems.rows.items():
        cells = list(key)
        for stage in systems.stages:
            is_base = stage != FINE_TUNED and any(row.stage == BASE for row in own)
            scores = list(systems.scores(key, stage).values())
            cells += [_score(scores), *systems.others(key, stage)]
            if systems.with_length:
                cells.append(systems.length(key, stage))
            if systems.with_lenpen:
                cells.append(systems.lenpen(key, stage))
            cells.append(MISSING if is_base else _difference(scores))
        if FINE_TUNED in systems.stages:
            differences = systems.differences(key, FINE_TUNED)
            seeds = len(systems.scores(key, FINE_TUNED))
            lacking = f"{len(differences)} of {seeds} seeds" if len(differences) < seeds else ""
            cells.append(_middle(differences, lacking) if differences else MISSING)
        lines.append(cells)
    head = ["Backbone", "System"]
    for stage in systems.stages:
        head += [stage.capitalize(), "sacreBLEU" if systems.metric == "tokenised" else "Tokenised BLEU"]
        head += ["chrF"] * systems.with_chrf + ["Length"] * systems.with_length
        head += ["lenpen"] * systems.with_lenpen + ["Δ vs. base"]
    if FINE_TUNED in systems.stages:
        head.append("Δ vs. control")
    return Table(head, lines, heading=heading, notes=_notes(systems))


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
    star = "*" if significant == len(compared) and min(deltas) * max(deltas) > 0 else ""
    tests = f"p < {LEVEL} in {significant} of {len(compared)}"
    return _middle(deltas, f"p = {ps[0]:.4f}" if len(compared) == 1 else tests, star)


def _middle(differences: Sequence[float], more: str = "", star: str = "") -> str:
    """The median difference as text, followed by ``star``; brackets have the range of several, then ``more``."""
    several = f"{min(differences):+.2f} to {max(differences):+.2f}" if len(differences) > 1 else ""
    brackets = "; ".join(part for part in (several, more) if part)
    return f"{median(differences):+.2f}{star}" + (f" ({brackets})" if brackets else "")


def _notes(systems: _Systems) -> list[str]:
    """Notes below the table: definitions, settings, device, commit."""
    rows = [row for own in systems.rows.values() for row in own]
    samples = sorted({(row.bootstrap_samples, row.bootstrap_seed) for row in rows})
    resamples = "; ".join(f"{number} resamples, seed {seed}" for number, seed in samples)
    notes = [
        f"[low, high]: 95 % bootstrap interval. p: paired bootstrap test against the base, * where p < {LEVEL}. "
        f"{resamples}.",
    ]
    of_control, to_control = [], ""
    if PLUG_AND_PLAY in systems.stages:
        of_control.append("plug-and-play is the base itself")
    if FINE_TUNED in systems.stages:
        of_control.append("fine-tuned the control, the base fine-tuned for the same epochs")
        to_control = " Δ vs. control: to the control of the same seed, not tested here (fairseq-lot compare does)."
    if of_control:
        names = _listed({systems.control(backbone)[1] for backbone, _ in systems.rows} - {""}) or "softmax"
        notes.append(f"{names}: {', '.join(of_control)}.{to_control}")
    if len({row.seed for row in rows}) > 1:
        notes.append(
            "Several seeds: median [lowest, highest bound of the seeds' intervals]; median Δ (lowest to highest), "
            f"* where p < {LEVEL} for every seed, in the same direction."
        )
    notes.append("sacreBLEU and chrF are of detokenised text.")
    if systems.with_length:
        notes.append("Length: of the translations, divided by that of the references. BLEU punishes less than 1.")
    if systems.with_lenpen:
        notes.append(_LENPEN)
    notes += [
        f"Systems: {_valued({row.system: row.settings.as_written for row in rows})}",
        f"Training: {_valued({row.backbone: row.training for row in rows})}",
        f"Signature: {_listed(f'`{getattr(row, systems.metric).signature}`' for row in rows)}",
        f"References: {_listed(row.reference for row in rows) if systems.metric == 'sacrebleu' else 'as in the data'}",
    ]
    precision = _listed({row.precision for row in rows} - {"unknown"}) or "fp32"
    if precision != "fp32":
        notes.append(f"Precision: {precision}")
    return notes + [
        f"Device: {'; '.join(sorted({row.device for row in rows}))}",
        f"Commit: {_listed(row.commit for row in rows)}",
        f"Seeds: {_listed(row.seed for row in rows)}",
    ]


def _valued(values: Mapping[str, Any]) -> str:
    """Names with their settings, as one text."""
    return "; ".join(f"{name}: {_in_words(settings)}" for name, settings in values.items())


def _in_words(settings: Mapping[str, Any]) -> str:
    """Settings as ``name value``, separated by commas; nested settings in brackets."""
    parts = []
    for name, value in settings.items():
        if isinstance(value, dict):
            parts += [f"{name} ({_in_words(value)})"] if value else []
        else:
            parts.append(name if value is True else f"{name} {value}")
    return ", ".join(parts)


def _listed(values: Iterable) -> str:
    return ", ".join(str(value) for value in sorted(set(values)))


def _papers(systems: _Systems, heading: str) -> Table:
    """The table of the papers' scores beside the medians of the rows, each with its difference to softmax."""
    # the papers' settings are the defaults
    settings = {key: own[0].settings for key, own in systems.rows.items()}
    shown = [(*key, own.attention if own == System(attention=own.attention) else "") for key, own in settings.items()]
    measured = {(backbone, attention) for backbone, _, attention in shown}
    shown += [(backbone, "", attention) for backbone, attention in _REPORTED if (backbone, attention) not in measured]
    lines = []
    for backbone, system, attention in sorted(shown, key=lambda one: one[0] != "transformer"):
        cells = [backbone, system or _NAMES.get(attention, attention)]
        for number, stage in enumerate((PLUG_AND_PLAY, FINE_TUNED)):
            cells += [_reported(backbone, attention, number), systems.median((backbone, system), stage)]
        lines.append(cells)
    note = (
        "In brackets: difference to softmax of the same stage; of what was measured here, the median over seeds. "
        "'1 of 2 seeds' marks incomplete runs."
    )
    source = "IWSLT'14 De-En, 6+6 layers of width 512, 25 + 10 epochs, medians of 4 runs [ESPFormer, LOTFormer]."
    head = ["Backbone", "System", "Papers: plug-and-play", "Here", "Papers: fine-tuned", "Here"]
    return Table(head, lines, heading=heading, notes=[f"Papers: {source}", note])


def _reported(backbone: str, attention: str, number: int) -> str:
    if (backbone, attention) not in _REPORTED:
        return MISSING
    score, softmax = _REPORTED[backbone, attention][number], _REPORTED[backbone, "softmax"][number]
    return f"{score:.2f}" + ("" if attention == "softmax" else f" ({score - softmax:+.2f})")
