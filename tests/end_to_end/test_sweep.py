"""``fairseq-lot sweep`` as a user runs it: it measures each point once and resumes."""

import json
import shutil

import pytest

from fairseq_lot.attention.near_far import EXACT_UP_TO
from fairseq_lot.plug_and_play import sweep
from fairseq_lot.plug_and_play.points import read_points, spelt
from fairseq_lot.plug_and_play.swap import options_of_swap
from tests.end_to_end.conftest import contents, edited, fairseq_lot, refuse
from tests.plug_and_play.test_sweep import bleu
from tests.plug_and_play.test_sweep import point as made_up

OURS = {"arch": "lot_transformer", "_name": "lot_transformer"}


@pytest.fixture
def measured(capsys):
    """A function that runs a sweep in this process; it returns its standard output and its points."""

    def measured(*words):
        capsys.readouterr()
        fairseq_lot(*words)
        file = words[words.index("--out") + 1] / "sweep.jsonl"
        return capsys.readouterr().out, [json.loads(line) for line in file.read_text().splitlines()]

    return measured


def test_sweep_measures_resumes_and_extends(data, stock_checkpoint, diff_checkpoint, tmp_path, capsys, measured):
    folder, out = data / "bin", tmp_path / "sweep"
    if not (folder / "text").exists():
        (folder / "text").symlink_to(data / "text")
    words = ["sweep", folder, "--path", stock_checkpoint, "--out", out, "--steps", 3, "--held-out", 8]
    words += ["--joint-steps", 2, "--beam", 1, "--try", "lot --lot-num-pivots 4", "--try", "sinkhorn"]
    quick, points = measured(*words, "--no-bleu")
    keys = [(point["attention"], point["options"], point["calibrated_on"]) for point in points]
    assert keys == [
        ("softmax", {}, ""),
        ("lot", {"lot_num_pivots": 4}, ""),
        ("sinkhorn", {}, ""),
        ("lot", {"lot_num_pivots": 4}, "pieces"),
    ]
    assert all(point["bleu"] is None and 1 < point["loss"] < 20 for point in points)
    targets = (data / "bpe" / "valid.en").read_text(encoding="utf-8").splitlines()
    assert points[0]["tokens"] == sum(len(line.split()) + 1 for line in targets)
    assert len({point["loss"] for point in points}) == 4
    softmax, _, sinkhorn, _ = (point["balance"] for point in points)
    assert softmax.keys() == {"imbalance", "marginal_error", "mean_shift"}
    assert 0 < sinkhorn["imbalance"] < softmax["imbalance"]  # after 15 updates keys receive more equal shares
    for point in points:
        of_ranges = point["by_length"].values()
        assert sum(loss["nats"] for loss in of_ranges) / sum(loss["tokens"] for loss in of_ranges) == point["loss"]
        assert sum(loss["tokens"] for loss in of_ranges) == point["tokens"]
        assert sum(loss["tokens"] > 0 for loss in of_ranges) > 1
    tables = [(out / name).read_text() for name in ("sweep.md", "balance.md")]
    assert "".join(tables) == quick and "up to 64 sentences" in tables[1]  # here there are 60

    again, after = measured(*words, "--no-bleu", "--try", "esp --esp-hard true")
    assert after[:4] == points and after[4]["attention"] == "esp" and again != quick

    scored, after = measured(*words)
    rows = {(point["attention"], point["calibrated_on"]): point for point in after}
    assert rows["softmax", ""]["bleu"]["delta"] is None
    assert all((row["bleu"] is None) == (row["sacrebleu"] is None) == (row["chrf"] is None) for row in rows.values())
    assert rows["lot", "pieces"]["bleu"]["base"] == rows["softmax", ""]["bleu"]["score"]
    assert rows["lot", "pieces"]["loss"] == points[3]["loss"] and "Signature" in scored
    assert rows["esp", ""]["bleu"] is None

    others = words[: words.index("--out")] + [
        "--out",
        tmp_path / "others",
        "--no-calibration",
        "--no-bleu",
        "--try",
        "lot",
    ]
    of_two = measured(*others, "--valid-subset", "valid,test")[1][0]
    texts = [(data / "bpe" / f"{split}.en").read_text(encoding="utf-8").splitlines() for split in ("valid", "test")]
    assert of_two["tokens"] == sum(len(line.split()) + 1 for text in texts for line in text)

    kept = contents(out)
    for more in (("--steps", 4), ("--beam", 2), ("--sentences", 9), ("--valid-subset", "test")):
        refuse(capsys, *words, *more, naming=["has points with ", ", not ", "give another --out"])
    refuse(capsys, *words, "--path", diff_checkpoint, naming=["(epoch unknown)", "or another --out"])
    refuse(capsys, *words, "--split", "valid", naming=["--split valid needs a data folder", "sweep: with --text"])
    assert contents(out) == kept


