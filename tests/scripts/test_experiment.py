"""Experiments: their plans, single jobs, and whole runs that are killed on the way."""

import copy
import datetime
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess

import pytest
import yaml

from tests.end_to_end.conftest import BIN
from tests.end_to_end.deadly import kill_when, start, until
from tests.experiment.conftest import TINY

pytest.importorskip("snakemake", reason="pip install fairseq-lot[experiment], which needs Python 3.11")


def experiment(folder, data, **changes):
    """Write the file of a tiny experiment that works in ``folder``; return its path."""
    path = folder / "tiny.yaml"
    config = {**copy.deepcopy(TINY), "data": str(data), "work": str(folder / "work"), **changes}
    path.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    return path


def finish(*words, **variables):
    """Run a command; return its exit code, standard output and standard error."""
    process = start(*words, stderr=subprocess.PIPE, **variables)
    shown, errors = process.communicate(timeout=300)
    return process.returncode, shown, errors


def snakemake(config, *flags, **variables):
    return finish("snakemake", "--configfile", config, "--nolock", *flags, **variables)


@pytest.mark.slow
def test_a_wrong_experiment_is_refused_in_one_line_and_nothing_is_made(tmp_path):
    code, shown, errors = snakemake(experiment(tmp_path, "data", size="huge"), "--quiet", "all")
    assert code == 2 and shown == ""
    assert errors.splitlines()[-1] == "snakemake: error: size: should be 'small', 'medium' or 'iwslt_de_en', not 'huge'"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.slow
def test_the_plan_has_each_stage_once_and_scores_every_test_set(tmp_path):
    generate = {"lenpen": "chosen"}
    config = experiment(tmp_path, "data", seeds=[1, 2], tests={"test": "short", "test1": "long"}, generate=generate)
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
        assert line.endswith(" --lenpen=chosen")
        assert ("--gen-subset=test1" in line) == ('"numbers, long"' in line) == ("base.test1" in line)
        assert ("/finetuned/checkpoint_best.pt" in line) == ('"stage": "fine-tuned"' in line)


def test_a_given_base_is_swapped_fine_tuned_and_scored(tmp_path):
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


@pytest.mark.slow
def test_another_base_is_noticed_even_if_its_file_is_older(tmp_path):
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


def test_the_gpu_profile_sets_fp16_and_a_date_can_name_an_experiment(tmp_path):
    words = ("--profile", "workflow/profiles/gpu", "--dry-run", "--printshellcmds")
    config = experiment(tmp_path, "data", experiment=datetime.date(2026, 1, 2))
    code, shown, errors = snakemake(config, *words)
    assert shown.count('"experiment": "2026-01-02"') == 5
    stages = re.findall(r"scripts/(?:pretrain|finetune|score).sh .*", shown + errors)
    assert code == 0 and len(stages) == 9 and all("--fp16" in line for line in stages)


@pytest.mark.skipif(bool(importlib.util.find_spec("snakemake_executor_plugin_slurm")), reason="the plugin is installed")
def test_slurm_without_its_plugin_is_refused_in_one_line(tmp_path):
    words = ["scripts/reproduce_table.sh", experiment(tmp_path, "data"), "--profile", "workflow/profiles/slurm"]
    code, _, errors = finish("bash", *words)
    assert code == 2 and len(errors.splitlines()) == 1
    assert "run 'pip install snakemake-executor-plugin-slurm' in" in errors


def job(folder, *command):
    """The words that run a command as a job with the log ``a.log``."""
    return ("bash", "scripts/lib/job.sh", "a title", folder / "a.log", *command)


def test_a_job_says_when_it_begins_and_ends_or_why_it_failed(tmp_path):
    code, shown, errors = finish(*job(tmp_path, "bash", "-c", "echo chatter; echo more >&2"))
    assert (code, shown) == (0, "") and re.fullmatch(r"\S+ a title: begun\n\S+ a title: done in 0 min \d s\n", errors)
    assert (tmp_path / "a.log").read_text() == "chatter\nmore\n"
    code, _, errors = finish(*job(tmp_path, "bash", "-c", "echo 'No space left'; echo; exit 3"))
    assert code == 3
    message = f"error: a title: No space left (whole log: {tmp_path}/a.log); fix the cause"
    assert errors.splitlines()[1].startswith(message)


def test_a_second_job_waits_for_a_first_whose_caller_was_killed(tmp_path):
    first = start(*job(tmp_path, "bash", "-c", "echo $$; sleep 4; echo first"))
    until(lambda: (tmp_path / "a.log").exists() and (tmp_path / "a.log").read_text())
    first.kill()
    assert "a title: waiting for an earlier call" in finish(*job(tmp_path, "echo", "second"))[2]
    assert (tmp_path / "a.log").read_text().splitlines()[1:] == ["first", "second"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A tiny data folder of documents as fairseq-preprocess makes it: subword-nmt, two dictionaries, no text."""
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
def test_each_stage_can_be_run_by_hand(data, tmp_path):
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
def test_data_that_exist_are_not_prepared_even_for_a_further_test_set(data, tmp_path):
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
    """Its rows are those of an uninterrupted run, and nothing is trained twice."""
    for name in ("stopped", "whole"):
        (tmp_path / name).mkdir()
        experiment(tmp_path / name, data)
    work = tmp_path / "stopped" / "work" / "seed1" / "transformer"

    def begin(name, *limit):
        words = ("bash", "scripts/reproduce_table.sh", tmp_path / name / "tiny.yaml", "--cores", 2)
        return start(*limit, *words, stderr=subprocess.PIPE)

    def stop(reached, how):
        """Start the experiment, and stop it as soon as a file exists."""
        kill_when(lambda: list(work.glob(reached)), begin("stopped"), 900, how)

    # a limit on the size of files stands in for a full disk
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
