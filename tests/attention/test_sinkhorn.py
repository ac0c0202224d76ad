"""Sinkhorn attention: its tolerance mode, its limit of large epsilon, what half an update is, and a learnt epsilon."""

import math

import pytest
import torch

from fairseq_lot.attention import reference
from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.transport.marginals import marginal_error
from tests.variants import HEAD_DIM, NUM_HEADS, draw, padding_mask

LENGTHS = (6, 4, 2)


def attention(q, k, mask=None, **options):
    """A of every sentence and head."""
    mechanism = build_mechanism("sinkhorn", num_heads=NUM_HEADS, head_dim=HEAD_DIM, **options)
    return mechanism(q, k, k, mask, mask, need_weights=True).weights


def errors(a, mask):
    """Marginal error of the plans behind A, ``(bsz, heads)``."""
    uniform = (~mask).double() / (~mask).sum(-1, keepdim=True)
    return marginal_error(uniform[:, None, :, None] * a, uniform[:, None], uniform[:, None])


@pytest.mark.parametrize("layout", ["right", "left", "scattered"])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-5, 1e-9])
def test_tolerance_is_reached_by_every_sentence_of_a_ragged_batch(tolerance, layout):
    q, k, _ = draw(3, 6, 6)
    mask = padding_mask(LENGTHS, 6, layout)
    options = {"epsilon": 0.5, "num_updates": 2_001}
    stopped = errors(attention(q, k, mask, **options, tolerance=tolerance), mask)
    assert stopped.max() <= tolerance
    assert stopped.max() > 100 * errors(attention(q, k, mask, **options), mask).max()  # it did stop early


@pytest.mark.parametrize("num_updates", [1, 2, 3, 6, 7])
def test_tolerance_out_of_reach_stops_at_the_number_of_updates(num_updates):
    q, k, _ = draw(3, 6, 6)
    mask = padding_mask(LENGTHS, 6, "left")
    options = {"epsilon": 0.1, "num_updates": num_updates}
    limited = attention(q, k, mask, **options, tolerance=1e-15)
    assert torch.equal(limited, attention(q, k, mask, **options))
    assert errors(limited, mask).max() > 1e-3


def test_tolerance_mode_is_the_exact_plan_in_its_gradient_too():
    q, k, _ = (x.requires_grad_() for x in draw(1, 5, 5))
    weights = torch.randn(5, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    found = [
        torch.autograd.grad((attention(q, k, epsilon=1.0, num_updates=1_001, **limit) * weights).sum(), (q, k))
        for limit in ({}, {"tolerance": 1e-13})
    ]
    for exact, stopped in zip(*found, strict=True):
        torch.testing.assert_close(stopped, exact, atol=1e-10, rtol=0)


@pytest.mark.parametrize("num_updates", [1, 2, 15])
def test_large_epsilon_is_the_mean_of_the_real_values(num_updates):
    q, k, v = draw(3, 6, 6)
    mask = padding_mask(LENGTHS, 6, "scattered")
    mechanism = build_mechanism(
        "sinkhorn", num_heads=NUM_HEADS, head_dim=HEAD_DIM, epsilon=1e9, num_updates=num_updates
    )
    values = mechanism(q, k, v, mask, mask).values
    for sentence in range(3):
        real = ~mask[sentence]
        mean = v[sentence][:, real].mean(1, keepdim=True).expand(-1, int(real.sum()), -1)
        torch.testing.assert_close(values[sentence][:, real], mean, atol=1e-8, rtol=0)


def test_an_even_number_starts_with_the_keys():
    """Two half-updates: columns first, then rows; so columns of the kernel are normalised, then rows of that."""
    q, k, _ = draw(1, 5, 5)
    kernel = torch.exp(reference.scores(q[0, 0], k[0, 0]) / 0.5)
    kernel = kernel / kernel.sum(0)
    expected = kernel / kernel.sum(1, keepdim=True)
    torch.testing.assert_close(attention(q, k, epsilon=0.5, num_updates=2)[0, 0], expected, atol=1e-13, rtol=0)


def build(**options):
    return build_mechanism("sinkhorn", num_heads=NUM_HEADS, head_dim=HEAD_DIM, **options).double()


def with_gradients(mechanism, mask):
    """Values, A, and the gradients of q, k and v."""
    inputs = [x.requires_grad_() for x in draw(3, 6, 6)]
    output = mechanism(*inputs, mask, mask, need_weights=True)
    weights = torch.randn(output.values.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return [output.values, output.weights, *torch.autograd.grad((output.values * weights).sum(), inputs)]


@pytest.mark.parametrize("num_updates", [1, 4, 15])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.5])
def test_a_learnt_epsilon_is_the_fixed_one_at_its_start(epsilon, num_updates):
    mask = padding_mask(LENGTHS, 6, "left")
    options = {"epsilon": epsilon, "num_updates": num_updates}
    learnt = build(learn_epsilon=True, **options)
    assert learnt.log_epsilon.shape == (NUM_HEADS,) and build(**options).log_epsilon is None
    learnt.log_epsilon.data.fill_(math.log(epsilon))  # its start is rounded to float32
    for actual, expected in zip(with_gradients(learnt, mask), with_gradients(build(**options), mask), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-11)


def test_every_head_has_its_own_temperature():
    """Head by head A is that of the fixed form, and the gradient of log ε is minus that of a factor of the scores."""
    q, k, v = draw(1, 5, 6)
    temperatures = torch.tensor([0.3, 2.0], dtype=torch.float64)
    learnt = build(learn_epsilon=True, num_updates=4)
    learnt.log_epsilon.data.copy_(temperatures.log())
    factor = torch.ones(1, NUM_HEADS, 1, 1, dtype=torch.float64, requires_grad=True)
    output = learnt(factor * q, k, v, need_weights=True)
    for head, epsilon in enumerate(temperatures.tolist()):
        expected = attention(q, k, epsilon=epsilon, num_updates=4)[:, head]
        torch.testing.assert_close(output.weights[:, head], expected, atol=1e-12, rtol=0)
    of_epsilon, of_scores = torch.autograd.grad(output.values.square().sum(), [learnt.log_epsilon, factor])
    assert of_epsilon.abs().min() > 1e-3
    torch.testing.assert_close(of_epsilon, -of_scores.flatten(), atol=1e-12, rtol=0)


def test_temperatures_of_half_precision_are_exponentiated_in_float32():
    mechanism = build(learn_epsilon=True).half()
    mechanism.log_epsilon.data.fill_(math.log(1e-6))  # float16 has a twentieth of its digits there
    expected = mechanism.log_epsilon.float().exp()
    assert mechanism.epsilon().dtype == torch.float32 and torch.equal(mechanism.epsilon().flatten(), expected)
