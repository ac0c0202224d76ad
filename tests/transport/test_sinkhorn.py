"""Sinkhorn against POT, scipy and its own limits."""

import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from fairseq_lot.attention import reference
from fairseq_lot.transport.marginals import marginal_error
from fairseq_lot.transport.sinkhorn import sinkhorn
from tests.conftest import random


def masses(*shape, seed=2):
    """Positive masses that are not uniform."""
    return torch.softmax(random(*shape, seed=seed), -1)


@pytest.mark.parametrize("epsilon", [0.05, 0.3, 1.0, 10.0])
@pytest.mark.parametrize(("n", "m"), [(6, 6), (5, 8), (8, 3), (1, 4), (4, 1)])
def test_converges_to_the_plan_of_pot(epsilon, n, m):
    scores, a, b = random(n, m), masses(n), masses(m, seed=3)
    expected = ot.sinkhorn(a.numpy(), b.numpy(), -scores.numpy(), epsilon, stopThr=1e-13, numItermax=100_000)
    solution = sinkhorn(scores / epsilon, a.log(), b.log(), num_updates=5_001)
    torch.testing.assert_close(solution.plan, torch.as_tensor(expected), atol=1e-9, rtol=0)
    assert solution.marginal_error < 1e-9


@pytest.mark.parametrize("num_updates", [1, 2, 3, 4, 7, 8])
def test_counts_half_updates_like_the_slow_twin(num_updates):
    scores, a, b = random(5, 7), masses(5), masses(7, seed=3)
    expected = reference.entropic_plan(scores, a, b, num_updates)
    solution = sinkhorn(scores, a.log(), b.log(), num_updates=num_updates)
    torch.testing.assert_close(solution.plan, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(solution.marginal_error, marginal_error(expected, a, b), atol=1e-12, rtol=0)
    torch.testing.assert_close(solution.plan.sum(-1), a, atol=1e-14, rtol=0)


def test_small_epsilon_is_the_best_assignment():
    scores = random(4, 7, 7)
    uniform = torch.full((7,), 1 / 7, dtype=torch.float64).log()
    plan = 7 * sinkhorn(scores / 3e-3, uniform, uniform, num_updates=8_001).plan
    for ours, table in zip(plan, scores, strict=True):
        rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
        assignment = torch.zeros(7, 7, dtype=torch.float64)
        assignment[rows, columns] = 1
        torch.testing.assert_close(ours, assignment, atol=1e-2, rtol=0)


def test_large_epsilon_is_the_product_of_the_marginals():
    scores, a, b = random(5, 7), masses(5), masses(7, seed=3)
    plan = sinkhorn(scores / 1e9, a.log(), b.log(), num_updates=3).plan
    torch.testing.assert_close(plan, a[:, None] * b, atol=1e-8, rtol=0)


def test_one_update_is_softmax_bit_for_bit():
    scores = random(2, 5, 7).float()
    a, b = masses(2, 5).float().log(), masses(2, 7).float().log()
    assert torch.equal(sinkhorn(scores, a, b, num_updates=1).conditional, torch.softmax(scores, -1))


def test_tolerance_is_reached_and_stops_early():
    scores, a, b = random(3, 6, 6), masses(3, 6).log(), masses(3, 6, seed=3).log()
    bound = sinkhorn(scores, a, b, num_updates=501)
    assert bound.marginal_error.max() < 1e-14
    for tolerance in (1e-2, 1e-4, 1e-8):
        stopped = sinkhorn(scores, a, b, num_updates=501, tolerance=tolerance)
        assert tolerance / 1e3 < stopped.marginal_error.max() <= tolerance
        torch.testing.assert_close(stopped.plan.sum(-1), a.exp())
        # it is the plan of an odd number of updates, and the one before had not reached the tolerance
        counts = [
            n
            for n in range(1, 200, 2)
            if torch.allclose(sinkhorn(scores, a, b, num_updates=n).plan, stopped.plan, rtol=0, atol=1e-15)
        ]
        assert counts
        before = sinkhorn(scores, a, b, num_updates=counts[0] - 2)
        assert before.marginal_error.max() > tolerance


def test_no_mass_is_no_point():
    scores = random(6, 7).requires_grad_()
    a, b = torch.zeros(6, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    rows, columns = torch.tensor([0, 2, 5]), torch.tensor([1, 2, 3, 6])
    a[rows], b[columns] = masses(3), masses(4, seed=3)
    plan = sinkhorn(scores, a.log(), b.log(), num_updates=5).plan
    part = scores[rows][:, columns]
    expected = sinkhorn(part, a[rows].log(), b[columns].log(), num_updates=5).plan
    torch.testing.assert_close(plan[rows][:, columns], expected, atol=1e-14, rtol=0)
    assert plan.sum().item() == pytest.approx(1)
    assert plan[[1, 3, 4]].eq(0).all() and plan[:, [0, 4, 5]].eq(0).all()
    weights = random(6, 7, seed=9)
    (gradient,) = torch.autograd.grad((plan * weights).sum(), scores)
    (expected,) = torch.autograd.grad((expected * weights[rows][:, columns]).sum(), scores)
    torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=0)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 6),
    m=st.integers(1, 6),
    num_updates=st.integers(1, 6),
    size=st.floats(0, 30),
    seed=st.integers(0, 1000),
)
def test_rows_are_exact_and_apply_is_the_product(n, m, num_updates, size, seed):
    scores, a, b = size * random(2, n, m, seed=seed), masses(n), masses(2, m, seed=3)
    solution = sinkhorn(scores, a.log(), b.log(), num_updates=num_updates)
    torch.testing.assert_close(solution.plan.sum(-1), a.expand(2, n), atol=1e-14, rtol=0)
    assert solution.plan.ge(0).all()
    v = random(2, m, 3, seed=4)
    torch.testing.assert_close(a[:, None] * solution.apply(v), solution.plan @ v, atol=1e-13, rtol=0)
