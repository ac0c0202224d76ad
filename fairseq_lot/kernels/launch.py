"""Launch kernels: once for all passes, or once per pass if several programs share a sentence."""

import functools
import operator
from typing import Any, NamedTuple, TypeAlias

import torch

from fairseq_lot.kernels.blocks import Blocks, tuned

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Numbers: TypeAlias = tuple[int | float, ...]
Constants: TypeAlias = tuple[Any, ...]

# kernel arguments whose values do not cause a new compilation
RUNTIME = ["n", "m", "r", "passes", "first", "last", "top", "high", "levels", "length", "parts", "seed"]
RUNTIME += ["early", "skip", "sources", "targets", "partials", "blocks", "sentences", "window"]
RUNTIME += ["updates", "number", "longest", "query_passes", "query_length", "query_parts"]
RUNTIME += ["key_passes", "key_length", "key_parts"]
# What a part of a sentence has at least: LOT's in tokens, the solver's in tokens and in scores. On an H100 a layer of
# Sinkhorn's by the solver took 18.6 ms for 2,048 tokens, in eight parts 3.5, and for 512 no less in two.
LOT_PART, PER_PROCESSOR = 128, 4
SOLVER_PART, FEWEST_SCORES = 2048, 2**18
DENSE = 128  # near_far without tangents: the sentence length up to which one launch does it all
LONGEST_ON_CHIP = 128  # queries and keys of Sinkhorn attention whose scores one program holds
MOST_COMPILED = 4096  # keys of :data:`_compiled`; a length that strides depend on has a key of its own

#: compiled kernels by what :func:`start` says
_compiled: dict[tuple, Any] = {}
#: what takes from a kernel's numbers those that it is specialised for
_specialised: dict[Any, Any] = {}


def padded(size: int) -> int:
    """The size rounded up to a power of two, at least 16, as products of tiles need it."""
    return max(16, 1 << (size - 1).bit_length())


def dot_precision(x: torch.Tensor) -> str:
    """Triton's input precision for products that keep float32's precision: on tensor cores three products of tf32."""
    return "tf32x3" if x.is_cuda else "ieee"


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def lot_parts(programs: int, n: int, device: torch.device) -> tuple[int, int]:
    """Number of programs that share the n tokens of a sentence in LOT, and number of tokens for each."""
    return num_parts(programs, n, LOT_PART, _processors(device), PER_PROCESSOR)


def solver_parts(programs: int, n: int, held: int, device: torch.device) -> tuple[int, int]:
    """Number of programs that share a sentence in the solver, and tokens for each; a token has ``held`` scores."""
    return num_parts(programs, n, min(SOLVER_PART, FEWEST_SCORES // held), _processors(device))


def num_parts(programs: int, n: int, shortest: int, processors: int, each: int = 1) -> tuple[int, int]:
    """Number of parts of a sentence, and number of tokens in a part.

    One part, unless there are fewer programs than processors and enough tokens for two parts.

    Args:
        programs: number of programs with one part per sentence.
        n: tokens in a sentence.
        shortest: about the least number of tokens in a part.
        processors: of the device.
        each: wanted number of programs per processor.
    """
    parts = min(-(-each * processors // programs), n // shortest)
    if programs >= processors or parts < 2:
        return 1, n
    length = max(16, n // parts // 16 * 16)
    return -(-n // length), length


class Side(NamedTuple):
    """Arguments that all passes over the tokens of one side share.

    Attributes:
        numbers: a kernel's numbers before ``passes``.
        tokens_first: the first pass starts with an update of the tokens.
        constants: the constants after those of the passes and before ``BLOCK``.
        sizes: bits of a number and widths of tiles, the keys in a table of :mod:`~fairseq_lot.kernels.blocks`.
        blocks: the default block sizes.
    """

    numbers: Numbers
    tokens_first: bool
    constants: Constants
    sizes: tuple[int, ...]
    blocks: Blocks


def start(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Tensors,
    numbers: Numbers,
    constants: Constants,
    warps: int,
    stages: int,
) -> None:
    """Launch a kernel with positional arguments; Triton's own launch by names takes several times as long.

    The key of the compiled kernel has all that Triton specialises for: dtypes and alignment of the tensors, the numbers
    that are not in :data:`RUNTIME`, and the constants.

    Args:
        kernel: its parameters are the tensors, the numbers and the constants, in this order.
        grid: number of programs along each axis.
        warps, stages: of a program.
    """
    chosen = _specialised.get(kernel)
    if chosen is None:
        chosen = _specialised[kernel] = _chooser(kernel, len(tensors), len(numbers))
    address = 0
    types = []
    for x in tensors:
        address |= x.data_ptr()
        types.append(x.dtype)
    device = tensors[0].device
    key = (kernel, device, *types, chosen(numbers), constants, warps, stages)
    compiled = _compiled.get(key) if address % 16 == 0 else None
    if compiled is None:
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        settings = {**dict(zip(names, constants, strict=True)), "num_warps": warps, "num_stages": stages}
        arguments = *tensors, *numbers
        with torch.cuda.device_of(tensors[0]):  # Triton compiles for the current device
            if not hasattr(kernel, "device_caches"):  # Triton's interpreter compiles nothing
                kernel[grid](*arguments, **settings)
                return
            compiled = kernel.warmup(*arguments, grid=grid, **settings)
        if address % 16 == 0:
            if len(_compiled) >= MOST_COMPILED:
                _compiled.clear()
            _compiled[key] = compiled
    run = compiled[(*grid, 1, 1)[:3]]
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            run(*tensors, *numbers, *constants)
        return
    run(*tensors, *numbers, *constants)


def _chooser(kernel, num_tensors, num_numbers):
    """A function that selects the numbers for which Triton specialises a kernel."""
    names = kernel.arg_names[num_tensors : num_tensors + num_numbers]
    places = [place for place, name in enumerate(names) if name not in RUNTIME]
    return operator.itemgetter(*places) if places else lambda numbers: None


def backward_passes(
    kernel: Any,
    split: tuple[int, int, int],
    passes: int,
    top: int,
    begin: bool,
    tensors: Tensors,
    side: Side,
) -> None:
    """Run all backward passes: in one launch, or in one launch per pass if sentences are split.

    Args:
        kernel: of the passes.
        split: programs, parts of a sentence, tokens in a part.
        passes: number of all passes.
        top: the pass whose potential gets its gradient first; -1: none.
        begin: there is work before that pass.
        tensors: of the kernel.
        side: the shared arguments.
    """
    programs, parts, length = split
    block, warps, stages = tuned(kernel.__name__, tensors[0].device, side.sizes, side.blocks)

    def run(high, levels, begin, finish):
        numbers = *side.numbers, passes, top, high, levels, length, parts
        constants = side.tokens_first, begin, finish, parts > 1, *side.constants, block
        start(kernel, (programs, parts), tensors, numbers, constants, warps, stages)

    if parts == 1:
        run(top, max(top, 0), begin, True)
        return
    if begin:
        run(0, 0, True, False)
    for number in range(top, 0, -1):
        run(number, 1, False, False)
    run(0, 0, False, True)
