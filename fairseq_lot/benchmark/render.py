"""What ``fairseq-lot bench`` writes: CSV, Markdown with the crossing points, and a log-log figure."""

import csv
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from fairseq_lot.benchmark.measure import Figures
from fairseq_lot.output.figures import write_figure
from fairseq_lot.output.files import atomic_write
from fairseq_lot.output.tables import MISSING, Table

_MARKERS = "osv^DPX"
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Measure:
    """One table and one panel.

    Attributes:
        title, unit: as people read them.
        key: the name among the figures and in the CSV.
        factor: the unit as a factor of the stored one.
        more_is_better: as with words per second.
    """

    title: str
    key: str
    factor: float
    unit: str
    more_is_better: bool = False

    def of(self, figures: Figures) -> float:
        return figures[self.key] * self.factor

    def lead(self, figures: Figures, base: Figures) -> float:
        """How many times better than the base; above 1 it is ahead."""
        ours, theirs = self.of(figures), self.of(base)
        better, worse = (theirs, ours) if self.more_is_better else (ours, theirs)
        return worse / better if better else float("inf" if worse else 1)


MILLISECONDS = {"factor": 1e3, "unit": "ms"}
MEBIBYTES = {"factor": 2**-20, "unit": "MiB"}


@dataclass
class Results:
    """What has been found so far.

    Attributes:
        header: everything that the figures depend on, in one line.
        base: the contender that the others are compared with.
        measures: the tables and panels.
        rows: figures by contender and length; None where memory did not suffice.
    """

    header: str
    base: str
    measures: tuple[Measure, ...]
    rows: dict[tuple[str, int], Figures | None] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        return sorted({length for _, length in self.rows})

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.rows))

    def both(self, name: str, length: int) -> tuple[Figures, Figures] | None:
        """The figures of a contender and of the base, if both are there."""
        ours, theirs = self.rows.get((name, length)), self.rows.get((self.base, length))
        return None if ours is None or theirs is None else (ours, theirs)


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
    draw(folder / "bench.svg", results)
    return text


def render(results: Results) -> str:
    """One table per measure, contenders by lengths, then where each contender overtakes the base."""
    lengths = results.lengths
    tables = [
        Table(
            [f"{measure.title} ({measure.unit})", *lengths],
            [[name, *(_cell(measure, results, name, length) for length in lengths)] for name in results.names],
            align="<" + ">" * len(lengths),
        )
        for measure in results.measures
    ]
    brackets = f"In brackets: how many times better than {results.base}; above 1 it is ahead."
    return "\n\n".join(
        [results.header, *(table.markdown() for table in tables), brackets, "\n".join(crossings(results))]
    )


def _cell(measure, results, name, length):
    if (name, length) not in results.rows:
        return MISSING
    figures = results.rows[name, length]
    if figures is None:
        return OUT_OF_MEMORY
    value, both = measure.of(figures), results.both(name, length)
    text = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return text if name == results.base or both is None else f"{text} ({measure.lead(*both):.2g})"


def crossings(results: Results) -> list[str]:
    """For each contender and measure, the length from which on it is ahead of the base, as Markdown items."""
    lines = []
    for name in results.names:
        if name != results.base:
            parts = (f"{measure.title} {_crossing(measure, results, name)}" for measure in results.measures)
            lines.append(f"- {name} ahead of {results.base}: {', '.join(parts)}.")
    return lines


def _crossing(measure, results, name):
    ahead = None
    for length in results.lengths:
        both = results.both(name, length)
        if both is not None:
            leads = measure.lead(*both) > 1
            ahead = (length if ahead is None else ahead) if leads else None
    return "nowhere" if ahead is None else f"from N = {ahead}"


def draw(path: Path, results: Results) -> None:
    """One log-log panel per measure, one line per contender: colours tell contenders apart, markers their ranks."""
    names = results.names
    families = list(dict.fromkeys(_family(name) for name in names))
    ranks = list(dict.fromkeys(name.removeprefix(_family(name)) for name in names))
    lines = -(-len(results.measures) // 3)
    figure = Figure(figsize=(15, 1.5 + 4.5 * lines), layout="constrained")
    for axes, measure in zip(figure.subplots(lines, 3).flat, results.measures, strict=True):
        for name in names:
            points = [
                (length, measure.of(figures))
                for (other, length), figures in sorted(results.rows.items())
                if other == name and figures is not None
            ]
            family, rank = families.index(_family(name)), ranks.index(name.removeprefix(_family(name)))
            is_base = name == results.base
            color, width = ("black", 2.5) if is_base else (f"C{family % 10}", 1)
            marker = _MARKERS[rank % len(_MARKERS)]
            xs, ys = ([point[i] for point in points] for i in range(2))
            axes.plot(xs, ys, color=color, linewidth=width, marker=marker, markersize=4, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("sentence length N")
        axes.set_ylabel(f"{measure.title} ({measure.unit})")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False)
    write_figure(figure, path)


def _family(name):
    """The name of a contender without its rank."""
    return name.partition(" r=")[0]
