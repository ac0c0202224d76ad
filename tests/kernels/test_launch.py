"""``launch.start``: when it uses a compiled kernel again, and the arguments that the kernel gets."""

import pytest
import torch

from fairseq_lot.kernels import launch


class Kernel:
    """A fake Triton kernel that records what is compiled and what is launched."""

    arg_names = ["X", "Y", "stride", "n", "EXACT"]
    device_caches = None

    def __init__(self):
        self.compiled, self.launched = [], []

    def warmup(self, *arguments, grid, **settings):
        self.compiled.append((arguments, settings))
        number = len(self.compiled)

        class Compiled:
            def __getitem__(_, grid):
                return lambda *arguments: self.launched.append((number, grid, arguments))

        return Compiled()


@pytest.fixture
def kernel():
    return Kernel()


def start(kernel, x, y, *, stride=16, n=5, exact=True, grid=(3, 2), warps=4):
    launch.start(kernel, grid, (x, y), (stride, n), (exact,), warps, 3)


def test_a_compiled_kernel_is_used_again_with_other_tensors_lengths_and_grids(kernel):
    x, y, z = torch.zeros(4), torch.zeros(4), torch.zeros(9)
    start(kernel, x, y)
    start(kernel, z, x, n=16, grid=(7,))
    ((arguments, settings),) = kernel.compiled
    assert settings == {"EXACT": True, "num_warps": 4, "num_stages": 3} and arguments[2:] == (16, 5)
    (first, second) = kernel.launched
    assert first[:2] == (1, (3, 2, 1)) and first[2][0] is x and first[2][2:] == (16, 5, True)
    assert second[:2] == (1, (7, 1, 1)) and second[2][0] is z and second[2][2:] == (16, 16, True)


@pytest.mark.parametrize(
    "other", [{"stride": 1}, {"exact": False}, {"warps": 8}, {"y": torch.zeros(4, dtype=torch.float16)}], ids=str
)
def test_other_strides_constants_warps_or_dtypes_are_compiled_anew(kernel, other):
    given = {"x": torch.zeros(4), "y": torch.zeros(4)}
    start(kernel, **given)
    start(kernel, **{**given, **other})
    start(kernel, **given)
    assert [number for number, *_ in kernel.launched] == [1, 2, 1]


def test_unaligned_tensors_never_take_the_kernel_of_aligned_ones(kernel):
    x = torch.zeros(8)
    for given in (x, x[1:], x):
        start(kernel, given, x)
    assert [number for number, *_ in kernel.launched] == [1, 2, 1]
