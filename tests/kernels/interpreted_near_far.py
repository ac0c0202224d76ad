"""The near_far kernels in Triton's interpreter, on CPU tensors; ``test_interpreter.py`` runs this."""

import copy
import json
import os

import pytest
import torch
import triton
import triton.language as tl

from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.kernels import blocks, choice, launch, naive, near_far_backward, near_far_expected, near_far_step
from fairseq_lot.kernels import near_far as kernels
from fairseq_lot.kernels.naive import NearFarSettings
from tests import reference
from tests.conftest import close
from tests.kernels.conftest import Counted
from tests.kernels.interpreted import HALVES, check, pads, with_gradients

assert os.environ["TRITON_INTERPRET"] == "1"
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # by which the interpreter reports inf · 0, overflow

NAMES = ["values", "grad_q", "grad_k", "grad_v", "grad_features", "grad_bias"]
FORMS = {"norms": {}, "tangents": {"tangents": True}, "causal": {"causal": True}}
all_forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def small(monkeypatch):
    """Chunks of 16, so that short sentences have many."""
    for module, name, value in [
        (kernels, "CHUNK", 16),
        (kernels, "TILE", 16),
        (kernels, "MERGED", 16),
        (launch, "DENSE", 32),
    ]:
        monkeypatch.setattr(module, name, value)


def draw_near_far(n, d, r, *, heads=1, rows=None, dv=None, dtype=torch.float32, size=1.0, features=None):
    """q, k, v of two sentences, laid out as projections leave them, z and c."""
    q, k, v = (
        torch.randn(n, 2, heads, width).mul(factor).permute(1, 2, 0, 3).to(dtype)
        for width, factor in ((d, size), (d, size), (dv or d, 1.0))
    )
    z = (d**0.25 * torch.randn(heads, r, d)).to(features or dtype)
    return [q[:, :, n - (rows or n) :], k, v, z, 0.5 * torch.randn(heads, r)]


def check_near_far(n, d=16, r=5, *, window=4, alibi=False, key_pads=None, form="norms", **drawing):
    """The kernels against the dense formula in float64, values and gradients."""
    inputs = draw_near_far(n, d, r, **drawing)
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
    # the backward pass computes the logs again, the tangents' logs from rounded means
    # the interpreter truncates to bfloat16, which errs twice as much as rounding
    roundings = 4 if inputs[2].dtype == torch.bfloat16 else 2
    check(results, exact, plain, NAMES, scores=largest, updates=3, dtypes=dtypes, roundings=roundings)


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


def test_causal_queries_may_be_the_last_tokens_alone(small):
    check_near_far(40, form="causal", rows=25, key_pads=PADS, alibi=True)
    check_near_far(14, form="causal", rows=3)


def test_kernels_take_their_blocks_from_the_table_and_these_change_no_result(small, tmp_path, monkeypatch):
    other = {"summarise_keys": 32, "merge": 32, "attend": 32, "query_gradients": 32, "key_gradients": 32}
    entries = {f"{kernel} 32 16 16 16": {"block": block, "warps": 8, "stages": 2} for kernel, block in other.items()}
    (tmp_path / "cpu.json").write_text(json.dumps({"device": "cpu", "kernels": entries}))
    monkeypatch.setenv(blocks.VARIABLE, str(tmp_path))
    blocks._of_device.cache_clear()
    blocks.tuned.cache_clear()
    launched, start = {}, launch.start

    def record(kernel, grid, tensors, numbers, constants, warps, stages):
        launched[kernel.__name__] = constants, warps, stages
        start(kernel, grid, tensors, numbers, constants, warps, stages)

    monkeypatch.setattr(launch, "start", record)
    try:
        check_near_far(70, form="tangents", key_pads=pads(70, (33, 40), (0, 19)))
    finally:
        blocks._of_device.cache_clear()
        blocks.tuned.cache_clear()
    for kernel, block in other.items():
        constants, *rest = launched[kernel]
        assert block in constants and 64 not in constants and rest == [8, 2], kernel


