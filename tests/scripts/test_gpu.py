"""The scripts of a GPU day: with stand-ins for what takes long, and for good on the CPU."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DATA_FILES = [
    *(f"{split}.de-en.{language}.{kind}" for split in ("train", "valid", "test") for language in ("de", "en")
      for kind in ("bin", "idx")),
    "dict.de.txt", "dict.en.txt", "sentencepiece.bpe.model", "text/test.de", "text/test.en", "vocab_size",
    "description.txt",
]  # fmt: skip


@pytest.fixture(scope="module")
def smoke():
    spec = importlib.util.spec_from_file_location("smoke", ROOT / "scripts" / "gpu" / "smoke.py")
    module = importlib.util.module_from_spec(spec)
    path = sys.path[:]
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_an_error_is_allowed_what_the_cpu_and_a_rounding_have(smoke):
    exact = [torch.ones(4).double()] * 2
    usual = [x * 1.01 for x in exact]
    found = [exact[0] * 1.04, exact[1] * 1.05]
    assert smoke.judge(found, exact, usual, torch.float32) == ("4.0e-02", "FAILED: 5.0e-02, more than 4.0e-02")
    rounded = [x * 1.0009 for x in exact]
    assert smoke.judge(rounded, exact, exact, torch.float16) == ("9.0e-04", "9.0e-04")
    assert all("FAILED" in said for said in smoke.judge(rounded, exact, exact, torch.float32))
    assert "FAILED" in smoke.judge([exact[0] * torch.nan], exact[:1], usual[:1], torch.float32)[0]


@pytest.mark.slow
def test_the_smoke_test_sees_a_fault(smoke, monkeypatch, capsys):
    assert smoke.main(["--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "| lot, causal" in said and "not run: " in said and said.endswith("0 of 25 failed\n")
    real, calls = smoke.results, []

    def broken(*arguments):
        """The gradients of softmax, on the device and in float32 alone."""
        calls.append(arguments)
        values, grads = real(*arguments)
        return values, grads * (2 if len(calls) == 3 * 3 * 4 + 1 else 1)

    monkeypatch.setattr(smoke, "results", broken)
    assert smoke.main(["--device", "cpu"]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "FAILED" in line)
    assert line.split("|")[1:3] == [" softmax         ", " fp32      "]


def until(condition):
    """Wait for a condition; what takes longer than a minute has failed."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


class Scratch:
    """A copy of the scripts, in which stand-ins do what takes long."""

    def __init__(self, folder):
        self.root, self.work = folder, folder / "work"
        shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in DATA_FILES:
            path = folder / "data" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        (folder / "benchmarks.py").write_text(
            "import os, sys\n"
            "print(*sys.argv[1:], file=open('calls', 'a'))\n"
            "open(os.environ['WORK'] + '/tables.pt', 'w')\n"
            "if os.path.exists('broken'): sys.exit('no room')\n"
        )
        (folder / "bin").mkdir()
        self.stub(
            "scripts/reproduce_table.sh",
            'echo "table $DATA $SIZE $WORK $RESULTS" >>calls; while [ -e wait ]; do sleep 0.02; done',
        )
        (folder / "scripts" / "gpu" / "smoke.py").write_text("import os, sys\nsys.exit(os.path.exists('faulty'))\n")

    def stub(self, name, text):
        (self.root / name).write_text(f"#!/usr/bin/env bash\n{text}\n")

    def run(self, script, *arguments, **variables):
        environment = {
            "PATH": f"{self.root / 'bin'}:{BIN}:{os.environ['PATH']}", "VIRTUAL_ENV": "/some/environment",
            "DEVICE": "cpu", "DATA": "data", "WORK": str(self.work), "TOKENS": "64", "LENGTHS": "8 16", **variables,
        }  # fmt: skip
        command = ["bash", str(self.root / "scripts" / "gpu" / script), *arguments]
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)

    def at_work(self):
        return self.run("day.sh", "status").stdout.startswith("at work")

    def day(self, **variables):
        """Start it and wait for its end; returns the new lines of its log, without times."""
        log = self.work / "day.log"
        before = len(log.read_text().splitlines()) if log.exists() else 0
        done = self.run("day.sh", **variables)
        assert done.returncode == 0 and done.stdout.startswith("started"), done.stderr
        until(lambda: log.exists() and any(" the end" in line for line in log.read_text().splitlines()[before:]))
        until(lambda: not self.at_work())
        return [line.split(" ", 2)[2] for line in log.read_text().splitlines()[before:]]

    def calls(self):
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def scratch(tmp_path):
    return Scratch(tmp_path)


