"""Decoding: summaries of keys and causal states give what attending to everything at once gives."""

import pytest
import torch

from fairseq_lot.attention import reference
from tests.conftest import close
from tests.variants import CASES, HEAD_DIM, NUM_HEADS, draw, padding_mask

UNCOUPLED = [case for case in CASES if not case.build().couples_queries]
CAUSAL = [case for case in UNCOUPLED if getattr(case.build(), "inner", case.build()).supports_causal]
every_causal_case = pytest.mark.parametrize("case", CAUSAL, ids=str)
both_dtypes = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 5e-3)], ids=str
)
LENGTHS, SIZE, BSZ = (6, 4, 2), 6, 3
ORDER = torch.tensor([2, 0, 0])


def reorder(tensors):
    """What a beam does to everything that is kept."""
    return {name: x.index_select(0, ORDER) for name, x in tensors.items()}


def sizes(tensors):
    return {name: x.shape for name, x in tensors.items()}


@pytest.mark.fast_if(lambda case, dtype, **_: dtype == torch.float64 or case.variant == "default")
@pytest.mark.parametrize("case", [case for case in UNCOUPLED if "cross" in case.kinds], ids=str)
@both_dtypes
@pytest.mark.parametrize("layout", [None, "right", "left"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_summary_is_attention(case, dtype, tolerance, layout, need_weights):
    mechanism = case.build(dtype)
    q, k, v = draw(dtype=dtype)
    mask = None if layout is None else padding_mask(LENGTHS, SIZE, layout)
    if mask is not None:
        k, v = (x.masked_fill(mask[:, None, :, None], torch.nan) for x in (k, v))
    expected = mechanism(q, k, v, None, mask, need_weights)
    summary = mechanism.summarise(k, v, mask, need_weights)
    output = mechanism.attend_summary(q, summary, need_weights)
    assert output.values.dtype == dtype and (output.weights is not None) == need_weights
    close(output.values, expected.values, tolerance, relative=tolerance)
    after = mechanism.attend_summary(q[ORDER, :, :1], reorder(summary), need_weights)
    close(after.values, expected.values[ORDER, :, :1], tolerance, relative=tolerance)
    if need_weights:
        close(output.weights, expected.weights, tolerance, relative=tolerance)
        close(after.weights, expected.weights[ORDER, :, :1], tolerance, relative=tolerance)


@pytest.mark.fast_if(lambda case, dtype, **_: dtype == torch.float64 or case.variant == "default")
@every_causal_case
@both_dtypes
@pytest.mark.parametrize("layout", [None, "right", "late"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_causal_steps_are_causal_attention(case, dtype, tolerance, layout, need_weights):
    """``late``: only the later steps bring a mask, as in a batch whose short sentences end first."""
    mechanism = case.build(dtype)
    q, k, v = draw(tgt_len=SIZE, dtype=dtype)
    mask = None if layout is None else padding_mask(LENGTHS, SIZE, "right")
    expected = mechanism(q, k, v, None, mask, need_weights, causal=True)
    state, rows = None, torch.arange(BSZ)
    for start, stop in ((0, 1), (1, 2), (2, 4), (4, 5), (5, 6)):
        if start == 2:
            state, rows = reorder(state), ORDER
        new = (slice(None), slice(None), slice(start, stop))
        no_mask = mask is None or (layout == "late" and start < 2)
        pads = None if no_mask else mask[rows, start:stop]
        output, state = mechanism.causal_step(q[rows][new], k[rows][new], v[rows][new], pads, state, need_weights)
        assert output.values.dtype == dtype
        close(output.values, expected.values[rows][new], tolerance, relative=tolerance)
        if need_weights:
            close(output.weights, expected.weights[rows][new][..., :stop], tolerance, relative=tolerance)


@pytest.mark.parametrize("case", [case for case in UNCOUPLED if case.name == "lot"], ids=str)
def test_what_lot_keeps_does_not_grow(case):
    mechanism = case.build()
    q, k, v = draw(tgt_len=40, src_len=40)
    short, long = (mechanism.summarise(k[:, :, :n], v[:, :, :n]) for n in (2, 40))
    assert sizes(short) == sizes(long)
    state, seen = None, []
    for i in range(40):
        step = (x[:, :, i : i + 1] for x in (q, k, v))
        _, state = mechanism.causal_step(*step, state=state)
        seen.append(sizes(state))
    assert all(size == seen[0] for size in seen)
    assert sum(x.numel() for x in state.values()) <= BSZ * NUM_HEADS * 32 * (2 * HEAD_DIM + 2)


@every_causal_case
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_first_step_may_have_keys_before_its_query(case, need_weights):
    """With --cross-self-attention they are those of the source."""
    mechanism, early = case.build(), SIZE // 2
    q, k, v = draw(tgt_len=SIZE)
    mask = padding_mask((6, 5, 4), SIZE, "left")
    late = q[:, :, early:]
    expected = mechanism(late, k, v, None, mask, need_weights, causal=True)
    state = None
    for start, stop in ((0, early + 1), *((i, i + 1) for i in range(early + 1, SIZE))):
        new, query = slice(start, stop), slice(stop - 1, stop)
        step = q[:, :, query], k[:, :, new], v[:, :, new], mask[:, new], state, need_weights
        output, state = mechanism.causal_step(*step)
        at = slice(stop - 1 - early, stop - early)
        close(output.values, expected.values[:, :, at], 1e-12, relative=1e-12)
        if need_weights:
            close(output.weights, expected.weights[:, :, at, :stop], 1e-12, relative=1e-12)


@every_causal_case
def test_causal_queries_without_a_key_are_refused(case):
    q, k, v = draw(tgt_len=SIZE)
    with pytest.raises(ValueError, match="a key for every query; got 6 and 4"):
        case.build()(q, k[:, :, :4], v[:, :, :4], causal=True)


@pytest.mark.parametrize("case", [case for case in UNCOUPLED if case.name == "softmax"], ids=str)
def test_what_softmax_keeps_is_keys_and_values_once(case):
    mechanism = case.build()
    q, k, v = draw(tgt_len=SIZE)
    state = None
    for i in range(SIZE):
        _, state = mechanism.causal_step(*(x[:, :, i : i + 1] for x in (q, k, v)), state=state)
    assert torch.equal(state["key"], k) and torch.equal(state["value"], v)


@pytest.mark.parametrize("case", [case for case in UNCOUPLED if case.name == "lot"], ids=str)
def test_a_plan_that_was_not_asked_for_in_time_is_none(case):
    mechanism = case.build()
    q, k, v = draw(tgt_len=SIZE)
    assert mechanism.attend_summary(q, mechanism.summarise(k, v), need_weights=True).weights is None
    first, second = ([x[:, :, i : i + 1] for x in (q, k, v)] for i in (0, 1))
    _, state = mechanism.causal_step(*first)
    output, _ = mechanism.causal_step(*second, state=state, need_weights=True)
    assert output.weights is None and output.values.isfinite().all()


def causal_lot_plan(q, k, pivots, epsilon):
    """``A_ij = Σ_t softmax(s·q_i·z/ε)_t exp(s·k_j·z_t/ε) / Σ_{j' ≤ i} exp(s·k_j'·z_t/ε)``, with loops."""
    from_queries, from_keys = reference.scores(q, pivots) / epsilon, reference.scores(k, pivots) / epsilon
    rows = []
    for i in range(len(q)):
        shares = torch.exp(from_queries[i]) / torch.exp(from_queries[i]).sum()
        row = [torch.zeros((), dtype=q.dtype)] * len(k)
        for t in range(len(pivots)):
            total = sum(torch.exp(from_keys[j, t]) for j in range(i + 1))
            row = [x + shares[t] * torch.exp(from_keys[j, t]) / total if j <= i else x for j, x in enumerate(row)]
        rows.append(row)
    return reference.matrix(rows)


@pytest.mark.parametrize("case", [c for c in UNCOUPLED if c.name == "lot" and not c.differential], ids=str)
def test_causal_lot_agrees_with_slow_twin(case):
    mechanism = case.build()
    inputs = [x.requires_grad_() for x in draw(bsz=1, tgt_len=5, src_len=5)]
    output = mechanism(*inputs, need_weights=True, causal=True)
    q, k, v = (x[0] for x in inputs)
    epsilon = mechanism.options.epsilon
    plans = [causal_lot_plan(q[h], k[h], mechanism.pivots[h], epsilon) for h in range(NUM_HEADS)]
    plan = torch.stack(plans)
    close(output.weights[0], plan, 1e-10)
    close(output.values[0], plan @ v, 1e-10)
    probe, leaves = torch.randn_like(v), [*inputs, mechanism.pivots]
    actual = torch.autograd.grad((output.values[0] * probe).sum(), leaves)
    for found, expected in zip(actual, torch.autograd.grad((plan @ v * probe).sum(), leaves), strict=True):
        close(found, expected, 1e-10)


@every_causal_case
def test_no_look_ahead(case):
    mechanism = case.build()
    q, k, v = draw(tgt_len=20, src_len=20)
    expected = mechanism(q, k, v, causal=True).values
    for now in (0, 3, 15, 16, 18):
        later = torch.arange(20)[:, None] > now
        changed = [torch.where(later, 5 * torch.randn_like(x), x) for x in (q, k, v)]
        values = mechanism(*changed, causal=True).values
        close(values[:, :, : now + 1], expected[:, :, : now + 1], 1e-12)
        assert (values - expected)[:, :, now + 1 :].abs().max() > 1e-3


@every_causal_case
def test_causal_gradcheck_with_leading_pads(case):
    mechanism = case.build()
    inputs = [x.requires_grad_() for x in draw(bsz=1, tgt_len=4, src_len=4)]
    mask = torch.tensor([[True, False, False, True]])

    def values(q, k, v, *parameters):
        return mechanism(q, k, v, mask, mask, causal=True).values

    assert torch.autograd.gradcheck(values, (*inputs, *mechanism.parameters()), fast_mode=True)


@every_causal_case
def test_a_cache_that_is_empty_is_a_start(case):
    """fairseq's attention hands over what it has kept, which at first is an empty dictionary."""
    mechanism, token = case.build(), draw(tgt_len=1, src_len=1)
    (expected, kept), (output, state) = (mechanism.causal_step(*token, state=start) for start in (None, {}))
    close(output.values, expected.values, 0)
    assert kept.keys() == state.keys()
