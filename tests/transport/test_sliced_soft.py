"""Soft sliced plans: the plan on a line, the sort, and equal results from both algorithms and in any chunks."""

import math
from functools import partial

import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measure import peak_memory
from fairseq_lot.transport import sliced_soft as sliced
from tests import reference
from tests.conftest import change_ways, close, gradients, random

BSZ, HEADS, DIM, SLICES = 3, 4, 3, 5
LENGTHS = {"queries": (6, 4, 2), "keys": (5, 7, 3)}
WAYS = {"plans": torch.inf, "ranks": 0.0}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """The algorithm for sentences of any length: by whole plans or by ranks."""
    monkeypatch.setattr(sliced, "_LONG", WAYS[request.param])


def problem(kind="plain", *, temperature=0.2, inverse_temperature=1.0):
    """Arguments of ``soft_sliced_apply`` but for v: without pads, of ragged self-attention, or ragged with n ≠ m."""
    tgt_len, src_len = (6, 7) if kind == "cross" else (6, 6)
    q, k = random(BSZ, HEADS, tgt_len, DIM), random(BSZ, HEADS, src_len, DIM, seed=2)
    masks, rank_plan = (None, None), None
    if kind != "plain":
        counts = [torch.tensor(LENGTHS[side]) for side in ("queries", "keys" if kind == "cross" else "queries")]
        masks = [torch.arange(size) >= n[:, None] for n, size in zip(counts, (tgt_len, src_len), strict=True)]
        q, k = (x.masked_fill(mask[:, None, :, None], 0.0) for x, mask in zip((q, k), masks, strict=True))
        if kind == "cross":
            rank_plan = sliced.staircase(*counts, tgt_len, src_len, torch.float64)
    return {
        "q": q,
        "k": k,
        "slices": torch.nn.functional.normalize(random(HEADS, SLICES, DIM, seed=3), dim=-1),
        "rank_plan": rank_plan,
        "query_padding_mask": masks[0],
        "key_padding_mask": masks[1],
        "temperature": temperature,
        "inverse_temperature": inverse_temperature,
    }


def soft(arguments, v=None):
    """``n·G v``, or ``n·G`` without v."""
    k = arguments["k"]
    v = torch.eye(k.size(-2), dtype=k.dtype).expand(*k.shape[:-2], -1, -1) if v is None else v
    return sliced.soft_sliced_apply(v=v, **arguments)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(n=st.integers(1, 9), m=st.integers(1, 9), seed=st.integers(0, 100))
def test_staircase_is_the_plan_of_pot_on_a_line(n, m, seed):
    ours = sliced.staircase(torch.tensor([n]), torch.tensor([m]), 9, 10, torch.float64)[0] / n
    x, y = (random(size, seed=seed + size).sort().values.numpy() for size in (n, m))
    close(ours[:n, :m], torch.as_tensor(ot.emd_1d(x, y)))
    close(ours[:n, :m], reference.overlap_plan(n, m))
    assert ours[n:].eq(0).all() and ours[:, m:].eq(0).all()


@pytest.mark.parametrize("n", [1, 4, 7, 1000])
def test_staircase_of_equal_numbers_is_the_identity(n):
    close(sliced.staircase(torch.tensor(n), torch.tensor(n), n, n, torch.float32), torch.eye(n), 1e-6 * n)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(pads=st.lists(st.booleans(), min_size=6, max_size=6), seed=st.integers(0, 100))
def test_sorting_puts_pads_last(pads, seed):
    mask = torch.tensor(pads)
    values = random(2, 6, seed=seed)
    ordered, permutation = sliced.sort_real(values, mask)
    real = int((~mask).sum())
    for line, ranks, row in zip(ordered, permutation, values, strict=True):
        close(line[:real], row[~mask].sort().values, 0)
        assert line[real:].eq(0).all()
        assert not mask[ranks[:real]].any()
        assert sorted(ranks.tolist()) == list(range(6))


def test_sorting_is_stable():
    _, permutation = sliced.sort_real(torch.tensor([1.0, 0.0, 1.0, 0.0, 5.0]), torch.tensor([False] * 4 + [True]))
    assert permutation.tolist() == [1, 3, 0, 2, 4]


@pytest.mark.parametrize("masked", [False, True])
def test_soft_sort_and_its_gradient(masked):
    tokens = random(2, 3, 4, seed=2).requires_grad_()
    mask = torch.tensor([[[False, False, True, False]], [[False, True, True, False]]]) if masked else None
    real_ranks = torch.tensor([[[True, True, True, False]], [[True, True, False, False]]]) if masked else 1.0
    ordered = sliced.sort_real(tokens, mask)[0].detach().requires_grad_()
    scores = -math.log(2) * (ordered[..., None] - tokens[..., None, :]) ** 2
    if masked:
        scores = scores.masked_fill(mask[:, :, None], -torch.inf)
    expected = torch.softmax(scores, -1)
    if masked:
        expected = expected * real_ranks[..., None]
    actual = sliced.SoftSort.apply(ordered, tokens, mask, real_ranks)
    close(actual, expected, 1e-15)
    close(gradients(actual, (ordered, tokens)), gradients(expected, (ordered, tokens)))


