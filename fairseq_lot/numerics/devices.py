"""The table of all choices that differ between a CPU and other devices.

On a CPU arithmetic takes the time, and reading a value costs nothing. On a GPU the number of kernels takes the time,
and the host waits to read a value. :mod:`fairseq_lot.kernels.choice` says when a fused kernel is used.
"""

from typing import NamedTuple

from torch import Tensor


class Ways(NamedTuple):
    """How to compute on a device. The choices change values by rounding only.

    Attributes:
        looks: values of tensors may decide which code runs.
        adds_one_by_one: prefix sums over chunks add one chunk after another, not in a logarithmic number of steps. On a
            CPU torch's sums over a strided axis are ten times as slow.
        steps_by_products: a single query attends by two matrix products, in about half the time of torch's own kernel.
        attends_in_float32: softmax attention is computed in float32 at least: with bfloat16 torch's kernel takes twice
            as long on a CPU.
        projects_probes: LOT projects the layer's inputs directly to its scores, without q and k. False on a GPU, where
            the fused kernel needs q and k.
        convolves_channels_last: convolutions use the channels-last layout: several times as fast on a CPU; on a GPU it
            could switch to TF32.
        dense_length: up to this sentence length, in tokens, near_far takes all keys as one neighbourhood. The value for
            other devices is not measured. One neighbourhood needs half as many kernels there, or a third as many with
            slopes, and n² products are cheap.
        soft_chunk, hard_chunk: elements in a temporary tensor of ESP, with soft and with exact sorts. On a CPU a chunk
            fits into the cache; elsewhere it is large enough to take all slices at once.
    """

    looks: bool
    adds_one_by_one: bool
    steps_by_products: bool
    attends_in_float32: bool
    projects_probes: bool
    convolves_channels_last: bool
    dense_length: int
    soft_chunk: int
    hard_chunk: int


WAYS = {
    "cpu": Ways(True, True, True, True, True, True, dense_length=96, soft_chunk=2**19, hard_chunk=2**17),
    "other": Ways(False, False, False, False, False, False, dense_length=256, soft_chunk=2**25, hard_chunk=2**26),
}


def ways(x: Tensor) -> Ways:
    """The choices for the device of ``x``."""
    return WAYS.get(x.device.type, WAYS["other"])
