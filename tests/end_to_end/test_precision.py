"""Half precision where fairseq's own code is not enough.

That is training without float32 copies, generation in bf16, and ``--amp`` on a CPU.
"""

from argparse import Namespace

import pytest
import torch
from fairseq.dataclass.configs import CommonConfig, EMAConfig

from fairseq_lot.errors import InputError
from fairseq_lot.models.fairseq_hooks import refuse_to_lose
from fairseq_lot.modules.multihead_attention import PluggableMultiheadAttention
from tests.end_to_end.conftest import contents, dtypes_of, generate, hypotheses, train, weights_of
from tests.plug_and_play import in_memory

MEMORY_EFFICIENT = ("--memory-efficient-fp16", "--memory-efficient-bf16")
LEARNT = {
    "lot_transformer": "pivots",
    "set_transformer": "pivots",
    "near_far_transformer": "features",
    "diff_transformer": "lambda_q1",
}


def training(**common):
    """fairseq's configuration of a training, with these options of its part ``common``."""
    return Namespace(common=CommonConfig(**common), ema=EMAConfig(), criterion=None)


@pytest.mark.parametrize("flag", MEMORY_EFFICIENT)
@pytest.mark.parametrize("arch", LEARNT)
def test_training_without_float32_copies_is_refused_where_the_attention_learns(arch, flag):
    with pytest.raises(InputError, match=f"^{flag} keeps no float32 copy.*{LEARNT[arch]}.*use --{flag[-4:]}$"):
        refuse_to_lose(in_memory.load(arch).model, training(**{flag.strip("-").replace("-", "_"): True}))


@pytest.mark.parametrize("arch", ["softmax_transformer", "sinkhorn_transformer", "esp_transformer"])
def test_training_without_float32_copies_is_allowed_elsewhere(arch):
    refuse_to_lose(in_memory.load(arch).model, training(memory_efficient_fp16=True))
    refuse_to_lose(in_memory.load("lot_transformer").model, training())


def test_a_training_is_refused_before_it_writes_anything(data, tmp_path):
    with pytest.raises(InputError, match="^--memory-efficient-bf16 keeps no float32 copy.*$"):
        train(data / "bin", tmp_path, "--arch", "lot_transformer_small", "--memory-efficient-bf16", updates=2)
    assert not contents(tmp_path)


@pytest.mark.parametrize("model", ["stock_checkpoint", "lot_checkpoint"])
def test_generation_heeds_bf16(model, data, request):
    checkpoint = request.getfixturevalue(model)
    found = {}
    for flags in ((), ("--bf16",)):
        with dtypes_of(torch.nn.Linear) as dtypes:
            lines = hypotheses(generate(data / "bin", checkpoint, *flags))
        assert len(lines) == 120
        (dtype,) = dtypes
        found[dtype] = lines
    assert found.keys() == {torch.float32, torch.bfloat16}
    assert found[torch.float32] != found[torch.bfloat16]


@pytest.mark.slow
def test_memory_efficient_training_of_softmax_goes_through(data, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # fairseq compares it with a parameter's device
    with dtypes_of(PluggableMultiheadAttention) as seen:
        train(data / "bin", tmp_path, "--arch", "softmax_transformer_small", "--memory-efficient-fp16", updates=2)
    assert seen == {torch.float16}


@pytest.mark.parametrize("attention", ["softmax", "lot"])
def test_amp_trains_in_bfloat16_on_a_cpu(attention, data, tmp_path):
    with dtypes_of(torch.nn.Linear) as seen:
        flags = ("--arch", "lot_transformer_small", "--attention", attention, "--amp")
        checkpoint = train(data / "bin", tmp_path, *flags, updates=2)
    assert seen == {torch.bfloat16}
    assert {x.dtype for x in weights_of(checkpoint).values() if x.is_floating_point()} == {torch.float32}
