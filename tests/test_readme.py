"""README.md says what the tracked results say, and names every file of the package."""

import json
import re
from pathlib import Path

import pytest

from fairseq_lot.evaluation.results import read_rows
from fairseq_lot.evaluation.table import render
from fairseq_lot.plug_and_play.sweep_table import render as render_sweep

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = sorted((ROOT / "results").glob("*.jsonl"))
assert len(RESULTS) >= 2


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(path):
    assert render(read_rows(path)) in README


def test_papers_table():
    (path,) = (path for path in RESULTS if path.name.startswith("iwslt14"))
    assert render(read_rows(path), papers=True).split("\n\n", 1)[1] in README


def test_sweep_table():
    (path,) = (ROOT / "results").glob("*.sweep/sweep.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    table = render_sweep(rows).rstrip("\n")
    assert table in README
    assert table in path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize("room", sorted(path for path in (ROOT / "fairseq_lot").iterdir() if path.is_dir()), ids=str)
def test_file_map_names_every_file(room):
    tree = README.split("## File map")[1].split("\n## ")[0]
    missing = [
        path.stem for path in room.glob("*.py") if path.stem != "__init__" and not re.search(rf"\b{path.stem}\b", tree)
    ]
    assert not [name for name in missing if not name.startswith("lexicon")]
