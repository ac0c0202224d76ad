"""fairseq's encoder and decoder with pluggable attention: layers to keep, dropout, masks and weights."""

import copy
from argparse import Namespace

import pytest
import torch

from fairseq_lot.attention.options import SITES
from fairseq_lot.attention.registry import MECHANISMS as REGISTERED
from fairseq_lot.errors import InputError
from fairseq_lot.modules.sites import attentions
from tests.conftest import close, softmax_in_its_own_dtype
from tests.plug_and_play.in_memory import LAYERS, load

EVERYWHERE = {"attention_sites": "encoder,cross,decoder"}
MECHANISMS = pytest.mark.parametrize("options", [{"attention": "softmax"}, {"attention": "lot", **EVERYWHERE}], ids=str)


def sentences(lengths, **options):
    """A model in float64 and a batch."""
    loaded = load(lengths=lengths, **options)
    return loaded.model.double(), loaded.batch(range(len(lengths)))["net_input"]


@pytest.mark.parametrize("differential", [False, True])
def test_every_layer_knows_its_number(differential):
    """The number decides the initial values, and λ_init of a differential layer."""
    model = load(attention="lot", differential=differential, **EVERYWHERE).model
    for places in (
        [layer.self_attn for layer in model.encoder.layers],
        [layer.self_attn for layer in model.decoder.layers],
        [layer.encoder_attn for layer in model.decoder.layers],
    ):
        assert [attention.mechanism.layer for attention in places] == list(range(LAYERS))


def test_a_model_in_training_with_layerdrop_has_all_its_attentions():
    model = load(attention="lot", encoder_layerdrop=0.9, decoder_layerdrop=0.9, **EVERYWHERE).model.train()
    found = [(site, layer) for site, layer, _ in attentions(model)]
    assert found == [(site, layer) for site in SITES for layer in range(LAYERS)]


def test_a_model_without_attention_at_the_sites_is_refused():
    with pytest.raises(InputError, match="the model has no attention at cross; give other sites"):
        load(attention="lot", attention_sites="cross", no_cross_attention=True, cross_self_attention=True)


def test_layers_that_are_kept_keep_their_attention():
    """``--encoder-layers-to-keep``: the second layer becomes the first and keeps its learnt parameters."""
    trained = load(attention="lot", **EVERYWHERE).model
    pruned = load(attention="lot", **EVERYWHERE, encoder_layers_to_keep="1", decoder_layers_to_keep="0,1").model
    kept = Namespace(arch="lot_transformer", encoder_layers_to_keep="1", decoder_layers_to_keep="0,1")
    pruned.load_state_dict(trained.state_dict(), model_cfg=kept)
    mechanism = pruned.encoder.layers[0].self_attn.mechanism
    assert torch.equal(mechanism.pivots, trained.encoder.layers[1].self_attn.mechanism.pivots)


def test_layers_to_keep_are_understood_as_the_command_line_gives_them():
    """They may be a list, and of one side alone; fairseq itself would then drop all layers of the other side."""
    trained = load(attention="lot", **EVERYWHERE).model
    pruned = load(attention="lot", **EVERYWHERE, encoder_layers_to_keep=[1]).model
    pruned.load_state_dict(trained.state_dict(), model_cfg=pruned.args)
    found = [attention.mechanism.pivots for _, _, attention in attentions(pruned)]
    kept = [attention.mechanism.pivots for site, i, attention in attentions(trained) if site != "encoder" or i == 1]
    torch.testing.assert_close(found, kept, rtol=0, atol=0)


def test_differential_layers_that_would_get_another_lambda_are_refused():
    with pytest.raises(InputError, match="--decoder-layers-to-keep 1 would renumber differential layers"):
        load("diff_transformer", decoder_layers_to_keep="1")


@pytest.mark.parametrize(("kept", "lambda_init"), [("0,1", None), ("1,0", None), ("1", 0.5)])
def test_differential_layers_that_keep_their_lambda_are_accepted(kept, lambda_init):
    load("diff_transformer", decoder_layers_to_keep=kept, differential_lambda_init=lambda_init)


def _build_with_source_and_target_in_one_row(attention, left_pad_source=False):
    """Build a model whose decoder attends to source and target in one row of slots.

    Right pads of the source stand between the two, left pads before them.
    """
    shared = {"attention_sites": "encoder,decoder", "cross_self_attention": True, "no_cross_attention": True}
    loaded = load(attention=attention, **shared)
    task = Namespace(
        cfg=Namespace(left_pad_source=left_pad_source),
        source_dictionary=loaded.task.source_dictionary,
        target_dictionary=loaded.task.target_dictionary,
    )
    type(loaded.model).build_model(loaded.model.args, task)


def test_mechanisms_that_count_slots_are_refused_where_pads_stand_between_tokens():
    _build_with_source_and_target_in_one_row("lot")
    _build_with_source_and_target_in_one_row("near_far", left_pad_source=True)
    with pytest.raises(InputError, match="near_far attention at decoder counts the slots"):
        _build_with_source_and_target_in_one_row("near_far")


