"""``fairseq-lot report`` as a user runs it, and its page in a browser."""

import re
import shutil
import socket

import pytest

from tests.end_to_end.browser import browser
from tests.end_to_end.conftest import fairseq_lot
from tests.end_to_end.test_bad_input import refuse

RIGHT, DOWN, PAGE_DOWN = "\ue014", "\ue015", "\ue00f"
LOG = """\
epoch 001:    10 / 30 loss=9.1, nll_loss=8.5, ppl=1, num_updates=10, lr=1
epoch 001 | valid on 'valid' subset | loss 7.4 | nll_loss 6.6 | ppl 99 | num_updates 30
"""


@pytest.fixture(scope="session")
def text_data(data):
    """The data folder with its sentencepiece model, as the scripts leave it."""
    shutil.copy(data / "bpe" / "sentencepiece.bpe.model", data / "bin")
    return data


@pytest.fixture(scope="session")
def report(text_data, stock_checkpoint, tmp_path_factory):
    """A folder with a page of two models and three sentences, one of them with dangerous characters."""
    home = tmp_path_factory.mktemp("report")
    sentences = (text_data / "raw" / "test.de").read_text(encoding="utf-8").splitlines()[:2]
    (home / "lines.de").write_text("\n".join([*sentences, "</script><b>das & der"]) + "\n", encoding="utf-8")
    (home / "train.log").write_text(LOG, encoding="utf-8")
    options = ("--attention", "lot", "--lot-num-pivots", 5)
    fairseq_lot("swap", "--path", stock_checkpoint, "--out", home / "swapped.pt", *options)
    fairseq_lot(
        "report", "--path", stock_checkpoint, "--compare", home / "swapped.pt", "--sites",
        "encoder,cross", "--sentences", home / "lines.de", "--logs", home / "train.log", "--figures", home / "figures",
        "--out", home / "report.html",
    )  # fmt: skip
    return home


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def state(window):
    names = ["sentence", "site", "layer", "head"]
    return window.run("return arguments[0].map((id) => document.getElementById(id).value)", names)


@pytest.mark.parametrize("dark, width", [(False, 1200), (True, 1200), (False, 360)], ids=["light", "dark", "narrow"])
def test_the_page_in_a_browser(report, dark, width, tmp_path):
    with browser(free_port(), dark=dark, width=width) as window:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        window.devtools("Emulation.setEmulatedMedia", features=scheme)
        window.open(report / "report.html")
        window.wait("return !document.getElementById('explorer').hidden")
        assert window.run("return document.querySelectorAll('#panels > figure').length") == 2
        assert state(window) == ["0", "encoder", "0", "0"]
        assert window.run("return document.querySelectorAll('#panels details').length") == 2, "LOT's two clusterings"
        before = window.run("return document.getElementById('panels').innerHTML")
        window.run("document.getElementById('panels').focus()")
        for key in (RIGHT, DOWN, PAGE_DOWN, PAGE_DOWN):
            window.press(key)
        assert state(window) == ["2", "encoder", "1", "1"]
        assert window.run("return document.getElementById('panels').innerHTML") != before
        window.run(
            "const site = document.getElementById('site');site.value = 'cross'; site.dispatchEvent(new Event('change'))"
        )
        assert state(window) == ["2", "cross", "1", "1"]
        window.run(
            "document.querySelector('#panels rect').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
        )
        assert "query 0 “</s>”, key 0" in window.run("return document.getElementById('cell').textContent")
        window.run("document.getElementById('full').click()")
        shrunk = "map.getBoundingClientRect().width < map.viewBox.baseVal.width - 0.5"
        maps = "[...document.querySelectorAll('#panels svg')]"
        assert not window.run(f"return {maps}.some((map) => {shrunk})"), "large tokens are large"
        assert window.run("return document.documentElement.scrollWidth") <= width, "nothing sticks out"
        background = window.run("return getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(21, 23, 26)" if dark else "rgb(255, 255, 255)")
        window.screenshot(tmp_path / "page.png")
        assert window.messages() == []


def test_without_javascript_the_maps_are_seen(report):
    with browser(free_port()) as window:
        window.devtools("Emulation.setScriptExecutionDisabled", value=True)
        window.open(report / "report.html")
        window.devtools("Emulation.setScriptExecutionDisabled", value=False)  # the page's own has not run, ours may
        assert window.run("return document.getElementById('explorer').hidden")
        wide = window.run("return [...document.querySelectorAll('.still img')].map((image) => image.naturalWidth)")
        assert len(wide) == 5 and min(wide) > 100, "the curves and the maps of two layers at two sites"


def test_the_page_stands_alone(report):
    text = (report / "report.html").read_text(encoding="utf-8")
    assert text.count("<script") == 2 and "<link" in text
    assert not re.search(r"""(?:src|href)=["'](?!data:)|@import|url\(""", text), "nothing is loaded from elsewhere"
    assert text.count('<img alt="maps encoder layer') == 2, "maps to see without JavaScript"
    assert {path.name for path in (report / "figures").iterdir()} == {
        f"{name}.{form}"
        for name in ("loss", *(f"maps-{site}-layer-{layer}" for site in ("encoder", "cross") for layer in (0, 1)))
        for form in ("svg", "png")
    }


def test_wrong_options_are_refused(text_data, stock_checkpoint, report, tmp_path, capsys):
    out, model = ("--out", tmp_path / "out.html"), ("--path", stock_checkpoint)
    lines = ("--sentences", report / "lines.de")
    (tmp_path / "blank.de").write_text("das\n\n")
    refuse(capsys, "report", *out, naming=["--results"])
    refuse(capsys, "report", *out, *lines, naming=["--path"])
    refuse(capsys, "report", *out, *model, naming=["--sentences"])
    refuse(capsys, "report", *out, *model, *lines, "--sites", "middle", naming=["middle"])
    refuse(capsys, "report", *out, *model, "--sentences", tmp_path / "blank.de", naming=["sentence 2"])
    refuse(capsys, "report", *out, *model, *lines, "--compare", stock_checkpoint, naming=["twice"])
    refuse(capsys, "report", *out, "--logs", report / "lines.de", naming=["lines.de"])
    refuse(capsys, "report", *out, "--results", tmp_path / "gone.jsonl", naming=["gone.jsonl"])
    figures = ("--figures", tmp_path / "blank.de")
    refuse(capsys, "report", *out, "--logs", report / "train.log", *figures, naming=["blank.de"])
    refuse(capsys, "report", "--out", tmp_path, *model, *lines, naming=[tmp_path])
    assert [path.name for path in tmp_path.iterdir()] == ["blank.de"], "nothing half-written"