def test_a_sweep_calibrates_on_random_pieces_and_on_text(data, stock_checkpoint, tmp_path, measured):
    words = ["sweep", data / "bin", "--path", stock_checkpoint, "--out", tmp_path / "sweep", "--no-bleu", "--text"]
    words += ["--try", "lot --lot-num-pivots 4", "--steps", 3, "--joint-steps", 2, "--held-out", 8, "--longest", 90]
    _, points = measured(*words)
    assert [point["calibrated_on"] for point in points] == ["", "", "pieces", "text"]
    assert len({point["loss"] for point in points}) == 4


@pytest.mark.slow
def test_near_far_is_swept_as_it_is_swapped_and_its_table_says_so(data, stock_checkpoint, tmp_path, measured, capsys):
    words = ["sweep", data / "bin", "--path", stock_checkpoint, "--out", tmp_path / "sweep", "--no-bleu", "--steps", 2]
    words += ["--joint-steps", 1, "--try", "near_far --near-far-window 1"]
    words += ["--try", "near_far --near-far-window 1 --near-far-exact-up-to 0"]
    _, points = measured(*words)
    assert [(p["options"].get("near_far_exact_up_to"), p["calibrated_on"]) for p in points] == [
        (None, ""), (EXACT_UP_TO, ""), (0, ""), (0, "pieces"),
    ], "a calibration would change no sentence of up to so many tokens"  # fmt: skip
    base, *others = (point["loss"] for point in points)
    assert others[0] == pytest.approx(base, rel=1e-6) and abs(others[1] / base - 1) > 1e-4
    table = (tmp_path / "sweep" / "sweep.md").read_text()
    assert f"--near-far-exact-up-to {EXACT_UP_TO}" in table
    assert f"near_far is exact on sentences of up to {EXACT_UP_TO} tokens: with one update" in table
    way = "near_far --near-far-window 1 --near-far-exact-up-to 9"  # some sentences are longer
    longer = (*words[:4], "--out", tmp_path / "other", "--try", way, "--longest", 8)
    refuse(capsys, *longer, naming=[f"--try '{way}': --longest 8 is too short"])


@pytest.mark.slow
def test_a_sweep_without_ways_tries_the_usual_ones(data, stock_checkpoint, tmp_path, capsys):
    """They are scored and tested against the base; a second call with another way adds it."""
    base = tmp_path / "base.pt"
    shutil.copy(stock_checkpoint, base)
    words = ("sweep", data / "bin", "--path", base, "--steps", 2, "--joint-steps", 1, "--held-out", 8, "--beam", 1)
    fairseq_lot(*words)
    points = read_points(tmp_path / "base.sweep" / "sweep.jsonl")
    assert [(point.words, point.calibrated_on) for point in points] == [
        ("softmax", ""),
        ("sinkhorn", ""),
        ("sinkhorn --sinkhorn-epsilon 1 --sinkhorn-num-updates 3", ""),
        ("esp", ""),
        ("lot", ""),
        (f"near_far {spelt(options_of_swap('near_far'))}", ""),
        ("lot", "pieces"),
    ]
    assert all(0 < point.bleu.p <= 1 and point.bleu.base == points[0].bleu.score for point in points[1:])
    near_far = points[5].bleu
    assert (near_far.score, near_far.delta, near_far.p) == (points[0].bleu.score, 0, 1)
    told = capsys.readouterr().out
    assert "tok:none" in told and "near_far is exact on sentences" in told and "(p = 1.0000)" in told
    fairseq_lot(*words, "--try", "set", "--no-bleu")
    assert read_points(tmp_path / "base.sweep" / "sweep.jsonl")[:7] == points
    assert [point.attention for point in read_points(tmp_path / "base.sweep" / "sweep.jsonl")[7:]] == ["set", "set"]
    assert told.splitlines()[2] in capsys.readouterr().out


