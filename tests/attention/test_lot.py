"""LOT attention: what its options promise, and its rank."""

import pytest
import torch

from fairseq_lot.attention import reference
from fairseq_lot.attention.differential import build_differential
from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.errors import InputError
from tests.variants import HEAD_DIM, NUM_HEADS, draw, padding_mask

CONTEXT = {"num_heads": NUM_HEADS, "head_dim": HEAD_DIM}


def build(**options):
    return build_mechanism("lot", **CONTEXT, **options).double()


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
    output = move(build(num_pivots=r))(q, k, v, need_weights=True)
    singular = torch.linalg.svdvals(output.weights)
    assert (singular[..., r:] < 1e-12).all()
    assert (singular[..., min(r, 6) - 1] > 1e-8).all()
    torch.testing.assert_close(output.weights.sum(-1), torch.ones_like(output.weights[..., 0]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["pivots", "mass_logits"])
def test_what_is_not_learnt_is_stored_all_the_same(name):
    option = {"pivots": "learn_pivots", "mass_logits": "learn_masses"}[name]
    learnt, fixed = build(), build(**{option: False})
    assert {key for key, _ in learnt.named_parameters()} == {"pivots", "mass_logits"}
    assert {key for key, _ in fixed.named_parameters()} == {"pivots", "mass_logits"} - {name}
    assert learnt.state_dict().keys() == fixed.state_dict().keys()
    fixed.load_state_dict(move(learnt).state_dict())
    inputs = draw()
    torch.testing.assert_close(fixed(*inputs).values, learnt(*inputs).values, atol=0, rtol=0)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_masses_are_the_marginal_that_the_pivots_receive(temperature):
    q, k, _ = draw()
    mechanism = move(build(num_pivots=4, num_updates=2_001, mass_temperature=temperature))
    sigma = torch.softmax(mechanism.mass_logits / temperature, -1)
    coupling = mechanism.coupling(q, k)
    torch.testing.assert_close(coupling.from_queries.plan.sum(-2), sigma.expand(3, -1, -1), atol=1e-8, rtol=0)
    torch.testing.assert_close(coupling.to_keys.plan.sum(-1), sigma.expand(3, -1, -1), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("query_updates", "causal"), [(None, False), (1, False), (1, True)])
def test_a_temperature_beside_the_scale_of_the_pivots_is_redundant(query_updates, causal):
    """At ε with pivots z it is LOT at 1 with pivots z/ε: the same values, and by the chain rule the same gradients."""
    epsilon, found = 0.4, []
    for options, divisor in (({"epsilon": epsilon}, 1.0), ({}, epsilon)):
        mechanism = move(build(query_updates=query_updates, **options))
        mechanism.pivots.data.div_(divisor)
        inputs = [x.requires_grad_() for x in draw(2, 6, 6)]
        values = mechanism(*inputs, causal=causal).values
        of_pivots, *others = torch.autograd.grad(values.square().sum(), [mechanism.pivots, *inputs])
        found.append([values, of_pivots / divisor, *others])
    for tempered, scaled in zip(*found, strict=True):
        torch.testing.assert_close(scaled, tempered, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("build_one", [build_mechanism, build_differential])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_convolution_starts_as_the_identity(kernel, build_one):
    inputs = draw(dtype=torch.float32)
    plain, convolved = (build_one("lot", **CONTEXT, conv_kernel=k) for k in (None, kernel))
    assert torch.equal(plain(*inputs).values, convolved(*inputs).values)
    assert not build_one("lot", **CONTEXT).mixes_values and convolved.mixes_values


def test_convolution_is_torch_s():
    mechanism = move(build(conv_kernel=5))
    v = draw()[2]
    weight = mechanism.convolution.weight
    for head in range(NUM_HEADS):
        expected = torch.nn.functional.conv1d(
            v[:, head].transpose(1, 2), weight[head].unsqueeze(1), padding=2, groups=HEAD_DIM
        )
        torch.testing.assert_close(mechanism.convolution(v)[:, head], expected.transpose(1, 2))


@pytest.mark.parametrize("layout", ["right", "left"])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_convolution_wider_than_the_sentence_sees_no_pad(n, layout):
    mechanism = move(build(conv_kernel=7))
    mask = padding_mask((n,), 8, layout)
    q, k, v = (x.masked_fill(mask[:, None, :, None], torch.nan) for x in draw(1, 8, 8))
    values = mechanism(q, k, v, mask, mask).values
    alone = mechanism(*(x[:, :, ~mask[0]] for x in (q, k, v))).values
    torch.testing.assert_close(values[:, :, ~mask[0]], alone, atol=1e-12, rtol=0)
    assert values[:, :, mask[0]].eq(0).all()


def test_halves_of_differential_attention_convolve_with_their_own_weights():
    mechanism = move(build_differential("lot", **CONTEXT, conv_kernel=3).double())
    q, k, v = draw(1, 5, 5)
    plans = mechanism.inner(q, k, v, need_weights=True).weights[0]
    halves = []
    for plan, weight in zip(plans, mechanism.inner.convolution.weight, strict=True):
        halves.append(torch.cat([plan @ reference.convolution(half, weight) for half in v[0]], -1))
    difference = halves[0] - mechanism.difference_weight() * halves[1]
    expected = mechanism.norm(difference) * (1 - mechanism.lambda_init)
    actual = torch.cat(list(mechanism(q, k, v).values[0]), -1)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kernel", [2, 4, 0, -1, 2.5])
def test_kernels_that_have_no_middle_are_named(kernel):
    with pytest.raises(ValueError, match=f"lot attention: conv_kernel must be .*{kernel}"):
        build(conv_kernel=kernel)


def test_values_of_a_width_without_weights_are_refused():
    q, k, v = draw()
    with pytest.raises(InputError, match="width 3"):
        build(conv_kernel=3)(q, k, v[..., :3])


def test_convolved_values_are_summarised():
    mechanism = move(build(conv_kernel=3, query_updates=1))
    q, k, v = draw()
    mask = padding_mask((6, 4, 2), 6, "left")
    summary = mechanism.summarise(k, v, mask)
    expected = mechanism(q, k, v, None, mask).values
    torch.testing.assert_close(mechanism.attend_summary(q, summary).values, expected, atol=1e-12, rtol=0)


def test_convolution_cannot_be_causal():
    with pytest.raises(InputError, match="lot attention cannot be causal"):
        build(conv_kernel=3, query_updates=1)(*draw(1, 5, 5), causal=True)
