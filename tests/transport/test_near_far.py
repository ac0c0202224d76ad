"""The products with a kernel that is exact beside the diagonal, against the matrix itself in float64."""

import itertools

import pytest
import torch

from fairseq_lot.transport.near_far import FarSummary, near_far, near_far_at_expected, summarise_far
from tests.conftest import Sizes, close, random


def dense(q, k, v, query_logs, key_logs, mass, *, window, causal=False):
    """The same with the whole matrix, by logs of sums."""
    distance = torch.arange(q.size(2))[:, None] - torch.arange(k.size(2))
    logs = q @ k.mT
    far = torch.full_like(logs, -torch.inf)
    if query_logs is not None:
        far = torch.logsumexp(query_logs[:, :, :, None] + key_logs[:, :, None], -1)
    logs = torch.where(distance.abs() <= window, logs, far)
    if causal:
        logs = logs.masked_fill(distance < 0, -torch.inf)
    if mass is not None:
        logs = logs + mass.unsqueeze(2)
    return torch.softmax(logs, -1) @ v, torch.logsumexp(logs, -1)


def draw(n, m, *, r=6, masses=None, dtype=torch.float64):
    """q, k, v, logs of features and of masses; some keys of the second sentence have none."""
    sizes = [(n, 8), (m, 8), (m, 5), *([(n, r), (m, r)] if r else [])]
    inputs = [random(2, 3, *size, seed=seed, dtype=dtype) for seed, size in enumerate(sizes)]
    inputs = [*inputs, None, None] if not r else [*inputs[:3], *(2 * x for x in inputs[3:])]
    mass = None if masses is None else random(2, masses, m, seed=9, dtype=dtype)
    if mass is not None and r:
        mass[1, :, m - m // 3 :] = -torch.inf
    return [x if x is None else x.requires_grad_() for x in (*inputs, mass)]


# one block, several, a last one that is not full, a window longer than a block; fewer queries than keys and more
LENGTHS = [(1, 1), (5, 5), (7, 12), (12, 7), (65, 65), (77, 77), (200, 200), (100, 170), (170, 100)]
GRID = [
    (n, m, window, r, masses, causal)
    for (n, m), window, (r, causal), masses in itertools.product(
        LENGTHS, (0, 2, 40), itertools.product((0, 6), (False, True)), (None, 1, 3)
    )
    if n == m or (r and not causal)
]


@pytest.mark.fast_if(lambda n, window, masses, **_: n in (7, 77, 170) or (window == 2 and masses == 3))
@pytest.mark.parametrize(("n", "m", "window", "r", "masses", "causal"), GRID)
def test_values_sums_and_gradients_are_those_of_the_matrix(n, m, window, r, masses, causal):
    inputs = draw(n, m, r=r, masses=masses)
    expected = dense(*inputs, window=window, causal=causal)
    actual = near_far(*inputs, window=window, causal=causal, with_log_sums=True)
    close(actual, expected, 1e-11)
    probes, leaves = [random(*x.shape, seed=5) for x in expected], [x for x in inputs if x is not None]
    gradients = [
        torch.autograd.grad(sum((x * p).sum() for x, p in zip(out, probes, strict=True)), leaves)
        for out in (actual, expected)
    ]
    close(gradients[0], [x.nan_to_num() for x in gradients[1]], 1e-10)


@pytest.mark.parametrize("size", [24, 200])
def test_a_row_without_mass_is_zero(size):
    q, k, v, *logs, mass = draw(size, size, masses=1)
    mass = torch.full_like(mass, -torch.inf).requires_grad_()
    values, log_sums = near_far(q, k, v, *logs, mass, window=2, with_log_sums=True)
    assert values.eq(0).all() and log_sums.eq(torch.finfo(torch.float64).min).all()
    gradients = torch.autograd.grad(values.sum() + log_sums.sum(), [q, k, v, *logs, mass])
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("n", [40, 160])
@pytest.mark.parametrize("size", [20.0, 50.0, 75.0])
def test_a_feature_of_the_band_takes_no_precision_from_what_is_far(n, size):
    """Key 20 would receive exp(size) times what all others do, but for its neighbours its scores count, which are low.

    Taking the band from a sum over all keys would leave an error of ``exp(size)`` float32 roundings.
    """
    q, k, v, query_logs, key_logs, _ = (None if x is None else x.detach() for x in draw(n, n))
    key_logs[:, :, 20] += size
    k[:, :, 20] = -q[:, :, 18:23].mean(2)
    inputs = (q, k, v, query_logs, key_logs, None)
    exact, _ = dense(*inputs, window=4)
    values, _ = near_far(*(None if x is None else x.float() for x in inputs), window=4)
    beside = slice(16, 25)
    close(values[:, :, beside].double(), exact[:, :, beside], 2e-5)
    close(values.double(), exact, 2e-5)


def test_no_tensor_grows_faster_than_the_sentence():
    largest = []
    for n in (512, 1024, 2048):
        inputs = draw(n, n, masses=1, dtype=torch.float32)
        with Sizes() as seen:
            values, log_sums = near_far(*inputs, window=4, with_log_sums=True)
            torch.autograd.grad(values.sum() + log_sums.sum(), inputs)
        largest.append(seen.largest / n)
    assert max(largest) <= 1.1 * min(largest)


def test_what_is_kept_for_the_gradients_grows_with_the_sentence():
    kept = []
    for n in (512, 1024, 2048):
        sizes = []

        def keep(x, sizes=sizes):
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            near_far(*draw(n, n, dtype=torch.float32), window=4)
        kept.append(sum(sizes) / n)
    assert kept[0] > 0 and max(kept) <= 1.1 * min(kept)


def expected_inputs(*, pads=0):
    q, k, v, query_logs, key_logs, _ = draw(6, 9)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[1, 9 - pads :] = pads > 0
    return q, k, v, query_logs, key_logs, mask if pads else None


@pytest.mark.parametrize("pads", [0, 3])
def test_a_wide_band_at_the_expected_position_is_softmax(pads):
    q, k, v, query_logs, key_logs, mask = expected_inputs(pads=pads)
    summary = summarise_far(key_logs, v, mask)
    values, weights = near_far_at_expected(q, k, v, query_logs, summary, mask, window=9, need_weights=True)
    scores = q @ k.mT if mask is None else (q @ k.mT).masked_fill(mask[:, None, None], -torch.inf)
    close(weights, torch.softmax(scores, -1), 1e-10)
    close(values, weights @ v, 1e-10)


def test_the_position_is_the_mean_slot_under_the_features():
    _, _, v, query_logs, key_logs, _ = expected_inputs()
    summary = summarise_far(key_logs, v, None)
    assert isinstance(summary, FarSummary)
    shares = torch.softmax(torch.logsumexp(query_logs[:, :, :, None] + key_logs[:, :, None], -1), -1)
    through = torch.softmax(query_logs + summary.log_sums.unsqueeze(2), -1)
    close((through @ summary.positions.unsqueeze(-1)).squeeze(-1), shares @ torch.arange(9.0).double(), 1e-12)
    close(through @ summary.means, shares @ v, 1e-12)
