"""The kernels in Triton's interpreter, on CPU tensors; ``test_interpreter.py`` runs this in a process of its own.

The interpreter executes a kernel block by block. It shows neither races nor the rounding of tensor cores.
"""

import os
import warnings

import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.kernels import choice, launch, naive, tiles
from fairseq_lot.kernels import convolution as convolution_kernels
from fairseq_lot.kernels import lot as lot_kernels
from fairseq_lot.kernels import sinkhorn as sinkhorn_kernels
from fairseq_lot.kernels import sinkhorn_attention as attention_kernels
from fairseq_lot.kernels.naive import LotInputs, LotSettings
from fairseq_lot.numerics.log_domain import log_domain_sinkhorn
from tests import reference
from tests.conftest import close
from tests.kernels.conftest import Counted

assert os.environ["TRITON_INTERPRET"] == "1"

LOT_NAMES = ["values", "grad_q", "grad_k", "grad_v", "grad_pivots", "grad_log_masses"]
SINKHORN_NAMES = ["conditional", "grad_scores", "grad_log_a", "grad_log_b"]
HALVES = [torch.float16, torch.bfloat16]
SETTINGS = LotSettings(scale=0.25, query_updates=3, key_updates=3)


@pytest.fixture(autouse=True)
def no_numerical_warnings():
    """An inf · 0 or an overflow in a kernel is a warning of the interpreter; here it is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def split_from(monkeypatch, length):
    """Split sentences into parts of about ``length`` tokens, as on a device with 100 processors."""
    monkeypatch.setattr(launch, "_processors", lambda device: 100)
    for name in ("LOT_PART", "SOLVER_PART"):
        monkeypatch.setattr(launch, name, length)


def pads(n, *ranges):
    """A mask of one row for each range of pads."""
    mask = torch.zeros(len(ranges), n, dtype=torch.bool)
    for row, (first, last) in zip(mask, ranges, strict=True):
        row[first:last] = True
    return mask


def draw_lot(n, m, r, d, *, dv=None, heads=1, dtype=torch.float32, size=1.0):
    """q, k, v, pivots and log masses of two sentences, laid out as projections leave them."""
    q, k, v = (
        torch.randn(length, 2, heads, width).mul(factor).permute(1, 2, 0, 3).to(dtype)
        for length, width, factor in ((n, d, size), (m, d, size), (m, dv or d, 1.0))
    )
    pivots = (d**0.25 * torch.randn(heads, r, d)).to(dtype)
    return [q, k, v, pivots, torch.randn(heads, r).log_softmax(-1)]


def with_gradients(function, inputs, weights):
    """The function's values, and the gradients of all inputs by their sum times ``weights``."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    values = function(*leaves)
    weights = weights.to(values.dtype)
    return [values, *torch.autograd.grad(values, leaves, weights, allow_unused=True, materialize_grads=True)]


def lot_twin(inputs, settings):
    """Values by the plain loops of ``reference``, on the real tokens of each sentence and head."""
    q, k, v, pivots, log_masses, query_pads, key_pads = inputs
    values = torch.zeros(*q.shape[:3], v.size(-1), dtype=q.dtype)
    for sentence in range(q.size(0)):
        of_q = torch.ones(q.size(2), dtype=torch.bool) if query_pads is None else ~query_pads[sentence]
        of_k = torch.ones(k.size(2), dtype=torch.bool) if key_pads is None else ~key_pads[sentence]
        if not of_q.any() or not of_k.any():
            continue
        for head in range(q.size(1)):
            plan = reference.lot_plan(
                q[sentence, head][of_q],
                k[sentence, head][of_k],
                pivots[head],
                log_masses[head],
                epsilon=q.size(-1) ** -0.5 / settings.scale,
                num_updates=settings.key_updates,
                query_updates=settings.query_updates,
            )
            attention = of_q.sum() * plan @ v[sentence, head][of_k]
            values[sentence, head] = values[sentence, head].index_put((of_q.nonzero().squeeze(1),), attention)
    return values