def values_and_gradients(kind):
    arguments = problem(kind)
    v = random(BSZ, HEADS, arguments["k"].size(-2), 2, seed=4)
    leaves = [x.requires_grad_() for x in (arguments["q"], arguments["k"], arguments["slices"], v)]
    values = real = soft(arguments, v)
    if arguments["query_padding_mask"] is not None:
        real = values.masked_fill(arguments["query_padding_mask"][:, None, :, None], 0.0)
    return values.detach(), gradients(real, leaves)


@pytest.mark.parametrize("kind", ["plain", "self", "cross"])
def test_plans_and_ranks_give_the_same(kind, monkeypatch):
    found, calls = [], []
    for way in WAYS:
        run = getattr(sliced, f"_by_{way}")
        monkeypatch.setattr(sliced, f"_by_{way}", lambda *inputs, way=way, run=run: calls.append(way) or run(*inputs))
        monkeypatch.setattr(sliced, "_LONG", WAYS[way])
        found.append(values_and_gradients(kind))
    assert set(calls) == set(WAYS)
    (by_plans, of_plans), (by_ranks, of_ranks) = found
    close(by_ranks, by_plans)
    close(of_ranks, of_plans, 1e-11)


@pytest.mark.parametrize(("length", "columns", "long"), [(294, 64, False), (295, 64, True), (2048, 2048, False)])
def test_plans_of_long_sentences_are_not_made_unless_they_are_asked_for(length, columns, long):
    """The identity as v asks for the whole plan."""
    q, v = torch.zeros(1, 1, length, 64), torch.zeros(1, 1, length, columns)
    assert sliced._is_long(q, q[:, :, :5], v) == sliced._is_long(q[:, :, :5], q, v) == long


def test_memory_does_not_grow_with_the_number_of_slices(way, monkeypatch):
    n = 64
    change_ways(monkeypatch, soft_chunk=2 * n**2)
    q, k, v = (random(1, 2, n, DIM, seed=seed).requires_grad_() for seed in range(3))
    options = {"query_padding_mask": None, "key_padding_mask": None, "temperature": 0.1, "inverse_temperature": 1.0}

    def peak(num_slices):
        slices = random(2, num_slices, DIM, seed=3)
        work = partial(sliced.soft_sliced_apply, q, k, v, slices, **options)
        return peak_memory(lambda: work().sum().backward(), q.device)

    few = peak(4)
    assert few > 2 * 2 * n**2 * 8 and peak(40) < 1.1 * few


@pytest.mark.parametrize("kind", ["plain", "self", "cross"])
@pytest.mark.parametrize("chunk", [1, 2 * SLICES * 7**2, 3 * SLICES * 7**2, 2 * HEADS * SLICES * 7**2])
def test_chunks_change_no_value_and_no_gradient(kind, chunk, way, monkeypatch):
    values, of_values = values_and_gradients(kind)
    calls = []
    run = sliced._of_chunk
    monkeypatch.setattr(sliced, "_of_chunk", lambda *inputs: calls.append(inputs[0][0].shape[:2]) or run(*inputs))
    values_and_gradients(kind)
    whole = len(calls)
    calls.clear()
    change_ways(monkeypatch, soft_chunk=chunk)
    in_chunks, of_chunks = values_and_gradients(kind)
    assert len(calls) > whole
    close(in_chunks, values)
    close(of_chunks, of_values, 1e-11)


@pytest.mark.parametrize("kind", ["plain", "self", "cross"])
@pytest.mark.parametrize("chunk", [1, 2**19])
def test_values_are_the_same_without_gradients(kind, chunk, monkeypatch):
    change_ways(monkeypatch, soft_chunk=chunk)
    values, _ = values_and_gradients(kind)
    with torch.no_grad():
        arguments = problem(kind)
        v = random(BSZ, HEADS, arguments["k"].size(-2), 2, seed=4)
        assert torch.equal(soft(arguments, v), values)


def test_large_values_stay_finite(way):
    arguments = problem("cross", temperature=1e-3)
    arguments["q"], arguments["k"] = 100 * arguments["q"].float(), 100 * arguments["k"].float()
    arguments["slices"], arguments["rank_plan"] = arguments["slices"].float(), arguments["rank_plan"].float()
    leaves = [arguments[name].requires_grad_() for name in ("q", "k", "slices")]
    plan = soft(arguments)
    assert plan.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(plan.square().sum(), leaves))


def test_a_pad_far_from_every_token_leaves_no_trace_in_the_gradients(way):
    """A pad stands at 0. A token at 6.7 has a kernel of 3e-20, whose square underflows in float32."""
    q = torch.tensor([6.7, 0.0]).view(1, 1, 2, 1).requires_grad_()
    mask = torch.tensor([[False, True]])
    options = {"query_padding_mask": mask, "key_padding_mask": mask, "temperature": 1.0, "inverse_temperature": 10.0}
    values = sliced.soft_sliced_apply(q, q, torch.ones(1, 1, 2, 1), torch.ones(1, 1, 1), **options)
    (gradient,) = torch.autograd.grad(values.sum(), q)
    assert values.flatten().tolist() == [1.0, 0.0]
    assert gradient.eq(0).all()
