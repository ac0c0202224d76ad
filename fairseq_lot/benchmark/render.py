"""What ``fairseq-lot bench`` writes: CSV, Markdown with the crossing points, and a log-log figure."""

import csv
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from fairseq_lot.benchmark.contenders import BASE
from fairseq_lot.benchmark.measure import Figures
from fairseq_lot.output.figures import write_figure
from fairseq_lot.output.files import atomic_write
from fairseq_lot.output.tables import MISSING, Table

_MARKERS = "osv^DPX"

Rows = dict[tuple[str, int], Figures]  # by contender and length


@dataclass(frozen=True)
class Measure:
    """One column: its title, its unit as a factor of the stored one, and how it is read from the figures."""

    title: str
    attribute: str
    factor: float
    unit: str

    def of(self, figures: Figures) -> float:
        return getattr(figures, self.attribute) * self.factor


MEASURES = (
    Measure("forward", "forward", 1e3, "ms"),
    Measure("forward + backward", "both", 1e3, "ms"),
    Measure("peak memory", "peak", 2**-20, "MiB"),
)


def write(folder: Path, header: str, rows: Rows) -> str:
    """Write bench.csv, bench.md and bench.svg; return the Markdown."""
    text = render(header, rows)
    with atomic_write(folder / "bench.csv") as file:
        file.write(f"# {header}\n")
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["contender", "length", "forward_seconds", "forward_backward_seconds", "peak_bytes"])
        for (name, length), figures in rows.items():
            table.writerow([name, length, f"{figures.forward:.6g}", f"{figures.both:.6g}", figures.peak])
    with atomic_write(folder / "bench.md") as file:
        file.write(text + "\n")
    draw(folder / "bench.svg", rows)
    return text


def render(header: str, rows: Rows) -> str:
    """One table per measure, contenders by lengths, then where each contender overtakes torch's attention."""
    lengths, names = _axes(rows)
    tables = [
        Table(
            [f"{measure.title} ({measure.unit})", *lengths],
            [[name, *(_cell(measure, rows, name, length) for length in lengths)] for name in names],
            align="<" + ">" * len(lengths),
        )
        for measure in MEASURES
    ]
    brackets = f"In brackets: {BASE} divided by it; above 1 it takes less than {BASE}."
    return "\n\n".join([header, *(table.markdown() for table in tables), brackets, "\n".join(crossings(rows))])


def _axes(rows):
    return sorted({length for _, length in rows}), list(dict.fromkeys(name for name, _ in rows))


def _cell(measure, rows, name, length):
    if (name, length) not in rows:
        return MISSING
    value = measure.of(rows[name, length])
    if name == BASE or (BASE, length) not in rows or value == 0:
        return f"{value:.3g}"
    return f"{value:.3g} ({measure.of(rows[BASE, length]) / value:.2g})"


def crossings(rows: Rows) -> list[str]:
    """For each contender and measure, the length from which on it is ahead of torch's attention, as Markdown items."""
    lengths, names = _axes(rows)
    lines = []
    for name in names:
        if name == BASE:
            continue
        parts = [f"{measure.title} {_crossing(measure, rows, name, lengths)}" for measure in MEASURES]
        lines.append(f"- {name} ahead of {BASE}: {', '.join(parts)}.")
    return lines


def _crossing(measure, rows, name, lengths):
    ahead = None
    for length in lengths:
        if (name, length) not in rows or (BASE, length) not in rows:
            continue
        if measure.of(rows[name, length]) >= measure.of(rows[BASE, length]):
            ahead = None
        elif ahead is None:
            ahead = length
    return "nowhere" if ahead is None else f"from N = {ahead}"


def draw(path: Path, rows: Rows) -> None:
    """One log-log panel per measure, one line per contender: colours tell contenders apart, markers their ranks."""
    lengths, names = _axes(rows)
    families = list(dict.fromkeys(_family(name) for name in names))
    ranks = list(dict.fromkeys(name.removeprefix(_family(name)) for name in names))
    figure = Figure(figsize=(15, 6), layout="constrained")
    for axes, measure in zip(figure.subplots(1, len(MEASURES)), MEASURES, strict=True):
        for name in names:
            points = [(n, measure.of(rows[name, n])) for n in lengths if (name, n) in rows]
            family, rank = families.index(_family(name)), ranks.index(name.removeprefix(_family(name)))
            style = (
                {"color": "black", "linewidth": 2.5} if name == BASE else {"color": f"C{family % 10}", "linewidth": 1}
            )
            axes.plot(
                *zip(*points, strict=True), marker=_MARKERS[rank % len(_MARKERS)], markersize=4, label=name, **style
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("sentence length N")
        axes.set_ylabel(f"{measure.title} ({measure.unit})")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False)
    write_figure(figure, path)


def _family(name):
    """The name of a contender without its rank."""
    return name.partition(" r=")[0]
