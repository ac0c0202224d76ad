"""Functions that start commands which kill themselves, or are killed, at a given moment."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

from tests.end_to_end.conftest import BIN, ROOT

# Python runs this at its start. DIE_AT=MOMENT:N kills the process when the moment comes for the N-th time (default: 1).
DEADLY = """
import builtins, io, os, shutil

moment, _, times = os.environ.get("DIE_AT", "").partition(":")
left = int(times or 1)
original_open = builtins.open


def due():
    global left
    left -= 1
    return left == 0


def die():
    os.kill(os.getpid(), 9)


def copyfile(source, target):  # writes half of the copy
    data = original_open(source, "rb").read()
    if not due():
        return original_open(target, "wb").write(data) and target
    with original_open(target, "wb") as file:
        file.write(data[: len(data) // 2])
    die()


class Half(io.FileIO):
    def write(self, data):
        super().write(bytes(data)[: len(data) // 2])
        die()


def open_(file, mode="r", *args, **kwargs):
    deadly = str(file).endswith("checkpoint_best.pt.tmp") and mode == "wb" and due()
    return Half(file, "wb") if deadly else original_open(file, mode, *args, **kwargs)


if moment == "copy":
    shutil.copyfile = copyfile
elif moment == "write":
    builtins.open = open_
elif moment:
    setattr(os, moment, lambda *args, **kwargs: die())
"""


def start(*words, stderr=subprocess.STDOUT, **variables):
    """Start a command in a process group of its own."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "VIRTUAL_ENV": sys.prefix, "PATH": f"{BIN}:{os.environ['PATH']}",
        **{name: str(value) for name, value in variables.items()},
    }  # fmt: skip
    return subprocess.Popen(
        [str(word) for word in words], env=environment, cwd=ROOT, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=stderr,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background processes ignore it
    )  # fmt: skip


def starter(folder):
    """A variant of :func:`start` whose commands kill themselves at the moment ``DIE_AT``."""
    (folder / "sitecustomize.py").write_text(DEADLY)
    return partial(start, PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]))


def finish(process, *codes):
    """Wait for a process, whose exit code must be in ``codes`` (default: 0); return its output."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode in (codes or (0,)), (process.returncode, output[-3000:])
    return output


def killed(process):
    """Wait for a process, which must have killed itself."""
    finish(process, -9, 137)


def until(condition, process=None, seconds=120):
    """Wait until a condition holds; fail if the process ends before."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def kill_when(condition, process, seconds=120, how=signal.SIGKILL):
    """Send a signal to a process and its children as soon as a condition holds."""
    until(condition, process, seconds)
    os.killpg(process.pid, how)
    process.communicate(timeout=60)
    assert process.returncode != 0
