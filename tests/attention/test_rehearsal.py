"""No mechanism mixes devices or makes the host wait for a GPU, tested on a machine without one.

Tensors are fake: they have a shape but no data, on the device ``meta``. Code with one path for the CPU and one for
other devices takes the latter. Reading a value or a data-dependent size fails, and so does a copy between devices.
"""

import contextlib
from dataclasses import fields

import pytest
import torch
from fairseq.modules import MultiheadAttention
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.attention.sinkhorn import SinkhornOptions
from fairseq_lot.modules.multihead_attention import PluggableMultiheadAttention
from fairseq_lot.transport.sinkhorn import solve
from tests.attention.test_contract import KINDS
from tests.variants import CASES, CAUSAL_CASES, HEAD_DIM, NUM_HEADS, build_differential

BSZ, LENGTH, MORE = 3, 5, 6
WAITING = [case for case in CASES if "tolerance" in case.options]
# variants that take the path of the default, with other numbers
NUMBERS = ("even", "narrow", "one-pivot", "smooth", "updates-5")
QUIET = [case for case in CASES if case not in WAITING and case.variant not in NUMBERS]
# these split a batch by the lengths of its sentences, for which the host reads the padding mask
SPLIT = [case for case in QUIET if "exact_up_to" in case.options]
FAST_DIFFERENTIAL = ("differential-lot-default", "differential-softmax-default")
both_ways = pytest.mark.parametrize(("padded", "need_weights"), [(False, True), (True, False)], ids=["full", "padded"])
both_masks = pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])


class NoTensorsFromPythonNumbers(TorchFunctionMode):
    """Refuses to make a tensor from Python numbers, which would be copied from the host to the device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor), function
        return function(*args, **(kwargs or {}))


class GeneratorsOfTheDevice(TorchFunctionMode):
    """Refuses a generator on another device than the tensor that it fills, as a GPU does and ``meta`` does not."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        generator, device = (kwargs or {}).get("generator"), torch.device((kwargs or {}).get("device") or "cpu")
        assert generator is None or generator.device == device, f"{function}: {generator.device}, {device}"
        return function(*args, **(kwargs or {}))


class OneDevice(TorchDispatchMode):
    """Refuses tensors of another device; a scalar may be on the CPU, as it is passed along with the kernel."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if torch.is_tensor(x)]
        elsewhere = [x for x in tensors if x.device.type != "meta" and x.dim()]
        copies = {x.device.type for x in tensors} if "copy" in str(function) else ()
        assert not elsewhere and len(copies) < 2, f"{function} of {[(x.device, x.shape) for x in tensors]}"
        return out

    def __enter__(self):
        self.numbers = NoTensorsFromPythonNumbers()
        self.numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.numbers.__exit__(*error)


@pytest.fixture
def foreign(monkeypatch):
    """Fake tensors on a device that is not the CPU; autocast is off, as torch has none for ``meta``."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
    with FakeTensorMode(), torch.device("meta"):
        yield


@contextlib.contextmanager
def half_precision():
    """Make parameters in float16 from the start, as a fake module cannot be converted."""
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def build_empty(case, training=True):
    make = build_differential if case.differential else build_mechanism
    with half_precision():
        mechanism = make(case.name, num_heads=NUM_HEADS, head_dim=HEAD_DIM, dropout=0.1, **case.options)
    return mechanism.train(training)


def draw_empty(case, tgt_len=LENGTH, src_len=MORE):
    lengths = (tgt_len, src_len, src_len) if "cross" in case.kinds else (tgt_len,) * 3
    return [torch.empty(BSZ, NUM_HEADS, length, HEAD_DIM, dtype=torch.float16) for length in lengths]


def mask_of(x):
    return torch.empty(BSZ, x.size(2), dtype=torch.bool)


def gradients(values, leaves):
    return torch.autograd.grad(values, leaves, torch.empty_like(values), allow_unused=True)


@pytest.mark.fast_if(lambda case, **_: not case.differential or str(case) in FAST_DIFFERENTIAL)
@pytest.mark.parametrize("case", QUIET, ids=str)
@both_ways
def test_training_stays_on_its_device(case, padded, need_weights, foreign):
    if padded and case in SPLIT:
        pytest.skip("the host reads the mask to split the batch")
    mechanism = build_empty(case)
    for kind in [kind for same, kind in KINDS if same is case]:
        q, k, v = draw_empty(case) if kind == "cross" else draw_empty(case, LENGTH, LENGTH)
        leaves = [x.requires_grad_() for x in (q, k, v)] + list(mechanism.parameters())
        masks = [mask_of(q)] * 2 if kind == "self" else [mask_of(q), mask_of(k)]
        with OneDevice():
            output = mechanism(q, k, v, *(masks if padded else ()), need_weights=need_weights)
            found = gradients(output.values, leaves)
        assert output.values.device.type == "meta" and output.values.shape == q.shape
        assert sum(x is not None for x in found) >= 3


CAUSAL = [case for case in QUIET if case in CAUSAL_CASES]


