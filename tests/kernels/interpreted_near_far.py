"""The near_far kernels in Triton's interpreter, on CPU tensors; ``test_interpreter.py`` runs this."""

import os

import pytest
import torch

from fairseq_lot.kernels import naive
from fairseq_lot.kernels import near_far as kernels
from fairseq_lot.kernels.naive import NearFarSettings
from tests import reference
from tests.conftest import close
from tests.kernels.interpreted import HALVES, check, pads, with_gradients

assert os.environ["TRITON_INTERPRET"] == "1"
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # the interpreter's word for inf · 0 and overflow

NAMES = ["values", "grad_q", "grad_k", "grad_v", "grad_features", "grad_bias"]
FORMS = {"norms": {}, "tangents": {"tangents": True}, "causal": {"causal": True}}
all_forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def small(monkeypatch):
    """Chunks of 16, so that short sentences have many."""
    for name, value in {"CHUNK": 16, "TILE": 16, "DENSE": 32, "MERGED": 16}.items():
        monkeypatch.setattr(kernels, name, value)


def draw(n, d, r, *, heads=1, rows=None, dv=None, dtype=torch.float32, size=1.0, features=None):
    """q, k, v of two sentences, laid out as projections leave them, z and c."""
    q, k, v = (
        torch.randn(n, 2, heads, width).mul(factor).permute(1, 2, 0, 3).to(dtype)
        for width, factor in ((d, size), (d, size), (dv or d, 1.0))
    )
    z = (d**0.25 * torch.randn(heads, r, d)).to(features or dtype)
    return [q[:, :, n - (rows or n) :], k, v, z, 0.5 * torch.randn(heads, r)]


def check_near_far(n, d=16, r=5, *, window=4, alibi=False, key_pads=None, form="norms", **drawing):
    inputs = draw(n, d, r, **drawing)
    heads = inputs[3].size(0)
    slopes = 2.0 ** -torch.arange(1.0, heads + 1) if alibi else None
    settings = NearFarSettings(window, d**-0.5, slopes, key_pads, **FORMS[form])
    weights = torch.randn(*inputs[0].shape[:3], inputs[2].size(-1)).to(inputs[0].dtype)
    results = with_gradients(lambda *x: kernels.near_far(*x, settings), inputs, weights)
    exact, plain = (
        with_gradients(lambda *x: naive.near_far(*x, settings), [x.to(dtype) for x in inputs], weights.to(dtype))
        for dtype in (torch.float64, torch.float32)
    )
    largest = max((settings.scale * inputs[i].double().square().sum(-1)).max() for i in (0, 1))
    dtypes = [inputs[2].dtype] * len(NAMES)  # parts of all gradients are rounded to the inputs' type
    # logs are made once more on the way back, and those of the tangents from means that are rounded
    check(results, exact, plain, NAMES, scores=largest, updates=3, dtypes=dtypes, roundings=2)


PADS = pads(40, (33, 40), (0, 19))


@pytest.mark.parametrize(
    ("form", "alibi"), [("norms", False), ("tangents", False), ("tangents", True), ("causal", False), ("causal", True)]
)
def test_values_and_gradients(form, alibi, small):
    check_near_far(40, form=form, alibi=alibi, key_pads=PADS)


@pytest.mark.parametrize(("form", "n"), [("norms", 9), ("tangents", 9), ("causal", 30)])
def test_short_sentences(form, n, small):
    check_near_far(n, form=form, key_pads=pads(n, (0, 2), (0, n)))


@pytest.mark.parametrize(("form", "dtype"), [("tangents", torch.float16), ("causal", torch.bfloat16)], ids=str)
def test_half_precision(form, dtype, small):
    check_near_far(40, form=form, dtype=dtype, features=torch.float32)


def test_the_last_tokens_are_queries_of_all(small):
    check_near_far(40, form="causal", rows=25, key_pads=PADS, alibi=True)
    check_near_far(14, form="causal", rows=3)


@pytest.mark.slow
@all_forms
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("n", [1, 33, 64, 100, 129, 200])
def test_lengths(n, alibi, form):
    check_near_far(n, d=32, r=20, window=8, form=form, alibi=alibi, heads=2, key_pads=pads(n, (0, 0), (n - n // 3, n)))


@pytest.mark.slow
@all_forms
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("n", [60, 150])
def test_half_precision_at_the_sizes_that_are_used(n, dtype, form):
    check_near_far(n, d=64, r=32, window=8, form=form, dtype=dtype, alibi=n == 60)


@pytest.mark.slow
@all_forms
@pytest.mark.parametrize(
    ("d", "dv", "r", "window"), [(20, 24, 1, 0), (24, 16, 17, 8), (128, 128, 5, 3), (16, 16, 64, 8)]
)
def test_widths(d, dv, r, window, form, small):
    check_near_far(50, d, r, dv=dv, window=window, form=form)


@pytest.mark.slow
@all_forms
@pytest.mark.parametrize("alibi", [False, True])
def test_more_chunks_than_are_merged_at_once(form, alibi, small):
    check_near_far(310, r=3, form=form, alibi=alibi)


@pytest.mark.slow
@all_forms
@pytest.mark.parametrize("rows", [1, 16, 57])
def test_numbers_of_rows(form, rows, small):
    check_near_far(58, form="causal", rows=rows)


@pytest.mark.parametrize("form", ["tangents", "causal"])
def test_what_stands_in_pads_is_never_read(form, small):
    inputs, weights = draw(33, 16, 3), torch.randn(2, 1, 33, 16)
    mask = pads(33, (30, 33), (0, 17))
    settings = NearFarSettings(4, 0.25, None, mask, **FORMS[form])
    results = []
    for value in (0.0, torch.nan):
        changed = [x.masked_fill(mask[:, None, :, None], value) for x in inputs[1:3]]
        leaves = [inputs[0], *changed, *inputs[3:]]
        results.append(with_gradients(lambda *x: kernels.near_far(*x, settings), leaves, weights))
    assert all(map(torch.equal, *results))


@all_forms
def test_the_dense_formula_is_the_plain_loops(form):
    """By which the kernels are judged, in float64, with ALiBi."""
    settings = NearFarSettings(2, 0.25, torch.tensor([0.3], dtype=torch.float64), None, **FORMS[form])
    inputs = [x.double() for x in draw(9, 16, 3)]
    values = naive.near_far(*inputs, settings)
    q, k, v, z, c = inputs
    for sentence in range(2):
        plan = reference.near_far_plan(q[sentence, 0], k[sentence, 0], z[0], c[0], window=2, slope=0.3, **FORMS[form])
        close(values[sentence, 0], 9 * plan @ v[sentence, 0])
