"""The jobs of an experiment: their number, their flags and their files."""

import json
import os
import shlex

import pytest

from fairseq_lot.experiment.plan import Plan, state_of
from fairseq_lot.experiment.spec import BASE, FINE_TUNED, FROM_SCRATCH, PLUG_AND_PLAY, Experiment

BASE_LABEL = (
    '{"dataset": "numbers", "experiment": "tiny", "backbone": "transformer", "system": "softmax", '
    '"settings": {"attention": "softmax"}, "training": {"size": "small", "pretrain": {"lr": 0.003, "warmup-updates": '
    '20, "dropout": 0.1, "max-tokens": 500, "max-epoch": 2}, "finetune": {"lr": 0.0003, "max-tokens": 500, '
    '"max-epoch": 1}, "backbone": {}}, "stage": "base", "seed": 1, "precision": "fp32"}'
)


@pytest.fixture
def plan(tiny):
    return lambda **changes: Plan(Experiment.of(tiny(**changes)))


def job(plan, system, stage=BASE, subset=""):
    return plan.job("1", "transformer", system, stage, subset)


def test_every_stage_of_every_system_has_a_row_for_every_test_set(plan):
    rows = plan(seeds=[1, 2], tests={"test": "short", "test1": "long"}).rows
    assert len(rows) == len(set(rows)) == 20
    assert rows[:4] == [
        f"work/seed{seed}/transformer/base/base{subset}" for seed in (1, 2) for subset in ("", ".test1")
    ]
    assert "work/seed2/transformer/ESP from scratch/from scratch.test1" in rows
    assert "work/seed1/transformer/LOT ε=2/plug-and-play" in rows
    tuned = [row for row in rows if "/fine-tuned" in row]
    assert {row.split("/")[3] for row in tuned} == {"softmax", "LOT ε=2"} and len(tuned) == 8


def test_systems_are_grouped_by_whether_they_are_pretrained_plugged_in_or_fine_tuned(plan):
    found = plan()
    assert (found.pretrained, found.plugged, found.tuned) == (
        ["base", "ESP from scratch"], ["LOT ε=2"], ["LOT ε=2", "softmax"],
    )  # fmt: skip
    assert (found.home, found.base) == ("work/seed{seed}/{backbone}", found.home + "/base/checkpoint_best.pt")
    assert (plan(work="w/").work, plan(finetune=None).tuned) == ("w", [])
    only_plugged = plan(systems={"LOT": {"attention": "lot", "finetune": False}, "SeT": {"attention": "set"}})
    assert (only_plugged.plugged, only_plugged.tuned) == (["LOT", "SeT"], ["SeT"])


def test_trainings_get_the_flags_of_experiment_backbone_and_system(plan):
    found = plan(precision="bf16", languages=["fr", "en"], backbones={"transformer": {"encoder-layers": 1}})
    shared = "--source-lang=fr --target-lang=en --bf16 --seed=1"
    flags = "--lr=0.003 --warmup-updates=20 --dropout=0.1 --max-tokens=500 --max-epoch=2"
    arch = "--arch=lot_transformer_small --encoder-layers=1"
    assert job(found, "base").pretraining == f"{arch} --attention=softmax {shared} {flags}"
    assert job(found, "ESP from scratch").pretraining == f"{arch} --attention=esp --esp-num-slices=2 {shared} {flags}"
    tuning = f"{arch} --attention=lot --lot-epsilon=2 {shared} --lr=0.0003 --max-tokens=500 --max-epoch=1"
    assert job(found, "LOT ε=2").finetuning == tuning
    differential = plan(backbones={"diff_transformer": {}}).job("1", "diff_transformer", "base")
    assert differential.pretraining.startswith("--arch=diff_transformer_small --attention=softmax ")


def test_flags_of_fine_tuning_of_a_system_win_over_those_of_the_experiment(plan):
    found = plan(systems={"LOT": {"attention": "lot", "finetune": {"lr": 0.5, "patience": 1}}})
    assert job(found, "LOT").finetuning.endswith(" --lr=0.5 --max-tokens=500 --max-epoch=1 --patience=1")


