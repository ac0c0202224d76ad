"""Products with near_far's kernel, which is exact near the diagonal, against the dense matrix in float64."""

import itertools

import pytest
import torch

from fairseq_lot.transport.near_far import near_far
from tests.conftest import change_ways, close, gradients, random

# slopes that leave 1e-7 of the next block, nearly all of it, and all of it
SLOPES = torch.tensor([0.5, 0.01, 0.0], dtype=torch.float64)


def dense(q, k, v, query_logs, key_logs, mass, *, window, causal=False, slopes=None):
    """``near_far`` with the dense matrix: the values, and the log sum of each row."""
    distance = torch.arange(q.size(2))[:, None] - torch.arange(k.size(2))
    logs = q @ k.mT
    far = torch.full_like(logs, -torch.inf)
    if query_logs is not None:
        far = torch.logsumexp(query_logs[:, :, :, None] + key_logs[:, :, None], -1)
    logs = torch.where(distance.abs() <= window, logs, far)
    if slopes is not None:
        logs = logs - slopes[:, None, None] * distance.abs()
    if causal:
        logs = logs.masked_fill(distance < 0, -torch.inf)
    if mass is not None:
        logs = logs + mass.unsqueeze(2)
    return torch.softmax(logs, -1) @ v, torch.logsumexp(logs, -1)


def draw_sides(n, m, *, r=6, masses=None, dtype=torch.float64):
    """q, k, v, the logs of both features, and log masses; some keys of the second sentence have no mass."""
    sizes = [(n, 8), (m, 8), (m, 5), *([(n, r), (m, r)] if r else [])]
    inputs = [random(2, 3, *size, seed=seed, dtype=dtype) for seed, size in enumerate(sizes)]
    inputs = [*inputs, None, None] if not r else [*inputs[:3], *(2 * x for x in inputs[3:])]
    mass = None if masses is None else random(2, masses, m, seed=9, dtype=dtype)
    if mass is not None and r:
        mass[1, :, m - m // 3 :] = -torch.inf
    return [x if x is None else x.requires_grad_() for x in (*inputs, mass)]


# one block, several, an incomplete last one; fewer queries than keys, and more
LENGTHS = [(1, 1), (5, 5), (7, 12), (12, 7), (65, 65), (77, 77), (200, 200), (100, 170), (170, 100)]
GRID = [
    (n, m, window, r, masses, causal, slopes)
    for (n, m), window, (r, causal), masses, slopes in itertools.product(
        LENGTHS, (0, 2, 40), itertools.product((0, 6), (False, True)), (None, 1, 3), (None, SLOPES)
    )
    if (n == m or (r and not causal)) and (slopes is None or masses != 1)
]


@pytest.mark.fast_if(lambda n, window, masses, **_: n in (7, 77, 170) or (window == 2 and masses == 3))
@pytest.mark.parametrize(("n", "m", "window", "r", "masses", "causal", "slopes"), GRID)
def test_values_sums_and_gradients_are_those_of_the_matrix(n, m, window, r, masses, causal, slopes):
    inputs = draw_sides(n, m, r=r, masses=masses)
    expected = dense(*inputs, window=window, causal=causal, slopes=slopes)
    actual = near_far(*inputs, slopes=slopes, window=window, causal=causal, with_log_sums=True)
    close(actual, expected, 1e-11)
    leaves = [x for x in inputs if x is not None]
    of_actual, of_expected = (
        gradients(torch.cat([x, sums.unsqueeze(-1)], -1), leaves) for x, sums in (actual, expected)
    )
    close(of_actual, [x.nan_to_num() for x in of_expected], 1e-10)


@pytest.mark.parametrize("slopes", [None, SLOPES])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [24, 200])
def test_the_path_of_a_gpu_computes_the_same(size, causal, slopes, monkeypatch):
    """Near and far keys are exponentiated in one tensor, and sums of blocks are not added one by one."""
    inputs, found = draw_sides(size, size, masses=3), []
    for one_by_one in (True, False):
        change_ways(monkeypatch, adds_one_by_one=one_by_one)
        values, log_sums = near_far(*inputs, slopes=slopes, window=2, causal=causal, with_log_sums=True)
        found.append([values, log_sums, *gradients(torch.cat([values, log_sums.unsqueeze(-1)], -1), inputs)])
    close(*found, 1e-11)


@pytest.mark.parametrize("size", [24, 200])
def test_a_row_without_mass_is_zero(size):
    q, k, v, *logs, mass = draw_sides(size, size, masses=1)
    mass = torch.full_like(mass, -torch.inf).requires_grad_()
    values, log_sums = near_far(q, k, v, *logs, mass, window=2, with_log_sums=True)
    assert values.eq(0).all() and log_sums.eq(torch.finfo(torch.float64).min).all()
    found = torch.autograd.grad(values.sum() + log_sums.sum(), [q, k, v, *logs, mass])
    assert all(gradient.isfinite().all() for gradient in found)


@pytest.mark.parametrize("n", [40, 160])
@pytest.mark.parametrize("size", [20.0, 50.0, 75.0])
def test_a_large_feature_of_a_key_in_the_band_costs_far_keys_no_precision(n, size):
    """By its features key 20 gets exp(size) times as much as others, but its neighbours use its exact score, a low one.

    Subtracting the band from a sum over all keys would leave an error of ``exp(size)`` float32 roundings.
    """
    q, k, v, query_logs, key_logs, _ = (None if x is None else x.detach() for x in draw_sides(n, n))
    key_logs[:, :, 20] += size
    k[:, :, 20] = -q[:, :, 18:23].mean(2)
    inputs = (q, k, v, query_logs, key_logs, None)
    exact, _ = dense(*inputs, window=4)
    values, _ = near_far(*(None if x is None else x.float() for x in inputs), window=4)
    beside = slice(16, 25)
    close(values[:, :, beside].double(), exact[:, :, beside], 2e-5)
    close(values.double(), exact, 2e-5)
