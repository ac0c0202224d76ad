"""Claims on couplings through pivots, each on matrices that are small enough to check."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.transport.certificates import coupling_certificate
from fairseq_lot.transport.pivots import pivot_coupling
from tests.conftest import close, random
from tests.reference import uniform

SEEDS = st.integers(0, 10_000)


def couple(query_scores, key_scores, masses, updates=501):
    """The coupling of uniform queries and keys through pivots."""
    logs = (uniform(query_scores.size(-2)).log(), uniform(key_scores.size(-2)).log(), masses.log())
    return pivot_coupling(query_scores, key_scores, *logs, query_updates=updates, key_updates=updates)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(n=st.integers(2, 6), r=st.integers(1, 6), size=st.floats(0, 2), seed=SEEDS)
def test_few_pivots_stay_away_from_a_permutation(n, r, size, seed):
    """A coupling through r pivots differs from any permutation by at least ``2 (1 - r/n)`` in ‖·‖₁.

    Pivot t has at most the mass min(σ_t, 1/n) on the permutation, so all pivots together have at most r/n there. The
    mass elsewhere counts twice in ‖·‖₁.
    """
    masses = torch.softmax(random(r, seed=seed), -1)
    plan = couple(size * random(n, r, seed=seed + 1), size * random(n, r, seed=seed + 2), masses).conditional / n
    for permutation in itertools.permutations(range(n)):
        target = torch.zeros_like(plan)
        target[range(n), permutation] = 1 / n
        assert (plan - target).abs().sum() >= 2 * (1 - r / n) - 1e-3  # columns are exact to about this


def partitions(n, r):
    """All ways to put n tokens into r clusters, none empty."""
    for labels in itertools.product(range(r), repeat=n):
        if len(set(labels)) == r and list(dict.fromkeys(labels)) == list(range(r)):
            yield labels


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_pivots_at_clusters_reach_the_bound_and_n_pivots_give_the_permutation(n):
    """Lemma B.1 on small cases: the error of the best coupling falls with r and is 0 for r = n.

    The tokens are partitioned into r clusters in all ways. Each cluster has a pivot with the cluster's mass. With a
    small epsilon the coupling is uniform in each cluster. The best one differs from the permutation by
    ``2 (1 - r/n)``, the lower bound of the test above.
    """
    permutation = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    target = torch.zeros(n, n).double()
    target[torch.arange(n), permutation] = 1 / n
    best = []
    for r in range(1, n + 1):
        errors = []
        for labels in partitions(n, r):
            member = torch.nn.functional.one_hot(torch.tensor(labels), r).double()
            scores = 50 * member  # small epsilon: every token goes to the pivot of its cluster
            key_scores = torch.empty_like(scores)
            key_scores[permutation] = scores
            plan = couple(scores, key_scores, member.mean(0), updates=5).conditional / n
            errors.append((plan - target).abs().sum().item())
        best.append(min(errors))
        assert best[-1] == pytest.approx(2 * (1 - r / n), abs=1e-9)
    assert best == sorted(best, reverse=True)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 6),
    m=st.integers(1, 6),
    r=st.integers(1, 6),
    steps=st.tuples(st.floats(1e-3, 2), st.floats(0, 2), st.floats(0, 2)),
    updates=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=SEEDS,
)
def test_coupling_is_lipschitz_in_the_scores_of_both_plans(n, m, r, steps, updates, seed):
    """``‖A - B‖₁ ≤ n √(δ1² + δ2²)`` for exact plans; after u1 and u2 updates a row moves by ``√((u1 δ1)² + (u2 δ2)²)``.

    The exact change is computed from couplings of many updates, with random masses of the pivots.
    """
    masses = torch.softmax(2 * random(r, seed=seed), -1)
    scores = [2 * random(size, r, seed=seed + 1 + i).tanh() for i, size in enumerate((n, m))]
    noise = [steps[i] * random(size, r, seed=seed + 3 + i).sign() for i, size in enumerate((n, m))]
    v = random(m, 3, seed=seed + 5)
    w = v + steps[2] * random(m, 3, seed=seed + 6)
    moved = [x + y for x, y in zip(scores, noise, strict=True)]
    first, second = (couple(*x, masses, updates=2001).conditional for x in (scores, moved))
    bound = n * (steps[0] ** 2 + steps[1] ** 2) ** 0.5
    assert (first - second).abs().sum() <= bound + 1e-7
    output = (first @ v - second @ w).norm(dim=-1).max()
    spread, radius = (x.norm(dim=-1).max() for x in (v - w, w))
    assert output <= spread + bound * radius + 1e-7
    counts = dict(zip(("query_updates", "key_updates"), updates, strict=True))
    found = coupling_certificate(
        *scores, masses.log(), v, *(x[None] for x in noise), (w - v)[None], **counts, tolerance=1e-11
    )
    close(found.plan_ratio[0] * bound, (first - second).abs().sum(), 1e-7)
    close(found.output_ratio[0] * (spread + bound * radius), output, 1e-7)
    logs = uniform(n).log(), uniform(m).log(), masses.log()
    first, second = (pivot_coupling(*x, *logs, **counts).conditional for x in (scores, moved))
    row = ((updates[0] * steps[0]) ** 2 + (updates[1] * steps[1]) ** 2) ** 0.5
    assert (first - second).abs().sum(-1).max() <= row + 1e-9
    output = (first @ v - second @ w).norm(dim=-1).max()
    close(found.as_run_ratio[0] * (spread + row * radius), output, 1e-9)
    assert found.as_run_ratio[0] <= 1 + 1e-9


@pytest.mark.parametrize("side", [0, 1], ids=["queries", "keys"])
def test_the_bound_of_a_coupling_is_reached_by_either_plan_with_any_masses(side):
    """One plan has constant scores and alternating signs as noise, the other clusters as large as the masses."""
    masses = torch.tensor([1.0, 1, 3, 3]).double() / 8
    clusters = 50 * torch.nn.functional.one_hot(torch.tensor([0, 1, 2, 2, 2, 3, 3, 3]), 4).double()
    signs = torch.tensor([1.0, -1] * 4).double()[:, None] * torch.tensor([1.0, -1, 1, -1]).double()
    scores, noise = [clusters, clusters], [torch.zeros(1, 8, 4).double()] * 2
    scores[side], noise[side] = torch.zeros(8, 4).double(), 1e-3 * signs[None]
    found = coupling_certificate(*scores, masses.log(), random(8, 3), *noise, query_updates=1, key_updates=1)
    assert 0.999 < found.plan_ratio.item() <= 1


def test_both_plans_together_move_a_coupling_further_than_either():
    """``max(δ1, δ2)`` would be no bound: with δ1 = δ2 the change is 1.2 times that, 0.84 of ``√(δ1² + δ2²)``.

    Pivots form a square of 3 by 3. A query goes to the pivots of one row and a key to those of one column, so each pair
    meets in one pivot. In both plans the noise is positive at one of a token's three pivots and negative at the others.
    """
    place, size = torch.arange(9), 1e-3
    line, cross = place // 3, place % 3  # row and column of a pivot; line of a token, and its number in that line
    at = (line, cross), (cross, line)
    scores = [50 * (line[:, None] == along).double() for along, _ in at]
    noise = [size * (2 * (cross[:, None] == across).double() - 1)[None] for _, across in at]
    masses = torch.full((9,), 1 / 9, dtype=torch.float64)
    found = coupling_certificate(*scores, masses.log(), random(9, 3), *noise, query_updates=1, key_updates=1)
    assert found.plan_ratio.item() == pytest.approx(32 / 27 / 2**0.5, abs=1e-3)


def test_a_row_moves_with_the_number_of_updates():
    """Two updates move a row by twice the noise: by its own scores, and by columns that another row has changed."""
    scores = torch.tensor([[0.0, 0], [20, 20]]).double()
    noise = 1e-3 * torch.tensor([[[1.0, -1], [-1, 1]]]).double()
    v, half = torch.tensor([[1.0], [-1]]).double(), uniform(2).log()
    found = coupling_certificate(
        scores, 50 * torch.eye(2).double(), half, v, noise, torch.zeros_like(noise), query_updates=2, key_updates=2
    )
    assert 0.999 < found.as_run_ratio.item() <= 1


def test_lot_with_pivots_at_the_keys_attends_to_one_key():
    n = 6
    keys = 4 * torch.nn.functional.normalize(random(n, 8), dim=-1)
    permutation = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    mechanism = build_mechanism("lot", num_heads=1, head_dim=8, num_pivots=n, epsilon=0.05, num_updates=51).double()
    with torch.no_grad():
        mechanism.pivots[0] = keys
    plan = mechanism(keys[permutation][None, None], keys[None, None], keys[None, None], need_weights=True).weights[0, 0]
    close(plan, torch.eye(n).double()[permutation], 1e-6)
