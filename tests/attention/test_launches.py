"""The number of kernels that a layer launches on a GPU; on short sentences launches take the time, not arithmetic.

Kernels are counted on the CPU, in half precision with padding. Where the code takes another path on a GPU, the test
switches to that path.
"""

from functools import partial

import pytest
import torch

from fairseq_lot.attention import base
from fairseq_lot.attention import near_far as near_far_mechanism
from fairseq_lot.attention import softmax as softmax_file
from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.numerics.devices import WAYS
from fairseq_lot.transport import pivots_causal
from tests.conftest import change_ways, close
from tests.launches import launches
from tests.variants import build, build_differential, padding_mask

BSZ, HEADS, LENGTH, DIM = 4, 4, 24, 32
both_pads = pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])


@pytest.fixture(autouse=True)
def half_precision_as_on_a_gpu(monkeypatch):
    change_ways(monkeypatch, attends_in_float32=False)


build_half = partial(build, num_heads=HEADS, head_dim=DIM, dtype=torch.float16)


def draw_half(length=LENGTH, head_dim=DIM, number=3):
    return [torch.randn(BSZ, HEADS, length, head_dim, dtype=torch.float16) for _ in range(number)]


def pads(length=LENGTH):
    return padding_mask((length - 3, length, length, 1), length, "left")


def forward_and_backward(mechanism, head_dim=DIM, length=LENGTH, causal=False):
    """The numbers of kernels of a forward and of a backward pass."""
    inputs, mask = [x.requires_grad_() for x in draw_half(length, head_dim)], pads(length)
    gradient = torch.randn_like(inputs[0])
    leaves = [*inputs, *mechanism.parameters()]

    def forward():
        return mechanism(*inputs, None if causal else mask, mask, causal=causal).values

    def both():
        torch.autograd.grad(forward(), leaves, gradient, allow_unused=True)

    before = launches(forward)
    return before, launches(both) - before


@pytest.mark.parametrize(("slicer", "head_dim"), [("axis", 128), ("learnable", DIM)])
def test_hard_esp_takes_no_more_kernels_for_more_slices(slicer, head_dim, monkeypatch):
    change_ways(monkeypatch, hard_chunk=WAYS["other"].hard_chunk)
    few, many = (
        forward_and_backward(
            build_half("esp", hard=True, slicer=slicer, head_dim=head_dim, num_slices=number), head_dim
        )
        for number in (2, 128)
    )
    assert few == many and many[0] <= 150 and many[1] <= 250, (few, many)


def test_hard_esp_splits_slices_when_memory_is_short(monkeypatch):
    mechanism = build_half("esp", hard=True)
    change_ways(monkeypatch, hard_chunk=BSZ * HEADS * LENGTH * DIM)
    few, _ = forward_and_backward(mechanism, DIM)
    change_ways(monkeypatch, hard_chunk=WAYS["other"].hard_chunk)
    assert few > 2 * forward_and_backward(mechanism, DIM)[0]


@pytest.mark.parametrize(("num_updates", "most"), [(1, (37, 18)), (15, (82, 149))])
def test_a_learnt_epsilon_adds_few_kernels_and_a_fixed_one_none(num_updates, most):
    counts = [
        forward_and_backward(build_half("sinkhorn", num_updates=num_updates, epsilon=epsilon, learn_epsilon=learn), DIM)
        for epsilon, learn in ((1.0, False), (2.0, False), (1.0, True))
    ]
    assert counts[0] == counts[1] and counts[0][0] <= most[0] and counts[0][1] <= most[1]
    # forward: to float32, exp, division, times s; backward: their gradients, with sums over each head's scores
    assert counts[2][0] <= counts[0][0] + 4 and counts[2][1] <= counts[0][1] + 8


def test_lot_takes_no_more_kernels_for_longer_sentences():
    found = [forward_and_backward(build_half("lot"), length=length) for length in (LENGTH, 1000)]
    assert found[0] == found[1] and found[0][0] <= 105 and found[0][1] <= 126, found


