"""Experiments that are refused before anything is trained."""

import hashlib
import io
import json
import subprocess
import sys

import pytest
import yaml

from fairseq_lot.errors import InputError
from fairseq_lot.experiment.check import check, check_file, main
from fairseq_lot.experiment.spec import Experiment
from tests.conftest import ROOT


def check_entries(entries):
    check(Experiment.of(entries))


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.yaml")), ids=lambda path: path.name)
def test_configs_are_accepted(path):
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    check_entries(entries | ({"base": str(path)} if "base" in entries else {}))  # an existing file; it is not read


WRONG = [
    ({"backbones": {"transformer": {"differential-lambda": 1}}}, "pretrain (transformer): unrecognized arguments"),
    ({"pretrain": {"max-epochs": 3}}, "pretrain (transformer): unrecognized arguments: --max-epochs=3"),
    (
        {"finetune": {"lr-scheduler": "inverse_sqrt", "warmup-updates": 0}},
        "finetune (transformer): inverse_sqrt begins with a warm-up; give warmup-updates",
    ),
    ({"pretrain": {"warmup-updates": 0}}, "pretrain (transformer): inverse_sqrt begins with a warm-up"),
    ({"finetune": {"max-epoch": "x"}}, "finetune (transformer): argument --max-epoch"),
    ({"generate": {"beams": 3}}, "generate: fairseq-generate refuses its flags: unrecognized arguments: --beams=3"),
    (
        {"generate": {"lenpen": "best"}},
        "generate: fairseq-generate refuses its flags: argument --lenpen: invalid float",
    ),
    (
        {"generate": {"lenpen": "chosen", "beam": 1}},
        "generate: --lenpen chosen: a beam of 1 has one translation of a sentence; give --beam 2 or more, or a number",
    ),
    (
        {"generate": {"lenpen": "chosen", "lenpen-every": 0}},
        "generate: --lenpen-every must be a whole number of at least 1, got '0'",
    ),
    (
        {"generate": {"lenpen-every": 2}},
        "generate: fairseq-generate refuses its flags: unrecognized arguments: --lenpen-ev",
    ),
    ({"generate": {"lenpen": "chosen", "unnormalized": True}}, "generate: --lenpen chosen: with --unnormalized no"),
    ({"backbones": {"transformer": {"encoder-attention-heads": 3}}}, "systems.softmax: 3 attention heads do not"),
    ({"pretrain": {"share-all-embeddings": True, "decoder-embed-dim": 64}}, "systems.softmax: --share-all-emb"),
    ({"backbones": {"transformer": {"encoder-embed-path": "no.vec"}}}, "systems.softmax: [Errno 2] No such file"),
    ({"backbones": {"transformer": {"encoder-embed-dim": 0}}}, "systems.softmax: "),
    ({"pretrain": {"reset-dataloader": True}}, "pretrain: reset-dataloader has no place here, a training that was st"),
    ({"finetune": {"no-save-optimizer-state": True}}, "finetune: no-save-optimizer-state has no place here, a train"),
    ({"base": "no/{backbone}{seed}.pt"}, "base: no/transformer1.pt is not there, or a folder; train it, or say"),
    ({"base": "/dev"}, "base: /dev is not there, or a folder"),
    ({"base": "/dev/null", "seeds": [1, 2]}, "base: one checkpoint for several seeds; write {seed} into the path"),
    (
        {"base": "/dev/null", "backbones": {"transformer": {}, "diff_transformer": {}}},
        "base: one checkpoint for several b",
    ),
    ({"backbones": {"transformer": {"attention-sites": "cross"}}}, "backbones.transformer: attention-sites has no pl"),
    ({"backbones": {"transformer": {"lr": 1}}}, "backbones.transformer: lr has no place here, pretrain says it for"),
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
    ({"systems": {"softmax": {"attention": "lot"}}}, "systems.softmax: the base and the control are called so"),
    *[
        (
            {"control": "B", "systems": {"B": base, "S": {"attention": "lot", "calibrate": {"with": "pieces"}}}},
            "systems.S.calibrate: fits to softmax, and with a prior at the sites of B and at cross alone; name",
        )
        for base in (
            {"attention": "sinkhorn"},
            {"attention": "softmax", "options": {"softmax-prior": "alibi"}, "sites": "decoder"},
        )
    ],
    ({"control": "lot"}, "control: no system is called 'lot'; name one of softmax, "),
    (
        {"control": "S", "systems": {"S": {"attention": "lot", "finetune": {"lr": 1}, "from-scratch": True}}},
        "systems.S: the base is trained so; remove finetune, from-scratch",
    ),
]
WRONG_SYSTEMS = [
    ({"attention": "lott"}, "systems.S: unknown attention mechanism 'lott'; choose one of esp, lot"),
    ({"options": {"lot-num-pivots": "x"}}, "systems.S.options: argument --lot-num-pivots: invalid int value: 'x'"),
    ({"options": {"lot-num-pivots": 0}}, "systems.S: lot attention: num_pivots must be at least 1, got 0"),
    ({"options": {"lot-num-piv": 3}}, "systems.S.options: unrecognized arguments: --lot-num-piv=3"),
    ({"options": {"steps": 3}}, "systems.S.options: unrecognized arguments: --steps=3"),
    ({"options": {"esp-hard": True}}, "systems.S: option --esp-hard does not belong to lot attention"),
    ({"attention": "esp", "sites": "decoder"}, "systems.S: esp attention couples the queries"),
    ({"calibrate": {"with": "text", "steps": 0}}, "systems.S: --steps must be at least 1, got 0"),
    ({"calibrate": {"with": "text", "step": 9}}, "systems.S.calibrate: unrecognized arguments: --step=9"),
    ({"finetune": {"learning": 9}}, "systems.S.finetune: unrecognized arguments: --learning=9"),
    ({"finetune": {"lr-scheduler": "inverse_sqrt", "warmup-updates": 0}}, "systems.S.finetune: inverse_sqrt begins"),
    ({"finetune": {"lr": 1}, "from-scratch": True}, "systems.S.finetune: not used by a system from scratch"),
    ({"calibrate": {"with": "pieces"}, "from-scratch": True}, "systems.S.calibrate: not used by a system from"),
    ({"attention": "sinkhorn", "calibrate": {"with": "text"}}, "systems.S.calibrate: this attention has no param"),
    ({"calibrate": {"with": "pieces", "split": "valid"}}, "systems.S.calibrate: split has no place here"),
    ({"calibrate": {"with": "text", "longest": 512}}, "systems.S.calibrate: longest has no place here"),
    ({"options": {"attention": "esp"}}, "systems.S.options: attention has no place here"),
    ({"options": {"attention-sites": "decoder"}}, "systems.S.options: attention-sites has no place here"),
    ({"finetune": {"attention": "esp"}}, "systems.S.finetune: attention has no place here"),
    ({"attention": "softmax", "sites": "encoder"}, "systems.S: plain softmax is the control, the base fine-tuned as"),
    ({"finetune": {"no-save": True}}, "systems.S.finetune: no-save has no place here"),
    ({"finetune": {"memory-efficient-fp16": True}}, "systems.S: --memory-efficient-fp16 keeps no float32 copy"),
    (
        {"attention": "esp", "options": {"esp-anneal": 0.8}, "finetune": {"store-ema": True}},
        "systems.S: --store-ema would average the epoch that --esp-anneal counts",
    ),
    ({"finetune": {"reset-optimizer": True}}, "systems.S.finetune: reset-optimizer has no place here, a training"),
]


