"""The pages agree with the tracked results, name every folder, and have no dead links."""

import re
import subprocess
import sys
import tokenize

import pytest
import torch
from fairseq.data import indexed_dataset

from fairseq_lot.evaluation.bleu import relative_length
from fairseq_lot.evaluation.results import path_of, read_rows, read_statistics
from fairseq_lot.output.files import read_lines
from fairseq_lot.plug_and_play.points import read_points
from fairseq_lot.plug_and_play.sweep_table import render, render_balance
from tests.conftest import ROOT, program

RESULTS = sorted((ROOT / "results").glob("*.jsonl"))
FOLDERS = ("benchmarks", "docs", "results")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/**/*.md"))]
LOSSES = sorted(path.stem for path in (ROOT / "results" / "iwslt14-65k.losses").glob("*.json"))
PACKAGE = ROOT / "fairseq_lot"
assert len(RESULTS) >= 2 and len(PAGES) >= 8 and len(LOSSES) >= 2


def test_tables_are_as_their_commands_print_them(monkeypatch):
    monkeypatch.chdir(ROOT)
    script = program("scripts/render_results.py")
    pages = [path.read_text(encoding="utf-8") for path in script.PAGES]
    assert sum(bool(script.BLOCK.search(page)) for page in pages) >= 3
    for page in pages:
        assert script.rendered(page) == page


def test_a_failing_command_of_a_page_ends_the_script():
    with pytest.raises(SystemExit, match="'fairseq-lot table nowhere.jsonl' failed, see above; nothing was changed"):
        program("scripts/render_results.py").printed("fairseq-lot table nowhere.jsonl")


def test_pages_of_results_are_rendered_from_their_rows(monkeypatch):
    monkeypatch.chdir(ROOT)
    pages = program("scripts/render_results.py").pages_of_results()
    assert len(pages) == len(RESULTS) + 1
    for page, text in pages.items():
        assert page.read_text(encoding="utf-8") == text, page


def test_tables_of_sweeps_are_rendered_from_their_points():
    sweeps = sorted((ROOT / "results").glob("*/sweep.jsonl"))
    assert len(sweeps) > 8
    for path in sweeps:
        points, balance = read_points(path), path.with_name("balance.md")
        assert path.with_suffix(".md").read_text(encoding="utf-8") == render(points) + "\n"
        assert not balance.exists() or balance.read_text(encoding="utf-8") == render_balance(points) + "\n"


@pytest.mark.parametrize(
    "script, files, table",
    [
        ("heads.py", "iwslt14-65k.small.heads/*.json", "heads.md"),
        ("repeats.py", "iwslt14-65k.documents-alibi.repeats.json", "iwslt14-65k.documents-alibi.repeats.md"),
        ("by_length.py", "libreoffice.jsonl", "libreoffice.short.md"),
        ("grid.py", "iwslt14-65k.small.epoch32.grid.seed1/sweep.jsonl", "grid.md"),
        *(("losses.py", f"iwslt14-65k.losses/{name}.json", f"{name}.md") for name in LOSSES),
    ],
)
def test_tables_of_scripts_are_as_the_scripts_print_them(script, files, table):
    found = sorted((ROOT / "results").glob(files))
    printed = subprocess.run([sys.executable, ROOT / "results/log" / script, *found], capture_output=True, check=True)
    assert found[0].with_name(table).read_bytes() == printed.stdout


def test_losses_of_a_log_are_in_nats(tmp_path):
    line = "epoch 001 | valid on 'valid' subset | loss 7.4 | nll_loss 2 | ppl 4 | num_updates 30\n"
    (tmp_path / "train.log").write_text(line)
    assert program("results/log/losses.py").of_log(tmp_path / "train.log") == {"30": 1.3863}


def test_lengths_and_repeats_are_measured_on_the_best_hypotheses(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "results/log")
    lines = ["T-0\ta b c d", f"H-0\t-0.1\t{'a ' * 8}", "H-0\t-0.2\tworse", "T-1\ta b", "H-1\t-1\tb"]
    (tmp_path / "test.out").write_text("\n".join(lines) + "\n")
    found = program("results/log/repeats.py").measured(tmp_path / "test.out")
    assert found == [0.65, 1.25, 1.85, 0.8, 0.0]  # deciles and median of 2 and 1/2; of 5 n-grams 4 are repeated


def test_the_last_speed_of_a_log_counts():
    measured = program("results/log/documents_speed.py").measured
    speed, memory = measured("echo wps=1.5, wps=20,", r"wps=([0-9.]+)")
    assert speed == 20 and memory > 0.1
    with pytest.raises(SystemExit, match="ls nowhere failed: .*nowhere"):
        measured("ls nowhere", "")


