"""The registry and the options: defaults, ranges, initial values, and the messages of refusals."""

import dataclasses
import inspect
import math
import re

import pytest
import torch

from fairseq_lot.attention.base import Mechanism
from fairseq_lot.attention.differential import scheduled_lambda_init
from fairseq_lot.attention.options import Options
from fairseq_lot.attention.registry import MECHANISMS, build_mechanism, build_options, describe, mechanism_class
from fairseq_lot.attention.sinkhorn import SinkhornOptions
from fairseq_lot.errors import InputError
from tests.conftest import close
from tests.variants import HEAD_DIM, NUM_HEADS, PLAIN_CASES, build_differential, draw

CONTEXT = {"num_heads": NUM_HEADS, "head_dim": HEAD_DIM}
NAN, INF = math.nan, math.inf


def test_registry_is_in_alphabetical_order_and_complete():
    assert list(MECHANISMS) == sorted(MECHANISMS)
    assert {"esp", "lot", "set", "sinkhorn", "softmax"} <= {*MECHANISMS}
    for name, mechanism in MECHANISMS.items():
        assert issubclass(mechanism, Mechanism)
        assert issubclass(mechanism.options_class, Options)
        assert mechanism_class(name) is mechanism


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_options_round_trip(case):
    built = case.build()
    assert built.options == build_options(case.name, **case.options)
    assert case.options.items() <= dataclasses.asdict(built.options).items()
    again = build_mechanism(case.name, **CONTEXT, **dataclasses.asdict(built.options))
    assert again.options == built.options
    assert str(built.options) in repr(built)


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_option_is_explained_and_frozen(name):
    options = build_options(name)
    for field in dataclasses.fields(options):
        assert field.metadata["help"]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, field.name, field.default)


def test_unknown_mechanism_is_named():
    with pytest.raises(ValueError, match=f"'sofmax'.*{', '.join(MECHANISMS)}") as caught:
        build_mechanism("sofmax", **CONTEXT)
    assert caught.type is InputError


@pytest.mark.parametrize("name", MECHANISMS)
def test_unknown_option_is_named(name):
    with pytest.raises(ValueError, match=f"{name} attention has no option 'num_pivotz'") as caught:
        build_mechanism(name, **CONTEXT, num_pivotz=3)
    for field in dataclasses.fields(MECHANISMS[name].options_class):
        assert field.name in str(caught.value)


REFUSED = [
    ("lot set sinkhorn", "epsilon", (0, -1, NAN, INF, -INF, 10**400, "1")),
    ("lot set", "epsilon", (None,)),
    ("lot set sinkhorn", "num_updates", (0, -3, None, "5")),
    ("sinkhorn", "num_updates", (2.5,)),
    ("sinkhorn", "tolerance", (0, NAN)),
    ("lot set", "num_pivots", (0, -1, 2.5)),
    ("lot", "query_updates", (0,)),
    ("lot set", "pivot_std", (-0.1, NAN, INF, 1e300)),
    ("lot", "conv_kernel", (2, 4, 0, -1, 2.5)),
    ("lot esp", "seed", (-1,)),
    ("set", "positional_temperature", (0, 1e-20, INF)),
    ("esp", "sort_temperature", (0, -1e-3, NAN, INF, 1e-80)),
    ("esp", "min_sort_temperature", (0, -1e-9, NAN, INF, 1e-80)),
    ("esp", "anneal", (0, -0.5, 1.01, NAN, INF, "0.8")),
    ("esp", "slice_inverse_temperature", (-1, NAN, INF, 10**400)),
    ("esp", "slicer", ("random", None)),
    ("esp", "num_slices", (0, 1.5)),
    ("esp", "hard", ("yes",)),
    ("softmax", "prior", ("rotary",)),
    ("near_far", "window", (-1, 10**20)),
    ("near_far", "exact_up_to", (-1, 2.5, None)),
    ("lot set esp near_far", "seed", (10**20,)),
    ("sinkhorn lot", "num_updates", (10**20,)),
]


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [(name, option, value) for names, option, values in REFUSED for name in names.split() for value in values],
)
def test_value_outside_its_range_is_named(name, option, value):
    with pytest.raises(ValueError, match=re.escape(f"{name} attention: {option} ") + f".*{re.escape(str(value))}"):
        build_mechanism(name, **CONTEXT, **{option: value})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("lot", "num_pivots", 1), ("esp", "slice_inverse_temperature", 0), ("lot", "pivot_std", 0), ("lot", "epsilon", 1)],
)
def test_limit_of_a_range_is_allowed(name, option, value):
    mechanism = build_mechanism(name, **CONTEXT, **{option: value})
    assert mechanism(*draw(dtype=torch.float32)).values.isfinite().all()


