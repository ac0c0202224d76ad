"""The kernels against the slow twins, in Triton's interpreter, which must be chosen before Triton is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no triton: pip install -e '.[kernels-test]'"
)


def run(name, chosen):
    """Run the tests of a file that pytest's ``-m chosen`` selects, in a process with Triton's interpreter."""
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", chosen]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, str(here.with_name(name))],
        cwd=here.parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


files = pytest.mark.parametrize("name", ["interpreted.py", "interpreted_near_far.py"])


@files
def test_a_few_cases(name):
    run(name, "not slow")


@files
@pytest.mark.slow
def test_the_whole_grid(name):
    run(name, "slow")
