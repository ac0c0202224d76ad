"""``fairseq-lot report`` as a user runs it, with its page in a browser."""

import base64
import html
import json
import re
import shutil
import zlib

import numpy as np
import pytest

from tests.end_to_end.conftest import command, fairseq_lot, refuse, swapped
from tests.inspection.unpacked import unpacked

CHROMIUM = shutil.which("chromium")
LOG = """\
epoch 001:    10 / 30 loss=9.1, nll_loss=8.5, ppl=1, num_updates=10, lr=1
epoch 001 | valid on 'valid' subset | loss 7.4 | nll_loss 6.6 | ppl 99 | num_updates 30
"""


@pytest.fixture(scope="session")
def report(data, stock_checkpoint, tmp_path_factory):
    """A folder with the report (``report.html``) of two models and three sentences, one of which contains HTML tags."""
    home = tmp_path_factory.mktemp("report")
    sentences = (data / "raw" / "test.de").read_text(encoding="utf-8").splitlines()[:2]
    (home / "lines.de").write_text("\n".join([*sentences, "</script><b>das & der"]) + "\n", encoding="utf-8")
    (home / "train.log").write_text(LOG, encoding="utf-8")
    swapped(stock_checkpoint, home / "swapped.pt", "lot", "--lot-num-pivots", 5)
    fairseq_lot(
        "report", "--path", stock_checkpoint, "--compare", home / "swapped.pt", "--sites",
        "encoder,cross", "--sentences", home / "lines.de", "--logs", home / "train.log", "--out", home / "report.html",
    )  # fmt: skip
    return home


# loads the page in a frame, acts as a reader, and puts what the reader sees into the title
READER = """<meta name="color-scheme" content="light dark"><iframe src="%s" width="%d" height="1000"></iframe>
<script>
const done = {}, waiting = setInterval(() => {
  const view = document.querySelector("iframe").contentWindow, page = view.document;
  const byId = (id) => page.getElementById(id), all = (selector) => [...page.querySelectorAll(selector)];
  if (!byId("explorer") || byId("explorer").hidden) return;
  clearInterval(waiting);
  const state = () => ["sentence", "site", "layer", "head"].map((id) => byId(id).value).join(" ");
  done.first = state();
  done.panels = [all("#panels > figure").length, all("#panels details").length];
  const before = byId("panels").innerHTML;
  for (const key of ["ArrowRight", "ArrowDown", "PageDown", "PageDown"])
    byId("panels").dispatchEvent(new KeyboardEvent("keydown", {key}));
  done.moved = state();
  done.redrawn = byId("panels").innerHTML !== before;
  byId("site").value = "cross";
  byId("site").dispatchEvent(new Event("change"));
  done.cross = state();
  all("#panels rect")[0].dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
  done.cell = byId("cell").textContent;
  byId("full").click();
  done.shrunk = all("#panels svg").some((map) => map.getBoundingClientRect().width < map.viewBox.baseVal.width - 0.5);
  done.width = page.documentElement.scrollWidth;
  done.background = view.getComputedStyle(page.body).backgroundColor;
  document.title = JSON.stringify(done);
}, 20);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium")
@pytest.mark.parametrize("dark, width", [(False, 1200), (True, 1200), (False, 360)], ids=["light", "dark", "narrow"])
def test_the_page_in_a_browser(report, dark, width, tmp_path):
    (tmp_path / "reader.html").write_text(READER % ((report / "report.html").as_uri(), width), encoding="utf-8")
    done = command(
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--allow-file-access-from-files", "--enable-logging=stderr", "--window-size=1300,1100",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=20000", "--dump-dom",
        tmp_path / "reader.html",
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, "the page logged a message"
    seen = json.loads(html.unescape(re.search("<title>(.*?)</title>", done.stdout)[1]))
    assert seen["panels"] == [2, 2], "two models; LOT's two clusterings"
    assert (seen["first"], seen["moved"], seen["cross"]) == ("0 encoder 0 0", "2 encoder 1 1", "2 cross 1 1")
    assert seen["redrawn"] and "query 0 “</s>”, key 0" in seen["cell"]
    assert not seen["shrunk"], "a map is drawn smaller than its own size"
    assert seen["width"] <= width, "the page is wider than the window"
    assert seen["background"] == ("rgb(21, 23, 26)" if dark else "rgb(255, 255, 255)")


def test_the_page_stands_alone(report):
    text = (report / "report.html").read_text(encoding="utf-8")
    assert text.count("<script") == 2 and "<link" in text
    assert not re.search(r"""(?:src|href)=["'](?!data:)|@import|url\(""", text), "nothing is loaded from elsewhere"
    assert '<section id="explorer" hidden>' in text, "shown by its script"
    images = re.findall(r'<img alt="([^"]*)" src="data:image/svg\+xml;base64,([^"]*)">', text)
    assert [title for title, _ in images] == ["Training and validation loss"]
    assert base64.b64decode(images[0][1]).startswith(b"<?xml")


