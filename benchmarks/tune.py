"""``python -m benchmarks tune``: find the fastest block size, warps and stages of each kernel on this GPU.

The search starts from the defaults and changes one number of a kernel after the other. It keeps a change that is at
least two per cent faster. Before it is timed, a candidate must pass the comparison with float64 that its kernel passes
before first use. Candidates that do not compile or need too much shared memory are left out. Each trial is written to
the table that the kernels read, so after a stop the same command continues. A table is for GPUs of one name; float16
and bfloat16 share its entries.
"""

import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from fairseq_lot import cli
from fairseq_lot.errors import InputError, first_line, is_out_of_memory
from fairseq_lot.kernels import blocks, choice, launch
from fairseq_lot.kernels.blocks import CANDIDATES, Blocks
from fairseq_lot.kernels.launch import padded
from fairseq_lot.kernels.naive import (
    ExpectedKeys,
    LotInputs,
    LotSettings,
    NearFarKept,
    NearFarSettings,
    SinkhornInputs,
    SinkhornSettings,
)
from fairseq_lot.output.files import atomic_write
from fairseq_lot.output.provenance import current_commit
from fairseq_lot.output.tables import Table

NAME = "python -m benchmarks tune"
GAIN = 0.98  # new time over old: smaller gains are noise
WRONG = "wrong"
WINDOW = 8  # near_far's default


Candidates = dict[str, dict[str, tuple[int, ...]]]
#: candidates of --rehearse: two values of ``block``, or of every number of a kernel that has no ``block``
REHEARSED: Candidates = {
    kernel: {field: values[:2] for field, values in numbers.items() if field == "block" or "block" not in numbers}
    for kernel, numbers in CANDIDATES.items()
}


class Work(NamedTuple):
    """Functions that launch some kernels.

    Attributes:
        forward, both: the timed passes, forward alone and forward with backward.
        error: the difference from float64 on a small problem, as a multiple of the allowed difference.
    """

    forward: Callable[[], object]
    both: Callable[[], object] | None
    error: Callable[[], float]


class Sizes(NamedTuple):
    """Sizes of the timed problems; ``tested`` is the length of the problems that are compared with float64."""

    device: torch.device
    dtype: torch.dtype
    heads: int = 4
    d: int = 64
    r: int = 32
    tokens: int = 8192
    length: int = 2048
    long_sinkhorn: int = 512
    short_sinkhorn: tuple[int, ...] = (32, 64, 128)
    sinkhorn_updates: int = 15
    keys_at_cross: int = 512
    tested: int = 2 * launch.LOT_PART + 5

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A random tensor that requires a gradient."""
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype).requires_grad_()

    def sentences(self, n: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """q, k and v of sentences of n tokens, with their padding mask."""
        bsz = max(1, self.tokens // n)
        pads = torch.zeros(bsz, n, dtype=torch.bool, device=self.device)
        pads[0, -3:] = True
        return [self.normal(bsz, self.heads, n, self.d) for _ in range(3)], pads

    def pivots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pivots with their log masses, or features with their biases."""
        pivots = self.d**0.25 * torch.randn(self.heads, self.r, self.d, device=self.device)
        masses = torch.randn(self.heads, self.r, device=self.device).log_softmax(-1)
        return pivots.to(self.dtype).requires_grad_(), masses.requires_grad_()


def layer(function: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor], error: Callable[[], float]) -> Work:
    """The work of a function: the forward pass alone, then the forward with the backward pass."""

    def forward():
        with torch.no_grad():
            function(*leaves)

    def both():
        values = function(*leaves)
        torch.autograd.grad(values, [x for x in leaves if x.requires_grad], values.detach())

    return Work(forward, both, error)


def lot_works(sizes: Sizes) -> Iterator[Work]:
    """LOT with five updates; its convolution over three values."""
    from fairseq_lot.kernels.convolution import convolution
    from fairseq_lot.kernels.lot import lot

    leaves, pads = sizes.sentences(sizes.length)
    settings = LotSettings(sizes.d**-0.5, 5, 5)
    of_test = sizes.device, (sizes.dtype,) * 4, sizes.r, sizes.d, sizes.d, settings
    error = partial(choice._lot_error, *of_test, n=sizes.tested)
    yield layer(
        lambda q, k, v, z, c: lot(LotInputs(q, k, v, z, c, pads, pads), settings), [*leaves, *sizes.pivots()], error
    )
    error = partial(choice._convolution_error, sizes.device, (sizes.dtype,) * 2, sizes.d, sizes.d, 3)
    yield layer(convolution, [leaves[2], sizes.normal(sizes.heads, sizes.d, 3)], error)


