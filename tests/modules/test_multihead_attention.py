"""The pluggable attention follows fairseq's: parameters, masks, values, weights, and gradients at pads."""

import copy
import dataclasses

import pytest
import torch
from fairseq.modules import MultiheadAttention

from fairseq_lot.attention.lot import LotOptions
from fairseq_lot.attention.registry import MECHANISMS, build_mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.modules.multihead_attention import PluggableMultiheadAttention
from fairseq_lot.modules.sites import SITES, check_site
from tests.conftest import close, gradients
from tests.variants import build_differential, padding_mask

WIDTH, HEADS, KEY_WIDTH = 8, 2, 12
TGT_LEN, SRC_LEN, BSZ = 6, 5, 3


def stock_attention(site):
    """fairseq's attention as its layers build it; the encoder has another width than the decoder."""
    if site == "cross":
        return MultiheadAttention(WIDTH, HEADS, kdim=KEY_WIDTH, vdim=KEY_WIDTH, encoder_decoder_attention=True)
    return MultiheadAttention(WIDTH, HEADS, self_attention=True)


def pluggable(stock, mechanism="softmax", *, site, differential=False, **options):
    build = build_differential if differential else build_mechanism
    context = {"num_heads": HEADS, "head_dim": WIDTH // HEADS}
    return PluggableMultiheadAttention(stock, build(mechanism, **context, **options), site=site)


def inputs_of(site):
    """query and key (the same tensor in self-attention)."""
    query = torch.randn(TGT_LEN, BSZ, WIDTH)
    return query, torch.randn(SRC_LEN, BSZ, KEY_WIDTH) if site == "cross" else query


def mask_of(site, layout="right"):
    return padding_mask((4, 5, 2) if site == "cross" else (4, 6, 2), SRC_LEN if site == "cross" else TGT_LEN, layout)


def future(length):
    return torch.full((length, length), -torch.inf).triu(1)


def run(attention, query, key, mask, site, **options):
    attn_mask = future(len(query)) if site == "decoder" else None
    return attention(query, key, key, key_padding_mask=mask, attn_mask=attn_mask, **options)


# the first rows of a left-padded decoder would see nothing but pads, in fairseq too
SITES_AND_PADS = [
    (site, layout)
    for site in ("encoder", "cross", "decoder")
    for layout in (None, "right", "left")
    if (site, layout) != ("decoder", "left")
]


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize(("site", "layout"), SITES_AND_PADS)
@pytest.mark.parametrize("need_weights", [False, True])
def test_softmax_is_the_stock_attention(site, layout, need_weights):
    stock = stock_attention(site)
    ours = pluggable(copy.deepcopy(stock), site=site)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in stock.named_parameters()]
    mask = None if layout is None else mask_of(site, layout)
    real = torch.ones(BSZ, TGT_LEN, dtype=torch.bool) if mask is None or site == "cross" else ~mask
    query, key = (x.requires_grad_() for x in inputs_of(site))
    found = []
    for attention in (stock, ours):
        values, plan = run(attention, query, key, mask, site, need_weights=need_weights)
        values = values.transpose(0, 1)[real]
        leaves = [query, *([key] if site == "cross" else []), *attention.parameters()]
        found.append([values, *([plan[real]] if need_weights else []), *gradients(values, leaves)])
        assert (plan is not None) == need_weights
    close(*found, 2e-6, relative=1e-5)


@pytest.mark.parametrize("site", ["encoder", "cross", "decoder"])
def test_weights_of_the_heads_are_those_of_the_stock_attention(site):
    stock = stock_attention(site)
    stock.skip_embed_dim_check = True  # fairseq's own path returns one plan per head; torch's the mean
    ours = pluggable(copy.deepcopy(stock), site=site)
    query, key = inputs_of(site)
    options = {"need_head_weights": True, "need_weights": False}
    _, expected = run(stock, query, key, None, site, **options)
    _, actual = run(ours, query, key, None, site, **options)
    assert actual.shape == (HEADS, BSZ, TGT_LEN, len(key))
    close(actual, expected, 1e-5)
    _, mean = run(ours, query, key, None, site, need_weights=True)
    close(mean, expected.mean(0), 1e-5)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("differential", [False, True])