def test_the_longest_documents_of_a_split_are_translated(tmp_path):
    source, few = tmp_path / "data", tmp_path / "few"
    few.mkdir()
    source.mkdir()
    for language, lengths in (("de", [3, 9, 1]), ("en", [5, 2, 1])):
        (source / f"dict.{language}.txt").touch()
        builder = indexed_dataset.make_builder(f"{source}/test.de-en.{language}.bin", "mmap", vocab_size=10)
        for length in lengths:
            builder.add_item(torch.full((length,), length))
        builder.finalize(f"{source}/test.de-en.{language}.idx")
    program("results/log/documents_speed.py").write_longest(source, "test", 2, few)
    copy = indexed_dataset.make_dataset(f"{few}/test.de-en.de", "mmap")
    assert copy.sizes.tolist() == [9, 3] and copy[1].tolist() == [3, 3, 3]
    assert {path.name for path in few.glob("dict.*")} == {"dict.de.txt", "dict.en.txt"}


def test_files_of_heads_are_sorted_by_the_numbers_in_their_names():
    names = ["4 epochs, LOT", "4 epochs, LOT from scratch", "16 + 2 epochs, LOT", "16 epochs, LOT", "LOT, plugged in"]
    paths = sorted((ROOT / f"{name}.json" for name in names), key=program("results/log/heads.py").by_number)
    assert [path.stem for path in paths] == names


def test_the_overview_is_rendered_from_the_rows():
    script = program("results/log/overview.py")
    assert (ROOT / "results/iwslt14-65k.overview.md").read_text(encoding="utf-8") == script.table() + "\n"
    assert (ROOT / "results/iwslt14-65k.short.md").read_text(encoding="utf-8") == script.short_table() + "\n"
    flagship = (ROOT / "results/iwslt14-65k-medium.short.md").read_text(encoding="utf-8")
    assert flagship == script.flagship_table() + "\n"
    numbers = [text.get_text() for axes in script.draw().axes for text in axes.texts]
    figure = (ROOT / "docs/figures/overview.svg").read_text(encoding="utf-8")
    assert len(numbers) > 20 and re.findall(r">([-+]\d\.\d\d\*?)</text>", figure) == numbers


def test_ratios_are_rendered_from_the_benchmarks():
    script = program("results/log/ratios.py")
    for name in script.TABLES:
        assert (ROOT / "benchmarks/ratios" / f"{name}.md").read_text(encoding="utf-8") == script.table(name) + "\n"


def test_results_name_no_folder_of_the_machine_that_made_them():
    """Commands and paths of checkpoints in results are relative."""
    files = [path for path in (ROOT / "results").rglob("*.json*") if path.is_file()]
    named = {path.name for path in files if re.search(r"[\s\"'=]/\w+/", path.read_text(encoding="utf-8"))}
    assert len(files) > 50 and not named


def test_counts_of_sentences_agree_with_their_rows():
    for path in RESULTS:
        rows = read_rows([path])
        found = read_statistics(path, rows)  # raises if they contradict the scores
        assert all(row.length == relative_length(found[row.key]) for row in rows if row.key in found)
        if path_of(path).exists():
            assert len(found) == len(read_lines(path_of(path)))
            assert path_of(path).stat().st_size < 25_000 * len(found)  # four characters a sentence of the test set


def test_the_map_names_every_folder_of_the_package():
    tree = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Map")[1].split("\n## ")[0]
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(re.findall(r"fairseq_lot/(\w+)/ ", tree)) and len(folders) > 8


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    relative = [link.split("#")[0] for link in links if not re.match(r"\w+:|#", link)]
    assert page.name != "README.md" or page.parent != ROOT or len(relative) > 8
    missing = [link for link in relative if not (page.parent / link).exists()]
    assert not missing


def anchors_of(page):
    """GitHub's anchors for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_to_sections_lead_to_a_heading():
    links = [
        (page, *link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s:#]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    ]
    missing = [
        (str(page.relative_to(ROOT)), path, anchor)
        for page, path, anchor in links
        if anchor not in anchors_of(page.parent / path if path else page)
    ]
    assert len(links) > 20 and not missing


def prose_of(path):
    """Docstrings and comments of a Python file; brackets in its code are indices, not citations."""
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    return "\n".join(token.string for token in tokens if token.string.startswith(('"""', 'r"""', "#")))


def keys_cited(text):
    """Keys in ``[Sinkformer, Cuturi13]`` or ``[ESPFormer, Alg. 1]``: capitalised, four letters or more; no links."""
    groups = re.findall(r"\[([A-Z]\w{3,}(?:, [A-Z]\w{3,})*)(?:, [^]]*)?\](?!\()", text)
    return {key for group in groups for key in group.split(", ")}


def test_citations_resolve_and_references_are_cited():
    references = (ROOT / "docs" / "references.bib").read_text(encoding="utf-8")
    entries = re.findall(r"^@\w+\{(\w+),$", references, re.MULTILINE)
    assert len(entries) == len(set(entries)) == references.count("@")
    code = "\n".join(prose_of(path) for path in PACKAGE.rglob("*.py"))
    pages = "\n".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    assert {"LOTFormer", "Cuturi13", "CETA"} <= keys_cited(code) <= set(entries)
    assert keys_cited(pages) <= set(entries)
    assert [key for key in entries if not re.search(rf"\[(\w+, )*{key}\b", code + pages)] == []
