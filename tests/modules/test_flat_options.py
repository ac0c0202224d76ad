"""Flat options: generated for every field of every mechanism, read back, and refused with the reason."""

import argparse
import dataclasses
import re

import pytest

from fairseq_lot.attention.differential import Differential, scheduled_lambda_init
from fairseq_lot.attention.options import SITES
from fairseq_lot.attention.registry import MECHANISMS, build_options
from fairseq_lot.errors import InputError
from fairseq_lot.modules.flat_options import (
    DEFAULTS,
    add_attention_args,
    check_overrides,
    flat_name,
    mechanism_options,
    option_names,
    options_of,
    parse_bool,
    resolve_options,
)
from fairseq_lot.modules.sites import attention_sites, build_site_mechanism

FIELDS = [(name, field) for name, kind in MECHANISMS.items() for field in dataclasses.fields(kind.options_class)]
field_ids = [f"{name}-{field.name}" for name, field in FIELDS]
CONTEXT = {"num_heads": 4, "head_dim": 8, "dropout": 0.0}


def parser():
    made = argparse.ArgumentParser()
    add_attention_args(made)
    return made


def parse(*words):
    return parser().parse_args(words)


def mechanism_of(*words, site="encoder", layer=0):
    args = parse(*words)
    resolve_options(args)
    return build_site_mechanism(args, site=site, layer=layer, **CONTEXT)


def other_value(field):
    """A legal value that is not the default: its word on the command line, and the value in Python."""
    if field.metadata["choices"]:
        value = next(choice for choice in field.metadata["choices"] if choice != field.default)
    elif isinstance(field.default, bool):
        value = not field.default
    elif "int" in str(field.type):
        value = (field.default or 0) + 3
    elif field.metadata["maximum"] is not None:
        value = (field.default or 1.0) / 2
    else:
        value = (field.default or 0.0) + 0.5
    return str(value), value


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=field_ids)
def test_every_field_has_a_flat_option_and_help(name, field, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    flag = "--" + flat_name(name, field.name).replace("_", "-")
    assert flat_name(name, field.name) in option_names()
    described = parser().format_help().split("options:")[1]
    text = " ".join(re.search(rf"^  {flag} .*\n(?: {{4,}}.*\n)*", described, re.MULTILINE)[0].split())
    assert f"{name}: {field.metadata['help']}" in text
    assert field.default is None or text.endswith(f"(default: {field.default})")


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=field_ids)
def test_a_parsed_option_reaches_its_mechanism(name, field):
    word, value = other_value(field)
    args = parse("--" + flat_name(name, field.name).replace("_", "-"), word)
    assert mechanism_options(args, name) == {field.name: value}
    assert type(mechanism_options(args, name)[field.name]) is type(value)
    assert getattr(build_options(name, **mechanism_options(args, name)), field.name) == value
    for other in MECHANISMS.keys() - {name}:
        assert mechanism_options(args, other) == {}


def test_option_names_are_the_parser_s():
    names = {action.dest for action in parser()._actions} - {"help"}
    assert names == set(option_names())
    assert len(option_names()) == len(set(option_names()))
    assert set(DEFAULTS) <= names


@pytest.mark.parametrize("name", option_names())
def test_no_option_name_has_a_prefix_of_fairseq_s(name):
    assert not name.startswith(("encoder_", "decoder_", "quant_noise_"))


def test_options_have_no_default_of_their_own():
    assert set(vars(parse()).values()) == {None}
    for name in MECHANISMS:
        assert build_options(name, **mechanism_options(parse(), name)) == MECHANISMS[name].options_class()


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("False", False), ("1", True), ("0", False), ("yes", True), ("no", False)]
)
def test_a_boolean_option_takes_a_word_or_is_true_without_one(word, value):
    args = parse("--esp-hard", word, "--differential", word)
    assert args.esp_hard is args.differential is parse_bool(value) is value
    args = parse("--esp-hard", "--differential")
    assert args.esp_hard is args.differential is True


@pytest.mark.parametrize("words", [("--esp-hard", "maybe"), ("--lot-num-pivots", "1.5"), ("--lot-epsilon", "one")])
def test_a_word_of_the_wrong_kind_ends_with_code_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2 and words[0] in capsys.readouterr().err


def test_options_of_another_mechanism_in_a_checkpoint_change_nothing():
    assert mechanism_of("--attention", "lot", "--sinkhorn-epsilon", "0.5").options == build_options("lot")


@pytest.mark.parametrize(
    ("text", "sites"),
    [
        (None, ("encoder",)),
        ("encoder", ("encoder",)),
        ("encoder,cross", ("encoder", "cross")),
        (" decoder , encoder ", ("encoder", "decoder")),
        (["cross", "cross"], ("cross",)),
    ],
)
def test_sites_are_a_list(text, sites):
    assert attention_sites(argparse.Namespace(attention_sites=text)) == sites
    assert set(sites) <= set(SITES)


