"""Claims on near_far in docs/mechanisms.md and docs/internals.md, beyond the contract of all mechanisms."""

import copy
import math
from functools import partial

import pytest
import torch

from fairseq_lot.attention import near_far as near_far_file
from fairseq_lot.attention.base import Masks
from fairseq_lot.attention.softmax import Softmax
from fairseq_lot.transport.features import feature_logs
from tests.conftest import Sizes, close, gradients, random
from tests.reference import alibi_slopes, near_far_plan
from tests.variants import build, padding_mask

FORMS = {
    "diagonal": ({}, {}),
    "updates-3": ({"num_updates": 3}, {}),
    "expected": ({"band": "expected"}, {}),
    "causal": ({}, {"causal": True}),
    "alibi": ({"prior": "alibi"}, {}),
    "causal-alibi": ({"prior": "alibi"}, {"causal": True}),
    "tangents": ({"tangents": True}, {}),
    "tangents-updates-3": ({"tangents": True, "num_updates": 3}, {}),
    "tangents-expected": ({"tangents": True, "band": "expected"}, {}),
    "tangents-alibi": ({"tangents": True, "prior": "alibi"}, {}),
}
every_form = pytest.mark.parametrize(("options", "how"), FORMS.values(), ids=FORMS)


build_near_far = partial(build, "near_far", head_dim=8)


def inputs(n, m=None, *, head_dim=8, size=1.0):
    """q, k and v of two sentences; the norms of q and k are about ``size √head_dim``."""
    lengths = (n, m or n, m or n)
    q, k, v = (random(2, 2, length, head_dim, seed=seed) for seed, length in enumerate(lengths))
    return size * q, size * k, v


def both_logs(mechanism, q, k):
    """``log φ`` and ``log ψ``, ``(bsz, heads, len, r)``."""
    query_logs, key_logs = (feature_logs(x, mechanism.features, scale=mechanism.scaling) for x in (q, k))
    return query_logs + mechanism.feature_bias[:, None], key_logs


def log_kernel(mechanism, q, k):
    """``log φ_t(q_i) ψ_t(k_j)``, ``(bsz, heads, n, m, r)``."""
    query_logs, key_logs = both_logs(mechanism, q, k)
    return query_logs.unsqueeze(3) + key_logs.unsqueeze(2)


@pytest.mark.parametrize("form", ["expected", "tangents-expected"])
@torch.no_grad()
def test_rounding_moves_no_band_around_the_expected_position(form):
    """Float32 has float64's bands at 5,000 tokens: in one pass, padded in a batch, and query by query."""
    n, early = 5000, 3
    q, k, v = (random(1, 2, n, 64, seed=seed).float() for seed in range(3))
    mechanism = build_near_far(head_dim=64, **FORMS[form][0]).float()
    exact = copy.deepcopy(mechanism).double()(q.double(), k.double(), v.double()).values
    close(mechanism(q, k, v).values.double(), exact, 1e-4)
    padded = [torch.nn.functional.pad(x, (0, 0, early, 0)).expand(2, -1, -1, -1) for x in (q, k, v)]
    pads = (torch.arange(n + early) < early).expand(2, -1)
    close(mechanism(*padded, pads, pads).values[1:, :, early:].double(), exact, 1e-4)
    summary = mechanism.summarise(k, v)
    for i in range(0, n, 100):
        step = mechanism.attend_summary(q[:, :, i : i + 1], summary).values
        close(step.double(), exact[:, :, i : i + 1], 1e-4)


