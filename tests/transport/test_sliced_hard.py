"""Exact sorts: the merged breakpoints, their memory and their gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_lot.transport.sliced_hard import hard_sliced_plan, segments
from fairseq_lot.transport.sliced_soft import staircase
from tests import reference
from tests.conftest import Sizes, change_ways, close, gradients, random

HEADS, DIM, SLICES = 2, 4, 3


def directions(num_slices=SLICES, dim=DIM, dtype=torch.float64):
    return torch.nn.functional.normalize(random(HEADS, num_slices, dim, seed=3, dtype=dtype), dim=-1)


def solve(q, k, slices, *, masks=(None, None), same_number=False):
    """A function that multiplies values by the plan."""
    pads = {"query_padding_mask": masks[0], "key_padding_mask": masks[1]}
    return hard_sliced_plan(q, k, slices, same_number=same_number, inverse_temperature=1.0, **pads)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(counts=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 11)), min_size=1, max_size=3))
def test_segments_are_the_staircase_of_every_sentence(counts):
    n, m = torch.tensor(counts).T
    row, column, length = segments(n, m, 9, 11)
    assert row.shape == column.shape == length.shape == (len(counts), 9 + 11 - 1)
    assert length.ge(0).all() and torch.equal(length.sum(1), n * m)
    assert (length > 0).sum(1).le(n + m - 1).all()
    plans = torch.zeros(len(counts), 9, 11, dtype=torch.float64)
    for i, (rows, columns) in enumerate(counts):
        plans[i].index_put_((row[i], column[i]), length[i].double() / columns, accumulate=True)
        close(plans[i, :rows, :columns], rows * reference.overlap_plan(rows, columns))
    close(staircase(n, m, 9, 11, torch.float64), plans)


@pytest.mark.parametrize("sizes", [(1000, 999), (1024, 512), (7, 4000), (4000, 7)])
def test_long_sentences_have_exact_shares(sizes):
    n, m = (torch.tensor([size]) for size in sizes)
    row, column, length = segments(n, m, *sizes)
    rows = torch.zeros(sizes[0], dtype=torch.long).index_add_(0, row[0], length[0])
    columns = torch.zeros(sizes[1], dtype=torch.long).index_add_(0, column[0], length[0])
    assert rows.eq(sizes[1]).all() and columns.eq(sizes[0]).all()


@pytest.mark.parametrize("chunk", [1, 3 * 7 * DIM, 2 * SLICES * 7 * DIM])
@pytest.mark.parametrize("sizes", [(7, 7), (7, 6)])
def test_chunk_size_changes_nothing(chunk, sizes, monkeypatch):
    """One slice of one head at a time, several of them, or two heads at once, against all of them."""
    q, k, v = (random(2, HEADS, size, DIM, seed=seed).requires_grad_() for seed, size in enumerate((*sizes, sizes[1])))
    masks = [torch.arange(size) >= torch.tensor([[size], [size - 2]]) for size in sizes]
    if sizes[0] == sizes[1]:
        masks[1] = masks[0]
    results = []
    for size in (2**20, chunk):
        change_ways(monkeypatch, hard_chunk=size)
        inputs = [x.masked_fill(masks[i][:, None, :, None], 0.0) for x, i in ((q, 0), (k, 1), (v, 1))]
        apply = solve(*inputs[:2], directions(), masks=masks, same_number=sizes[0] == sizes[1])
        values = apply(inputs[2])
        results.append([values, *gradients(values, (q, k, v))])
    close(*results)


@pytest.fixture
def smallest_chunks(monkeypatch):
    """One slice of one head at a time, so that the chunk is not the largest tensor."""
    change_ways(monkeypatch, hard_chunk=1)


def measure(n, m, num_slices, *, dim=DIM, plan_asked=False, masked=False):
    """Largest tensor, elements made and elements kept for the backward pass, of values and gradients."""
    q, k, v = (random(1, HEADS, size, dim, dtype=torch.float32).requires_grad_() for size in (n, m, m))
    slices = directions(num_slices, dim, torch.float32).requires_grad_()
    masks = [torch.arange(size)[None] >= size - 2 if masked else None for size in (n, m)]
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().size() // x.element_size()
        return x

    with Sizes() as sizes:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            apply = solve(q, k, slices, masks=masks, same_number=n == m)
            values = apply(torch.eye(m).expand(1, HEADS, m, m) if plan_asked else v)
        torch.autograd.grad(values.square().sum(), (q, k, v, slices), allow_unused=True)
    return sizes.largest, sizes.total, sum(kept.values())


@pytest.mark.parametrize("sizes", [(500, 500), (500, 499), (300, 600), (600, 300)])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_of_size_n_times_m_is_made(sizes, masked, smallest_chunks):
    longest = HEADS * sum(sizes) * max(DIM, SLICES)
    largest, _, _ = measure(*sizes, SLICES, masked=masked)
    assert largest <= longest < sizes[0] * sizes[1] / 4
    assert measure(*sizes, SLICES, plan_asked=True)[0] >= HEADS * sizes[0] * sizes[1]


@pytest.mark.parametrize("sizes", [(64, 64), (64, 63)])
def test_memory_is_the_tokens_plus_a_line_for_every_slice(sizes, smallest_chunks):
    dim, few, many = 32, 8, 64
    tokens, lines = HEADS * sum(sizes) * dim, HEADS * sum(sizes)
    for num_slices in (few, many):
        largest, _, kept = measure(*sizes, num_slices, dim=dim)
        assert largest <= max(tokens, num_slices * lines, HEADS * num_slices * dim)
        assert kept <= 3 * tokens + 4 * num_slices * lines + HEADS * num_slices * dim
        assert num_slices == few or kept < num_slices * tokens / 4


@pytest.mark.parametrize("difference", [0, 1])
def test_work_is_linear_in_the_length(difference, smallest_chunks):
    short, long = (measure(n, n - difference, SLICES)[1] for n in (200, 400))
    assert long < 2.1 * short
