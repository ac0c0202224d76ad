"""All commands accept the result of fairseq's own recipe for translation.

Its data have Moses tokens, subword-nmt and one dictionary per side, and the folder has nothing else. The languages of
the training were typed or inferred; the checkpoint has today's format or that of fairseq 0.10 and older.
"""

import base64
import json
import re
import shutil
import zlib

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.logging.meters import AverageMeter, StopwatchMeter, TimeMeter
from fairseq_cli.preprocess import cli_main as fairseq_preprocess
from sacrebleu.metrics import BLEU
from sacremoses import MosesDetokenizer

from fairseq_lot.pretrained.checkpoint import load_checkpoint
from tests.end_to_end.conftest import contents, fairseq_lot, fields, generate, in_this_process, refuse, train

pytest.importorskip("subword_nmt", reason="pip install subword-nmt")
pytestmark = pytest.mark.slow

TINY = ("--arch", "transformer_tiny", "--lr", 2e-3, "--dropout", 0)
QUICK = ("--steps", 4, "--joint-steps", 2, "--held-out", 8)


@pytest.fixture(scope="module")
def classic(data, tmp_path_factory):
    """A folder with the text in pieces and their codes (``bpe``), and the output of fairseq-preprocess (``bin``)."""
    home = tmp_path_factory.mktemp("classic")
    pieces = ("--bpe", "subword_nmt", "--vocab-size", 200, "--source", "de", "--target", "en")
    fairseq_lot("encode", "--text", data / "text", "--out", home / "bpe", *pieces)
    prefixes = [word for split in ("train", "valid", "test") for word in (f"--{split}pref", home / "bpe" / split)]
    in_this_process(fairseq_preprocess, "-s", "de", "-t", "en", "--destdir", home / "bin", *prefixes)
    assert (home / "bin" / "dict.de.txt").read_bytes() != (home / "bin" / "dict.en.txt").read_bytes()
    return home


METERS = AverageMeter, StopwatchMeter, TimeMeter


def as_early_fairseq_saved(checkpoint, out):
    """Save a checkpoint as fairseq 0.10 did, with one flat namespace and no cfg, and with meters as in 0.9."""
    state = torch.load(checkpoint, weights_only=True)
    args = state["cfg"]["model"]
    for name, value in state["cfg"]["task"].items():
        if name != "_name":
            setattr(args, name, value)
    args.remove_bpe, args.min_lr = None, -1.0
    kept = ("model", "optimizer_history", "extra_state", "last_optimizer_state")
    old = {"args": args, **{name: state[name] for name in kept}}
    old["extra_state"]["train_meters"] = {kind.__name__: kind() for kind in METERS}
    for kind in METERS:
        kind.__module__ = "fairseq.meters"
    try:
        torch.save(old, out)
    finally:
        for kind in METERS:
            kind.__module__ = "fairseq.logging.meters"
    return out


def train_tiny(classic, save, *languages):
    flags = (*TINY, "--share-decoder-input-output-embed")
    return train(classic / "bin", save, *flags, updates=150, languages=languages)


@pytest.fixture(scope="module")
def typed_base(classic, tmp_path_factory):
    return train_tiny(classic, tmp_path_factory.mktemp("typed"), "-s", "de", "-t", "en")


@pytest.fixture(scope="module", params=["typed", "inferred", "early"])
def base(request, classic, typed_base, tmp_path_factory):
    """A base of fairseq's own architecture: with typed languages, with inferred ones, or in the early format."""
    save = tmp_path_factory.mktemp(request.param)
    if request.param == "inferred":
        checkpoint = train_tiny(classic, save)
        assert torch.load(checkpoint, weights_only=True)["cfg"]["task"]["source_lang"] is None
        return checkpoint
    return as_early_fairseq_saved(typed_base, save / "early.pt") if request.param == "early" else typed_base


def maps_of(page):
    """The data of a report's attention maps."""
    data = re.search('id="maps">([^<]*)<', page.read_text(encoding="utf-8"))[1]
    return json.loads(zlib.decompress(base64.b64decode(data)))