@pytest.mark.slow
def test_usual_ways_that_cannot_stand_in_the_base_are_left_out(data, stock_checkpoint, tmp_path, capsys):
    with edited(stock_checkpoint, tmp_path / "alibi.pt") as state:
        own = {"attention": "softmax", "softmax_prior": "alibi", "attention_sites": "encoder,decoder"}
        vars(state.model_args).update(OURS | own)
    words = ("sweep", data / "bin", "--path", tmp_path / "alibi.pt", "--no-bleu", "--no-calibration", "--sentences", 9)
    fairseq_lot(*words)
    told = capsys.readouterr().err.splitlines()
    left_out = [line.partition(" is left out: ")[0] for line in told if " is left out: " in line]
    assert left_out == ["sinkhorn", "sinkhorn --sinkhorn-epsilon 1 --sinkhorn-num-updates 3", "esp"]
    points = read_points(tmp_path / "alibi.sweep" / "sweep.jsonl")
    assert [point.attention for point in points] == ["softmax", "lot", "near_far"]
    assert all(point.options["attention_sites"] == "encoder,decoder" for point in points)
    both = (*words, "--out", tmp_path / "other")
    refuse(capsys, *both, "--try", "esp", naming=["--try 'esp': ", "'decoder' site"])
    assert not (tmp_path / "other").exists()
    refuse(capsys, *words[:4], "--out", tmp_path / "other", "--longest", 9999, naming=["not --longest 9999"])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("others", [(), ("stock.pt",)])
def test_a_base_that_was_not_trained_with_softmax_is_refused(others, data, stock_checkpoint, tmp_path, capsys):
    """It is refused alone and among other bases."""
    shutil.copy(stock_checkpoint, tmp_path / "stock.pt")
    others = [tmp_path / other for other in others]
    with edited(stock_checkpoint, tmp_path / "set.pt") as state:
        vars(state.model_args).update(OURS, attention="set")
    words = ("sweep", data / "bin", "--path", *others, tmp_path / "set.pt", "--out", tmp_path / "out", "--try", "lot")
    refuse(capsys, *words, naming=["set.pt was trained with set", "before any swap"])


@pytest.mark.slow
def test_a_base_with_a_prior_is_swapped_from_its_own_softmax(
    data, stock_checkpoint, epochs, tmp_path, capsys, measured
):
    for epoch in (1, 2):
        with edited(epochs[epoch], tmp_path / f"alibi{epoch}.pt") as state:
            own = {"attention": "softmax", "softmax_prior": "alibi", "attention_sites": "decoder,encoder"}
            vars(state.model_args).update(OURS | own)
    out, drawn = tmp_path / "out", "--attention-sites encoder,decoder"
    words = ["sweep", data / "bin", "--out", out, "--sentences", 20, "--steps", 2, "--joint-steps", 1, "--held-out", 8]
    words += [
        "--beam",
        1,
        "--try",
        f"near_far --near-far-window 99 --near-far-prior alibi --near-far-exact-up-to 0 {drawn}",
        "--try",
        f"near_far --near-far-exact-up-to 0 {drawn}",
    ]
    words += ["--try", "softmax", "--try", "softmax --softmax-prior alibi", "--try", "lot --attention-sites encoder"]
    _, points = measured(*words, "--path", tmp_path / "alibi2.pt")
    ways = [(point["attention"], point["options"].get("attention_sites"), point["calibrated_on"]) for point in points]
    both = "encoder,decoder"
    swaps = [("near_far", both), ("near_far", both), ("softmax", both), ("lot", "encoder")]
    of_base = [(*way, "") for way in [("softmax", both), *swaps]]
    assert ways == [*of_base, *((*swaps[number], "pieces") for number in (0, 1, 3))]
    # a window that holds the whole sentence leaves nothing to approximate
    assert points[1]["loss"] == pytest.approx(points[0]["loss"], rel=1e-5) != points[2]["loss"]
    assert points[0]["bleu"]["delta"] is None and points[3]["loss"] != points[0]["loss"]
    assert points[1]["bleu"]["base"] == points[0]["bleu"]["score"]
    first = (out / "sweep.md").read_text().splitlines()[2]
    assert first.startswith(f"| softmax | {drawn} --softmax-prior alibi | – | ")
    for base in (epochs[1], tmp_path / "alibi1.pt"):
        paths = ("--path", tmp_path / "alibi2.pt", base)
        if base == epochs[1]:
            refuse(capsys, *words, *paths, naming=["checkpoint1.pt (plain)", f"alibi2.pt ({drawn} --softmax-prior"])
        else:
            assert len(measured(*words, "--no-bleu", *paths)[1]) == 2 * len(points)
    refuse(capsys, *words, "--path", epochs[4], naming=["checkpoint4.pt (plain)", f"a point in {out} ({drawn} --soft"])


@pytest.fixture
def epochs(stock_checkpoint, tmp_path):
    """Checkpoints that stand in for several epochs: the stock model with weights shrunk more for earlier epochs."""
    paths = {}
    for epoch in (1, 2, 4):
        paths[epoch] = tmp_path / f"checkpoint{epoch}.pt"
        with edited(stock_checkpoint, paths[epoch]) as state:
            state["extra_state"]["train_iterator"].update(epoch=epoch + 1, iterations_in_epoch=0)
            state["model"] = {name: value * (1 - 0.5 / epoch) for name, value in state["model"].items()}
    return paths


