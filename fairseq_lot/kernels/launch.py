"""How kernels are launched: once for all passes, or once a pass where several programs share a sentence."""

import functools
from typing import Any

import torch

# arguments of kernels for whose values there is no new compilation
RUNTIME = ["n", "m", "r", "passes", "first", "last", "top", "high", "levels", "length", "parts", "seed", "slot"]
# What a part of a sentence has at least, in tokens and in scores. On an H100 LOT's layer took 0.6 ms for 512 tokens, in
# two parts 2.4. Sinkhorn's took 18.6 for 2,048, in eight parts 3.5, and for 512 no less in two.
SHORTEST_PART, FEWEST_SCORES = 2048, 2**18


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


def strides(name: str, x: torch.Tensor, axes: str) -> dict[str, int]:
    """The strides of the first axes as a kernel names them: ``sqb``, ``sqh``, ``sqn`` for ``"sq"`` and ``"bhn"``."""
    return {f"{name}{axis}": stride for axis, stride in zip(axes, x.stride(), strict=False)}


def forward_passes(
    kernel: Any, programs: int, parts: int, length: int, passes: int, to_do: int, **arguments: Any
) -> None:
    """One launch for all, or one a pass where the tokens are split; ``to_do`` passes come before the values."""
    grid, common = (programs, parts), {"passes": passes, "length": length, "parts": parts, **arguments}
    with torch.cuda.device_of(arguments["REACHES"]):  # Triton launches on the current device
        if parts == 1:
            kernel[grid](first=0, last=to_do, VALUES=True, **common)
            return
        for number in range(to_do):
            kernel[grid](first=number, last=number + 1, VALUES=False, **common)
        kernel[grid](first=0, last=0, VALUES=True, **common)


def backward_passes(
    kernel: Any,
    programs: int,
    parts: int,
    length: int,
    passes: int,
    top: int,
    begin: bool,
    grad_h: torch.Tensor,
    **arguments: Any,
) -> None:
    """As :func:`forward_passes`; ``top`` is the pass whose potential gets its gradient first, -1 for none."""
    grid, common = (programs, parts), {"passes": passes, "top": top, "length": length, "parts": parts, **arguments}
    common["GRAD_H"] = grad_h
    with torch.cuda.device_of(grad_h):
        if parts == 1:
            whole = {"OUT": grad_h, "slot": grad_h.stride(0), "high": top, "levels": max(top, 0)}
            kernel[grid](**whole, BEGIN=begin, FINISH=True, **common)
            return
        of_parts = grad_h.new_empty(programs, parts, grad_h.size(-1))
        common |= {"OUT": of_parts, "slot": 0}
        if begin:
            kernel[grid](high=0, levels=0, BEGIN=True, FINISH=False, **common)
            if top >= 0:
                torch.sum(of_parts, 1, out=grad_h[top])
        for number in range(top, 0, -1):
            kernel[grid](high=number, levels=1, BEGIN=False, FINISH=False, **common)
            torch.sum(of_parts, 1, out=grad_h[number - 1])
        kernel[grid](high=0, levels=0, BEGIN=False, FINISH=True, **common)


def merged(reaches: torch.Tensor) -> torch.Tensor:
    """Reaches of parts, ``(programs, passes, parts, 2, R)``, as those of sentences, ``(programs, passes, 2, R)``."""
    if reaches.size(2) == 1:
        return reaches.squeeze(2)
    tops, log_totals = reaches.unbind(-2)
    top = tops.amax(2, keepdim=True)
    top = torch.where(top.isneginf(), 0.0, top)
    log_total = (tops - top + log_totals).logsumexp(2)
    return torch.stack([top.squeeze(2), torch.where(log_total.isneginf(), 0.0, log_total)], -2)