def test_a_day_is_run_once_and_brought_back(scratch, tmp_path):
    said = [line.partition(" after")[0] for line in scratch.day()]
    stages = ["smoke", "kernels", "models", "table"]
    assert said == [f"{stage}: {what}" for stage in stages for what in ("begun", "finished")] + ["the end"]
    layer, model, table = scratch.calls()
    assert "--tokens 64 --lengths 8 16 --device cpu --dtype float32 --peer plain-lot=scripts/gpu/peers/" in layer
    assert "efficient" not in layer  # it runs on GPUs alone
    assert model.startswith("--model lot_transformer_iwslt_de_en --out ") and "--lengths 8 16" in model
    assert table == f"table data iwslt_de_en {scratch.work}/table {scratch.work}/results.jsonl"
    assert all("finished before" in line for line in scratch.day()[:-1]) and len(scratch.calls()) == 3
    done = scratch.run("collect.sh", OUT=str(tmp_path / "back.tar.gz"))
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "back.tar.gz") as archive:
        names = set(archive.getnames())
    assert {"work/day.log", "work/machine.txt", "work/smoke.log", "work/table.done"} <= names
    assert (scratch.work / "tables.pt").exists() and not any(name.endswith(".pt") for name in names)


def test_what_fails_is_named_and_run_again(scratch):
    (scratch.root / "broken").touch()
    said = scratch.day()
    assert said[3] == f"kernels: failed: no room (whole log: {scratch.work}/kernels.log)"
    assert said[-1] == "the end; failed: kernels models; mend it, then the same call goes on from here"
    (scratch.root / "broken").unlink()
    said = [line.partition(" ")[0] + line.partition(" ")[2].split(" ")[0] for line in scratch.day()]
    assert said == ["smoke:finished", "kernels:begun", "kernels:finished", "models:begun", "models:finished",
                    "table:finished", "theend"]  # fmt: skip


def test_nothing_is_run_after_a_faulty_smoke_test(scratch):
    (scratch.root / "faulty").touch()
    assert [line.split(":")[0] for line in scratch.day()] == ["smoke", "smoke", "the end; failed"]
    assert scratch.calls() == []


def test_a_day_is_at_work_until_it_is_stopped(scratch):
    (scratch.root / "wait").touch()
    assert scratch.run("day.sh", "stop").stderr == f"day.sh: error: no day is at work in {scratch.work}\n"
    assert scratch.run("day.sh", STAGES="table").returncode == 0
    until(scratch.calls)
    assert scratch.at_work()
    second = scratch.run("day.sh")
    assert second.returncode == 2 and second.stderr.startswith("day.sh: error: a day is at work in")
    assert scratch.run("day.sh", "stop").returncode == 0
    until(lambda: not scratch.at_work())
    assert not (scratch.work / "table.done").exists()


@pytest.mark.parametrize(
    "arguments, variables, expected",
    [
        (["halt"], {}, "there is no 'halt'; use start, status, stop, smoke, kernels, models or table"),
        ([], {"STAGES": "smoke tables"}, "STAGES: there is no 'tables'; use smoke, kernels, models, table"),
        ([], {"DATA": "nowhere"}, "nowhere is not a data folder; "),
        ([], {"MECHANISMS": "lto"}, "MECHANISMS: there is no 'lto'"),
    ],
)
def test_a_wrong_word_is_one_line(arguments, variables, expected, scratch):
    done = scratch.run("day.sh", *arguments, **variables)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stdout == ""
    assert done.stderr.startswith(f"day.sh: error: {expected}")
    assert not (scratch.work / "day.log").exists()