def test_the_data_of_the_page_are_the_maps(report):
    text = (report / "report.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="text/plain" id="maps">([^<]*)</script>', text)[1]
    maps = json.loads(zlib.decompress(base64.b64decode(data)))
    assert [name.split("/")[-1] for name in maps["models"]] == ["checkpoint_last.pt", "swapped.pt"]
    assert "script" in "".join(maps["sentences"][2]["source"])
    for sentence in maps["sentences"]:
        assert [len(of_model) for of_model in sentence["maps"]] == [8, 8], "two sites, two layers, two heads"
        assert sentence["target"].index("</s>") == 0 and sentence["source"].index("</s>") == len(sentence["source"]) - 1
        for map_ in sum(sentence["maps"], []):
            sides = sentence["source" if map_["site"] == "encoder" else "target"], sentence["source"]
            assert unpacked(map_["map"]).shape == tuple(map(len, sides))
            rounding = len(sides[1]) * (1 / 510 + 1e-6)  # of shares between 0 and 1
            assert unpacked(map_["map"]).sum(1) == pytest.approx(np.ones(len(sides[0])), abs=rounding)
            assert map_["row_sums"] == pytest.approx(np.ones(len(sides[0])), abs=1e-3)
            assert np.mean(map_["receiver_mass"]) == pytest.approx(1, abs=1e-3)


def test_a_training_without_a_loss_yet_has_no_curve(stock_checkpoint, report, tmp_path):
    shutil.copy(stock_checkpoint, tmp_path / "new.pt")
    (tmp_path / "train.log").write_text("num. shared model params: 1\n")
    words = ("--path", tmp_path / "new.pt", "--sentences", report / "lines.de", "--out", tmp_path / "report.html")
    fairseq_lot("report", *words)
    assert "Training and validation loss" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_sentences_in_pieces_need_no_encoder(data, stock_checkpoint, tmp_path):
    """Their maps are those of ``--split`` with the same sentences."""
    folder = shutil.copytree(data / "bin", tmp_path / "bin", ignore=shutil.ignore_patterns("*.model", "text"))
    lines = (data / "bpe" / "test.de").read_text(encoding="utf-8").splitlines()[:5]
    (tmp_path / "pieces").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pages = []
    for words in (("--split", "test"), ("--sentences", tmp_path / "pieces", "--pieces")):
        fairseq_lot("report", "--path", stock_checkpoint, "--data", folder, *words, "--out", tmp_path / "page.html")
        pages.append((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert pages[0] == pages[1]


def test_wrong_options_are_refused(data, stock_checkpoint, report, tmp_path, capsys):
    out, model = ("--out", tmp_path / "out.html"), ("--path", stock_checkpoint)
    lines = ("--sentences", report / "lines.de")
    (tmp_path / "blank.de").write_text("das\n\n")
    refuse(capsys, "report", *out, naming=["--results"])
    (tmp_path / "blank.jsonl").touch()
    refuse(capsys, "report", *out, "--results", tmp_path / "blank.jsonl", naming=["--results with a row"])
    refuse(capsys, "report", *out, *lines, naming=["--path"])
    refuse(capsys, "report", *out, "--sites", "cross", "--bpe", "fastbpe", naming=["--sites, --bpe cannot", "--path"])
    refuse(capsys, "report", *out, *model, naming=["--sentences"])
    refuse(
        capsys,
        "report",
        *out,
        *model,
        "--split",
        "valid",
        "--tokenised",
        naming=["--tokenised", "sentences are pieces"],
    )
    refuse(capsys, "report", *out, *model, *lines, "--pieces", naming=["--pieces needs sentences as in"])
    refuse(capsys, "report", *out, *model, *lines, "--sites", "middle", naming=["middle"])
    refuse(capsys, "report", *out, *model, "--sentences", tmp_path / "blank.de", naming=["sentence 2"])
    refuse(capsys, "report", *out, *model, *lines, "--compare", stock_checkpoint, naming=["twice"])
    refuse(capsys, "report", *out, "--logs", report / "lines.de", naming=["lines.de"])
    refuse(capsys, "report", *out, "--results", tmp_path / "gone.jsonl", naming=["gone.jsonl"])
    refuse(capsys, "report", "--out", tmp_path, *model, *lines, naming=[tmp_path])
    for option in ("--results", "--logs"):
        refuse(capsys, "report", "--out", tmp_path / "blank.de", option, tmp_path / "blank.de", naming=["are both"])
    assert (tmp_path / "blank.de").read_text() == "das\n\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blank.de", "blank.jsonl"], "nothing half-written"
