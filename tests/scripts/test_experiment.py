"""quickstart.sh and reproduce_table.sh: their plan with stand-ins for the stages, then for good, killed on the way."""

import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

# Notes its variables in the order of the calls, and leaves what the next stages want.
STAGE = """
line=
for name in BACKBONE ATTENTION OPTIONS CALIBRATE STAGE EPOCHS FINETUNE_EPOCHS; do line+="$name=${!name:-} "; done
echo "$line$(basename "$0")" >>"$CALLS"
case $0 in
    *plug_and_play.sh) mkdir -p "$(dirname "$OUT")" && touch "$OUT" ;;
    *train.sh | *tune.sh) mkdir -p "$SAVE" && touch "$SAVE/train.log" ;;
    *score.sh) touch "$RESULTS" ;;
esac
"""
FAIRSEQ_LOT = """#!/usr/bin/env bash
echo "$*" >>"$COMMANDS"
[ "$1" != table ] || echo "the table"
while [ $# -gt 1 ]; do [ "$1" != --out ] || touch "$2"; shift; done
"""


@pytest.fixture
def scratch(tmp_path):
    """The scripts with stand-ins for set-up, data, stages and fairseq-lot; returns what starts one of them."""
    scripts = tmp_path / "scripts"
    shutil.copytree(ROOT / "scripts", scripts)
    for name in ("pretrain", "plug_and_play", "finetune", "score"):
        (scripts / "stages" / f"{name}.sh").write_text(STAGE)
    (scripts / "setup.sh").write_text("")
    (scripts / "lib" / "check_options.py").write_text("import sys; sys.stdin.read()")  # has a test of its own
    (scripts / "prepare_synthetic.sh").write_text(
        "mkdir -p data-bin/synthetic/text; cd data-bin/synthetic; touch {train,valid,test}.de-en.{de,en}.{bin,idx} "
        "dict.{de,en}.txt sentencepiece.bpe.model text/test.{de,en} vocab_size description.txt\n"
    )
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "fairseq-lot").write_text(FAIRSEQ_LOT)
    (tools / "fairseq-lot").chmod(0o755)

    def run(script, **variables):
        environment = {
            "PATH": f"{tools}:{BIN}:{os.environ['PATH']}", "VIRTUAL_ENV": "/some/environment", "DEVICE": "cpu",
            "CALLS": str(tmp_path / "calls"), "COMMANDS": str(tmp_path / "commands"), **variables,
        }  # fmt: skip
        words = ["bash", str(scripts / script)]
        return subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True, timeout=60)

    return run


def test_quickstart_runs_the_plan_and_ends_with_table_report_and_next_command(scratch, tmp_path):
    done = scratch("quickstart.sh", JOBS="1", MECHANISMS="softmax lot:calibrated esp", EPOCHS="3")
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    base = "BACKBONE=transformer ATTENTION={} OPTIONS={} CALIBRATE={} STAGE={} EPOCHS=3 FINETUNE_EPOCHS=1 {}"
    esp = "--esp-num-slices 8"
    assert calls == [
        base.format("", "", "", "", "pretrain.sh"),
        base.format("softmax", "", "", "base", "score.sh"),
        base.format("softmax", "", "no", "", "finetune.sh"),
        base.format("softmax", "", "no", "fine-tuned", "score.sh"),
        base.format("lot", "", "text", "", "plug_and_play.sh"),
        base.format("lot", "", "text", "plug-and-play", "score.sh"),
        base.format("lot", "", "text", "", "finetune.sh"),
        base.format("lot", "", "text", "fine-tuned", "score.sh"),
        base.format("esp", esp, "no", "", "plug_and_play.sh"),
        base.format("esp", esp, "no", "plug-and-play", "score.sh"),
        base.format("esp", esp, "no", "", "finetune.sh"),
        base.format("esp", esp, "no", "fine-tuned", "score.sh"),
    ]
    work = "checkpoints/quickstart"
    table, report = (tmp_path / "commands").read_text().splitlines()
    assert table == f"table {work}/results.jsonl"
    for words in (
        f"--results {work}/results.jsonl", f"--path {work}/transformer/base/checkpoint_best.pt", "--tokenised",
        f"--compare {work}/transformer/esp/swapped.pt {work}/transformer/lot-calibrated/swapped.pt",
        f"{work}/transformer/base/train.log {work}/transformer/esp/finetuned/train.log", f"--out {work}/report.html",
    ):  # fmt: skip
        assert words in report
    assert "the table\n" in done.stdout and f"{work}/report.html\n" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].strip().startswith("fairseq-lot translate --path")
    assert [line.split(",")[0] for line in done.stderr.splitlines()][:2] == [
        "1/12 transformer: pretrain", "2/12 transformer: score the base"
    ]  # fmt: skip


