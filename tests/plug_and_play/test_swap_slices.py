"""Swapping in sliced attention draws the same slices each time."""

from argparse import Namespace

import pytest
import torch

from fairseq_lot.plug_and_play.swap import swap

SIZE = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (("layers", 2), ("embed_dim", 8))}
SIZE |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "attention_dropout": 0.0}
NAMES = ["encoder.embed_tokens.weight", *(f"encoder.layers.{layer}.self_attn.out_proj.weight" for layer in range(2))]


def slices(**options):
    state = {"args": Namespace(arch="transformer", **SIZE), "model": {name: torch.zeros(8, 8) for name in NAMES}}
    weights = swap(state, attention="esp", **options)["model"]
    return {name: value for name, value in weights.items() if name not in NAMES}


@pytest.mark.parametrize("slicer", ["frozen", "learnable"])
def test_the_seed_decides(slicer):
    first, again = (slices(esp_slicer=slicer, esp_seed=3, esp_num_slices=5) for _ in range(2))
    names = [f"encoder.layers.{layer}.self_attn.mechanism.slices" for layer in range(2)]
    assert list(first) == list(again) == names
    assert all(torch.equal(first[name], again[name]) for name in names)
    assert not torch.isclose(*first.values()).any()
    other = slices(esp_slicer=slicer, esp_seed=4, esp_num_slices=5)
    assert not any(torch.isclose(first[name], other[name]).any() for name in names)


def test_an_annealed_swap_starts_at_the_first_epoch():
    model = slices(esp_anneal=0.8)
    assert len(model) == 2 and all(value.item() == 1 for value in model.values())
