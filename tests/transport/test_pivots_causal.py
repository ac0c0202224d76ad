"""The causal form through pivots: slow twin, no look-ahead, extreme scores, pads, chunks and state."""

import pytest
import torch

from fairseq_lot.transport import pivots_causal
from fairseq_lot.transport.pivots_causal import absorb, empty_prefix, prefix_apply
from tests.conftest import change_ways, close, gradients

BSZ, HEADS, LENGTH, PIVOTS, WIDTH = 2, 2, 11, 3, 4


def draw_prefix(length=LENGTH, *, early=0, scale=1.0, pads=(), dtype=torch.float64):
    """Query weights, key scores and values; ``pads`` are slots of the first sentence without mass."""
    weights = torch.softmax(torch.randn(BSZ, HEADS, length, PIVOTS, dtype=dtype), -1)
    scores = scale * torch.randn(BSZ, HEADS, length + early, PIVOTS, dtype=dtype)
    v = torch.randn(BSZ, HEADS, length + early, WIDTH, dtype=dtype)
    for slot in pads:
        scores[0, :, slot], v[0, :, slot] = -torch.inf, 0.0
    return [weights, scores, v]


def prefix_twin(weights, scores, v):
    """One sentence and head: loops over queries, keys and pivots; a row that sees no key is zero."""
    early = len(scores) - len(weights)
    rows = []
    for i, row in enumerate(weights):
        seen = range(i + early + 1)
        value = torch.zeros_like(v[0])
        for t, weight in enumerate(row):
            total = torch.logsumexp(scores[: i + early + 1, t], 0)
            for j in seen:
                if not scores[j, t].isinf():
                    value = value + weight * torch.exp(scores[j, t] - total) * v[j]
        rows.append(value)
    return torch.stack(rows)


def same_state(actual, expected):
    close(actual.log_sums, expected.log_sums)
    close(actual.means, expected.means)


@pytest.mark.parametrize("early", [0, 3])
@pytest.mark.parametrize("pads", [(), (0, 1, 5)])
@pytest.mark.parametrize("chunk_len", [1, 4, 16])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_agrees_with_slow_twin(early, pads, chunk_len, scale):
    inputs = [x.requires_grad_() for x in draw_prefix(early=early, pads=pads, scale=scale)]
    values, _ = prefix_apply(*inputs, chunk_len=chunk_len)
    expected = torch.stack(
        [torch.stack([prefix_twin(*args) for args in zip(*x, strict=True)]) for x in zip(*inputs, strict=True)]
    )
    close(values, expected, 1e-10)
    ours, others = gradients(values, inputs), gradients(expected, inputs)
    assert all(gradient.isfinite().all() for gradient in ours)
    pad = inputs[1].isneginf().any(-1, keepdim=True)  # the mask discards the gradients of pads
    of_real = [[first, *(x.masked_fill(pad, 0.0) for x in rest)] for first, *rest in (ours, others)]
    close(*of_real, 1e-10)


def plan_of(weights, scores, **options):
    """A, by ``prefix_apply`` with the identity as values."""
    identity = torch.eye(scores.size(-2), dtype=scores.dtype).expand(*scores.shape[:2], -1, -1)
    return prefix_apply(weights, scores, identity, **options)[0]


@pytest.mark.parametrize("early", [0, 3])
@pytest.mark.parametrize("pads", [(), (0, 1, 5)])
def test_the_paths_with_and_without_peaks_agree(early, pads):
    inputs = [x.requires_grad_() for x in draw_prefix(150, early=early, pads=pads, scale=5.0)]
    values, state = prefix_apply(*inputs)
    with_peaks, expected = prefix_apply(*inputs, empty_prefix(*inputs[1:]))
    close(values, with_peaks, 1e-12)
    same_state(state, expected)
    ours, others = (
        gradients(torch.cat([x.flatten(), after.means.flatten(), after.log_sums.flatten()]), inputs)
        for x, after in ((values, state), (with_peaks, expected))
    )
    close(ours, others, 1e-10)


@pytest.mark.parametrize("length", [1, 8, 9, 150])
@pytest.mark.parametrize("early", [0, 3])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_the_path_of_a_gpu_computes_the_same(length, early, scale, monkeypatch):
    """A GPU does not add the sums of chunks one by one."""
    inputs, found = [x.requires_grad_() for x in draw_prefix(length, early=early, pads=(0,), scale=scale)], []
    for one_by_one in (True, False):
        change_ways(monkeypatch, adds_one_by_one=one_by_one)
        values, state = prefix_apply(*inputs, empty_prefix(*inputs[1:]))
        all_found = torch.cat([x.flatten() for x in (values, state.means, state.log_sums)])
        found.append([all_found, *gradients(all_found, inputs)])
    close(*found, 1e-11)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_gradients_go_through_a_state(one_by_one, monkeypatch):
    change_ways(monkeypatch, adds_one_by_one=one_by_one)
    inputs = [x.requires_grad_() for x in draw_prefix(40, pads=(0,))]
    expected, last = prefix_apply(*inputs)
    first, state = prefix_apply(*(x[..., :20, :] for x in inputs))
    second, state = prefix_apply(*(x[..., 20:, :] for x in inputs), state)
    values = torch.cat([first, second], -2)
    close(values, expected, 1e-12)
    found, wanted = (
        gradients(torch.cat([x.flatten() for x in (found, after.means, after.log_sums)]), inputs)
        for found, after in ((values, state), (expected, last))
    )
    close(found, wanted, 1e-10)


