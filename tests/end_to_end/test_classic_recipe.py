"""fairseq's own recipe for translation: Moses, subword-nmt, a dictionary for each side, and nothing else in the folder.

With the languages typed and inferred, and in the format of fairseq 0.10 and older: all commands take what it gives.
"""

import base64
import io
import json
import re
import shutil
import zlib

import pytest
import torch
from fairseq.data import Dictionary
from fairseq_cli.preprocess import cli_main as fairseq_preprocess
from sacrebleu.metrics import BLEU
from sacremoses import MosesDetokenizer

from fairseq_lot.pretrained.checkpoint import load_checkpoint, model_args
from tests.end_to_end.conftest import contents, fairseq_lot, generate, in_this_process, refuse, train

pytest.importorskip("subword_nmt", reason="pip install subword-nmt")
pytestmark = pytest.mark.slow

TINY = [
    word
    for stack in ("encoder", "decoder")
    for option, value in {"embed-dim": 64, "ffn-embed-dim": 64, "layers": 2, "attention-heads": 2}.items()
    for word in (f"--{stack}-{option}", value)
] + ["--lr", 2e-3, "--dropout", 0]
QUICK = ("--steps", 4, "--joint-steps", 2, "--held-out", 8)


@pytest.fixture(scope="module")
def classic(data, tmp_path_factory):
    """Its text as Moses tokens, its codes, and a folder with nothing but what fairseq-preprocess wrote."""
    from subword_nmt.apply_bpe import BPE
    from subword_nmt.learn_bpe import learn_bpe

    home = tmp_path_factory.mktemp("classic")
    shutil.copytree(data / "text", home / "text")
    train_text = "".join((home / "text" / f"train.{lang}").read_text(encoding="utf-8") for lang in ("de", "en"))
    codes = io.StringIO()
    learn_bpe(io.StringIO(train_text), codes, 200)
    (home / "my.codes").write_text(codes.getvalue(), encoding="utf-8")
    codes.seek(0)
    bpe = BPE(codes)
    (home / "bpe").mkdir()
    prefixes = []
    for split in ("train", "valid", "test"):
        prefixes += [f"--{split}pref", home / "bpe" / split]
        for lang in ("de", "en"):
            lines = (home / "text" / f"{split}.{lang}").read_text(encoding="utf-8").splitlines()
            encoded = "".join(bpe.process_line(line) + "\n" for line in lines)
            (home / "bpe" / f"{split}.{lang}").write_text(encoded, encoding="utf-8")
    in_this_process(fairseq_preprocess, "-s", "de", "-t", "en", "--destdir", home / "bin", *prefixes)
    assert (home / "bin" / "dict.de.txt").read_bytes() != (home / "bin" / "dict.en.txt").read_bytes()
    return home


def as_early_fairseq_saved(checkpoint, out):
    """The format of fairseq 0.10 and older: one flat namespace and no cfg."""
    state = torch.load(checkpoint, weights_only=True)
    args = state["cfg"]["model"]
    for name, value in state["cfg"]["task"].items():
        if name != "_name":
            setattr(args, name, value)
    args.remove_bpe, args.min_lr = None, -1.0
    kept = ("model", "optimizer_history", "extra_state", "last_optimizer_state")
    torch.save({"args": args, **{name: state[name] for name in kept}}, out)
    return out


def train_tiny(classic, save, *languages):
    flags = ("--arch", "transformer_iwslt_de_en", "--share-decoder-input-output-embed", *TINY)
    return train(classic / "bin", save, *flags, updates=150, languages=languages)


@pytest.fixture(scope="module")
def typed_base(classic, tmp_path_factory):
    return train_tiny(classic, tmp_path_factory.mktemp("typed"), "-s", "de", "-t", "en")


@pytest.fixture(scope="module", params=["typed", "inferred", "early"])
def base(request, classic, typed_base, tmp_path_factory):
    """A base of fairseq's own architecture; its languages were typed or not, its format is today's or an early one."""
    save = tmp_path_factory.mktemp(request.param)
    if request.param == "inferred":
        checkpoint = train_tiny(classic, save)
        assert torch.load(checkpoint, weights_only=True)["cfg"]["task"]["source_lang"] is None
        return checkpoint
    return as_early_fairseq_saved(typed_base, save / "early.pt") if request.param == "early" else typed_base


def translations_of(output, kind):
    """The lines of one kind in fairseq-generate's output, in the order of the corpus."""
    found = [line.split("\t") for line in output.splitlines() if line.startswith(f"{kind}-")]
    return [words[-1] for words in sorted(found, key=lambda words: int(words[0][2:]))]


