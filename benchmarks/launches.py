"""``python -m benchmarks launches``: measure the time that Python takes to launch our kernels, without a GPU.

Kernels are compiled for an H100. The code runs on CPU tensors up to the call that hands a kernel to the device; this
call does nothing. The table has three times for each mechanism and direction: one launch with our launcher
(fairseq_lot/kernels/launch.py), the same launch with Triton's launcher, and the whole layer with all its Python code.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch

from fairseq_lot import cli
from fairseq_lot.errors import InputError
from fairseq_lot.kernels import launch
from fairseq_lot.kernels.naive import LotInputs, LotSettings, NearFarSettings, SinkhornInputs, SinkhornSettings
from fairseq_lot.output.tables import Table

NAME = "python -m benchmarks launches"
#: sentences, heads, tokens, head_dim, pivots
SHAPE = (2, 4, 40, 64, 32)
#: multiprocessors of an H100
PROCESSORS = 132


class NoDevice:
    """A Triton driver without a device: kernels are compiled, but launches do nothing."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        properties = {"max_shared_mem": 227 * 1024, "multiprocessor_count": PROCESSORS, "warpSize": 32}
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (0, 0, 0, 0, 1024), get_device_properties=lambda device: properties
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Callable:
        return lambda *arguments: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def remove_device() -> None:
    """Make Triton compile kernels without running them, for the rest of the process; outputs stay uninitialised.

    Sentences are split among programs as on an H100, which has 132 processors.

    Raises:
        InputError: no Triton, or its interpreter is on.
    """
    try:
        import triton
        from triton.runtime import driver
    except ImportError as error:
        raise InputError("triton is not installed; pip install -e '.[kernels-test]'") from error
    if triton.knobs.runtime.interpret:
        raise InputError("TRITON_INTERPRET=1 leaves nothing to launch; unset it")
    driver.set_active(NoDevice())  # type: ignore[arg-type]
    launch._processors = lambda device: PROCESSORS  # type: ignore[assignment]


@contextmanager
def recorded() -> Iterator[list[tuple]]:
    """Context manager: record the arguments of all launches."""
    calls: list[tuple] = []
    modules = [module for name, module in sys.modules.items() if name.startswith("fairseq_lot.kernels.")]
    holders = [module for module in modules if getattr(module, "start", None) is launch.start]
    original = launch.start

    def start(*arguments: Any) -> None:
        calls.append(arguments)
        original(*arguments)

    for module in holders:
        module.start = start  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        for module in holders:
            module.start = original  # type: ignore[attr-defined]


