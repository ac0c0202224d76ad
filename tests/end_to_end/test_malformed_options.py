"""Options with meaningless values: every command refuses them with one line and writes nothing."""

import pytest

from tests.end_to_end.conftest import contents, fairseq_lot, refuse

HUGE = 10**15
FIT = [
    *[("--steps", x) for x in (0, -1, "many", 1.5)],
    *[("--learning-rate", x) for x in (0, -1, "nan", "inf", "fast")],
    *[("--max-tokens", x) for x in (0, -5, "all")],
    *[("--held-out", x) for x in (0, -1, 151, HUGE, "some")],
    ("--joint-steps", -1),
    *[("--seed", x) for x in (-1, "x", 0.5)],
    *[("--split", x) for x in ("magic", "", "../test")],
    ("--magic", 1),
]
SWAP = [
    *[("--attention", x) for x in ("", "LOT", "nystrom")],
    ("--attention", "lot", "--lot-pivots", 3),
    ("--attention", "lot", "--sinkhorn-epsilon", 1),
    *[("--attention", "lot", "--lot-num-pivots", x) for x in (0, -3, "3.5", "x", HUGE)],
    ("--attention", "lot", "--lot-seed", 10**17),
    *[("--attention", "lot", "--lot-num-updates", x) for x in (0, -1, "inf")],
    *[("--attention", "lot", "--lot-epsilon", x) for x in (0, -1, "1e-40", "nan", "inf", "1e999")],
    *[("--attention", "sinkhorn", "--sinkhorn-tolerance", x) for x in (-1, "nan")],
    *[("--attention", "esp", "--esp-num-slices", x) for x in (0, -1, HUGE)],
    *[("--attention", "esp", "--esp-sort-temperature", x) for x in (0, "nan")],
    *[("--attention", "lot", "--attention-sites", x) for x in ("nowhere", "encoder;cross", "encoder,all")],
    ("--attention", "lot", "--attention-sites", "cross", "--lot-query-updates", 5),
    ("--attention", "sinkhorn", "--attention-sites", "decoder"),
    ("--out", "/proc/no/lot.pt"),
    ("--path", "absent.pt"),
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
    *[("--try", f"lot {x}") for x in ("--lot-num-pivots 0", "--esp-hard true")],
    ("--try", "sinkhorn --attention-sites decoder"),
]


TOKENISE = [
    *[("--max-ratio", x) for x in (0, -1, "nan", "x")],
    *[("--max-tokens", x) for x in (0, -1, "x")],
    *[("--source", x) for x in ("", "xx", "../de", "en")],
]
ENCODE = [
    *[("--vocab-size", x) for x in (0, -1, 5, 32_000, HUGE, "x")],
    *[("--threads", x) for x in (0, -1, "x")],
    *[("--bpe", x) for x in ("", "magic")],
]
WRONG = {
    "calibrate": FIT,
    "swap": SWAP,
    "swap and calibrate": [("--steps", 0), ("--learning-rate", "nan"), ("--held-out", HUGE), ("--split", "magic")],
    "diagnose": DIAGNOSE,
    "sweep": SWEEP,
    "tokenise": TOKENISE,
    "encode": ENCODE,
}
GENERAL = ["", "magic", "--magic", "swap", "score", "table", "check", "diagnose data", "diagnose --path base.pt"]
GENERAL += ["iwslt14 --archive nowhere.tgz --out out", "table nowhere.jsonl", "table /", "check nowhere"]


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """A function that runs a command in an empty folder; it must refuse, name the options and write nothing."""
    monkeypatch.chdir(tmp_path)

    def refused(words, options=()):
        line = refuse(capsys, *words, *options)
        named = [word for word in " ".join(map(str, options)).split() if len(word.strip()) > 1 and not word.isdigit()]
        assert not named or any(word in line or word.replace("-", "_").strip("_") in line for word in named), line
        assert list(tmp_path.iterdir()) == []

    return refused


@pytest.fixture(scope="session")
def commands(data, stock_checkpoint, lot_checkpoint):
    """Valid words for each command."""
    pair = ("--source", "de", "--target", "en")
    folder, swap = data / "bin", ("swap", "--path", stock_checkpoint, "--out", "out.pt")
    return {
        "calibrate": ("calibrate", folder, "--path", lot_checkpoint, "--out", "out.pt"),
        "swap": swap,
        "swap and calibrate": (*swap, "--attention", "lot", "--calibrate", folder),
        "diagnose": ("diagnose", folder, "--path", lot_checkpoint, "--json", "out.json"),
        "sweep": ("sweep", folder, "--path", stock_checkpoint, "--out", "out", "--try", "softmax", "--no-bleu"),
        "tokenise": ("tokenise", "--raw", data / "raw", "--out", "out", *pair),
        "encode": ("encode", "--text", data / "text", "--vocab-size", 300, "--out", "out", *pair),
    }


IN_ORDER = {
    "calibrate": ("--steps", 1, "--joint-steps", 0, "--held-out", 8),
    "swap": ("--attention", "lot", "--no-calibrate"),
    "swap and calibrate": ("--steps", 1, "--joint-steps", 0, "--held-out", 8),
    "diagnose": ("--sentences", 4),
    "tokenise": ("--no-clean",),
}


@pytest.mark.parametrize("command", WRONG)
def test_without_the_wrong_option_they_work(command, commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fairseq_lot(*commands[command], *IN_ORDER.get(command, ()))
    assert contents(tmp_path)


@pytest.mark.parametrize(
    "command, options", [(command, options) for command, cases in WRONG.items() for options in cases], ids=str
)
def test_wrong_options_are_refused(command, options, refused, commands):
    refused(commands[command], options)


@pytest.mark.parametrize("words", GENERAL)
def test_wrong_words_are_refused(words, refused):
    refused(words.split())
