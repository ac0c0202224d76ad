"""Sinkhorn against POT, scipy and its own limits."""

import ot
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from fairseq_lot.numerics.log_domain import log_domain_sinkhorn
from fairseq_lot.transport.marginals import marginal_error
from fairseq_lot.transport.sinkhorn import solve
from tests import reference
from tests.conftest import close, random


def masses(*shape, seed=2):
    """Positive masses that are not uniform."""
    return torch.softmax(random(*shape, seed=seed), -1)


@pytest.mark.parametrize("epsilon", [0.05, 0.3, 1.0, 10.0])
@pytest.mark.parametrize(("n", "m"), [(6, 6), (5, 8), (8, 3), (1, 4), (4, 1)])
def test_converges_to_the_plan_of_pot(epsilon, n, m):
    scores, a, b = random(n, m), masses(n), masses(m, seed=3)
    expected = ot.sinkhorn(a.numpy(), b.numpy(), -scores.numpy(), epsilon, stopThr=1e-13, numItermax=100_000)
    solution = solve(scores / epsilon, a.log(), b.log(), num_updates=5_001)
    close(solution.plan, torch.as_tensor(expected), 1e-9)
    assert solution.marginal_error < 1e-9


@pytest.mark.parametrize("num_updates", [1, 2, 3, 4, 7, 8])
def test_counts_half_updates_like_the_slow_twin(num_updates):
    scores, a, b = random(5, 7), masses(5), masses(7, seed=3)
    expected = reference.entropic_plan(scores, a, b, num_updates)
    solution = solve(scores, a.log(), b.log(), num_updates=num_updates)
    close(solution.plan, expected)
    close(solution.marginal_error, marginal_error(expected, a, b))
    close(solution.plan.sum(-1), a, 1e-14)
    v = random(7, 3, seed=4)
    close(a[:, None] * solution.apply(v), solution.plan @ v, 1e-13)


@pytest.mark.parametrize("solver", [solve, log_domain_sinkhorn])
@pytest.mark.parametrize("num_updates", [6, 7])
def test_a_tolerance_that_is_met_at_once_leaves_an_update_of_the_columns(solver, num_updates):
    """Without the update of the columns, gradients would be softmax's."""
    results = []
    for options in ({"num_updates": num_updates, "tolerance": 10.0}, {"num_updates": 2 + num_updates % 2}):
        scores = random(5, 7).requires_grad_()
        plan = solver(scores, masses(5).log(), masses(7, seed=3).log(), **options)
        plan = getattr(plan, "conditional", plan)
        (plan * random(5, 7, seed=4)).sum().backward()
        results.append((plan, scores.grad))
    for stopped, counted in zip(*results, strict=True):
        close(stopped, counted)


def test_small_epsilon_is_the_best_assignment():
    scores = random(4, 7, 7)
    uniform = torch.full((7,), 1 / 7, dtype=torch.float64).log()
    plan = 7 * solve(scores / 3e-3, uniform, uniform, num_updates=8_001).plan
    for ours, table in zip(plan, scores, strict=True):
        rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
        assignment = torch.zeros(7, 7, dtype=torch.float64)
        assignment[rows, columns] = 1
        close(ours, assignment, 1e-2)


def test_large_epsilon_is_the_product_of_the_marginals():
    scores, a, b = random(5, 7), masses(5), masses(7, seed=3)
    plan = solve(scores / 1e9, a.log(), b.log(), num_updates=3).plan
    close(plan, a[:, None] * b, 1e-8)


def test_one_update_is_softmax_bit_for_bit():
    scores = random(2, 5, 7).float()
    a, b = masses(2, 5).float().log(), masses(2, 7).float().log()
    assert torch.equal(solve(scores, a, b, num_updates=1).conditional, torch.softmax(scores, -1))


def test_tolerance_is_reached_and_stops_early():
    scores, a, b = random(3, 6, 6), masses(3, 6).log(), masses(3, 6, seed=3).log()
    bound = solve(scores, a, b, num_updates=501)
    assert bound.marginal_error.max() < 1e-14
    for tolerance in (1e-2, 1e-4, 1e-8):
        stopped = solve(scores, a, b, num_updates=501, tolerance=tolerance)
        assert tolerance / 1e3 < stopped.marginal_error.max() <= tolerance
        torch.testing.assert_close(stopped.plan.sum(-1), a.exp())
        # it is the plan of an odd number of updates, and the one before had not reached the tolerance
        plans = ((n, solve(scores, a, b, num_updates=n).plan) for n in range(1, 200, 2))
        count = next(n for n, plan in plans if torch.allclose(plan, stopped.plan, rtol=0, atol=1e-15))
        assert solve(scores, a, b, num_updates=count - 2).marginal_error.max() > tolerance
