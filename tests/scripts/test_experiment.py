"""Experiments: what is refused before anything is trained, what the plan is, jobs; then for good, killed on the way."""

import copy
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import yaml

from fairseq_lot.errors import InputError
from tests.end_to_end.conftest import BIN, ROOT
from tests.end_to_end.deadly import kill_when, start, until

pytest.importorskip("snakemake", reason="pip install fairseq-lot[experiment], which needs Python 3.11")
CONFIGS = sorted((ROOT / "config").glob("*.yaml"))
TINY = {
    "experiment": "tiny", "dataset": "numbers", "size": "small", "backbones": {"transformer": {}}, "seeds": [1],
    "pretrain": {"lr": 0.003, "warmup-updates": 20, "dropout": 0.1, "max-tokens": 500, "max-epoch": 2},
    "finetune": {"lr": 0.0003, "max-tokens": 500, "max-epoch": 1},
    "generate": {"beam": 1},
    "systems": {
        "softmax": {"attention": "softmax"},
        "LOT ε=2": {"attention": "lot", "options": {"lot-epsilon": 2}, "calibrate": {"with": "pieces", "steps": 5}},
        "ESP from scratch": {"attention": "esp", "options": {"esp-num-slices": 2}, "from-scratch": True},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def check():
    """workflow/check.py's function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "workflow")
        import check

        yield check.check


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configs_are_accepted(check, path):
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    check(config | ({"base": str(path)} if "base" in config else {}))  # any file: it is not read here


WRONG = [
    ({"size": "huge"}, "size: 'huge' is not one of ['small', 'medium', 'iwslt_de_en']"),
    ({"seeds": []}, "seeds: "),
    ({"epochs": 3}, "the experiment: Additional properties are not allowed ('epochs' was unexpected)"),
    ({"backbones": {"mamba": {}}}, "backbones: "),
    ({"backbones": {"transformer": {"differential-lambda": 1}}}, "pretrain, transformer: unrecognized arguments"),
    ({"pretrain": {"max-epochs": 3}}, "pretrain, transformer: unrecognized arguments: --max-epochs=3"),
    (
        {"finetune": {"lr-scheduler": "inverse_sqrt", "warmup-updates": 0}},
        "finetune, transformer: inverse_sqrt begins with a warm-up; give warmup-updates",
    ),
    ({"pretrain": {"warmup-updates": 0}}, "pretrain, transformer: inverse_sqrt begins with a warm-up"),
    ({"finetune": {"max-epoch": "x"}}, "finetune, transformer: argument --max-epoch"),
    ({"generate": {"beams": 3}}, "generate: unrecognized arguments: --beams=3"),
    ({"backbones": {"transformer": {"encoder-attention-heads": 3}}}, "systems, softmax: 3 attention heads do not"),
    ({"pretrain": {"share-all-embeddings": True, "decoder-embed-dim": 64}}, "systems, softmax: --share-all-emb"),
    ({"tests": {"valid": "first"}}, "tests: 'valid' does not match"),
    ({"systems": {"../x": {"attention": "lot"}}}, "systems: '../x' has one of / { } < > : , $ ` "),
    ({"systems": {"LOT <z>": {"attention": "lot"}}}, "systems: 'LOT <z>' has one of / { } < > : , $ ` "),
    ({"systems": {"x" * 101: {"attention": "lot"}}}, f"systems: '{'x' * 101}' has one of / "),
    ({"systems": {"ESP, 8 slices": {"attention": "esp"}}}, "systems: 'ESP, 8 slices' has one of"),
    ({"systems": {"base": {"attention": "lot"}}}, "systems: "),
    ({"work": ""}, "work: '' is empty or has one of { } < > in it; give another folder"),
    ({"work": "w{b}"}, "work: 'w{b}' is empty or has one of { } < > in it"),
    ({"seeds": [1.0]}, "seeds: 1.0 is not written as an integer; write 1"),
    ({"backbones": {"transformer": {"encoder-embed-path": "no.vec"}}}, "systems, softmax: [Errno 2] No such file"),
    ({"backbones": {"transformer": {"encoder-embed-dim": 0}}}, "systems, softmax: "),
    ({"pretrain": {"reset-dataloader": True}}, "pretrain: reset-dataloader has no place here, a training that was st"),
    ({"finetune": {"no-save-optimizer-state": True}}, "finetune: no-save-optimizer-state has no place here, a train"),
    ({"base": "{other}/base.pt"}, "base: '{other}/base.pt' has braces that are not {seed} or {backbone}"),
    ({"base": "no/{backbone}{seed}.pt"}, "base: no/transformer1.pt is not there, or a folder; train it, or say"),
    ({"base": "/dev"}, "base: /dev is not there, or a folder"),
    ({"base": "/dev/null", "seeds": [1, 2]}, "base: one checkpoint for several seeds; write {seed} into the path"),
    (
        {"base": "/dev/null", "backbones": {"transformer": {}, "diff_transformer": {}}},
        "base: one checkpoint for several b",
    ),
    ({"languages": ["de", "../x"]}, "languages, 1: "),
    ({"languages": ["de", "de"]}, "languages: "),
    (
        {"backbones": {"transformer": {"attention-sites": "cross"}}},
        "backbones, transformer: attention-sites has no place",
    ),
    (
        {"backbones": {"transformer": {"lr": 1}}},
        "backbones, transformer: lr has no place here, pretrain says it for all",
    ),
    ({"tests": {"test": "news", "test1": "news"}}, "tests: two are called 'news'"),
    ({"pretrain": {"attention": "lot"}}, "pretrain: attention has no place here, the experiment says it elsewhere"),
    ({"pretrain": {"seed": 9}}, "pretrain: seed has no place here"),
    ({"pretrain": {"fp16": True}}, "pretrain: fp16 has no place here"),
    ({"finetune": {"lot-num-pivots": 3}}, "finetune: lot-num-pivots has no place here"),
    ({"finetune": {"finetune-from-model": "x.pt"}}, "finetune: finetune-from-model has no place here"),
    ({"generate": {"gen-subset": "valid"}}, "generate: gen-subset has no place here"),
    ({"generate": {"nbest": 2}}, "generate: nbest has no place here, each sentence has one translation, which is"),
    ({"pretrain": {"disable-validation": True}}, "pretrain: disable-validation has no place here, the best checkpoint"),
    (
        {"pretrain": {"stop-time-hours": 1}},
        "pretrain: stop-time-hours has no place here, the best checkpoint of a whole",
    ),
    ({"systems": {"softmax": {"attention": "lot"}}}, "systems, softmax: the base and the control are called so"),
    *[
        (
            {"control": "B", "systems": {"B": base, "S": {"attention": "lot", "calibrate": {"with": "pieces"}}}},
            "systems, S, calibrate: fits to softmax, and with a prior at the sites of B and at cross alone; name",
        )
        for base in (
            {"attention": "sinkhorn"},
            {"attention": "softmax", "options": {"softmax-prior": "alibi"}, "sites": "decoder"},
        )
    ],
    ({"control": "lot"}, "control: no system is called 'lot'; name one of softmax, "),
    (
        {"control": "S", "systems": {"S": {"attention": "lot", "finetune": {"lr": 1}, "from-scratch": True}}},
        "systems, S: the base is trained so; remove finetune, from-scratch",
    ),
]
WRONG_SYSTEMS = [
    ({"attention": "lott"}, "systems, S: unknown attention mechanism 'lott'; choose one of esp, lot"),
    ({"options": {"lot-num-pivots": "x"}}, "systems, S: options: argument --lot-num-pivots: invalid int value: 'x'"),
    ({"options": {"lot-num-pivots": 0}}, "systems, S: lot attention: num_pivots must be at least 1, got 0"),
    ({"options": {"lot-num-piv": 3}}, "systems, S: options: unrecognized arguments: --lot-num-piv=3"),
    ({"options": {"steps": 3}}, "systems, S: options: unrecognized arguments: --steps=3"),
    ({"options": {"esp-hard": True}}, "systems, S: option --esp-hard does not belong to lot attention"),
    ({"attention": "esp", "sites": "decoder"}, "systems, S: esp attention couples the queries"),
    ({"calibrate": {"with": "paper"}}, "systems, S, calibrate, with: 'paper' is not one of ['pieces', 'text']"),
    ({"calibrate": {"with": "text", "steps": 0}}, "systems, S: --steps must be at least 1, got 0"),
    ({"calibrate": {"with": "text", "step": 9}}, "systems, S: calibrate: unrecognized arguments: --step=9"),
    ({"finetune": {"learning": 9}}, "systems, S, finetune: unrecognized arguments: --learning=9"),
    ({"finetune": {"lr-scheduler": "inverse_sqrt", "warmup-updates": 0}}, "systems, S, finetune: inverse_sqrt begins"),
    ({"finetune": True}, "systems, S, finetune: False was expected"),
    ({"finetune": {"lr": 1}, "from-scratch": True}, "systems, S, finetune: not used by a system from scratch"),
    ({"calibrate": {"with": "pieces"}, "from-scratch": True}, "systems, S, calibrate: not used by a system from"),
    ({"attention": "sinkhorn", "calibrate": {"with": "text"}}, "systems, S: calibrate: this attention has no param"),
    ({"calibrate": {"with": "text", "split": "vlaid"}}, "systems, S, calibrate, split: 'vlaid' is not one of"),
    ({"calibrate": {"with": "pieces", "split": "valid"}}, "systems, S, calibrate: split has no place here"),
    ({"calibrate": {"with": "text", "longest": 512}}, "systems, S, calibrate: longest has no place here"),
    ({"options": {"attention": "esp"}}, "systems, S, options: attention has no place here"),
    ({"options": {"attention-sites": "decoder"}}, "systems, S, options: attention-sites has no place here"),
    ({"finetune": {"attention": "esp"}}, "systems, S, finetune: attention has no place here"),
    ({"attention": "softmax", "sites": "encoder"}, "systems, S: plain softmax is the control, the base fine-tuned as"),
    ({"finetune": {"no-save": True}}, "systems, S, finetune: no-save has no place here"),
    ({"finetune": {"memory-efficient-fp16": True}}, "systems, S: --memory-efficient-fp16 keeps no float32 copy"),
    (
        {"attention": "esp", "options": {"esp-anneal": 0.8}, "finetune": {"store-ema": True}},
        "systems, S: --store-ema would average the epoch that --esp-anneal counts",
    ),
    ({"finetune": {"reset-optimizer": True}}, "systems, S, finetune: reset-optimizer has no place here, a training"),
    ({"scratch": True}, "systems, S: Additional properties are not allowed ('scratch' was unexpected)"),
]


@pytest.mark.parametrize(
    ("changes", "expected"),
    WRONG + [({"systems": {"S": {"attention": "lot"} | system}}, expected) for system, expected in WRONG_SYSTEMS],
)
def test_what_would_fail_later_is_refused(check, changes, expected):
    with pytest.raises(InputError) as caught:
        check({**TINY, "data": "data", "work": "work", **changes})
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def test_flags_of_the_task_are_those_of_translating_too(check):
    check({**TINY, "data": "data", "work": "work", "generate": {"max-source-positions": 2048}})


@pytest.mark.parametrize(
    ("split", "flags", "most"),
    [
        ("train", {}, None),
        ("valid", {}, 300),
        ("valid", {"skip-invalid-size-inputs-valid-test": True}, None),
        ("test", {"skip-invalid-size-inputs-valid-test": True}, 200),
        ("test1", {"max-source-positions": 100}, 100),
    ],
)
def test_sentences_are_as_long_as_every_call_takes_that_reads_them(check, split, flags, most):
    from check import lengths

    backbones = {"transformer": {"max-source-positions": 300}, "diff_transformer": {}}
    config = TINY | {"backbones": backbones, "pretrain": flags, "generate": {"max-source-positions": 200}}
    limits = [f"--max-source-positions={most}", "--max-target-positions=1024"]
    assert lengths(config, split) == (limits if most else [])


def test_a_system_that_stands_twice_is_refused(tmp_path):
    config = tmp_path / "twice.yaml"
    systems = "systems:\n  A: {attention: lot}\n  A: {attention: esp}\n"
    config.write_text("pretrain: &all {lr: 1}\nfinetune: {<<: *all, lr: 2}\n" + systems)
    assert refusal_of(config) == "A stands twice in line 4 and below; rename one"


def test_a_system_that_is_called_by_a_number_is_refused(tmp_path):
    """snakemake would not find it under the text that paths have, and train the base in its place."""
    config = tmp_path / "number.yaml"
    config.write_text("systems:\n  8: {attention: lot}\n")
    assert refusal_of(config) == "8 in line 2 is no text; write '8'"


def refusal_of(config):
    """The error of check.py with a config file, without its name."""
    words = [sys.executable, ROOT / "workflow" / "check.py", config]
    done = subprocess.run(words, input="{}", capture_output=True, text=True)
    before = f"snakemake: error: {config}: "
    assert done.returncode == 2 and done.stderr.startswith(before)
    return done.stderr.removeprefix(before).removesuffix("\n")


def test_a_system_is_not_fine_tuned_where_nothing_is(check):
    config = {name: value for name, value in TINY.items() if name != "finetune"} | {"data": "data", "work": "work"}
    check(config)
    config["systems"] = {"S": {"attention": "lot", "finetune": {"lr": 1}}}
    with pytest.raises(InputError, match="^systems, S, finetune: not used where the experiment has no finetune"):
        check(config)


def test_beside_another_control_softmax_is_a_system_as_others_are(check):
    config = TINY | {"data": "data", "work": "work", "control": "ALiBi"}
    config["systems"] = {
        "ALiBi": {"attention": "softmax", "options": {"softmax-prior": "alibi"}},
        "softmax": {"attention": "softmax", "sites": "encoder,cross", "finetune": {"lr": 1}},
    }
    check(config)


def test_a_fit_to_a_prior_is_at_its_sites_in_any_order(check):
    prior = {"options": {"softmax-prior": "alibi"}, "sites": "encoder,decoder"}
    fitted = {"attention": "near_far", "sites": "decoder, encoder", "calibrate": {"with": "pieces"}}
    systems = {"ALiBi": {"attention": "softmax", **prior}, "S": fitted}
    check(TINY | {"data": "data", "work": "work", "control": "ALiBi", "systems": systems})


def test_what_is_trained_needs_flags(check):
    config = {name: value for name, value in TINY.items() if name != "pretrain"} | {"data": "data", "work": "work"}
    plugged = {"softmax": {"attention": "softmax"}, "LOT": {"attention": "lot"}}
    check(config | {"base": "/dev/null", "systems": plugged})
    for changes, trained in (({"systems": plugged}, "the base"), ({"base": "/dev/null"}, "ESP from scratch")):
        with pytest.raises(InputError, match=f"^pretrain: missing, so nothing says how {trained} is trained"):
            check(config | changes)


def test_a_training_without_a_warm_up_has_another_scheduler(check):
    check({**TINY, "data": "data", "work": "work", "pretrain": {"lr-scheduler": "fixed", "warmup-updates": 0}})


def test_a_training_by_hand_in_the_folder_of_fairseqs_default_does_not_matter(check, tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_last.pt").write_text("of another model")
    monkeypatch.chdir(tmp_path)
    check({**TINY, "data": "data", "work": "work"})


def test_a_folder_that_was_made_from_other_data_is_refused(check, tmp_path):
    config = {**TINY, "data": "data", "work": str(tmp_path)}
    for accepted in ("", "data\n"):  # empty: made before it said which
        (tmp_path / "data.done").write_text(accepted)
        check(config)
    (tmp_path / "data.done").write_text("other\n")
    with pytest.raises(InputError, match=f"^data: {tmp_path} was made from other, not data; give another folder"):
        check(config)


@pytest.mark.parametrize("trained", ["base", "S/finetuned"])
def test_data_that_were_made_again_are_refused(trained, check, tmp_path):
    data, base = tmp_path / "data", tmp_path / "work" / "seed1" / "transformer" / trained
    for folder in (data, base):
        folder.mkdir(parents=True)
    (data / "test.de-en.de.idx").touch()
    (data / "dict.de.txt").write_text("der 1\n")
    (base / "data.sum").write_text(hashlib.sha256(b"der 1\n").hexdigest() + "\n")
    config = {**TINY, "data": str(data), "work": str(tmp_path / "work")}
    check(config)
    (data / "dict.de.txt").write_text("das 1\n")
    with pytest.raises(InputError, match=f"^data: {data} was made again since {base} was trained on it"):
        check(config)


def test_a_test_set_that_is_not_there_is_refused(check, tmp_path):
    config = {
        **TINY,
        "data": str(tmp_path / "data"),
        "work": str(tmp_path),
        "tests": {"test": "short", "test1": "long"},
    }
    check(config)  # the data are still to be made
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.fr-en.fr.idx").touch()
    with pytest.raises(InputError, match=f"^tests: {tmp_path}/data has no test1; leave it out, or remove .*done to"):
        check(config)


def experiment(folder, data, **changes):
    """The file of an experiment that works in a folder."""
    path = folder / "tiny.yaml"
    config = {**copy.deepcopy(TINY), "data": str(data), "work": str(folder / "work"), **changes}
    path.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    return path


def finish(*words, **variables):
    """The exit code of a command and what it said."""
    process = start(*words, stderr=subprocess.PIPE, **variables)
    shown, errors = process.communicate(timeout=300)
    return process.returncode, shown, errors


def snakemake(config, *flags, **variables):
    return finish("snakemake", "--configfile", config, "--nolock", *flags, **variables)


@pytest.mark.slow
def test_a_wrong_experiment_is_one_line_and_nothing_is_made(tmp_path):
    code, shown, errors = snakemake(experiment(tmp_path, "data", size="huge"), "--quiet", "all")
    assert code == 2 and shown == ""
    assert errors.splitlines()[-1] == "snakemake: error: size: 'huge' is not one of ['small', 'medium', 'iwslt_de_en']"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_the_plan_has_each_stage_once_and_scores_every_test_set(tmp_path):
    config = experiment(tmp_path, "data", seeds=[1, 2], tests={"test": "short", "test1": "long"})
    code, shown, errors = snakemake(config, "--dry-run", "--printshellcmds")
    assert code == 0, errors
    plan = shown + errors
    assert dict(re.findall(r"^(\w+) +(\d+)$", plan, re.MULTILINE)) == {
        "all": "1", "data": "1", "pretrain": "4", "plug_and_play": "2", "finetune": "4", "score": "20", "table": "1",
        "total": "33",
    }  # fmt: skip
    assert "--attention=lot --lot-epsilon=2 --steps=5" in plan, "the system's own options, where it is swapped"
    assert re.search(r"finetune.sh \S*'?.*LOT ε=2.*--attention=lot --lot-epsilon=2 --seed=2 --lr=0.0003", plan)
    assert re.search(r"pretrain.sh .*ESP from scratch' --arch=lot_transformer_small --attention=esp", plan)
    assert f"&& echo data >{tmp_path}/work/data.done" in plan
    assert "check data --split valid --max-source-positions=1024 --max-target-positions=1024" in plan
    scores = [line for line in plan.splitlines() if "scripts/score.sh" in line]
    assert len(scores) == 20 and sum('"numbers, short"' in line for line in scores) == 10
    for line in scores:
        assert ("--gen-subset=test1" in line) == ('"numbers, long"' in line) == ("base.test1" in line)
        assert ("/finetuned/checkpoint_best.pt" in line) == ('"stage": "fine-tuned"' in line)


def test_a_base_that_is_given_is_plugged_into_fine_tuned_and_scored(tmp_path):
    for seed in (1, 2):
        (tmp_path / f"mine{seed}.pt").touch()
    given = f"{tmp_path}/mine{{seed}}.pt"
    config = experiment(tmp_path, "data", seeds=[1, 2], base=given, report=True)
    code, shown, errors = snakemake(config, "--dry-run", "--printshellcmds")
    assert code == 0, errors
    plan = shown + errors
    assert dict(re.findall(r"^(given|pretrain|plug_and_play|finetune|score) +(\d+)$", plan, re.MULTILINE)) == {
        "given": "2", "pretrain": "2", "plug_and_play": "2", "finetune": "4", "score": "10",
    }  # fmt: skip
    assert "transformer/base/checkpoint_best.pt" not in plan
    for used in (r"fairseq-lot swap --path", r"finetune.sh", r"score.sh", r"fairseq-lot report .* --path"):
        assert re.search(rf"{used} {tmp_path}/mine1.pt", plan), used
    assert f'"base": "{given}"' in plan, "rows say which base"
    for seed in (1, 2):
        check = f"""fairseq-lot check --path "$1" data --split test' check {tmp_path}/mine{seed}.pt >/dev/null"""
        assert check in plan, "its dictionaries are compared with those of the data before anything is made"


def test_a_system_may_be_only_plugged_in(tmp_path):
    systems = {"LOT": {"attention": "lot", "finetune": False}, "SeT": {"attention": "set"}}
    code, shown, errors = snakemake(experiment(tmp_path, "data", systems=systems), "--dry-run", "--printshellcmds")
    assert code == 0, errors
    assert re.findall(r"scripts/finetune.sh .*/(\w+)/finetuned ", shown + errors) == ["SeT"]
    scores = re.findall(r'scripts/score.sh .*"system": "(\w+)".*"stage": "([\w-]+)"', shown + errors)
    assert sorted(scores) == [
        ("LOT", "plug-and-play"), ("SeT", "fine-tuned"), ("SeT", "plug-and-play"), ("softmax", "base"),
    ]  # fmt: skip


def test_a_control_other_than_plain_softmax_is_what_the_base_is_trained_as(tmp_path):
    systems = {
        "ALiBi": {"attention": "softmax", "options": {"softmax-prior": "alibi"}},
        "LOT": {"attention": "lot", "finetune": {"lr": 0.5}},
        "near_far": {"attention": "near_far", "calibrate": {"with": "text", "steps": 5}},
    }
    config = experiment(tmp_path, "data", systems=systems, control="ALiBi")
    code, shown, errors = snakemake(config, "--dry-run", "--printshellcmds")
    assert code == 0, errors
    plan = shown + errors
    assert re.search(r"pretrain.sh .*/base --\S+ --attention=softmax --softmax-prior=alibi", plan)
    assert re.search(r"finetune.sh \S*/base/checkpoint_best.pt .*/ALiBi/finetuned .*--softmax-prior=alibi", plan)
    assert sorted(re.findall(r"fairseq-lot swap .* --attention=(.*)", plan)) == [
        "lot --no-calibrate",
        "near_far --calibrate=data --steps=5",
    ]
    assert [rate for _, rate in sorted(re.findall(r"finetune.sh .*/(\w+)/finetuned .* --lr=(\S+)", plan))] == [
        "0.0003",
        "0.5",
        "0.0003",
    ], "a system's own flags win"
    assert '"system": "softmax"' not in plan
    scores = [line for line in plan.splitlines() if "scripts/score.sh" in line]
    assert len(scores) == 6 and sum('"system": "ALiBi"' in line for line in scores) == 2


@pytest.mark.slow
def test_another_base_is_noticed_also_an_older_one(tmp_path):
    check = tmp_path / "bin" / "fairseq-lot"  # says yes to any base
    check.parent.mkdir()
    check.write_text("#!/bin/sh\n")
    check.chmod(0o755)
    path = f"{check.parent}:{BIN}:{os.environ['PATH']}"
    base, done = tmp_path / "mine.pt", tmp_path / "work" / "seed1" / "transformer" / "base.done"
    base.write_text("one")
    done.parents[2].mkdir()
    (tmp_path / "work" / "data.done").write_text("data\n")
    config = experiment(tmp_path, "data", base=str(base))
    code, _, errors = snakemake(config, "--cores", "1", done, PATH=path)
    assert code == 0 and done.read_text().startswith(hashlib.sha256(b"one").hexdigest()), errors
    assert "given" not in "".join(snakemake(config, "--dry-run", done)[1:])
    base.write_text("other")
    os.utime(base, (1e9, 1e9))
    assert "given" in "".join(snakemake(config, "--dry-run", done)[1:])


def test_the_precision_of_an_experiment_wins_over_that_of_a_profile(tmp_path):
    words = ("--profile", "workflow/profiles/gpu", "--dry-run", "--printshellcmds")
    for changes, given, other in (({}, "--fp16", "--bf16"), ({"precision": "bf16"}, "--bf16", "--fp16")):
        code, shown, errors = snakemake(experiment(tmp_path, "data", **changes), *words)
        assert code == 0 and given in shown + errors and other not in shown + errors
        assert all(given in line for line in (shown + errors).splitlines() if "scripts/score.sh" in line)


@pytest.mark.skipif(bool(importlib.util.find_spec("snakemake_executor_plugin_slurm")), reason="the plugin is installed")
def test_a_cluster_without_its_plugin_is_one_line(tmp_path):
    words = ["scripts/reproduce_table.sh", experiment(tmp_path, "data"), "--profile", "workflow/profiles/slurm"]
    code, _, errors = finish("bash", *words)
    assert code == 2 and len(errors.splitlines()) == 1
    assert "run 'pip install snakemake-executor-plugin-slurm' in" in errors


def job(folder, *command):
    return ("bash", "scripts/lib/job.sh", "a title", folder / "a.log", *command)


def test_a_job_says_when_it_begins_and_ends_or_why_it_failed(tmp_path):
    code, shown, errors = finish(*job(tmp_path, "bash", "-c", "echo chatter; echo more >&2"))
    assert (code, shown) == (0, "") and re.fullmatch(r"\S+ a title: begun\n\S+ a title: done in 0 min \d s\n", errors)
    assert (tmp_path / "a.log").read_text() == "chatter\nmore\n"
    code, _, errors = finish(*job(tmp_path, "bash", "-c", "echo 'No space left'; echo; exit 3"))
    assert code == 3
    message = f"error: a title: No space left (whole log: {tmp_path}/a.log); mend it"
    assert errors.splitlines()[1].startswith(message)


def test_a_second_job_waits_for_a_first_whose_caller_was_killed(tmp_path):
    first = start(*job(tmp_path, "bash", "-c", "echo $$; sleep 4; echo first"))
    until(lambda: (tmp_path / "a.log").exists() and (tmp_path / "a.log").read_text())
    first.kill()
    assert "a title: waiting for an earlier call" in finish(*job(tmp_path, "echo", "second"))[2]
    assert (tmp_path / "a.log").read_text().splitlines()[1:] == ["first", "second"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A tiny data folder as fairseq-preprocess leaves it: subword-nmt, two dictionaries, no text; of documents."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").mkdir()
    for name, count in (("train", 200), ("valid", 20), ("test", 20)):
        for language, words in (("fr", "la maison est le numéro"), ("en", "the house is number")):
            lines = [f"{words} {number * number} ." for number in range(count)]
            (folder / "text" / f"{name}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    prefixes = {name.upper(): folder / "text" / name for name in ("train", "valid", "test")}
    code, _, errors = finish(
        "bash", "scripts/prepare_corpus.sh", SRC="fr", TGT="en", OUT=folder / "tiny", TOKENISED="yes",
        BPE="subword_nmt", JOINED="no", VOCAB_SIZE=40, WORKERS=1, DOCUMENTS="yes", **prefixes,
    )  # fmt: skip
    assert code == 0, errors
    for extra in ("text", "code", "settings"):
        (folder / "tiny" / extra).rename(folder / f"no {extra}")
    return folder / "tiny"


@pytest.mark.slow
def test_each_stage_by_hand(data, tmp_path):
    """pretrain.sh trains another attention than softmax; the references are the target side of the data."""

    def run(*words):
        code, shown, errors = finish("bash", *words)
        assert code == 0, shown + errors

    def label(stage):
        return json.dumps({"system": "set", "settings": {"attention": "set"}, "stage": stage})

    tiny = ("--max-tokens", "500", "--max-epoch", "1")
    run("scripts/pretrain.sh", data, tmp_path / "base", "--attention", "set", *tiny)
    base = tmp_path / "base/checkpoint_best.pt"
    swap = ("fairseq-lot", "swap", "--path", base, "--out", tmp_path / "lot.pt", "--attention", "lot")
    code, shown, errors = finish(*swap)
    assert code == 0, shown + errors
    run("scripts/finetune.sh", tmp_path / "lot.pt", data, tmp_path / "tuned", "--attention", "lot", *tiny)
    checkpoint = tmp_path / "base/checkpoint_best.pt"
    run("scripts/score.sh", checkpoint, data, tmp_path / "out/base", "-", label("from scratch"), "--beam", "1")
    base, tuned = tmp_path / "out/base.out", tmp_path / "tuned/checkpoint_best.pt"
    run("scripts/score.sh", tuned, data, tmp_path / "out/tuned", base, label("fine-tuned"), "--beam", "1")
    row = json.loads((tmp_path / "out/tuned.jsonl").read_text())
    assert row["sentences"] == 20 and row["tokenised"]["base"] is not None and row["seconds"] > 0
    assert (tmp_path / "out/tuned.en").read_text() == (data.parent / "text" / "test.en").read_text()
    run("scripts/score.sh", tuned, data, tmp_path / "out/four", "-", label("fine-tuned"), "--gen-subset", "test1")
    assert json.loads((tmp_path / "out/four.jsonl").read_text())["sentences"] == 5


@pytest.mark.slow
def test_an_experiment_with_a_test_set_more_is_done_in_one_call(data, tmp_path):
    prepared = experiment(tmp_path, data, prepare="false # a comment\n")
    code, _, errors = snakemake(prepared, "--cores", "1", tmp_path / "work" / "data.done")
    assert code == 0, errors
    config = experiment(tmp_path, data, tests={"test": "short", "test1": "long"})
    _, shown, errors = snakemake(config, "--dry-run")
    assert re.findall(r"^(data|pretrain|score|table) ", shown + errors, re.MULTILINE)[:3] == [
        "pretrain",
        "score",
        "table",
    ]


@pytest.mark.slow
def test_an_experiment_goes_on_after_a_full_disk_ctrl_c_and_kill_9(data, tmp_path):
    """Its table is that of one that ran through, and nothing is trained twice."""
    for name in ("stopped", "whole"):
        (tmp_path / name).mkdir()
        experiment(tmp_path / name, data)
    work = tmp_path / "stopped" / "work" / "seed1" / "transformer"

    def begin(name, *limit):
        words = ("bash", "scripts/reproduce_table.sh", tmp_path / name / "tiny.yaml", "--cores", 2)
        return start(*limit, *words, stderr=subprocess.PIPE)

    def stop(reached, how):
        """Stop it as soon as a file is there."""
        kill_when(lambda: list(work.glob(reached)), begin("stopped"), 900, how)

    # no file may be larger, as on a full disk
    full = begin("stopped", "bash", "-c", 'ulimit -f 2000; exec "$@"', "bash")
    _, shown = full.communicate(timeout=900)
    assert full.returncode != 0
    reason = re.search(r"error: transformer, seed 1, base: train: (.*) \(whole log: ", shown)[1]
    stop("base/checkpoint_last.pt", signal.SIGKILL)
    stop("base/base.part", signal.SIGINT)
    stop("LOT ε=2/.swapped.pt*", signal.SIGKILL)
    stop("*/finetuned/train.log", signal.SIGKILL)
    first = begin("stopped")
    until(lambda: list(work.glob("*/fine-tuned.part")), first, 900)
    second = begin("stopped")
    rows = []
    for process in (first, second, begin("whole")):
        shown, errors = process.communicate(timeout=1800)
        assert process.returncode == 0, errors
        rows.append(shown)
    assert "waiting" in errors or rows[0] == rows[1], "the second call waited and found everything done"
    found = [
        {row["system"] + row["stage"]: row | {"seconds": 0, "command": ""} for row in map(json.loads, lines)}
        for lines in ((tmp_path / name / "work" / "results.jsonl").open() for name in ("stopped", "whole"))
    ]
    assert found[0] == found[1] and len(found[0]) == 5
    for training in ("base", "ESP from scratch", "softmax/finetuned", "LOT ε=2/finetuned"):
        log = (work / training / "train.log").read_text()
        last = "002" if "finetuned" not in training else "001"
        ends = set(re.findall(rf"epoch {last} \| loss .*", log))  # fairseq may log a line twice, of the same wall time
        assert len(ends) == 1, "trained once"
    assert reason in (work / "base" / "train.out").read_text(), "later calls keep the log of earlier ones"
    base = tmp_path / "whole" / "work" / "seed1" / "transformer" / "base"
    base.with_suffix(".done").write_text("the sum of another base\n")
    _, shown, errors = snakemake(experiment(tmp_path / "whole", data), "--dry-run")
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", shown + errors, re.MULTILINE))
    assert jobs == {"plug_and_play": "1", "finetune": "2", "score": "5", "table": "1", "all": "1", "total": "10"}
    base.with_suffix(".done").write_text(subprocess.check_output(["sha256sum", base / "checkpoint_best.pt"], text=True))
    more = experiment(tmp_path / "whole", data, systems={**TINY["systems"], "LOT": {"attention": "lot"}})
    _, shown, errors = snakemake(more, "--dry-run")
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", shown + errors, re.MULTILINE))
    assert jobs == {"plug_and_play": "1", "finetune": "1", "score": "2", "table": "1", "all": "1", "total": "6"}