def naive_lot(inputs, settings):
    """Values by ``naive.lot``, and zeros for sentences of pads alone, which it does not take."""
    *tensors, query_pads, key_pads = inputs
    bsz, _, n, _ = tensors[0].shape
    query_pads = torch.zeros(bsz, n, dtype=torch.bool) if query_pads is None else query_pads
    key_pads = torch.zeros(bsz, tensors[1].size(2), dtype=torch.bool) if key_pads is None else key_pads
    some_query, some_key = (~mask.all(-1, keepdim=True) for mask in (query_pads, key_pads))
    values = naive.lot(LotInputs(*tensors, query_pads & some_query, key_pads & some_key), settings)
    return values.masked_fill((query_pads | ~some_key)[:, None, :, None], 0.0)


def check(results, exact, plain, names, *, scores, updates, dtypes, roundings=1):
    """Assert that the results differ from float64, ``exact``, by no more than rounding.

    Every update rounds the scores by float32's eps. Where a gradient nearly vanishes, or large factors cancel in it,
    four times the error of plain torch in float32, ``plain``, is allowed. Half precision rounds the results, and with
    more ``roundings`` the intermediates, too.
    """
    eps = torch.finfo(torch.float32).eps * (1 + scores) * updates
    whole = torch.cat([x.flatten() for x in exact[1:]]).norm()
    for name, result, wish, other, dtype in zip(names, results, exact, plain, dtypes, strict=True):
        rounding = 0.0 if dtype == torch.float32 else roundings * torch.finfo(dtype).eps
        floor = 0.1 * whole if name.startswith("grad") else 0.0  # a gradient of zero errs as much as the others
        allowed = (eps + rounding) * max(wish.norm(), floor) + 4 * (other.double() - wish).norm()
        error = (result.double() - wish).norm()
        assert error <= allowed, (name, error, allowed, wish.norm())


def check_lot(T, Tq, n, m, r, d, query_pads=None, key_pads=None, *, expected=lot_twin, scale=None, **drawing):
    """The kernel with T updates, and Tq on the side of the queries, against ``expected`` in float64."""
    inputs = draw_lot(n, m, r, d, **drawing)
    masks, settings = (query_pads, key_pads), LotSettings(scale or d**-0.5, Tq, T)
    weights = torch.randn(2, inputs[0].size(1), n, inputs[2].size(-1)).to(inputs[0].dtype)
    doubles, floats = ([x.to(dtype) for x in inputs] for dtype in (torch.float64, torch.float32))
    results, exact, plain = (
        with_gradients(lambda *x, run=run: run(LotInputs(*x, *masks), settings), leaves, weights.to(leaves[0].dtype))
        for run, leaves in ((lot_kernels.lot, inputs), (expected, doubles), (naive_lot, floats))
    )
    q, k, pivots = doubles[0], doubles[1], doubles[3]
    scores = max((settings.scale * x @ pivots.transpose(-1, -2)).abs().max() for x in (q, k))
    dtypes = [inputs[2].dtype, *(x.dtype for x in inputs)]
    check(results, exact, plain, LOT_NAMES, scores=scores, updates=T + Tq, dtypes=dtypes)


@pytest.mark.parametrize(
    "arguments",
    [
        (5, 5, 5, 6, 6, 16, pads(5, (3, 5), (0, 0)), pads(6, (0, 0), (0, 2))),
        (2, 4, 4, 3, 3, 16),  # even and few updates
        (1, 1, 3, 4, 3, 16),
        (5, 5, 4, 4, 3, 16, pads(4, (0, 4), (0, 1)), pads(4, (0, 1), (0, 0))),  # a sentence of pads alone
        (4, 5, 4, 4, 3, 16, pads(4, (0, 0), (0, 1)), pads(4, (0, 1), (0, 4))),
    ],
)
def test_lot(arguments):
    check_lot(*arguments)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_lot_in_half_precision(dtype):
    check_lot(3, 5, 4, 3, 3, 16, pads(4, (3, 4), (0, 0)), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("Tq", [1, 2, 3, 4, 5, 6, 15])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 6, 15])
def test_lot_with_all_numbers_of_updates(T, Tq):
    check_lot(T, Tq, 5, 7, 6, 16, pads(5, (3, 5), (0, 0)), pads(7, (0, 0), (0, 2)), heads=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(("d", "dv"), [(16, 16), (20, 24), (24, 16), (32, 64), (64, 64), (128, 128)])
def test_lot_of_all_widths(d, dv, dtype):
    check_lot(5, 4, 6, 5, 7, d, pads(6, (5, 6), (0, 0)), dv=dv, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("r", [1, 2, 15, 16, 17, 32, 50, 64])
def test_lot_with_all_numbers_of_pivots(r):
    check_lot(5, 5, 5, 4, r, 16, None, pads(4, (0, 1), (0, 0)), heads=2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 9), (9, 1), (17, 33), (33, 16)])
