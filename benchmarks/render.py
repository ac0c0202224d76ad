"""Output of a benchmark: CSV, Markdown and a log-log figure."""

import csv
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measure import Figures
from fairseq_lot.output.figures import write_figure
from fairseq_lot.output.files import atomic_write
from fairseq_lot.output.tables import MISSING, Table

MILLISECONDS, MEBIBYTES = (1e3, "ms"), (2**-20, "MiB")
OUT_OF_MEMORY = "out of memory"
_MARKERS = "osv^DPX"


@dataclass(frozen=True)
class Measure:
    """One table with its panel: the figures named ``key``, multiplied by ``factor`` to get ``unit``."""

    title: str
    key: str
    factor: float
    unit: str
    more_is_better: bool = False

    def of(self, figures: Figures) -> float:
        return figures[self.key] * self.factor

    def lead(self, figures: Figures, base: Figures) -> float:
        """How many times better than the base; above 1 means better."""
        ours, theirs = self.of(figures), self.of(base)
        better, worse = (theirs, ours) if self.more_is_better else (ours, theirs)
        return worse / better if better else float("inf" if worse else 1)


@dataclass
class Results:
    """The results so far.

    Attributes:
        header: everything that the figures depend on, in one line.
        base: the contender that all others are compared with.
        measures: the tables and panels.
        rows: figures by contender and length; None if memory did not suffice.
    """

    header: str
    base: str
    measures: tuple[Measure, ...]
    rows: dict[tuple[str, int], Figures | None] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.rows))


def write(folder: Path, results: Results) -> str:
    """Write bench.csv, bench.md and bench.svg; return the Markdown."""
    text = render(results)
    with atomic_write(folder / "bench.csv") as file:
        file.write(f"# {results.header}\n")
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["contender", "length", *(measure.key for measure in results.measures)])
        for (name, length), figures in results.rows.items():
            cells = (OUT_OF_MEMORY if figures is None else f"{figures[one.key]:.6g}" for one in results.measures)
            table.writerow([name, length, *cells])
    with atomic_write(folder / "bench.md") as file:
        file.write(text + "\n")
    write_figure(draw(results), folder / "bench.svg")
    return text


def render(results: Results) -> str:
    """One table per measure, contenders by lengths."""
    lengths = sorted({length for _, length in results.rows})
    tables = [
        Table(
            [f"{measure.title} ({measure.unit})", *lengths],
            [[name, *(_cell(measure, results, name, length) for length in lengths)] for name in results.names],
            align="<" + ">" * len(lengths),
        )
        for measure in results.measures
    ]
    brackets = f"In brackets: how many times better than {results.base}; above 1 it is ahead."
    return "\n\n".join([results.header, *(table.markdown() for table in tables), brackets])


def _cell(measure: Measure, results: Results, name: str, length: int) -> str:
    if (name, length) not in results.rows:
        return MISSING
    figures, base = results.rows[name, length], results.rows.get((results.base, length))
    if figures is None:
        return OUT_OF_MEMORY
    value = measure.of(figures)
    text = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return text if name == results.base or base is None else f"{text} ({measure.lead(figures, base):.2g})"


def draw(results: Results) -> Figure:
    """One log-log panel per measure with a line per contender; colours show contenders, markers show ranks."""
    split = {name: name.partition(" r=")[::2] for name in results.names}
    families, ranks = (list(dict.fromkeys(parts)) for parts in zip(*split.values(), strict=True))
    columns = min(3, len(results.measures))
    lines = len(results.measures) // columns
    figure = Figure(figsize=(5 * columns, 1.5 + 4.5 * lines), layout="constrained")
    for axes, measure in zip(figure.subplots(lines, columns).flat, results.measures, strict=True):
        for name, (family, rank) in split.items():
            is_base = name == results.base
            found = [(n, x) for (other, n), x in sorted(results.rows.items()) if other == name and x is not None]
            axes.loglog(
                [n for n, _ in found],
                [measure.of(figures) for _, figures in found],
                color="black" if is_base else f"C{families.index(family) % 10}",
                linewidth=2.5 if is_base else 1,
                marker=_MARKERS[ranks.index(rank) % len(_MARKERS)],
                markersize=4,
                label=name,
            )
        axes.set_xscale("log", base=2)
        axes.set_xlabel("sentence length N")
        axes.set_ylabel(f"{measure.title} ({measure.unit})")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False)
    return figure
