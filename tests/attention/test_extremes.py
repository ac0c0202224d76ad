"""Huge scores, extreme temperatures, sentences of 1 to 1,024 tokens: all is finite and agrees with the slow twin."""

import copy

import pytest
import torch

from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.modules.sites import unwrapped
from tests.conftest import close
from tests.twins import has_a_twin, twin
from tests.variants import CASES, HEAD_DIM, PLAIN_CASES, Case, draw

every_case = pytest.mark.parametrize("case", CASES, ids=str)
DEFAULTS = [str(case) for case in PLAIN_CASES if case.variant == "default"]
WITH_EPSILON = [name for name, kind in MECHANISMS.items() if hasattr(kind.options_class, "epsilon")]
WITH_PIVOTS = [name for name, kind in MECHANISMS.items() if hasattr(kind.options_class, "num_pivots")]
# tolerance of the sum of a row of A: the rounding of its entries
MASS_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# tolerance of A against its twin: float32 rounds scores of 1e4 by about 1e-3
TWIN_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def check(case, mechanism, q, k, v):
    """The output; asserts that it and its gradients are finite, A ≥ 0, and the masses of A are right.

    Its total mass always is; the rows' masses if the mechanism promises it, the columns' if sorting is exact.
    """
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    output = mechanism(*inputs, need_weights=True)
    gradients = torch.autograd.grad(
        output.values.float().square().sum(), [*inputs, *mechanism.parameters()], allow_unused=True
    )
    assert output.values.isfinite().all() and output.weights.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)
    plan, tolerance = output.weights.double(), MASS_TOLERANCE[q.dtype]
    whole = 1 - mechanism.difference_weight().item() if case.differential else 1.0
    assert case.differential or plan.ge(0).all()
    assert (plan.mean(-2).sum(-1) - whole).abs().max() <= tolerance, "the total mass is wrong"
    if case.rows_exact:
        assert (plan.sum(-1) - whole).abs().max() <= tolerance
    if case.options.get("hard"):
        assert (plan.sum(-2) - whole).abs().max() <= tolerance
    return output


def check_with_twin(case, mechanism, *inputs, tolerance):
    """``check``, and A agrees with the slow twin."""
    plan = check(case, mechanism, *inputs).weights.double()
    exact = copy.deepcopy(mechanism).double()
    twins = [twin(case, exact, *(x[sentence].double() for x in inputs))[1] for sentence in range(len(plan))]
    close(plan, torch.stack(twins), tolerance)


def draw_with_scores_of(size, case, dtype):
    """The mechanism, q, k and v; q, k and the pivots are scaled until the largest score of each kind reaches ±size."""
    mechanism = case.build()
    q, k, v = draw(2, 6, 6)
    parameters = [x.data for x in [getattr(unwrapped(mechanism), "pivots", None)] if x is not None]
    products = [q @ k.mT, *(x @ pivots.mT for x in (q, k) for pivots in parameters)]
    scale = (size * HEAD_DIM**0.5 / min(x.abs().max() for x in products)).sqrt()
    for pivots in parameters:
        pivots *= scale
    return mechanism.to(dtype), (scale * q).to(dtype), (scale * k).to(dtype), v.to(dtype)


@pytest.mark.fast_if(lambda case, dtype: dtype == torch.float32 or str(case) in DEFAULTS)
@pytest.mark.parametrize("case", [case for case in CASES if has_a_twin(case)], ids=str)
@pytest.mark.parametrize("dtype", MASS_TOLERANCE, ids=str)
def test_scores_of_ten_thousand(case, dtype):
    check_with_twin(case, *draw_with_scores_of(1e4, case, dtype), tolerance=TWIN_TOLERANCE[dtype])


