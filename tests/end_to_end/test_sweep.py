"""``fairseq-lot sweep`` as a user runs it: everything once, then nothing again."""

import json

import pytest

from tests.end_to_end.conftest import contents, fairseq_lot, refuse


@pytest.fixture
def measured(capsys):
    """Run a sweep in this process; returns its standard output."""

    def measured(*words):
        capsys.readouterr()
        fairseq_lot(*words)
        return capsys.readouterr().out

    return measured


def test_sweep_measures_resumes_and_extends(data, stock_checkpoint, diff_checkpoint, tmp_path, capsys, measured):
    folder = data / "bin"
    if not (folder / "text").exists():
        (folder / "text").symlink_to(data / "text")
    out = tmp_path / "sweep"
    words = ["sweep", folder, "--path", stock_checkpoint, "--out", out, "--steps", 3, "--held-out", 8]
    words += ["--joint-steps", 2]
    words += ["--beam", 1, "--try", "lot --lot-num-pivots 4", "--try", "sinkhorn"]
    quick = measured(*words, "--no-bleu")
    points = [json.loads(line) for line in (out / "sweep.jsonl").read_text().splitlines()]
    keys = [(point["attention"], point["options"], point["calibrated"]) for point in points]
    assert keys == [
        ("softmax", "", False),
        ("lot", "--lot-num-pivots 4", False),
        ("sinkhorn", "", False),
        ("lot", "--lot-num-pivots 4", True),
    ]
    assert all(point["bleu"] is None and 1 < point["loss"] < 20 for point in points)
    assert len({point["loss"] for point in points}) == 4
    assert (out / "sweep.md").read_text() == quick and "<svg" in (out / "sweep.svg").read_text()

    again = measured(*words, "--no-bleu", "--try", "esp --esp-hard true")
    after = [json.loads(line) for line in (out / "sweep.jsonl").read_text().splitlines()]
    assert after[:4] == points and after[4]["attention"] == "esp" and again != quick

    scored = measured(*words)
    rows = {
        (p["attention"], p["calibrated"]): p for p in map(json.loads, (out / "sweep.jsonl").read_text().splitlines())
    }
    assert rows["softmax", False]["bleu"]["delta"] is None
    assert rows["lot", True]["bleu"]["base"] == rows["softmax", False]["bleu"]["score"]
    assert rows["lot", True]["loss"] == points[3]["loss"] and "Signature" in scored
    assert rows["esp", False]["bleu"] is None

    kept = contents(out)
    for more in (("--steps", 4), ("--beam", 2), ("--sentences", 9), ("--path", diff_checkpoint)):
        refuse(capsys, *words, *more, naming=["holds points with another", "give another --out"])
    (out / "settings.json").write_text("[1]")
    refuse(capsys, *words, naming=["settings.json"])
    (out / "settings.json").write_bytes(kept[out / "settings.json"])
    assert contents(out) == kept


def test_a_wrong_way_is_known_before_anything_is_measured(data, stock_checkpoint, tmp_path, capsys):
    out = tmp_path / "sweep"
    words = ["sweep", data / "bin", "--path", stock_checkpoint, "--out", out, "--try", "lot"]
    for way, message in {
        "lot --lot-num-pivots 0": "num_pivots must be at least 1, got 0",
        "lot --esp-hard true": "does not belong to lot attention",
        "lots": "unknown attention mechanism 'lots'",
        "sinkhorn --attention-sites decoder": "couples the queries",
    }.items():
        refuse(capsys, *words, "--try", way, naming=[message])
        assert not out.exists()