def test_features_as_drawn_are_unbiased():
    """Divided by ``exp(s·q·k)``, an entry is a mean of r terms of mean 1 and variance ``exp(s‖q + k‖²) - 1``: 1 ± σ.

    The mean of 1e5 terms is nearly normal, so an unbiased entry is beyond 6σ in one of 5e8 draws; Chebyshev's bound is
    one of 36. The median of σ is below half a percent, so a wrong factor of φ or ψ shows.
    """
    r, mechanism = 100_000, build_near_far(head_dim=4, num_features=100_000)
    q, k, _ = inputs(5, head_dim=4, size=0.5)
    estimate = (torch.logsumexp(log_kernel(mechanism, q, k), -1) - mechanism.scaling * q @ k.mT).exp()
    sums = (q.unsqueeze(3) + k.unsqueeze(2)).square().sum(-1)
    sigma = ((mechanism.scaling * sums).expm1() / r).sqrt()
    assert sigma.median() < 5e-3
    assert ((estimate - 1) / sigma).abs().max() < 6


def test_a_feature_exceeds_the_kernel_by_no_more_than_its_own_size():
    """``φ_t ψ_t ≤ exp(c_t + s‖z_t‖²/2) exp(s·q·k) / r``, with equality where q + k = z_t."""
    mechanism = build_near_far(num_features=6)
    with torch.no_grad():
        mechanism.feature_bias += random(2, 6)
    q, _, _ = inputs(20)
    z = mechanism.features
    k = torch.cat([random(2, 2, 20, 8, seed=7), (z - q[:, :, :1]).detach()], 2)
    excess = log_kernel(mechanism, q, k) - mechanism.scaling * (q @ k.mT).unsqueeze(-1)
    bound = mechanism.feature_bias + mechanism.scaling * z.square().sum(-1) / 2 - math.log(6)
    assert (excess <= bound[:, None, None] + 1e-9).all()
    for t in range(6):
        close(excess[:, :, 0, 20 + t, t], bound[:, t].expand(2, -1), 1e-9)


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_tangents_never_exceed_the_sum_over_keys_and_equal_it_at_the_features(size):
    mechanism, (q, k, _) = build_near_far(num_features=6, tangents=True), inputs(20, size=size)
    z = mechanism.features.detach()
    z.mul_(size)
    q = torch.cat([q, z.double().expand(2, -1, -1, -1)], 2)
    query_logs, key_logs = mechanism._side_logs(torch.cat([q, k], 2), (q, k), Masks(None, None, False))
    sums = torch.logsumexp(query_logs.unsqueeze(3) + key_logs.unsqueeze(2), 3) + math.log(6)
    true = torch.logsumexp(mechanism.scaling * q @ k.mT, -1, keepdim=True)
    close(sums[:, :, 20:].diagonal(dim1=2, dim2=3), true[:, :, 20:].squeeze(-1), 1e-9)
    assert (sums <= true + 1e-12 * true.abs()).all() and (sums < true).double().mean() > 0.5


@pytest.mark.parametrize("band", ["diagonal", "expected"])
def test_tangents_as_drawn_bound_the_error_at_every_norm(band):
    """On random tokens few features leave an error of up to 0.6. Without tangents it exceeds 1, the error of zeros."""
    errors = {}
    for size in (10, 100, 1000):
        q, k, v = inputs(60, head_dim=5, size=size)
        exact = build("softmax", head_dim=5)(q, k, v).values
        for tangents in (False, True):
            values = build_near_far(head_dim=5, window=4, band=band, tangents=tangents)(q, k, v).values
            errors[tangents, size] = ((values - exact).square().sum() / exact.square().sum()).item()
    assert all((error < 0.6) if tangents else (error > 1.2) for (tangents, _), error in errors.items()), errors


def test_the_causal_form_has_no_tangents():
    q, k, v = inputs(40)
    values = [build_near_far(window=2, tangents=tangents)(q, k, v, causal=True).values for tangents in (False, True)]
    close(*values, 0)


def test_a_checkpoint_without_the_option_has_no_tangents():
    assert not build_near_far().options.tangents
    mechanism, (q, k, _) = build_near_far(num_features=6, window=1), inputs(9)
    both = mechanism._side_logs(torch.cat([q, k], 2), (q, k), Masks(None, None, False))
    for found, x in zip(both, (q, k), strict=True):
        close(found, feature_logs(x, mechanism.features, scale=mechanism.scaling), 1e-12)


