"""How kernels are launched: once for all passes, or once a pass where several programs share a sentence."""

import functools
import operator
from typing import Any, NamedTuple, TypeAlias

import torch

from fairseq_lot.kernels.blocks import Blocks, tuned

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Numbers: TypeAlias = tuple[int | float, ...]
Constants: TypeAlias = tuple[Any, ...]

# arguments of kernels for whose values there is no new compilation
RUNTIME = ["n", "m", "r", "passes", "first", "last", "top", "high", "levels", "length", "parts", "seed", "slot"]
RUNTIME += ["early", "skip", "sources", "targets", "partials", "blocks", "sentences", "window"]
RUNTIME += ["updates", "number", "longest"]
# What a part of a sentence has at least, in tokens and in scores. On an H100 LOT's layer took 0.6 ms for 512 tokens, in
# two parts 2.4. Sinkhorn's took 18.6 for 2,048, in eight parts 3.5, and for 512 no less in two.
SHORTEST_PART, FEWEST_SCORES = 2048, 2**18
DENSE = 128  # near_far without tangents: the sentence length up to which one launch does it all
LONGEST_ON_CHIP = 128  # queries and keys of Sinkhorn attention whose scores one program holds
MOST_COMPILED = 4096  # keys of :data:`_compiled`; a length that strides depend on has a key of its own

#: compiled kernels by what :func:`start` says
_compiled: dict[tuple, Any] = {}
#: what takes from a kernel's numbers those that it is specialised for
_specialised: dict[Any, Any] = {}


def padded(size: int) -> int:
    """The next power of two that a product of tiles can have, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def dot_precision(x: torch.Tensor) -> str:
    """Products of float32 keep its precision; on the tensor cores that takes three of tf32."""
    return "tf32x3" if x.is_cuda else "ieee"


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def num_parts(programs: int, n: int, held: int, device: torch.device) -> tuple[int, int]:
    """Among how many programs the n tokens of one sentence are split, and how many each of them has.

    One, unless there are fewer programs than processors and much to do: each token has ``held`` scores.
    """
    shortest = min(SHORTEST_PART, FEWEST_SCORES // held)
    parts = max(1, min(-(-_processors(device) // programs), n // shortest))
    length = -(-n // (64 * parts)) * 64
    return -(-n // length), length


class Side(NamedTuple):
    """What all passes over the tokens of one side have in common.

    Attributes:
        numbers: a kernel's numbers before ``passes``.
        tokens_first: the first pass begins with an update of the tokens.
        constants: the constants between ``VALUES``, backward ``FINISH``, and ``BLOCK``.
        sizes: bits of a number and widths of tiles, by which a table of :mod:`~fairseq_lot.kernels.blocks` goes.
        blocks: the default.
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
    """Launch a kernel by positions: Triton's own path from names takes several times as long.

    The compiled kernel is found by everything that Triton specialises it for: types and alignment of the tensors, the
    values of the numbers that are not in :data:`RUNTIME`, and the constants.

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
            if not hasattr(kernel, "device_caches"):  # the interpreter, which compiles nothing
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
    """What takes from the numbers those that Triton specialises a kernel for."""
    names = kernel.arg_names[num_tensors : num_tensors + num_numbers]
    places = [place for place, name in enumerate(names) if name not in RUNTIME]
    return operator.itemgetter(*places) if places else lambda numbers: None


def forward_passes(
    kernel: Any,
    split: tuple[int, int, int],
    passes: int,
    to_do: int,
    tensors: Tensors,
    side: Side,
) -> None:
    """One launch for all, or one a pass where the tokens are split; ``to_do`` passes come before the values.

    Args:
        split: programs, parts of a sentence, tokens of a part.
    """
    programs, parts, length = split
    block, warps, stages = tuned(kernel.__name__, tensors[0].device, side.sizes, side.blocks)

    def run(first, last, values):
        numbers = *side.numbers, passes, first, last, length, parts
        constants = side.tokens_first, values, *side.constants, block
        start(kernel, (programs, parts), tensors, numbers, constants, warps, stages)

    if parts == 1:
        run(0, to_do, True)
        return
    for number in range(to_do):
        run(number, number + 1, False)
    run(0, 0, True)


def backward_passes(
    kernel: Any,
    split: tuple[int, int, int],
    passes: int,
    top: int,
    begin: bool,
    grad_h: torch.Tensor,
    tensors: Tensors,
    side: Side,
) -> None:
    """As :func:`forward_passes`; ``top`` is the pass whose potential gets its gradient first, -1 for none.

    Args:
        tensors: all before ``GRAD_H`` and ``OUT``.
    """
    programs, parts, length = split
    block, warps, stages = tuned(kernel.__name__, tensors[0].device, side.sizes, side.blocks)

    def run(out, slot, high, levels, begin, finish):
        numbers = *side.numbers, passes, top, high, levels, length, parts, slot
        constants = side.tokens_first, begin, finish, *side.constants, block
        start(kernel, (programs, parts), (*tensors, grad_h, out), numbers, constants, warps, stages)

    if parts == 1:
        run(grad_h, grad_h.stride(0), top, max(top, 0), begin, True)
        return
    of_parts = grad_h.new_empty(programs, parts, grad_h.size(-1))
    if begin:
        run(of_parts, 0, 0, 0, True, False)
        if top >= 0:
            torch.sum(of_parts, 1, out=grad_h[top])
    for number in range(top, 0, -1):
        run(of_parts, 0, number, 1, False, False)
        torch.sum(of_parts, 1, out=grad_h[number - 1])
    run(of_parts, 0, 0, 0, False, True)


def merged(reaches: torch.Tensor) -> torch.Tensor:
    """Reaches of parts, ``(programs, passes, parts, 2, R)``, as those of sentences, ``(programs, passes, 2, R)``."""
    if reaches.size(2) == 1:
        return reaches.squeeze(2)
    tops, log_totals = reaches.unbind(-2)
    top = tops.amax(2, keepdim=True)
    top = torch.where(top.isneginf(), 0.0, top)
    log_total = (tops - top + log_totals).logsumexp(2)
    return torch.stack([top.squeeze(2), torch.where(log_total.isneginf(), 0.0, log_total)], -2)