def test_swaps_get_the_flags_of_their_attention_and_calibration(plan):
    systems = {
        "drawn": {"attention": "esp", "sites": "cross"},
        "pieces": {"attention": "lot", "calibrate": {"with": "pieces", "steps": 5}},
        "text": {"attention": "lot", "calibrate": {"with": "text", "split": "valid"}},
    }
    found = plan(systems=systems, languages=["fr", "en"], data="my data")
    assert [job(found, name).plugging for name in systems] == [
        "--budget=none --attention=esp --attention-sites=cross --no-calibrate",
        "--budget=none --attention=lot --steps=5",
        "--budget=none --attention=lot '--calibrate=my data' --source-lang=fr --target-lang=en --split=valid",
    ]


def test_translating_gets_the_flags_of_test_set_precision_and_generation(plan):
    found = plan(precision="fp16", tests={"test": "short", "test1": "long"})
    assert job(found, "softmax", BASE).translating == "--fp16 --beam=1"
    assert job(found, "softmax", BASE, ".test1").translating == "--gen-subset=test1 --fp16 --beam=1"


def test_the_precision_of_an_experiment_wins_over_the_default(plan):
    assert plan(default_precision="fp16").half == ["--fp16"]
    assert plan(default_precision="fp16", precision="bf16").half == ["--bf16"]
    assert plan(default_precision="fp16", precision="fp32").half == plan().half == []


def test_a_row_depends_on_its_checkpoint_its_mark_and_its_base(plan):
    home = "work/seed1/transformer"
    found = {
        stage: job(plan(), name, stage)
        for name, stage in (
            ("base", BASE), ("ESP from scratch", FROM_SCRATCH), ("LOT ε=2", PLUG_AND_PLAY), ("LOT ε=2", FINE_TUNED)
        )
    }  # fmt: skip
    assert {stage: (job.scored, job.scored_done) for stage, job in found.items()} == {
        BASE: (f"{home}/base/checkpoint_best.pt", f"{home}/base.done"),
        FROM_SCRATCH: (f"{home}/ESP from scratch/checkpoint_best.pt", f"{home}/ESP from scratch.done"),
        PLUG_AND_PLAY: (f"{home}/LOT ε=2/swapped.pt", f"{home}/LOT ε=2/swapped.pt"),
        FINE_TUNED: (f"{home}/LOT ε=2/finetuned/checkpoint_best.pt", f"{home}/LOT ε=2/finetuned.done"),
    }
    assert found[BASE].of_base(".out") is None
    assert found[FINE_TUNED].of_base(".out") == f"{home}/base/base.out"
    assert job(plan(tests={"test1": "long"}), "LOT ε=2", PLUG_AND_PLAY, ".test1").of_base(".jsonl") == (
        f"{home}/base/base.test1.jsonl"
    )


def test_a_control_starts_from_the_base_and_others_from_their_swap(plan):
    control, other = (job(plan(), name) for name in ("softmax", "LOT ε=2"))
    home = "work/seed1/transformer"
    assert (control.start, control.start_done) == (f"{home}/base/checkpoint_best.pt", f"{home}/base.done")
    assert other.start == other.start_done == f"{home}/LOT ε=2/swapped.pt"


def test_labels_hold_the_settings_of_the_system_and_its_training(plan, tiny):
    found = plan()
    assert job(found, "base").label == BASE_LABEL
    assert [row.split("/")[-2] for row in found.rows].count("base") == 1
    label = json.loads(job(plan(tests={"test1": "long"}), "LOT ε=2", FINE_TUNED, ".test1").label)
    assert (label["dataset"], label["system"], label["stage"]) == ("numbers, long", "LOT ε=2", "fine-tuned")
    assert label["settings"] == tiny()["systems"]["LOT ε=2"]
    without = plan(systems={"LOT": {"attention": "lot"}})
    assert json.loads(job(without, "base").label)["system"] == "softmax"


def test_a_base_that_exists_already_is_used_and_not_trained(plan):
    found = plan(base="my/{backbone}{seed}.pt", seeds=[1, 2], report=True)
    assert found.pretrained == ["ESP from scratch"]
    assert job(found, "base").scored == job(found, "softmax").start == "my/transformer1.pt"
    assert json.loads(job(found, "base").label)["training"]["base"] == "my/{backbone}{seed}.pt"
    assert " --path my/transformer1.pt --compare " in found.reporting
    assert found.comparing_base == 'fairseq-lot check --path "$1" data --split test'


