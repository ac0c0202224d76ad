"""fairseq's training options work with every family of architectures, and the checkpoints translate."""

import functools

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema import EMA

from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.errors import InputError
from fairseq_lot.modules.multihead_attention import PluggableMultiheadAttention
from fairseq_lot.pretrained.checkpoint import load_checkpoint
from tests.conftest import softmax_in_its_own_dtype
from tests.end_to_end.conftest import contents, dtypes_of, fairseq_lot, generate, hypotheses, train, weights_of
from tests.plug_and_play import in_memory

FAMILIES = ("lot", "near_far", "esp", "set", "sinkhorn", "softmax", "diff")
SMALL = ("--encoder-layers", 2, "--decoder-layers", 2, "--lr", "1e-3")
ALL = ("--update-freq", 2, "--checkpoint-activations", "--store-ema", "--ema-decay", 0.9)
ALL += ("--encoder-layerdrop", 0.2, "--decoder-layerdrop", 0.2)


@pytest.mark.fast_if(lambda family: family == "lot")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_many_options_trains_and_translates(family, data, tmp_path):
    """The options are accumulation, checkpointed activations, EMA and layerdrop."""
    checkpoint = train(data / "bin", tmp_path, "--arch", f"{family}_transformer_small", *SMALL, *ALL, updates=6)
    state = load_checkpoint(checkpoint)
    weights, averaged = weights_of(checkpoint), state["extra_state"]["ema"]
    assert all(value.isfinite().all() for value in [*weights.values(), *(averaged[name] for name in weights)])
    assert len(hypotheses(generate(data / "bin", checkpoint))) == 120


@pytest.mark.fast_if(lambda flags: "--adaptive-softmax-cutoff" in flags)
@pytest.mark.parametrize(
    "flags",
    [
        ("--adaptive-softmax-cutoff", "50,100", "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp"),
        ("--encoder-normalize-before", "--decoder-normalize-before", "--encoder-learned-pos", "--layernorm-embedding"),
        ("--offload-activations",),
        ("--quant-noise-pq", 0.1),
        ("--store-ema", "--ema-decay", 0.9),
    ],
    ids=lambda flags: flags[0].lstrip("-"),
)
def test_a_model_with_one_option_is_trained_swapped_and_fine_tuned(flags, data, tmp_path):
    sizes = ("--encoder-layers", 1, "--decoder-layers", 1)
    checkpoint = train(data / "bin", tmp_path / "base", "--arch", "lot_transformer_small", *sizes, *flags, updates=2)
    out = tmp_path / "out.pt"
    fairseq_lot("swap", "--path", checkpoint, "--attention", "set", "--set-num-pivots", 4, "--out", out)
    assert len(hypotheses(generate(data / "bin", out))) == 120
    fine_tuning = ("--arch", "set_transformer_small", *sizes, *flags, "--finetune-from-model", out)
    child = train(data / "bin", tmp_path / "child", *fine_tuning, updates=2)
    assert list(load_checkpoint(child)["model"]) == list(load_checkpoint(out)["model"])


def test_a_criterion_that_takes_logarithms_of_weights_is_refused_for_differential_models(data, tmp_path):
    aligned = ("--criterion", "label_smoothed_cross_entropy_with_alignment")
    with pytest.raises(InputError, match="takes logarithms of weights, .*; use --criterion label_smoothed_cross_entr"):
        train(data / "bin", tmp_path, "--arch", "diff_transformer_small", *SMALL, *aligned, updates=1)
    assert not contents(tmp_path)
    train(data / "bin", tmp_path, "--arch", "lot_transformer_small", *SMALL, *aligned, updates=1)


def test_a_base_trained_with_many_options_is_swapped_and_diagnosed(data, tmp_path):
    flags = ("--arch", "transformer_tiny", "--share-decoder-input-output-embed", "--checkpoint-activations")
    flags += ("--encoder-layerdrop", 0.2, "--decoder-layerdrop", 0.2, "--quant-noise-pq", 0.1)
    base = train(data / "bin", tmp_path / "base", *flags, updates=2)
    out = tmp_path / "out.pt"
    fit = ("--steps", 2, "--joint-steps", 2, "--distill-steps", 2, "--held-out", 4, "--lot-num-pivots", 4)
    fairseq_lot("swap", "--path", base, "--attention", "lot", *fit, "--out", out)
    fairseq_lot("diagnose", data / "bin", "--path", out, "--sentences", 4, "--json", tmp_path / "out.json")
    args = load_checkpoint(out).model_args
    assert args.checkpoint_activations and args.encoder_layerdrop == 0.2, "a training that goes on wants them again"


