"""Swapping in sliced attention draws the same slices each time."""

from argparse import Namespace

import pytest
import torch

from fairseq_lot.models.pluggable_transformer import base_architecture
from fairseq_lot.plug_and_play.swap import swap
from fairseq_lot.pretrained.loading import untrained

SIZE = {"layers": 2, "embed_dim": 8, "attention_heads": 2, "ffn_embed_dim": 8}
SIZES = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIZE.items()}


def slices(**options):
    args = Namespace(arch="transformer", **SIZES)
    base_architecture(args)
    weights = swap({"args": args, "model": untrained(args, 8, 8).state_dict()}, attention="esp", **options)["model"]
    return {name: value for name, value in weights.items() if ".mechanism." in name}


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
