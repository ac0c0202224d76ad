"""What ESP promises beyond the contract: its limits, its slicers, ties, exact sorts at inference, and annealing."""

import pytest
import torch

from fairseq_lot.attention.registry import build_mechanism
from tests import reference
from tests.conftest import close, gradients
from tests.variants import build_differential, draw, padding_mask

HEADS, DIM = 2, 4
LIKE = torch.zeros(1, dtype=torch.float64)
KINDS = {"soft": {}, "hard": {"hard": True}}
SLICERS = [{}, {"slicer": "frozen", "num_slices": 5}, {"slicer": "learnable", "num_slices": 3}]

every_slicer = pytest.mark.parametrize("slicer", SLICERS, ids=lambda x: x.get("slicer", "axis"))
both_sizes = pytest.mark.parametrize("src_len", [5, 6])


def esp(kind="soft", dtype=torch.float64, **options):
    return build_mechanism("esp", num_heads=HEADS, head_dim=DIM, **KINDS[kind], **options).to(dtype)


@both_sizes
def test_algorithm_1_without_scaling_is_ours_at_other_temperatures(src_len):
    """Algorithm 1 takes unscaled q and k; its temperatures t and τ are t/d and τ·d here."""
    mechanism = esp(sort_temperature=0.3 / DIM, slice_inverse_temperature=0.2 * DIM)
    q, k, v = draw(1, src_len=src_len)
    plan = mechanism(q, k, v, need_weights=True).weights[0]
    for head in range(HEADS):
        axes = torch.eye(DIM, dtype=torch.float64)
        plans, costs = reference.sliced_plans(q[0, head], k[0, head], axes, sort_temperature=0.3)
        weights = torch.softmax(-0.2 * torch.stack(costs), 0)
        close(plan[head], q.size(2) * (weights[:, None, None] * torch.stack(plans)).sum(0))


@every_slicer
@both_sizes
def test_soft_becomes_hard_as_the_temperature_falls(slicer, src_len):
    inputs = draw(src_len=src_len)
    masks = padding_mask((5, 3, 1), 5, "scattered"), padding_mask((4, 5, 2), src_len, "left")
    exact = esp("hard", **slicer)(*inputs, *masks, need_weights=True)
    errors = []
    for temperature in (1e-1, 1e-4, 1e-12):
        output = esp(**slicer, sort_temperature=temperature)(*inputs, *masks, need_weights=True)
        differences = output.values - exact.values, output.weights - exact.weights
        errors.append(max(difference.abs().max() for difference in differences).item())
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-2 and errors[-1] < 1e-9


@every_slicer
@both_sizes
@pytest.mark.parametrize("wrap", [False, True])
def test_hard_inference_is_soft_in_training_and_hard_outside(slicer, src_len, wrap):
    def build(**options):
        context = {"num_heads": HEADS, "head_dim": DIM, **slicer, **options}
        return (build_differential if wrap else build_mechanism)("esp", **context).double()

    inputs, mechanism = draw(src_len=src_len), build(hard_inference=True)
    for training, options in ((True, {}), (False, {"hard": True}), (True, {})):
        output = mechanism.train(training)(*inputs, need_weights=True)
        expected = build(**options)(*inputs, need_weights=True)
        assert torch.equal(output.values, expected.values) and torch.equal(output.weights, expected.weights)
    assert mechanism.state_dict().keys() == build().state_dict().keys()


@every_slicer
def test_equal_tokens_keep_their_order_when_hard(slicer):
    q, k, v = (x[:, :, :1].expand(-1, -1, 6, -1) for x in draw())
    plan = esp("hard", **slicer)(q, k, v, need_weights=True).weights
    close(plan, torch.eye(6, dtype=torch.float64).expand_as(plan))
    plan = esp("hard", **slicer)(q[:, :, :4], k, v, need_weights=True).weights
    close(plan, 4 * reference.overlap_plan(4, 6).expand_as(plan))


