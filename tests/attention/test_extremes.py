"""Huge scores, odd temperatures, sentences of one token or of a thousand: finite values, gradients and marginals."""

import pytest
import torch

from fairseq_lot.attention.differential import build_differential
from fairseq_lot.attention.registry import MECHANISMS, build_mechanism
from tests.variants import CASES, HEAD_DIM, NUM_HEADS, draw

every_case = pytest.mark.parametrize("case", CASES, ids=str)
WITH_EPSILON = [name for name, kind in MECHANISMS.items() if hasattr(kind.options_class, "epsilon")]
PRECISIONS = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-2}


def check(mechanism, q, k, v, *, tolerance, rows_exact=True):
    """Values, A and all gradients are finite; every query gives its whole mass, and nothing is negative."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    output = mechanism(*inputs, need_plan=True)
    gradients = torch.autograd.grad(
        output.values.float().square().sum(), [*inputs, *mechanism.parameters()], allow_unused=True
    )
    assert output.values.isfinite().all() and output.plan.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)
    plan = output.plan.float()
    if hasattr(mechanism, "difference_weight"):
        whole = 1 - mechanism.difference_weight().item()
    else:
        whole = 1.0
        assert plan.ge(0).all()
        assert abs(plan.sum() / plan[..., 0].numel() - 1) <= tolerance, "mass is lost or made"
    if rows_exact:
        assert (plan.sum(-1) - whole).abs().max() <= tolerance
    return output


def exact(case):
    """Soft sorting moves mass between tokens; all else keeps every query's share."""
    return case.name != "esp" or case.options.get("hard", False)


def with_scores(size, dtype=torch.float32, length=6):
    """q and k whose scaled scores reach ±size."""
    q, k, v = draw(2, length, length, dtype=torch.float32)
    largest = (q @ k.transpose(-1, -2)).abs().max() * HEAD_DIM**-0.5
    scale = (size / largest).sqrt()
    return (scale * q).to(dtype), (scale * k).to(dtype), v.to(dtype)


@every_case
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_scores_of_ten_thousand(case, dtype):
    check(case.build(dtype), *with_scores(1e4, dtype), tolerance=PRECISIONS[dtype], rows_exact=exact(case))


@pytest.mark.parametrize("build", [build_mechanism, build_differential])
@pytest.mark.parametrize("epsilon", [1e-3, 1e-2, 1.0, 1e2, 1e3])
@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("name", WITH_EPSILON)
def test_temperatures(name, size, epsilon, build):
    mechanism = build(name, num_heads=NUM_HEADS, head_dim=HEAD_DIM, epsilon=epsilon)
    check(mechanism, *with_scores(size), tolerance=1e-5)


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("inverse", [0.0, 1.0, 1e4])
def test_temperatures_of_slices(temperature, inverse):
    options = {"sort_temperature": temperature, "slice_inverse_temperature": inverse}
    mechanism = build_mechanism("esp", num_heads=NUM_HEADS, head_dim=HEAD_DIM, **options)
    check(mechanism, *with_scores(1e4), tolerance=1e-5, rows_exact=False)


@every_case
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_sentences_of_one_token(case, dtype):
    mechanism = case.build(dtype)
    q, k, v = draw(3, 1, 1, dtype=dtype)
    output = check(mechanism, q, k, v, tolerance=PRECISIONS[dtype])
    if not (case.differential or case.flag("mixes_values")):
        torch.testing.assert_close(output.values, v, atol=PRECISIONS[dtype], rtol=PRECISIONS[dtype])


@pytest.mark.parametrize("name", [name for name in MECHANISMS if hasattr(MECHANISMS[name].options_class, "num_pivots")])
@pytest.mark.parametrize("length", [1, 2])
def test_more_pivots_than_tokens(name, length):
    mechanism = build_mechanism(name, num_heads=NUM_HEADS, head_dim=HEAD_DIM, num_pivots=256)
    check(mechanism, *draw(3, length, length, dtype=torch.float32), tolerance=1e-5)


@every_case
def test_equal_tokens_get_equal_rows(case):
    mechanism = case.build(torch.float32)
    q, k, v = (x[:, :, :1].expand(-1, -1, 7, -1) for x in draw(2, 1, 1, dtype=torch.float32))
    output = check(mechanism, q, k, v, tolerance=1e-5, rows_exact=exact(case))
    if not (case.differential or case.flag("positional") or case.flag("mixes_values")) and exact(case):
        torch.testing.assert_close(output.values, v, atol=1e-5, rtol=1e-5)


@every_case
def test_sentences_of_1024_tokens(case):
    mechanism = case.build(torch.float32)
    q, k, v = draw(1, 1024, 1024, dtype=torch.float32)
    check(mechanism, q, k, v, tolerance=1e-3, rows_exact=exact(case))