@pytest.mark.fast_if(lambda case, **_: str(case) in DEFAULTS)
@pytest.mark.parametrize("norm", [100.0, 1000.0])
@pytest.mark.parametrize("case", [case for case in CASES if not case.options.get("hard")], ids=str)
def test_gradients_at_a_large_norm(case, norm):
    """Float32 differs from float64 by its rounding of the scores, relative to the norm.

    Exact sorting is left out: tokens that are nearly tied may change places.
    """
    for seed in range(4):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(2, 2, 8, HEAD_DIM) for _ in range(3))
        q, k = (norm * torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        weights, found = torch.randn(2, 2, 8, HEAD_DIM), []
        for dtype in (torch.float32, torch.float64):
            inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            values = case.build(dtype)(*inputs).values
            found.append(torch.autograd.grad(values, inputs[:2], weights[:, : values.size(1)].to(dtype)))
        for ours, exact in zip(*found, strict=True):
            assert (ours.double() - exact).abs().max() <= 1e-4 * norm


@pytest.mark.fast_if(lambda size, epsilon, differential, **_: epsilon != 1.0 and (size == 1.0) == differential)
@pytest.mark.parametrize("differential", [False, True], ids=["plain", "differential"])
@pytest.mark.parametrize("epsilon", [1e-3, 1e-2, 1.0, 1e2, 1e3])
@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("name", WITH_EPSILON)
def test_extreme_epsilons(name, size, epsilon, differential):
    case = Case(name, "epsilon", {"epsilon": epsilon}, differential)
    check_with_twin(case, *draw_with_scores_of(size, case, torch.float64), tolerance=1e-7)
    check(case, *draw_with_scores_of(size, case, torch.float32))


@pytest.mark.parametrize("sort", [{"sort_temperature": x} for x in (1e-3, 1.0, 1e3)] + [{"hard": True}], ids=str)
@pytest.mark.parametrize("inverse", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_extreme_temperatures_of_esp(size, sort, inverse):
    case = Case("esp", "slices", {"slice_inverse_temperature": inverse, **sort})
    check_with_twin(case, *draw_with_scores_of(size, case, torch.float64), tolerance=1e-7)
    check(case, *draw_with_scores_of(size, case, torch.float32))


@pytest.mark.fast_if(lambda case, dtype: dtype == torch.float32 or str(case) in DEFAULTS)
@every_case
@pytest.mark.parametrize("dtype", MASS_TOLERANCE, ids=str)
def test_sentences_of_one_token(case, dtype):
    q, k, v = draw(3, 1, 1, dtype=dtype)
    output = check(case, case.build(dtype), q, k, v)
    if not (case.differential or case.flag("mixes_values")):
        close(output.values, v, MASS_TOLERANCE[dtype], relative=MASS_TOLERANCE[dtype])


@pytest.mark.parametrize("name", WITH_PIVOTS)
@pytest.mark.parametrize("length", [1, 2])
def test_more_pivots_than_tokens(name, length):
    case = Case(name, "many-pivots", {"num_pivots": 256})
    check_with_twin(case, case.build(), *draw(3, length, length), tolerance=1e-10)
    check(case, case.build(torch.float32), *draw(3, length, length, dtype=torch.float32))


@every_case
def test_equal_tokens_get_equal_rows(case):
    q, k, v = (x[:, :, :1].expand(-1, -1, 7, -1) for x in draw(2, 1, 1, dtype=torch.float32))
    output = check(case, case.build(torch.float32), q, k, v)
    if not (case.differential or case.flag("positional") or case.flag("mixes_values")) and case.rows_exact:
        close(output.values, v, 1e-5, relative=1e-5)


@pytest.mark.fast_if(lambda case, dtype: dtype == torch.float32 and str(case) in DEFAULTS)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES] + [(case, torch.bfloat16) for case in CASES if case.variant == "default"],
    ids=str,
)
def test_sentences_of_1024_tokens(case, dtype):
    """A token's mass is about 1e-3, so the tolerance is relative to the largest value."""
    q, k, v = draw(1, 1024, 1024, dtype=dtype)
    mechanism = case.build(dtype)
    values = check(case, mechanism, q, k, v).values
    if case.name != "esp":  # two tokens that are nearly tied may change places in a sort
        exact = copy.deepcopy(mechanism).double()(q.double(), k.double(), v.double()).values
        assert (values - exact).abs().max() <= 10 * MASS_TOLERANCE[dtype] * exact.abs().max()
