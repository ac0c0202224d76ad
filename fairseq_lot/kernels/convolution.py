"""Depthwise convolution of LOT's values over tokens, ``out_i = sum_o weight_o v_(i + o - number // 2)``.

One launch forward. One launch backward, then torch adds up the programs' parts of the weights' gradient. torch's own
convolution has three more launches: it converts the values to float32, to channels first, and back.
"""

import torch
import triton
import triton.language as tl

from fairseq_lot.kernels.blocks import Blocks, tuned
from fairseq_lot.kernels.launch import RUNTIME, padded, start
from fairseq_lot.numerics.autograd import once_in_full_precision

ENTRIES, WARPS, STAGES = 4096, 4, 1  # ENTRIES: numbers in a block of values


@triton.jit
def _rows(X, i, stride, n, e, width):
    real = (i >= 0) & (i < n)
    at = X + i[:, None].to(tl.int64) * stride + e[None, :]
    return tl.load(at, mask=real[:, None] & (e < width)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _weights(W, o, head, d, number, e, width):
    """Load the weights of neighbour ``o - number // 2`` for the columns e; column e is channel ``e % d``."""
    return tl.load(W + (head * d + e % d) * number + o, mask=e < width, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=RUNTIME)
def convolve(V, W, OUT, n, d, width, svb, svh, svn, heads, number, D: tl.constexpr, BLOCK: tl.constexpr):
    """Convolve a block of V, ``(bsz, heads, n, width)``, with W, ``(heads, d, number)``; write OUT in float32.

    Grid: sentence and head, block of tokens.
    """
    g = tl.program_id(0).to(tl.int64)
    i, e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    V += g // heads * svb + g % heads * svh
    out = tl.zeros([BLOCK, D], tl.float32)
    for o in range(0, number):
        out += _rows(V, i + o - number // 2, svn, n, e, width) * _weights(W, o, g % heads, d, number, e, width)[None, :]
    at = OUT + (g * n + i[:, None]) * width + e[None, :]
    tl.store(at, out, mask=(i < n)[:, None] & (e < width)[None, :])


@triton.jit(do_not_specialize=RUNTIME)
def convolve_backward(V, W, GRAD_OUT, GRAD_V, OF_PARTS, n, d, width, svb, svh, svn, heads, number,
                      D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the gradient of a block of values to GRAD_V, with the block's part of the weights' gradient to OF_PARTS.

    OF_PARTS is ``(bsz, heads, blocks, number, width)``, float32. Grid: sentence and head, block of tokens.
    """
    g = tl.program_id(0).to(tl.int64)
    i, e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    V += g // heads * svb + g % heads * svh
    GRAD_OUT += g * n * width
    OF_PARTS += (g * tl.num_programs(1) + tl.program_id(1)) * number * width
    grad, of_v = _rows(GRAD_OUT, i, width, n, e, width), tl.zeros([BLOCK, D], tl.float32)
    for o in range(0, number):
        shift = o - number // 2
        of_v += _rows(GRAD_OUT, i - shift, width, n, e, width) * _weights(W, o, g % heads, d, number, e, width)[None, :]
        of_weights = tl.sum(grad * _rows(V, i + shift, svn, n, e, width), 0)
        tl.store(OF_PARTS + o * width + e, of_weights, mask=e < width)
    at = GRAD_V + (g * n + i[:, None]) * width + e[None, :]
    tl.store(at, of_v.to(GRAD_V.dtype.element_ty), mask=(i < n)[:, None] & (e < width)[None, :])


def _launch(kernel, tensors, v, weight, parts):
    """Launch a kernel; return its last tensor, which ``parts``, if given, makes for a number of blocks."""
    (bsz, heads, n, width), (_, d, number) = v.shape, weight.shape
    D = padded(width)
    default = Blocks(max(16, ENTRIES // D), WARPS, STAGES)
    block, warps, stages = tuned(kernel.__name__, v.device, (8 * v.element_size(), D), default)
    blocks = triton.cdiv(n, block)
    tensors = (*tensors, parts(blocks)) if parts else tensors
    numbers = n, d, width, *v.stride()[:3], heads, number
    start(kernel, (bsz * heads, blocks), tensors, numbers, (D, block), warps, stages)
    return tensors[-1]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, weight):
        v, weight = v if v.stride(-1) == 1 else v.contiguous(), weight.contiguous()
        ctx.save_for_backward(v, weight)
        return _launch(
            convolve, (v, weight, torch.empty(v.shape, dtype=torch.float32, device=v.device)), v, weight, None
        )

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad):
        v, weight = ctx.saved_tensors
        (bsz, heads, _, width), (_, d, number) = v.shape, weight.shape
        grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)

        def room(blocks):
            return torch.empty(bsz, heads, blocks, number, width // d, d, dtype=torch.float32, device=v.device)

        of_parts = _launch(convolve_backward, (v, weight, grad.contiguous(), grad_v), v, weight, room)
        return grad_v, of_parts.sum((0, 2, 4)).transpose(1, 2).to(weight.dtype)


def convolution(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The convolved values in float32; arguments as for :func:`~fairseq_lot.kernels.choice.convolution`."""
    return _Convolution.apply(v, weight)
