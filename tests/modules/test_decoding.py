"""The pluggable attention in decoding, at both sites of the decoder: its steps and its cache."""

import dataclasses

import pytest
import torch
from fairseq.modules import MultiheadAttention

from fairseq_lot.attention.registry import build_mechanism, build_options
from fairseq_lot.modules.multihead_attention import PluggableMultiheadAttention
from tests.conftest import close
from tests.variants import build_differential, padding_mask

WIDTH, HEADS, BSZ, TGT_LEN, SRC_LEN = 8, 2, 3, 7, 5
# a beam moves within the sentence, and finished sentences leave the batch
ORDERS = {"cross": ([2, 0], [1]), "decoder": ([2, 0, 0], [1, 1, 2])}

EVERYWHERE = pytest.mark.parametrize("site", ["cross", "decoder"])
SITES_AND_MECHANISMS = [
    (site, name, options)
    for site in ("cross", "decoder")
    for name, options in (
        ("softmax", {}),
        ("softmax", {"prior": "alibi"}),
        ("lot", {"num_pivots": 4}),
        ("near_far", {"num_features": 4, "window": 1}),
        ("near_far", {"num_features": 4, "window": 1, "prior": "alibi"}),
        ("near_far", {"num_features": 4, "window": 1, "exact_up_to": 4}),
        ("sinkhorn", {"num_updates": 1, "learn_epsilon": True}),
    )
    if (site, options.get("prior")) != ("cross", "alibi") and (site, name) != ("decoder", "sinkhorn")
]
MECHANISMS = pytest.mark.parametrize(
    ("name", "options"),
    [("softmax", {}), ("lot", {"num_pivots": 4, "query_updates": 1}), ("near_far", {"num_features": 4, "window": 1})],
    ids=["softmax", "lot", "near_far"],
)
DIFFERENTIAL = pytest.mark.parametrize("differential", [False, True], ids=["plain", "differential"])


def attention_at(site, name, options, differential=False):
    build = build_differential if differential else build_mechanism
    options = dataclasses.asdict(build_options(name, **options).at_site(site))
    mechanism = build(name, num_heads=HEADS, head_dim=WIDTH // HEADS, **options)
    stock = MultiheadAttention(WIDTH, HEADS, encoder_decoder_attention=site == "cross", self_attention=site != "cross")
    return PluggableMultiheadAttention(stock, mechanism, site=site).eval()


def teacher_forced(attention, query, key, mask, need_weights=False):
    future = torch.full((len(query), len(query)), -torch.inf).triu(1) if attention.site == "decoder" else None
    return attention(query, key, key, key_padding_mask=mask, attn_mask=future, need_weights=need_weights)


def step(attention, state, query, key, mask, i, rows, need_weights=False):
    """Output and weights of decoding step i, in which the batch holds the sentences ``rows``."""
    others = token = query[i : i + 1, rows]
    pads = None if mask is None else mask[rows]
    options = {"incremental_state": state, "static_kv": attention.site == "cross", "need_weights": need_weights}
    if attention.site == "cross":
        others = None if key is None else key[:, rows]
    elif mask is not None:
        pads = pads[:, i : i + 1]
    return attention(token, others, others, key_padding_mask=pads, **options)


def inputs_of(site, layout=None):
    """Query, key and padding mask, ``None`` without a layout; at the decoder site the key is the query."""
    query = torch.randn(TGT_LEN, BSZ, WIDTH)
    key = torch.randn(SRC_LEN, BSZ, WIDTH) if site == "cross" else query
    mask = padding_mask((4, 5, 2) if site == "cross" else (4, 7, 3), len(key), layout) if layout else None
    return query, key, mask


@pytest.mark.parametrize(("site", "name", "options"), SITES_AND_MECHANISMS)
@DIFFERENTIAL
@pytest.mark.parametrize("layout", [None, "right"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_steps_with_reordered_beams_equal_teacher_forcing(site, name, options, differential, layout, need_weights):
    attention = attention_at(site, name, options, differential)
    query, key, mask = inputs_of(site, layout)
    expected, plans = teacher_forced(attention, query, key, mask, need_weights)
    state, rows = {}, torch.arange(BSZ)
    for i in range(TGT_LEN):
        if i in (2, 5):
            order = torch.tensor(ORDERS[site][i == 5])
            attention.reorder_incremental_state(state, order)
            rows = rows[order]
        values, plan = step(attention, state, query, key, mask, i, rows, need_weights)
        close(values[0], expected[i, rows], 1e-6, relative=1e-5)
        assert (plan is not None) == need_weights
        if need_weights:
            close(plan[:, 0], plans[rows, i, : plan.size(-1)], 1e-6, relative=1e-5)


@MECHANISMS
@DIFFERENTIAL
def test_static_keys_are_read_once(name, options, differential):
    attention = attention_at("cross", name, options, differential)
    query, key, mask = inputs_of("cross", "right")
    expected, _ = teacher_forced(attention, query, key, mask)
    state, rows = {}, torch.arange(BSZ)
    steps = [step(attention, state, query, key if i == 0 else None, mask, i, rows)[0] for i in range(TGT_LEN)]
    close(torch.cat(steps), expected, 1e-6, relative=1e-5)


@EVERYWHERE
@MECHANISMS
def test_fairseq_sees_that_keys_are_cached(site, name, options):
    attention = attention_at(site, name, options)
    query, key, mask = inputs_of(site, "right")
    state = {}
    assert not attention._get_input_buffer(state)
    step(attention, state, query, key, mask, 0, torch.arange(BSZ))
    # fairseq's layer looks for this name when self-attention also attends to the encoder's output
    assert attention._get_input_buffer(state).keys() == {"prev_key"}


@MECHANISMS
@DIFFERENTIAL
def test_the_cache_of_the_source_is_reordered_only_when_sentences_leave(name, options, differential):
    attention = attention_at("cross", name, options, differential)
    query, key, mask = inputs_of("cross", "right")
    state = {}
    step(attention, state, query, key, mask, 0, torch.arange(BSZ))
    before = attention._read_cache(state)
    attention.reorder_incremental_state(state, torch.tensor([0, 1, 2]))
    assert all(attention._read_cache(state)[name] is x for name, x in before.items())
    attention.reorder_incremental_state(state, torch.tensor([2, 1]))
    for name, x in attention._read_cache(state).items():
        assert torch.equal(x, before[name][[2, 1]])


@EVERYWHERE
@MECHANISMS
@DIFFERENTIAL
def test_autocast_stops_at_the_mechanism(site, name, options, differential, monkeypatch):
    """The projections are computed in half precision, the plans are not; steps still equal teacher forcing."""
    attention, (query, key, mask) = attention_at(site, name, options, differential), inputs_of(site, "right")
    called = []
    for method in ("summarise", "attend_summary", "causal_step"):
        real = getattr(attention.mechanism, method)

        def spy(first, *others, real=real):
            called.append((first.dtype, torch.is_autocast_enabled("cpu")))
            return real(first, *others)

        monkeypatch.setattr(attention.mechanism, method, spy)
    state = {}
    with torch.autocast("cpu", torch.bfloat16):
        expected = teacher_forced(attention, query, key, mask)[0]
        rows = torch.arange(BSZ)
        steps = [step(attention, state, query, key, mask, i, rows)[0] for i in range(TGT_LEN)]
    assert set(called) == {(torch.bfloat16, False)}
    real = slice(None) if site == "cross" else ~mask.T
    close(torch.cat(steps)[real], expected[real], 2e-2, relative=2e-2)
