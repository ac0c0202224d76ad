"""Times and peak memory of what is to be compared, in turns."""

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import timer  # waits for a GPU before it looks at the clock
from tqdm import tqdm

from fairseq_lot.errors import is_out_of_memory

Figures = dict[str, float]  # by name: seconds, bytes, numbers


@dataclass(frozen=True)
class Job:
    """What is measured of one contender at one length.

    Attributes:
        works: what is timed, by the name of its figure; of the last one ``peak_bytes`` are measured, too, before all
            others are timed.
        known: figures that need no measuring.
        rates: a number, by the name of its figure, that is to be divided by the seconds of a work.
    """

    works: dict[str, Callable[[], object]]
    known: Figures = field(default_factory=dict)
    rates: dict[str, tuple[float, str]] = field(default_factory=dict)


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all tensors that torch's operations have made and that are still alive."""

    def __init__(self):
        super().__init__()
        self._alive, self._bytes, self.peak = set(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in given | self._alive:  # not a view of what was there before
                    self._alive.add(storage._cdata)
                    self._bytes += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self._bytes)
        return out

    def _forget(self, key, size):
        self._alive.discard(key)
        self._bytes -= size


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Bytes of tensors alive at once in a call, beyond those that were there before.

    On a GPU its allocator says so. Elsewhere what one operation needs inside is not seen.
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
    """Seconds of each of as many calls as take so many seconds together, one at least."""
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
    """Measure all contenders in turns, so that whatever else the machine does affects all alike.

    Of the times the lower quartile counts: what else the machine does only ever adds time.

    Args:
        makers: what makes each contender's job, by name.
        device: where they run.
        warm_up: rounds before those that count; the measurement of peak memory comes before them.
        repeats: rounds that count.
        limit: no more rounds after so many seconds, but one that counts.
        turn: a work is done again and again until its turn has taken so many seconds, and once at least.

    Returns:
        The figures by contender; None where memory did not suffice.
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
    """A quarter of them are less than this."""
    return sorted(seconds)[len(seconds) // 4]
