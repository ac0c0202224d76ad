"""SeTformer's attention: tied tokens, the Gaussian kernel and the factor of positions."""

import pytest
import torch

from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.errors import InputError
from tests.conftest import close
from tests.variants import HEAD_DIM, NUM_HEADS, build, build_differential, draw

CONTEXT = {"num_heads": NUM_HEADS, "head_dim": HEAD_DIM}


def tokens():
    return draw(2, 6, 6)


@pytest.mark.parametrize("build_one", [build_mechanism, build_differential])
def test_other_keys_than_the_queries_are_refused(build_one):
    mechanism = build_one("set", **CONTEXT).double()
    assert mechanism.traits.tied_tokens and mechanism.traits.couples_queries
    with pytest.raises(InputError, match="5 queries and 6 keys"):
        mechanism(*draw())


def test_converged_attention_is_doubly_stochastic_and_symmetric():
    """Tokens go to the pivots and back by the same plan Γ: ``A = r·n·Γ Γᵀ`` is symmetric and positive semi-definite."""
    q, k, v = tokens()
    plan = build("set", num_pivots=4, num_updates=2_001)(q, k, v, need_weights=True).weights
    close(plan.sum(-1), torch.ones_like(plan[..., 0]), 1e-9)
    close(plan, plan.mT, 1e-9)
    assert torch.linalg.eigvalsh(plan).min() > -1e-9


def test_a_small_positional_temperature_gives_the_identity_and_a_large_one_changes_nothing():
    q, k, v = tokens()
    near = build("set", num_pivots=6, positional_temperature=1e-3)(q, k, v, need_weights=True).weights
    close(near, torch.eye(6, dtype=torch.float64).expand_as(near), 1e-9)
    far = build("set", num_pivots=6, positional_temperature=1e6)(q, k, v).values
    close(far, build("set", num_pivots=6)(q, k, v).values, 1e-9)


def test_a_small_positional_temperature_is_finite_in_single_precision():
    inputs = [x.float().requires_grad_() for x in tokens()]
    mechanism = build("set", num_pivots=3, positional_temperature=1e-3).float()
    values = mechanism(*inputs).values
    assert values.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(values.square().sum(), [*inputs, mechanism.pivots]))
