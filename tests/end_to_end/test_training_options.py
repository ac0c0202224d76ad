"""fairseq's training options with every family of architectures: they train, and their checkpoints translate."""

import pytest
import torch

from fairseq_lot.plug_and_play.checkpoint import load_checkpoint
from tests.end_to_end.conftest import generate, hypotheses, train, weights_of

FAMILIES = ("lot", "esp", "set", "sinkhorn", "softmax", "diff")
SMALL = ("--encoder-layers", 2, "--decoder-layers", 2, "--lr", "1e-3")
ALL = ("--update-freq", 2, "--checkpoint-activations", "--store-ema", "--ema-decay", 0.9)
ALL += ("--encoder-layerdrop", 0.2, "--decoder-layerdrop", 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_at_once(family, data, tmp_path):
    """Accumulation, checkpointed activations, EMA and layerdrop; then the checkpoint translates."""
    checkpoint = train(data / "bin", tmp_path, "--arch", f"{family}_transformer_small", *SMALL, *ALL, updates=6)
    state = load_checkpoint(checkpoint)
    weights, averaged = weights_of(checkpoint), state["extra_state"]["ema"]
    assert all(value.isfinite().all() for value in [*weights.values(), *(averaged[name] for name in weights)])
    name = "encoder.layers.0.fc1.weight"
    assert (weights[name] - averaged[name]).abs().max() > 1e-5, "the average is the model itself"
    assert len(hypotheses(generate(data / "bin", checkpoint))) == 120


@pytest.mark.slow
@pytest.mark.parametrize("family", ("lot", "diff"))
def test_checkpointed_activations_change_nothing(family, data, tmp_path):
    flags = ("--arch", f"{family}_transformer_small", *SMALL)
    weights = [
        weights_of(train(data / "bin", tmp_path / str(len(more)), *flags, *more, updates=4))
        for more in ((), ("--checkpoint-activations",))
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