@pytest.mark.parametrize("sites", [",", [""], 1])
def test_a_value_that_names_no_site_is_refused(sites):
    with pytest.raises(ValueError, match="attention_sites must name some of encoder, cross, decoder, got"):
        attention_sites(argparse.Namespace(attention_sites=sites))


def test_an_unknown_site_is_named():
    with pytest.raises(ValueError, match="unknown attention site 'encodr'; choose from encoder, cross, decoder"):
        mechanism_of("--attention-sites", "encoder,encodr")


def test_sites_that_are_not_listed_keep_the_stock_attention():
    for site in ("cross", "decoder"):
        assert mechanism_of("--attention", "lot", site=site) is None
    assert mechanism_of("--attention", "sinkhorn", "--attention-sites", "cross", site="encoder") is None


ALIBI = "--attention softmax --softmax-prior alibi"
NEAR_FAR_ALIBI = "--attention near_far --near-far-prior alibi"
CONVOLUTION = "--attention lot --lot-query-updates 1 --lot-conv-kernel 3"
POSITIONAL_SET = "--attention set --set-positional-temperature 0.5"
COUPLED = "couples the queries.*future target tokens.*step by step; use --attention-sites encoder"
REFUSED = [
    ("--attention esp", "cross decoder", f"{COUPLED}$"),
    ("--attention lot --lot-query-updates 5", "cross decoder", f"{COUPLED} or --lot-query-updates 1$"),
    ("--attention near_far --near-far-num-updates 3", "cross decoder", f"{COUPLED} or --near-far-num-updates 1$"),
    ("--attention sinkhorn", "cross", f"{COUPLED} or --sinkhorn-num-updates 1$"),
    ("--attention sinkhorn", "decoder", f"{COUPLED}$"),
    ("--attention set", "decoder", f"{COUPLED}$"),
    ("--attention set", "cross", "same tokens"),
    (POSITIONAL_SET, "decoder", f"{COUPLED}$"),
    (POSITIONAL_SET, "cross", "same tokens"),
    (CONVOLUTION, "cross decoder", "mixes the values of neighbouring tokens.*future"),
]
plain_and_differential = pytest.mark.parametrize("differential", [(), ("--differential",)])


@pytest.mark.parametrize(
    ("words", "site", "reason"), [(words, site, why) for words, sites, why in REFUSED for site in sites.split()]
)
@plain_and_differential
def test_mechanisms_that_cannot_stand_in_the_decoder_are_refused_with_the_reason(words, site, reason, differential):
    sites = ("--attention-sites", f"encoder,{site}")
    with pytest.raises(ValueError, match=f"^{words.split()[1]} attention .*{reason}") as caught:
        mechanism_of(*words.split(), *sites, *differential, site=site)
    assert repr(site) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("words", [ALIBI, NEAR_FAR_ALIBI, "--attention sinkhorn --sinkhorn-prior alibi"])
def test_cross_attention_has_no_prior(words):
    words = (*words.split(), *(("--sinkhorn-num-updates", "1") if "sinkhorn" in words else ()), "--attention-sites")
    assert mechanism_of(*words, "encoder,cross", site="encoder").options.prior == "alibi"
    at_cross = mechanism_of(*words, "encoder,cross", site="cross")
    assert at_cross is None or at_cross.options.prior is None
    with pytest.raises(InputError, match="positions.*no meaning.*'cross' site"):
        mechanism_of(*words, "cross", site="cross")


@pytest.mark.parametrize(
    ("words", "site", "flag"),
    [
        (ALIBI, "encoder", "positional"),
        (ALIBI, "decoder", "positional"),
        (NEAR_FAR_ALIBI, "decoder", "positional"),
        (CONVOLUTION, "encoder", "mixes_values"),
        ("--attention set", "encoder", "tied_tokens"),
        (POSITIONAL_SET, "encoder", "tied_tokens"),
    ],
)
@plain_and_differential
def test_mechanisms_with_a_restriction_stand_where_it_allows(words, site, flag, differential):
    assert getattr(
        mechanism_of(*words.split(), *differential, "--attention-sites", "encoder,decoder", site=site).traits, flag
    )


