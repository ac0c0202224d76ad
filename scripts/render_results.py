"""Regenerates the tables in README.md, docs/ and results/log/, then the pages of results/.

A table in a page is between two comments. The command in the first comment prints it:

<!-- $ fairseq-lot table results/NAME.jsonl -->   or   <!-- $ cat FILE -->
<!-- / -->

Each results/NAME.jsonl gets a page results/NAME.md, and results/README.md lists all of them.
"""

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path

from fairseq_lot.cli import main as fairseq_lot
from fairseq_lot.evaluation.results import is_at, read_rows, read_statistics
from fairseq_lot.experiment.spec import BASE, PLAIN, STAGES, Row
from fairseq_lot.output.files import atomic_write
from fairseq_lot.output.tables import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((RESULTS / "log").glob("*.md"))]
BLOCK = re.compile(r"^<!-- \$ ([^\n]+) -->$.*?^<!-- / -->$", re.MULTILINE | re.DOTALL)


def rendered(page: str) -> str:
    """The text of a page with all its tables printed again by their commands."""
    return BLOCK.sub(lambda block: f"<!-- $ {block[1]} -->\n\n{printed(block[1])}\n\n<!-- / -->", page)


def printed(command: str) -> str:
    """The output of a command in the repository's root, without newlines at its start and end."""
    program, *words = shlex.split(command)
    if program == "cat" and len(words) == 1:
        return Path(words[0]).read_text(encoding="utf-8").strip("\n")
    if program != "fairseq-lot":
        sys.exit(f"render_results.py: error: there is the command {command!r}; use fairseq-lot or cat FILE")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = fairseq_lot(words)
    if code:
        sys.exit(f"render_results.py: error: {command!r} failed, see above; nothing was changed")
    return output.getvalue().strip("\n")


def page_of(path: Path) -> str:
    """The page of a file of rows: its table, then the paired tests against the control, stage by stage."""
    rows, name = read_rows([path]), path.relative_to(ROOT)
    commands = [f"fairseq-lot table {name}"]
    counted = read_statistics(path, rows)
    control = control_of(rows)
    for stage in STAGES:
        systems = {row.system for row in rows if row.key in counted and is_at(row, stage)}
        if stage != BASE and control in systems and len(systems) > 1:
            commands.append(f"fairseq-lot compare {name} --stage {shlex.quote(stage)} --against {shlex.quote(control)}")
    parts = [f"    {command}\n\n{printed(command)}\n" for command in commands]
    return "\n".join([f"# {path.stem}\n", *parts])


def control_of(rows: list[Row]) -> str:
    """The system that the others are compared with: the base, else plain softmax, else the first."""
    base = [row.system for row in rows if row.stage == BASE]
    plain = [row.system for row in rows if row.settings == PLAIN]
    return [*base, *plain, rows[0].system][0]


def index() -> str:
    """The text of results/README.md, which lists all other pages."""
    lines = []
    for path in sorted(RESULTS.glob("*.jsonl")):
        rows = read_rows([path])
        seeds = ", ".join(str(seed) for seed in sorted({row.seed for row in rows}))
        experiments = "; ".join(dict.fromkeys(row.experiment for row in rows))
        datasets = sorted({row.dataset.split(", ")[0] for row in rows})
        stages = ", ".join(stage for stage in STAGES if any(row.stage == stage for row in rows))
        page = f"[{path.stem}]({path.stem}.md)"
        lines.append([page, "; ".join(datasets), experiments, stages, str(len({row.system for row in rows})), seeds])
    head = ["Rows", "Data", "Experiment", "Stages", "Systems", "Seeds"]
    sweeps = [f"- [{page.parent.name}]({page.relative_to(RESULTS)})" for page in sorted(RESULTS.glob("*/sweep.md"))]
    losses = [f"- [{page.stem}]({page.relative_to(RESULTS)})" for page in sorted(RESULTS.glob("*.losses/*.md"))]
    return "\n".join(
        [
            "# Results\n",
            "Every row that was scored, a page for each experiment. `python scripts/render_results.py` prints them",
            "from the rows. [docs/results.md](../docs/results.md) says what they show.\n",
            Table(head, lines).markdown(),
            "\nSweeps: one base, swapped in many ways.\n",
            *sweeps,
            "\nLosses by epoch.\n",
            *losses,
            "",
        ]
    )


def pages_of_results() -> dict[Path, str]:
    """The pages of results/ with their text."""
    pages = {path.with_suffix(".md"): page_of(path) for path in sorted(RESULTS.glob("*.jsonl"))}
    return pages | {RESULTS / "README.md": index()}


def main() -> None:
    """Write all pages."""
    os.chdir(ROOT)
    pages = {page: rendered(page.read_text(encoding="utf-8")) for page in PAGES} | pages_of_results()
    for page, after in pages.items():
        before = page.read_text(encoding="utf-8") if page.exists() else ""
        with atomic_write(page) as file:
            file.write(after)
        print(f"{page}: {'as its commands print it' if after == before else 'changed'}")


if __name__ == "__main__":
    main()