@pytest.mark.parametrize("kind", KINDS)
@every_slicer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_do_not_depend_on_the_batch(kind, slicer, dtype):
    """A sentence with repeated tokens gives the same alone and in a batch, with pads on either side.

    Rounding may put equal tokens in either order. The gradient of each of them depends on the order; their sum, the
    gradient of the token that is repeated, does not.
    """
    # at the default of 1e-3, float32's rounding is as large as the gradients of a sort
    temperature = 1e-3 if dtype == torch.float64 else 0.1
    mechanism = esp(kind, dtype, **slicer, sort_temperature=temperature)
    kinds = torch.tensor([0, 1, 2, 1, 0, 0, 2, 1, 0, 1, 2])
    equal = (kinds[:, None] == kinds).to(dtype)
    alone = [x[:1, :, kinds].requires_grad_() for x in draw(dtype=dtype)]
    values = mechanism(*alone).values
    of_leaves = gradients(values, alone)
    # A soft sort of lines x has the gradients 2 Σ_j pull_j (place - x_j)/t, differences of numbers up to |x|/t < 2.5/t
    # times a pull, which is at most the gradient of an entry of A, |w·v| < 6.5; there are 11 tokens. An exact sort has
    # gradients through the costs alone: sums over the tokens of squared distances up to 10 times |w·v|.
    rounding = torch.finfo(dtype).eps * 11 * 6.5 * (10 if kind == "hard" else 2 * 2.5 / temperature)
    for bsz, length, first in ((2, 11, 0), (3, 19, 0), (5, 40, 29), (7, 67, 13)):
        batch = draw(bsz, length, length, dtype=dtype, seed=9)
        for x, real in zip(batch, alone, strict=True):
            x[1, :, first : first + 11] = real[0].detach()
        mask = torch.zeros(bsz, length, dtype=torch.bool)
        mask[1, :first] = mask[1, first + 11 :] = True
        inputs = [x.requires_grad_() for x in batch]
        together = mechanism(*inputs, mask, mask).values[1:2, :, first : first + 11]
        close(together, values, 1e-10 if dtype == torch.float64 else 1e-5)
        for gradient, expected in zip(gradients(together, inputs), of_leaves, strict=True):
            close(equal @ gradient[1, :, first : first + 11], equal @ expected[0], rounding)


@pytest.mark.parametrize("option", ["sort_temperature", "min_sort_temperature"])
def test_tiny_temperatures_are_finite_in_float32(option):
    inputs = [x.requires_grad_() for x in draw(dtype=torch.float32)]
    values = esp(dtype=torch.float32, **{option: 1e-30})(*inputs).values
    assert values.isfinite().all() and all(x.isfinite().all() for x in gradients(values, inputs))


@pytest.mark.parametrize(("inverse", "has_gradient"), [(0.0, False), (1.0, True)])
def test_hard_sorts_have_gradients_for_q_and_k_through_the_slice_weights_and_none_for_slices(inverse, has_gradient):
    mechanism = esp("hard", slicer="learnable", slice_inverse_temperature=inverse)
    inputs = [x.requires_grad_() for x in draw()]
    q, k, v, slices = torch.autograd.grad(mechanism(*inputs).values.square().sum(), [*inputs, mechanism.slices])
    assert v.abs().max() > 1e-3
    assert all(x.abs().max() > 1e-3 if has_gradient else x.eq(0).all() for x in (q, k))
    assert slices.eq(0).all()  # a gradient of 0, not None: exact sorts are piecewise constant in the slices


ANNEALED = [
    ({"anneal": 0.8}, (), 1e-3),
    ({"anneal": 0.8, "sort_temperature": 0.1}, (2,), 0.08),
    ({"anneal": 0.5, "sort_temperature": 0.1}, (2, 3), 0.025),
    ({"anneal": 0.8}, (7, 7, 3, 7), 1e-3 * 0.8**6),
    ({"anneal": 0.5}, (1_000,), 1e-8),
    ({"anneal": 0.5, "sort_temperature": 1e-9}, (9,), 1e-9),  # below the minimum already
    ({}, (50,), 1e-3),
]


@pytest.mark.parametrize(("options", "epochs", "expected"), ANNEALED)
def test_temperature_is_multiplied_once_per_epoch_and_stays_above_its_minimum(options, epochs, expected):
    mechanism = esp(**options)
    for epoch in epochs:
        mechanism.set_epoch(epoch)
    assert float(mechanism.sort_temperature(LIKE)) == pytest.approx(expected)
    assert mechanism.state_dict().keys() == ({"epoch"} if "anneal" in options else set())


def test_annealed_sort_equals_the_sort_at_the_annealed_temperature():
    mechanism = esp(anneal=0.5, sort_temperature=0.8)
    mechanism.set_epoch(4)
    output, expected = (x(*draw(), need_weights=True) for x in (mechanism, esp(sort_temperature=0.1)))
    close([output.values, output.weights], [expected.values, expected.weights])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_annealing_stops_before_gradients_are_rounding_errors(dtype):
    mechanism = esp(anneal=0.5)
    mechanism.set_epoch(1_000)
    assert mechanism.sort_temperature(LIKE.to(dtype)).item() == pytest.approx(1e-8)
    inputs = [x.requires_grad_() for x in draw(dtype=dtype)]
    values = mechanism(*inputs).values
    assert values.isfinite().all() and all(x.isfinite().all() for x in gradients(values, inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_epoch_is_in_the_checkpoint(dtype):
    trained = esp(anneal=0.8).to(dtype)
    trained.set_epoch(30)
    loaded = esp(anneal=0.8)
    loaded.load_state_dict(trained.state_dict())
    assert loaded.sort_temperature(LIKE).item() == pytest.approx(1e-3 * 0.8**29)
    assert torch.equal(loaded(*draw()).values, trained.double()(*draw()).values)
