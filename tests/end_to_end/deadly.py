"""Commands that kill themselves, or are killed, at a given moment."""

import os
import signal
import subprocess
import sys
import time

from tests.end_to_end.conftest import BIN, ROOT

# Python runs this at its start: the process kills itself at the named moment.
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


def copyfile(source, target):  # half a copy
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


def starter(folder):
    """A function that starts a command in a process group of its own, which dies at the given moment."""
    (folder / "sitecustomize.py").write_text(DEADLY)
    path = os.pathsep.join([str(folder), str(ROOT)])

    def start(*words, die_at="", stderr=subprocess.STDOUT, **variables):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "VIRTUAL_ENV": sys.prefix, "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": path, "DIE_AT": die_at, **{name: str(value) for name, value in variables.items()},
        }  # fmt: skip
        return subprocess.Popen(
            [str(word) for word in words], env=environment, cwd=ROOT, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip

    return start


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    return output


def refused(process):
    """It must have refused its settings; returns what it said."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output[-3000:]
    return output


def killed(process):
    """It must have died as it was told to, and not have ended by itself."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode in (-9, 137), (process.returncode, output[-3000:])


def kill_when(process, condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "nothing to kill it for"
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
