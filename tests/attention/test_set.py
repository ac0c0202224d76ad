"""SeTformer's attention: tied tokens, the Gaussian kernel and the factor of positions."""

import pytest
import torch

from fairseq_lot.attention.differential import build_differential
from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.transport.pivots import gaussian_scores
from fairseq_lot.transport.positions import linear_log_factor
from tests.variants import HEAD_DIM, NUM_HEADS, draw, padding_mask

CONTEXT = {"num_heads": NUM_HEADS, "head_dim": HEAD_DIM}


def build(**options):
    return build_mechanism("set", **CONTEXT, **options).double()


def tokens(n=6, seed=1):
    return draw(2, n, n, seed=seed)


def test_gaussian_scores_are_half_squared_distances():
    x, pivots = draw(2, 5, 7)[:2]
    torch.testing.assert_close(gaussian_scores(x, pivots), -torch.cdist(x, pivots).square() / 2)


@pytest.mark.parametrize("build_one", [build_mechanism, build_differential])
def test_other_keys_than_the_queries_are_refused(build_one):
    mechanism = build_one("set", **CONTEXT).double()
    assert mechanism.tied_tokens and mechanism.couples_queries
    with pytest.raises(InputError, match="5 queries and 6 keys"):
        mechanism(*draw())


def test_converged_attention_is_doubly_stochastic_and_symmetric():
    """There and back by the same plan: A is r·n·Γ Γᵀ, so it is symmetric and positive semi-definite."""
    q, k, v = tokens()
    plan = build(num_pivots=4, num_updates=2_001)(q, k, v, need_weights=True).weights
    for axis in (-1, -2):
        torch.testing.assert_close(plan.sum(axis), torch.ones_like(plan[..., 0]), atol=1e-9, rtol=0)
    torch.testing.assert_close(plan, plan.transpose(-1, -2), atol=1e-9, rtol=0)
    assert torch.linalg.eigvalsh(plan).min() > -1e-9


@pytest.mark.parametrize("layout", ["right", "left", "scattered"])
def test_factor_counts_real_tokens_from_one(layout):
    mask = padding_mask((5, 3, 1), 6, layout)
    factor = linear_log_factor(mask, draw(tgt_len=6)[0], 4, 0.5)
    for row, pads in zip(factor, mask, strict=True):
        n = int((~pads).sum())
        expected = [[-((((i + 1) / n - (t + 1) / 4) / 0.5) ** 2) for t in range(4)] for i in range(n)]
        torch.testing.assert_close(row[~pads], torch.tensor(expected, dtype=torch.float64))


def test_small_temperature_keeps_to_the_diagonal_and_large_one_changes_nothing():
    q, k, v = tokens()
    near = build(num_pivots=6, positional_temperature=1e-3)(q, k, v, need_weights=True).weights
    torch.testing.assert_close(near, torch.eye(6, dtype=torch.float64).expand_as(near), atol=1e-9, rtol=0)
    far = build(num_pivots=6, positional_temperature=1e6)(q, k, v).values
    torch.testing.assert_close(far, build(num_pivots=6)(q, k, v).values, atol=1e-9, rtol=0)


def test_a_tiny_temperature_is_finite_in_single_precision():
    inputs = [x.float().requires_grad_() for x in tokens()]
    mechanism = build(num_pivots=3, positional_temperature=1e-3).float()
    values = mechanism(*inputs).values
    assert values.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(values.square().sum(), [*inputs, mechanism.pivots]))