@pytest.mark.parametrize(
    ("attention", "sites"),
    [(name, "encoder,cross,decoder" if name in ("softmax", "lot", "near_far") else "encoder") for name in REGISTERED],
)
@pytest.mark.parametrize("modules", [None, ["MultiheadAttention"], ["TransformerEncoderLayer"]], ids=str)
@torch.no_grad()
def test_dropout_of_the_attention_can_be_retained(attention, sites, modules):
    """In encoder and decoder, step by step."""
    model, batch = sentences(
        (5, 4), attention=attention, attention_sites=sites, attention_dropout=0.5, differential=True
    )
    model.make_generation_fast_(retain_dropout=True, retain_dropout_modules=modules)
    model.eval()
    drops = modules is None or "MultiheadAttention" in modules
    first, second = (encode(model, batch) for _ in range(2))
    assert torch.equal(first["encoder_out"][0], second["encoder_out"][0]) != drops
    if sites != "encoder":
        found = [steps(model, batch, first)[0] for _ in range(2)]
        assert torch.equal(*found) != drops


@pytest.mark.parametrize(("attention", "prior"), [*((name, None) for name in REGISTERED), ("softmax", "alibi")])
def test_fairseq_s_own_model_takes_the_weights_of_softmax_alone(attention, prior):
    """Without ``--user-dir`` a training from a swapped checkpoint stops with an error and does not train softmax."""
    weights = load(attention=attention, softmax_prior=prior).model.state_dict()
    stock = load("transformer").model
    if attention == "softmax" and prior is None:
        assert not any(stock.load_state_dict(weights))
    else:
        with pytest.raises(RuntimeError, match=r"Unexpected key.*self_attn\.mechanism"):
            stock.load_state_dict(weights)


def encode(model, batch):
    return model.encoder(batch["src_tokens"], batch["src_lengths"])


@MECHANISMS
@torch.no_grad()
def test_without_pads_the_decoder_gets_no_mask_and_gives_the_same(options):
    model, batch = sentences((5, 5), **options)
    encoded, previous = encode(model, batch), batch["prev_output_tokens"]
    assert encoded["encoder_padding_mask"] == []
    no_pads = torch.zeros(2, 5, dtype=torch.bool)
    with softmax_in_its_own_dtype():
        values = model.decoder(previous, encoder_out=encoded)[0]
        close(values, model.decoder(previous, encoder_out={**encoded, "encoder_padding_mask": [no_pads]})[0], 1e-12)


@torch.no_grad()
def test_with_pads_the_decoder_gets_their_mask():
    model, batch = sentences((3, 5))
    (mask,) = encode(model, batch)["encoder_padding_mask"]
    assert torch.equal(mask, batch["src_tokens"].eq(model.encoder.padding_idx)) and mask.sum() == 2


def steps(model, batch, encoded):
    """Log-probabilities and weights of the last of three steps, and the incremental state after it."""
    state = {}
    for i in range(1, 4):
        values, extra = model.decoder(batch["prev_output_tokens"][:, :i], encoder_out=encoded, incremental_state=state)
    return values, extra["attn"][0], state


@MECHANISMS
@torch.no_grad()
def test_generation_makes_weights_only_where_they_are_printed(options):
    model, batch = sentences((4, 6), **options)
    encoded = encode(model, batch)
    with softmax_in_its_own_dtype():
        values, weights, _ = steps(model, batch, encoded)
        printing, silent = copy.deepcopy(model), copy.deepcopy(model)
        printing.make_generation_fast_(need_attn=True)
        silent.make_generation_fast_(need_attn=False)
        close(steps(printing, batch, encoded)[0], values, 1e-12)
        close(steps(printing, batch, encoded)[1], weights, 1e-12)
        others, none, state = steps(silent, batch, encoded)
    assert none is None
    close(others, values, 1e-12)
    assert not any("to_keys" in key for kept in state.values() for key in kept)


@torch.no_grad()
def test_translating_makes_no_weights_and_reports_translations_at_the_length_limit(monkeypatch, capsys):
    loaded = load(attention="lot", attention_sites="encoder,cross", lengths=(5, 4))
    cross = loaded.model.decoder.layers[-1].encoder_attn
    asked, attend = [], cross.forward
    monkeypatch.setattr(
        cross, "forward", lambda *args, **named: asked.append(named["need_weights"]) or attend(*args, **named)
    )
    found = dict(loaded.translate(beam=2))
    assert asked and not any(asked)
    assert [len(tokens) for tokens in found.values()] == [201, 201]
    assert "2 translations have 200 pieces, the limit" in capsys.readouterr().err
    short = dict(load(max_target_positions=12, lengths=(5, 4)).translate(beam=2))
    assert [len(tokens) for tokens in short.values()] == [12, 12]
    assert "2 translations have 11 pieces, the limit" in capsys.readouterr().err


def test_training_gives_the_weights_that_a_loss_may_read():
    model, batch = sentences((4, 6), **EVERYWHERE, attention="lot")
    _, extra = model.train()(**batch)
    close(extra["attn"][0].sum(-1), torch.ones(2, 6, dtype=torch.float64), 1e-6)