@pytest.mark.slow
@all_forms
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("n", [1, 64, 130])
def test_lengths(n, alibi, form):
    check_near_far(n, d=32, r=20, window=8, form=form, alibi=alibi, key_pads=pads(n, (0, 0), (n - n // 3, n)))


@pytest.mark.slow
@all_forms
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_at_the_sizes_that_are_used(dtype, form):
    check_near_far(140, d=64, r=32, window=8, form=form, dtype=dtype, alibi=dtype == torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tangents", "causal"])
@pytest.mark.parametrize(
    ("d", "dv", "r", "window"), [(20, 24, 1, 0), (24, 16, 17, 8), (128, 128, 5, 3), (16, 16, 64, 8)]
)
def test_widths(d, dv, r, window, form, small):
    check_near_far(50, d, r, dv=dv, window=window, form=form)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "alibi"), [("tangents", True), ("causal", False)])
def test_more_chunks_than_are_merged_at_once(form, alibi, small):
    check_near_far(310, r=3, form=form, alibi=alibi)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 16, 57])
def test_numbers_of_rows(rows, small):
    check_near_far(58, form="causal", rows=rows)


@pytest.mark.parametrize("form", ["tangents", "causal"])
def test_the_content_of_pads_is_never_read(form, small):
    inputs, weights = draw_near_far(33, 16, 3), torch.randn(2, 1, 33, 16)
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
    """Other tests compare the kernels with the dense formula. Here it is in float64, with ALiBi."""
    settings = NearFarSettings(2, 0.25, torch.tensor([0.3], dtype=torch.float64), None, **FORMS[form])
    inputs = [x.double() for x in draw_near_far(9, 16, 3)]
    values = naive.near_far(*inputs, settings)
    q, k, v, z, c = inputs
    for sentence in range(2):
        plan = reference.near_far_plan(q[sentence, 0], k[sentence, 0], z[0], c[0], window=2, slope=0.3, **FORMS[form])
        close(values[sentence, 0], 9 * plan @ v[sentence, 0])


@pytest.mark.parametrize(
    ("options", "causal", "kernels_used"),
    [
        ({"tangents": True, "exact_up_to": 12}, False, 1),
        ({"tangents": True, "exact_up_to": 12}, True, 1),
        pytest.param({"prior": "alibi", "tangents": True}, False, 1, marks=pytest.mark.slow),
        pytest.param({"prior": "alibi"}, True, 1, marks=pytest.mark.slow),
        pytest.param({}, False, 1, marks=pytest.mark.slow),
        ({"band": "expected"}, False, 1),
        ({"band": "expected", "tangents": True, "exact_up_to": 12}, False, 1),
        ({"num_updates": 3}, False, 0),
        ({"num_features": 0}, False, 0),
    ],
    ids=str,
)
def test_the_mechanism_through_kernels(options, causal, kernels_used, small, untested, monkeypatch):
    """In half precision against float64; with exact_up_to the second sentence, a short one, gets softmax."""
    settings = {"num_features": 3, "window": 2, **options}
    mechanism = build_mechanism("near_far", num_heads=2, head_dim=16, **settings)
    if "feature_bias" in dict(mechanism.named_parameters()):
        torch.nn.init.normal_(mechanism.feature_bias)
    mechanism, wide = mechanism.half(), copy.deepcopy(mechanism.half()).double()
    mask, weights = pads(21, (0, 0), (10, 21)), torch.randn(2, 2, 21, 16).half()
    inputs = [torch.randn(2, 2, 21, 16).half() for _ in range(3)]

    def run(mechanism, mode, dtype):
        monkeypatch.setenv(choice.VARIABLE, mode)
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        values = mechanism(*leaves, mask, mask, causal=causal).values
        return [values, *torch.autograd.grad(values, [*leaves, *mechanism.parameters()], weights.to(dtype))]

    results, exact = run(mechanism, "on", torch.float16), run(wide, "off", torch.float64)
    plain = run(copy.deepcopy(wide).float(), "off", torch.float32)
    names = ["values", "grad_q", "grad_k", "grad_v", *(f"grad of {name}" for name, _ in mechanism.named_parameters())]
    check(results, exact, plain, names, scores=5.0, updates=3, dtypes=[torch.float16] * len(names), roundings=2)
    assert list(choice._tested.values()) == [None] * kernels_used


@triton.jit
def _without_norms(grad_logs, x, z, HAS_NORMS: tl.constexpr, PRECISION: tl.constexpr):
    of_x = tl.dot(grad_logs, z.to(tl.float32))
    return of_x, tl.dot(tl.trans(grad_logs), x.to(tl.float32))


