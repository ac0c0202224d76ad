"""The cost of a swap as a user sees it, and the places that keep softmax because they would cost too much."""

import json
import re

import pytest
import torch

import fairseq_lot
from fairseq_lot.errors import InputError
from fairseq_lot.plug_and_play.cost import forget_cost
from fairseq_lot.plug_and_play.swap import swap_as_drawn
from fairseq_lot.pretrained.checkpoint import load_checkpoint
from tests.end_to_end.conftest import (
    differing,
    edited,
    generate,
    hypotheses,
    refuse_and_keep,
    weights_of,
)
from tests.end_to_end.conftest import (
    fairseq_lot as command,
)

FIT = ("--steps", 6, "--joint-steps", 2, "--held-out", 16, "--max-tokens", 300)
# a swap that is far from softmax
COLD = ("--attention", "sinkhorn", "--sinkhorn-epsilon", 0.003)
SITES = ("--attention-sites", "encoder,cross,decoder")


def swap(base, out, *words):
    """Run ``fairseq-lot swap``; return the swapped checkpoint."""
    command("swap", "--path", base, "--out", out, *words)
    return load_checkpoint(out)


@pytest.fixture(scope="module")
def everywhere(stock_checkpoint, tmp_path_factory):
    """The path of a model swapped at all sites, with the numbers of its ``--json``."""
    folder = tmp_path_factory.mktemp("everywhere")
    words = ("--attention", "lot", *SITES, *FIT, "--budget", "none", "--json", folder / "cost.json")
    swap(stock_checkpoint, folder / "lot.pt", *words)
    return folder / "lot.pt", json.loads((folder / "cost.json").read_text())


def test_swap_prints_and_saves_its_cost(stock_checkpoint, data, tmp_path, capsys):
    state = swap(stock_checkpoint, tmp_path / "lot.pt", "--attention", "lot", *FIT, "--json", tmp_path / "cost.json")
    said, numbers, args = capsys.readouterr().out, json.loads((tmp_path / "cost.json").read_text()), state.model_args
    found = re.search(
        r"predictions change by (\S+) nats a piece \(KL, on 16 random sentences of \d+ to \d+ pieces that were not "
        r"fitted on; relative squared error of the output: (\S+)\); the most expensive place: (encoder\.\d), (\S+)\n",
        said,
    )
    worst = max(numbers["by_place"], key=numbers["by_place"].get)
    assert [float(found[1]), float(found[2])] == pytest.approx([numbers["nats"], numbers["error"]], abs=5e-5)
    assert found[3] == worst and float(found[4]) == pytest.approx(numbers["by_place"][worst], abs=5e-5)
    assert args.swap_cost == numbers["nats"] > 0 and args.swap_cost_by_place == numbers["by_place"]
    assert args.swap_cost_error == numbers["error"] and args.swap_cost_measured_on == numbers["measured_on"]
    assert numbers["budget"] == 0.2 and numbers["given_up"] == []
    assert len(hypotheses(generate(data / "bin", tmp_path / "lot.pt"))) == 120


def test_calibrate_reports_the_remaining_cost(data, lot_checkpoint, tmp_path, capsys):
    words = ("calibrate", data / "bin", "--path", lot_checkpoint, "--out", tmp_path / "lot.pt", *FIT)
    command(*words, "--json", tmp_path / "cost.json")
    assert f"pieces from {data / 'bin'}, train, that were not fitted on" in capsys.readouterr().out
    numbers, args = json.loads((tmp_path / "cost.json").read_text()), load_checkpoint(tmp_path / "lot.pt").model_args
    assert args.swap_cost == numbers["nats"] and numbers["by_place"].keys() == {"encoder.0", "encoder.1"}


def test_without_a_fit_the_cost_is_measured_too(stock_checkpoint, lot_checkpoint, tmp_path, capsys):
    assert load_checkpoint(lot_checkpoint).model_args.swap_cost > 0
    swap(stock_checkpoint, tmp_path / "same.pt", "--attention", "softmax")
    assert "predictions cannot change: all sentences that the model can read get" in capsys.readouterr().out
    args = load_checkpoint(tmp_path / "same.pt").model_args
    assert (args.swap_cost, args.swap_cost_by_place) == (0.0, {})


