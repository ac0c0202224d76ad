"""Couplings through pivots: their marginals and formula, and the product of plans that is never built."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from fairseq_lot.transport.pivots import pivot_coupling, pivot_scores
from tests import reference
from tests.conftest import Sizes, close, gradients, random


def masses(*shape, seed=2):
    return torch.softmax(random(*shape, seed=seed), -1)


def couple(n=7, m=9, r=3, *, query_updates=5, key_updates=5, size=1.0, seed=1):
    """A coupling of two sentences, and its marginals a, b and σ."""
    a, b, sigma = masses(2, n), masses(2, m, seed=3), masses(r, seed=4)
    scores = size * random(2, n, r, seed=seed), size * random(2, m, r, seed=seed + 1)
    updates = {"query_updates": query_updates, "key_updates": key_updates}
    return pivot_coupling(*scores, a.log(), b.log(), sigma.log(), **updates), a, b, sigma


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    query_updates=st.integers(1, 6),
    key_updates=st.integers(1, 6),
    r=st.integers(1, 5),
    size=st.floats(0, 20),
    seed=st.integers(0, 1000),
)
def test_marginals_of_queries_and_pivots_are_exact_for_any_updates(query_updates, key_updates, r, size, seed):
    coupling, a, _, sigma = couple(r=r, query_updates=query_updates, key_updates=key_updates, size=size, seed=seed)
    close(coupling.from_queries.plan.sum(-1), a, 1e-14)
    close(coupling.to_keys.plan.sum(-1), sigma.expand(2, r), 1e-14)
    close(coupling.conditional.sum(-1), torch.ones_like(a), 1e-13)
    assert coupling.conditional.ge(0).all()
    v = random(2, 9, 4, seed=8)
    close(coupling.from_queries.apply(coupling.to_keys.apply(v)), coupling.conditional @ v, 1e-13)


def test_coupling_is_two_plans_over_the_masses():
    coupling, a, b, _ = couple(query_updates=3, key_updates=4)
    plan = a.unsqueeze(-1) * coupling.conditional
    sigma = masses(3, seed=4)
    query_scores, key_scores = random(2, 7, 3), random(2, 9, 3, seed=2)
    for sentence in range(2):
        first = reference.entropic_plan(query_scores[sentence], a[sentence], sigma, 3)
        second = reference.entropic_plan(key_scores[sentence].T, sigma, b[sentence], 4)
        expected = first @ torch.diag(1 / sigma) @ second
        close(plan[sentence], expected, 1e-14)


def test_applying_one_plan_after_the_other_builds_nothing_of_size_n_by_m():
    n, m = 300, 400
    coupling, *_ = couple(n=n, m=m)
    with Sizes() as seen:
        coupling.from_queries.apply(coupling.to_keys.apply(random(2, m, 2)))
    assert 0 < seen.largest < n * m
    with Sizes() as seen:
        assert coupling.conditional.shape == (2, n, m)
    assert seen.largest >= n * m


@pytest.mark.parametrize("bsz", [1, 3])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3)], ids=["bhnd", "nbhd", "bnhd"])
def test_scores_do_not_depend_on_the_memory_layout_of_tokens(bsz, n, order):
    pivots = random(2, 7, 4).requires_grad_()
    back = [order.index(axis) for axis in range(4)]
    x = random(bsz, 2, n, 4, seed=2).permute(order).contiguous().permute(back).requires_grad_()
    saved = []
    with saved_tensors_hooks(lambda kept: saved.append(kept.data_ptr()) or kept, lambda kept: kept):
        scores = pivot_scores(x, pivots)
    assert order == (0, 2, 1, 3) or x.data_ptr() in saved, "the tokens were copied"
    expected = torch.einsum("bhnd,hrd->bhnr", x, pivots)
    close(scores, expected, 1e-14)
    assert scores.is_contiguous()
    close(gradients(scores, (x, pivots)), gradients(expected, (x, pivots)), 1e-13)