@pytest.mark.parametrize("length", [LENGTH, WAYS["other"].dense_length])
@pytest.mark.parametrize(("options", "most"), [({}, 40), ({"prior": "alibi"}, 53)])
def test_a_layer_of_near_far_takes_few_kernels(options, most, length, monkeypatch):
    change_ways(monkeypatch, dense_length=WAYS["other"].dense_length, adds_one_by_one=False)
    forward, backward = forward_and_backward(build_half("near_far", **options), length=length)
    assert forward <= most and backward <= 42, (forward, backward)


@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("lot", {"query_updates": 1}, {24: (69, 63), 1000: (89, 83)}),
        ("near_far", {}, {24: (103, 116), 1000: (134, 146)}),
    ],
)
def test_kernels_of_a_causal_layer_grow_with_the_logarithm_of_the_length(name, options, most, monkeypatch):
    """24 tokens are 3 chunks, 1,000 are 125."""
    monkeypatch.setattr(near_far_mechanism.NearFar, "_rows_are_kept", lambda *_: False)  # as on a GPU
    monkeypatch.setattr(pivots_causal, "_LARGEST_WITHOUT_PEAK", 0.0)
    change_ways(monkeypatch, adds_one_by_one=False)
    found = {length: forward_and_backward(build_half(name, **options), length=length, causal=True) for length in most}
    for length, limits in most.items():
        assert all(count <= limit for count, limit in zip(found[length], limits, strict=True)), found


@pytest.mark.parametrize(("options", "most"), [({}, (82, 90)), ({"band": "expected"}, (74, 103))])
def test_near_far_takes_no_more_kernels_for_longer_sentences(options, most, monkeypatch):
    change_ways(monkeypatch, adds_one_by_one=False)
    found = [forward_and_backward(build_half("near_far", **options), length=length) for length in (300, 1000)]
    assert found[0] == found[1] and all(count <= limit for count, limit in zip(found[0], most, strict=True)), found


def test_kernels_of_near_far_with_a_prior_grow_with_the_logarithm_of_the_length(monkeypatch):
    """300 tokens are 10 blocks, 1,000 are 32."""
    change_ways(monkeypatch, adds_one_by_one=False)
    for length, most in ((300, (148, 140)), (1000, (160, 152))):
        found = forward_and_backward(build_half("near_far", prior="alibi"), length=length)
        assert all(count <= limit for count, limit in zip(found, most, strict=True)), (length, found)


@both_pads
@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("lot", {"query_updates": 1}, (15, 15)),
        ("near_far", {}, (22, 32)),
        ("near_far", {"prior": "alibi"}, (31, 41)),
    ],
)
@torch.no_grad()
def test_a_decoding_step_takes_few_kernels(name, options, most, padded):
    mechanism, state = build_half(name, **options).eval(), {}
    mask = pads()[:, :1] if padded else None
    for _ in range(getattr(mechanism.options, "window", 0) + 2):  # from then on every token moves near_far's window
        _, state = mechanism.causal_step(*draw_half(1), mask, state, False)
    token = draw_half(1)
    assert launches(lambda: mechanism.causal_step(*token, mask, state, False)) <= most[padded]


@pytest.mark.parametrize("options", [{}, {"prior": "alibi"}])
def test_short_sentences_of_near_far_take_softmaxs_kernels_and_a_zero_gradient_per_parameter(options):
    softmax = build_half("softmax", **options)
    for causal in (False, True):
        forward, backward = forward_and_backward(build_half("near_far", exact_up_to=LENGTH, **options), causal=causal)
        exact = forward_and_backward(softmax, causal=causal)
        assert (forward, backward) == (exact[0], exact[1] + 2)


@torch.no_grad()
def test_short_targets_of_near_far_take_softmaxs_kernels():
    def steps(name, **options):
        mechanism = build_half(name, **options).eval()

        def decode():
            state = {}
            for _ in range(LENGTH):
                _, state = mechanism.causal_step(*draw_half(1), None, state, False)

        return launches(decode)

    assert steps("near_far", exact_up_to=LENGTH) == steps("softmax")


