"""run_stages.py with stages that only sleep and print: order, progress, failures, and that nothing outlives it."""

import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

RUNNER = Path(__file__).resolve().parents[2] / "scripts" / "lib" / "run_stages.py"
TRAINING = (
    "echo \"{'max_epoch': 4}\"; echo 'begin training epoch 3';"
    " echo 'epoch 003:    50 / 100 loss=2, num_updates=250, lr=1';"
)


def start(plan, logs, *options, stderr=subprocess.PIPE):
    """Start the runner on a plan, given as lists of chain, title and command; None waits for everything above."""
    lines = ["" if line is None else "\t".join([f"{logs}/{line[0]}", "1", *line[1:]]) for line in plan]
    process = subprocess.Popen(
        [sys.executable, str(RUNNER), "--lock", str(logs), *map(str, options)], stdin=subprocess.PIPE, text=True,
        stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, "CALLED_BY": "table.sh"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in the background it is ignored
    )  # fmt: skip
    process.stdin.write("\n".join(lines))
    process.stdin.close()
    process.stdin = None  # for communicate
    return process


def until(condition):
    """Wait for a condition; what takes longer than a minute has failed."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def shell(command):
    """A command of a plan, which env starts as it does the real ones."""
    return f"env bash -c '{command}'"


def running(process_id):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def noted(file):
    """The process id that a stage wrote into a file."""
    until(lambda: file.exists() and file.read_text().strip())
    return int(file.read_text())


def test_chains_run_side_by_side_after_what_stands_above(tmp_path):
    """Two chains of which each waits for the other; both need what stands above the empty line."""
    meet = "until [ -e {0}/{2} ]; do sleep 0.01; done"
    plan = [
        ["first", "first", shell(f"sleep 0.3; touch {tmp_path}/base")],
        None,
        ["a", "a 1", shell(f"test -e {tmp_path}/base && touch {tmp_path}/a")],
        ["b/c", "b 1", shell(f"touch {tmp_path}/b; " + meet.format(tmp_path, 0, "a"))],
        ["a", "a 2", shell(meet.format(tmp_path, 0, "b") + "; echo done")],
    ]
    process = start(plan, tmp_path / "logs", "--jobs", 2)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    assert [line.split(",")[0] for line in shown.splitlines()][0] == "1/4 first"
    assert {line.split(",")[0] for line in shown.splitlines()} == {"1/4 first", "2/4 a 1", "3/4 b 1", "4/4 a 2"}
    assert (tmp_path / "logs" / "a.log").read_text() == "== a 1\n== a 2\ndone\n"
    assert (tmp_path / "logs" / "b" / "c.log").read_text() == "== b 1\n"


def test_lines_say_how_far_a_training_is_and_how_long_it_will_take(tmp_path):
    """Of four epochs two were done before this call, and a quarter of the rest is done."""
    training = write(tmp_path / "train.sh", TRAINING + " sleep 2")
    plan = [["a", "train", f"env bash {training}"], ["a", "score", shell("sleep 0.1")]]
    _, shown = start(plan, tmp_path / "logs", "--every", 0.9).communicate(timeout=60)
    lines = shown.splitlines()
    progress = re.findall(r"1/2 train, epoch 3/4, update 250, 0:0(\d), about 0:0(\d) left", shown)
    assert progress, shown
    for seconds, left in progress:
        assert abs(3 * int(seconds) - int(left)) <= 2, shown  # both are rounded
    assert any(re.match(r"  all 2 stages, 0:0\d, about 0:\d\d left", line) for line in lines), shown
    assert any(line.startswith("2/2 score, 0:0") for line in lines), shown


def write(path, text):
    path.write_text(text + "\n")
    return path


def test_a_terminal_has_a_bar_for_each_running_stage_and_one_for_all(tmp_path):
    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, 120))
    process = start([[name, f"stage {name}", shell("sleep 1.2")] for name in "ab"], tmp_path, "--jobs", 2, stderr=end)
    os.close(end)
    assert process.wait(60) == 0
    shown = os.read(terminal, 1 << 16).decode()
    assert "\r" in shown and "1/2 stage a, 0:01" in shown and "2/2 stage b, 0:01" in shown and "all 2 stages" in shown


def test_failure_is_one_line_and_ends_the_others(tmp_path):
    pid = tmp_path / "pid"
    plan = [
        ["a", "long", shell(f"echo $$ >{pid}; sleep 60")],
        ["b", "bad", shell(f"until [ -s {pid} ]; do sleep 0.01; done; echo chatter; echo No space left; echo; exit 2")],
        ["b", "after", shell(f"touch {tmp_path}/after")],
    ]
    process = start(plan, tmp_path / "logs", "--jobs", 2)
    _, shown = process.communicate(timeout=30)
    assert process.returncode == 2
    expected = f"table.sh: error: bad: No space left (whole log: {tmp_path}/logs/b.log); "
    assert shown.splitlines()[-1].startswith(expected)
    assert not running(noted(pid)) and not (tmp_path / "after").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_it(how, tmp_path):
    """A child of a stage, in the shell that waits for it, dies with the runner, and the next call is not refused."""
    pid = tmp_path / "pid"
    plan = [["a", "long", shell(f"sleep 60 & echo $! >{pid}; wait")], ["a", "after", shell(f"touch {tmp_path}/after")]]
    process = start(plan, tmp_path / "logs")
    child = noted(pid)
    process.send_signal(how)
    _, shown = process.communicate(timeout=30)
    until(lambda: not running(child))
    assert not (tmp_path / "after").exists()
    if how == signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 130
        assert shown.splitlines()[-1] == "table.sh: interrupted; the same call goes on from here"
    assert start([["a", "again", "true"]], tmp_path / "logs").wait(60) == 0


def test_it_ends_with_the_script_that_called_it(tmp_path):
    pid = tmp_path / "pid"
    plan = write(tmp_path / "plan", f"{tmp_path}/logs/a\t1\tlong\t{shell(f'echo $$ >{pid}; sleep 60')}")
    script = f"{sys.executable} {RUNNER} --lock {tmp_path}/logs <{plan} 2>/dev/null; true"
    caller = subprocess.Popen(["bash", "-c", script])
    child = noted(pid)
    caller.kill()
    caller.wait(60)
    until(lambda: not running(child))


def test_a_folder_that_cannot_be_is_one_line(tmp_path):
    process = start([["a", "a", "true"]], write(tmp_path / "file", "") / "logs")
    _, shown = process.communicate(timeout=30)
    assert process.returncode == 2
    assert shown == f"table.sh: error: cannot write in {tmp_path}/file/logs: Not a directory; give another WORK\n"


def test_a_folder_at_work_is_refused(tmp_path):
    pid = tmp_path / "pid"
    first = start([["a", "long", shell(f"echo $$ >{pid}; sleep 60")]], tmp_path / "logs", tmp_path / "other")
    noted(pid)
    second = start([["a", "long", shell("sleep 60")]], tmp_path / "logs")
    _, shown = second.communicate(timeout=30)
    assert second.returncode == 2
    assert shown == f"table.sh: error: another call is at work in {tmp_path}/logs; wait for it or end it\n"
    third = start([["a", "long", shell("sleep 60")]], tmp_path / "other")
    _, shown = third.communicate(timeout=30)
    assert third.returncode == 2 and f"at work in {tmp_path}/other" in shown
    first.terminate()
    first.wait(60)
