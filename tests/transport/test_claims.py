"""Claims of the papers on transport attention, each on matrices that are small enough to check.

Tests are named after the claim. Other files test the limits in epsilon (test_sinkhorn.py), the marginals of couplings
(test_pivots.py), their rank (tests/attention/test_lot.py) and the limits of ESP (tests/attention/test_esp.py). Theorems
6 to 8 of [CETA] need only rows that are probability vectors (tests/attention/test_contract.py).
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_lot.transport import diagnostics
from fairseq_lot.transport.certificates import perturbation_certificate
from fairseq_lot.transport.sinkhorn import solve
from tests.conftest import close, random

SEEDS = st.integers(0, 10_000)


def exact(scores, epsilon=1.0):
    """A of the exact plan: rows sum to 1, columns to n/m."""
    n, m = scores.shape[-2:]
    a, b = (-torch.full((size,), size, dtype=torch.float64).log() for size in (n, m))
    solution = solve(scores / epsilon, a, b, num_updates=20_001, tolerance=1e-11)
    assert solution.marginal_error.max() < 1e-10
    return solution.conditional


@settings(max_examples=25, deadline=None, derandomize=True)
@given(n=st.integers(1, 7), m=st.integers(1, 7), size=st.floats(0, 2), seed=SEEDS)
def test_entropic_plan_is_positive_with_exact_rows_and_columns(n, m, size, seed):
    attention = exact(size * random(n, m, seed=seed))
    assert attention.gt(0).all()
    close(attention.sum(-1), torch.ones(n).double(), 1e-8)
    close(attention.sum(-2), torch.full((m,), n / m, dtype=torch.float64), 1e-8)
    close(diagnostics.receiver_mass(attention), torch.ones(m).double(), 1e-8)
    assert diagnostics.imbalance(attention) < 1e-8


@settings(max_examples=40, deadline=None, derandomize=True)
@given(n=st.integers(2, 8), epsilon=st.floats(0.05, 20), size=st.floats(0, 3), step=st.floats(1e-3, 2), seed=SEEDS)
def test_inequality_31_plan_is_lipschitz_in_the_scores(n, epsilon, size, step, seed):
    """``‖P_τ(S) - P_τ(T)‖₁ ≤ (n/τ) ‖S - T‖_∞``, and the bound on the output that follows from it.

    Scores and steps are drawn in units of τ, so that the updates converge fast.
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
    """Random signs added to constant scores of many tokens reach 95 % of the bound."""
    n = 60
    noise = 1e-3 * random(1, n, n).sign()
    found = perturbation_certificate(torch.zeros(n, n).double(), random(n, 3), noise, epsilon=0.5)
    assert 0.95 < found.plan_ratio.item() <= 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(n=st.integers(2, 8), epsilon=st.floats(0.05, 20), step=st.floats(1e-3, 2), apart=st.floats(0, 2), seed=SEEDS)
def test_theorem_10_output_is_lipschitz_in_scores_and_values(n, epsilon, step, apart, seed):
    """Inequality (44), ``‖PV - QW‖_{∞,2} ≤ ‖V - W‖_{∞,2} + (n/τ) ‖S - T‖_∞ ‖W‖_{∞,2}``."""
    scores, noise = (epsilon * x * random(n, n, seed=seed + i).tanh() for i, x in enumerate((2, step)))
    v, value_noise = random(n, 3, seed=seed + 2), apart * random(n, 3, seed=seed + 3)
    w = v + value_noise
    change = (exact(scores, epsilon) @ v - exact(scores + noise, epsilon) @ w).norm(dim=-1).max()
    bound = (v - w).norm(dim=-1).max() + n / epsilon * noise.abs().max() * w.norm(dim=-1).max()
    assert change <= bound + 1e-7
    found = perturbation_certificate(scores, v, noise[None], value_noise[None], epsilon=epsilon, tolerance=1e-11)
    close(found.inequality_44_ratio[0] * bound, change, 1e-7)


def test_theorem_10_is_reached_by_the_values_and_half_by_the_scores():
    """Each term alone. The columns of P - Q sum to 0, so no row has more than half of its mass."""
    flat, v = torch.zeros(2, 2).double(), torch.tensor([[1.0, 0], [-1, 0]]).double()
    signs = torch.tensor([[1.0, -1], [-1, 1]]).double()
    by_values = perturbation_certificate(flat, v, 1e-9 * signs[None], torch.ones(1, 2, 2).double(), epsilon=0.5)
    assert 0.999 < by_values.inequality_44_ratio.item() <= 1
    by_scores = perturbation_certificate(flat, v, 1e-3 * signs[None], epsilon=0.5)
    assert 0.499 < by_scores.inequality_44_ratio.item() <= 0.5


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_doubly_stochastic_attention_conserves_the_mean(seed):
    scores, v = 2 * random(6, 5, seed=seed), random(5, 3, seed=seed + 1)
    balanced, softmax = exact(scores), torch.softmax(scores, -1)
    close((balanced @ v).mean(0), v.mean(0), 1e-8)
    assert diagnostics.mean_shift(balanced, v) < 1e-8
    assert diagnostics.mean_shift(softmax, v) > 1e-6


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_entropy_grows_and_reward_falls_with_epsilon(seed):
    scores = random(5, 5, seed=seed)
    plans = torch.stack([exact(scores, epsilon) for epsilon in (0.3, 0.5, 1.0, 2.0, 5.0, 50.0)])
    assert diagnostics.row_entropy(plans).diff().gt(-1e-8).all()
    assert (plans * scores).sum((-1, -2)).diff().lt(1e-8).all()


def test_the_largest_entry_of_a_balanced_plan_may_grow_with_epsilon():
    """Unlike in a softmax row, the largest entry is not monotone in epsilon; the entropy is (test above)."""
    scores = torch.tensor([[3.0, -1, -3], [-3, -1, 3], [3, -3, 3]]).double()
    largest = torch.stack([exact(scores, epsilon).max() for epsilon in (0.5, 1.0, 2.0)])
    close(largest, torch.tensor([0.5045, 0.5272, 0.5380]).double(), 1e-4)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(n=st.integers(2, 5), seed=SEEDS)
def test_doubly_stochastic_updates_of_a_causal_kernel_end_at_the_identity(n, seed):
    """No other lower triangular matrix is doubly stochastic; the updates converge to it slowly."""
    causal = random(n, n, seed=seed).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    uniform = -torch.full((n,), n, dtype=torch.float64).log()
    away = [
        (solve(causal, uniform, uniform, num_updates=updates).conditional - torch.eye(n)).abs().max().item()
        for updates in (11, 101, 1_001)
    ]
    assert away == sorted(away, reverse=True) and away[-1] < 0.02