@both_pads
@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("softmax", {}, (7, 7)),
        ("near_far", {"band": "expected", "exact_up_to": 24}, (7, 7)),
        ("lot", {"query_updates": 1}, (8, 8)),
        ("near_far", {"band": "expected"}, (40, 42)),
    ],
)
@torch.no_grad()
def test_cross_attention_of_a_decoding_step_takes_few_kernels(name, options, most, padded):
    mechanism = build_half(name, **options).eval()
    summary, (q,) = mechanism.summarise(*draw_half(number=2), pads() if padded else None), draw_half(1, number=1)
    assert launches(lambda: mechanism.attend_summary(q, summary)) <= most[padded]


@pytest.mark.parametrize("differential", [False, True])
@torch.no_grad()
def test_pads_of_keys_and_values_are_zeroed_once(differential, monkeypatch):
    mechanism = (build_differential if differential else build_mechanism)("softmax", num_heads=HEADS, head_dim=DIM)
    real, masked = base.without_pads, []

    def spy(x, mask):
        if mask is not None:
            masked.append(x.size(2))
        return real(x, mask)

    monkeypatch.setattr(base, "without_pads", spy)
    k, v = (x.float().masked_fill(pads()[:, None, :, None], torch.nan) for x in draw_half(number=2))
    summary = mechanism.summarise(k, v, pads())
    assert masked == [LENGTH, LENGTH]
    for _ in range(3):
        (q,) = draw_half(1, number=1)
        assert mechanism.attend_summary(q.float(), summary).values.isfinite().all()
    assert masked == [LENGTH, LENGTH]
    state, masked[:] = {}, []
    for i in range(LENGTH):
        step = [x.float() for x in draw_half(1)]
        _, state = mechanism.causal_step(*step, pads()[:, i : i + 1], state, False)
    assert set(masked) == {1}  # only the new token of each step


@torch.no_grad()
def test_hooks_see_the_mechanism_inside_a_differential_one():
    """Calibration and diagnosis hook the inner mechanism, in one pass and step by step."""
    mechanism = build_differential("softmax", num_heads=HEADS, head_dim=DIM)
    seen = []
    mechanism.inner.register_forward_hook(lambda module, args, output: seen.append(output.values.size(2)))
    q, k, v = (x.float() for x in draw_half())
    mechanism(q, k, v, pads(), pads())
    mechanism.attend_summary(q[:, :, :1], mechanism.summarise(k, v, pads()))
    mechanism.causal_step(q[:, :, :2], k[:, :, :2], v[:, :, :2], None, {}, False)
    assert seen == [LENGTH, 1, 2]


@pytest.mark.parametrize("prior", [None, "alibi"])
@pytest.mark.parametrize("layout", [None, "right", "left"])
@pytest.mark.parametrize("tgt_len", [1, 3, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_makes_a_mask_only_where_the_flash_kernel_needs_one(prior, layout, tgt_len, causal, monkeypatch):
    mechanism = build_mechanism("softmax", num_heads=2, head_dim=4, **({"prior": prior} if prior else {})).double()
    q, k, v = (torch.randn(3, 2, length, 4, dtype=torch.float64) for length in (tgt_len, 6, 6))
    mask = None if layout is None else padding_mask((6, 4, 2), 6, layout)
    calls = []

    def fused(*args, **options):
        calls.append((options["attn_mask"], options["is_causal"]))
        return torch.nn.functional.scaled_dot_product_attention(*args, **options)

    monkeypatch.setattr(softmax_file, "scaled_dot_product_attention", fused)
    values = mechanism(q, k, v, None, mask, causal=causal).values
    ((bias, is_causal),) = calls
    assert is_causal == (causal and tgt_len == 6 and mask is None and prior is None)
    needed = prior is not None or mask is not None or (causal and 1 < tgt_len < 6)
    assert (bias is not None) == needed
    expected = mechanism(q, k, v, None, mask, need_weights=True, causal=causal)
    close(values, expected.values)
    assert not causal or expected.weights.triu(1 + 6 - tgt_len).eq(0).all()
