"""Times and peak memory of several contenders, measured in turns."""

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import timer  # synchronises the GPU, then reads the clock
from tqdm import tqdm

from fairseq_lot.errors import is_out_of_memory

Figures = dict[str, float]  # by name: seconds, bytes, numbers


@dataclass(frozen=True)
class Job:
    """The measurements of one contender at one length.

    Attributes:
        works: functions to time, by the name of their figure. The last one also gives ``peak_bytes``, which is measured
            before anything is timed.
        known: figures that need no measurement.
        rates: by the name of the figure, an amount with the name of the work whose seconds divide it.
    """

    works: dict[str, Callable[[], object]]
    known: Figures = field(default_factory=dict)
    rates: dict[str, tuple[float, str]] = field(default_factory=dict)


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all live tensors that torch operations made inside the context."""

    def __init__(self):
        super().__init__()
        self._alive, self._bytes, self.peak = set(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in given | self._alive:  # not a view of an older tensor
                    self._alive.add(storage._cdata)
                    self._bytes += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self._bytes)
        return out

    def _forget(self, key, size):
        self._alive.discard(key)
        self._bytes -= size


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Largest number of bytes that a call adds to the tensors that exist before it.

    On a GPU the allocator counts them. Elsewhere the temporary memory inside an operation is not counted.
    """
    if device.type != "cuda":
        with LiveTensors() as live:
            work()
        return live.peak
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


def _turn(work: Callable[[], object], at_least: float) -> list[float]:
    """Seconds of each call; calls repeat until they took ``at_least`` seconds together."""
    seconds: list[float] = []
    while not seconds or sum(seconds) < at_least:
        start = timer()
        work()
        seconds.append(timer() - start)
    return seconds


def measure(
    makers: dict[str, Callable[[], Job]],
    device: torch.device,
    *,
    warm_up: int,
    repeats: int,
    limit: float = math.inf,
    turn: float = 0.0,
) -> dict[str, Figures | None]:
    """Measure all contenders in turns, so that other load on the machine affects all alike.

    A figure is the lower quartile of its times, because other load only adds time.

    Args:
        makers: functions that make each contender's job, by name.
        device: where the jobs run.
        warm_up: rounds that do not count; peak memory is measured before them.
        repeats: rounds that count.
        limit: seconds after which no round starts, once one round has counted.
        turn: seconds for which a work is repeated in its turn; it runs at least once.

    Returns:
        The figures by contender; None if memory did not suffice.
    """
    found: dict[str, Figures | None] = dict.fromkeys(makers)
    jobs: dict[str, Job] = {}
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def if_memory_suffices(name):
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            jobs.pop(name, None)
            if device.type == "cuda":
                torch.cuda.empty_cache()

    for name, make in makers.items():
        with if_memory_suffices(name):
            jobs[name] = make()
            *_, last = jobs[name].works.values()
            jobs[name].known["peak_bytes"] = peak_memory(last, device)
    start = timer()
    for number in tqdm(range(warm_up + repeats), "rounds", leave=False, disable=None):
        for name, job in list(jobs.items()):
            with if_memory_suffices(name):
                for key, work in job.works.items():
                    seconds = _turn(work, turn)
                    times[name, key] += seconds if number >= warm_up else []
        if number >= warm_up and timer() - start > limit:
            break
    for name, job in jobs.items():
        seconds_of = {key: lower_quartile(times[name, key]) for key in job.works}
        rates = {key: amount / seconds_of[work] for key, (amount, work) in job.rates.items()}
        found[name] = {**job.known, **seconds_of, **rates}
    return found


def lower_quartile(seconds: list[float]) -> float:
    """The value that a quarter of the values are below."""
    return sorted(seconds)[len(seconds) // 4]
