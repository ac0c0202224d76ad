"""The page of the report: its files are installed, and its template leaves script and style unchanged."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_lot.inspection import report
from tests.plug_and_play.in_memory import LENGTHS, load

FOLDER = Path(report.__file__).parent / "page"
ROOT = Path(__file__).resolve().parents[2]


def test_the_files_of_the_page_are_installed_with_the_package(tmp_path):
    words = [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "build_py", "-d", tmp_path / "built"]
    subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    built = tmp_path / "built" / FOLDER.relative_to(ROOT)
    assert {path.name for path in built.iterdir()} == {path.name for path in FOLDER.iterdir()}


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/b/c.pt"], ["b/c.pt"]),
        (["a/b/c.pt", "a/b/d.pt"], ["b/c.pt", "b/d.pt"]),
        (["a/b/c.pt", "a/d/e/c.pt"], ["b/c.pt", "d/e/c.pt"]),
    ],
)
def test_a_checkpoint_is_called_by_its_folder_and_its_name(paths, names):
    assert report._short_names(paths) == dict(zip(names, paths, strict=True))


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:2]])
def test_the_first_sentences_of_a_split_are_shown(lengths):
    pieces = report._first_of_split(load(lengths=lengths))
    assert list(map(len, pieces)) == [length - 1 for length in lengths[: report.FIRST]]


def test_script_and_style_come_through_the_template_unchanged():
    sentence = {"source": ["a"], "target": [], "translation": "", "maps": []}
    text = report.page([], {}, {"models": ["a"], "sentences": [sentence]})
    for name in ("explorer.js", "report.css"):
        assert (FOLDER / name).read_text(encoding="utf-8").rstrip("\n") in text


def test_a_page_without_maps_has_no_explorer():
    assert "<script" not in report.page([], {}, None)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node: apt-get install nodejs")
@pytest.mark.parametrize("pieces", [["▁das", "▁i", "st", "</s>"], ["das", "i@@", "st", "</s>"], ["das", "ist", "</s>"]])
def test_the_menu_shows_words_instead_of_pieces(pieces):
    spell = re.search(r"function spell.*?\n}\n", (FOLDER / "explorer.js").read_text(encoding="utf-8"), re.DOTALL)[0]
    done = subprocess.run(["node", "-p", f"{spell}; spell({pieces})"], capture_output=True, text=True, check=True)
    assert done.stdout == "das ist\n"
