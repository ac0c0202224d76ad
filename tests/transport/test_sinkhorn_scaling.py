"""Updates in the scaling domain against their twin in the log domain, values and every gradient."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from fairseq_lot.numerics.log_domain import log_domain_sinkhorn
from fairseq_lot.transport import sinkhorn_scaling
from fairseq_lot.transport.sinkhorn import solve
from fairseq_lot.transport.sinkhorn_scaling import scaled_conditional
from tests.conftest import close, gradients, random


def problem(lead, n, m, *, pads=False):
    """Scores and log masses that can be differentiated; with ``pads`` one row and one column have no mass."""
    scores = 3 * random(*lead, n, m)
    log_a, log_b = random(*lead, n, seed=2).log_softmax(-1), random(m, seed=3).log_softmax(-1)
    if pads:
        log_a[..., -1] = log_b[0] = -torch.inf
    return [x.requires_grad_() for x in (scores, log_a, log_b)]


@pytest.mark.parametrize("num_updates", [2, 3, 4, 5, 8, 20])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize(
    ("lead", "n", "m", "pads"),
    [((), 5, 7, True), ((2, 3), 4, 3, False), ((2, 3), 6, 6, True), ((3,), 1, 4, False), ((2,), 4, 1, False)],
)
def test_values_and_gradients_are_those_of_the_log_domain(num_updates, layout, lead, n, m, pads):
    scores, log_a, log_b = problem(lead, n, m, pads=pads)
    if layout == "columns":
        scores = scores.detach().mT.contiguous().mT.requires_grad_()
    inputs = scores, log_a, log_b
    fast = scaled_conditional(*inputs, num_updates=num_updates)
    twin = log_domain_sinkhorn(*inputs, num_updates=num_updates)
    close(fast, twin, 1e-9)
    close(gradients(fast, inputs), gradients(twin, inputs), 1e-9)


@pytest.mark.parametrize("size", [1.0, 10.0, 30.0, 60.0, 100.0, 200.0, 1000.0])
@pytest.mark.parametrize("num_updates", [2, 3, 15])
@pytest.mark.parametrize("offset", [0.0, 500.0])
def test_float32_is_accurate_or_declined(size, num_updates, offset):
    """Entries that underflow are negligible, or ``scaled_conditional`` returns None and the log domain takes over."""
    for seed in range(5):
        scores = (size * random(3, 12, 9, seed=seed) + offset).float()
        log_a, log_b = torch.full((12,), 1 / 12).log(), torch.full((9,), 1 / 9).log()
        exact = log_domain_sinkhorn(scores.double(), log_a.double(), log_b.double(), num_updates=num_updates)
        fast = scaled_conditional(scores, log_a, log_b, num_updates=num_updates)
        if size <= 10:
            assert fast is not None
        if size >= 200:
            assert fast is None
        if fast is not None:
            close(fast.double(), exact, 1e-5, relative=1e-4)


@pytest.mark.parametrize("epsilon", [1e-3, 1e-1, 1.0, 1e2])
@pytest.mark.parametrize("size", [1.0, 1e4, -1e4])
def test_extreme_scores_get_the_numbers_of_the_log_domain(epsilon, size):
    scores = (size * random(2, 6, 5).abs() / epsilon).float().requires_grad_()
    log_a, log_b = torch.full((6,), 1 / 6).log(), torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0]).log()
    plan = solve(scores, log_a, log_b, num_updates=5).conditional
    twin = log_domain_sinkhorn(scores, log_a, log_b, num_updates=5)
    close(plan, twin, 2e-5)
    (ours,), (theirs,) = gradients(plan, [scores]), gradients(twin, [scores])
    assert ours.isfinite().all()
    close(ours, theirs, 2e-5)


@pytest.mark.parametrize("num_updates", [2, 3, 5, 15])
@pytest.mark.parametrize("least", [-50.0, -84.0, -88.0, -95.0, -106.0, -200.0])
@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("pads", [False, True])
def test_masses_near_the_least_number_get_the_numbers_of_the_log_domain(pads, side, least, num_updates):
    inputs = [random(9, 5), random(9, seed=2).log_softmax(-1), random(5, seed=3).log_softmax(-1)]
    inputs[side][0] = least
    if pads:
        inputs[side][1] = -torch.inf
    inputs = [x.float().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    plan = solve(*inputs, num_updates=num_updates).conditional
    twin = log_domain_sinkhorn(*exact, num_updates=num_updates)
    close(plan.double(), twin, 1e-5)
    for ours, theirs in zip(gradients(plan, inputs), gradients(twin, exact), strict=True):
        close(ours.double(), theirs, 1e-4)


@pytest.mark.parametrize("num_updates", [4, 15])
def test_scores_of_a_million_have_the_gradient_of_the_log_domain_in_float64(num_updates):
    """Both plans are permutations to rounding. Shares that do not sum to 1 would be amplified by every update."""
    scores = (1e6 * random(3, 7, 7)).float().requires_grad_()
    mass = torch.full((7,), 1 / 7).log()
    weights, exact = random(3, 7, 7, seed=2), scores.detach().double().requires_grad_()
    found = []
    for x in (scores, exact):
        plan = solve(x, mass.to(x.dtype), mass.to(x.dtype), num_updates=num_updates).conditional
        found += torch.autograd.grad((plan * weights).sum(), x)
    close(found[0].double(), found[1], 1e-5)


def test_the_usual_scores_are_solved_once(monkeypatch):
    """Masses of 1/n do not count as small: random scores at epsilon 0.1 need no second solution."""
    solved = []
    monkeypatch.setattr(
        sinkhorn_scaling, "_solve", lambda *args, of=sinkhorn_scaling._solve: solved.append(1) or of(*args)
    )
    q, k = (random(2, 512, 32, seed=seed).float() for seed in (1, 2))
    log_mass = torch.full((512,), 1 / 512).log()
    assert scaled_conditional(q @ k.transpose(-1, -2) / 32**0.5 / 0.1, log_mass, log_mass, num_updates=15) is not None
    assert solved == [1]


def test_the_backward_pass_keeps_one_matrix_and_vectors():
    n, m, kept = 40, 30, {}
    inputs = problem((), n, m)
    for num_updates in (3, 21):
        saved = []
        with saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            scaled_conditional(*inputs, num_updates=num_updates)
        assert sum(x.numel() >= n * m for x in saved) == 1
        kept[num_updates] = sum(x.numel() for x in saved)
    assert kept[21] - kept[3] == 9 * (n + m)