def test_the_base_is_trained_with_the_attention_of_the_control(plan):
    systems = {
        "ALiBi": {"attention": "softmax", "options": {"softmax-prior": "alibi"}},
        "softmax": {"attention": "softmax", "sites": "encoder,cross"},
        "LOT": {"attention": "lot"},
    }
    found = plan(control="ALiBi", systems=systems)
    assert (found.controls, found.plugged) == (["ALiBi"], ["softmax", "LOT"])
    assert " --attention=softmax --softmax-prior=alibi " in job(found, "base").pretraining
    assert job(found, "ALiBi").start == "work/seed1/transformer/base/checkpoint_best.pt"
    assert " --attention=softmax --softmax-prior=alibi " in job(found, "ALiBi").finetuning
    label = json.loads(job(found, "base").label)
    assert (label["system"], label["settings"]) == ("ALiBi", systems["ALiBi"])


def test_data_are_made_if_they_are_missing_and_every_split_is_checked(plan):
    checks = [
        f"fairseq-lot check 'my data' --split {split}{limits}"
        for split, limits in (
            ("train", ""),
            *(
                (name, " --max-source-positions=1024 --max-target-positions=1024")
                for name in ("valid", "test", "test1")
            ),
        )
    ]
    found = plan(data="my data", prepare="make it # so", tests={"test": "short", "test1": "long"})
    assert found.making_data.split("\n") == ["[ -d 'my data' ] || { make it # so", "}", *checks]
    missing = shlex.quote("my data is missing; make it with scripts/prepare_*.sh")
    assert plan(data="my data").making_data.startswith(f"[ -d 'my data' ] || {{ echo {missing} && exit 2\n}}\n")


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
def test_the_length_limit_of_a_split_is_the_lowest_of_all_calls_that_read_it(plan, split, flags, most):
    backbones = {"transformer": {"max-source-positions": 300}, "diff_transformer": {}}
    found = plan(backbones=backbones, pretrain=flags, generate={"max-source-positions": 200})
    limits = [f"--max-source-positions={most}", "--max-target-positions=1024"]
    assert found.limits(split) == (limits if most else [])
    chosen = plan(backbones=backbones, pretrain=flags, generate={"max-source-positions": 200, "lenpen": "chosen"})
    assert chosen.limits(split) == found.limits("test" if split == "valid" else split), "valid is translated, too"


def test_a_base_that_everything_waits_for_trains_on_two_threads(plan):
    plugged = {"softmax": {"attention": "softmax"}, "LOT": {"attention": "lot"}}
    assert plan(systems=plugged).training_threads == 2
    assert plan().training_threads == plan(systems=plugged, seeds=[1, 2]).training_threads == 1


def test_the_report_has_every_training_and_the_swaps_of_the_first_seed(plan):
    home = "work/seed{}/transformer"
    logs = [f"{home}/{name}/train.log" for name in ("base", "ESP from scratch")]
    tuned = [f"{home}/{name}/finetuned/train.log" for name in ("LOT ε=2", "softmax")]
    words = shlex.split(plan(seeds=[1, 2]).reporting)
    assert words == [
        "--logs", *(log.format(seed) for group in (logs, tuned) for seed in (1, 2) for log in group),
        "--path", "work/seed1/transformer/base/checkpoint_best.pt",
        "--compare", "work/seed1/transformer/LOT ε=2/swapped.pt", "--data", "data", "--split", "test",
    ]  # fmt: skip
    one = plan(base="b.pt", pretrain=None, finetune=None, systems={"softmax": {"attention": "softmax"}})
    assert one.reporting == "--path b.pt --data data --split test"


def test_a_replaced_file_is_noticed_even_if_the_new_one_is_older(tmp_path):
    path = tmp_path / "base.pt"
    path.write_text("one")
    os.utime(path, (2e9, 2e9))
    first = state_of(path)
    assert first == "(3, 2000000000)"
    os.utime(path, (1e9, 1e9))
    older = state_of(path)
    path.write_text("other")
    os.utime(path, (1e9, 1e9))
    assert len({first, older, state_of(path)}) == 3
