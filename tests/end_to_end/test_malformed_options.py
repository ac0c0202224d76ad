"""Options without a meaning: every command refuses them with one line and writes nothing."""

import pytest

from tests.end_to_end.conftest import contents, refuse

HUGE = 10**15
FIT = [
    *[("--steps", x) for x in (0, -1, "many", 1.5)],
    *[("--learning-rate", x) for x in (0, -1, "nan", "inf", "fast")],
    *[("--max-tokens", x) for x in (0, -5, "all")],
    *[("--held-out", x) for x in (0, -1, HUGE, "some")],
    *[("--seed", x) for x in (-1, "x", 0.5)],
    *[("--split", x) for x in ("magic", "", "../test")],
    ("--magic", 1),
]
SWAP = [
    ("--attention", ""),
    ("--attention", "LOT"),
    *[("--attention", "lot", "--lot-num-pivots", x) for x in (0, -3, "3.5", "x", HUGE)],
    *[("--attention", "lot", "--lot-num-updates", x) for x in (0, -1, "inf")],
    *[("--attention", "lot", "--lot-epsilon", x) for x in (0, -1, "nan", "inf", "1e999")],
    *[("--attention", "sinkhorn", "--sinkhorn-tolerance", x) for x in (-1, "nan")],
    *[("--attention", "esp", "--esp-num-slices", x) for x in (0, -1, HUGE)],
    *[("--attention", "esp", "--esp-sort-temperature", x) for x in (0, "nan")],
    *[("--attention", "lot", "--attention-sites", x) for x in ("nowhere", "encoder;cross", "cross,decoder,all")],
]
DIAGNOSE = [
    *[("--sentences", x) for x in (0, -1, "all")],
    *[("--batch", x) for x in (0, -1)],
    *[("--perturbations", x) for x in (-1, "x")],
    *[("--seed", x) for x in (-1, "x")],
    *[("--split", x) for x in ("magic", "")],
]
SWEEP = [
    *[("--beam", x) for x in (0, -1, "wide")],
    *[("--try", x) for x in ("", "magic", "lot --magic 1", "lot --lot-num-pivots 1/x", "lot 'unclosed", "lot 3")],
]
SCORE = [
    *[("--seed", x) for x in ("x", 1.5)],
    *[("--stage", x) for x in ("", "later")],
    *[("--bootstrap-samples", x) for x in (0, -1, "x")],
    *[("--bootstrap-seed", x) for x in (-1, "x")],
    *[("--seconds", x) for x in (-1, "nan", "inf", "long")],
    *[("--target-lang", x) for x in ("", "../en", "1", "english")],
    *[(f"--{x}", " ") for x in ("dataset", "architecture", "backbone", "mechanism")],
]
CORPUS = [
    *[("toy-corpus", "--train", x) for x in (0, -1, HUGE, "x")],
    *[("toy-corpus", "--seed", x) for x in (-1, "x")],
    *[("tokenise", "--max-ratio", x) for x in (0, -1, "nan", "x")],
    *[("tokenise", "--max-tokens", x) for x in (0, -1, "x")],
    *[("tokenise", "--source", x) for x in ("", "xx", "../de")],
    *[("encode", "--vocab-size", x) for x in (0, -1, 5, 2**31 - 1, HUGE, "x")],
    *[("encode", "--threads", x) for x in (0, -1, "x")],
]
GENERAL = [
    (),
    ("magic",),
    ("--magic",),
    ("swap",),
    ("score",),
    ("table",),
    ("check",),
    ("iwslt14", "--archive", "nowhere.tgz", "--out", "out"),
    ("table", "nowhere.jsonl"),
    ("table", "/"),
    ("check", "nowhere"),
]


def named(cases):
    return pytest.mark.parametrize("options", cases, ids=lambda words: "-".join(map(str, words)) or "none")


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Call a command in an empty folder; it must be refused, and the folder still be empty."""
    monkeypatch.chdir(tmp_path)

    def refused(*words):
        refuse(capsys, *words)
        assert contents(tmp_path) == {} and list(tmp_path.iterdir()) == []

    return refused


@named(FIT)
def test_calibrate(options, refused, data, stock_checkpoint):
    refused("calibrate", data / "bin", "--path", stock_checkpoint, "--out", "out.pt", *options)


@named([*SWAP, *[("--attention", "lot", "--calibrate", "nowhere", *words) for words in FIT]])
def test_swap(options, refused, stock_checkpoint):
    refused("swap", "--path", stock_checkpoint, "--out", "out.pt", *options)


@named(DIAGNOSE)
def test_diagnose(options, refused, data, stock_checkpoint):
    refused("diagnose", data / "bin", "--path", stock_checkpoint, "--json", "out.json", *options)


@named(SWEEP)
def test_sweep(options, refused, data, stock_checkpoint):
    refused("sweep", data / "bin", "--path", stock_checkpoint, "--out", "out", "--try", "softmax", *options)


@named(SCORE)
def test_score(options, refused, data):
    text = data / "text" / "test.en"
    labels = [word for name in ("dataset", "architecture", "backbone", "mechanism") for word in (f"--{name}", "x")]
    words = ("--generated", text, "--tokenised-reference", text, "--results", "r.jsonl", "--stage", "base")
    refused("score", *words, *labels, "--seed", 1, *options)


@named(CORPUS)
def test_corpus(options, refused, data):
    folders = {
        "toy-corpus": (),
        "tokenise": ("--raw", data / "raw"),
        "encode": ("--text", data / "text", "--vocab-size", 300),
    }
    command, *words = options
    refused(command, *folders[command], "--out", "out", *words)


@named(GENERAL)
def test_general(options, refused):
    refused(*options)
