"""near_far attention with one half-update: three launches forward and four backward at any length.

Keys j in the band of query i, ``|i - j| <= W``, have exact scores. All other keys have the features' score,
``log sum_t exp(a_it + b_jt)``, where a and b are the logs of the features of queries and keys,

    a_it = s q_i.z_t - s|q_i|^2/2 + c_t - log r        b_jt = s k_j.z_t - s|k_j|^2/2
    with tangents
    a_it = s (q_i - z_t).mean_t + c_t - log r          b_jt = s k_j.z_t

and ``mean_t`` is the mean of the keys, weighted by ``softmax_j(b_jt)``. In the kernels all logs are to base two.

Chunks and blocks: keys are cut into chunks of ``C`` slots, queries into blocks of C slots, half a chunk off.

    chunks of keys       |    0    |    1    |    2    |    3    |   ...
    blocks of queries   0    |    1    |    2    |    3    |    4   ...

Block ``c`` overlaps the chunks ``c - 1`` and ``c``. They hold the bands of all its queries if ``2 W <= C``; a program
reads them key by key. All other chunks are *beyond* the block and are read as sums, three for each feature:

    summarise_keys   for each chunk: top_t = max_j b_jt, mass_t = sum_j exp(b_jt - top_t),
                     sum_t = sum_j exp(b_jt - top_t) v_j
    merge            the same three for each block, over all chunks beyond it
    attend           the values of each block: feature t adds exp(a_it + top_t) mass_t to the total weight of row i, and
                     exp(a_it + top_t) sum_t to its weighted values

``merge`` adds up the chunks anew for each block, relative to the largest top among them. Nothing is subtracted, so no
digits cancel, and in the causal form no later key changes the scaling.

Backward: ``query_gradients``, ``merge``, ``key_gradients``, ``add_up``. Blocks and chunks exchange their roles:
chunk ``c`` reads the queries of blocks ``c`` and ``c + 1`` one by one, and sums over the queries of all other blocks.
With tangents, ``merge`` also computes the means forward and their gradient backward.

Short sentences: without tangents, a sentence of at most ``DENSE`` slots has nothing beyond: blocks are not shifted
and read all chunks. Forward this is one launch. Backward it is two for one chunk (``all_gradients``), three for two.

Range of float32: in a pair of block and chunk the sums over features are one matrix product, ``phi psi^T`` with
``psi_jt = 2^(b_jt - top_t + ROOM)`` and ``phi_it = 2^(a_it + top_t - reference_i + ROOM)``. ``top`` is taken over all
keys of the chunk, also over keys that row i does not count: those in its band, and later ones in the causal form. They
may exceed the counted ones by a factor of 2^(2 ROOM) before precision is lost.

A row's maximum and the log of its sum relative to the maximum are stored separately: at scores of 1e7 one float32 for
both would round the log away.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairseq_lot.kernels import launch
from fairseq_lot.kernels.blocks import Blocks, tuned
from fairseq_lot.kernels.launch import padded
from fairseq_lot.kernels.naive import NearFarSettings
from fairseq_lot.kernels.near_far_backward import add_up, all_gradients, key_gradients, query_gradients
from fairseq_lot.kernels.near_far_forward import attend, merge, summarise_keys
from fairseq_lot.kernels.near_far_tiles import LOG2_E
from fairseq_lot.numerics.autograd import once_in_full_precision

CHUNK = 64  # keys in a chunk, queries in a block
TILE = 32  # keys of a block, or queries of a chunk, that are read at once
MERGED = 32  # chunks that a program of merge reads at once, and blocks that it writes
STAGES = 1  # no loads ahead: loops are short, and other programs hide the latency


class _Cut:
    """How n slots are cut into chunks of keys and blocks of queries.

    Attributes:
        beyond: whether chunks can be beyond a block.
        length: C, slots in a chunk or block.
        tile: slots that are read at once.
        chunks, blocks: how many there are; blocks without queries are not counted.
        sides: 2 if the sums over keys before and after a block are separate, else 1.
    """

    def __init__(self, n: int, early: int, chunk: int, tile: int, settings: NearFarSettings):
        self.beyond = n > launch.DENSE or settings.tangents
        self.length = chunk if self.beyond or n > chunk // 2 else padded(n)
        self.tile = min(tile, self.length)
        self.chunks = -(-n // self.length)
        shift = self.length // 2 if self.beyond else 0
        #: number of blocks before the first query's block
        self.skip = (early + shift) // self.length
        self.blocks = -(-(n + shift) // self.length) - self.skip
        self.sides = 2 if settings.slopes is not None and not settings.causal else 1

    def sums(self, count: int, programs: int, r: int, width: int, device: torch.device) -> dict[str, Tensor]:
        """Empty tensors for the tops, masses and sums of ``count`` chunks or blocks; of size 0 if nothing is beyond."""
        shape = (programs, self.sides, count if self.beyond else 0, r)
        return _empty(device, TOPS=shape, MASSES=shape, SUMS=(*shape, width))


def _empty(device: torch.device, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}


def _to(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"TO_{name}": x for name, x in sums.items()}


def precision(x: Tensor) -> str:
    """Triton's ``input_precision`` for products of float32: full for x in float32, tf32 for x in half precision."""
    if not x.is_cuda and x.dtype != torch.float16:
        return "ieee"
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def sizes_of_cuts(x: Tensor) -> tuple[int, int]:
    """Default lengths of a chunk and of a tile; smaller if the kernels would otherwise spill registers."""
    wide = x.size(-1) > 64
    if x.is_cuda and (x.dtype == torch.float32 or (wide and torch.cuda.get_device_capability(x.device)[0] < 9)):
        return 32, 16
    return CHUNK, TILE


