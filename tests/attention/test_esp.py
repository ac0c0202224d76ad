"""What ESP promises beyond the contract: its limits, its slicers, ties, and exact sorts at inference."""

import pytest
import torch

from fairseq_lot.attention import reference
from fairseq_lot.attention.differential import build_differential
from fairseq_lot.attention.registry import build_mechanism
from tests.conftest import close
from tests.variants import draw, padding_mask

HEADS, DIM = 2, 4
KINDS = {"soft": {}, "hard": {"hard": True}}
SLICERS = [{}, {"slicer": "frozen", "num_slices": 5}, {"slicer": "learnable", "num_slices": 3}]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_slicer = pytest.mark.parametrize("slicer", SLICERS, ids=lambda x: x.get("slicer", "axis"))
both_sizes = pytest.mark.parametrize("src_len", [5, 6])


def esp(kind="soft", dtype=torch.float64, **options):
    return build_mechanism("esp", num_heads=HEADS, head_dim=DIM, **KINDS[kind], **options).to(dtype)


def slices_alone(mechanism, q, k):
    """``n·U_l`` and ``D_l`` of every slice, ``(L, heads, n, m)`` and ``(L, heads)``, of one sentence."""
    plans, costs = [], []
    for head, slices in enumerate(mechanism.directions(q)):
        x, y = (mechanism.scaling * x[0, head] for x in (q, k))
        temperature = mechanism.options.sort_temperature
        u, d = reference.sliced_plans(x, y, slices, sort_temperature=temperature, hard=mechanism.options.hard)
        plans.append(len(x) * torch.stack(u))
        costs.append(torch.stack(d))
    return torch.stack(plans, 1), torch.stack(costs, 1)


@every_kind
@every_slicer
@both_sizes
def test_the_inverse_temperature_leads_from_the_mean_to_the_best_slice(kind, slicer, src_len):
    options, (q, k, v) = {**slicer, "sort_temperature": 0.1}, draw(1, src_len=src_len)
    mean, best = (esp(kind, slice_inverse_temperature=x, **options) for x in (0.0, 1e7))
    plans, costs = slices_alone(mean, q, k)
    close(mean(q, k, v, need_weights=True).weights[0], plans.mean(0))
    for head, plan in enumerate(best(q, k, v, need_weights=True).weights[0]):
        close(plan, plans[costs[:, head].argmin(), head])


@both_sizes
def test_algorithm_1_scales_nothing_and_is_ours_at_other_temperatures(src_len):
    """t/d and τ·d, where t and τ are those of q and k as they come."""
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