def maps_of(page):
    """What a report shows."""
    data = re.search('id="maps">([^<]*)<', page.read_text(encoding="utf-8"))[1]
    return json.loads(zlib.decompress(base64.b64decode(data)))


def test_from_swap_to_translate(classic, base, tmp_path, capsys):
    folder, swapped, fitted = classic / "bin", tmp_path / "swapped.pt", tmp_path / "fitted.pt"
    before = contents(folder)
    fairseq_lot("swap", "--path", base, "--attention", "lot", "--lot-num-pivots", 4, *QUICK, "--out", swapped)
    done = model_args(load_checkpoint(swapped), swapped).calibration
    assert "by the dictionary's counts" in done, "its dictionaries are found, whoever names the languages"
    fairseq_lot("calibrate", folder, "--path", swapped, *QUICK, "--out", fitted)
    assert "text of" in model_args(load_checkpoint(fitted), fitted).calibration
    fairseq_lot("check", folder, "--path", fitted)
    fairseq_lot("diagnose", folder, "--path", fitted, "--sentences", 4, "--json", tmp_path / "heads.json")
    assert {row["attention"] for row in json.loads((tmp_path / "heads.json").read_text())["rows"]} == {"lot", "softmax"}

    sweep = ("sweep", folder, "--path", base, "--try", "lot --lot-num-pivots 4", "--no-calibration", "--beam", 1)
    fairseq_lot(*sweep, "--out", tmp_path / "sweep")
    point = json.loads((tmp_path / "sweep" / "sweep.jsonl").read_text().splitlines()[0])
    output = generate(folder, base, "--beam", 1, "--remove-bpe", "@@ ", "--max-len-b", 200)
    hypotheses, targets = (translations_of(output, kind) for kind in "HT")
    assert len(set(hypotheses)) > 1, "the model says more than one sentence"
    (of_base,) = (tmp_path / "sweep" / "work").iterdir()
    assert of_base.read_text(encoding="utf-8").splitlines() == hypotheses
    expected = BLEU(tokenize="none", force=True).corpus_score(hypotheses, [targets]).score
    assert point["bleu"]["score"] == round(expected, 2)
    text = (classic / "text" / "test.en").read_text(encoding="utf-8").splitlines()
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
    sentences = (classic / "text" / "test.de").read_text(encoding="utf-8").splitlines()[:3]
    words = ("translate", "--path", base, "--beam", 1)
    refuse(capsys, *words, sentences[0], naming=[folder, "has no code", "--bpe-codes"])
    codes = ("--bpe-codes", classic / "my.codes")
    fairseq_lot(*words, *codes, "--tokenised", "--", *sentences)
    assert capsys.readouterr().out.splitlines() == hypotheses[:3]
    raw = MosesDetokenizer("de").detokenize(sentences[0].split())
    fairseq_lot(*words, *codes, "--", raw[0].upper() + raw[1:])
    (translated,) = capsys.readouterr().out.splitlines()
    assert translated == MosesDetokenizer("en").detokenize(hypotheses[0].split())
    assert contents(folder) == before


def test_codes_in_the_folder_and_a_report_of_typed_sentences(classic, base, tmp_path):
    folder = tmp_path / "bin"
    shutil.copytree(classic / "bin", folder)
    shutil.copy(classic / "my.codes", folder / "code")
    (tmp_path / "lines.de").write_text("Der alte Mann schläft.\n", encoding="utf-8")
    words = ("--data", folder, "--sentences", tmp_path / "lines.de", "--out", tmp_path / "report.html")
    fairseq_lot("report", "--path", base, *words)
    (sentence,) = maps_of(tmp_path / "report.html")["sentences"]
    assert " ".join(sentence["source"]).replace("@@ ", "") == "der alte mann schläft . </s>"


def test_the_other_way_round(classic, tmp_path):
    """A model from English, of a folder that was made from German, as fairseq trains it."""
    flags = ("--arch", "transformer_iwslt_de_en", *TINY)
    checkpoint = train(classic / "bin", tmp_path, *flags, updates=1, languages=("-s", "en", "-t", "de"))
    fairseq_lot("check", classic / "bin", "--path", checkpoint)
    fairseq_lot("diagnose", classic / "bin", "--path", checkpoint, "--sentences", 2, "--json", tmp_path / "heads.json")
    assert json.loads((tmp_path / "heads.json").read_text())["sentences"] == 2