def _raises(*_, **__):
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [(near_far_backward, "_of_feature_logs", _without_norms), (kernels, "_launch", _raises)],
    ids=["gradient", "exception"],
)
def test_a_broken_kernel_is_replaced_after_one_warning(module, name, broken, small, untested, monkeypatch):
    monkeypatch.setattr(module, name, broken)
    inputs, settings = draw_near_far(9, 16, 3, dtype=torch.float16), NearFarSettings(2, 0.25)
    monkeypatch.setenv(choice.VARIABLE, "auto")
    with pytest.warns(UserWarning, match="plain torch instead of the near_far kernel on cpu") as warned:
        assert choice.near_far(*inputs, settings) is None
    assert len(warned) == 1
    monkeypatch.setenv(choice.VARIABLE, "on")
    with pytest.raises(InputError, match="^FAIRSEQ_LOT_KERNELS=on, but the near_far kernel cannot be used: .*$"):
        choice.near_far(*inputs, settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(False, False, False, True), (True, True, True, False)], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_sound_kernel_passes_its_self_test(dtype, kind):
    assert choice._near_far_error(torch.device("cpu"), (dtype, torch.float32), 3, 16, 16, True, kind) <= 1


def test_sizes_beyond_the_kernel_are_named(monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "on")
    for changed, reason in (({"r": 65}, "r is 65, more than 64"), ({"window": 17}, "window is 17, more than 16")):
        inputs = draw_near_far(9, 16, changed.get("r", 3), dtype=torch.float16)
        with pytest.raises(InputError, match=f"cannot be used: {reason}; set it to auto or off$"):
            choice.near_far(*inputs, NearFarSettings(changed.get("window", 2), 0.25))
    assert choice.near_far(*draw_near_far(9, 16, 3), NearFarSettings(2, 0.25)) is None  # float32 is plain torch's


KERNELS = ["summarise_keys", "merge", "attend", "query_gradients", "key_gradients", "all_gradients", "add_up"]
LAUNCHES = {  # forward, backward
    ("tangents", 9): (3, 4),
    ("norms", 9): (1, 2),
    ("norms", 30): (1, 3),
    ("causal", 40): (3, 4),
    ("causal", 100): (3, 4),
}


@pytest.mark.parametrize(("form", "n"), LAUNCHES)
def test_three_launches_forward_and_four_backward_for_any_length(form, n, small, monkeypatch):
    for name in KERNELS:
        monkeypatch.setattr(kernels, name, Counted(getattr(kernels, name)))

    def launches():
        return sum(getattr(kernels, name).launches for name in KERNELS)

    inputs = [x.requires_grad_() for x in draw_near_far(n, 16, 2)]
    values = kernels.near_far(*inputs, NearFarSettings(2, 0.25, **FORMS[form]))
    forward = launches()
    values.sum().backward()
    assert (forward, launches() - forward) == LAUNCHES[form, n]