def test_more_axes_than_the_head_has_are_refused():
    assert build_mechanism("esp", **CONTEXT, num_slices=HEAD_DIM).num_slices == HEAD_DIM
    assert build_mechanism("esp", **CONTEXT).num_slices == HEAD_DIM
    with pytest.raises(ValueError, match=f"num_slices is {HEAD_DIM + 1}.*only {HEAD_DIM} axes"):
        build_mechanism("esp", **CONTEXT, num_slices=HEAD_DIM + 1)
    for slicer in ("frozen", "learnable"):
        mechanism = build_mechanism("esp", **CONTEXT, num_slices=HEAD_DIM + 1, slicer=slicer)
        assert mechanism.slices.shape == (NUM_HEADS, HEAD_DIM + 1, HEAD_DIM)


@pytest.mark.parametrize(
    ("name", "options", "stored", "learnt"),
    [
        ("esp", {}, [], []),
        ("esp", {"slicer": "frozen"}, ["slices"], []),
        ("esp", {"slicer": "learnable"}, ["slices"], ["slices"]),
        ("sinkhorn", {}, [], []),
        ("softmax", {}, [], []),
    ],
)
def test_stored_and_learnt_tensors(name, options, stored, learnt):
    mechanism = build_mechanism(name, **CONTEXT, **options)
    assert list(mechanism.state_dict()) == stored
    assert [name for name, _ in mechanism.named_parameters()] == learnt
    if stored:
        norms = mechanism.directions(torch.zeros(1)).norm(dim=-1)
        close(norms, torch.ones_like(norms), 1e-6)


@pytest.mark.parametrize(
    ("options", "epsilon"),
    [({}, 0.1), ({"learn_epsilon": True}, 1.0), ({"learn_epsilon": True, "epsilon": 0.1}, 0.1), ({"epsilon": 2}, 2)],
)
def test_default_epsilon_of_sinkhorn_is_the_papers_if_fixed_and_softmaxs_if_learnt(options, epsilon):
    assert build_options("sinkhorn", **options).epsilon == SinkhornOptions(**options).epsilon == epsilon


def test_a_description_leaves_defaults_out():
    def described(**options):
        return describe("sinkhorn", dataclasses.asdict(build_options("sinkhorn", **options)))

    assert described() == "sinkhorn"
    assert described(epsilon=0.5) == "sinkhorn (epsilon=0.5)"
    assert described(learn_epsilon=True) == "sinkhorn (epsilon=1.0, learn_epsilon=True)"


@pytest.mark.parametrize("num_heads, head_dim", [(0, 4), (2, 0), (-2, 4)])
def test_sizes_below_one_are_refused(num_heads, head_dim):
    with pytest.raises(ValueError, match=f"at least 1, got {num_heads} and {head_dim}"):
        build_mechanism("softmax", num_heads=num_heads, head_dim=head_dim)


@pytest.mark.parametrize("dropout", [-0.5, 1.5, NAN])
def test_dropout_is_a_probability(dropout):
    with pytest.raises(ValueError, match=f"^dropout must be between 0 and 1, got {dropout}$"):
        build_mechanism("softmax", **CONTEXT, dropout=dropout)


@pytest.mark.parametrize("name", MECHANISMS)
def test_masks_of_another_shape_or_type_are_refused(name):
    mechanism, tensors = build_mechanism(name, **CONTEXT), draw()
    for side, (size, _, n, _) in enumerate(x.shape for x in tensors[:2]):
        wrong = [torch.zeros(shape, dtype=torch.bool) for shape in ((size, 1), (1, n), (size, n + 1), (size, 1, n))]
        for mask in [*wrong, torch.zeros(size, n)]:
            masks = [None, mask] if side else [mask, None]
            with pytest.raises(ValueError, match=rf"^a padding mask must be bool, \({size}, {n}\), got torch"):
                mechanism(*tensors, *masks)