def test_lot_of_all_lengths(n, m, dtype):
    check_lot(5, 5, n, m, 6, 16, pads(n, (n // 2, n // 2), (0, n // 3)), pads(m, (m // 2 + 1, m), (0, 0)), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e3, 1e4])
@pytest.mark.parametrize(("T", "Tq"), [(5, 5), (4, 1), (15, 15)])
def test_lot_with_extreme_scores(T, Tq, size):
    check_lot(T, Tq, 6, 7, 5, 16, pads(6, (4, 6), (0, 0)), pads(7, (0, 0), (0, 3)), size=size)


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_rows_of_lot_sum_to_one_however_large_the_scores(size):
    q, k, v, *held = draw_lot(6, 7, 5, 16, size=size)
    values = lot_kernels.lot(LotInputs(q, k, torch.ones_like(v), *held), LotSettings(0.25, 5, 4))
    # sums of at most 7 products, each with a few roundings
    assert (values - 1).abs().max() <= 32 * torch.finfo(torch.float32).eps


def check_split(T, Tq, n, m, parts, monkeypatch, **drawing):
    """``check_lot`` with queries and keys split into ``parts``; up to four parts are merged at once."""
    for module in (tiles, lot_kernels):
        monkeypatch.setattr(module, "PARTS", tl.constexpr(4))
    found = lot_kernels.split(2, n, m, torch.device("cpu"))
    assert (found.query_parts, found.key_parts) == parts
    # a part without a real token, on either side, and a sentence of pads alone
    query_pads, key_pads = pads(n, (n - n // 3, n), (0, n)), pads(m, (0, m // 2), (m - m // 4, m))
    check_lot(T, Tq, n, m, 6, 16, query_pads, key_pads, expected=naive_lot, **drawing)


@pytest.mark.parametrize(("T", "Tq"), [(5, 5), (2, 1)])
def test_lot_with_tokens_split_among_programs(T, Tq, monkeypatch):
    split_from(monkeypatch, 16)
    check_split(T, Tq, 37, 83, (3, 6), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("T", "Tq"), [(1, 1), (2, 3), (5, 5), (6, 4), (1, 6)])
@pytest.mark.parametrize(
    ("n", "m", "parts"), [(150, 200, (10, 13)), (33, 31, (3, 1)), (15, 32, (1, 2)), (32, 32, (2, 2))], ids=str
)
def test_lot_with_all_numbers_of_parts(n, m, parts, T, Tq, monkeypatch):
    split_from(monkeypatch, 16)
    check_split(T, Tq, n, m, parts, monkeypatch, dtype=torch.float16 if T == 6 else torch.float32)


def test_a_second_backward_pass_of_split_tokens_equals_the_first(monkeypatch):
    """The counters of finished parts are never reset: every launch adds to them."""
    split_from(monkeypatch, 16)
    leaves = [x.requires_grad_() for x in draw_lot(40, 40, 3, 16)]
    values = lot_kernels.lot(LotInputs(*leaves), LotSettings(0.25, 3, 3))
    weights = torch.randn(values.shape)
    first, second = (torch.autograd.grad(values, leaves, weights, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_lot_reads_no_pads():
    query_pads, key_pads = pads(5, (3, 5), (0, 1)), pads(4, (0, 1), (3, 4))
    inputs = draw_lot(5, 4, 3, 16)
    clean, dirty = (
        [x.masked_fill(mask[:, None, :, None], value) for x, mask in zip(inputs, masks, strict=False)] + inputs[3:]
        for value, masks in ((value, (query_pads, key_pads, key_pads)) for value in (0.0, torch.nan))
    )
    weights = torch.randn(2, 1, 5, 16)
    first, second = (
        with_gradients(lambda *x: lot_kernels.lot(LotInputs(*x, query_pads, key_pads), SETTINGS), inputs, weights)
        for inputs in (clean, dirty)
    )
    assert all(map(torch.equal, first, second))


@triton.jit
def _mask_of(OUT, seed, dropout, g, n, R: tl.constexpr, N: tl.constexpr):
    i, t = tl.arange(0, N), tl.arange(0, R)
    kept = lot_kernels._kept(seed, dropout, g, n, i, t, R)
    tl.store(OUT + i[:, None] * R + t[None, :], kept, mask=(i < n)[:, None])


@pytest.mark.parametrize("Tq", [1, 4])
def test_dropout_acts_on_the_plan_of_the_queries_and_is_the_same_in_the_gradient(Tq):
    n, r, dropout = 6, 5, 0.3
    inputs, weights = draw_lot(n, 4, r, 16), torch.randn(2, 1, n, 16)
    settings = LotSettings(0.25, Tq, 3, dropout)
    torch.manual_seed(3)
    results = with_gradients(lambda *x: lot_kernels.lot(LotInputs(*x), settings), inputs, weights)
    torch.manual_seed(3)
    seed, kept = int(torch.randint(2**31 - 1, ())), torch.zeros(2, 1, n, 16)
    for sentence in range(2):
        _mask_of[(1,)](kept[sentence], seed, dropout, sentence, n, R=16, N=8)

    def dropped(q, k, v, pivots, log_masses):
        query_scores, key_scores = (0.25 * x @ pivots.transpose(-1, -2) for x in (q, k))
        none = torch.zeros(1, dtype=q.dtype)
        first = log_domain_sinkhorn(query_scores, none.expand(n), log_masses, num_updates=Tq)
        second = log_domain_sinkhorn(key_scores.transpose(-1, -2), log_masses, none.expand(4), num_updates=3)
        return (first * kept[..., :r].to(q.dtype)) @ (second @ v)

    exact = with_gradients(dropped, [x.double() for x in inputs], weights.double())
    plain = with_gradients(dropped, inputs, weights)
    check(results, exact, plain, LOT_NAMES, scores=5.0, updates=Tq + 3, dtypes=[torch.float32] * 6)


def test_dropout_keeps_the_given_share():
    kept = torch.zeros(2, 1024, 32)
    for sentence in range(2):
        _mask_of[(1,)](kept[sentence], 7, 0.3, sentence, 1024, R=32, N=1024)
    assert sorted(kept.unique().tolist()) == pytest.approx([0.0, 1 / 0.7])
    share = (kept > 0).double().mean(-1).mean(-1)
    # four standard deviations of the mean of 2 ** 15 draws
    assert (share - 0.7).abs().max() <= 4 * (0.3 * 0.7 / 2**15) ** 0.5
    assert not torch.equal(kept[0], kept[1])


class Sizes(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that an operation returned."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if torch.is_tensor(result):
            self.largest = max(self.largest, result.numel() * result.element_size())
        return result


def test_lot_takes_two_launches_each_way_and_writes_no_matrix_of_tokens_and_pivots(monkeypatch):
    names = ["key_forward", "query_forward", "query_backward", "key_backward"]
    for name in names:
        monkeypatch.setattr(lot_kernels, name, Counted(getattr(lot_kernels, name)))
    inputs = [x.requires_grad_() for x in draw_lot(40, 40, 32, 16)]
    with Sizes() as sizes:
        values = lot_kernels.lot(LotInputs(*inputs), LotSettings(0.25, 5, 5))
        values.sum().backward()
    assert [getattr(lot_kernels, name).launches for name in names] == [1, 1, 1, 1]
    assert 0 < sizes.largest < 2 * 40 * 32 * torch.float32.itemsize


def launches_of(monkeypatch, module):
    """A list to which every launch of a kernel of the module adds the kernel's name."""
    launched, original = [], launch.start

    def start(kernel, *arguments):
        launched.append(kernel.__name__)
        original(kernel, *arguments)

    for place in (launch, module):
        monkeypatch.setattr(place, "start", start)
    return launched


def test_lot_with_tokens_split_takes_a_launch_for_each_pass(monkeypatch):
    """Forward, passes of both sides share a launch, and one more launch merges the values at the pivots."""
    split_from(monkeypatch, 16)
    launched = launches_of(monkeypatch, lot_kernels)
    values = lot_kernels.lot(LotInputs(*(x.requires_grad_() for x in draw_lot(33, 33, 3, 16))), LotSettings(0.25, 5, 5))
    assert launched == ["pass_of_both"] * 2 + ["key_forward", "merge_values", "query_forward"]
    launched.clear()
    values.sum().backward()
    assert launched == ["query_backward"] * 3 + ["key_backward"] * 3


@pytest.mark.parametrize(
    ("n", "width", "number", "dtype"),
    [
        (9, 16, 3, torch.float32),
        (70, 40, 5, torch.float16),  # two blocks, wide values whose halves share their weights
        pytest.param(1, 16, 1, torch.float32, marks=pytest.mark.slow),
        pytest.param(150, 128, 3, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(7, 24, 31, torch.float32, marks=pytest.mark.slow),  # more neighbours than tokens
    ],
    ids=str,
)
def test_convolution(n, width, number, dtype, monkeypatch):
    monkeypatch.setattr(convolution_kernels, "ENTRIES", 64 * launch.padded(width))
    launched = launches_of(monkeypatch, convolution_kernels)
    v = draw_lot(1, n, 1, width, heads=2)[2].to(dtype)
    weight = torch.randn(2, width // 2 if number == 5 else width, number).to(dtype)
    weights = torch.randn(2, 2, n, width)
    results, exact = (
        with_gradients(run, leaves, weights)
        for run, leaves in (
            (convolution_kernels.convolution, [v, weight]),
            (naive.convolution, [v.double(), weight.double()]),
        )
    )
    assert launched == ["convolve", "convolve_backward"] and results[0].dtype == torch.float32
    eps = torch.finfo(torch.float32).eps * (number + n * 2)  # once for each term of a sum
    for result, wish, rounding in zip(results, exact, (0.0, *[torch.finfo(dtype).eps] * 2), strict=True):
        assert (result.double() - wish).norm() <= (eps + rounding) * wish.norm()


def test_the_convolutions_twin_is_the_plain_loop():
    v, weight = torch.randn(2, 3, 7, 8).double(), torch.randn(3, 4, 3).double()
    values = naive.convolution(v, weight)
    for sentence in range(2):
        for head in range(3):
            halves = [reference.convolution(half, weight[head]) for half in v[sentence, head].split(4, -1)]
            close(values[sentence, head], torch.cat(halves, -1))


def check_sinkhorn(T, n, m, *, row_pads=None, size=1.0, transposed=False):
    """The solver with T updates, against the plain loops, or with pads against plain torch, in float64."""
    scores = size * torch.randn(2, 2, n, m)
    if transposed:
        scores = scores.transpose(-1, -2).contiguous().transpose(-1, -2)
    log_a = torch.zeros(2, 1, n) if row_pads is None else torch.zeros(2, n).masked_fill(row_pads, -torch.inf)[:, None]
    inputs = [scores, log_a.log_softmax(-1), torch.randn(2, m).log_softmax(-1)]
    weights = torch.randn(2, 2, n, m)
    run = sinkhorn_kernels.fused_sinkhorn
    results = with_gradients(lambda *x: run(*x, num_updates=T), inputs, weights)
    assert results[0].stride() == scores.stride()

    def plain(scores, log_a, log_b):
        rows = []
        for sentence in range(2):
            for head in range(2):
                marginals = log_a[sentence, 0].exp(), log_b[head].exp()
                plan = reference.entropic_plan(scores[sentence, head], *marginals, T)
                rows.append(plan / plan.sum(-1, keepdim=True))
        return torch.stack(rows).view(scores.shape)

    # the loops take no rows without mass; with pads the kernel is compared with plain torch
    expected = plain if row_pads is None else lambda *x: log_domain_sinkhorn(*x, num_updates=T)
    exact = with_gradients(expected, [x.double() for x in inputs], weights.double())
    float32 = with_gradients(lambda *x: log_domain_sinkhorn(*x, num_updates=T), inputs, weights)
    check(results, exact, float32, SINKHORN_NAMES, scores=scores.abs().max(), updates=T, dtypes=[torch.float32] * 4)


@pytest.mark.parametrize(("n", "m"), [(6, 3), (3, 6)])
@pytest.mark.parametrize("T", [2, 5])
def test_solver(T, n, m):
    check_sinkhorn(T, n, m)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "m"), [(20, 7), (7, 20), (12, 12), (1, 5), (5, 1), (40, 33), (33, 40)])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 6, 15])
def test_solver_with_pads(T, n, m):
    check_sinkhorn(T, n, m, row_pads=pads(n, (n - n // 3, n), (0, n // 4)), transposed=T % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [30.0, 1e3])
@pytest.mark.parametrize(("n", "m"), [(9, 8), (8, 9)])
def test_solver_with_extreme_scores(n, m, size):
    check_sinkhorn(5, n, m, size=size)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "m"), [(150, 20), (20, 150)])
@pytest.mark.parametrize("T", [1, 2, 5, 6])
def test_solver_with_tokens_split(T, n, m, monkeypatch):
    split_from(monkeypatch, 64)
    assert launch.solver_parts(4, 150, 16, torch.device("cpu")) == (3, 64)
    check_sinkhorn(T, n, m, row_pads=pads(n, (n - n // 3, n), (0, 0)))


ATTENTION_NAMES = ["values", "grad_q", "grad_k", "grad_v", "grad_factors"]


def attention_inputs(n, m, d, *, dv=None, heads=2, dtype=torch.float32, size=1.0, learnt=False):
    q, k, v, *_ = draw_lot(n, m, 1, d, dv=dv, heads=heads, dtype=dtype, size=size)
    return [q, k, v, *([torch.rand(heads) + 0.5] if learnt else [])]


def check_attention(T, n, m, d, query_pads=None, key_pads=None, *, prior=False, scale=None, expected=None, **drawing):
    """The kernel against plain torch in float64; ``test_the_attentions_twin_is_the_plain_loop`` checks the latter."""
    inputs = attention_inputs(n, m, d, **drawing)
    settings, heads = naive.SinkhornSettings(scale or d**-0.5, T), inputs[0].size(1)

    def attend(function, dtype):
        slopes = 2.0 ** -torch.arange(1, heads + 1).to(dtype) if prior else None
        where = torch.arange(m)[None] + torch.tensor([[0], [3]])[: 1 + (key_pads is not None)] if prior else None

        def run(q, k, v, factors=None):
            return function(naive.SinkhornInputs(q, k, v, factors, slopes, where, query_pads, key_pads), settings)

        return run

    weights = torch.randn(2, heads, n, inputs[2].size(-1)).to(inputs[0].dtype)
    doubles, floats = ([x.to(dtype) for x in inputs] for dtype in (torch.float64, torch.float32))
    results = with_gradients(attend(attention_kernels.sinkhorn_attention, torch.float32), inputs, weights)
    exact = with_gradients(attend(naive.sinkhorn_attention, torch.float64), doubles, weights.double())
    plain = with_gradients(attend(naive.sinkhorn_attention, torch.float32), floats, weights.float())
    scores = (settings.scale * doubles[0] @ doubles[1].transpose(-1, -2)).abs().max() * 1.5
    dtypes = [inputs[2].dtype, *(x.dtype for x in inputs)]
    check(results, exact, plain, ATTENTION_NAMES[: len(results)], scores=scores, updates=T, dtypes=dtypes)


def small_blocks(monkeypatch):
    """Take the path of long sentences from 17 tokens on, in blocks of 16."""
    monkeypatch.setattr(attention_kernels, "LONGEST_ON_CHIP", 16)
    monkeypatch.setattr(attention_kernels, "BLOCK", 16)


EASY = {"prior": True, "learnt": True}


@pytest.mark.parametrize("T", [2, 5])
def test_short_attention(T):
    check_attention(T, 5, 7, 16, pads(5, (3, 5), (0, 0)), pads(7, (0, 0), (0, 2)), **EASY)


@pytest.mark.parametrize("T", [2, 5])
def test_long_attention(T, monkeypatch):
    small_blocks(monkeypatch)
    check_attention(T, 18, 20, 16, pads(18, (15, 18), (0, 0)), pads(20, (0, 0), (0, 2)), heads=1, **EASY)


def test_the_attentions_twin_is_the_plain_loop():
    q, k, v = (x.double() for x in attention_inputs(4, 5, 16))
    values = naive.sinkhorn_attention(naive.SinkhornInputs(q, k, v), naive.SinkhornSettings(2.0 * 16**-0.5, 4))
    plan = reference.sinkhorn_plan(q[0, 1], k[0, 1], epsilon=0.5, num_updates=4)
    assert torch.allclose(values[0, 1], 4 * plan @ v[0, 1], rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [{}, {"prior": True}, {"learnt": True}, {"dtype": torch.float16}, {"size": 30.0}], ids=str
)
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("T", [2, 3, 4, 15])
def test_attention_in_all_its_forms(T, long, flags, monkeypatch):
    if long:
        small_blocks(monkeypatch)
    n, m = (18, 33) if long else (9, 17)
    masks = pads(n, (n - 2, n), (0, 1)), pads(m, (0, 0), (m - 3, m))
    check_attention(T, n, m, 20, *masks, heads=1, dv=24, **flags)
    if not flags.get("prior"):
        check_attention(T, m, n, 16, *(mask.flip(0) for mask in masks[::-1]), heads=1, **flags)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 40), (40, 1), (128, 100), (129, 64)])
def test_attention_of_any_length(n, m):
    check_attention(3, n, m, 16, heads=1)


@pytest.mark.parametrize("long", [False, True])
def test_attention_starts_few_kernels_and_writes_no_square_matrix(long, monkeypatch):
    if long:
        small_blocks(monkeypatch)
    calls = []
    original = attention_kernels.start

    def start(kernel, *arguments):
        calls.append(kernel)
        original(kernel, *arguments)

    monkeypatch.setattr(attention_kernels, "start", start)
    inputs = [x.requires_grad_() for x in attention_inputs(40, 40, 16)]
    if not long:
        inputs = [x.detach()[:, :, :16].requires_grad_() for x in inputs]
    with Sizes() as sizes:
        values = attention_kernels.sinkhorn_attention(naive.SinkhornInputs(*inputs), naive.SinkhornSettings(0.25, 4))
        forward = len(calls)
        values.sum().backward()
    assert (forward, len(calls) - forward) == ((4, 5) if long else (1, 1))
    if long:
        assert 0 < sizes.largest < 2 * 2 * 40 * 40 * torch.float32.itemsize


def test_attention_reads_no_pads_and_sentences_of_pads_alone_are_zero():
    query_pads, key_pads = pads(5, (3, 5), (0, 1)), pads(4, (0, 1), (0, 4))
    inputs, weights = attention_inputs(5, 4, 16), torch.randn(2, 2, 5, 16)
    found = []
    for value in (0.0, torch.nan):
        masks = query_pads, key_pads, key_pads
        dirty = [x.masked_fill(mask[:, None, :, None], value) for x, mask in zip(inputs, masks, strict=True)]
        rest = None, None, None, query_pads, key_pads

        def run(*x, rest=rest):
            return attention_kernels.sinkhorn_attention(
                naive.SinkhornInputs(*x, *rest), naive.SinkhornSettings(0.25, 5)
            )

        found.append(with_gradients(run, dirty, weights))
    assert all(map(torch.equal, *found))
    assert all((x[1] == 0).all() for x in found[0])


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("held", [(16, 32), None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sound_attention_passes_its_self_test(dtype, held, dropout):
    settings = naive.SinkhornSettings(1.0, 4, dropout)
    assert choice._attention_error(torch.device("cpu"), [dtype] * 3, held, 16, 16, (True, True), settings) <= 1


def test_a_broken_attention_is_replaced_after_one_warning(untested, monkeypatch):
    monkeypatch.setattr(attention_kernels, "_shares", _without_the_potential)
    monkeypatch.setenv(choice.VARIABLE, "auto")
    inputs = naive.SinkhornInputs(*attention_inputs(5, 5, 16))
    with pytest.warns(UserWarning, match="plain torch instead of the sinkhorn attention kernel on cpu") as warned:
        assert choice.sinkhorn_attention(inputs, naive.SinkhornSettings(0.25, 3)) is None
    assert len(warned) == 1


@triton.jit
def _without_the_potential(s, potential, top, log_total, AXIS: tl.constexpr):
    y = s + 0.0 * tl.expand_dims(potential, 1 - AXIS)
    return tl.exp((y - tl.expand_dims(top, AXIS)) - tl.expand_dims(log_total, AXIS))


MECHANISMS = {
    "lot": {"num_pivots": 6},
    "lot-convolution": {"num_pivots": 6, "conv_kernel": 3},
    "lot-uncoupled": {"num_pivots": 6, "epsilon": 0.5, "query_updates": 1},
    "set": {"num_pivots": 6},
    "sinkhorn": {},
    "sinkhorn-learnable": {"learn_epsilon": True},
    "sinkhorn-alibi": {"prior": "alibi", "epsilon": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanisms_give_the_same_through_kernels(name, untested, monkeypatch):
    mechanism = build_mechanism(name.split("-")[0], num_heads=2, head_dim=4, **MECHANISMS[name])
    x, mask = torch.randn(2, 2, 5, 4), pads(5, (4, 5), (0, 5))
    results = []
    for mode in ("off", "on"):
        monkeypatch.setenv(choice.VARIABLE, mode)
        leaf = x.clone().requires_grad_()
        values = mechanism(leaf, leaf, leaf, mask, mask).values
        learnt = [leaf, *mechanism.parameters()]
        results.append([values, *torch.autograd.grad(values.square().sum(), learnt, allow_unused=True)])
    close(*results, 1e-5, relative=1e-4)
    kinds = {key[0] for key, failure in choice._tested.items() if failure is None}
    expected = {{"set": "sinkhorn", "sinkhorn": "sinkhorn attention"}.get(name.partition("-")[0], "lot")}
    assert kinds == expected | ({"convolution"} if "conv_kernel" in MECHANISMS[name] else set())


@triton.jit
def _without_log_masses(log_masses, top, log_total, number):
    return tl.where(number < 0, 0.0, -(top + log_total))


@triton.jit
def _without_the_tokens_part(shares, grad_f):
    return shares * 0.0


class _Raises:
    arg_names, __name__ = lot_kernels.key_forward.arg_names, "key_forward"

    def __getitem__(self, grid):
        raise RuntimeError("no such instruction\nand more")


BROKEN = {
    "values": ("pivot_potential", _without_log_masses),
    "gradient": ("undo_tokens", _without_the_tokens_part),
    "exception": ("key_forward", _Raises()),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_replaced_after_one_warning(fault, untested, monkeypatch):
    name, broken = BROKEN[fault]
    for module in (lot_kernels, tiles):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, broken)
    inputs = draw_lot(5, 5, 3, 16)
    monkeypatch.setenv(choice.VARIABLE, "auto")
    with pytest.warns(UserWarning, match="plain torch instead of the lot kernel on cpu") as warned:
        assert choice.lot(LotInputs(*inputs), SETTINGS) is None
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice.lot(LotInputs(*inputs), SETTINGS) is None
    monkeypatch.setenv(choice.VARIABLE, "on")
    with pytest.raises(InputError, match="^FAIRSEQ_LOT_KERNELS=on, but the lot kernel cannot be used: .*$"):
        choice.lot(LotInputs(*inputs), SETTINGS)


def test_a_broken_solver_is_replaced_after_one_warning(untested, monkeypatch):
    for module in (sinkhorn_kernels, tiles):
        monkeypatch.setattr(module, "pivot_potential", _without_log_masses)
    log_a, log_b = torch.zeros(5).log_softmax(-1), torch.randn(4).log_softmax(-1)
    with pytest.warns(UserWarning, match="plain torch instead of the sinkhorn kernel"):
        assert choice.try_fused_sinkhorn(torch.randn(2, 2, 5, 4), log_a, log_b, num_updates=5) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_sound_kernel_passes_its_self_test(dtype, dropout):
    settings = LotSettings(1.0, 2, 3, dropout)
    assert choice._lot_error(torch.device("cpu"), [dtype] * 4, 3, 16, 16, settings) <= 1


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ((4, 4, 65, 16), "r is 65, more than 64"),
        ((4, 4, 3, 129), "head_dim is 129, more than 128"),
        ((4, 4, 64, 128), "r = 64 pivots of width 128 are too many for one program"),
    ],
)
def test_sizes_beyond_the_kernels_are_named(inputs, reason, monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "on")
    with pytest.raises(InputError, match=f"cannot be used: {reason}; set it to auto or off$"):
        choice.lot(LotInputs(*draw_lot(*inputs)), SETTINGS)
    monkeypatch.setenv(choice.VARIABLE, "auto")
    assert choice.lot(LotInputs(*draw_lot(*inputs)), SETTINGS) is None


def test_float64_has_no_kernel(monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "on")
    inputs = [x.double() for x in draw_lot(4, 4, 3, 16)]
    with pytest.raises(InputError, match="there is none for float64"):
        choice.lot(LotInputs(*inputs), SETTINGS)
