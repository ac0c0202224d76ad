"""The contract of all mechanisms in the registry, alone and inside the differential wrapper."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fairseq_lot.attention.registry import build_options
from fairseq_lot.modules.sites import unwrapped
from tests.conftest import close, gradients
from tests.twins import has_a_twin, twin
from tests.variants import CASES, CAUSAL_CASES, HEAD_DIM, NUM_HEADS, PLAIN_CASES, draw, padding_mask

QUERY_LENGTHS, KEY_LENGTHS = (5, 3, 1), (4, 6, 2)

every_case = pytest.mark.parametrize("case", CASES, ids=str)
# every case in cross-attention if it can; defaults in self-attention, too, and all of ESP, which has a path for n = m
KINDS = [(case, kind) for case in CASES for kind in case.kinds
         if kind == case.kinds[-1] or case.variant == "default" or case.name == "esp"]  # fmt: skip
every_case_and_kind = pytest.mark.parametrize(("case", "kind"), KINDS, ids=str)


def masks_of(kind, layout):
    """Query and key masks of a ragged batch; in self-attention they are one object."""
    if kind == "self":
        mask = padding_mask(QUERY_LENGTHS, 5, layout)
        return mask, mask
    if kind == "square":  # as in "cross", but padded to the same size
        return padding_mask(QUERY_LENGTHS, 5, layout), padding_mask((4, 3, 2), 5, layout)
    return padding_mask(QUERY_LENGTHS, 5, layout), padding_mask(KEY_LENGTHS, 6, layout)


def fill_pads(inputs, query_mask, key_mask, value):
    """q, k and v with ``value`` in the padded slots."""
    masks = (query_mask, key_mask, key_mask)
    return [x.masked_fill(mask[:, None, :, None], value) for x, mask in zip(inputs, masks, strict=True)]


def truncated(inputs, query_mask, key_mask, sentence):
    """One sentence of q, k and v without its pads."""
    masks = (query_mask, key_mask, key_mask)
    return [x[sentence : sentence + 1][:, :, ~mask[sentence]] for x, mask in zip(inputs, masks, strict=True)]


@pytest.mark.fast_if(lambda case, dtype, **_: dtype == torch.float16 or case.variant == "default")
@every_case
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=str
)
def test_shape_dtype_and_precision(case, dtype, tolerance):
    mechanism = case.build(dtype)
    query_mask, key_mask = masks_of(case.kinds[-1], "left")
    inputs = fill_pads(draw(src_len=key_mask.size(1), dtype=dtype), query_mask, key_mask, torch.nan)
    output = mechanism(*inputs, query_mask, key_mask, need_weights=True)
    assert output.values.shape == inputs[0].shape
    assert output.weights.shape == (3, NUM_HEADS // (2 if case.differential else 1), 5, key_mask.size(1))
    assert output.values.dtype == output.weights.dtype == dtype
    exact = copy.deepcopy(mechanism).double()(*(x.double() for x in inputs), query_mask, key_mask, need_weights=True)
    close(output.values.double(), exact.values, tolerance, relative=tolerance)
    close(output.weights.double(), exact.weights, tolerance, relative=tolerance)


@every_case
def test_autocast_does_not_lower_the_precision(case):
    mechanism = case.build(torch.float32)
    inputs = [x.requires_grad_() for x in draw(src_len=5, dtype=torch.float32)]
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            values = mechanism(*inputs).values
        found.append([values, *gradients(values, [*inputs, *mechanism.parameters()])])
    for plain, autocast in zip(*found, strict=True):
        assert torch.equal(plain, autocast)


@every_case
def test_a_reentrant_checkpoint_keeps_the_gradients(case):
    """A reentrant checkpoint silently drops the gradients of any output that is not a tuple of tensors."""
    mechanism = case.build()
    found = []
    for attend in (mechanism, partial(checkpoint, mechanism, use_reentrant=True)):
        inputs = [x.requires_grad_() for x in draw(src_len=5)]
        attend(*inputs)[0].square().sum().backward()
        found.append([x.grad for x in inputs])
    close(*found)


@every_case
def test_a_backward_pass_within_autocast_is_only_rounded(case):
    """Autocast takes torch's own products in half precision: they may be rounded, but must not overflow."""
    mechanism = case.build(torch.float32)
    inputs = [2 * x for x in draw(src_len=5, dtype=torch.float32)]
    leaves = [x.requires_grad_() for x in (*inputs, *mechanism.parameters())]
    with torch.autocast("cpu", torch.float16):
        values = mechanism(*inputs).values
        within = gradients(values, leaves)
    outside = gradients(mechanism(*inputs).values, leaves)
    ours, exact = (torch.cat([gradient.flatten() for gradient in some]) for some in (within, outside))
    assert (ours - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("case", [case for case in PLAIN_CASES if not case.flag("mixes_values")], ids=str)
def test_values_may_be_of_another_width(case):
    q, k, v = case.draw()
    wide = torch.cat([v, 2 * v[..., :1]], -1)
    values = case.build()(q, k, wide).values
    assert values.shape == (3, NUM_HEADS, 5, HEAD_DIM + 1)
    close(values[..., :HEAD_DIM], case.build()(q, k, v).values, 1e-12)


@pytest.mark.parametrize(("case", "kind"), [(case, kind) for case, kind in KINDS if case.rows_exact], ids=str)
def test_rows_sum_to_one(case, kind):
    query_mask, key_mask = masks_of(kind, "scattered")
    mechanism = case.build(torch.float32)
    inputs = draw(src_len=key_mask.size(1), dtype=torch.float32)
    plan = mechanism(*inputs, query_mask, key_mask, need_weights=True).weights
    total = 1 - mechanism.difference_weight() if case.differential else torch.tensor(1.0)
    expected = torch.where(query_mask, 0.0, total)[:, None].expand(-1, plan.size(1), -1)
    torch.testing.assert_close(plan.sum(-1), expected, atol=1e-6, rtol=0)
    assert plan.masked_select(key_mask[:, None, None, :]).eq(0).all()
    assert case.differential or plan.ge(0).all()


def column_error(plan, query_mask, key_mask):
    """Largest difference between the mass that a key receives and its share 1/m."""
    received = plan.sum(-2) / (~query_mask).sum(-1)[:, None, None]
    share = (~key_mask).double() / (~key_mask).sum(-1, keepdim=True)
    return (received - share[:, None]).abs().max().item()


@pytest.mark.parametrize("name, options", [("sinkhorn", {"epsilon": 0.5}), ("lot", {"num_pivots": 6, "epsilon": 0.5})])
def test_marginal_error_vanishes_with_updates(name, options):
    case = next(case for case in PLAIN_CASES if case.name == name)
    query_mask, key_mask = masks_of("cross", "scattered")
    errors = []
    for num_updates in (1, 5, 41, 641):
        mechanism = case.build(**options, num_updates=num_updates)
        weights = mechanism(*draw(), query_mask, key_mask, need_weights=True).weights
        errors.append(column_error(weights, query_mask, key_mask))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-9


@pytest.mark.parametrize("case", [case for case in PLAIN_CASES if case.options.get("hard")], ids=str)
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_hard_slicing_is_exact_on_both_sides(case, kind):
    query_mask, key_mask = masks_of(kind, "scattered")
    plan = case.build()(*draw(src_len=key_mask.size(1)), query_mask, key_mask, need_weights=True).weights
    close(plan.sum(-1), (~query_mask).double()[:, None].expand(-1, NUM_HEADS, -1), 1e-12)
    assert column_error(plan, query_mask, key_mask) < 1e-12


def padded_kinds(case):
    """The kinds of a case, and ``square`` if it can stand at cross."""
    return (*case.kinds, "square") if "cross" in case.kinds else case.kinds


@pytest.mark.fast_if(lambda case, kind, layout: layout == case.layouts[-1] or case.variant == "default")
@pytest.mark.parametrize(
    ("case", "kind", "layout"),
    [(case, kind, layout) for case in CASES for kind in padded_kinds(case) for layout in case.layouts],
    ids=str,
)
def test_padding_is_truncation(case, kind, layout):
    query_mask, key_mask = masks_of(kind, layout)
    mechanism = case.build()
    inputs = fill_pads(draw(src_len=key_mask.size(1)), query_mask, key_mask, torch.nan)
    inputs = [x.requires_grad_() for x in inputs]
    values = mechanism(*inputs, query_mask, key_mask).values
    assert values[query_mask[:, None].expand(-1, NUM_HEADS, -1)].eq(0).all()
    expected = torch.zeros_like(values)
    for sentence in range(3):
        alone = mechanism(*truncated(inputs, query_mask, key_mask, sentence)).values
        expected[sentence, :, ~query_mask[sentence]] = alone[0]
    close(values, expected, 1e-9)
    leaves = [*inputs, *mechanism.parameters()]
    actual = gradients(values, leaves)
    close(actual, gradients(expected, leaves), 1e-8)
    for gradient, mask in zip(actual, (query_mask, key_mask, key_mask), strict=False):
        assert gradient[mask[:, None].expand(-1, NUM_HEADS, -1)].eq(0).all()


@every_case
def test_a_batch_gives_what_its_sentences_give_alone(case):
    mechanism, inputs = case.build(), case.draw()
    together = mechanism(*inputs, need_weights=True)
    for sentence in range(3):
        alone = mechanism(*(x[sentence : sentence + 1] for x in inputs), need_weights=True)
        close(together.values[sentence], alone.values[0], 1e-10)
        close(together.weights[sentence], alone.weights[0], 1e-10)


def unordered(case, kind):
    """Whether the mechanism ignores the order of the tokens."""
    slots_matter = kind == "self" and case.flag("counts_slots")
    return not (case.flag("positional") or case.flag("mixes_values") or slots_matter)


@pytest.mark.parametrize(
    ("case", "kind"), [(case, kind) for case in CASES for kind in case.kinds if unordered(case, kind)], ids=str
)
def test_permuting_tokens_permutes_rows_and_columns(case, kind):
    """Self: one permutation. Cross: one of the queries and one of the keys; of the queries alone if slots count."""
    query_mask, key_mask = masks_of(kind, "scattered")
    q, k, v = draw(src_len=key_mask.size(1))
    rows = columns = torch.tensor([3, 0, 4, 2, 1])
    if kind == "cross":
        columns = torch.arange(6) if case.flag("counts_slots") else torch.tensor([4, 2, 5, 0, 1, 3])
        masks = query_mask[:, rows], key_mask[:, columns]
    else:
        masks = (query_mask[:, rows],) * 2
    mechanism = case.build()
    output = mechanism(q, k, v, query_mask, key_mask, need_weights=True)
    permuted = mechanism(q[:, :, rows], k[:, :, columns], v[:, :, columns], *masks, need_weights=True)
    close(permuted.values, output.values[:, :, rows], 1e-10)
    close(permuted.weights, output.weights[:, :, rows][..., columns], 1e-10)


@pytest.mark.parametrize(
    ("case", "causal"), [(case, False) for case in CASES] + [(case, True) for case in CAUSAL_CASES], ids=str
)
def test_gradcheck(case, causal):
    mechanism = case.build()
    if causal:
        inputs, query_mask = draw(1, 4, 4), torch.tensor([[True, False, False, True]])
        key_mask = query_mask
    else:
        inputs, query_mask = case.draw(1, 3, 4), None
        key_mask = torch.tensor([[False, True, False, False]])[:, : inputs[1].size(2)]
    inputs = [x.requires_grad_() for x in inputs]

    def values(q, k, v, *parameters):
        return mechanism(q, k, v, query_mask, key_mask, causal=causal).values

    assert torch.autograd.gradcheck(values, (*inputs, *mechanism.parameters()), fast_mode=True)


@pytest.mark.fast_if(lambda case: case.variant == "default")
@every_case
def test_second_derivatives_are_right_or_refused(case):
    mechanism, inputs = case.build(), [x.requires_grad_() for x in case.draw(1, 3, 4)]

    def first(*inputs):
        values = mechanism(*inputs).values
        weights = torch.linspace(-1, 1, values.numel(), dtype=values.dtype).view(values.shape)
        return torch.autograd.grad((values * weights).sum(), inputs, create_graph=True)

    try:
        assert torch.autograd.gradcheck(first, inputs, fast_mode=True)
    except RuntimeError as refused:  # by this package, or by torch for its own attention
        assert "no second derivatives" in str(refused) or "is not implemented" in str(refused)


def at_decoder(case):
    """The options that the mechanism takes at a decoder site."""
    return dataclasses.asdict(build_options(case.name, **case.options).at_site("decoder"))


CAUSAL_AT_DECODER = [case for case in CASES if case.build(**at_decoder(case)).traits.is_causal]


@pytest.mark.parametrize(
    ("case", "causal"), [(case, False) for case in CASES] + [(case, True) for case in CAUSAL_AT_DECODER], ids=str
)
def test_every_parameter_gets_a_gradient(case, causal):
    """torch's DistributedDataParallel fails if a parameter has no gradient."""
    mechanism = case.build(**at_decoder(case) if causal else {})
    inputs = [x.requires_grad_() for x in draw(5, 5, 5)]
    values = mechanism(*inputs, causal=causal).values
    found = torch.autograd.grad(values.square().sum(), [inputs[2], *mechanism.parameters()], allow_unused=True)
    assert all(gradient is not None for gradient in found)


# with a single pivot the output depends on no query, as all mass goes through it
@pytest.mark.parametrize("case", [case for case in CASES if case.options.get("num_pivots") != 1], ids=str)
def test_trait_says_whether_queries_are_coupled(case):
    mechanism = case.build()
    q, k, v = case.draw()
    moved = q + torch.randn(q.shape, dtype=q.dtype)
    moved[:, :, 1] = q[:, :, 1]
    change = (mechanism(moved, k, v).values - mechanism(q, k, v).values)[:, :, 1].abs().max()
    assert change > 1e-3 if mechanism.traits.couples_queries else change < 1e-12


@pytest.mark.parametrize("case", [case for case in CASES if case not in CAUSAL_CASES], ids=str)
def test_mechanisms_without_a_causal_form_refuse_causal(case):
    with pytest.raises(ValueError, match="causal"):
        case.build()(*draw(tgt_len=6), causal=True)


@pytest.mark.parametrize("case", CAUSAL_CASES, ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
def test_causal_rows_that_see_nothing_but_pads_are_finite(case, need_weights):
    mechanism = case.build()
    mask = padding_mask(KEY_LENGTHS, 6, "left")
    inputs = [x.requires_grad_() for x in fill_pads(draw(tgt_len=6), mask, mask, torch.nan)]
    output = mechanism(*inputs, mask, mask, need_weights=need_weights, causal=True)
    for sentence in range(3):
        alone = mechanism(*truncated(inputs, mask, mask, sentence), causal=True).values
        close(output.values[sentence][:, ~mask[sentence]], alone[0], 1e-12)
    assert output.values.isfinite().all()
    assert all(x.isfinite().all() for x in gradients(output.values, [*inputs, *mechanism.parameters()]))


def soft_sort_rounding(mechanism, dtype):
    """Relative change of a plan of two soft sorts by one rounding of the scores; 0 without soft sorts.

    An entry is ``exp(-(s_p - v_j)²/t)``. Where it is not negligible, ``|s_p - v_j|`` is at most about ``4 √t``. Scores
    of up to 3 are rounded by ``3 eps``, so the exponent moves by ``2·4·3 eps/√t`` in each of the two sorts.
    """
    options = unwrapped(mechanism).options
    if not hasattr(options, "sort_temperature") or options.hard:
        return 0.0
    return 2 * 24 * torch.finfo(dtype).eps / options.sort_temperature**0.5


@pytest.mark.fast_if(lambda case, dtype, **_: dtype == torch.float64 or case.variant == "default")
@pytest.mark.parametrize(("case", "kind"), [(case, kind) for case, kind in KINDS if has_a_twin(case)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
def test_agrees_with_slow_twin(case, dtype, tolerance, kind):
    query_mask, key_mask = masks_of(kind, case.layouts[-1])
    mechanism = case.build(dtype)
    inputs = draw(src_len=key_mask.size(1), dtype=dtype)
    inputs = [x.requires_grad_() for x in fill_pads(inputs, query_mask, key_mask, torch.nan)]
    output = mechanism(*inputs, query_mask, key_mask, need_weights=True)

    exact = copy.deepcopy(mechanism).double()
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact_values = torch.zeros_like(output.values, dtype=torch.float64)
    for sentence in range(3):
        real = truncated(exact_inputs, query_mask, key_mask, sentence)
        values, plan = twin(case, exact, *(x[0] for x in real))
        queries, keys = ~query_mask[sentence], ~key_mask[sentence]
        exact_values[sentence, :, queries] = values
        close(output.values[sentence][:, queries].double(), values, tolerance, relative=tolerance)
        close(output.weights[sentence][:, queries][..., keys].double(), plan, tolerance, relative=tolerance)

    actual = gradients(output.values, [*inputs, *mechanism.parameters()])
    for gradient, expected in zip(actual, gradients(exact_values, [*exact_inputs, *exact.parameters()]), strict=True):
        scale = expected.abs().max().clamp(min=1)
        close(gradient.double() / scale, expected / scale, max(10 * tolerance, soft_sort_rounding(mechanism, dtype)))


@every_case_and_kind
def test_asking_for_the_plan_changes_no_value(case, kind):
    query_mask, key_mask = masks_of(kind, "left")
    mechanism, inputs = case.build(), draw(src_len=key_mask.size(1))
    output = mechanism(*inputs, query_mask, key_mask, need_weights=True)
    without = mechanism(*inputs, query_mask, key_mask)
    assert without.weights is None
    close(output.values, without.values, 1e-12)
    if not (case.differential or case.flag("mixes_values")):
        close(output.values, output.weights @ inputs[2], 1e-10)


@pytest.mark.fast_if(lambda case, empty: empty == "both" or case.variant == "default")
@pytest.mark.parametrize(
    ("case", "empty"),
    [(case, x) for case in CASES for x in ("queries", "keys", "both") if x == "both" or not case.flag("tied_tokens")],
    ids=str,
)
def test_sentence_of_pads_alone_gives_finite_values(case, empty):
    query_mask, key_mask = (mask.clone() for mask in masks_of("self" if case.flag("tied_tokens") else "cross", "right"))
    mechanism = case.build()
    expected = mechanism(*case.draw(), query_mask, key_mask, need_weights=True).values[1:]
    query_mask[0] |= empty != "keys"
    key_mask[0] |= empty != "queries"
    inputs = [x.requires_grad_() for x in fill_pads(case.draw(), query_mask, key_mask, torch.nan)]
    for need_weights in (False, True):
        output = mechanism(*inputs, query_mask, key_mask, need_weights=need_weights)
        assert output.values.isfinite().all()
        assert output.weights is None or output.weights.isfinite().all()
        close(output.values[1:], expected, 1e-10)
        assert all(x.isfinite().all() for x in gradients(output.values, [*inputs, *mechanism.parameters()]))


@pytest.mark.fast_if(lambda case, **_: case.variant == "default")
@every_case
@pytest.mark.parametrize("need_weights", [False, True])
def test_an_empty_batch_gives_nothing(case, need_weights):
    mechanism, inputs = case.build(), [x[:0] for x in case.draw()]
    for causal in (False, mechanism.traits.is_causal):
        values, weights = mechanism(*inputs, need_weights=need_weights, causal=causal)
        assert values.shape == inputs[0].shape
        full = mechanism(*case.draw(), need_weights=need_weights, causal=causal).weights
        assert weights is None if full is None else weights.shape == full[:0].shape


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in PLAIN_CASES if case.variant == "default" or case.name == "near_far"], ids=str
)
def test_a_compiled_mechanism_computes_the_same_at_every_length(case):
    """From the second length on, torch.compile treats the length as dynamic."""
    torch._dynamo.reset()
    mechanism = case.build()
    compiled = torch.compile(mechanism, backend="aot_eager")
    for length in (7, 12, 120):
        mask = padding_mask((length, length - 2, 3), length, case.layouts[0])
        inputs, found = [x.requires_grad_() for x in draw(tgt_len=length, src_len=length)], []
        for run in (mechanism, compiled):
            values = run(*inputs, mask, mask).values
            found.append([values, *gradients(values, [*inputs, *mechanism.parameters()])])
        for plain, after in zip(*found, strict=True):
            close(after, plain, 1e-10)


@every_case
def test_dropout_acts_in_training_only(case):
    mechanism, inputs = case.build(dropout=0.5), case.draw()
    still = case.build()(*inputs).values
    close(mechanism.eval()(*inputs).values, still, 0)
    assert (mechanism.train()(*inputs).values - still).abs().max() > 1e-2
