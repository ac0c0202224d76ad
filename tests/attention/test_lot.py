"""LOT attention: its rank, masses, checkpoints and convolution."""

import pytest
import torch

from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.errors import InputError
from tests import reference
from tests.conftest import close
from tests.variants import HEAD_DIM, NUM_HEADS, build, build_differential, draw

CONTEXT = {"num_heads": NUM_HEADS, "head_dim": HEAD_DIM}


def move(mechanism, seed=7):
    """Move the parameters away from their initial values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return mechanism


@pytest.mark.parametrize("r", [1, 2, 3, 5, 6, 9])
def test_rank_of_attention_is_at_most_the_number_of_pivots(r):
    q, k, v = draw(2, 6, 7)
    output = move(build("lot", num_pivots=r))(q, k, v, need_weights=True)
    singular = torch.linalg.svdvals(output.weights)
    assert (singular[..., r:] < 1e-12).all()
    assert (singular[..., min(r, 6) - 1] > 1e-8).all()


@pytest.mark.parametrize(("name", "option"), [("pivots", "learn_pivots"), ("mass_logits", "learn_masses")])
def test_fixed_pivots_and_masses_are_in_the_checkpoint_too(name, option):
    learnt, fixed = build("lot"), build("lot", **{option: False})
    assert {key for key, _ in learnt.named_parameters()} == {"pivots", "mass_logits"}
    assert {key for key, _ in fixed.named_parameters()} == {"pivots", "mass_logits"} - {name}
    assert learnt.state_dict().keys() == fixed.state_dict().keys()
    fixed.load_state_dict(move(learnt).state_dict())
    assert torch.equal(fixed(*draw()).values, learnt(*draw()).values)


def test_masses_are_the_marginal_that_the_pivots_receive():
    q, k, _ = draw()
    mechanism = move(build("lot", num_pivots=4, num_updates=2_001))
    sigma = torch.softmax(mechanism.mass_logits, -1)
    coupling = mechanism.coupling(q, k)
    close(coupling.from_queries.plan.sum(-2), sigma.expand(3, -1, -1), 1e-8)
    close(coupling.to_keys.plan.sum(-1), sigma.expand(3, -1, -1))


@pytest.mark.parametrize("build_one", [build_mechanism, build_differential])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_convolution_starts_as_the_identity(kernel, build_one):
    inputs = draw(dtype=torch.float32)
    plain, convolved = (build_one("lot", **CONTEXT, conv_kernel=k) for k in (None, kernel))
    assert torch.equal(plain(*inputs).values, convolved(*inputs).values)
    assert not build_one("lot", **CONTEXT).traits.mixes_values and convolved.traits.mixes_values


def test_halves_of_differential_attention_convolve_with_their_own_weights():
    mechanism = move(build_differential("lot", **CONTEXT, conv_kernel=3).double())
    q, k, v = draw(1, 5, 5)
    plans = mechanism.inner(q, k, v, need_weights=True).weights[0]
    halves = [
        torch.cat([plan @ reference.convolution(half, weight) for half in v[0]], -1)
        for plan, weight in zip(plans, mechanism.inner.convolution.weight, strict=True)
    ]
    difference = halves[0] - mechanism.difference_weight() * halves[1]
    expected = mechanism.norm(difference) * (1 - mechanism.lambda_init)
    actual = torch.cat(list(mechanism(q, k, v).values[0]), -1)
    close(actual, expected, 1e-10)


def test_convolution_refuses_values_of_another_width():
    q, k, v = draw()
    with pytest.raises(InputError, match="width 3"):
        build("lot", conv_kernel=3)(q, k, v[..., :3])
