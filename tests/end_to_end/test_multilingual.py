"""Every command accepts a model of fairseq's task ``translation_multi_simple_epoch``."""

import json

import pytest
from fairseq_cli.generate import cli_main as fairseq_generate

from fairseq_lot.pretrained.translate import Translator
from tests.end_to_end.conftest import edited, fairseq_lot, fields, in_this_process, refuse, train

TASK = ("--task", "translation_multi_simple_epoch", "--lang-pairs", "de-en,en-de", "--langs", "de,en")
FIT = ("--steps", 4, "--joint-steps", 2, "--held-out", 8)


SYMBOLS = [
    ("--encoder-langtok", "tgt", "--decoder-langtok"),
    pytest.param(("--encoder-langtok", "src"), marks=pytest.mark.slow),
]
one_way = pytest.mark.parametrize("symbols", SYMBOLS[:1], indirect=True)


@pytest.fixture(scope="module", params=SYMBOLS)
def symbols(request):
    """The flags that say where language symbols are inserted."""
    return request.param


@pytest.fixture(scope="module")
def base(symbols, data, tmp_path_factory):
    flags = (*TASK, *symbols, "--arch", "transformer_tiny", "--share-decoder-input-output-embed")
    return train(data / "bin", tmp_path_factory.mktemp("multi"), *flags, updates=80, languages=())


@pytest.mark.parametrize("pair", [("de", "en"), ("en", "de")])
def test_translates_as_fairseq_does(pair, symbols, data, base):
    source, target = pair
    output = in_this_process(
        fairseq_generate, data / "bin", *TASK, *symbols, "-s", source, "-t", target, "--path", base, "--cpu",
        "--beam", 5, "--remove-bpe", "sentencepiece", "--num-workers", 0, "--gen-subset", "valid",
    )  # fmt: skip
    expected = [text for _, text in fields(output, "D").values()]
    sentences = (data / "text" / f"valid.{source}").read_text(encoding="utf-8").splitlines()
    assert Translator(base, languages=pair, tokenised=True).translate(sentences) == expected
    assert len(set(expected)) > 1, "the model says more than one sentence"


@one_way
def test_every_command_accepts_a_multilingual_model(data, base, tmp_path, capsys):
    swapped, calibrated = tmp_path / "swapped.pt", tmp_path / "calibrated.pt"
    fairseq_lot("swap", "--path", base, "--attention", "lot", "--lot-num-pivots", 4, *FIT, "--out", swapped)
    assert "by the dictionary's counts" in capsys.readouterr().out
    fairseq_lot("calibrate", data / "bin", "--path", swapped, *FIT, "--out", calibrated)
    fairseq_lot("check", data / "bin", "--path", calibrated)
    fairseq_lot("diagnose", data / "bin", "--path", calibrated, "--sentences", 5, "--json", tmp_path / "heads.json")
    assert len(json.loads((tmp_path / "heads.json").read_text())) > 0
    fairseq_lot("sweep", data / "bin", "--path", base, "--out", tmp_path / "sweep", "--try", "sinkhorn", "--beam", 1)
    capsys.readouterr()
    words = ("--path", base, "--compare", calibrated, "--sites", "encoder", "--split", "valid", "--data", data / "bin")
    fairseq_lot("report", *words, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000


@one_way
def test_an_unknown_language_and_unsupported_settings_are_refused(data, base, tmp_path, capsys):
    refuse(capsys, "translate", "--path", base, "--source-lang", "de", "--target-lang", "fr", "das", naming=["fr"])
    path = tmp_path / "changed.pt"
    for option, value, naming in (
        ("lang_tok_replacing_bos_eos", True, [path, "--lang-tok-replacing-bos-eos"]),
        ("langs", 5, [path]),
    ):
        with edited(base, path) as state:
            setattr(state["cfg"]["task"], option, value)
        refuse(capsys, "translate", "--path", path, "das", naming=naming)
