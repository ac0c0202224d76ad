"""The attention that arguments describe: in words, by options and by parameters."""

from argparse import Namespace

import torch

from fairseq_lot.models.model_attention import changed, completed, in_words, options_read, parameters, redrawn
from tests.models.test_starting_point import MODEL


def args(**options):
    return completed(Namespace(**{"attention": "lot", "lot_num_pivots": 3, **MODEL, **options}))


def test_completed_arguments_have_every_option_and_sites_in_one_order():
    given = Namespace(attention_sites=" decoder,encoder", lot_query_updates=1)
    done = completed(given, {"attention": "lot"})
    assert (done.attention, done.attention_sites, done.lot_num_pivots) == ("lot", "encoder,decoder", 32)
    assert vars(given) == {"attention_sites": " decoder,encoder", "lot_query_updates": 1}


def test_the_description_names_what_is_not_a_default():
    assert in_words(args(differential=True)) == "differential lot (num_pivots=3) attention at encoder"
    kept = args(attention_sites="encoder,decoder", keep_softmax="encoder.0", softmax_prior="alibi")
    assert in_words(kept).endswith("attention at encoder,decoder, softmax (prior=alibi) kept at encoder.0")


def test_the_options_of_softmax_are_read_where_it_is_kept():
    assert "softmax_prior" not in options_read(args()) and "lot_num_pivots" in options_read(args())
    assert {"softmax_prior", "lot_num_pivots"} <= {*options_read(args(keep_softmax="encoder.0"))}


def test_changed_options_are_found():
    assert changed(["lot_num_pivots", "lot_epsilon"], args(), args(lot_epsilon=0.5)) == ["lot_epsilon"]


def test_parameters_have_their_names_in_checkpoints():
    found = parameters(args(lot_learn_masses=False), args(encoder_layers=2))
    names = [
        f"encoder.layers.{layer}.self_attn.mechanism.{name}" for layer in (0, 1) for name in ("pivots", "mass_logits")
    ]
    assert {*found} == {*names}
    assert found[names[0]] == (torch.Size([2, 3, 4]), "lot", True) and not found[names[1]].is_learnt
    owners = {name.rpartition(".")[2]: one.owner for name, one in parameters(args(differential=True), args()).items()}
    assert owners["pivots"] == "lot" and owners["lambda_q1"] == "differential"


def test_parameters_of_another_shape_or_owner_are_redrawn():
    before = parameters(args(), args())
    pivots = "encoder.layers.self_attn.mechanism.pivots"
    assert not redrawn(before, parameters(args(lot_learn_pivots=False), args()))
    assert pivots in redrawn(before, parameters(args(lot_num_pivots=4), args()))
    assert pivots in redrawn(before, parameters(args(attention="set", set_num_pivots=3), args()))