@pytest.mark.parametrize("form", ["norms", "tangents"])
def test_ties_at_scores_of_tens_of_millions_share_their_mass(form):
    """One float32 cannot hold a row's peak plus its log mass: each of three equal keys would get ¼ or ½."""
    x = 1e4 * torch.nn.functional.normalize(torch.randn(1, 1, 3, 16), dim=-1)
    k = x.repeat_interleave(3, 2).half()
    inputs = [k, k, torch.randn(1, 1, 9, 16).half(), draw_near_far(9, 16, 3)[3].half(), torch.zeros(1, 3)]
    settings = NearFarSettings(8, 0.25, **FORMS[form])
    weights = torch.randn(1, 1, 9, 16).half()
    results, exact = (
        with_gradients(lambda *x, run=run: run(*x, settings), leaves, weights.to(leaves[0].dtype))
        for run, leaves in ((kernels.near_far, inputs), (naive.near_far, [x.double() for x in inputs]))
    )
    rounding = 2 * torch.finfo(torch.float16).eps
    for i, name in ((0, "values"), (3, "grad_v")):
        assert (results[i].double() - exact[i]).norm() <= rounding * exact[i].norm(), name
    # a gradient is a sum over keys whose weights sum to zero up to rounding
    largest = 0.25 * k.double().norm(dim=-1).max() * weights.double().norm() * inputs[2].double().norm()
    assert all((results[i].double() - exact[i]).norm() <= rounding * largest for i in (1, 2))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float16),
        ({"prior": "alibi", "exact_up_to": 4}, torch.float16),
        pytest.param({"tangents": True, "window": 0}, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param({"prior": "alibi"}, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
@torch.no_grad()
def test_steps_of_decoding_through_the_kernel(options, dtype, untested, monkeypatch):
    """Each step is one launch and agrees with the causal form in float64, even after a step of plain torch."""
    mechanism = build_mechanism("near_far", num_heads=2, head_dim=16, **{"num_features": 3, "window": 2} | options)
    torch.nn.init.normal_(mechanism.feature_bias)
    mechanism = mechanism.to(dtype).eval()
    n, mask = 9, pads(9, (0, 0), (0, 2))
    q, k, v = (torch.randn(2, 2, n, 16).to(dtype) for _ in range(3))
    monkeypatch.setenv(choice.VARIABLE, "off")
    wide = copy.deepcopy(mechanism).double()
    exact = wide(*(x.double() for x in (q, k, v)), None, mask, causal=True).values
    counted = Counted(near_far_step.next_token)
    monkeypatch.setattr(near_far_step, "next_token", counted)
    assert choice._step_error(q.device, (dtype, dtype), 3, 16, 16, mechanism.options.window, True, True) <= 1
    state, values, launches = {}, [], []
    for i in range(n):
        monkeypatch.setenv(choice.VARIABLE, "off" if i == 6 else "on")
        monkeypatch.setattr(choice, "_failure", lambda error: None)  # tested above
        now = (slice(None), slice(None), slice(i, i + 1))
        before = counted.launches
        output, state = mechanism.causal_step(q[now], k[now], v[now], mask[:, i : i + 1], state, False)
        values.append(output.values)
        launches.append(counted.launches - before)
    first = 6 if "exact_up_to" in options else 0  # two pads and E tokens
    assert launches == [int(i >= first and i != 6) for i in range(n)]
    values, real = torch.cat(values, 2), ~mask[:, None, :, None]
    rounding = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 32 * torch.finfo(dtype).eps
    assert ((values.double() - exact) * real).norm() <= rounding * exact.norm()


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"tangents": True, "exact_up_to": 12}, torch.float16), ({}, torch.float32)],
    ids=str,
)
@torch.no_grad()
def test_steps_at_cross_through_the_kernel(options, dtype, untested, monkeypatch):
    """Each step is one launch and agrees with float64; with exact_up_to the second sentence gets softmax."""
    settings = {"num_features": 3, "window": 2, "band": "expected"} | options
    mechanism = build_mechanism("near_far", num_heads=2, head_dim=16, **settings)
    torch.nn.init.normal_(mechanism.feature_bias)
    mechanism, mask = mechanism.to(dtype).eval(), pads(21, (0, 2), (10, 21))
    q, k, v = (torch.randn(2, 2, length, 16).to(dtype) for length in (4, 21, 21))
    monkeypatch.setenv(choice.VARIABLE, "off")
    wide = copy.deepcopy(mechanism).double()
    exact = wide.attend_summary(q.double(), wide.summarise(k.double(), v.double(), mask)).values
    counted = Counted(near_far_expected.attend_expected)
    monkeypatch.setenv(choice.VARIABLE, "on")
    summary = mechanism.summarise(k, v, mask)
    mechanism.attend_summary(q[:, :, :1], summary)
    monkeypatch.setattr(near_far_expected, "attend_expected", counted)
    values = torch.cat([mechanism.attend_summary(x, summary).values for x in q.split(1, 2)], 2)
    assert counted.launches == 4 and list(choice._tested.values()) == [None]
    rounding = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 32 * torch.finfo(dtype).eps
    assert values.dtype == dtype and (values.double() - exact).norm() <= rounding * exact.norm()


AT_EXPECTED = ["values", "grad_q", "grad_k", "grad_v", "grad_query_logs", "grad_log_sums", "grad_means", "grad_shares"]