@pytest.mark.parametrize(
    ("changes", "expected"),
    WRONG + [({"systems": {"S": {"attention": "lot"} | system}}, expected) for system, expected in WRONG_SYSTEMS],
)
def test_entries_that_would_fail_later_are_refused(tiny, changes, expected):
    with pytest.raises(InputError) as caught:
        check_entries(tiny() | changes)
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def test_translating_takes_flags_of_the_task(tiny):
    check_entries(tiny(generate={"max-source-positions": 2048}))


def test_the_length_penalty_may_be_chosen_on_validation(tiny):
    check_entries(tiny(generate={"lenpen": "chosen"}))
    check_entries(tiny(generate={"lenpen": "chosen", "lenpen-every": 7}))


def test_finetune_of_a_system_is_refused_if_the_experiment_has_none(tiny):
    check_entries(tiny(finetune=None))
    with pytest.raises(InputError, match="^systems.S.finetune: not used where the experiment has no finetune"):
        check_entries(tiny(finetune=None, systems={"S": {"attention": "lot", "finetune": {"lr": 1}}}))


def test_softmax_may_be_a_system_if_the_control_is_another_one(tiny):
    systems = {
        "ALiBi": {"attention": "softmax", "options": {"softmax-prior": "alibi"}},
        "softmax": {"attention": "softmax", "sites": "encoder,cross", "finetune": {"lr": 1}},
    }
    check_entries(tiny(control="ALiBi", systems=systems))