@pytest.mark.parametrize("length", [11, 150])
@pytest.mark.parametrize("early", [0, 3])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_values_and_gradients_without_a_state_are_the_same(length, early, scale):
    inputs = [x.requires_grad_() for x in draw_prefix(length, early=early, pads=(0, 4), scale=scale)]
    (values, state), (expected, _) = (prefix_apply(*inputs, with_state=wanted) for wanted in (False, True))
    assert state is None
    close(values, expected, 1e-13)
    close(gradients(values, inputs), gradients(expected, inputs), 1e-12)


@pytest.mark.parametrize("early", [0, 3])
def test_moderate_scores_need_no_peaks_with_or_without_pads(early):
    for pads in ((), (0, 4)):
        _, scores, _ = draw_prefix(early=early, pads=pads)
        assert pivots_causal._need_no_peaks(scores)
        for size in (-41.0, 41.0, torch.inf, torch.nan):
            scores[1, 1, 5, 1] = size
            assert not pivots_causal._need_no_peaks(scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pads", [(), (0, 1, 2, 20)])
def test_extreme_scores_and_leading_pads_are_finite(dtype, pads):
    for scale in (1e4, 1e-4):
        inputs = [x.requires_grad_() for x in draw_prefix(40, scale=scale, pads=pads, dtype=dtype)]
        values, state = prefix_apply(*inputs)
        assert values.isfinite().all() and state.means.isfinite().all() and state.log_sums.isfinite().all()
        assert all(x.isfinite().all() for x in torch.autograd.grad(values.square().sum(), inputs))
        plan = plan_of(*inputs[:2])
        rows = torch.ones_like(plan[..., 0])
        rows[0, :, : 3 if pads else 0] = 0.0
        close(plan.sum(-1), rows, 1e-5)
        assert plan[0, :, :, list(pads)].eq(0).all()


def test_a_peak_that_rises_and_falls_over_a_long_sentence():
    length = 600
    weights = torch.full((1, 1, length, 1), 1.0)
    ramp = torch.cat([torch.linspace(-1e4, 1e4, length // 2), torch.linspace(1e4, -1e4, length // 2)])
    plan = plan_of(weights, ramp.view(1, 1, length, 1))[0, 0]
    expected = torch.softmax(ramp.double().expand(length, -1) + torch.full((length, length), -torch.inf).triu(1), -1)
    close(plan.double(), expected, 1e-5)


@pytest.mark.parametrize("pads", [(), (0, 1)])
def test_step_by_step_with_a_state_of_constant_size(pads):
    weights, scores, v = draw_prefix(pads=pads)
    expected, last = prefix_apply(weights, scores, v)
    state = absorbed = empty_prefix(scores, v)
    for i in range(LENGTH):
        step = slice(i, i + 1)
        values, state = prefix_apply(weights[..., step, :], scores[..., step, :], v[..., step, :], state)
        close(values, expected[..., step, :], 1e-12)
        assert state.log_sums.shape == (BSZ, HEADS, PIVOTS) and state.means.shape == (BSZ, HEADS, PIVOTS, WIDTH)
        absorbed = absorb(absorbed, scores[..., i, :], v[..., i, :])
        same_state(absorbed, state)
        close(weights[..., step, :] @ absorbed.means, values, 1e-12)
    same_state(state, last)


def test_a_state_without_a_real_key_leaves_no_trace():
    """The first real key gets all the weight, even if its scores are very low."""
    weights, scores, v = draw_prefix(pads=(0, 1))
    scores[:, :, 2] = -1e5
    state = prefix_apply(weights[..., :2, :], scores[..., :2, :], v[..., :2, :])[1]
    assert state.means[0].eq(0).all() and state.log_sums[0].eq(torch.finfo(torch.float64).min).all()
    expected = v[0, :, 2].unsqueeze(-2).expand(-1, PIVOTS, -1)
    for after in (
        absorb(state, scores[..., 2, :], v[..., 2, :]),
        prefix_apply(weights[..., 2:3, :], scores[..., 2:3, :], v[..., 2:3, :], state)[1],
    ):
        close(after.means[0], expected, 1e-12)
        close(after.log_sums[0], scores[0, :, 2], 1e-12)


def test_more_queries_than_keys_are_refused():
    weights, scores, v = draw_prefix()
    with pytest.raises(ValueError, match="11 queries need at least as many keys, got 10"):
        prefix_apply(weights, scores[..., 1:, :], v[..., 1:, :])


def test_memory_is_linear_in_the_length():
    """The largest tensor saved for the backward pass grows as the sentence."""
    largest = []
    for length in (256, 1024):
        sizes = []
        inputs = [x.requires_grad_() for x in draw_prefix(length)]
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: s.append(x.numel()) or x, lambda x: x):
            prefix_apply(*inputs)
        largest.append(max(sizes))
    assert largest[1] == 4 * largest[0]