def test_near_far_that_is_exact_on_sentences_says_so(stock_checkpoint, tmp_path, capsys):
    words = ("--steps", 1, "--joint-steps", 1, "--near-far-num-features", 4)
    swap(stock_checkpoint, tmp_path / "near_far.pt", *words, "--near-far-exact-up-to", 40)
    said = capsys.readouterr().out
    begin = "sentences of at most 40 tokens get softmax itself, at no cost; of others predictions change by "
    lengths = re.search(begin + r"0\.\d+ nats a piece \(KL, on 64 random sentences of (\d+) to (\d+) pieces", said)
    assert 40 <= int(lengths[1]) < int(lengths[2]) <= 80
    state = swap(stock_checkpoint, tmp_path / "exact.pt", *words, "--near-far-exact-up-to", 1024)
    assert "predictions cannot change: all sentences that the model can read get" in capsys.readouterr().out
    assert state.model_args.swap_cost == 0 and state.model_args.near_far_exact_up_to == 1024


def test_a_second_swap_forgets_what_the_first_one_cost(lot_checkpoint):
    args = swap_as_drawn(lot_checkpoint, attention="sinkhorn").model_args
    assert not any(name.startswith("swap_cost") for name in vars(args))


def test_places_that_exceed_the_budget_keep_softmax(everywhere, stock_checkpoint, data, tmp_path, capsys):
    path, numbers = everywhere
    alone = numbers["by_place"]
    worst = max(alone, key=alone.get)
    assert set(alone) == {f"{site}.{layer}" for site in ("encoder", "cross", "decoder") for layer in (0, 1)}
    words = ("--attention", "lot", *SITES, *FIT, "--budget", alone[worst] * 0.999, "--json", tmp_path / "cost.json")
    state = swap(stock_checkpoint, tmp_path / "lot.pt", *words)
    said, left, args = capsys.readouterr().out, json.loads((tmp_path / "cost.json").read_text()), state.model_args
    assert left["given_up"][0] == worst and left["nats"] <= alone[worst] * 0.999 < left["nats_of_all"]
    assert sorted(args.keep_softmax.split(",")) == sorted(left["given_up"])
    assert left["by_place"].keys() == alone.keys() - set(left["given_up"]) and args.swap_cost == left["nats"]
    rows = dict(re.findall(r"^\| (\w+\.\d) .*\| (softmax|swapped)", said, re.MULTILINE))
    assert rows == {place: "softmax" if place in left["given_up"] else "swapped" for place in alone}
    # places that keep softmax have the base's weights, the others have the fitted ones
    fitted, base, mixed = (weights_of(one) for one in (path, stock_checkpoint, tmp_path / "lot.pt"))
    stacks = {"encoder": "encoder.layers.{}.self_attn", "cross": "decoder.layers.{}.encoder_attn"}
    stacks["decoder"] = "decoder.layers.{}.self_attn"
    for place in alone:
        site, layer = place.split(".")
        inside = stacks[site].format(layer) + "."
        source = base if place in left["given_up"] else fitted
        names = {name for name in mixed if name.startswith(inside)}
        assert names == {name for name in source if name.startswith(inside)}
        assert all(torch.equal(mixed[name], source[name]) for name in names)
    assert args.calibration.startswith("calibrated on random pieces")
    assert len(hypotheses(generate(data / "bin", tmp_path / "lot.pt"))) == 120


def test_places_that_keep_softmax_keep_their_projections(stock_checkpoint, tmp_path):
    words = ("--attention", "lot", *FIT, "--distill-steps", 3)
    for name in ("all", "some"):
        budget = "none" if name == "all" else json.loads((tmp_path / "all.json").read_text())["nats"] * 0.999
        swap(stock_checkpoint, tmp_path / f"{name}.pt", *words, "--budget", budget, "--json", tmp_path / f"{name}.json")
    (kept,) = json.loads((tmp_path / "some.json").read_text())["given_up"]
    base, every, some = (weights_of(path) for path in (stock_checkpoint, tmp_path / "all.pt", tmp_path / "some.pt"))
    for layer in (0, 1):
        name = f"encoder.layers.{layer}.self_attn.v_proj.weight"
        assert not torch.equal(every[name], base[name])
        assert torch.equal(some[name], (base if kept == f"encoder.{layer}" else every)[name])
    assert load_checkpoint(tmp_path / "some.pt").model_args.trained_attention.startswith("lot")


