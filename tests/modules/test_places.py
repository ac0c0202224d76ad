"""Places that keep softmax: their names, refusals, and the attention that a model has there."""

import argparse

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_lot.attention.differential import Differential
from fairseq_lot.attention.options import SITES
from fairseq_lot.attention.softmax import Softmax
from fairseq_lot.errors import InputError
from fairseq_lot.modules.flat_options import resolve_options
from fairseq_lot.modules.places import Place, named_places
from fairseq_lot.modules.sites import attentions, softmax_trained_at, unwrapped
from fairseq_lot.pretrained.loading import untrained
from tests.conftest import close
from tests.plug_and_play.in_memory import LAYERS, load

EVERYWHERE = {"attention": "lot", "attention_sites": ",".join(SITES)}


def kept(model):
    """The places without LOT, each with its mechanism, or with None for fairseq's own attention."""
    found = {(site, layer): getattr(attention, "mechanism", None) for site, layer, attention in attentions(model)}
    return {
        f"{site}.{layer}": mechanism
        for (site, layer), mechanism in found.items()
        if type(unwrapped(mechanism)).__name__ != "Lot"
    }


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        (None, None),
        ("none", None),
        ("encoder.0", "encoder.0"),
        (" decoder.1, encoder.10,encoder.9 ,encoder.10", "encoder.9,encoder.10,decoder.1"),
        (["cross.2", "encoder.0"], "encoder.0,cross.2"),
        ([Place("decoder", 0), "cross.00"], "cross.0,decoder.0"),
    ],
)
def test_places_have_one_form(given, canonical):
    args = argparse.Namespace(attention="lot", keep_softmax=given)
    resolve_options(args)
    assert args.keep_softmax == canonical
    resolve_options(args)
    assert args.keep_softmax == canonical


@pytest.mark.parametrize(
    "given", ["", [], ",", 3, "encoder", "encoder.", "middle.0", "encoder.-1", "encoder.x", "encoder.0.1", "encoder.²"]
)
def test_values_that_name_no_place_are_refused(given):
    with pytest.raises(InputError, match="keep_softmax"):
        named_places(given)


@pytest.mark.parametrize("differential", [False, True])
def test_softmax_stands_at_kept_places(differential):
    model = load(**EVERYWHERE, keep_softmax="encoder.1,cross.0,decoder.1", differential=differential).model
    found = kept(model)
    assert list(found) == ["encoder.1", "cross.0", "decoder.1"]
    if differential:
        assert all(type(one) is Differential and type(one.inner) is Softmax for one in found.values())
    else:
        assert set(found.values()) == {None}, "fairseq's own"
    assert model.args.keep_softmax == "encoder.1,cross.0,decoder.1"


def test_a_prior_stands_at_kept_places_alone():
    model = load(attention="lot", keep_softmax="encoder.1", softmax_prior="alibi").model
    found = kept(model)
    assert [place for place, mechanism in found.items() if mechanism is not None] == ["encoder.1"]
    assert found["encoder.1"].options.prior == "alibi"


@pytest.mark.parametrize("differential", [False, True])
def test_a_mixed_model_computes_softmax_at_kept_places_and_lot_elsewhere(differential):
    sites = {"attention_sites": "encoder", "differential": differential}
    mixed, lot, softmax = (
        load(attention=name, **sites, **keep)
        for name, keep in (("lot", {"keep_softmax": "encoder.0"}), ("lot", {}), ("softmax", {}))
    )
    for other in (lot, softmax):
        other.model.load_state_dict(mixed.model.state_dict(), strict=False)
    sample = mixed.batch(range(4))["net_input"]
    outputs = []
    for loaded in (mixed, lot, softmax):
        out = loaded.model.encoder(sample["src_tokens"], sample["src_lengths"], return_all_hiddens=True)
        outputs.append(out["encoder_states"])
    of_mixed, of_lot, of_softmax = outputs
    real = sample["src_tokens"].ne(mixed.pad).T.unsqueeze(-1)
    close(of_mixed[1] * real, of_softmax[1] * real, 1e-5)
    assert (of_mixed[1] - of_lot[1]).abs().max() > 1e-3
    layer = lot.model.encoder.layers[1]
    close(of_mixed[2] * real, layer(of_mixed[1], sample["src_tokens"].eq(mixed.pad)) * real, 1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_softmax": "encoder.2"}, "--keep-softmax encoder.2: the model has no encoder.2; it has encoder.0,enc"),
        ({"keep_softmax": "decoder.0"}, "lot attention is only at encoder, so decoder.0 has softmax anyway"),
        ({"keep_softmax": "encoder.0,encoder.1"}, "nothing is left for lot attention; keep fewer places"),
        (
            {"keep_softmax": "cross.0", "attention_sites": "decoder,cross", "no_cross_attention": True},
            "the model has no cross.0; it has no attention at cross",
        ),
    ],
)
def test_places_that_do_not_fit_the_model_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        load(**{"attention": "lot", "cross_self_attention": "no_cross_attention" in options, **options})


