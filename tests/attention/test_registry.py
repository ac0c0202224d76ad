"""The registry and the options: what is built, what is refused and how the refusal reads."""

import dataclasses
import inspect
import math

import pytest
import torch

from fairseq_lot.attention.base import Mechanism
from fairseq_lot.attention.differential import build_differential, scheduled_lambda_init
from fairseq_lot.attention.options import Options
from fairseq_lot.attention.registry import MECHANISMS, build_mechanism, build_options, describe, mechanism_class
from fairseq_lot.errors import InputError
from tests.variants import HEAD_DIM, NUM_HEADS, PLAIN_CASES, draw

CONTEXT = {"num_heads": NUM_HEADS, "head_dim": HEAD_DIM}
ENTROPIC = ("lot", "set", "sinkhorn")
NOT_A_NUMBER, INFINITE = math.nan, math.inf


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


@pytest.mark.parametrize("build", [build_mechanism, build_differential])
def test_unknown_mechanism_is_named(build):
    with pytest.raises(ValueError, match=f"'sofmax'.*{', '.join(MECHANISMS)}") as caught:
        build("sofmax", **CONTEXT)
    assert caught.type is InputError


@pytest.mark.parametrize("build", [build_mechanism, build_differential])
@pytest.mark.parametrize("name", MECHANISMS)
def test_unknown_option_is_named(build, name):
    with pytest.raises(ValueError, match=f"{name} attention has no option 'num_pivotz'") as caught:
        build(name, **CONTEXT, num_pivotz=3)
    for field in dataclasses.fields(MECHANISMS[name].options_class):
        assert field.name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *[(name, "epsilon", x) for name in ENTROPIC for x in (0, -1, NOT_A_NUMBER, INFINITE, -INFINITE)],
        *[(name, "epsilon", "1") for name in ENTROPIC],
        *[(name, "epsilon", None) for name in ("lot", "set")],
        *[(name, "num_updates", x) for name in ENTROPIC for x in (0, -3, None, "5")],
        ("lot", "num_pivots", 0),
        ("lot", "num_pivots", -1),
        ("lot", "query_updates", 0),
        ("lot", "pivot_std", -0.1),
        ("lot", "pivot_std", NOT_A_NUMBER),
        ("lot", "seed", -1),
        ("set", "num_pivots", 0),
        ("set", "positional_temperature", 0),
        ("set", "positional_temperature", INFINITE),
        ("set", "pivot_std", -0.1),
        ("sinkhorn", "tolerance", 0),
        ("sinkhorn", "tolerance", NOT_A_NUMBER),
        *[("esp", "sort_temperature", x) for x in (0, -1e-3, NOT_A_NUMBER, INFINITE)],
        *[("esp", "min_sort_temperature", x) for x in (0, -1e-9, NOT_A_NUMBER, INFINITE)],
        *[("esp", "anneal", x) for x in (0, -0.5, 1.01, NOT_A_NUMBER, INFINITE, "0.8")],
        *[("lot", "mass_temperature", x) for x in (0, -1.0, NOT_A_NUMBER, INFINITE)],
        ("esp", "slice_inverse_temperature", -1),
        ("esp", "slice_inverse_temperature", NOT_A_NUMBER),
        ("softmax", "prior", "rotary"),
        ("esp", "slicer", "random"),
        ("esp", "slicer", None),
        ("esp", "num_slices", 0),
        ("esp", "seed", -1),
        # of a wrong kind
        ("lot", "num_pivots", 2.5),
        ("sinkhorn", "num_updates", 2.5),
        ("esp", "num_slices", 1.5),
        ("esp", "slice_inverse_temperature", INFINITE),
        ("lot", "pivot_std", INFINITE),
        *[("lot", "conv_kernel", x) for x in (2, 4, 0, -1, 2.5)],
        ("esp", "hard", "yes"),
    ],
)
def test_value_outside_its_range_is_named(name, option, value):
    with pytest.raises(ValueError, match=rf"{name} attention: {option} .*{value}"):
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


@pytest.mark.parametrize("slicer", ["frozen", "learnable"])
def test_slices_are_stored_and_only_learnable_ones_are_learnt(slicer):
    mechanism = build_mechanism("esp", **CONTEXT, slicer=slicer)
    assert "slices" in mechanism.state_dict()
    assert [name for name, _ in mechanism.named_parameters()] == (["slices"] if slicer == "learnable" else [])
    norms = mechanism.directions(torch.zeros(1)).norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def test_axes_add_nothing_to_a_checkpoint():
    assert not build_mechanism("esp", **CONTEXT).state_dict()
    assert not build_mechanism("sinkhorn", **CONTEXT).state_dict()
    assert not build_mechanism("softmax", **CONTEXT).state_dict()


@pytest.mark.parametrize(
    ("options", "epsilon"),
    [({}, 0.1), ({"learn_epsilon": True}, 1.0), ({"learn_epsilon": True, "epsilon": 0.1}, 0.1), ({"epsilon": 2}, 2)],
)
def test_epsilon_of_sinkhorn_is_that_of_the_papers_if_fixed_and_of_softmax_if_learnt(options, epsilon):
    assert build_options("sinkhorn", **options).epsilon == epsilon


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


@pytest.mark.parametrize("name", MECHANISMS)
def test_differential_needs_pairs_of_heads(name):
    with pytest.raises(ValueError, match="even, got 3"):
        build_differential(name, num_heads=3, head_dim=HEAD_DIM)


def test_differential_takes_flags_and_layer_from_its_mechanism():
    for name, options in [("lot", {}), ("lot", {"query_updates": 1}), ("softmax", {})]:
        wrapped = build_differential(name, **CONTEXT, layer=2, **options)
        assert wrapped.couples_queries == wrapped.inner.couples_queries
        assert wrapped.layer == wrapped.inner.layer == 2
        assert wrapped.lambda_init == scheduled_lambda_init(2)
    assert build_differential("softmax", **CONTEXT, lambda_init=0.0).lambda_init == 0.0


def test_lambda_init_grows_with_depth():
    assert scheduled_lambda_init(0) == pytest.approx(0.2)
    assert scheduled_lambda_init(1) == pytest.approx(0.8 - 0.6 * math.exp(-0.3))
    assert scheduled_lambda_init(100) == pytest.approx(0.8)


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
    parameters = list(inspect.signature(constructor).parameters.values())
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
    with pytest.raises(TypeError):
        constructor(NUM_HEADS, HEAD_DIM)
