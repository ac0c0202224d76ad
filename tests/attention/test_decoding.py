"""Decoding with summaries of the source and with causal states equals attention in one pass."""

import pytest
import torch

from fairseq_lot.attention.registry import build_mechanism
from tests import reference
from tests.conftest import close, gradients
from tests.transport.test_pivots_causal import prefix_twin
from tests.variants import CASES, CAUSAL_CASES, HEAD_DIM, NUM_HEADS, draw, padding_mask

UNCOUPLED = [case for case in CASES if not case.build().traits.couples_queries]
every_causal_case = pytest.mark.parametrize("case", CAUSAL_CASES, ids=str)
both_dtypes = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 5e-3)], ids=str
)
LENGTHS, SIZE, BSZ = (6, 4, 2), 6, 3
LONG = 20
ORDER = torch.tensor([2, 0, 0])


def reorder(tensors):
    """Cached tensors with their batch reordered, as by a beam search."""
    return {name: x.index_select(0, ORDER) for name, x in tensors.items()}


@pytest.mark.fast_if(lambda case, dtype, **_: dtype == torch.float64 or case.variant == "default")
@pytest.mark.parametrize("case", [case for case in UNCOUPLED if "cross" in case.kinds], ids=str)
@both_dtypes
@pytest.mark.parametrize("layout", [None, "right", "left"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_attending_to_a_summary_equals_attention(case, dtype, tolerance, layout, need_weights):
    mechanism = case.build(dtype)
    q, k, v = draw(dtype=dtype)
    mask = None if layout is None else padding_mask(LENGTHS, SIZE, layout)
    if mask is not None:
        k, v = (x.masked_fill(mask[:, None, :, None], torch.nan) for x in (k, v))
    expected = mechanism(q, k, v, None, mask, need_weights)
    summary = mechanism.summarise(k, v, mask, need_weights)
    output = mechanism.attend_summary(q, summary, need_weights)
    assert output.values.dtype == dtype and (output.weights is not None) == need_weights
    close(output.values, expected.values, tolerance, relative=tolerance)
    after = mechanism.attend_summary(q[ORDER, :, :1], reorder(summary), need_weights)
    close(after.values, expected.values[ORDER, :, :1], tolerance, relative=tolerance)
    if need_weights:
        close(output.weights, expected.weights, tolerance, relative=tolerance)
        close(after.weights, expected.weights[ORDER, :, :1], tolerance, relative=tolerance)


@pytest.mark.fast_if(lambda case, dtype, **_: dtype == torch.float64 or case.variant == "default")
@every_causal_case
@both_dtypes
@pytest.mark.parametrize("layout", [None, "right", "late"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_causal_steps_equal_causal_attention(case, dtype, tolerance, layout, need_weights):
    """``late``: only the later steps have a mask, as in a batch whose short sentences end first."""
    mechanism = case.build(dtype)
    q, k, v = draw(3, LONG, LONG, dtype=dtype)
    mask = None if layout is None else padding_mask(LENGTHS, LONG, "right")
    expected = mechanism(q, k, v, None, mask, need_weights, causal=True)
    state, rows = {}, torch.arange(BSZ)
    for start, stop in ((0, 1), (1, 2), (2, 4), (4, 5), (5, 18), (18, 19), (19, 20)):
        if start == 2:
            state, rows = reorder(state), ORDER
        new = (slice(None), slice(None), slice(start, stop))
        no_mask = mask is None or (layout == "late" and start < 2)
        pads = None if no_mask else mask[rows, start:stop]
        output, state = mechanism.causal_step(q[rows][new], k[rows][new], v[rows][new], pads, state, need_weights)
        assert output.values.dtype == dtype
        close(output.values, expected.values[rows][new], tolerance, relative=tolerance)
        if need_weights:
            close(output.weights, expected.weights[rows][new][..., :stop], tolerance, relative=tolerance)


@every_causal_case
def test_causal_queries_without_a_key_are_refused(case):
    q, k, v = draw(tgt_len=SIZE)
    with pytest.raises(ValueError, match="a key for every query; got 6 and 4"):
        case.build()(q, k[:, :, :4], v[:, :, :4], causal=True)


@every_causal_case
@pytest.mark.parametrize("need_weights", [False, True])
def test_late_queries_and_a_first_step_with_keys_before_its_query(case, need_weights):
    """With --cross-self-attention the keys before the first query are the source's."""
    mechanism, early = case.build(), LONG // 2
    q, k, v = draw(3, LONG, LONG)
    mask = padding_mask((LONG, 15, 12), LONG, "left")
    expected = mechanism(q, k, v, None, mask, need_weights, causal=True)
    late = mechanism(q[:, :, early:], k, v, None, mask, need_weights, causal=True)
    close(late.values, expected.values[:, :, early:])
    state = {}
    for start, stop in ((0, early + 1), *((i, i + 1) for i in range(early + 1, LONG))):
        new, query = slice(start, stop), slice(stop - 1, stop)
        step = q[:, :, query], k[:, :, new], v[:, :, new], mask[:, new], state, need_weights
        output, state = mechanism.causal_step(*step)
        close(output.values, expected.values[:, :, query])
        if need_weights:
            close(late.weights[:, :, stop - 1 - early], expected.weights[:, :, stop - 1])
            close(output.weights, expected.weights[:, :, query, :stop])
        if case.name == "softmax":  # without causal, LOT has a second marginal, and near_far's band starts at query 0
            last = mechanism(q[:, :, query], k[:, :, :stop], v[:, :, :stop], None, mask[:, :stop])
            close(last.values, expected.values[:, :, query])


TOKEN = 2 * HEAD_DIM  # a key and a value
SUMS = 6 * (HEAD_DIM + 1)  # of six pivots or features


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("softmax", {}, [n * TOKEN for n in range(1, LONG + 1)]),
        ("near_far", {"num_features": 0, "window": 3}, [n * TOKEN for n in range(1, LONG + 1)]),
        (
            "near_far",
            {"num_features": 6, "window": 3},
            [TOKEN, 2 * TOKEN, 3 * TOKEN, 4 * TOKEN, *[4 * TOKEN + SUMS] * 16],
        ),
        (
            "near_far",
            {"num_features": 6, "window": 3, "exact_up_to": 9},
            [*(n * TOKEN for n in range(1, 10)), *[4 * TOKEN + SUMS] * 11],
        ),
        ("lot", {"num_pivots": 6, "query_updates": 1}, [SUMS] * LONG),
    ],
)
def test_size_of_the_cache_of_decoding(name, options, sizes):
    """Softmax and a band alone cache all keys and values; LOT caches sums over them.

    near_far caches the last keys and values and sums over the earlier ones, with ``exact_up_to`` from that length on.
    """
    mechanism = build_mechanism(name, num_heads=NUM_HEADS, head_dim=HEAD_DIM, **options).double()
    inputs = draw(3, LONG, LONG)
    state, found = {}, []
    for i in range(LONG):
        _, state = mechanism.causal_step(*(x[:, :, i : i + 1] for x in inputs), None, state, False)
        found.append(sum(x[0, 0].numel() for x in state.values()))
    assert found == sizes


def test_a_summary_of_lot_does_not_grow():
    mechanism = build_mechanism("lot", num_heads=NUM_HEADS, head_dim=HEAD_DIM, query_updates=1).double()
    short, long = (mechanism.summarise(*draw(src_len=n)[1:]) for n in (2, 40))
    assert {name: x.shape for name, x in short.items()} == {name: x.shape for name, x in long.items()}


@pytest.mark.parametrize("case", [case for case in CAUSAL_CASES if case.name == "lot"], ids=str)
def test_weights_are_none_if_the_cache_was_made_without_them(case):
    mechanism = case.build()
    q, k, v = draw(tgt_len=SIZE)
    assert mechanism.attend_summary(q, mechanism.summarise(k, v), need_weights=True).weights is None
    first, second = ([x[:, :, i : i + 1] for x in (q, k, v)] for i in (0, 1))
    _, state = mechanism.causal_step(*first, None, {}, False)
    output, _ = mechanism.causal_step(*second, None, state, True)
    assert output.weights is None and output.values.isfinite().all()


@pytest.mark.parametrize("case", [c for c in CAUSAL_CASES if c.name == "lot" and not c.differential], ids=str)
def test_causal_lot_agrees_with_slow_twin(case):
    mechanism = case.build()
    inputs = [x.requires_grad_() for x in draw(bsz=1, tgt_len=5, src_len=5)]
    output = mechanism(*inputs, need_weights=True, causal=True)
    q, k, v = (x[0] for x in inputs)
    identity = torch.eye(5, dtype=torch.float64)
    plan = []
    for pivots, *tokens in zip(mechanism.pivots, q, k, strict=True):
        ours, keys = (reference.scores(x, pivots) / mechanism.options.epsilon for x in tokens)
        plan.append(prefix_twin(torch.softmax(ours, -1), keys, identity))
    plan = torch.stack(plan)
    close(output.weights[0], plan, 1e-10)
    close(output.values[0], plan @ v, 1e-10)
    leaves = [*inputs, mechanism.pivots]
    close(gradients(output.values[0], leaves), gradients(plan @ v, leaves), 1e-10)