def warps(width: int) -> int:
    """Default number of warps of a program with tiles of that width."""
    return 4 if width <= 64 else 8


def _last_beside(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _time_first(like: Tensor, width: int) -> Tensor:
    """An empty tensor ``(bsz, heads, n, width)``, laid out so that ``(n, bsz, heads x width)`` is a view of it."""
    bsz, heads, n, _ = like.shape
    return torch.empty(n, bsz, heads, width, dtype=like.dtype, device=like.device).permute(1, 2, 0, 3)


def strides(name: str, x: Tensor, axes: str) -> dict[str, int]:
    """Strides of the first axes by their names in a kernel: ``sqb``, ``sqh``, ``sqn`` for ``"sq"`` and ``"bhn"``."""
    return {f"{name}{axis}": stride for axis, stride in zip(axes, x.stride(), strict=False)}


@functools.cache
def _parameters(kernel: Any) -> list[Callable[[dict[str, Any]], tuple]]:
    """Functions that pick a kernel's tensors, numbers and constants, in this order, from arguments by name."""
    names = kernel.arg_names
    small = [i for i, name in enumerate(names) if name.islower()]
    parts = names[: small[0]], names[small[0] : small[-1] + 1], names[small[-1] + 1 :]
    return [operator.itemgetter(*part) for part in parts]


def _launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Launch a kernel; arguments that it does not take are ignored."""
    tile, warps, stages = _tuned(kernel, arguments, arguments["T"])
    arguments["T"] = min(tile, arguments["C"])
    tensors, numbers, constants = (chosen(arguments) for chosen in _parameters(kernel))
    launch.start(kernel, grid, tensors, numbers, constants, warps, stages)


def _tuned(kernel: Any, arguments: dict[str, Any], block: int) -> Blocks:
    default = Blocks(block, arguments["num_warps"], STAGES)
    return tuned(kernel.__name__, arguments["device"], arguments["sizes"], default)


def _merge(cut: _Cut, sources: int, targets: int, to_keys: bool, arguments: dict[str, Any]) -> None:
    """Launch :func:`merge`; with tangents there is one more program for each feature."""
    arguments = arguments | {"num_warps": 4}
    merged = _tuned(merge, arguments, MERGED).block
    grid = (arguments["programs"] * arguments["R"], -(-targets // merged) + arguments["TANGENTS"], cut.sides)
    own = {"sources": sources, "targets": targets, "TO_KEYS": to_keys, "N": merged, "TWO_SIDES": cut.sides == 2}
    _launch(merge, grid, **arguments | own)


class _NearFar(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, features, bias, settings):
        q, k, v = map(_last_beside, (q, k, v))
        (bsz, heads, rows, d), n, dv, r = q.shape, k.size(2), v.size(3), features.size(1)
        programs, R, D, DV, device = bsz * heads, padded(r), padded(d), padded(dv), q.device
        features, bias = features.contiguous(), bias.contiguous()
        slopes, pads = settings.slopes, settings.key_padding_mask
        numbers = {"device": device, "sizes": (8 * q.element_size(), R, D, DV), "num_warps": warps(max(d, dv))}
        chunk, tile = sizes_of_cuts(q)
        cut = _Cut(n, n - rows, _tuned(summarise_keys, numbers, chunk).block, tile, settings)
        # any tensor is passed in place of one that is not given; it is not read
        held = {"Q": q, "K": k, "V": v, "Z": features, "BIAS": bias, "SLOPES": q if slopes is None else slopes}
        held["PADS"] = q if pads is None else pads.contiguous().view(torch.uint8)
        numbers |= {"n": n, "early": n - rows, "skip": cut.skip, "r": r, "d": d, "dv": dv, "heads": heads}
        numbers |= {"scale": settings.scale * LOG2_E.value, "natural": settings.scale, "window": settings.window}
        numbers |= {"sides": cut.sides, "programs": programs, "partials": 0}
        numbers |= strides("sq", q, "bhn") | strides("sk", k, "bhn") | strides("sv", v, "bhn")
        numbers |= strides("sp", held["PADS"], "b")
        numbers |= {"R": R, "C": cut.length, "T": cut.tile, "D": D, "DV": DV, "BEYOND": cut.beyond}
        numbers |= {"CAUSAL": settings.causal, "TANGENTS": settings.tangents, "PRECISION": precision(q)}
        numbers |= {"HAS_PADS": pads is not None, "HAS_SLOPES": slopes is not None}
        of_means = dict.fromkeys(("MEANS", "CONSTANTS", "TOTAL_TOPS", "TOTAL_MASSES"), bias)
        of_keys = dict.fromkeys(("KEY_TOPS", "KEY_MASSES", "KEY_SUMS"), bias)
        if settings.tangents:
            each, shape = (programs, R), (programs, cut.chunks, R)
            of_means = _empty(device, MEANS=(*each, d), CONSTANTS=each, TOTAL_TOPS=each, TOTAL_MASSES=each)
            of_keys = _empty(device, KEY_TOPS=shape, KEY_MASSES=shape, KEY_SUMS=(*shape, d))
        at_blocks = cut.sums(cut.blocks, programs, R, dv, device)
        results = {"OUT": _time_first(q, dv)}
        results |= _empty(device, ROW_PEAKS=(bsz, heads, rows), ROW_LOGS=(bsz, heads, rows))
        both = held | numbers | of_means
        if cut.beyond:
            sums = cut.sums(cut.chunks, programs, R, dv, device)
            _launch(summarise_keys, (programs, cut.chunks, cut.sides), **both, **of_keys, **sums)
            unused = dict.fromkeys(("QUERY_SUMS", "GRAD_BIAS", "GRAD_MEANS", "GRAD_Z"), bias)
            _merge(cut, cut.chunks, cut.blocks, False, both | of_keys | unused | sums | _to(at_blocks))
        _launch(attend, (programs, cut.blocks), **both, **results, **at_blocks)
        tensors = held | of_means | results | at_blocks
        ctx.save_for_backward(*tensors.values())
        ctx.names, ctx.numbers, ctx.cut = list(tensors), numbers, cut
        return results["OUT"]

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_out):
        held, cut, numbers = dict(zip(ctx.names, ctx.saved_tensors, strict=True)), ctx.cut, ctx.numbers
        q, k, v, features, bias = (held[name] for name in ("Q", "K", "V", "Z", "BIAS"))
        (bsz, heads, rows, d), dv, r = q.shape, v.size(3), features.size(1)
        programs, R, device, tangents = numbers["programs"], numbers["R"], q.device, numbers["TANGENTS"]
        grad_out = _last_beside(grad_out)
        grads = {"GRAD_Q": _time_first(q, d), "GRAD_K": _time_first(k, d), "GRAD_V": _time_first(v, dv)}
        alone = cut.chunks == 1 and not cut.beyond
        # number of the programs' parts of the gradients of bias and features
        blocks = 1 if alone else cut.blocks
        partials = 1 if alone else cut.chunks + (1 if tangents else blocks)
        parts = _empty(device, GRAD_Z=(programs, partials, r, d), GRAD_BIAS=(programs, blocks, r))
        numbers = numbers | strides("sd", grad_out, "bhn") | {"partials": partials, "blocks": blocks}
        totals = {"TO_Z": torch.empty_like(features), "TO_BIAS": torch.empty_like(bias)}
        both = held | grads | parts | numbers | {"GRAD_OUT": grad_out}
        if alone:
            _launch(all_gradients, (programs,), **both)
        else:
            both |= _empty(device, DELTA=(bsz, heads, rows))
            both |= dict.fromkeys(("QUERY_SUMS", "GRAD_MEANS"), bias)
            if tangents:
                both |= _empty(device, QUERY_SUMS=(programs, blocks, r, d), GRAD_MEANS=(programs, R, d))
            of_blocks = cut.sums(blocks, programs, R, dv, device)
            at_chunks = cut.sums(cut.chunks, programs, R, dv, device)
            _launch(query_gradients, (programs, blocks), **both, **_to(of_blocks))
            if cut.beyond:
                unused = dict.fromkeys(("KEY_TOPS", "KEY_MASSES", "KEY_SUMS"), bias)
                _merge(cut, blocks, cut.chunks, True, both | unused | of_blocks | _to(at_chunks))
            _launch(key_gradients, (programs, cut.chunks), **both | at_chunks)
        own = {"sentences": bsz, "N": 32, "num_warps": 4}
        _launch(add_up, (heads * r,), **both | totals | own)
        return *grads.values(), *totals.values(), None


def near_far(
    q: Tensor, k: Tensor, v: Tensor, features: Tensor, feature_bias: Tensor, settings: NearFarSettings
) -> Tensor:
    """Values of near_far attention, ``(bsz, num_heads, rows, value_dim)``, zero in rows without mass.

    Args:
        q: ``(bsz, num_heads, rows, d)``; fewer rows than keys only in the causal form.
        k, v: ``(bsz, num_heads, n, width)``, in the dtype of q.
        features: z, ``(num_heads, r, d)``, in the dtype of q or float32.
        feature_bias: c, ``(num_heads, r)``.
    """
    return _NearFar.apply(q, k, v, features, feature_bias, settings)
