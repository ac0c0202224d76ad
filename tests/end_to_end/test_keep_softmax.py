"""``--keep-softmax`` from a swap through fine-tuning, restarts and averages to translations."""

import shlex

import pytest
import torch

from fairseq_lot import calibrate
from fairseq_lot.attention.near_far import NearFar
from fairseq_lot.attention.softmax import SoftmaxOptions
from fairseq_lot.errors import InputError
from fairseq_lot.inspection.diagnose import diagnose
from fairseq_lot.modules.sites import attentions
from fairseq_lot.plug_and_play.points import expand
from fairseq_lot.plug_and_play.swap import fine_tuning_command, swap_as_drawn
from fairseq_lot.pretrained.checkpoint import load_checkpoint
from fairseq_lot.pretrained.loading import load
from tests.end_to_end.conftest import (
    TINY,
    edited,
    fairseq_lot,
    generate,
    hypotheses,
    refuse_and_keep,
    swapped,
    train,
    weights_of,
)

LOT = {"attention": "lot", "lot_num_pivots": 6}
ALIBI = {"attention": "softmax", "softmax_prior": "alibi", "attention_sites": "encoder,decoder"}


def save(state, path):
    torch.save(state, path)
    return path


def with_parameters(checkpoint):
    """The encoder layers in which LOT has parameters."""
    return {name.split(".")[2] for name in weights_of(checkpoint) if name.endswith("mechanism.pivots")}


def standing(state, data):
    """``(layer, attention)`` of each encoder layer, as ``diagnose`` reports them."""
    rows = diagnose(load(state, data / "bin", "valid"), sentences=4, batch=4, perturbations=0, seed=1)["rows"]
    return {(row["layer"], row["attention"]) for row in rows if row["site"] == "encoder"}


@pytest.fixture
def alibi(stock_checkpoint, tmp_path):
    """A model that was trained with a prior in encoder and decoder."""
    with edited(stock_checkpoint, tmp_path / "alibi.pt") as state:
        args = state.model_args
        vars(args).update(ALIBI, differential=False, arch="softmax_transformer", _name="softmax_transformer")
    return tmp_path / "alibi.pt"


def test_every_command_keeps_softmax_at_a_kept_place(data, stock_checkpoint, tmp_path, capsys):
    out = swapped(stock_checkpoint, tmp_path / "kept.pt", "lot", "--lot-num-pivots", 6, "--keep-softmax", "encoder.1")
    assert "lot attention at encoder, softmax kept at encoder.1, from" in capsys.readouterr().out
    state = load_checkpoint(out)
    assert state.model_args.keep_softmax == "encoder.1" and "softmax kept at encoder.1" in repr(state)
    assert with_parameters(out) == {"0"}
    assert standing(state, data) == {(0, "lot"), (1, "softmax")}
    assert state["model"].keys() == swap_as_drawn(stock_checkpoint, **LOT, keep_softmax=["encoder.1"])["model"].keys()
    # calibration: kept places have nothing to fit
    fitted = calibrate(out, steps=2, joint_steps=1, held_out=4)
    assert [(match.site, match.layer) for match in fitted.matched] == [("encoder", 0)]
    assert fitted.state.model_args.keep_softmax == "encoder.1"
    # fine-tuning with the command that swap prints, then a restart of it
    tuned = tmp_path / "tuned"
    flags = shlex.split(fine_tuning_command(state, out))[4:]
    for updates in (1, 2):
        last = train(data / "bin", tuned, *flags, updates=updates)
        assert load_checkpoint(last).model_args.keep_softmax == "encoder.1" and with_parameters(last) == {"0"}
    assert load_checkpoint(last)["optimizer_history"][-1]["num_updates"] == 2
    assert standing(last, data) == {(0, "lot"), (1, "softmax")}
    # an average of checkpoints as fairseq's script makes it, then an ensemble
    one, other = load_checkpoint(out), load_checkpoint(last)
    assert list(one["model"]) == list(other["model"])
    other["model"] = {name: (value + one["model"][name]) / 2 for name, value in other["model"].items()}
    average = save(other, tmp_path / "average.pt")
    assert len(hypotheses(generate(data / "bin", average))) == 120
    assert len(hypotheses(generate(data / "bin", f"{out}:{stock_checkpoint}"))) == 120
    page = tmp_path / "report.html"
    fairseq_lot("report", "--path", out, "--data", data / "bin", "--out", page, "--split", "test")
    assert page.stat().st_size > 10_000