def test_softmax_everywhere_keeps_no_place():
    """The teacher of a calibration is built so, and ``--model-overrides`` may ask for it."""
    args = load(attention="softmax", keep_softmax="encoder.0").model.args
    assert args.keep_softmax is None


@pytest.mark.parametrize(
    ("keep", "stay", "left"),
    [
        ("encoder.1,cross.0", "1", "encoder.0,cross.0"),  # everything left in the encoder
        ("encoder.0,cross.0", "1", "cross.0"),
        ("encoder.0", "1", None),
        ("encoder.1", "0,1", "encoder.1"),
    ],
)
def test_places_go_or_are_renumbered_with_their_layers(keep, stay, left):
    """``--encoder-layers-to-keep``; the given places count all layers."""
    trained = load(**EVERYWHERE, keep_softmax=keep).model
    pruned = load(**EVERYWHERE, keep_softmax=keep, encoder_layers_to_keep=stay).model
    assert pruned.args.keep_softmax == left and list(kept(pruned)) == (left.split(",") if left else [])
    pruned.load_state_dict(trained.state_dict(), model_cfg=pruned.args)
    layers = [trained.encoder.layers[int(layer)].self_attn for layer in stay.split(",")]
    for ours, theirs in zip(pruned.encoder.layers, layers, strict=True):
        assert torch.equal(ours.self_attn.q_proj.weight, theirs.q_proj.weight)
        assert hasattr(ours.self_attn, "mechanism") == hasattr(theirs, "mechanism")


def test_a_model_that_is_built_again_keeps_the_same_places():
    """After the first build ``encoder_layers`` counts only the layers that are kept."""
    args = argparse.Namespace(arch="lot_transformer", attention="lot", encoder_layers=3, encoder_layers_to_keep="0,2")
    args.keep_softmax, args.encoder_embed_dim, args.decoder_embed_dim = "encoder.2", 8, 8
    ARCH_CONFIG_REGISTRY[args.arch](args)
    for _ in range(2):
        untrained(args, 12, 12)
        assert (args.encoder_layers, args.keep_softmax) == (2, "encoder.1")


def test_with_layers_to_keep_unknown_places_and_a_model_without_lot_are_refused():
    with pytest.raises(InputError, match=f"the model has no encoder.{LAYERS}"):
        load(attention="lot", keep_softmax=f"encoder.{LAYERS}", encoder_layers_to_keep="0")
    with pytest.raises(InputError, match="nothing is left for lot"):
        load(attention="lot", keep_softmax="encoder.1", encoder_layers_to_keep="1")


@pytest.mark.parametrize(
    ("saved", "places", "expected"),
    [
        ({}, "encoder.0,decoder.1", {}),
        ({"attention": "lot"}, "cross.1", {}),
        ({"attention": "lot"}, "encoder.1", "lot attention was trained at encoder"),
        ({"attention": "lot", "keep_softmax": "encoder.1"}, "encoder.1", {}),
        ({"attention": "lot", "keep_softmax": "encoder.1", "softmax_prior": "alibi"}, "encoder.1", "alibi"),
        ({"attention": "softmax", "softmax_prior": "alibi"}, "encoder.1", "alibi"),
        ({"attention": "softmax", "softmax_prior": "alibi"}, "decoder.1", {}),
        ({"attention": "softmax", "softmax_prior": "alibi"}, "encoder.0,decoder.1", "with different priors"),
        ({"attention": "softmax", "softmax_prior": "alibi"}, "encoder.0,cross.1", "alibi"),
        ({"attention": "lot", "trained_attention": "softmax", "trained_sites": "encoder"}, "encoder.0", {}),
        ({"attention": "lot", "trained_attention": "softmax"}, "encoder.0", {}),
        (
            {"attention": "lot", "trained_attention": "softmax (prior=alibi)", "trained_sites": "cross,decoder"},
            "decoder.0",
            "alibi",
        ),
        ({"attention": "lot", "trained_attention": "softmax (prior=alibi)"}, "encoder.0", "trained at unknown sites"),
        ({"attention": "lot", "trained_attention": "set", "trained_sites": "encoder"}, "encoder.0", "set attention"),
    ],
)
def test_the_softmax_of_training_is_known_for_every_place(saved, places, expected):
    args = argparse.Namespace(**saved)
    if expected in ({}, "alibi"):
        found = softmax_trained_at(args, named_places(places))
        assert found == ({"softmax_prior": expected} if expected else {})
    else:
        with pytest.raises(InputError, match=expected):
            softmax_trained_at(args, named_places(places))