def test_both_backbones_share_a_plan_and_their_bases_come_first(scratch, tmp_path):
    done = scratch("quickstart.sh", JOBS="2", MECHANISMS="softmax", BACKBONES="transformer diff_transformer")
    assert done.returncode == 0, done.stderr
    calls = [(words[0], words[-1]) for words in map(str.split, (tmp_path / "calls").read_text().splitlines())]
    for part, scripts in ((calls[:4], ["pretrain.sh", "score.sh"]), (calls[4:], ["finetune.sh", "score.sh"])):
        for backbone in ("transformer", "diff_transformer"):
            assert [script for name, script in part if name == f"BACKBONE={backbone}"] == scripts


def test_variants_have_options_of_their_own(scratch, tmp_path):
    variables = {"LOT_OPTIONS": "--lot-num-pivots 3", "LOT_WIDE_OPTIONS": "--lot-num-pivots 99"}
    done = scratch("quickstart.sh", MECHANISMS="lot lot:wide lot:released lot:other", JOBS="1", **variables)
    assert done.returncode == 0, done.stderr
    swaps = [line for line in (tmp_path / "calls").read_text().splitlines() if line.endswith("plug_and_play.sh")]
    expected = ["--lot-num-pivots 3", "--lot-num-pivots 99", "--lot-pivot-std 0.02", "--lot-num-pivots 3"]
    assert [re.search("OPTIONS=(.*) CALIBRATE", line)[1] for line in swaps] == expected


def test_variants_that_are_there_already(scratch, tmp_path):
    done = scratch("quickstart.sh", MECHANISMS="sinkhorn:soft sinkhorn:learnt lot:everywhere", JOBS="1")
    assert done.returncode == 0, done.stderr
    swaps = [line for line in (tmp_path / "calls").read_text().splitlines() if line.endswith("plug_and_play.sh")]
    assert [re.search("OPTIONS=(.*) STAGE", line)[1] for line in swaps] == [
        "--sinkhorn-epsilon 1 --sinkhorn-num-updates 3 CALIBRATE=no",
        "--sinkhorn-learn-epsilon true CALIBRATE=pieces",
        "--attention-sites encoder,cross,decoder --lot-num-pivots 128 CALIBRATE=pieces",
    ]


def test_several_seeds_share_a_plan_and_have_folders_of_their_own(scratch, tmp_path):
    done = scratch("quickstart.sh", MECHANISMS="softmax lot", JOBS="1", SEEDS="1 3")
    assert done.returncode == 0, done.stderr
    titles = [line.split(",")[:-1] for line in done.stderr.splitlines() if re.match(r"\d+/16 ", line)]
    assert [f"{number}/16 seed" in words[0] for number, words in enumerate(titles, start=1)] == [True] * 16
    scripts = [line.split()[-1] for line in (tmp_path / "calls").read_text().splitlines()]
    assert scripts[:4] == ["pretrain.sh", "score.sh"] * 2
    for seed in "13":
        home = tmp_path / "checkpoints" / "quickstart" / f"seed{seed}"
        assert (home / ".lock").exists() and (home / "transformer" / "base" / "train.log").exists()
        assert (home / "transformer" / "lot" / "swapped.pt").exists()
    report = (tmp_path / "commands").read_text().splitlines()[-1]
    assert "--path checkpoints/quickstart/seed1/transformer/base/checkpoint_best.pt" in report


def test_wrong_options_are_one_line_before_anything_is_trained(scratch, tmp_path):
    shutil.copy(ROOT / "scripts" / "lib" / "check_options.py", tmp_path / "scripts" / "lib")
    wrong = {"MECHANISMS": "softmax lot esp", "ESP_OPTIONS": "--esp-num-slice 8", "LOT_OPTIONS": "--lot-num-pivots 3"}
    done = scratch("quickstart.sh", **wrong)
    assert done.returncode == 2 and done.stdout == "", done.stdout
    expected = "options of 'transformer, esp: plug in': unrecognized arguments: --esp-num-slice 8"
    assert done.stderr == f"quickstart.sh: error: {expected}\n"
    assert not (tmp_path / "calls").exists() and not (tmp_path / "checkpoints").exists()