@pytest.mark.parametrize("words", [(), ("--differential",), ("--lot-query-updates", "1")])
def test_lot_is_uncoupled_at_decoder_sites_only(words):
    options = ("--attention", "lot", "--attention-sites", "encoder,cross,decoder", *words)
    for site in ("cross", "decoder"):
        mechanism = mechanism_of(*options, site=site)
        assert not mechanism.traits.couples_queries
        mechanism = getattr(mechanism, "inner", mechanism)
        assert mechanism.traits.is_causal and mechanism.options.query_updates == 1
        assert mechanism.options.num_updates == build_options("lot").num_updates
    assert mechanism_of(*options, site="encoder").traits.couples_queries == ("1" not in words)


def test_near_far_has_the_expected_band_at_cross_alone():
    words = ("--attention", "near_far", "--attention-sites", ",".join(SITES))
    bands = {site: mechanism_of(*words, site=site).options.band for site in SITES}
    assert bands == {"encoder": "diagonal", "cross": "expected", "decoder": "diagonal"}


def test_the_expected_band_refuses_a_prior():
    with pytest.raises(InputError, match="band expected has no prior, got alibi"):
        mechanism_of(*NEAR_FAR_ALIBI.split(), "--near-far-band", "expected")


@pytest.mark.parametrize("site", SITES)
def test_differential_wraps_the_mechanism_of_every_site(site):
    mechanism = mechanism_of("--attention", "lot", "--differential", site=site, layer=2)
    assert isinstance(mechanism, Differential)
    assert type(mechanism.inner) is MECHANISMS["lot" if site == "encoder" else "softmax"]
    assert mechanism.lambda_init == scheduled_lambda_init(2)


def test_differential_takes_a_lambda_init_and_can_be_switched_off():
    assert mechanism_of("--differential", "--differential-lambda-init", "0.0").lambda_init == 0.0
    assert not isinstance(mechanism_of("--differential", "false"), Differential)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "0.8"])
def test_lambda_init_must_be_a_finite_number(value):
    args = argparse.Namespace(differential=True, differential_lambda_init=value)
    resolve_options(args)
    with pytest.raises(ValueError, match="differential_lambda_init must be a finite number, got"):
        build_site_mechanism(args, site="encoder", layer=0, **CONTEXT)


def test_options_count_only_where_the_attention_is_listed():
    assert not mechanism_of(*ALIBI.split(), "--differential", site="cross").traits.positional


@pytest.mark.parametrize("name", MECHANISMS)
def test_resolving_writes_the_options_of_the_chosen_mechanism(name):
    args = parse("--attention", name, "--lot-num-pivots", "7", "--sinkhorn-epsilon", "0.5", "--esp-hard")
    options = build_options(name, **mechanism_options(args, name))
    before = vars(args).copy()
    resolve_options(args)
    assert args.attention_sites == DEFAULTS["attention_sites"] and args.differential is False
    assert build_options(name, **mechanism_options(args, name)) == options
    for field in dataclasses.fields(options):
        assert getattr(args, flat_name(name, field.name)) == getattr(options, field.name)
    chosen = {flat_name(name, field.name) for field in dataclasses.fields(options)}
    assert all(getattr(args, key) == value for key, value in before.items() if key not in chosen | set(DEFAULTS))


def test_resolving_refuses_a_wrong_value():
    with pytest.raises(ValueError, match="lot attention: epsilon"):
        resolve_options(parse("--attention", "lot", "--lot-epsilon", "0"))
    with pytest.raises(ValueError, match="differential must be true or false, got 'false'"):
        resolve_options(argparse.Namespace(attention="lot", differential="false"))  # a word, from --model-overrides


def test_resolving_writes_a_default_that_depends_on_another_option():
    for words, epsilon in (((), 0.1), (("--sinkhorn-learn-epsilon",), 1.0)):
        args = parse("--attention", "sinkhorn", *words)
        resolve_options(args)
        assert args.sinkhorn_epsilon == epsilon and args.sinkhorn_learn_epsilon is bool(words)
    older = argparse.Namespace(attention="sinkhorn", sinkhorn_epsilon=0.1, sinkhorn_num_updates=15)
    assert build_options("sinkhorn", **mechanism_options(older, "sinkhorn")) == build_options("sinkhorn")


@pytest.mark.parametrize("name", [*option_names(), "attention_dropout", "dropout", "lottery", "encoder_layers"])
def test_known_overrides_and_names_unlike_ours_pass(name):
    check_overrides([name])


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("attention_site", "attention_sites"),
        ("differential_lambda", "differential_lambda_init"),
        ("lot-num-pivots", "lot_num_pivots"),
        *((f"{mechanism}_magic", options_of(mechanism)[0]) for mechanism in MECHANISMS),
    ],
)
def test_an_unknown_override_that_looks_like_ours_is_refused(name, known):
    with pytest.raises(ValueError, match=f"no option '{name}' to override; .* are .*{known}") as caught:
        check_overrides(["dropout", name])
    assert "\n" not in str(caught.value)