def test_every_command_accepts_a_model_of_the_recipe(data, classic, base, tmp_path, capsys):
    folder, swapped, fitted = classic / "bin", tmp_path / "swapped.pt", tmp_path / "fitted.pt"
    before = contents(folder)
    fairseq_lot("swap", "--path", base, "--attention", "lot", "--lot-num-pivots", 4, *QUICK, "--out", swapped)
    done = load_checkpoint(swapped).model_args.calibration
    assert "by the dictionary's counts" in done, "its dictionaries are found, whoever names the languages"
    fairseq_lot("calibrate", folder, "--path", swapped, *QUICK, "--out", fitted)
    assert "text of" in load_checkpoint(fitted).model_args.calibration
    fairseq_lot("check", folder, "--path", fitted)
    fairseq_lot("diagnose", folder, "--path", fitted, "--sentences", 4, "--json", tmp_path / "heads.json")
    assert {row["attention"] for row in json.loads((tmp_path / "heads.json").read_text())["rows"]} == {"lot", "softmax"}

    sweep = ("sweep", folder, "--path", base, "--try", "lot --lot-num-pivots 4", "--no-calibration", "--beam", 1)
    fairseq_lot(*sweep, "--out", tmp_path / "sweep")
    point = json.loads((tmp_path / "sweep" / "sweep.jsonl").read_text().splitlines()[0])
    output = generate(folder, base, "--beam", 1, "--remove-bpe", "@@ ", "--max-len-b", 200)
    hypotheses, targets = ([row[-1] for row in fields(output, kind).values()] for kind in "HT")
    assert len(set(hypotheses)) > 1, "the model says more than one sentence"
    (of_base,) = (tmp_path / "sweep" / "work").iterdir()
    assert of_base.read_text(encoding="utf-8").splitlines() == hypotheses
    expected = BLEU(tokenize="none", force=True).corpus_score(hypotheses, [targets]).score
    assert point["bleu"]["score"] == round(expected, 2)
    text = (data / "text" / "test.en").read_text(encoding="utf-8").splitlines()
    assert [x == y for x, y in zip(targets, text, strict=True)].count(True) > 50, "pieces are joined to words"

    page = tmp_path / "report.html"
    fairseq_lot("report", "--path", fitted, "--data", folder, "--split", "test", "--out", page)
    sentences = maps_of(page)["sentences"]
    known = Dictionary.load(str(folder / "dict.de.txt")).indices
    lines = (classic / "bpe" / "test.de").read_text(encoding="utf-8").splitlines()[:5]
    assert [sentence["source"] for sentence in sentences] == [
        [*(piece if piece in known else "<unk>" for piece in line.split()), "</s>"] for line in lines
    ]
    assert not any("@@" in sentence["translation"] for sentence in sentences)
    capsys.readouterr()
    sentences = (data / "text" / "test.de").read_text(encoding="utf-8").splitlines()[:3]
    words = ("translate", "--path", base, "--beam", 1)
    refuse(capsys, *words, sentences[0], naming=[folder, "has no code", "--bpe-codes"])
    codes = ("--bpe-codes", classic / "bpe" / "code")
    fairseq_lot(*words, *codes, "--tokenised", "--", *sentences)
    assert capsys.readouterr().out.splitlines() == hypotheses[:3]
    raw = MosesDetokenizer("de").detokenize(sentences[0].split())
    fairseq_lot(*words, *codes, "--", raw[0].upper() + raw[1:])
    (translated,) = capsys.readouterr().out.splitlines()
    assert translated == MosesDetokenizer("en").detokenize(hypotheses[0].split())
    assert contents(folder) == before


def test_codes_in_the_folder_and_a_report_of_typed_sentences(classic, base, tmp_path):
    folder = shutil.copytree(classic / "bin", tmp_path / "bin")
    shutil.copy(classic / "bpe" / "code", folder)
    (tmp_path / "lines.de").write_text("Der alte Mann schläft.\n", encoding="utf-8")
    words = ("--data", folder, "--sentences", tmp_path / "lines.de", "--out", tmp_path / "report.html")
    fairseq_lot("report", "--path", base, *words)
    (sentence,) = maps_of(tmp_path / "report.html")["sentences"]
    assert " ".join(sentence["source"]).replace("@@ ", "") == "der alte mann schläft . </s>"


def test_a_model_of_the_opposite_direction_is_accepted(classic, tmp_path):
    """fairseq can train English to German on a folder that was made for German to English."""
    checkpoint = train(classic / "bin", tmp_path, *TINY, updates=1, languages=("-s", "en", "-t", "de"))
    fairseq_lot("check", classic / "bin", "--path", checkpoint)
    fairseq_lot("diagnose", classic / "bin", "--path", checkpoint, "--sentences", 2, "--json", tmp_path / "heads.json")
    assert json.loads((tmp_path / "heads.json").read_text())["sentences"] == 2
