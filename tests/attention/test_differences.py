"""Numbers in docs/mechanisms.md, and the options that it names for the papers' forms."""

import torch

from fairseq_lot.attention.registry import build_mechanism
from tests.conftest import close, random
from tests.reference import entropic_plan, uniform
from tests.variants import build_differential


def test_lot_with_epsilon_equal_to_the_scale_is_the_papers_lot_with_unscaled_products():
    mechanism = build_mechanism("lot", num_heads=1, head_dim=16, num_pivots=5, num_updates=5, epsilon=16**-0.5).double()
    q, k, v = random(3, 7, 16)
    q_plan, k_plan = (
        entropic_plan(x, a, b, 5)
        for x, a, b in (
            (q @ mechanism.pivots[0].mT, uniform(7), uniform(5)),
            (mechanism.pivots[0] @ k.mT, uniform(5), uniform(7)),
        )
    )
    weights = mechanism(*(x[None, None] for x in (q, k, v)), need_weights=True).weights
    close(weights[0, 0], 7 * q_plan @ (5 * k_plan), 1e-12)


def test_columns_of_lot_are_off_by_a_quarter_after_5_updates_and_by_less_than_a_percent_after_20():
    largest, mean = {}, {}
    for num_updates in (5, 20):
        mechanism = build_mechanism("lot", num_heads=4, head_dim=32, num_updates=num_updates).double()
        weights = mechanism(*random(3, 50, 4, 32, 32), need_weights=True).weights
        off = (weights.sum(-2) - 1).abs()
        largest[num_updates], mean[num_updates] = off.amax(-1).mean(), off.mean()
    assert 0.2 < largest[5] < 0.3 and 0.045 < mean[5] < 0.055
    assert largest[20] < 0.01


def test_initial_lambdas_scatter_around_lambda_init():
    """λ has a standard deviation of ``0.01 √64``, and the mean of 400 layers a 20th of it.

    λ is λ_init plus the difference of ``exp(λq·λk)`` for two pairs; each ``λq·λk`` sums 32 products of deviation 0.01.
    """
    context = {"num_heads": 2, "head_dim": 32}
    layers = [build_differential("softmax", **context, layer=layer, lambda_init=0.0) for layer in range(400)]
    lambdas = torch.stack([layer.difference_weight() for layer in layers])
    assert abs(lambdas.mean()) < 4 * 0.08 / 20
    assert abs(lambdas.std() - 0.08) < 0.01
    assert abs(build_differential("softmax", **context, layer=0).lambda_init - 0.2) < 1e-12