def set_works(sizes: Sizes) -> Iterator[Work]:
    """The solver with five updates on r pivots, from either side."""
    from fairseq_lot.kernels.sinkhorn import fused_sinkhorn

    bsz, masses = max(1, sizes.tokens // sizes.length), sizes.pivots()[1]
    even = torch.zeros(sizes.length, device=sizes.device).log_softmax(-1)
    for transposed in (False, True):
        shape = (sizes.r, sizes.length) if transposed else (sizes.length, sizes.r)
        scores, marginals = sizes.normal(bsz, sizes.heads, *shape, dtype=torch.float32), (even, masses)
        error = partial(choice._sinkhorn_error, sizes.device, transposed, padded(sizes.r), 5, n=sizes.tested)
        leaves = scores, *(marginals[::-1] if transposed else marginals)
        yield layer(partial(fused_sinkhorn, num_updates=5), leaves, error)


def sinkhorn_works(sizes: Sizes) -> Iterator[Work]:
    """Sinkhorn attention on short sentences, whose scores stay on chip, then on long ones."""
    from fairseq_lot.kernels.sinkhorn_attention import sinkhorn_attention

    settings = SinkhornSettings(sizes.d**-0.5, sizes.sinkhorn_updates)
    for n in (*sizes.short_sinkhorn, sizes.long_sinkhorn):
        leaves, pads = sizes.sentences(n)
        held = (padded(n), padded(n)) if n in sizes.short_sinkhorn else None
        of_test = sizes.device, (sizes.dtype,) * 3, held, sizes.d, sizes.d, (False, False), settings

        def attend(q, k, v, pads=pads):
            return sinkhorn_attention(SinkhornInputs(q, k, v, None, None, None, pads, pads), settings)

        yield layer(attend, leaves, partial(choice._attention_error, *of_test))


def near_far_works(sizes: Sizes) -> Iterator[Work]:
    """near_far with tangents: training, a decoding step, then both at cross-attention."""
    from fairseq_lot.kernels.near_far import near_far
    from fairseq_lot.kernels.near_far_step import near_far_step

    heads, d, r, scale = sizes.heads, sizes.d, sizes.r, sizes.d**-0.5
    leaves, pads = sizes.sentences(sizes.length)
    settings = NearFarSettings(WINDOW, scale, None, pads, tangents=True)
    types, is_long = (sizes.dtype, sizes.dtype), sizes.tested > launch.DENSE
    error = partial(choice._near_far_error, sizes.device, types, r, d, d, is_long, (False, True, False, True))
    features, bias = sizes.pivots()
    yield layer(lambda q, k, v, z, c: near_far(q, k, v, z, c, settings), [*leaves, features, bias], error)

    def full(*shape: int) -> torch.Tensor:
        return sizes.normal(*shape, dtype=torch.float32).detach()

    bsz = max(1, 5 * sizes.tokens // sizes.length)
    q, k, v = (sizes.normal(bsz, heads, 1, d).detach() for _ in range(3))
    sums, means = full(bsz, heads, r), full(bsz, heads, r, d)
    kept = NearFarKept(full(bsz, heads, WINDOW + 1, d), full(bsz, heads, WINDOW + 1, d), None, sums, means)

    @torch.no_grad()
    def step():
        near_far_step(q, k, v, None, kept, features, bias, None, window=WINDOW, scale=scale)

    of_test = sizes.device, types, r, d, d, WINDOW, False, False
    yield Work(step, None, partial(choice._step_error, *of_test))
    yield from near_far_at_cross_works(sizes)


def near_far_at_cross_works(sizes: Sizes) -> Iterator[Work]:
    """near_far at cross-attention: training, then a decoding step."""
    from fairseq_lot.kernels.near_far_expected import near_far_at_expected, near_far_expected

    heads, d, r, scale = sizes.heads, sizes.d, sizes.r, sizes.d**-0.5
    leaves, pads = sizes.sentences(sizes.length)
    bsz = pads.size(0)

    def full(*shape: int) -> torch.Tensor:
        return sizes.normal(*shape, dtype=torch.float32).detach()

    def shares_of(m: int) -> torch.Tensor:
        return full(bsz, heads, m, r).softmax(2)

    def positions_in(m: int) -> torch.Tensor:
        return m * full(bsz, heads, r).sigmoid().double()

    shares = shares_of(sizes.length).to(sizes.dtype).requires_grad_()
    query_logs = sizes.normal(bsz, heads, sizes.length, r, dtype=torch.float64)
    log_sums = sizes.normal(bsz, heads, r, dtype=torch.float64)
    rest = positions_in(sizes.length), pads
    of_training = sizes.device, (sizes.dtype,) * 5, r, d, d, WINDOW, True
    yield layer(
        lambda q, k, v, logs, sums, means, shares: near_far_at_expected(
            q, k, v, logs, sums, means, shares, *rest, window=WINDOW
        ),
        [*leaves, query_logs, log_sums, sizes.normal(bsz, heads, r, d), shares],
        partial(choice._at_expected_error, *of_training),
    )

    bsz, m = max(1, 5 * sizes.tokens // sizes.length), sizes.keys_at_cross
    q, features = sizes.normal(bsz, heads, 1, d).detach(), sizes.pivots()[0].detach()
    of_keys = full(bsz, heads, m, d), full(bsz, heads, m, d), shares_of(m), full(bsz, heads, r).double()
    keys = ExpectedKeys(*of_keys, positions_in(m), full(bsz, heads, r, d), features)

    @torch.no_grad()
    def step():
        near_far_expected(q, keys, window=WINDOW, scale=scale)

    of_step = sizes.device, (sizes.dtype, sizes.dtype), r, d, d, WINDOW, False, False
    yield Work(step, None, partial(choice._expected_error, *of_step))


WORKS = {"near_far": near_far_works, "lot": lot_works, "sinkhorn": sinkhorn_works, "set": set_works}


def microseconds(work: Callable[[], object], device: torch.device) -> float:
    """The time of a call; on a GPU from a CUDA graph, without the time that Python takes."""
    if device.type == "cuda":
        from triton.testing import do_bench_cudagraph

        return 1e3 * do_bench_cudagraph(work, rep=20, return_mode="median")
    begin = perf_counter()
    work()
    return 1e6 * (perf_counter() - begin)


class Stopped(Exception):
    """The time limit is over."""


class Tuner:
    """Tries block sizes; keeps the fastest ones in a table.

    Args:
        table: from :func:`~fairseq_lot.kernels.blocks.read`; it is changed in place.
        device: where kernels run.
        limit: seconds after which :class:`Stopped` is raised.
        candidates: the values to try, by kernel and number.
        timed: function that times a call.
    """

    def __init__(
        self,
        table: dict[str, Any],
        device: torch.device,
        limit: float = math.inf,
        candidates: Candidates = CANDIDATES,
        timed: Callable[[Callable[[], object], torch.device], float] = microseconds,
    ):
        self.table, self.device, self.candidates, self.timed = table, device, candidates, timed
        self.end = monotonic() + limit
        self.defaults: dict[str, Blocks] = {}

    @property
    def chosen(self) -> dict[str, Blocks]:
        """The block sizes in the table now."""
        return blocks.sizes_in(self.table)

    def tune(self, work: Work) -> None:
        """Tune all kernels that the work launches."""
        with blocks.trying(self.chosen) as asked:
            work.forward()
            forward = dict(asked)
            if work.both is not None:
                work.both()
            defaults = {name: default for name, default in asked.items() if _kernel(name) in self.candidates}
        self.defaults |= defaults
        for name, default in tqdm(defaults.items(), "kernels", leave=False, disable=None):
            self._tune(name, default, work.forward if name in forward or work.both is None else work.both, work.error)

    def _tune(self, name, default, run, error):
        entry = self.table["kernels"].setdefault(name, {**default._asdict(), "tried": {}})
        best, fastest = default, self._try(name, entry, default, run, error)
        for field, values in self.candidates[_kernel(name)].items():
            for value in values:
                candidate = best._replace(**{field: value})
                time = self._try(name, entry, candidate, run, error)
                if time < GAIN * fastest:
                    best, fastest = candidate, time
                    entry |= best._asdict()
                    self._write()

    def _try(self, name, entry, candidate, run, error):
        """Microseconds with a candidate; infinite if it cannot be used."""
        key = " ".join(map(str, candidate))
        if key not in entry["tried"]:
            if monotonic() > self.end:
                raise Stopped
            with blocks.trying({**self.chosen, name: candidate}) as asked:
                entry["tried"][key] = self._outcome(run, error, name, asked)
            self._write()
        found = entry["tried"][key]
        return math.inf if isinstance(found, str) else found

    def _outcome(self, run, error, name, asked):
        try:
            off = error()
            if name not in asked:
                raise InputError(f"{name} is not launched by the problem that should test it")
            if not off <= 1:
                return WRONG
            run()
            return round(self.timed(run, self.device), 2)
        except InputError:
            raise
        except Exception as failure:
            if isinstance(failure, MemoryError | RuntimeError) and is_out_of_memory(failure):
                raise
            if self.device.type == "cuda":
                self._check_device(name, failure)
            return f"{type(failure).__name__}: {first_line(failure)}"[:120]

    def _check_device(self, name, failure):
        """Raise InputError if the GPU no longer works, as after some errors."""
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise InputError(
                f"the GPU has failed at {name}: {first_line(failure)}; leave that mechanism out"
            ) from error

    def _write(self):
        self.table["commit"] = current_commit()
        with atomic_write(blocks.path_of(self.table["device"])) as file:
            json.dump(self.table, file, indent=1)
            file.write("\n")

    def rows(self) -> list[list]:
        """The rows of the table, one for each tuned kernel."""
        rows = []
        for name, default in self.defaults.items():
            entry = self.table["kernels"].get(name)
            if entry is None:
                continue
            tried, best = entry["tried"], " ".join(str(entry[field]) for field in Blocks._fields)
            first = " ".join(map(str, default))
            wrong = sum(found == WRONG for found in tried.values())
            failed = sum(isinstance(found, str) for found in tried.values()) - wrong
            rows.append([name, first, best, tried.get(first, "–"), tried.get(best, "–"), len(tried), wrong, failed])
        return rows


def _kernel(name: str) -> str:
    return name.partition(" ")[0]


def build_parser() -> cli.OneLineParser:
    """The options of the command."""
    parser = cli.OneLineParser(prog=NAME, description=__doc__)
    parser.set_defaults(run=run)
    add = parser.add_argument
    text = "mechanisms whose kernels are tuned (default: all)"
    add("--mechanism", dest="mechanisms", nargs="+", choices=WORKS, default=list(WORKS), help=text)
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    add("--head-dim", **number, default=64, help="width of a head (default: %(default)s)")
    add("--num-pivots", **number, default=32, help="pivots of LOT and SeT, features of near_far (default: %(default)s)")
    add("--num-heads", **number, default=4, help="attention heads (default: %(default)s)")
    text = "precision of the inputs (default: %(default)s)"
    add("--dtype", default="float16", choices=("float32", "bfloat16", "float16"), help=text)
    text = "stop after this time; the same command then continues (default: no limit)"
    add("--limit", type=float, metavar="SECONDS", default=math.inf, help=text)
    add("--again", action="store_true", help="ignore the table's entries and start from the defaults")
    text = "rehearse at tiny sizes in Triton's interpreter, without a GPU; its times mean nothing"
    add("--rehearse", action="store_true", help=f"{text}; {blocks.VARIABLE} must name a folder for the table")
    return parser


def run(args: Namespace) -> None:
    """Tune, write the table, print its new entries."""
    if args.rehearse:
        if not os.environ.get(blocks.VARIABLE):
            raise InputError(f"--rehearse needs a folder for its table: {blocks.VARIABLE}=FOLDER {NAME} --rehearse")
        if "triton" in sys.modules:
            raise InputError("--rehearse needs a process of its own")
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        raise InputError("there is no GPU; --rehearse runs without one")
    device = torch.device("cpu") if args.rehearse else torch.device("cuda", torch.cuda.current_device())
    unavailable = choice._unavailable(device)
    if unavailable:
        raise InputError(f"no kernel runs here: {unavailable}")
    table = _table(device, args.again)
    dtype = getattr(torch, args.dtype)
    if args.rehearse:
        sizes = Sizes(device, dtype, 1, 16, 3, 20, 20, 130, (16,), 2, 20, 20)
    else:
        sizes = Sizes(device, dtype, args.num_heads, args.head_dim, args.num_pivots)
    tuner, stopped = Tuner(table, device, args.limit, REHEARSED if args.rehearse else CANDIDATES), False
    torch.manual_seed(0)
    try:
        for mechanism in args.mechanisms:
            if mechanism == "near_far" and dtype not in choice.DTYPES[1:]:
                continue  # its kernels are for half precision only
            for work in WORKS[mechanism](sizes):
                tuner.tune(work)
    except Stopped:
        stopped = True
    head = ["kernel, bits and widths", "default", "chosen", "µs", "µs chosen", "tried", "wrong", "failed"]
    print(Table(head, tuner.rows(), align="<<<>>>>>").markdown())
    print(f"\n{blocks.path_of(table['device'])}; default and chosen: block size, warps, stages")
    if stopped:
        print(f"stopped after {args.limit:g} s: the same command continues")


def _table(device: torch.device, again: bool) -> dict[str, Any]:
    """The table to continue with; entries of another Triton version are dropped."""
    import triton

    name = blocks.name_of(device)
    new = {"device": name, "triton": triton.__version__, "kernels": {}}
    if again:
        return new
    try:
        table = blocks.read(name)
    except ValueError as error:
        raise InputError(f"{blocks.path_of(name)} is no table for {name}: {error}; delete it or add --again") from error
    if table.get("triton", triton.__version__) != triton.__version__:
        print(f"the table was made with Triton {table['triton']}; starting a new one for Triton {triton.__version__}")
        return new
    for entry in table["kernels"].values():
        if not isinstance(entry.get("tried"), dict):
            entry["tried"] = {}
    return {**new, **table}