def test_every_mechanism_stands_in_the_encoder(name, differential):
    stock = stock_attention("encoder")
    attention = pluggable(stock, name, site="encoder", differential=differential)
    assert stock.state_dict().keys() <= attention.state_dict().keys()
    added = attention.state_dict().keys() - stock.state_dict().keys()
    assert all(key.startswith("mechanism.") for key in added)
    query, _ = inputs_of("encoder")
    mask = mask_of("encoder", "left")
    values, plan = attention(query, query, query, key_padding_mask=mask)
    plans = HEADS // 2 if differential else HEADS
    assert values.shape == query.shape and plan.shape == (BSZ, TGT_LEN, TGT_LEN)
    _, of_heads = attention(query, query, query, key_padding_mask=mask, need_head_weights=True)
    assert of_heads.shape == (plans, BSZ, TGT_LEN, TGT_LEN)
    close(of_heads.mean(0), plan, 1e-5)
    for sentence in range(BSZ):
        alone = query[:, sentence : sentence + 1][~mask[sentence]]
        expected, _ = attention(alone, alone, alone, need_weights=False)
        close(values[~mask[sentence], sentence], expected[:, 0], 1e-5)


def test_reordering_an_empty_state_is_harmless():
    attention, state = pluggable(stock_attention("decoder"), site="decoder"), {}
    attention.reorder_incremental_state(state, torch.tensor([0]))
    assert not state


def test_byte_masks_are_accepted():
    attention = pluggable(stock_attention("encoder"), "lot", site="encoder")
    query, _ = inputs_of("encoder")
    mask = mask_of("encoder")
    expected, _ = attention(query, query, query, key_padding_mask=mask)
    actual, _ = attention(query, query, query, key_padding_mask=mask.byte())
    assert torch.equal(actual, expected)


def test_the_projections_are_those_of_the_stock_attention():
    stock = stock_attention("encoder")
    state = torch.get_rng_state()
    attention = pluggable(stock, "lot", site="encoder")
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        assert getattr(attention, name) is getattr(stock, name)


def test_options_of_fairseq_without_a_meaning_here_are_refused():
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(NotImplementedError, match="add_bias_kv and add_zero_attn"):
            pluggable(MultiheadAttention(WIDTH, HEADS, self_attention=True, **options), site="encoder")
    query, _ = inputs_of("encoder")
    attention = pluggable(stock_attention("encoder"), site="encoder")
    with pytest.raises(NotImplementedError, match="before_softmax"):
        attention(query, query, query, before_softmax=True)
    with pytest.raises(NotImplementedError, match="'encoder' site"):
        attention(query, query, query, attn_mask=future(TGT_LEN))


def values_and_gradients(attention, site, query, key, mask):
    """Values, weights, and the gradients of the inputs and of all parameters."""
    leaves = [query, key] if site == "cross" else [query]
    values, weights = run(attention, query, key, mask, site, need_weights=True)
    if mask is not None and site == "encoder":
        values = values.masked_fill(mask.T.unsqueeze(-1), 0.0)
    both = torch.cat([values.flatten(), weights.flatten()])
    return values, weights, *gradients(both, [*leaves, *attention.parameters()])