every_model = pytest.mark.parametrize(
    ("arch", "name"), [(arch, name) for arch in ("lot_transformer", "diff_transformer") for name in MECHANISMS]
)


def gradients(model, *samples):
    """The gradients of all parameters, accumulated over the summed losses of some batches."""
    for sample in samples:
        logits, _ = model(**sample["net_input"])
        target = sample["target"].flatten()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), target, ignore_index=1, reduction="sum").backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@every_model
def test_accumulation_and_checkpointed_activations_change_no_gradient(arch, name):
    loaded = in_memory.load(arch, attention=name)
    checkpointed = in_memory.load(arch, attention=name, checkpoint_activations=True)
    assert type(checkpointed.model.encoder.layers[0].forward).__name__ == "partial", "nothing is checkpointed"
    parts = [loaded.batch(part) for part in ([4, 0, 2], [1, 3, 5])]
    with softmax_in_its_own_dtype():
        expected = gradients(loaded.model.double().train(), loaded.batch(range(6)))
        found = gradients(checkpointed.model.double().train(), *parts)
    # rounding, 2e-16, of gradients up to 50 is 1e-14; ESP divides it by t = 1e-3; ten times that for the sums
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@every_model
def test_the_moving_average_covers_every_parameter(arch, name):
    model = in_memory.load(arch, attention=name).model
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    average = EMA(model, EMAConfig(store_ema=True, ema_decay=0.9))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    average.step(model, updates=1)
    found = dict(average.get_model().named_parameters())
    torch.testing.assert_close(found, {key: x + 0.1 for key, x in before.items()}, rtol=0, atol=1e-5)


@pytest.mark.fast_if(lambda family: family == "lot")
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_trains_like_single_precision(family, data, tmp_path, monkeypatch):
    """fairseq's --fp16 and --bf16: the model in half precision, float32 copies in the optimiser, scaled losses."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # fairseq compares it with a parameter's device
    losses = {}
    for flags in ((), ("--fp16",), ("--bf16",)):
        words = ("--arch", f"{family}_transformer_small", *SMALL, *flags, "--dropout", 0)
        with dtypes_of(PluggableMultiheadAttention) as dtypes:
            checkpoint = train(data / "bin", tmp_path / str(flags), *words, updates=4)
        metrics = load_checkpoint(checkpoint)["extra_state"]["metrics"]["train"]
        (loss,) = (float(meter["sum"] / meter["count"]) for _, name, _, meter in metrics if name == "loss")
        (dtype,) = dtypes
        losses[dtype] = loss
    assert losses.keys() == {torch.float32, torch.float16, torch.bfloat16}
    for dtype, tolerance in ((torch.float16, 2e-4), (torch.bfloat16, 1e-3)):
        assert losses[dtype] == pytest.approx(losses[torch.float32], rel=tolerance)


@functools.cache
def logits_and_gradients(arch, attention, dtype=torch.float32):
    """The logits of a small model, with the gradients of the parameters that all mechanisms share."""
    loaded = in_memory.load(arch, attention=attention)
    model, sample = loaded.model.to(dtype).train(), loaded.batch(range(6))
    logits, _ = model(**sample["net_input"])
    assert logits.dtype == dtype
    logits = logits.float()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), sample["target"].flatten(), ignore_index=1).backward()
    gradients = {key: parameter.grad.float().flatten() for key, parameter in model.named_parameters()}
    return logits.detach(), torch.cat([x for key, x in gradients.items() if ".mechanism." not in key])


def distance(x, y):
    return ((x - y).norm() / y.norm()).item()


@pytest.mark.parametrize("arch", ("lot_transformer", "diff_transformer"))
@pytest.mark.parametrize("name", MECHANISMS)
def test_half_precision_changes_less_than_another_mechanism(name, arch):
    """In the precision of --fp16 and --bf16, outputs and gradients are nearer to float32 than another mechanism's."""
    logits, gradients = logits_and_gradients(arch, name)
    others = [logits_and_gradients(arch, other) for other in MECHANISMS if other != name]
    nearest = min(distance(other, logits) for other, _ in others)
    nearest_gradients = min(distance(other, gradients) for _, other in others)
    for dtype in (torch.float16, torch.bfloat16):
        half, half_gradients = logits_and_gradients(arch, name, dtype)
        assert distance(half, logits) < nearest / 5
        if name != "esp":  # rounding q and k moves the gradients of a sort as cold as ESP's default by their own size
            assert distance(half_gradients, gradients) < nearest_gradients / 3
