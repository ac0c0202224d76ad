"""Claims of the papers on transport attention, each on matrices that are small enough to check.

Limits in epsilon are in test_sinkhorn.py, exact sides and the rank of couplings in test_pivots.py, the limits of soft
sorting in test_sliced.py; what is here is named after the claim.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from fairseq_lot.transport import diagnostics
from fairseq_lot.transport.certificates import perturbation_certificate
from fairseq_lot.transport.sinkhorn import sinkhorn

SEEDS = st.integers(0, 10_000)


def random(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(ours, expected, atol=1e-8):
    torch.testing.assert_close(ours, expected, atol=atol, rtol=0)


def exact(scores, epsilon=1.0):
    """A of the exact plan: rows sum to 1, columns to n/m."""
    n, m = scores.shape[-2:]
    a, b = (-torch.full((size,), size, dtype=torch.float64).log() for size in (n, m))
    solution = sinkhorn(scores / epsilon, a, b, num_updates=20_001, tolerance=1e-11)
    assert solution.marginal_error.max() < 1e-10
    return solution.conditional


@pytest.mark.parametrize("seed", range(3))
def test_entropic_plan_is_unique_wherever_the_updates_start(seed):
    scores = 2 * random(5, 5)
    kernel, v = scores.exp(), random(5, seed=seed).exp()
    for _ in range(2_000):
        u = 1 / (kernel @ v)
        v = 1 / (kernel.T @ u)
    close(u[:, None] * kernel * v, exact(scores))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(n=st.integers(1, 7), m=st.integers(1, 7), size=st.floats(0, 2), seed=SEEDS)
def test_entropic_plan_is_positive_with_exact_rows_and_columns(n, m, size, seed):
    attention = exact(size * random(n, m, seed=seed))
    assert attention.gt(0).all()
    close(attention.sum(-1), torch.ones(n).double())
    close(attention.sum(-2), torch.full((m,), n / m, dtype=torch.float64))
    close(diagnostics.receiver_mass(attention), torch.ones(m).double())
    assert diagnostics.imbalance(attention) < 1e-8


@settings(max_examples=25, deadline=None, derandomize=True)
@given(size=st.floats(0, 100), seed=SEEDS)
def test_row_and_column_constants_change_no_plan(size, seed):
    scores = random(5, 6, seed=seed)
    rows, columns = size * random(5, 1, seed=seed + 1), size * random(1, 6, seed=seed + 2)
    close(exact(scores + rows + columns), exact(scores))


def test_column_constants_change_softmax():
    scores, columns = random(5, 5), random(1, 5, seed=2)
    assert (torch.softmax(scores + columns, -1) - torch.softmax(scores, -1)).abs().max() > 0.1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(n=st.integers(2, 8), epsilon=st.floats(0.05, 20), size=st.floats(0, 3), step=st.floats(1e-3, 2), seed=SEEDS)
def test_inequality_31_plan_is_lipschitz_in_the_scores(n, epsilon, size, step, seed):
    """``‖P_τ(S) - P_τ(T)‖₁ ≤ (n/τ) ‖S - T‖_∞``, and the bound on the output that follows from it.

    Scores and steps are drawn in units of τ, so that the exact plans are found soon.
    """
    scores, noise = (epsilon * x * random(n, n, seed=seed + i).tanh() for i, x in enumerate((size, step)))
    v = random(n, 3, seed=seed + 2)
    first, second = exact(scores, epsilon), exact(scores + noise, epsilon)
    bound = n / epsilon * noise.abs().max()
    change = (first - second).abs().sum()
    assert change <= bound + 1e-7
    output = ((first - second) @ v).norm(dim=-1).sum()
    radius = (v - v.mean(0)).norm(dim=-1).max()
    assert output <= bound * radius + 1e-7
    found = perturbation_certificate(scores, v, noise[None], epsilon=epsilon, tolerance=1e-11)
    close(found.plan_ratio[0] * bound, change, 1e-7)
    close(found.output_ratio[0] * bound * radius, output, 1e-7)


def test_inequality_31_is_nearly_reached():
    """Random signs on flat scores of many tokens: the bound has the right order in n and τ."""
    n = 60
    noise = 1e-3 * random(1, n, n).sign()
    found = perturbation_certificate(torch.zeros(n, n).double(), random(n, 3), noise, epsilon=0.5)
    assert 0.95 < found.plan_ratio.item() <= 1


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_entropic_plan_is_permutation_equivariant(seed):
    scores = random(6, 5, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.randperm(6, generator=generator), torch.randperm(5, generator=generator)
    close(exact(scores[rows][:, columns]), exact(scores)[rows][:, columns])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_doubly_stochastic_attention_conserves_the_mean(seed):
    scores, v = 2 * random(6, 5, seed=seed), random(5, 3, seed=seed + 1)
    balanced, softmax = exact(scores), torch.softmax(scores, -1)
    close((balanced @ v).mean(0), v.mean(0))
    assert diagnostics.mean_shift(balanced, v) < 1e-8
    assert diagnostics.mean_shift(softmax, v) > 1e-6


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_entropy_grows_and_reward_falls_with_epsilon(seed):
    scores = random(5, 5, seed=seed)
    plans = torch.stack([exact(scores, epsilon) for epsilon in (0.3, 0.5, 1.0, 2.0, 5.0, 50.0)])
    assert diagnostics.row_entropy(plans).diff().gt(-1e-8).all()
    assert (plans * scores).sum((-1, -2)).diff().lt(1e-8).all()
    softmax = torch.stack([torch.softmax(scores / epsilon, -1) for epsilon in (0.3, 0.5, 1.0, 2.0, 5.0, 50.0)])
    assert diagnostics.row_entropy(softmax).diff().gt(0).all()
    assert softmax.amax(-1).diff(dim=0).lt(0).all(), "the largest weight of every softmax row falls"


def test_the_largest_entry_of_a_balanced_plan_may_grow_with_epsilon():
    """Unlike a softmax row's: with both marginals the sup-norm is not monotone in epsilon, entropy is (above)."""
    scores = torch.tensor([[3.0, -1, -3], [-3, -1, 3], [3, -3, 3]]).double()
    largest = torch.stack([exact(scores, epsilon).max() for epsilon in (0.5, 1.0, 2.0)])
    close(largest, torch.tensor([0.5045, 0.5272, 0.5380]).double(), atol=1e-4)