def draw_at_expected(n, m, key_pads, *, dtype=torch.float32, size=1.0, equal=False, d=16, dv=16, r=3, heads=1):
    """The tensors of near_far at cross, q, k and v laid out as projections leave them; positions are apart."""
    q, k, v = (
        torch.randn(length, 2, heads, width).mul(factor).permute(1, 2, 0, 3)
        for length, width, factor in ((n, d, size * d**-0.5), (m, d, size), (m, dv, 1.0))
    )
    key_logs = size * torch.randn(2, heads, m, r, dtype=torch.float64)
    if equal:
        k, key_logs = k[:, :, :1].expand_as(k), key_logs[:, :, :1].expand_as(key_logs)
    if key_pads is not None:
        key_logs = key_logs.masked_fill(key_pads[:, None, :, None], -torch.inf)
    shares, log_sums = torch.softmax(key_logs, 2), key_logs.logsumexp(2)
    positions = shares.transpose(-1, -2) @ torch.arange(0.501, m, dtype=torch.float64)
    query_logs = size * torch.randn(2, heads, n, r, dtype=torch.float64)
    means = shares.transpose(-1, -2) @ v.double()
    q, k, v, means, shares = (x.to(dtype) for x in (q, k, v, means, shares))
    return [q, k, v, query_logs, log_sums, means, shares], positions


def check_at_expected(n, m, key_pads=None, *, window=2, dtype=torch.float32, **drawing):
    """The kernel at cross against n × m matrices in float64, values and all gradients."""
    inputs, positions = draw_at_expected(n, m, key_pads, dtype=dtype, **drawing)
    weights = torch.randn(*inputs[0].shape[:3], inputs[2].size(-1)).to(dtype)
    runs = (
        (near_far_expected.near_far_at_expected, inputs),
        (naive.near_far_at_expected, [x.double() for x in inputs]),
        (naive.near_far_at_expected, [x if x.dtype == torch.float64 else x.float() for x in inputs]),
    )
    results, exact, plain = (
        with_gradients(lambda *x, run=run: run(*x, positions, key_pads, window=window), leaves, weights)
        for run, leaves in runs
    )
    largest = (inputs[0].double() @ inputs[1].double().transpose(-1, -2)).abs().max()
    # the share outside of the band is a difference from 1
    check(results, exact, plain, AT_EXPECTED, scores=largest, updates=8, dtypes=[dtype] * 8, roundings=2)


@pytest.mark.parametrize(
    ("n", "m", "drawing"),
    [
        (5, 21, {"key_pads": pads(21, (18, 21), (0, 9)), "heads": 2, "window": 8}),
        (1, 13, {"dv": 20, "d": 24, "r": 5, "window": 0}),
        (4, 6, {"window": 9, "key_pads": pads(6, (4, 6), (0, 2))}),
        (5, 21, {"equal": True, "key_pads": pads(21, (0, 4), (0, 0))}),
        (5, 21, {"size": 30.0}),
        (5, 21, {"dtype": torch.float16, "key_pads": pads(21, (18, 21), (0, 9))}),
        (5, 21, {"dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_values_and_gradients_at_cross(n, m, drawing):
    check_at_expected(n, m, **drawing)


def test_at_cross_one_launch_each_way_and_the_content_of_pads_is_never_read(monkeypatch):
    counted = [Counted(near_far_expected.expected_forward), Counted(near_far_expected.expected_backward)]
    for kernel in counted:
        monkeypatch.setattr(near_far_expected, kernel.__name__, kernel)
    mask, results = pads(13, (10, 13), (0, 5)), []
    (q, k, v, *rest), positions = draw_at_expected(4, 13, mask)
    weights = torch.randn(2, 1, 4, 16)

    def run(*leaves):
        return near_far_expected.near_far_at_expected(*leaves, positions, mask, window=6)  # the bands have pads

    for value in (0.0, torch.nan):
        leaves = [q, *(x.masked_fill(mask[:, None, :, None], value) for x in (k, v)), *rest]
        results.append(with_gradients(run, leaves, weights))
    assert all(map(torch.equal, *results)) and [kernel.launches for kernel in counted] == [2, 2]


def test_a_broken_kernel_at_cross_is_replaced_after_one_warning(untested, monkeypatch):
    inputs, positions = draw_at_expected(4, 13, None)
    monkeypatch.setenv(choice.VARIABLE, "auto")
    monkeypatch.setattr(near_far_expected, "ROUNDING", 1e7)  # the rest counts as nothing
    with pytest.warns(UserWarning, match="plain torch instead of the near_far_at_expected kernel on cpu") as warned:
        assert choice.near_far_at_expected(*inputs, positions, None, window=2) is None
    assert len(warned) == 1
    monkeypatch.undo()
    monkeypatch.setattr(choice, "_tested", {})
    monkeypatch.setenv(choice.VARIABLE, "on")
    assert choice.near_far_at_expected(*inputs, positions, None, window=2) is not None
