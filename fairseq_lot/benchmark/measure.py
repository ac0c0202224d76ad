"""Times and peak memory of one forward pass, and of one forward and backward pass."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairseq_lot.benchmark.contenders import Attention
from fairseq_lot.errors import is_out_of_memory


@dataclass(frozen=True)
class Figures:
    """Lower quartiles of one contender at one length: what else the machine does only ever adds time.

    Attributes:
        forward, both: seconds of a forward pass without gradients, and of a forward and a backward pass.
        peak: bytes of tensors that were alive at once in the latter, beyond q, k, v and parameters.
    """

    forward: float
    both: float
    peak: int


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all tensors that torch's operations have made and that are still alive."""

    def __init__(self):
        super().__init__()
        self._alive, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in given:  # not a view of what was there before
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def _forward(attend, inputs, gradient):
    with torch.no_grad():
        attend(*inputs)


def _both(attend, inputs, gradient):
    attend(*inputs).backward(gradient)
    for x in inputs:
        x.grad = None


def _seconds(work, *args):
    start = time.perf_counter()
    work(*args)
    if args[-1].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_memory(attend: Attention, inputs: Sequence[torch.Tensor], gradient: torch.Tensor) -> int:
    """Bytes of tensors alive at once in a forward and a backward pass; what one operation needs inside is not seen."""
    with LiveTensors() as live:
        _both(attend, inputs, gradient)
    return live.peak


def first_seconds(attend: Attention, inputs: Sequence[torch.Tensor], gradient: torch.Tensor) -> float:
    """Seconds of one forward and backward pass: a warm-up, and a warning of how long the others will take.

    Infinite where it does not fit in memory.
    """
    try:
        return _seconds(_both, attend, inputs, gradient)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return math.inf


def measure(
    attends: dict[str, Attention], inputs: Sequence[torch.Tensor], gradient: torch.Tensor, *, warm_up: int, repeats: int
) -> dict[str, Figures]:
    """Measure all contenders on the same q, k, v in turns, so that whatever else the machine does affects all alike.

    Args:
        attends: contenders by name.
        inputs: q, k and v, ``(bsz, num_heads, n, d)``, which want gradients.
        gradient: of the values.
        warm_up: rounds before those that count.
        repeats: rounds that count.
    """
    times = {(name, work): [] for name in attends for work in (_forward, _both)}
    for _ in range(warm_up + repeats):
        for (name, work), seconds in times.items():
            seconds.append(_seconds(work, attends[name], inputs, gradient))
    typical = {key: sorted(seconds[warm_up:])[repeats // 4] for key, seconds in times.items()}
    return {
        name: Figures(typical[name, _forward], typical[name, _both], peak_memory(attend, inputs, gradient))
        for name, attend in attends.items()
    }