def test_a_model_trained_with_kept_places_has_them(data, tmp_path):
    words = ("--arch", "lot_transformer", *TINY, "--keep-softmax", "encoder.1, encoder.1", "--softmax-prior", "alibi")
    last = train(data / "bin", tmp_path / "own", *words, updates=1)
    args = load_checkpoint(last).model_args
    assert (args.keep_softmax, args.softmax_prior) == ("encoder.1", "alibi")
    assert standing(last, data) == {(0, "lot"), (1, "softmax with alibi")}
    again = train(data / "bin", tmp_path / "own", "--arch", "lot_transformer", *TINY, updates=2)
    assert (
        vars(load_checkpoint(again).model_args).items()
        >= {"keep_softmax": "encoder.1", "softmax_prior": "alibi"}.items()
    )
    # a new swap can keep the softmax that was trained there
    both = swap_as_drawn(again, attention="near_far", keep_softmax="encoder.1")
    assert standing(both, data) == {(0, "near_far"), (1, "softmax with alibi")}
    with pytest.raises(InputError, match="lot attention was trained at encoder, so there is no softmax to keep at enc"):
        swap_as_drawn(again, attention="near_far", keep_softmax="encoder.0")


def test_a_fine_tuning_changes_kept_places_only_if_they_are_typed(data, stock_checkpoint, tmp_path, caplog):
    caplog.set_level("INFO")
    kept = save(swap_as_drawn(stock_checkpoint, **LOT, keep_softmax="encoder.0"), tmp_path / "kept.pt")
    start = ("--arch", "pluggable_transformer", "--finetune-from-model", kept)
    last = train(data / "bin", tmp_path / "none", *start, "--keep-softmax", "none", updates=1)
    assert load_checkpoint(last).model_args.keep_softmax is None and with_parameters(last) == {"0", "1"}
    assert "--keep-softmax encoder.0 becomes None" in caplog.text and "are drawn" in caplog.text
    last = train(data / "bin", tmp_path / "other", *start, "--keep-softmax", "encoder.1", updates=1)
    assert with_parameters(last) == {"0"}
    with pytest.raises(InputError, match="--keep-softmax encoder.1 becomes None.*--reset-optimizer"):
        train(data / "bin", tmp_path / "other", *start, "--keep-softmax", "none", updates=2)
    with pytest.raises(InputError, match="lot .num_pivots=6. attention was trained at encoder, so there is no softmax"):
        train(data / "bin", tmp_path / "other", *start, "--keep-softmax", "encoder.0", updates=2)
    with pytest.raises(InputError, match="--keep-softmax does not belong to softmax attention"):
        train(data / "bin", tmp_path / "x", "--arch", "softmax_transformer", *TINY, "--keep-softmax", "encoder.0")
    assert not (tmp_path / "x").exists()


def test_pruning_layers_renumbers_kept_places(data, stock_checkpoint, tmp_path):
    """Places on the command line and in the checkpoint count the layers before pruning."""
    kept = save(
        swap_as_drawn(stock_checkpoint, **LOT, attention_sites="encoder,cross", keep_softmax="encoder.1"),
        tmp_path / "kept.pt",
    )
    flags = ("--arch", "pluggable_transformer", "--finetune-from-model", kept, "--encoder-layers-to-keep", "1")
    last = train(data / "bin", tmp_path / "pruned", *flags, "--lr", 0, updates=1)
    args = load_checkpoint(last).model_args
    assert (args.encoder_layers, args.keep_softmax) == (1, "encoder.0")
    assert standing(last, data) == {(0, "softmax")}
    # fairseq-generate leaves out the same layer of the same model
    overridden = generate(data / "bin", kept, "--model-overrides", "{'encoder_layers_to_keep': '1'}")
    assert hypotheses(generate(data / "bin", last)) == hypotheses(overridden)


