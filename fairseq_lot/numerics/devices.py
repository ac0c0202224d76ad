"""What is computed in another way on a CPU than on other devices: one table.

On a CPU the arithmetic takes the time, and to look at a number costs nothing. On a GPU the number of kernels takes the
time, and the host waits for the device to look at a number. :mod:`fairseq_lot.kernels.choice` says when a fused kernel
is used.
"""

from typing import NamedTuple

from torch import Tensor


class Ways(NamedTuple):
    """How to compute on a device; no choice changes a value but by rounding.

    Attributes:
        looks: the values of tensors may decide how to go on.
        adds_one_by_one: sums over chunks are made one after the other, instead of all in as many steps as their number
            has digits. torch sums over a strided axis ten times as slowly on a CPU.
        steps_by_products: one query attends by two products, in about half the time of torch's own kernel.
        projects_probes: LOT's scores are made by a narrow projection; a fused kernel wants q and k themselves.
        convolves_channels_last: several times as fast on a CPU; on a GPU it could mean TF32.
        dense_length: up to this sentence length near_far takes all keys as one neighbourhood. On devices other than
            the CPU the number is reasoned, not measured: one neighbourhood takes half as many kernels, a third with
            slopes, and n² is little there.
        soft_chunk, hard_chunk: elements of one tensor of ESP that is alive at a time beside inputs and outputs, with
            soft and with exact sorts: on a CPU about a cache's worth, elsewhere enough to take all slices at once.
    """

    looks: bool
    adds_one_by_one: bool
    steps_by_products: bool
    projects_probes: bool
    convolves_channels_last: bool
    dense_length: int
    soft_chunk: int
    hard_chunk: int


WAYS = {
    "cpu": Ways(True, True, True, True, True, dense_length=96, soft_chunk=2**19, hard_chunk=2**17),
    "other": Ways(False, False, False, False, False, dense_length=256, soft_chunk=2**25, hard_chunk=2**26),
}


def ways(x: Tensor) -> Ways:
    """The ways of the device that ``x`` is on."""
    return WAYS.get(x.device.type, WAYS["other"])