def checked(monkeypatch, capsys, fit="", **settings):
    """The exit code and the error of check_options.py for one stage."""
    settings = {"BACKBONE": "transformer", "OPTIONS": "", "CALIBRATE": "no", **settings}
    words = " ".join(shlex.quote(f"{name}={value}") for name, value in settings.items())
    plan = f"a\t1\tbase\tenv BACKBONE=transformer bash x.sh\n\nb\t1\tstage\tenv {words} bash y.sh\n"
    architectures = ["transformer=lot_transformer_small", "diff_transformer=diff_transformer_small"]
    monkeypatch.setenv("CALIBRATE_OPTIONS", fit)
    monkeypatch.setenv("CALLED_BY", "x.sh")
    monkeypatch.setattr(sys, "stdin", io.StringIO(plan))
    monkeypatch.setattr(sys, "argv", ["check_options.py", "--architectures", *architectures])
    code = runpy.run_path(str(ROOT / "scripts" / "lib" / "check_options.py"))["main"]()
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"ATTENTION": "lot", "OPTIONS": "--lot-num-pivots x"}, "argument --lot-num-pivots: invalid int value: 'x'"),
        ({"ATTENTION": "lot", "OPTIONS": "--lot-num-pivots 0"}, "lot attention: num_pivots must be at least 1, got 0"),
        ({"ATTENTION": "lot", "OPTIONS": "--lot-num-piv 3"}, "unrecognized arguments: --lot-num-piv 3"),
        ({"ATTENTION": "lot", "OPTIONS": "--steps 3"}, "unrecognized arguments: --steps 3"),
        ({"ATTENTION": "lot", "OPTIONS": "--esp-hard"}, "option --esp-hard does not belong to lot attention"),
        ({"ATTENTION": "esp", "OPTIONS": "--attention-sites decoder"}, "esp attention couples the queries"),
        ({"ATTENTION": "lot", "CALIBRATE": "text", "fit": "--steps 0"}, "--steps must be at least 1, got 0"),
        ({"ATTENTION": "lot", "CALIBRATE": "text", "fit": "--step 9"}, "unrecognized arguments: --step 9"),
    ],
)
def test_what_a_stage_would_refuse_is_refused(settings, expected, monkeypatch, capsys):
    code, error = checked(monkeypatch, capsys, **settings)
    assert code == 2 and len(error.splitlines()) == 1
    assert error.startswith(f"x.sh: error: options of 'stage': {expected}")


@pytest.mark.parametrize(
    "settings",
    [
        {"ATTENTION": "softmax"},
        {
            "ATTENTION": "lot",
            "OPTIONS": "--lot-num-pivots 3 --lot-epsilon 0.5",
            "CALIBRATE": "pieces",
            "fit": "--steps 9",
        },
        {"ATTENTION": "esp", "OPTIONS": "--esp-num-slices 8", "BACKBONE": "diff_transformer", "fit": "--not-used"},
    ],
)
def test_what_the_stages_take_is_let_through(settings, monkeypatch, capsys):
    assert checked(monkeypatch, capsys, **settings) == (0, "")


