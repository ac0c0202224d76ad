"""The page of the report travels with the package, and its script as it is written."""

import subprocess
import sys
from pathlib import Path

from fairseq_lot.inspection import report

FOLDER = Path(report.__file__).parent / "page"
ROOT = Path(__file__).resolve().parents[2]


def test_the_files_of_the_page_are_installed_with_the_package(tmp_path):
    words = [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "build_py", "-d", tmp_path / "built"]
    subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    built = tmp_path / "built" / FOLDER.relative_to(ROOT)
    assert {path.name for path in built.iterdir()} == {path.name for path in FOLDER.iterdir()}


def test_script_and_style_come_through_the_template_unchanged():
    sentence = {"source": ["<b>"], "target": [], "translation": "", "maps": []}
    text = report.page([], {}, {"models": ["a"], "sentences": [sentence]})
    for name in ("explorer.js", "report.css"):
        assert (FOLDER / name).read_text(encoding="utf-8").rstrip("\n") in text
    assert "<p>&lt;b&gt;</p>" in text


def test_a_page_without_maps_has_no_explorer():
    assert "<script" not in report.page([], {}, None)
