"""setup.sh in a scratch repository, without the network: what it installs, what it skips and what it refuses."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import ROOT

FILES = ["setup.py", "pyproject.toml", "constraints.txt", "fairseq_lot_compat.py", "fairseq_lot_compat.pth",
         "scripts/lib/common.sh", "scripts/setup.sh"]  # fmt: skip
TOOLS = ["basename", "bash", "cat", "dirname", "find", "flock", "grep", "mv", "rm", "sh", "sha256sum", "tail", "tee",
         "test", "touch", "tr"]  # fmt: skip

# Stands in for pip: notes its arguments and "installs" what the final check imports.
PIP = """
import os, pathlib, sys
here = pathlib.Path(__file__).parents[1]
if sys.argv[1:2] == ["install"]:
    with open(here / "calls", "a") as calls:
        print(*sys.argv[1:], file=calls)
    if "fail" in os.environ.get("PIP_STUB", ""):
        sys.exit("ERROR: No space left on device")
    if "fairseq==0.12.2" in sys.argv:
        (here / "fairseq").mkdir(exist_ok=True)
        (here / "fairseq" / "__init__.py").touch()
    if "slow" in os.environ.get("PIP_STUB", ""):
        os.kill(os.getppid(), 15)
"""


def write_script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


class Scratch:
    """A copy of the files that setup.sh reads, with a PATH that has only the tools that it needs."""

    def __init__(self, folder):
        self.root, self.bin = folder / "root", folder / "bin"
        (self.root / "scripts" / "lib").mkdir(parents=True)
        self.bin.mkdir()
        for name in FILES:
            shutil.copy(ROOT / name, self.root / name)
        for name in TOOLS:
            (self.bin / name).symlink_to(shutil.which(name))
        write_script(self.bin / "g++", "exit 0")
        self.add_python("")

    def add_python(self, text):
        """Put a python3 on the PATH that runs ``text`` (shell; the code of ``-c`` is $2) and then the real one."""
        write_script(self.bin / "python3", f'{text}\nexec {sys.executable} "$@"')

    def setup(self, **variables):
        return self.run("scripts/setup.sh", **variables)

    def run(self, script, *words, **variables):
        command = ["bash", str(self.root / script), *words]
        environment = {"PATH": str(self.bin), **{name: str(value) for name, value in variables.items()}}
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)

    def refused(self, expected, **variables):
        result = self.setup(**variables)
        assert result.returncode == 2, result.stderr
        assert len(result.stderr.splitlines()) == 1 and expected in result.stderr
        assert not (self.root / ".venv").exists()
        return result


@pytest.fixture
def scratch(tmp_path):
    return Scratch(tmp_path)


@pytest.mark.parametrize(
    "python, variables, expected",
    [
        ("echo 3 9; exit", {}, "python3 is Python 3.9; set PYTHON to a Python 3.10 or newer"),
        ('case "$2" in *Python.h*) exit 1;; esac', {}, "-dev"),
        ('case "$2" in *venv*) exit 1;; esac', {}, "python3 has no module venv; install the Debian package python3."),
        ("", {"PYTHON": "/no/python"}, "'/no/python' is not a Python; set PYTHON"),
        ("", {"VIRTUAL_ENV": "/gone"}, "there is no bin/python in the active /gone"),
    ],
)
def test_a_missing_requirement_is_reported_in_one_line(scratch, python, variables, expected):
    scratch.add_python(python)
    scratch.refused(expected, **variables)


def test_a_missing_compiler_is_reported_in_one_line(scratch):
    (scratch.bin / "g++").unlink()
    assert scratch.refused("install the Debian package g++").stdout == ""


@pytest.fixture
def environment(tmp_path):
    """An active virtual environment whose pip is the stand-in; returns its path and its site-packages."""
    path = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    packages = next(path.glob("lib/python*/site-packages"))
    for name, text in (("pip/__init__.py", ""), ("pip/__main__.py", PIP), ("torch/__init__.py", "")):
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).write_text(text)
    for suffix in ("py", "pth"):
        shutil.copy(ROOT / f"fairseq_lot_compat.{suffix}", packages)
    (packages / "fairseq_lot_compat.py").write_text("")  # the real one would import numpy
    return path, packages


def calls(packages):
    path = packages / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_an_experiment_without_snakemake_is_refused_in_one_line(scratch, environment):
    """Snakemake needs Python 3.11, so that set-up leaves it out on 3.10."""
    (scratch.root / "scripts" / "reproduce_table.sh").write_bytes((ROOT / "scripts/reproduce_table.sh").read_bytes())
    result = scratch.run("scripts/reproduce_table.sh", "setup.py", VIRTUAL_ENV=environment[0])
    assert result.returncode == 2 and "there is no snakemake here" in result.stderr.splitlines()[-1]


def test_second_call_ends_at_once(scratch, environment):
    path, packages = environment
    first = scratch.setup(VIRTUAL_ENV=path)
    assert (first.returncode, first.stderr) == (0, "")
    assert [line[:3] for line in first.stdout.splitlines()] == ["1/3", "2/3", "3/3", "set"]
    project, fairseq = calls(packages)
    extras = "test,experiment" if sys.version_info >= (3, 11) else "test"
    assert project.endswith(f"-c {path}/fairseq_lot.constraints -e .[{extras}]")
    assert fairseq.endswith("--no-deps fairseq==0.12.2")
    assert (path / "fairseq_lot.constraints").read_text() == (ROOT / "constraints.txt").read_text()
    second = scratch.setup(VIRTUAL_ENV=path)
    assert (second.returncode, second.stdout, second.stderr) == (0, f"{path} is set up\n", "")
    assert len(calls(packages)) == 2


def test_of_two_calls_at_once_the_second_waits(scratch, environment):
    path, packages = environment
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: scratch.setup(VIRTUAL_ENV=path), range(2)))
    assert {call.stderr for call in both} <= {"", "another set-up is at work; waiting\n"}
    assert [call.returncode for call in both] == [0, 0] and len(calls(packages)) == 2


@pytest.mark.parametrize("version, stays", [("2.6.0", True), ("2.13.1+cpu", True), ("2.5.1", False)])
def test_torch_in_range_stays_in_an_active_environment(version, stays, scratch, environment):
    """Neither torch nor its requirements are pinned then, so pip leaves them alone."""
    path, packages = environment
    info = packages / f"torch-{version}.dist-info"
    info.mkdir()
    needs = "Requires-Dist: sympy==1.13.1\nRequires-Dist: typing-extensions>=4.10; python_version > '3'\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{needs}")
    assert scratch.setup(VIRTUAL_ENV=path).returncode == 0
    pinned = (path / "fairseq_lot.constraints").read_text()
    assert "\nnumpy==" in pinned
    for name in ("torch", "sympy", "typing_extensions"):
        assert (f"\n{name}==" in pinned) != stays


@pytest.mark.parametrize(
    "version, expected",
    [("0.12.2", "0.12.2 in {} already; it stays"), ("0.10.2", "0.10.2 in {} already; 0.12.2 is installed beside or")],
)
def test_another_fairseq_is_named(version, expected, scratch, environment):
    """pip keeps any fairseq that is called 0.12.2, such as its main branch."""
    path, packages = environment
    (packages / "fairseq").mkdir()
    (packages / "fairseq" / "__init__.py").touch()
    info = packages / f"fairseq-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fairseq\nVersion: {version}\n")
    notes = [line for line in scratch.setup(VIRTUAL_ENV=path).stdout.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1 and notes[0].startswith("note: there is fairseq " + expected.format(packages / "fairseq"))


def test_failing_pip_is_reported_in_one_line_and_the_next_call_continues(scratch, environment):
    path, packages = environment
    failed = scratch.setup(VIRTUAL_ENV=path, PIP_STUB="fail")
    assert failed.returncode == 2
    message = f"pip failed: ERROR: No space left on device (whole log: {path}/setup.log)"
    assert failed.stderr == f"setup.sh: error: {message}\n"
    assert len(calls(packages)) == 1
    assert scratch.setup(VIRTUAL_ENV=path).stdout.endswith("for the commands\n")


def test_killed_set_up_of_an_active_environment_is_resumed(scratch, environment):
    """A package that pip had not finished is removed; a finished one stays."""
    path, packages = environment
    assert scratch.setup(VIRTUAL_ENV=path, PIP_STUB="slow").returncode != 0
    for name in ("half", "whole"):
        (packages / f"{name}-1.0.dist-info").mkdir()
    (packages / "whole-1.0.dist-info" / "INSTALLER").write_text("pip")
    assert scratch.setup(VIRTUAL_ENV=path).returncode == 0
    assert [info.name for info in packages.glob("*.dist-info")] == ["whole-1.0.dist-info"]


def test_unfinished_environment_is_made_again(scratch, environment):
    """A .venv of a killed set-up, of other versions or of another folder is made from scratch; a finished one stays."""
    _, packages = environment
    folder = scratch.root / ".venv"
    copy = f"{shutil.which('cp')} -R {packages}/. .venv/lib/python3.*/site-packages"
    make = f'[ "$2" != venv ] || {{ {sys.executable} -m venv --without-pip --clear .venv && {copy}; exit; }}'
    scratch.add_python(make)

    assert scratch.setup(PIP_STUB="slow").returncode != 0
    (folder / "mark").touch()
    assert scratch.setup().stdout.endswith("for the commands\n")
    assert not (folder / "mark").exists()
    (folder / "mark").touch()
    assert scratch.setup().stdout == ".venv is set up\n"
    (scratch.root / "constraints.txt").write_text("torch==2.13.0\n")
    assert (folder / "mark").exists() and scratch.setup().returncode == 0
    assert not (folder / "mark").exists()
    (folder / "mark").touch()
    scratch.root = scratch.root.rename(scratch.root.with_name("moved"))
    assert scratch.setup().returncode == 0 and not (scratch.root / ".venv" / "mark").exists()
