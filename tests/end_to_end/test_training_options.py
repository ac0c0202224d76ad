"""fairseq's training options with every family of architectures: they train, and their checkpoints translate."""

import sys

import pytest
import torch
from fairseq_cli.train import cli_main

from fairseq_lot.modules.multihead_attention import PluggableMultiheadAttention
from fairseq_lot.plug_and_play.checkpoint import load_checkpoint
from tests.end_to_end.conftest import generate, hypotheses, train, training, weights_of
from tests.plug_and_play import in_memory

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
def test_checkpointed_activations_change_rounding_alone(data, tmp_path):
    """Sums are taken in another order, with fairseq's own models as well."""
    flags = ("--arch", "lot_transformer_small", *SMALL, "--optimizer", "sgd", "--lr", 0.1)
    weights = [
        weights_of(train(data / "bin", tmp_path / str(len(more)), *flags, *more, updates=4))
        for more in ((), ("--checkpoint-activations",))
    ]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_trains_like_single_precision(family, data, tmp_path, monkeypatch):
    """fairseq's --fp16 and --bf16: the model in half precision, float32 copies in the optimiser, scaled losses."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # what fairseq compares a parameter's device with
    losses = {}
    for flags in ((), ("--fp16",), ("--bf16",)):
        words = training(
            data / "bin", tmp_path / str(flags), *SMALL, "--arch", f"{family}_transformer_small", *flags,
            "--dropout", 0, updates=8,
        )  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["fairseq-train", *map(str, words)])
        dtypes = set()

        def keep(module, args, output, dtypes=dtypes):
            if isinstance(module, PluggableMultiheadAttention):
                dtypes.add(output[0].dtype)

        handle = torch.nn.modules.module.register_module_forward_hook(keep)
        try:
            cli_main()
        finally:
            handle.remove()
        metrics = load_checkpoint(tmp_path / str(flags) / "checkpoint_last.pt")["extra_state"]["metrics"]["train"]
        (loss,) = (float(meter["sum"] / meter["count"]) for _, name, _, meter in metrics if name == "loss")
        losses[dtypes.pop()] = loss
        assert not dtypes
    assert losses.keys() == {torch.float32, torch.float16, torch.bfloat16}
    for dtype, tolerance in ((torch.float16, 2e-4), (torch.bfloat16, 1e-3)):
        assert losses[dtype] == pytest.approx(losses[torch.float32], rel=tolerance)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision(family, dtype):
    """The model of --fp16 and --bf16; fairseq itself has both on a GPU only."""
    loaded = in_memory.load(f"{family}_transformer")
    model, sample = loaded.model.to(dtype).train(), loaded.batch(range(6))
    logits, _ = model(**sample["net_input"])
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), sample["target"].flatten(), ignore_index=1)
    loss.backward()
    exact = in_memory.load(f"{family}_transformer").model.train()(**sample["net_input"])[0]
    assert logits.dtype == dtype and (logits.float() - exact).abs().max() < 0.1 * exact.abs().max()
    assert all(x.grad is None or x.grad.isfinite().all() for x in model.parameters())