WIDE = [
    ({}, {}, "softmax", {}),
    ({"tangents": True}, {}, "softmax", {}),
    ({"tangents": True, "band": "expected"}, {}, "softmax", {}),
    ({"tangents": True, "num_updates": 3}, {}, "sinkhorn", {"epsilon": 1.0, "num_updates": 3}),
    ({}, {"causal": True}, "softmax", {}),
    ({"band": "expected"}, {}, "softmax", {}),
    ({"prior": "alibi"}, {}, "softmax", {"prior": "alibi"}),
    ({"prior": "alibi"}, {"causal": True}, "softmax", {"prior": "alibi"}),
    *[({"num_updates": n}, {}, "sinkhorn", {"epsilon": 1.0, "num_updates": n}) for n in (1, 2, 3, 4, 15)],
    *[
        ({"num_updates": n, "prior": "alibi"}, {}, "sinkhorn", {"epsilon": 1.0, "num_updates": n, "prior": "alibi"})
        for n in (1, 3)
    ],
]


@pytest.mark.parametrize(("options", "how", "name", "others"), WIDE)
@pytest.mark.parametrize("layout", [None, "right", "left"])
def test_a_window_over_the_sentence_gives_softmax_or_sinkhorn_at_epsilon_1(options, how, name, others, layout):
    mask = None if layout is None else padding_mask((9, 4), 9, layout)
    leaves = [x.requires_grad_() for x in inputs(9)]
    found = []
    for mechanism in (build_near_far(window=8, **options), build(name, head_dim=8, **others)):
        output = mechanism(*leaves, mask, mask, need_weights=True, **how)
        found.append([output.weights, output.values, *gradients(output.values, leaves)])
    close(*found, 1e-10)


@pytest.mark.parametrize(
    ("options", "how", "name", "others"),
    [case for case in WIDE if case[2] == "softmax" or case[0]["num_updates"] > 1],  # one update is softmax's
)
@pytest.mark.parametrize("layout", [None, "right", "left"])
def test_short_sentences_equal_softmax_or_sinkhorn_bit_for_bit(options, how, name, others, layout, monkeypatch):
    """They make the same calls and compute no feature."""
    monkeypatch.setattr(near_far_file, "feature_logs", None)
    monkeypatch.setattr(near_far_file, "near_far", None)
    mask = None if layout is None else padding_mask((9, 4), 9, layout)
    leaves, found = [x.requires_grad_() for x in inputs(9)], []
    for mechanism in (build_near_far(exact_up_to=9, window=1, **options), build(name, head_dim=8, **others)):
        for need_weights in (False, True):
            output = mechanism(*leaves, mask, mask, need_weights=need_weights, **how)
            found.append([output.values, *gradients(output.values, leaves)] + [output.weights] * need_weights)
    for ours, exact in zip([*found[0], *found[1]], [*found[2], *found[3]], strict=True):
        assert torch.equal(ours, exact)


EXACT_FORMS = {**FORMS, "updates-3-alibi": ({"num_updates": 3, "prior": "alibi"}, {})}
del EXACT_FORMS["causal"], EXACT_FORMS["causal-alibi"]