def test_a_fit_to_a_prior_takes_its_sites_in_any_order(tiny):
    prior = {"options": {"softmax-prior": "alibi"}, "sites": "encoder,decoder"}
    fitted = {"attention": "near_far", "sites": "decoder, encoder", "calibrate": {"with": "pieces"}}
    check_entries(tiny(control="ALiBi", systems={"ALiBi": {"attention": "softmax", **prior}, "S": fitted}))


def test_pretrain_is_required_if_any_model_is_trained_from_scratch(tiny):
    plugged = {"softmax": {"attention": "softmax"}, "LOT": {"attention": "lot"}}
    check_entries(tiny(pretrain=None, base="/dev/null", systems=plugged))
    for changes, trained in (({"systems": plugged}, "the base"), ({"base": "/dev/null"}, "ESP from scratch")):
        with pytest.raises(InputError, match=f"^pretrain: missing, so nothing says how {trained} is trained"):
            check_entries(tiny(pretrain=None, **changes))


def test_a_training_without_warm_up_is_accepted_with_another_scheduler(tiny):
    check_entries(tiny(pretrain={"lr-scheduler": "fixed", "warmup-updates": 0}))


def test_a_checkpoint_in_fairseqs_default_folder_does_not_matter(tiny, tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_last.pt").write_text("of another model")
    monkeypatch.chdir(tmp_path)
    check_entries(tiny())


def test_a_folder_that_was_made_from_other_data_is_refused(tiny, tmp_path):
    for accepted in ("", "data\n"):  # an older version wrote an empty file
        (tmp_path / "data.done").write_text(accepted)
        check_entries(tiny(work=str(tmp_path)))
    (tmp_path / "data.done").write_text("other\n")
    with pytest.raises(InputError, match=f"^data: {tmp_path} was made from other, not data; give another folder"):
        check_entries(tiny(work=str(tmp_path)))


@pytest.mark.parametrize("trained", ["base", "S/finetuned"])
def test_data_that_were_made_again_are_refused(tiny, trained, tmp_path):
    data, base = tmp_path / "data", tmp_path / "work" / "seed1" / "transformer" / trained
    for folder in (data, base):
        folder.mkdir(parents=True)
    (data / "test.de-en.de.idx").touch()
    (data / "dict.de.txt").write_text("der 1\n")
    (base / "data.sum").write_text(hashlib.sha256(b"der 1\n").hexdigest() + "\n")
    entries = tiny(data=str(data), work=str(tmp_path / "work"))
    check_entries(entries)
    (data / "dict.de.txt").write_text("das 1\n")
    with pytest.raises(InputError, match=f"^data: {data} was made again since {base} was trained on it"):
        check_entries(entries)


def test_a_test_set_that_is_not_there_is_refused(tiny, tmp_path):
    entries = tiny(data=str(tmp_path / "data"), work=str(tmp_path), tests={"test": "short", "test1": "long"})
    check_entries(entries)  # the data are still to be made
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.fr-en.fr.idx").touch()
    with pytest.raises(InputError, match=f"^tests: {tmp_path}/data has no test1; leave it out, or remove .*done to"):
        check_entries(entries)


def refused_file(path, text):
    """The error of check_file for a file with this text, without its path."""
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        check_file(str(path))
    return str(caught.value).removeprefix(f"{path}: ")


def test_a_system_that_is_defined_twice_is_refused(tmp_path):
    systems = "systems:\n  A: {attention: lot}\n  A: {attention: esp}\n"
    text = "pretrain: &all {lr: 1}\nfinetune: {<<: *all, lr: 2}\n" + systems
    assert refused_file(tmp_path / "twice.yaml", text) == "A stands twice in line 4 and below; rename one"


def test_a_system_with_a_number_as_its_name_is_refused(tmp_path):
    """Paths have the number as text, so snakemake would not find the system and would train the base instead."""
    text = "systems:\n  8: {attention: lot}\n"
    assert refused_file(tmp_path / "number.yaml", text) == "8 in line 2 is no text; write '8'"


def test_the_command_prints_one_line(tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "good.yaml").write_text("size: small\n")
    monkeypatch.setattr(sys, "argv", ["check.py", str(tmp_path / "good.yaml")])
    for changes, code, error in (({}, 0, ""), ({"size": "huge"}, 2, "snakemake: error: size: should be ")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(tiny(**changes))))
        assert main() == code
        said = capsys.readouterr().err
        assert said.startswith(error) and len(said.splitlines()) == bool(code)


def test_a_process_of_its_own_prints_nothing(tiny):
    command = [sys.executable, "-m", "fairseq_lot.experiment.check"]
    done = subprocess.run(command, input=json.dumps(tiny()), capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