def test_each_base_has_a_file_for_its_translations_and_is_measured_once(data, epochs, tmp_path, monkeypatch):
    calls = []

    def measured(base, state, way, *, translations, **how):
        calls.append((base.epoch, translations))
        return made_up(way.attention, epoch=base.epoch, base=base.sum, bleu=bleu(30.0))

    monkeypatch.setattr(sweep, "measured", measured)
    words = ("sweep", data / "bin", "--out", tmp_path / "out", "--try", "sinkhorn", "--path", epochs[1], epochs[2])
    for _ in range(2):
        fairseq_lot(*words)
    assert [epoch for epoch, _ in calls] == [1, 1, 2, 2] and len({*calls}) == len({file for _, file in calls}) == 2


@pytest.mark.slow
def test_several_epochs_of_one_training_share_a_table(data, stock_checkpoint, epochs, tmp_path, capsys, measured):
    out = tmp_path / "sweep"
    words = ["sweep", data / "bin", "--out", out, "--sentences", 20, "--no-bleu", "--try", "lot --lot-num-pivots 4"]
    words += ["--try", "sinkhorn", "--steps", 2, "--joint-steps", 1, "--held-out", 8]
    told, points = measured(*words, "--path", epochs[2], epochs[1], epochs[2])
    ways = [("softmax", ""), ("lot", ""), ("sinkhorn", ""), ("lot", "pieces")]
    found = [(point["epoch"], point["attention"], point["calibrated_on"]) for point in points]
    assert found == [(epoch, *way) for epoch in (1, 2) for way in ways]
    assert len({point["loss"] for point in points}) == 8 and len({point["tokens"] for point in points}) == 1
    table, balance = ((out / name).read_text() for name in ("sweep.md", "balance.md"))
    assert table + balance == told and "<svg" in (out / "sweep.svg").read_text()
    assert "| Epoch 1 | Epoch 2 |" in table and "| Epoch 1 | Epoch 2 |" in balance
    assert all(f"| {measure} | lot " in balance for measure in ("Δ(A)", "marginal error", "mean shift"))

    _, after = measured(*words, "--path", epochs[4], "--no-calibration")
    assert after[:8] == points and [point["epoch"] for point in after[8:]] == [4, 4, 4]
    kept = contents(out)
    fairseq_lot(*words, "--path", *epochs.values(), "--no-calibration")
    assert contents(out) == kept

    other = tmp_path / "other.pt"
    with edited(epochs[2], other) as state:
        state["another"] = 1
    capsys.readouterr()
    for more, words_of_refusal in (
        (["--path", other], f"{other} (epoch 2)"),
        (["--path", other, epochs[2]], "(epoch 2)"),
        (["--path", stock_checkpoint], f"{stock_checkpoint} (epoch unknown)"),
        (["--path", epochs[1], "--sentences", 21], "sentences 20, not 21"),
        (["--path", epochs[1], "--sentences", 0], "--sentences must be at least 1"),
        (["--path", epochs[1], "--try", "lots", "--no-calibration"], "--try 'lots': unknown attention mechanism"),
        (["--path", epochs[1], "--try", "lot --attention-sites no"], "--try 'lot --attention-sites no': unknown att"),
        (["--path", epochs[1], "--try", "lot --lot-num-pivots 0"], "--try 'lot --lot-num-pivots 0': lot attention: "),
    ):
        refuse(capsys, *words, *more, naming=[words_of_refusal])
    assert contents(out) == kept


def test_a_set_with_too_long_sentences_has_no_point(data, stock_checkpoint, tmp_path, capsys, monkeypatch):
    """A too long sentence in the validation set (loss) or in the test set (BLEU) is refused before any fit."""
    monkeypatch.setattr(sweep, "measured", None)
    out = tmp_path / "out"
    words = ("sweep", data / "bin", "--out", out, "--try", "sinkhorn", "--path", tmp_path / "short.pt")

    def refused(limits, *more, naming):
        with edited(stock_checkpoint, tmp_path / "short.pt") as state:
            vars(state.model_args).update(limits)
        refuse(capsys, *words, *more, naming=naming)
        assert contents(tmp_path).keys() == {tmp_path / "short.pt"}

    files = [data / "bpe" / f"{split}.de" for split in ("valid", "test")]
    longest = [max(len(line.split()) for line in file.read_text(encoding="utf-8").splitlines()) for file in files]
    ways_out = ["from both sides", "train with a larger --max-source-positions"]
    refused({"max_source_positions": min(longest)}, naming=["the model takes", *ways_out])
    refused({"max_target_positions": 20}, "--no-bleu", naming=["split valid: target", "takes 20", "--max-target-pos"])