@pytest.mark.parametrize("name", MECHANISMS)
def test_tensors_of_other_shapes_are_refused(name):
    mechanism, (q, k, v) = build_mechanism(name, **CONTEXT), draw()
    others = [(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), (q, k, v[:, :, 1:]), (q, k[:1], v[:1])]
    for tensors in [*others, (q[0], k[0], v[0]), (q[..., 1:], k[..., 1:], v), (q[:, 1:], k[:, 1:], v[:, 1:])]:
        with pytest.raises(ValueError, match=r"^q and k must be \(bsz, .*, with a value for each key; got q \("):
            mechanism(*tensors)


@pytest.mark.parametrize("name", MECHANISMS)
def test_without_tokens_there_are_no_values(name):
    mechanism = build_mechanism(name, **CONTEXT)
    output = mechanism(*(x[:, :, :0] for x in draw()), need_weights=True)
    assert output.values.shape[2] == 0 and output.weights.shape[2:] == (0, 0)
    if not mechanism.traits.tied_tokens:
        q, k, v = draw()
        pads = torch.ones(q.shape[::2], dtype=torch.bool)
        output = mechanism(q.fill_(torch.nan), k[:, :, :0], v[:, :, :0], pads, None)
        assert output.values.eq(0).all(), "pads change the values"


@pytest.mark.parametrize("name", MECHANISMS)
def test_differential_needs_pairs_of_heads(name):
    with pytest.raises(ValueError, match="even, got 3"):
        build_differential(name, num_heads=3, head_dim=HEAD_DIM)


def test_differential_takes_traits_and_layer_from_its_mechanism():
    for name, options in [("lot", {}), ("lot", {"query_updates": 1}), ("softmax", {})]:
        wrapped = build_differential(name, **CONTEXT, layer=2, **options)
        assert wrapped.traits.couples_queries == wrapped.inner.traits.couples_queries
        assert wrapped.layer == wrapped.inner.layer == 2
        assert wrapped.lambda_init == scheduled_lambda_init(2)
    assert build_differential("softmax", **CONTEXT, lambda_init=0.0).lambda_init == 0.0
    for layer, expected in ((0, 0.2), (1, 0.8 - 0.6 * math.exp(-0.3)), (100, 0.8)):
        assert scheduled_lambda_init(layer) == pytest.approx(expected)


def initial_values(name, *, build=build_mechanism, **options):
    return build(name, **CONTEXT, **options).state_dict()


@pytest.mark.parametrize(
    ("name", "drawn", "options"),
    [
        ("lot", "pivots", {}),
        ("near_far", "features", {}),
        ("set", "pivots", {}),
        ("esp", "slices", {"slicer": "frozen"}),
        ("esp", "slices", {"slicer": "learnable"}),
    ],
)
def test_seed_and_layer_decide_the_initial_values(name, drawn, options):
    state = torch.get_rng_state()
    first = initial_values(name, seed=3, layer=1, **options)[drawn]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(initial_values(name, seed=3, layer=1, **options)[drawn], first)
    assert not torch.isclose(first[0], first[1]).any()
    places = [{"seed": seed, "layer": layer} for seed in (0, 1, 3, 8) for layer in range(12)]
    assert len({initial_values(name, **place, **options)[drawn][0, 0, 0].item() for place in places}) == len(places)


def test_layers_of_differential_attention_differ():
    state = torch.get_rng_state()
    first, again = (initial_values("softmax", build=build_differential, layer=1) for _ in range(2))
    other = initial_values("softmax", build=build_differential, layer=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first["lambda_q1"], again["lambda_q1"])
    assert not torch.isclose(first["lambda_q1"], other["lambda_q1"]).any()
    assert not torch.isclose(first["lambda_q1"], first["lambda_k1"]).any()


def test_initial_pivots_have_the_asked_deviation():
    context = {"num_heads": 8, "head_dim": 16, "num_pivots": 64}
    for name in ("lot", "set"):
        assert build_mechanism(name, **context).pivots.std().item() == pytest.approx(2.0, rel=0.05)
        assert build_mechanism(name, **context, pivot_std=0.02).pivots.std().item() == pytest.approx(0.02, rel=0.05)
    assert build_mechanism("lot", **context).mass_logits.eq(0).all()


@pytest.mark.parametrize("constructor", [*MECHANISMS.values(), Mechanism], ids=lambda kind: kind.__name__)
def test_constructors_take_keywords_only(constructor):
    parameters = inspect.signature(constructor).parameters.values()
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