def microseconds(work: Callable[[], object], repeats: int) -> float:
    """The lower quartile of the times of ``repeats`` calls."""
    times = []
    for _ in range(repeats + repeats // 4):
        begin = perf_counter()
        work()
        times.append(perf_counter() - begin)
    return sorted(times[repeats // 4 :])[repeats // 4] * 1e6


def works() -> dict[str, Callable[[], torch.Tensor]]:
    """Functions that run a layer, one for each mechanism with kernels."""
    from fairseq_lot.kernels.convolution import convolution
    from fairseq_lot.kernels.lot import lot
    from fairseq_lot.kernels.near_far import near_far
    from fairseq_lot.kernels.near_far_expected import near_far_at_expected
    from fairseq_lot.kernels.sinkhorn import fused_sinkhorn
    from fairseq_lot.kernels.sinkhorn_attention import sinkhorn_attention

    bsz, heads, n, d, r = SHAPE
    q, k, v = (torch.randn(bsz, heads, n, d).half().requires_grad_() for _ in range(3))
    pivots, log_masses = torch.randn(heads, r, d).half().requires_grad_(), torch.zeros(heads, r).log_softmax(-1)
    scores, uniform = torch.randn(bsz, heads, n, n).requires_grad_(), torch.zeros(n).log_softmax(-1)
    pads = torch.zeros(bsz, n, dtype=torch.bool)
    pads[0, -3:] = True
    weight = torch.randn(heads, d, 3).requires_grad_()
    of_lot = LotInputs(q, k, v, pivots, log_masses, pads, pads)
    q2, k2, v2 = (torch.randn(bsz, heads, 2 * launch.LOT_PART, d).half().requires_grad_() for _ in range(3))
    of_split_lot = LotInputs(q2, k2, v2, pivots, log_masses)
    of_sinkhorn = SinkhornInputs(q, k, v, query_padding_mask=pads, key_padding_mask=pads)
    of_near_far = NearFarSettings(8, d**-0.5, key_padding_mask=pads, tangents=True)
    logs = torch.randn(bsz, heads, n, r, dtype=torch.float64).requires_grad_()
    far = logs.detach().logsumexp(2), torch.randn(bsz, heads, r, d), torch.softmax(logs.detach(), 2).float()
    positions = torch.full((bsz, heads, r), n / 2, dtype=torch.float64)
    return {
        "near_far with tangents": lambda: near_far(q, k, v, pivots, log_masses, of_near_far),
        "near_far at cross": lambda: near_far_at_expected(q, k, v, logs, *far, positions, pads, window=8),
        "lot": lambda: lot(of_lot, LotSettings(d**-0.5, 5, 5)),
        "lot, sentences of two parts": lambda: lot(of_split_lot, LotSettings(d**-0.5, 5, 5)),
        "convolution of lot": lambda: convolution(v, weight),
        "sinkhorn": lambda: sinkhorn_attention(of_sinkhorn, SinkhornSettings(d**-0.5, 15)),
        "solver of Sinkhorn and SeT": lambda: fused_sinkhorn(scores, uniform, uniform, num_updates=15),
    }


def by_positions(calls: Sequence[tuple]) -> None:
    """Repeat launches with our launcher, by positional arguments."""
    for call in calls:
        launch.start(*call)


def by_names(calls: Sequence[tuple]) -> None:
    """Repeat launches with Triton's own launcher; :func:`named` prepares the calls."""
    for kernel, grid, arguments in calls:
        kernel[grid](**arguments)


def named(
    kernel: Any, grid: tuple, tensors: tuple, numbers: tuple, constants: tuple, warps: int, stages: int
) -> tuple[Any, tuple, dict[str, Any]]:
    """Turn a call of :func:`~fairseq_lot.kernels.launch.start` into kernel, grid and arguments by name."""
    arguments = dict(zip(kernel.arg_names, (*tensors, *numbers, *constants), strict=True))
    return kernel, grid, {**arguments, "num_warps": warps, "num_stages": stages}


def measure(repeats: int) -> list[list]:
    """The rows of the table, one for each mechanism and direction."""
    rows = []
    for name, work in works().items():
        with recorded() as calls:
            values = work()
            first = len(calls)
            gradient = torch.ones_like(values)
            values.backward(gradient)
        of_forward = microseconds(work, repeats)
        of_both = microseconds(partial(both, work, gradient), repeats)
        whole = {"forward": of_forward, "backward": of_both - of_forward}
        for direction, found in (("forward", calls[:first]), ("backward", calls[first:])):
            ours = microseconds(partial(by_positions, found), repeats) / len(found)
            theirs = microseconds(partial(by_names, [named(*call) for call in found]), repeats) / len(found)
            rows.append([name, direction, len(found), f"{ours:.1f}", f"{theirs:.1f}", f"{whole[direction]:.0f}"])
    return rows


def both(work: Callable[[], torch.Tensor], gradient: torch.Tensor) -> None:
    """Run a forward pass with its backward pass."""
    work().backward(gradient)


def build_parser() -> cli.OneLineParser:
    """The options of the command."""
    parser = cli.OneLineParser(prog=NAME, description=__doc__)
    parser.set_defaults(run=run)
    parser.add_argument("--repeats", type=int, default=400, metavar="N", help="calls per figure (default: %(default)s)")
    return parser


def run(args: Namespace) -> None:
    """Print the table."""
    head = ["", "direction", "launches", "µs a launch", "by Triton's own path", "µs of a layer"]
    remove_device()
    print(Table(head, measure(args.repeats), align="<<>>>>").markdown())