def gradients(mechanism, inputs):
    """Values, and gradients of q, k, v and all parameters."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    values = mechanism(*inputs).values
    leaves = [*inputs, *mechanism.parameters()]
    weights = torch.linspace(-1, 1, values.numel(), dtype=values.dtype).view(values.shape)
    return values.detach(), torch.autograd.grad((weights * values).sum(), leaves)


@every_slicer
def test_equal_tokens_keep_their_order_when_hard(slicer):
    q, k, v = (x[:, :, :1].expand(-1, -1, 6, -1) for x in draw())
    plan = esp("hard", **slicer)(q, k, v, need_weights=True).weights
    close(plan, torch.eye(6, dtype=torch.float64).expand_as(plan))
    plan = esp("hard", **slicer)(q[:, :, :4], k, v, need_weights=True).weights
    close(plan, 4 * reference.overlap_plan(4, 6).expand_as(plan))


@every_kind
@every_slicer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_do_not_depend_on_the_batch(kind, slicer, dtype):
    """Duplicated tokens of a sentence alone, and among longer ones with pads on either side.

    Rounding may put equal tokens in either order. Their gradients depend on the order, the sum of these does not: it is
    how the loss follows the token that they all are.
    """
    # in float32 the rounding of a sort at the default, 1e-3, is as large as its gradients
    temperature = 1e-3 if dtype == torch.float64 else 0.1
    mechanism = esp(kind, dtype, **slicer, sort_temperature=temperature)
    kinds = torch.tensor([0, 1, 2, 1, 0, 0, 2, 1, 0, 1, 2])
    equal = (kinds[:, None] == kinds).to(dtype)
    alone = [x[:1, :, kinds] for x in draw(dtype=dtype)]
    values, of_leaves = gradients(mechanism, alone)
    # A soft sort of lines x has the gradients 2 Σ_j pull_j (place - x_j)/t, differences of numbers up to |x|/t < 2.5/t
    # times a pull, which is at most the gradient of an entry of A, |w·v| < 6; there are 11 tokens. An exact sort has
    # those of the costs: sums over the tokens of squared distances up to 10 times |w·v|.
    rounding = torch.finfo(dtype).eps * 11 * 6 * (10 if kind == "hard" else 2 * 2.5 / temperature)
    for bsz, length, first in ((2, 11, 0), (3, 19, 0), (5, 40, 29), (7, 67, 13)):
        batch = draw(bsz, length, length, dtype=dtype, seed=9)
        for x, real in zip(batch, alone, strict=True):
            x[1, :, first : first + 11] = real[0]
        mask = torch.zeros(bsz, length, dtype=torch.bool)
        mask[1, :first] = mask[1, first + 11 :] = True
        inputs = [x.requires_grad_() for x in batch]
        together = mechanism(*inputs, mask, mask).values[1, :, first : first + 11]
        close(together, values[0], 1e-10 if dtype == torch.float64 else 1e-5)
        weights = torch.linspace(-1, 1, values.numel(), dtype=dtype).view(values.shape)[0]
        of_inputs = torch.autograd.grad((weights * together).sum(), inputs)
        for gradient, expected in zip(of_inputs, of_leaves, strict=False):
            close(equal @ gradient[1, :, first : first + 11], equal @ expected[0], rounding)


def test_learnable_slices_learn_from_soft_sorts():
    _, of_leaves = gradients(esp(slicer="learnable", sort_temperature=0.1), draw())
    assert of_leaves[-1].abs().amax((0, 2)).gt(1e-4).all()


def test_hard_sorts_teach_q_and_k_through_the_slice_weights():
    inputs = draw()
    *_, v, of_slices = gradients(esp("hard", slicer="learnable", slice_inverse_temperature=1.0), inputs)[1]
    assert v.abs().max() > 1e-3
    # exact sorts are piecewise constant in the slices; their gradient is 0 and not missing
    assert of_slices.shape == (HEADS, DIM, DIM) and of_slices.eq(0).all()
    q, k, *_ = gradients(esp("hard", slicer="learnable", slice_inverse_temperature=1.0), inputs)[1]
    assert q.abs().max() > 1e-3 and k.abs().max() > 1e-3
    q, k, *_ = gradients(esp("hard", slice_inverse_temperature=0.0), inputs)[1]
    assert q.eq(0).all() and k.eq(0).all()


def test_frozen_slices_are_saved_and_not_trained():
    mechanism = esp(slicer="frozen", num_slices=5, seed=3)
    assert not list(mechanism.parameters())
    assert mechanism.state_dict()["slices"].shape == (HEADS, 5, DIM)
    other = esp(slicer="frozen", num_slices=5, seed=4)
    expected = mechanism(*draw()).values
    assert (other(*draw()).values - expected).abs().max() > 1e-3
    other.load_state_dict(mechanism.state_dict())
    assert torch.equal(other(*draw()).values, expected)


@pytest.mark.parametrize("option", ["sort_temperature", "min_sort_temperature"])
def test_temperatures_that_no_float32_can_be_divided_by_are_refused(option):
    inputs = draw(dtype=torch.float32)
    values, of_leaves = gradients(esp(dtype=torch.float32, **{option: 1e-30}), inputs)
    assert values.isfinite().all() and all(x.isfinite().all() for x in of_leaves)
    with pytest.raises(ValueError, match=f"esp attention: {option} must be at least 1e-30, got 1e-80"):
        esp(**{option: 1e-80})