@pytest.mark.fast_if(lambda case, **_: not case.differential)
@pytest.mark.parametrize("case", CAUSAL, ids=str)
@both_ways
def test_causal_training_and_decoding_stay_on_their_device(case, padded, need_weights, foreign):
    if padded and case in SPLIT:
        pytest.skip("the host reads the mask to split the batch")
    mechanism = build_empty(case)
    inputs = [x.requires_grad_() for x in draw_empty(case, LENGTH, LENGTH)]
    mask = mask_of(inputs[0]) if padded else None
    with OneDevice():
        output = mechanism(*inputs, mask, mask, need_weights=need_weights, causal=True)
        gradients(output.values, [*inputs, *mechanism.parameters()])
        mechanism.eval()
        state = {}
        with torch.no_grad():
            for start, stop in ((0, 2), (2, 3), (3, 4)):
                new = [x[:, :, start:stop] for x in inputs]
                pads = mask[:, start:stop] if padded else None
                _, state = mechanism.causal_step(*new, pads, state, need_weights)
    assert all(x.device.type == "meta" for x in state.values())


@pytest.mark.parametrize(
    "case", [case for case in QUIET if "cross" in case.kinds and not case.build().traits.couples_queries], ids=str
)
@both_masks
@torch.no_grad()
def test_cross_attention_in_decoding_stays_on_its_device(case, padded, foreign):
    if padded and case in SPLIT:
        pytest.skip("the host reads the mask to split the batch")
    mechanism = build_empty(case, training=False)
    q, k, v = draw_empty(case)
    mask = mask_of(k) if padded else None
    for need_weights in (False, True):
        with OneDevice():
            summary = mechanism.summarise(k, v, mask, need_weights)
            output = mechanism.attend_summary(q, summary, need_weights)
        assert output.values.shape == q.shape and (output.weights is not None) == need_weights


@pytest.mark.fast_if(lambda case, site: site != "encoder")
@pytest.mark.parametrize("site", ["encoder", "cross", "decoder"])
@pytest.mark.parametrize("case", [case for case in CAUSAL if "cross" in case.kinds and case not in SPLIT], ids=str)
def test_the_caches_of_fairseq_stay_on_their_device(case, site, foreign):
    width = NUM_HEADS * HEAD_DIM
    with half_precision():
        stock = MultiheadAttention(width, NUM_HEADS, encoder_decoder_attention=site == "cross")
    attention = PluggableMultiheadAttention(stock, build_empty(case), site=site).eval()
    tokens = torch.empty(LENGTH, BSZ, width, dtype=torch.float16)
    source = torch.empty(MORE, BSZ, width, dtype=torch.float16) if site == "cross" else tokens
    mask = torch.empty(BSZ, len(source), dtype=torch.bool)
    future = torch.empty(LENGTH, LENGTH) if site == "decoder" else None
    with OneDevice():
        values, _ = attention(tokens, source, source, key_padding_mask=mask, attn_mask=future)
        gradients(values, list(attention.parameters()))
        state = {}
        with torch.no_grad():
            for i in range(0 if site == "encoder" else 2):
                step = tokens[i : i + 1]
                others = source if site == "cross" else step
                attention(step, others, others, incremental_state=state, static_kv=site == "cross", need_weights=False)
                attention.reorder_incremental_state(state, torch.empty(BSZ, dtype=torch.long))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mechanisms_are_built_on_the_default_device(case):
    """Seeded numbers are drawn on the CPU, then moved to the default device."""
    make = build_differential if case.differential else build_mechanism
    options = {"num_heads": NUM_HEADS, "head_dim": HEAD_DIM, **case.options}
    here = make(case.name, **options).state_dict()
    with GeneratorsOfTheDevice(), torch.device("meta"):  # the first sees the device argument that the second adds
        there = make(case.name, **options).state_dict()
    assert {name: x.shape for name, x in there.items()} == {name: x.shape for name, x in here.items()}
    assert {x.device.type for x in there.values()} <= {"meta"}


def test_a_tolerance_makes_the_host_wait_and_its_help_says_so(foreign):
    assert WAITING and {case.name for case in WAITING} == {"sinkhorn"}
    for case in WAITING:
        with pytest.raises(DataDependentOutputException):
            build_empty(case)(*draw_empty(case))
    (option,) = (field for field in fields(SinkhornOptions) if field.name == "tolerance")
    assert "host waits" in option.metadata["help"] and "one host sync" in solve.__doc__


def test_the_checks_here_notice_mixed_devices_and_waiting(foreign):
    x = torch.empty(3)
    for fault in (lambda: x.new_tensor([1.0, 2.0]), lambda: x.cpu(), lambda: x + torch.ones(3, device="cpu")):
        with pytest.raises((AssertionError, RuntimeError)), OneDevice():
            fault()
    for wait in (lambda: x.max().item(), lambda: bool(x.any()), lambda: x[x > 0]):
        with pytest.raises(Exception, match="aten"), OneDevice():
            wait()