def test_a_swap_without_a_place_within_budget_leaves_no_file(stock_checkpoint, tmp_path, capsys):
    words = ("swap", "--path", stock_checkpoint, *COLD, "--out", tmp_path / "out.pt", "--json", tmp_path / "cost.json")
    naming = [stock_checkpoint, "costs more than 1e-05 nats", "all places would keep softmax", "--budget none"]
    refuse_and_keep(capsys, tmp_path, *words, "--budget", 1e-5, naming=naming)
    for budget in ("many", "nan", "-1", "inf"):
        refuse_and_keep(capsys, tmp_path, *words, "--budget", budget, naming=["--budget must be a number", budget])
    same = ("--json", tmp_path / "out.pt")
    refuse_and_keep(capsys, tmp_path, *words, *same, naming=["--out and --json are both"])
    (tmp_path / "file").touch()
    refuse_and_keep(capsys, tmp_path, *words, "--json", tmp_path / "file" / "x", naming=["File exists"])


@pytest.mark.parametrize("words", [("--budget", "none"), ("--no-calibrate",)])
def test_an_expensive_swap_without_a_budget_warns_in_one_line(words, stock_checkpoint, tmp_path, capsys):
    with edited(stock_checkpoint, tmp_path / "sharp.pt") as state:
        for name in state["model"]:
            if re.match(r"encoder\.layers\.\d\.self_attn\.(q_proj|out_proj)\.weight", name):
                state["model"][name] *= 8
    swap(tmp_path / "sharp.pt", tmp_path / "cold.pt", *COLD, *words)
    lines = [line for line in capsys.readouterr().out.splitlines() if "this is expensive" in line]
    assert lines == [
        "this is expensive: the default budget of a fitted swap is 0.2 nats a piece and 0.2 of relative squared error"
    ]


def test_a_base_of_another_attention_is_swapped_at_all_places_or_refused(stock_checkpoint, tmp_path, capsys):
    with edited(stock_checkpoint, tmp_path / "base.pt") as state:
        vars(state["cfg"]["model"]).update(
            {"arch": "lot_transformer", "_name": "lot_transformer", "attention": "sinkhorn"}
        )
    words = ("swap", "--path", tmp_path / "base.pt", "--attention", "lot", "--out", tmp_path / "out.pt", "--budget")
    refuse_and_keep(capsys, tmp_path, *words, 1e-6, naming=["costs more than 1e-06", "--budget none"])
    command(*words, "none")
    assert "predictions change by" in capsys.readouterr().out


def test_python_does_what_the_command_does(stock_checkpoint, tmp_path, capsys):
    swap(stock_checkpoint, tmp_path / "lot.pt", "--attention", "lot", *FIT)
    fit = {"steps": 6, "joint_steps": 2, "held_out": 16, "max_tokens": 300}
    capsys.readouterr()
    with torch.inference_mode():
        state = fairseq_lot.swap(stock_checkpoint, attention="lot", **fit)
    assert capsys.readouterr() == ("", ""), "a swap that fits says nothing"
    torch.save(state, tmp_path / "python.pt")
    assert not differing(tmp_path / "python.pt", tmp_path / "lot.pt")
    ours, theirs = state.model_args, load_checkpoint(tmp_path / "lot.pt").model_args
    assert ours == theirs and ours.swap_cost == theirs.swap_cost
    cost = max(ours.swap_cost_by_place.values())
    kept = fairseq_lot.swap(stock_checkpoint, attention="lot", budget=cost * 0.999, **fit).model_args.keep_softmax
    assert kept and f"softmax stays at {kept}" in capsys.readouterr().err
    with pytest.raises(InputError, match="budget must be a number of nats"):
        fairseq_lot.swap(stock_checkpoint, budget="much")
    with pytest.raises(InputError, match="^steps is for a calibration; leave it out, or calibrate=False$"):
        fairseq_lot.swap(stock_checkpoint, calibrate=False, steps=3)
    drawn = fairseq_lot.swap(stock_checkpoint, attention="lot", calibrate=False)
    bare = swap_as_drawn(stock_checkpoint, attention="lot")
    torch.testing.assert_close(dict(drawn["model"]), dict(bare["model"]), rtol=0, atol=0, equal_nan=True)
    forget_cost(drawn.model_args)
    assert drawn.model_args == bare.model_args
