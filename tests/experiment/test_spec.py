"""The definition of an experiment: accepted entries, and the errors of wrong ones."""

import pytest
import yaml

from fairseq_lot.errors import InputError
from fairseq_lot.experiment.spec import PLAIN, Experiment, System, words
from tests.conftest import ROOT

SYSTEM_NAME = r"""has one of / { } < > : , $ ` " \ in it, or a space around it, or begins with . or ', or has more"""
WRONG = [
    ({"size": "huge"}, "size: should be 'small', 'medium' or 'iwslt_de_en', not 'huge'"),
    ({"seeds": []}, "seeds: List should have at least 1 item, not 0"),
    ({"seeds": [1.0]}, "seeds.0: should be a valid integer, not 1.0"),
    ({"seeds": [True]}, "seeds.0: should be a valid integer, not True"),
    ({"seeds": [-1]}, "seeds.0: should be greater than or equal to 0, not -1"),
    ({"seeds": [1, 1]}, "seeds: 1 stands twice; remove one"),
    ({"finetun": {}}, "the experiment: unknown entry 'finetun'; did you mean finetune?"),
    (
        {"default_precision": "fp16"},
        "the experiment: unknown entry 'default_precision'; did you mean default-",
    ),
    ({"xyz": 3}, "the experiment: unknown entry 'xyz'; known are experiment, dataset, data, "),
    ({"dataset": None}, "the experiment: dataset is empty; give a value or remove it"),
    ({"experiment": "a/b"}, "experiment: 'a/b' is empty, has one of / { } "),
    ({"dataset": ""}, "dataset: '' is empty, has one of / { } "),
    ({"data": ""}, "data: '' is empty; give a text"),
    ({"report": "yes"}, "report: should be a valid boolean, not 'yes'"),
    ({"precision": "fp8"}, "precision: should be 'fp32', 'fp16' or 'bf16', not 'fp8'"),
    ({"backbones": {}}, "backbones: Dictionary should have at least 1 item"),
    ({"backbones": {"mamba": {}}}, "backbones: should be 'transformer' or 'diff_transformer', not 'mamba'"),
    ({"backbones": {"transformer": None}}, "backbones.transformer: should be a valid dictionary, not None"),
    ({"tests": {"valid": "first"}}, "tests: 'valid' is no test set of the data; they are called test, test1, test2"),
    ({"work": ""}, "work: '' is empty or has one of { } < > in it; give another folder"),
    ({"work": "w{b}"}, "work: 'w{b}' is empty or has one of { } < > in it"),
    (
        {"base": "{other}/base.pt"},
        "base: '{other}/base.pt' has braces that are not {seed} or {backbone}, or < or >; give another path",
    ),
    ({"languages": ["de", "../x"]}, "languages.1: '../x' is no name of a language"),
    ({"languages": ["de", "de"]}, "languages: 'de' stands twice"),
    ({"languages": ["de"]}, "languages: List should have at least 2 items"),
    ({"pretrain": {"--lr": 1}}, "pretrain: '--lr' is no flag; write its name in small letters, without the dashes"),
    ({"generate": {"beam": None}}, "generate.beam: the value of a flag is true, false, a number or a text, not None"),
    ({"generate": {"lenpen": float("nan")}}, "generate.lenpen: the value of a flag is true, "),
    ({"systems": {}}, "systems: Dictionary should have at least 1 item"),
    ({"systems": {"base": {"attention": "lot"}}}, "systems: 'base' is what the base is called; give another name"),
    ({"systems": {"S": "lot"}}, "systems.S: should be a valid dictionary, not 'lot'"),
    ({"systems": {"S": {}}}, "systems.S.attention: required, but not there"),
    *[
        ({"systems": {name: {"attention": "lot"}}}, f"systems: '{name}' {SYSTEM_NAME}")
        for name in ("../x", "LOT <z>", "x" * 101, "ESP, 8 slices")
    ],
]
WRONG_SYSTEMS = [
    ({"scratch": True}, "systems.S: unknown entry 'scratch'; did you mean from-scratch?"),
    ({"calibrate": {"with": "paper"}}, "systems.S.calibrate.with: should be 'pieces' or 'text', not 'paper'"),
    ({"calibrate": {"steps": 5}}, "systems.S.calibrate.with: required, but not there"),
    ({"calibrate": {"with": "text", "split": "vlaid"}}, "systems.S.calibrate.split: should be 'train' or 'valid', not"),
    ({"calibrate": {"with": "text", "steps": [1]}}, "systems.S.calibrate.steps: the value of a flag is"),
    (
        {"options": {"lot-epsilon": [1]}},
        "systems.S.options.lot-epsilon: the value of a flag is true, ",
    ),
    ({"options": None}, "systems.S: options is empty; give a value or remove it"),
    ({"sites": ["encoder"]}, "systems.S.sites: should be a valid string, not ['encoder']"),
    ({"sites": None}, "systems.S: sites is empty; give a value or remove it"),
    ({"finetune": True}, "systems.S.finetune: should be a valid dictionary, not True"),
    ({"finetune": {"lr": [1]}}, "systems.S.finetune.lr: the value of a flag is"),
    ({"finetune": {"LR": 1}}, "systems.S.finetune: 'LR' is no flag"),
    ({"from-scratch": 1}, "systems.S.from-scratch: should be a valid boolean, not 1"),
]


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.yaml")), ids=lambda path: path.name)
def test_configs_are_accepted(path):
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = Experiment.of(entries)
    assert found.model_dump(by_alias=True, exclude_unset=True) == entries


@pytest.mark.parametrize(
    ("changes", "expected"),
    WRONG + [({"systems": {"S": {"attention": "lot"} | system}}, expected) for system, expected in WRONG_SYSTEMS],
)
def test_a_wrong_entry_is_refused_in_one_line_with_its_place_and_value(tiny, changes, expected):
    with pytest.raises(InputError) as caught:
        Experiment.of(tiny() | changes)
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def test_long_values_are_cut(tiny):
    with pytest.raises(InputError, match=r"^size: should be .*, not 'x{79}\.\.\.$"):
        Experiment.of(tiny(size="x" * 1000))


def test_entries_that_are_left_out_have_defaults(tiny):
    found = Experiment.of(tiny(finetune=None, generate=None))
    assert (found.test_sets, found.finetune, found.generate, found.trained_as) == ({"test": ""}, None, {}, PLAIN)
    assert Experiment.of(tiny(control="LOT ε=2")).trained_as.attention == "lot"


def test_a_system_becomes_flags():
    system = System.model_validate({"attention": "lot", "options": {"lot-epsilon": 2}, "sites": "cross"})
    assert words(system.flags) == ["--attention=lot", "--attention-sites=cross", "--lot-epsilon=2"]
    assert words({"a": True, "b": False, "c": 0.5}) == ["--a", "--b=false", "--c=0.5"]


def test_a_calibration_becomes_flags(tiny):
    entries = {"attention": "lot", "calibrate": {"with": "text", "split": "valid", "steps": 5}}
    system = System.model_validate(entries)
    assert system.as_written == entries and system.calibrate.with_ == "text"
    assert words(system.calibrate.flags) == ["--split=valid", "--steps=5"]


def test_systems_with_the_same_settings_are_equal():
    assert System.model_validate({"attention": "softmax", "options": {}, "from-scratch": False}) == PLAIN
    assert System.model_validate({"attention": "softmax", "sites": "encoder"}) != PLAIN
