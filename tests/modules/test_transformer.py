"""fairseq's encoder and decoder with pluggable attention: masks and weights are made where somebody reads them."""

import copy

import pytest
import torch

from tests.conftest import close, softmax_in_its_own_dtype
from tests.plug_and_play.in_memory import LAYERS, load

EVERYWHERE = {"attention_sites": "encoder,cross,decoder"}
MECHANISMS = pytest.mark.parametrize("options", [{"attention": "softmax"}, {"attention": "lot", **EVERYWHERE}], ids=str)


def sentences(lengths, **options):
    """A model in float64 and a batch."""
    loaded = load(lengths=lengths, **options)
    return loaded.model.double(), loaded.batch(range(len(lengths)))["net_input"]


@pytest.mark.parametrize("differential", [False, True])
def test_every_layer_knows_its_place(differential):
    """It decides the initial values, and the λ that a differential layer starts from."""
    model = load(attention="lot", differential=differential, **EVERYWHERE).model
    for attentions in (
        [layer.self_attn for layer in model.encoder.layers],
        [layer.self_attn for layer in model.decoder.layers],
        [layer.encoder_attn for layer in model.decoder.layers],
    ):
        assert [attention.mechanism.layer for attention in attentions] == list(range(LAYERS))


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
    """Log-probabilities and weights of the last of three steps."""
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


def test_training_gives_the_weights_that_a_loss_may_read():
    model, batch = sentences((4, 6), **EVERYWHERE, attention="lot")
    _, extra = model.train()(**batch)
    close(extra["attn"][0].sum(-1), torch.ones(2, 6, dtype=torch.float64), 1e-6)
