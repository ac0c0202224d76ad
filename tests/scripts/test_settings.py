"""What the variables of an experiment may be: a wrong one stops both commands before anything is set up or trained."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.models.pluggable_transformer import SIZES

ROOT = Path(__file__).resolve().parents[2]
WRONG = {
    "BACKBONES=diff": "BACKBONES: there is no 'diff'; use transformer, diff_transformer",
    "BACKBONES=transformer:calibrated": "BACKBONES: a backbone has no variants, as in 'transformer:calibrated'",
    "BACKBONES= ": "BACKBONES is blank; use transformer, diff_transformer",
    "MECHANISMS=lot lto": "MECHANISMS: there is no 'lto'; use esp, lot, set, sinkhorn, softmax",
    "MECHANISMS=lot\nlto": "MECHANISMS: there is no 'lto'",
    "MECHANISMS=*": "MECHANISMS: there is no '*'",
    "MECHANISMS=lot:../x": "MECHANISMS: 'lot:../x' is neither NAME nor NAME:VARIANT",
    "MECHANISMS=esp lot esp": "MECHANISMS: 'esp' is there twice",
    "MECHANISMS=sinkhorn:calibrated": "MECHANISMS: sinkhorn has nothing to calibrate",
    "SIZE=large": "SIZE: there is no 'large'; use small, iwslt_de_en",
    "DEVICE=gpu": "DEVICE: there is no 'gpu'; use cpu, cuda",
    "PRECISION=half": "PRECISION: there is no 'half'; use fp32, fp16, bf16",
    "DEVICE=cpu PRECISION=fp16": "PRECISION is fp16; on a CPU use fp32",
    "SEED=one": "SEED=one is not a whole number",
    "SEEDS=1 two": "SEEDS: 'two' is not a whole number",
    "SEEDS=1 2 1": "SEEDS: '1' is there twice",
    "SEEDS= ": "SEEDS is blank",
    "PROTOCOL=long": "PROTOCOL: there is no 'long'; use papers, quick",
    "BEST=ppl": "BEST: there is no 'ppl'; use bleu, loss",
    "FINETUNE_SCHEDULE=cosine": "FINETUNE_SCHEDULE: there is no 'cosine'; use inverse_sqrt, fixed",
    "LAMBDA_INIT=none": "LAMBDA_INIT=none is neither a number nor by-layer",
    "EPOCHS=-1": "EPOCHS=-1 is not a whole number",
    "EPOCHS=0": "EPOCHS=0 is too small; give at least 1",
    "FINETUNE_EPOCHS=1.5": "FINETUNE_EPOCHS=1.5 is not a whole number",
    "MAX_TOKENS=4k": "MAX_TOKENS=4k is not a whole number",
    "PATIENCE=long": "PATIENCE=long is not a whole number",
    "PATIENCE=0": "PATIENCE=0 is too small; give at least 1",
    "JOBS=all": "JOBS=all is not a whole number",
    "LR=fast": "LR=fast is not a number",
}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """The scripts and nothing else: whatever they would set up or train cannot be."""
    folder = tmp_path_factory.mktemp("scratch")
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    tools = folder / "bin"
    tools.mkdir()
    for name in ("basename", "bash", "cat", "dirname", "nproc", "sed"):
        (tools / name).symlink_to(shutil.which(name))
    return folder


def run(scratch, script, **variables):
    command = [shutil.which("bash"), str(scratch / "scripts" / script)]
    environment = {"PATH": str(scratch / "bin"), **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def split(assignments):
    """NAME=VALUE NAME=VALUE as a dictionary; the last value may hold spaces."""
    first, _, rest = assignments.partition(" PRECISION=")
    return dict([first.split("=", 1)] + ([("PRECISION", rest)] if rest else []))


@pytest.mark.parametrize("script", ["quickstart.sh", "reproduce_table.sh"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_variable_is_one_line_before_anything_is_done(wrong, script, scratch):
    result = run(scratch, script, **split(wrong))
    assert result.returncode == 2, result.stderr
    assert result.stdout == "" and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"{script}: error: {WRONG[wrong]}")
    assert sorted(path.name for path in scratch.iterdir()) == ["bin", "scripts"]


@pytest.mark.parametrize(
    "script, variables, expected",
    [
        ("pretrain.sh", {"BACKBONE": "lstm"}, "BACKBONE: there is no 'lstm'"),
        ("finetune.sh", {"SWAPPED": "a.pt", "ATTENTION": "lto"}, "ATTENTION: there is no 'lto'"),
        ("score.sh", {"CKPT": "a.pt", "BEAM": "0"}, "BEAM=0 is too small"),
        ("plug_and_play.sh", {"BASE": "a.pt", "ATTENTION": "lto"}, "ATTENTION: there is no 'lto'"),
    ],
)
def test_a_stage_alone_refuses_them_too(script, variables, expected, scratch):
    result = run(scratch, f"stages/{script}", **variables)
    assert result.returncode == 2 and result.stderr.startswith(f"{script}: error: {expected}")


def test_right_ones_are_let_through(scratch):
    """The next thing that is missing then is the environment."""
    right = {
        "BACKBONES": "diff_transformer transformer", "SIZE": "iwslt_de_en", "SEED": "0", "LR": "5e-4", "EPOCHS": "08",
        "MECHANISMS": "softmax set:wide lot lot:calibrated lot:released sinkhorn:pieces", "PRECISION": "bf16",
        "SINKHORN_PIECES_OPTIONS": "--sinkhorn-learn-epsilon", "DROPOUT": ".1",
        "SEEDS": "1 2 10", "LAMBDA_INIT": "0.8", "BEST": "loss", "FINETUNE_SCHEDULE": "fixed", "PROTOCOL": "quick",
    }  # fmt: skip
    result = run(scratch, "reproduce_table.sh", **right)
    assert result.stderr == "reproduce_table.sh: error: there is no .venv here; run 'bash scripts/setup.sh' first\n"


def test_names_are_those_of_the_package(scratch):
    command = "source scripts/lib/common.sh; source scripts/lib/settings.sh; echo ${MECHANISM_NAMES[@]}; check_settings"
    done = subprocess.run(["bash", "-c", command], cwd=scratch, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(MECHANISMS)
    offered = WRONG["SIZE=large"].partition("use ")[2].split(", ")
    assert sorted(offered) == sorted(size.removeprefix("_") for size in SIZES if size)


def test_an_old_bash_is_one_line(tmp_path):
    """Its version, which no test can change, goes by another name in a copy."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    common = tmp_path / "scripts" / "lib" / "common.sh"
    assert "BASH_VERSINFO[0]" in common.read_text()
    common.write_text(common.read_text().replace("BASH_VERSINFO", "STAND_IN").replace("BASH_VERSION", "NAME"))
    for script in ("quickstart.sh", "stages/score.sh", "setup.sh"):
        old = run(tmp_path, script, PATH=os.environ["PATH"], STAND_IN="3", NAME="3.2.57")
        expected = f"{Path(script).name}: error: this is bash 3.2.57; bash 4 or newer is needed, on Linux\n"
        assert (old.returncode, old.stdout, old.stderr) == (2, "", expected)
    new = run(tmp_path, "stages/score.sh", PATH=os.environ["PATH"], STAND_IN="4", NAME="4.0")
    assert "CKPT is not set" in new.stderr
