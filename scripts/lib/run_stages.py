"""Runs the stages of an experiment, several at a time, and shows how far each is and how long it will take.

The plan comes on standard input, one stage per line: chain, weight, title and shell command, parted by tabs. The stages
of a chain run one after another, chains side by side; an empty line waits for everything above it. A weight is the
stage's expected share of the time, in any unit. A chain is named by a path; what its stages print goes to CHAIN.log.
"""

import argparse
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

# what fairseq-train prints
_MAX_EPOCH = re.compile(r"'max_epoch': (\d+)")
_BEGIN = re.compile(r"begin training epoch (\d+)")
_UPDATES = re.compile(r"epoch (\d+): +(\d+) / (\d+) .*\bnum_updates=(\d+)")
_EPOCH_END = re.compile(r"\| train \| epoch (\d+) .*\bnum_updates (\d+)")

SHOWN_EVERY = 0.5  # seconds
SKIPPED = 3  # seconds; a stage that ends sooner was found finished, and says nothing about the pace
# The stage dies with this process, however that ends: its guard waits for an end of file.
GUARDED = "(read -r _ <&{pipe}; kill -KILL 0) & exec {command}"


@dataclass
class Stage:
    """One command, and what is known of its progress.

    Attributes:
        epoch, max_epoch, updates: of a training; 0 where unknown.
        start, done: which share of it had been done before this call, and is done now.
    """

    number: int
    chain: str
    weight: float
    title: str
    command: str
    log: Path
    code: int = 0
    began: float = 0.0
    ended: float = 0.0
    offset: int = 0
    epoch: int = 0
    max_epoch: int = 0
    updates: int = 0
    start: float = 0.0
    done: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it has been running, or ran."""
        return (self.ended or time.monotonic()) - self.began if self.began else 0.0

    @property
    def work(self) -> float:
        """The weight of what was done in this call; 0 for a stage that was found finished."""
        if self.ended and self.seconds < SKIPPED:
            return 0.0
        return self.weight * ((1.0 if self.ended else self.done) - self.start)

    def run(self, guard: int) -> int:
        """Run the command, in a process group of its own; return its exit code."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            log.write(f"== {self.title}\n".encode())
            log.flush()
            self.offset, self.began = log.tell(), time.monotonic()
            process = subprocess.Popen(
                ["bash", "-c", GUARDED.format(pipe=guard, command=self.command)], pass_fds=[guard],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            self.code = process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the guard
        self.ended = time.monotonic()
        return self.code

    def read_log(self) -> None:
        """Take note of what fairseq-train has printed since the last time."""
        with open(self.log, "rb") as file:
            file.seek(self.offset)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self.offset += len(line)
            self._take(line.decode(errors="replace"))

    def _take(self, line):
        if found := _MAX_EPOCH.search(line):
            self.max_epoch = int(found[1])
        if not self.max_epoch:
            return
        if found := _BEGIN.search(line):
            self.epoch = int(found[1])
            self.done = (self.epoch - 1) / self.max_epoch
            self.start = self.start if self.updates else self.done
        elif found := _UPDATES.search(line):
            epoch, update, updates, self.updates = map(int, found.groups())
            self.done = (epoch - 1 + update / updates) / self.max_epoch
        elif found := _EPOCH_END.search(line):
            self.done, self.updates = int(found[1]) / self.max_epoch, int(found[2])

    def remaining(self, pace: float | None) -> float | None:
        """Seconds until its end; None while nothing is known.

        Args:
            pace: seconds that a weight of 1 takes.
        """
        if self.done > self.start:
            return self.seconds * (1 - self.done) / (self.done - self.start)
        return None if pace is None else max(pace * self.weight * (1 - self.start) - self.seconds, 0.0)


class Experiment:
    """The stages of all chains: those that have ended, run, and wait."""

    def __init__(self, plan: str, jobs: int):
        self.jobs = jobs
        self.stages, self.blocks = [], [{}]
        for line in plan.splitlines():
            if not line.strip():
                self.blocks.append({})
                continue
            chain, weight, title, command = line.split("\t")
            stage = Stage(len(self.stages) + 1, chain, float(weight), title, command, Path(f"{chain}.log"))
            self.stages.append(stage)
            self.blocks[-1].setdefault(chain, []).append(stage)
        self.began = time.monotonic()
        self.parent = os.getppid()
        self.guard, self.held = os.pipe()  # the other end of the guards' pipe; it closes with this process

    def run(self, show) -> Stage | None:
        """Run everything, and show it.

        Returns:
            The stage that failed, if one did; what ran beside it has been ended.
        """
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for chains in self.blocks:
                    runs = [pool.submit(self._run_chain, chain) for chain in chains.values()]
                    while not all(run.done() for run in runs):
                        wait(runs, timeout=SHOWN_EVERY)
                        for stage in self.running:
                            stage.read_log()
                        show(self)
                        if os.getppid() != self.parent:  # the script that called was killed
                            raise KeyboardInterrupt
                        failed = next((run.result() for run in runs if run.done() and run.result()), None)
                        if failed:
                            return failed
                return None
            finally:
                os.close(self.held)  # ends what still runs
                pool.shutdown(cancel_futures=True)

    def _run_chain(self, chain):
        """Run the stages of a chain; return the one that failed, if one did."""
        return next((stage for stage in chain if stage.run(self.guard)), None)

    @property
    def running(self) -> list[Stage]:
        """The stages that run now."""
        return [stage for stage in self.stages if stage.began and not stage.ended]

    def pace(self) -> float | None:
        """Seconds that a weight of 1 takes, by what has been done in this call."""
        work = sum(stage.work for stage in self.stages)
        return sum(stage.seconds for stage in self.stages if stage.work) / work if work else None

    def remaining(self) -> float | None:
        """Seconds until the end of all; None while nothing is known."""
        pace = self.pace()
        if pace is None:
            return None
        left = [stage.remaining(pace) for stage in self.stages if not stage.ended]
        chains = len({stage.chain for stage in self.stages if not stage.ended})
        return sum(left) / max(1, min(self.jobs, chains))

    def line(self, stage: Stage | None = None) -> str:
        """What is to be said of a running stage, or of all together."""
        if stage is None:
            return f"all {len(self.stages)} stages, {clock(time.monotonic() - self.began)}{about(self.remaining())}"
        words = [f"{stage.number}/{len(self.stages)} {stage.title}"]
        if stage.epoch:
            words.append(f"epoch {stage.epoch}/{stage.max_epoch}")
        if stage.updates:
            words.append(f"update {stage.updates}")
        left = None if stage.ended else stage.remaining(self.pace())
        return f"{', '.join(words)}, {clock(stage.seconds)}{about(left)}"


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, or hours, minutes and seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def about(seconds: float | None) -> str:
    """The expected time, where there is one."""
    return "" if seconds is None else f", about {clock(seconds)} left"


class Lines:
    """Shows plain lines, for a log."""

    def __init__(self, every: float):
        self.every, self.last = every, time.monotonic()
        self.seen: set[int] = set()

    def __call__(self, experiment: Experiment) -> None:
        """Say what has begun, and now and then how far everything is."""
        for stage in experiment.stages:
            if stage.began and stage.number not in self.seen:
                self.seen.add(stage.number)
                print(experiment.line(stage), file=sys.stderr, flush=True)
        if time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            for line in [*map(experiment.line, experiment.running), experiment.line()]:
                print(f"  {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing more comes."""


class Bars:
    """Shows a bar for each running stage and one for all, on a terminal."""

    def __init__(self):
        self.bars: dict[int, tqdm] = {}  # by the number of the stage, 0 for all

    def __call__(self, experiment: Experiment) -> None:
        """Draw the bars; a stage that has ended leaves a line."""
        for stage in experiment.stages:
            if stage.ended and stage.number in self.bars:
                self.bars.pop(stage.number).close()
                tqdm.write(experiment.line(stage), file=sys.stderr)
        pace = experiment.pace()
        for stage in experiment.running:
            self._draw(stage.number, experiment.line(stage), stage.seconds, stage.remaining(pace))
        self._draw(0, experiment.line(), time.monotonic() - experiment.began, experiment.remaining())

    def _draw(self, number, line, seconds, left):
        if number not in self.bars:
            self.bars[number] = tqdm(total=1.0, bar_format="{desc} {bar:16}", leave=False, dynamic_ncols=True)
        self.bars[number].n = 0.0 if left is None else seconds / max(seconds + left, 1e-9)
        self.bars[number].set_description_str(line)

    def close(self) -> None:
        """Nothing more comes."""
        for bar in self.bars.values():
            bar.close()


def last_line(path: Path) -> str:
    """The last line of a log that is not empty: of a failed stage the reason."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def main() -> int:
    """Run the plan; return 0, the exit code of the stage that failed, 2 for a busy folder, or 130 when interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lock", type=Path, nargs="+", required=True, help="folders that no other call may work in")
    parser.add_argument("--jobs", type=int, default=1, help="chains that run side by side (default: %(default)s)")
    parser.add_argument("--every", type=float, default=30, help="seconds between plain lines (default: %(default)s)")
    args = parser.parse_args()

    name = os.environ.get("CALLED_BY", parser.prog)
    try:
        held = []  # open until this process ends
        for folder in args.lock:
            folder.mkdir(parents=True, exist_ok=True)
            held.append(open(folder / ".lock", "w"))  # noqa: SIM115
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{name}: error: another call is at work in {folder}; wait for it or end it", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{name}: error: cannot write in {folder}: {error.strerror}; give another WORK", file=sys.stderr)
        return 2
    experiment = Experiment(sys.stdin.read(), args.jobs)
    show = Bars() if sys.stderr.isatty() else Lines(args.every)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = experiment.run(show)
    except KeyboardInterrupt:
        show.close()
        print(f"{name}: interrupted; the same call goes on from here", file=sys.stderr)
        return 130
    except OSError as error:  # its own log
        show.close()
        print(f"{name}: error: {error}; mend it, then the same call goes on from here", file=sys.stderr)
        return 2
    show.close()
    if failed is None:
        return 0
    print(f"{name}: error: {failed.title}: {last_line(failed.log)} (whole log: {failed.log}); "
          "mend it, then the same call goes on from here", file=sys.stderr)  # fmt: skip
    return max(1, failed.code)


if __name__ == "__main__":
    sys.exit(main())