def test_there_is_nothing_to_collect_before(scratch):
    done = scratch.run("collect.sh")
    assert (
        done.returncode == 2 and done.stderr == f"collect.sh: error: there is no day in {scratch.work}; give its WORK\n"
    )


PIP = """case "$*" in
    *--version) ;;
    *" wheel "*) while [ $# -gt 2 ]; do case $1 in
        --wheel-dir) mkdir -p "$2"; wheels=$2 ;;
        --requirement) cp "$2" "$wheels/packages" ;;
    esac; shift; done; echo "$2" >>"$wheels/packages" ;;
esac"""


def test_what_a_machine_without_a_network_needs_is_one_archive(scratch, tmp_path):
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    scratch.stub("bin/python", PIP)
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / ".gitignore").write_text("/data\n/*.tar\n")
    author = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    variables = {"PYTHON": str(tmp_path / "bin" / "python"), "OUT": str(tmp_path / "day.tar")}
    packed = {}
    for packages in ("", "bitarray hydra-core"):
        done = scratch.run("pack.sh", PACKAGES=packages, **variables)
        assert done.returncode == 0, done.stderr
        with tarfile.open(tmp_path / "day.tar") as archive:
            names = archive.getnames()
            packed[packages] = archive.extractfile("fairseq_lot/wheels/packages").read().decode().splitlines()
    assert {f"fairseq_lot/data-bin/data/{name}" for name in DATA_FILES} <= set(names)
    assert "fairseq_lot/.git/HEAD" in names and "fairseq_lot/scripts/gpu/day.sh" in names
    names = [line.split("==")[0] for line in packed["bitarray hydra-core"]]
    assert names == ["bitarray", "hydra-core", "fairseq"]
    names = [line.split("==")[0] for line in packed[""]]
    assert {"bitarray", "numpy", "sacrebleu", "fairseq"} <= set(names) and not {"torch", "pytest", "ruff"} & set(names)
    assert scratch.run("pack.sh", PACKAGES="numyp", **variables).stderr.startswith(
        "pack.sh: error: PACKAGES: there is no 'numyp'"
    )
    (tmp_path / "constraints.txt").write_text("")
    assert "only what is committed is packed" in scratch.run("pack.sh", **variables).stderr


@pytest.mark.slow
def test_an_environment_without_a_network(tmp_path):
    """From the packages of this one, which is what a machine with everything is; no wheel is needed."""
    for name in ("fairseq_lot", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (
        *ROOT.glob("fairseq_lot_compat.*"),
        *(ROOT / name for name in ("setup.py", "pyproject.toml", "README.md")),
    ):
        shutil.copy(path, tmp_path)

    def run(python):
        environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "HTTPS_PROXY": "http://127.0.0.1:9"}
        command = ["bash", str(tmp_path / "scripts" / "gpu" / "environment.sh")]
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=300)

    wrong = run("/no/python")
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1 and "has no torch" in wrong.stderr
    done = run(sys.executable)
    assert done.returncode == 0, done.stderr
    assert f"torch {torch.__version__}, " in done.stdout and done.stdout.startswith(".venv is set up: Python 3.")
    code = "import fairseq_lot, fairseq; print(fairseq_lot.__file__)"
    found = subprocess.run(
        [str(tmp_path / ".venv" / "bin" / "python"), "-c", code], cwd="/", capture_output=True, text=True, check=True
    )
    assert found.stdout == f"{tmp_path}/fairseq_lot/__init__.py\n"
    assert run(sys.executable).stdout == done.stdout
    (tmp_path / ".venv" / "machine.txt").unlink()
    (tmp_path / ".venv" / "machine.log").unlink()
    assert "there is a .venv already" in run(sys.executable).stderr