def test_a_failing_stage_is_one_line_and_there_is_no_table(scratch, tmp_path):
    failing = "echo chatter; echo 'No space left on device' >&2; exit 1"
    (tmp_path / "scripts" / "stages" / "pretrain.sh").write_text(failing)
    done = scratch("quickstart.sh")
    assert done.returncode == 1 and done.stdout == ""
    log = "checkpoints/quickstart/transformer/base.log"
    expected = f"quickstart.sh: error: transformer: pretrain: No space left on device (whole log: {log}); "
    assert done.stderr.splitlines()[-1].startswith(expected)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A tiny data folder, made by the script that makes IWSLT'14's."""
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text"
    text.mkdir()
    for name, count in (("train", 200), ("valid", 20), ("test", 20)):
        for language, words in (("de", "das haus ist nummer"), ("en", "the house is number")):
            lines = [f"{words} {number * number} ." for number in range(count)]
            (text / f"{name}.{language}").write_text("\n".join(lines) + "\n")
    script(
        "prepare_iwslt14.sh", TOKENISED=text, OUT=folder / "tiny", VOCAB_SIZE=60, NAME="tiny", WORKERS=1
    ).communicate()
    return folder / "tiny"


def script(name, prefix="", **variables):
    """Start a script, whose name arguments may follow, in a process group of its own."""
    environment = {
        **os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in variables.items()},
    }  # fmt: skip
    return subprocess.Popen(
        ["bash", "-c", f"{prefix} exec bash scripts/{name}"], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in the background it is ignored
    )  # fmt: skip


@pytest.mark.slow
def test_an_experiment_goes_on_after_a_full_disk_ctrl_c_and_kill_9(data, tmp_path):
    """Its table is that of one that ran through."""

    def start(work, prefix=""):
        return script(
            "reproduce_table.sh", prefix, DATA=data, SIZE="small", DEVICE="cpu", EPOCHS=2, FINETUNE_EPOCHS=1, JOBS=2,
            MAX_TOKENS=500, MECHANISMS="softmax lot", BACKBONES="transformer", BEAM=1, WORK=tmp_path / work,
            RESULTS=tmp_path / work / "results.jsonl",
        )  # fmt: skip

    def stop(reached, how):
        """Stop everything in the group with a signal as soon as a file is there."""
        process = start("stopped")
        end = time.monotonic() + 120
        while not list((tmp_path / "stopped").glob(reached)):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < end, f"there was no {reached}"
            time.sleep(0.02)
        os.killpg(process.pid, how)
        _, shown = process.communicate(timeout=60)
        assert process.returncode in (130, -signal.SIGINT, -how), shown

    full = start("stopped", "ulimit -f 2000;")  # no file may be larger, as on a full disk
    _, shown = full.communicate(timeout=300)
    assert full.returncode != 0 and "reproduce_table.sh: error: transformer: pretrain: " in shown.splitlines()[-1]
    stop("transformer/base/checkpoint_last.pt", signal.SIGKILL)
    stop("transformer/base/test.out.part", signal.SIGINT)
    stop("transformer/base.log", signal.SIGTERM)
    stop("transformer/lot/*.part", signal.SIGKILL)
    stop("transformer/*/finetuned/train.log", signal.SIGKILL)
    rows = []
    for work in ("stopped", "whole"):
        process = start(work)
        table, shown = process.communicate(timeout=600)
        assert process.returncode == 0, shown
        lines = (tmp_path / work / "results.jsonl").read_text().splitlines()
        rows.append({})
        for row in map(json.loads, lines):
            row.update(seconds=0, command="", commit="")
            rows[-1][row["mechanism"], row["stage"]] = row
        assert len(rows[-1]) == len(lines) == 4
        # a kill leaves at most a hidden part of what fairseq-lot was writing
        assert [path for path in (tmp_path / work).rglob("*.part") if not path.name.startswith(".")] == []
    assert rows[0] == rows[1]
    for training in ("base", "softmax/finetuned", "lot/finetuned"):  # the best by BLEU, as papers has it
        assert "| bleu " in (tmp_path / "whole" / "transformer" / training / "train.log").read_text()
    assert {row["protocol"] for row in rows[0].values()} == {"papers, EPOCHS=2 FINETUNE_EPOCHS=1 MAX_TOKENS=500"}


@pytest.mark.slow
def test_a_gpu_day_on_the_cpu(data, tmp_path):
    """What it would bring back, from a tiny corpus; it was killed on the way."""
    work = tmp_path / "day"
    variables = {
        "DATA": data, "SIZE": "small", "DEVICE": "cpu", "EPOCHS": 1, "FINETUNE_EPOCHS": 1, "MAX_TOKENS": 500, "BEAM": 1,
        "MECHANISMS": "lot", "BACKBONES": "transformer", "LENGTHS": 8, "TOKENS": 16, "WORK": work,
    }  # fmt: skip

    def day(command):
        process = script(f"gpu/day.sh {command}", **variables)
        said, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
        return said

    def until(reached):
        end = time.monotonic() + 400
        while not reached():
            assert time.monotonic() < end, day("status")
            time.sleep(0.1)

    day("start")
    until((work / "table" / "transformer" / "base" / "checkpoint_last.pt").exists)
    assert day("status").startswith("at work")
    day("stop")
    until(lambda: day("status").startswith("not at work"))
    assert not (work / "table.done").exists()
    day("start")
    until(lambda: (work / "day.log").read_text().count(" the end") == 1)
    assert " the end; failed" not in (work / "day.log").read_text()
    process = script("gpu/collect.sh", WORK=work, OUT=tmp_path / "back.tar.gz")
    assert process.communicate()[0].startswith(f"{tmp_path}/back.tar.gz is ready, ")
    with tarfile.open(tmp_path / "back.tar.gz") as archive:
        found = {name.removeprefix("day/"): archive.extractfile(name) for name in archive.getnames() if "." in name}
        rows = [json.loads(line) for line in found["results.jsonl"]]
        lengths = found["kernels-16/bench.csv"].read().decode()
    assert [row["stage"] for row in rows] == ["base", "plug-and-play", "fine-tuned"]
    tables = {"kernels-16/bench.md", "models-16/bench.csv", "smoke.log", "machine.txt"}
    assert tables | {"table/transformer/base/train.log", "table/transformer/lot/finetuned.out"} <= found.keys()
    assert all(f"\n{name}," in lengths for name in ("sdpa", "lot r=32", "plain-lot r=32", "flash r=32"))
    assert not any(name.endswith(".pt") for name in found)