@pytest.mark.parametrize("n", [2, 4, 6])
def test_causal_and_doubly_stochastic_is_the_identity(n):
    """No linear objective finds another doubly stochastic matrix without entries above the diagonal."""
    places = [(i, j) for i in range(n) for j in range(i + 1)]
    equalities = np.zeros((2 * n, len(places)))
    for column, (i, j) in enumerate(places):
        equalities[i, column] = equalities[n + j, column] = 1
    identity = [float(i == j) for i, j in places]
    objectives = [*np.eye(len(places)), *-np.eye(len(places)), *np.random.default_rng(0).normal(size=(5, len(places)))]
    for objective in objectives:
        found = linprog(objective, A_eq=equalities, b_eq=np.ones(2 * n), bounds=(0, None))
        assert found.status == 0
        np.testing.assert_allclose(found.x, identity, atol=1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(n=st.integers(2, 5), seed=SEEDS)
def test_doubly_stochastic_updates_of_a_causal_kernel_end_at_the_identity(n, seed):
    """The same by computing: the updates of a lower triangular kernel go to the identity, slowly."""
    causal = random(n, n, seed=seed).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    uniform = -torch.full((n,), n, dtype=torch.float64).log()
    away = [
        (sinkhorn(causal, uniform, uniform, num_updates=updates).conditional - torch.eye(n)).abs().max().item()
        for updates in (11, 101, 1_001)
    ]
    assert away == sorted(away, reverse=True) and away[-1] < 0.02


def test_small_epsilon_is_the_best_of_all_permutations():
    """Brute force over the vertices of the polytope: the plan goes to the one of the largest score."""
    scores = random(5, 5)
    best = max(itertools.permutations(range(5)), key=lambda p: sum(scores[i, j] for i, j in enumerate(p)))
    permutation = torch.zeros(5, 5).double()
    permutation[range(5), best] = 1
    uniform = -torch.full((5,), 5, dtype=torch.float64).log()
    close(sinkhorn(scores / 0.005, uniform, uniform, num_updates=20_001).conditional, permutation, atol=1e-2)