def test_the_prior_of_the_base_stays_at_kept_places(data, alibi, tmp_path):
    both = {"attention_sites": "encoder,decoder", "keep_softmax": "encoder.0,decoder.1"}
    state = swap_as_drawn(alibi, **LOT, **both)
    assert state.model_args.softmax_prior == "alibi"
    assert standing(state, data) == {(0, "softmax with alibi"), (1, "lot")}
    done = calibrate(state, steps=1, joint_steps=1, held_out=4)
    assert [(match.site, match.layer) for match in done.matched] == [("encoder", 1), ("decoder", 0)]
    assert all(match.teacher.options.prior == "alibi" for match in done.matched)
    for where in (
        swap_as_drawn(state, attention="sinkhorn", keep_softmax="encoder.1"),
        swap_as_drawn(alibi, **LOT, keep_softmax="encoder.1"),
    ):
        assert (1, "softmax with alibi") in standing(where, data)
    # cross-attention has no prior in any softmax
    at_cross = swap_as_drawn(alibi, **LOT, attention_sites="encoder,cross", keep_softmax="encoder.0,cross.0")
    assert at_cross.model_args.keep_softmax == "encoder.0,cross.0,decoder.0,decoder.1"
    with edited(alibi, tmp_path / "encoder.pt") as state:
        state.model_args.attention_sites = "encoder"
    with pytest.raises(InputError, match="with different priors .alibi at encoder.0, none at decoder.0.; keep places"):
        swap_as_drawn(tmp_path / "encoder.pt", **both | LOT | {"keep_softmax": "encoder.0,decoder.0"})
    # a training from the base, or from a swap without kept places, gets the prior, too
    flags = (
        "--arch",
        "pluggable_transformer",
        "--attention",
        "lot",
        "--lot-num-pivots",
        6,
        "--keep-softmax",
        "encoder.0",
    )
    plain = save(swap_as_drawn(alibi, **LOT), tmp_path / "plain.pt")
    for number, start in enumerate((alibi, plain)):
        last = train(data / "bin", tmp_path / str(number), *flags, "--finetune-from-model", start, updates=1)
        assert standing(last, data) == {(0, "softmax with alibi"), (1, "lot")}


@pytest.mark.parametrize("sites", ["encoder", "decoder", "cross", "encoder,cross,decoder"])
def test_a_prior_stays_at_self_attention_that_is_not_swapped(sites, data, alibi, tmp_path):
    """The teacher of a calibration is the model as it was trained, with its prior."""
    swapped = swap_as_drawn(alibi, attention_sites=sites, near_far_prior="alibi" if sites != "cross" else None)
    fit = {"steps": 1, "joint_steps": 1, "held_out": 4}
    for match in calibrate(swapped, **fit).matched:
        assert match.site in sites
        assert match.site == "cross" or match.teacher.options.prior == match.student.options.prior == "alibi"
    for site, _, attention in attentions(load(swapped, data / "bin", "valid").model):
        mechanism = getattr(attention, "mechanism", None)
        if site in sites:
            assert isinstance(mechanism, NearFar)
        else:
            assert mechanism is None if site == "cross" else mechanism.options == SoftmaxOptions(prior="alibi")