def options_at(site, name):
    """The options of a mechanism at a site, with few pivots for LOT; None if it cannot stand there."""
    try:
        options = MECHANISMS[name].options_class(**({"num_pivots": 2} if name == "lot" else {})).at_site(site)
        options = dataclasses.asdict(options)
        check_site(build_mechanism(name, num_heads=HEADS, head_dim=WIDTH // HEADS, **options).traits, name, site)
    except InputError:
        return None
    return options


STANDING = [(site, name) for site in SITES for name in MECHANISMS if options_at(site, name) is not None]


@pytest.mark.parametrize(("site", "name"), STANDING)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("differential", [False, True])
def test_nan_in_pads_reaches_no_gradient(name, differential, separate, site):
    """LOT with two pivots multiplies the tokens by narrower projections and makes no q and k."""
    options = options_at(site, name)
    attention = pluggable(stock_attention(site), name, site=site, differential=differential, **options).double()
    mask, found = mask_of(site), []
    query, key = (x.double() for x in inputs_of(site))
    at_pads = mask.T.unsqueeze(-1)
    weights = torch.randn(TGT_LEN, BSZ, WIDTH, dtype=torch.float64)
    if site != "cross":
        weights = weights.masked_fill(at_pads, 0.0)
    for garbage in (0.0, torch.nan):
        filled = key.masked_fill(at_pads, garbage).requires_grad_()
        own = filled if site == "encoder" else query.clone().requires_grad_()
        key_and_value = [filled.clone() for _ in range(2)] if separate else [filled, filled]
        attn_mask = future(TGT_LEN) if site == "decoder" else None
        values, _ = attention(own, *key_and_value, key_padding_mask=mask, attn_mask=attn_mask)
        leaves = [filled, own, *attention.parameters()]
        found.append(torch.autograd.grad((values * weights).sum(), leaves, allow_unused=True, materialize_grads=True))
    close(*found, 1e-12)


def products_made(attention, monkeypatch):
    """A list of the projections that narrower ones replaced; it grows with every call of the attention."""
    made, products = [], attention._products
    monkeypatch.setattr(attention, "_products", lambda layer, *args: made.append(layer) or products(layer, *args))
    return made


@pytest.mark.parametrize("site", ["encoder", "cross", "decoder"])
@pytest.mark.parametrize("layout", [None, "right"])
@pytest.mark.parametrize("bias", [True, False])
def test_products_with_pivots_are_made_without_q_and_k(site, layout, bias, monkeypatch):
    stock = stock_attention(site)
    if not bias:
        stock.q_proj.bias = stock.k_proj.bias = None
    options = dataclasses.asdict(LotOptions(num_pivots=2).at_site(site))
    attention = pluggable(stock, "lot", site=site, **options).double()
    query, key = (x.double().requires_grad_() for x in inputs_of(site))
    key = query if site != "cross" else key
    mask = mask_of(site, layout) if layout else None
    made = products_made(attention, monkeypatch)
    ours = values_and_gradients(attention, site, query, key, mask)
    assert made == [attention.q_proj, attention.k_proj]
    handle = attention.mechanism.register_forward_hook(lambda *_: None)
    for x, y in zip(ours, values_and_gradients(attention, site, query, key, mask), strict=True):
        assert torch.equal(x, y), "a hook on the mechanism changes the result"
    handle.remove()
    monkeypatch.setattr(attention.mechanism, "probes", lambda like: None)
    expected = values_and_gradients(attention, site, query, key, mask)
    assert len(made) == 4
    close(ours, expected)


@pytest.mark.parametrize("why", ["as many pivots", "few tokens", "half", "autocast", "noise", "another mechanism"])
def test_q_and_k_are_made_where_that_is_less_work_or_they_are_needed(why, monkeypatch):
    num_pivots = 4 if why == "as many pivots" else 2
    name, options = ("set", {}) if why == "another mechanism" else ("lot", {"num_pivots": num_pivots})
    attention = pluggable(stock_attention("encoder"), name, site="encoder", **options)
    (query, _), made = inputs_of("encoder"), products_made(attention, monkeypatch)
    if why == "few tokens":
        query = query[:3, :1]
    elif why == "half":
        attention, query = attention.bfloat16(), query.bfloat16()
    elif why == "noise":
        attention.q_proj.register_forward_pre_hook(lambda *_: None)
    with torch.autocast("cpu", enabled=why == "autocast"):
        attention(query, query, query)
    assert made == []