@pytest.mark.parametrize(("options", "how"), EXACT_FORMS.values(), ids=EXACT_FORMS)
@pytest.mark.parametrize("layout", ["right", "left"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_sentence_is_exact_or_linear_by_its_own_length_in_any_batch(options, how, layout, need_weights):
    """Sentences of at most ``exact_up_to`` tokens are exact, others linear, in any order and with NaN in the pads."""
    lengths, limit = torch.tensor([40, 12, 13, 1, 0, 25]), 12
    mask = padding_mask(lengths.tolist(), 40, layout)
    q, k, v = (random(6, 2, 40, 8, seed=seed) for seed in range(3))
    q, k, v = (x.masked_fill(mask[:, None, :, None], torch.nan).requires_grad_() for x in (q, k, v))
    both, linear, exact = (build_near_far(**options, exact_up_to=limit) for limit in (limit, 0, 40))
    learnt = list(both.parameters())
    output = both(q, k, v, mask, mask, need_weights)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    moved = both(*(x[order] for x in (q, k, v)), *[mask[order]] * 2, need_weights)
    close(moved.values, output.values[order], 1e-12)
    expected = []
    for sentence, length in enumerate(lengths.tolist()):
        form, real = exact if length <= limit else linear, ~mask[sentence]
        alone = form(*(x[sentence : sentence + 1, :, real] for x in (q, k, v)), need_weights=need_weights)
        expected.append(alone.values)
        close(output.values[sentence][:, real], alone.values[0], 1e-10)
        assert output.values[sentence][:, ~real].eq(0).all()
        if need_weights:
            close(output.weights[sentence][:, real][..., real], alone.weights[0], 1e-10)
            assert output.weights[sentence].sum().item() == pytest.approx(2 * length)
    loss = sum(x.square().sum() for x in expected)
    wanted = torch.autograd.grad(loss, [q, k, v, *linear.parameters()])
    found = torch.autograd.grad(output.values.square().sum(), [q, k, v, *learnt])
    close(found, wanted, 1e-8)


def test_short_sentences_are_cut_to_the_longest_of_them(monkeypatch):
    sizes, attend = [], Softmax.attend

    def spy(self, q, k, *others):
        sizes.append((len(q), q.size(2), k.size(2)))
        return attend(self, q, k, *others)

    monkeypatch.setattr(Softmax, "attend", spy)
    q, k, v = (random(4, 2, 30, 8, seed=seed) for seed in range(3))
    for layout in ("right", "left"):
        mask = padding_mask((30, 5, 9, 10), 30, layout)
        build_near_far(exact_up_to=9)(q, k, v, mask, mask)
        build_near_far(exact_up_to=9, band="expected")(q[:, :, :7], k, v, None, mask)
    assert sizes == 2 * [(2, 9, 9), (2, 7, 9)]


@pytest.mark.parametrize("options", [{}, {"prior": "alibi"}, {"num_features": 0}], ids=str)
@pytest.mark.parametrize("layout", [None, "right", "left"])
@pytest.mark.parametrize("early", [0, 3, 14])
@pytest.mark.parametrize("need_weights", [False, True])
def test_the_first_tokens_of_a_target_are_exact_and_the_later_ones_are_not(options, layout, early, need_weights):
    """Tokens count from the first real one. Decoding in steps of any size gives the same."""
    n, limit, lengths = 30, 12, (30, 14, 25)
    mask = None if layout is None else padding_mask(lengths, n, layout)
    q, k, v = (random(3, 2, n, 8, seed=seed) for seed in range(3))
    if mask is not None:
        q, k, v = (x.masked_fill(mask[:, None, :, None], torch.nan) for x in (q, k, v))
    both, linear, exact = (build_near_far(**options, window=2, exact_up_to=limit) for limit in (limit, 0, n))
    output = both(q[:, :, early:], k, v, None, mask, need_weights, causal=True)
    for sentence in range(3):
        real = torch.ones(n, dtype=torch.bool) if mask is None else ~mask[sentence]
        alone = [x[sentence : sentence + 1, :, real] for x in (q, k, v)]
        first, later = (form(*alone, need_weights=need_weights, causal=True) for form in (exact, linear))
        slots = real.nonzero().squeeze(1)
        for place, slot in enumerate(slots.tolist()):
            if slot >= early:
                expected = first if place < limit else later
                close(output.values[sentence, :, slot - early], expected.values[0, :, place], 1e-10)
                if need_weights:
                    row = output.weights[sentence, :, slot - early]
                    close(row[:, real], expected.weights[0, :, place], 1e-10)
    for sizes in ([1] * (n - early - 1), [4] * ((n - early - 1) // 4), [11]):
        state, start, stop = {}, 0, early + 1
        for size in [0, *sizes]:
            stop += size
            new, rows = slice(start, stop), slice(max(start, early), stop)
            pads = None if mask is None else mask[:, new]
            step, state = both.causal_step(q[:, :, rows], k[:, :, new], v[:, :, new], pads, state, need_weights)
            wanted = output.values[:, :, rows.start - early : stop - early]
            if mask is not None:
                hidden = mask[:, None, rows, None]
                wanted, step = (
                    wanted.masked_fill(hidden, 0.0),
                    step._replace(values=step.values.masked_fill(hidden, 0.0)),
                )
            close(step.values, wanted, 1e-10)
            start = stop


@pytest.mark.parametrize("layout", ["right", "left"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_the_summary_of_a_mixed_batch_serves_every_sentence(layout, need_weights):
    mechanism = build_near_far(band="expected", num_features=6, window=1, exact_up_to=9)
    mask = padding_mask((20, 4, 9, 10), 20, layout)
    q, k, v = (random(4, 2, n, 8, seed=n) for n in (6, 20, 21))
    k, v = (x[:, :, :20].masked_fill(mask[:, None, :, None], torch.nan) for x in (k, v))
    expected = mechanism(q, k, v, None, mask, need_weights)
    summary = mechanism.summarise(k, v, mask, need_weights)
    order = torch.tensor([3, 1, 1, 0, 2])
    for rows in (slice(None), order, torch.tensor([1, 2])):
        kept = {name: x[rows] for name, x in summary.items()}
        output = mechanism.attend_summary(q[rows], kept, need_weights)
        close(output.values, expected.values[rows], 1e-10)
        if need_weights:
            close(output.weights, expected.weights[rows], 1e-10)


def test_the_summary_of_a_short_source_is_softmaxs():
    _, k, v = inputs(9)
    ours, softmax = (
        x.summarise(k, v) for x in (build_near_far(band="expected", exact_up_to=9), build("softmax", head_dim=8))
    )
    assert ours.keys() == softmax.keys() and all(torch.equal(ours[name], softmax[name]) for name in ours)


@pytest.mark.parametrize("num_updates", [1, 3])
def test_short_sentences_have_the_dropout_of_softmax_or_sinkhorn(num_updates):
    mechanism = build_near_far(exact_up_to=9, dropout=0.5, num_updates=num_updates)
    twin = (
        build("softmax", head_dim=8, dropout=0.5)
        if num_updates == 1
        else build("sinkhorn", head_dim=8, dropout=0.5, epsilon=1, num_updates=3)
    )
    found = []
    for one in (mechanism, twin):
        torch.manual_seed(3)
        found.append(one.train()(*inputs(9), need_weights=True).values)
    assert torch.equal(*found)
    mechanism.eval(), twin.eval()
    assert torch.equal(mechanism(*inputs(9)).values, twin(*inputs(9)).values)


def test_at_cross_a_window_beyond_the_sentence_costs_no_more():
    widest, enough = (
        build_near_far(band="expected", window=window)(*inputs(9), need_weights=True) for window in (10**12, 8)
    )
    close(widest.weights, enough.weights, 0)


def test_pads_on_the_left_do_not_move_a_band_between_two_slots():
    """The expected position among four equal keys is halfway between two slots, with or without a pad before them."""
    q, k, v = inputs(4)
    k = k[:, :, :1].expand_as(k)
    mechanism = build_near_far(band="expected", window=0)
    alone = mechanism(q, k, v, need_weights=True).weights
    k, v = (torch.nn.functional.pad(x, (0, 0, 1, 0)) for x in (k, v))
    pads = torch.tensor([[True, *[False] * 4]] * len(q))
    close(mechanism(q, k, v, None, pads, need_weights=True).weights[..., 1:], alone, 1e-10)


def test_columns_approach_their_share_while_rows_are_exact():
    mask, errors = padding_mask((70, 40), 70, "right"), []
    for num_updates in (1, 3, 9, 81, 401):
        mechanism = build_near_far(num_features=6, window=2, num_updates=num_updates)
        weights = mechanism(*inputs(70), mask, mask, need_weights=True).weights
        close(weights.sum(-1), (~mask).double()[:, None].expand(-1, 2, -1), 1e-12)
        received = weights.sum(-2) - (~mask).double()[:, None]
        errors.append(received.abs().sum(-1).max().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1 and errors[-1] < 1e-9


@every_form
@pytest.mark.parametrize("n", [5, 150])
def test_norms_of_ten_thousand_are_finite(options, how, n):
    mechanism = build_near_far(**options).float()
    leaves = [x.float().requires_grad_() for x in inputs(n, size=1e4 / math.sqrt(8))]
    output = mechanism(*leaves, need_weights=True, **how)
    assert output.values.isfinite().all() and output.weights.isfinite().all()
    close(output.weights.sum(-1), torch.ones(2, 2, n), 1e-5)
    loss = output.values.square().sum() + output.weights.square().sum()
    found = torch.autograd.grad(loss, [*leaves, *mechanism.parameters()])
    assert all(gradient.isfinite().all() for gradient in found)


@every_form
@pytest.mark.parametrize("n", [40, 150])
def test_float32_is_float64_at_six_times_the_usual_norms(options, how, n):
    """An entry errs by ``2 L 2^-24`` at logs of size L: once for its score, once for the log sum of its row.

    Each of T updates adds as much. Values err by this times the largest entry of v.
    """
    exact = build_near_far(**options)
    q, k, v = inputs(n, size=6.0)
    logs = [exact.scaling * q @ k.mT, *both_logs(exact, q, k)]
    size = max(x.abs().max().item() for x in logs)
    assert size > 100
    output = exact(q, k, v, **how).values
    values = copy.deepcopy(exact).float()(q.float(), k.float(), v.float(), **how).values
    close(values.double(), output, (1 + exact.options.num_updates) * 2 * size * 2**-24 * v.abs().max().item())


def with_last_key_at_feature(size, n=100, **options):
    """A mechanism with one feature z, ``s‖z‖²/2 = size``, and q, k, v: all zeros in q and k but the last key, z.

    All scores are 0. ``log φψ`` is ``size`` for the last key and 0 for the others.
    """
    mechanism = build_near_far(num_features=1, window=2, **options)
    z = torch.full((8,), math.sqrt(2 * size / mechanism.scaling / 8), dtype=torch.float64)
    with torch.no_grad():
        mechanism.features.copy_(z)
    q, v = torch.zeros(1, 2, n, 8, dtype=torch.float64), random(1, 2, n, 8)
    k = torch.zeros_like(q)
    k[:, :, -1] = z
    return mechanism, q, k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [50, 100])
@pytest.mark.parametrize(("size", "kept"), [(55.0, True), (85.0, True), (110.0, False)])
def test_rows_with_the_key_at_the_feature_in_their_band_are_kept_or_empty(size, kept, n, dtype):
    """In the last three rows that key has its exact score; all other terms are e^-size of its features' product.

    These rows are right down to e^-85. Below e^-110 they are empty, in float64 as well.
    """
    mechanism, q, k, v = with_last_key_at_feature(size, n)
    weights = mechanism.to(dtype)(q.to(dtype), k.to(dtype), v.to(dtype), need_weights=True).weights
    last = torch.full((1, 2, 3, n), kept / n, dtype=dtype)
    close(weights[:, :, -3:], last, 1e-6)
    close(weights[:, :, :-3].sum(-1), torch.ones(1, 2, n - 3, dtype=dtype), 1e-6)


@pytest.mark.parametrize("n", [50, 100])
@pytest.mark.parametrize("size", [60.0, 69.0, 75.0, 85.0, 90.0, 95.0, 100.0, 105.0, 200.0, 2000.0])
def test_features_of_any_size_are_finite(size, n):
    mechanism, *leaves = with_last_key_at_feature(size, n)
    leaves = [x.float().requires_grad_() for x in leaves]
    values = mechanism.float()(*leaves).values
    found = torch.autograd.grad(100 * values.sum(), [*leaves, *mechanism.parameters()])
    assert values.isfinite().all() and all(gradient.isfinite().all() for gradient in found)


def test_the_causal_form_keeps_all_rows_for_features_of_any_size():
    """Its sums hold only keys before the window."""
    mechanism, q, k, v = with_last_key_at_feature(200.0)
    exact = mechanism(q, k, v, causal=True).values
    values = mechanism.float()(q.float(), k.float(), v.float(), causal=True).values
    close(values.double(), exact, 1e-5)


@pytest.mark.parametrize("size", [55.0, 85.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_with_a_prior_rows_far_from_a_dominant_key_are_right(size, dtype):
    """The last key has e^size times the product of the others; at the start the prior makes its share negligible."""
    n = 1800
    mechanism, q, k, v = with_last_key_at_feature(size, n, prior="alibi")
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    logs = torch.zeros(n, n, dtype=torch.float64)
    logs[:-3, -1] = size
    slopes = torch.tensor(alibi_slopes(2), dtype=torch.float64)
    expected = torch.softmax(logs - slopes[:, None, None] * distance, -1)
    assert expected[0, 0, -1] < 1e-10 < 1e-3 < expected[0, -100, -1]
    values = mechanism.to(dtype)(q.to(dtype), k.to(dtype), v.to(dtype)).values
    close(values[0].double(), expected @ v[0], 1e-5)


@pytest.mark.parametrize("options", [{}, {"prior": "alibi"}], ids=str)
@pytest.mark.parametrize("layout", [None, "right", "left"])
def test_both_algorithms_of_the_causal_form_agree(layout, options, monkeypatch):
    mechanism, leaves = build_near_far(window=3, num_features=6, **options), [x.requires_grad_() for x in inputs(120)]
    mask = None if layout is None else padding_mask((120, 70), 120, layout)
    found = []
    for limit in (torch.inf, -torch.inf):
        monkeypatch.setattr(near_far_file, "_LARGEST_GAP", limit)
        values = mechanism(*leaves, mask, mask, causal=True).values
        found.append([values, *gradients(values, [*leaves, *mechanism.parameters()])])
    close(*found, 1e-10)


@pytest.mark.parametrize(("head_dim", "of_query", "of_last"), [(64, 1.4, 0.3), (128, 0.5, 0.07), (128, 0.7, 0.07)])
@pytest.mark.parametrize("last", [False, True])
def test_a_large_feature_of_an_unseen_key_takes_no_precision_from_a_row(head_dim, of_query, of_last, last):
    """The first row sees its own key alone, so it is that key's value, however large the products of its features."""
    mechanism = build("near_far", num_heads=1, head_dim=head_dim, dtype=torch.float32)
    direction = max(mechanism.features[0].detach(), key=torch.linalg.vector_norm)
    q, k, v = torch.zeros(1, 1, 4, head_dim), torch.zeros(1, 1, 4, head_dim), random(1, 1, 4, head_dim).float()
    q[0, 0, 0], k[0, 0, :3], k[0, 0, 3] = of_query * direction, -0.24 * direction, of_last * direction * last
    close(mechanism(q, k, v, causal=True).values[0, 0, 0], v[0, 0, 0], 1e-5)


@pytest.mark.parametrize(("options", "slopes"), [({}, (0.0, 0.0)), ({"prior": "alibi"}, alibi_slopes(2))], ids=str)
@pytest.mark.parametrize("n", [5, 20])
@pytest.mark.parametrize("early", [0, 3])
def test_the_causal_form_agrees_with_the_slow_twin(n, early, options, slopes):
    mechanism = build_near_far(window=2, num_features=6, **options)
    leaves = [x.requires_grad_() for x in inputs(n, n + early)]
    output = mechanism(*leaves, need_weights=True, causal=True)
    q, k, v = (x[0] for x in leaves)
    heads = zip(q, k, mechanism.features, mechanism.feature_bias, slopes, strict=True)
    plan = torch.stack([n * near_far_plan(*head, window=2, causal=True, slope=slope) for *head, slope in heads])
    close(output.weights[0], plan, 1e-10)
    close(output.values[0], plan @ v, 1e-10)
    learnt = [*leaves, *mechanism.parameters()]
    close(gradients(output.values[0], learnt), gradients(plan @ v, learnt), 1e-10)


@pytest.mark.parametrize(
    ("options", "how", "limit"),
    [
        *((*form, torch.inf) for form in FORMS.values()),
        *((*FORMS[name], -torch.inf) for name in ("causal", "causal-alibi")),
    ],
    ids=[*FORMS, "causal-by-prefixes", "causal-alibi-by-prefixes"],
)
def test_memory_of_a_layer_is_linear_in_the_length(options, how, limit, monkeypatch):
    monkeypatch.setattr(near_far_file, "_LARGEST_GAP", limit)
    mechanism, largest, kept = build_near_far(window=4, num_features=6, **options).float(), [], []
    for n in (512, 1024, 2048):
        leaves, sizes = [x.float().requires_grad_() for x in inputs(n)], []
        with Sizes() as seen:
            with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: s.append(x.numel()) or x, lambda x: x):
                values = mechanism(*leaves, **how).values
            torch.autograd.grad(values.sum(), [*leaves, *mechanism.parameters()])
        largest.append(seen.largest / n)
        kept.append(sum(sizes) / n)
    assert max(largest) <= 1.1 * min(largest) and 0 < max(kept) <= 1.1 * min(kept), (largest, kept)


def test_at_cross_float32_keeps_the_digits_that_the_bands_share_leaves():
    """The band holds all but 1e-3 of the features' mass, so the far part loses three of float32's seven digits."""
    n, size = 20, 9.7
    mechanism, *leaves = with_last_key_at_feature(size, n, band="expected")
    left = (n - 3) / (n - 1 + math.exp(size))
    assert 0.9e-3 < left < 1.1e-3
    exact = mechanism(*leaves, need_weights=True).weights
    weights = mechanism.float()(*(x.float() for x in leaves), need_weights=True).weights
    assert exact.sum(-1).sub(1).abs().max() < 1e-9
    far = exact[..., : n - 3].sum(-1)
    close(weights.double(), exact, 4 * 2**-24 / left * far.max().item())


@pytest.mark.parametrize(("size", "kept"), [(3.0, True), (36.0, False)])
def test_at_cross_a_far_part_below_rounding_gets_no_weight(size, kept):
    """Where the band holds all of the features' mass up to rounding, A has its mass in the band alone."""
    n, (mechanism, q, k, v) = 20, with_last_key_at_feature(size, 20, band="expected")
    weights = mechanism(q, k, v, need_weights=True).weights
    held = mechanism.features[0], mechanism.feature_bias[0]
    plan = n * near_far_plan(q[0, 0], k[0, 0], *held, window=2, band="expected")
    centre = sum(j * math.exp(size if j == n - 1 else 0) for j in range(n)) / (n - 1 + math.exp(size))
    left = sum(1 for j in range(n) if abs(j - math.floor(centre + 0.501)) > 2) / (n - 1 + math.exp(size))
    assert (left > 100 * torch.finfo(torch.float64).eps) == kept
    band = torch.tensor([abs(j - math.floor(centre + 0.501)) <= 2 for j in range(n)])
    if kept:
        close(weights[0, 0], plan, 1e-10)
    else:
        close(weights[0, 0], (band / band.sum()).double().expand(n, -1), 1e-6)
        assert plan[:, ~band].min() > 0.04