@pytest.mark.slow
def test_overrides_keep_softmax_where_it_was_trained(data, stock_checkpoint, alibi, lot_checkpoint, tmp_path):
    kept = save(swap_as_drawn(stock_checkpoint, **LOT, keep_softmax="encoder.0"), tmp_path / "kept.pt")
    expected = hypotheses(generate(data / "bin", kept))
    assert expected != hypotheses(generate(data / "bin", lot_checkpoint))

    def overridden(path, **overrides):
        return hypotheses(generate(data / "bin", path, "--model-overrides", str(overrides)))

    assert overridden(stock_checkpoint, **LOT, keep_softmax="encoder.0") == expected
    assert overridden(lot_checkpoint, keep_softmax="encoder.0") == expected
    assert overridden(kept, attention="softmax") == hypotheses(generate(data / "bin", stock_checkpoint))
    everywhere = {"attention_sites": "encoder,decoder"}
    swapped_alibi = save(swap_as_drawn(alibi, **LOT, **everywhere), tmp_path / "alibi-lot.pt")
    assert overridden(swapped_alibi, keep_softmax="encoder.0", softmax_prior="alibi")
    for path, overrides, message in (
        (stock_checkpoint, {"keep_softmax": "encoder.0"}, "does not read keep_softmax"),
        (lot_checkpoint, {"keep_softmx": "encoder.0"}, "there is no option 'keep_softmx' to override"),
        (lot_checkpoint, {"keep_softmax": "encoder.7"}, "the model has no encoder.7"),
        (kept, {"keep_softmax": "none"}, "softmax kept at encoder.0, and no parameters for lot there; use swap"),
        (swapped_alibi, {"keep_softmax": "encoder.0"}, "was trained with prior alibi at encoder.0; override softmax_p"),
        (kept, {"softmax_prior": "alibi"}, "was trained with prior None at encoder.0"),
    ):
        with pytest.raises(InputError, match=message):
            overridden(path, **overrides)


@pytest.mark.parametrize(
    ("places", "naming"),
    [
        ("middle.0", "'middle.0' is not a place"),
        ("encoder", "'encoder' is not a place"),
        ("encoder.2", "the model has no encoder.2; it has encoder.0,encoder.1"),
        ("cross.0", "lot attention is only at encoder"),
        ("encoder.0,encoder.1", "nothing is left for lot attention"),
    ],
)
def test_places_that_cannot_be_kept_are_refused_in_one_line(places, naming, data, stock_checkpoint, tmp_path, capsys):
    out = ("--path", stock_checkpoint, "--out", tmp_path / "out")
    refuse_and_keep(capsys, tmp_path, "swap", *out, "--attention", "lot", "--keep-softmax", places, naming=[naming])
    way = f"lot --keep-softmax {places}"
    refuse_and_keep(capsys, tmp_path, "sweep", data / "bin", *out, "--no-bleu", "--try", way, naming=[naming, "--try"])
    with pytest.raises(InputError, match=naming):
        train(data / "bin", tmp_path / "out", "--arch", "lot_transformer", *TINY, "--keep-softmax", places)
    assert not (tmp_path / "out").exists()


def test_a_prior_other_than_the_base_s_is_refused(stock_checkpoint):
    with pytest.raises(InputError, match="trained with another prior at the places to keep"):
        swap_as_drawn(stock_checkpoint, **LOT, keep_softmax="encoder.0", softmax_prior="alibi")
    with pytest.raises(InputError, match="--keep-softmax does not belong to softmax"):
        swap_as_drawn(stock_checkpoint, attention="softmax", keep_softmax="encoder.0")
    assert swap_as_drawn(stock_checkpoint, **LOT, keep_softmax=None).model_args.keep_softmax is None


def test_a_sweep_tries_kept_places(data, stock_checkpoint, tmp_path, capsys):
    words = ("sweep", data / "bin", "--path", stock_checkpoint, "--out", tmp_path, "--no-bleu", "--no-calibration")
    tries = "lot --keep-softmax encoder.0/encoder.1", "lot --keep-softmax 'encoder.1, encoder.1'"
    fairseq_lot(*words, "--sentences", 9, *(word for way in tries for word in ("--try", way)))
    table = capsys.readouterr().out.partition("\n\n")[0]
    assert "| lot | --keep-softmax encoder.0 |" in table and table.count("--keep-softmax encoder.1") == 1
    assert len({way.key for way in (*expand(tries[0]), *expand("lot"))}) == 3
