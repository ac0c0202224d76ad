"""Two thousand batches of random shapes through every mechanism: no NaN and no memory leak."""

import gc

import pytest
import torch

from tests.variants import CASES, HEAD_DIM, NUM_HEADS, PLAIN_CASES

BATCHES, WARM_UP = 2000, 200
# the default of each mechanism, and variants that take another path
VARIANTS = ("default", "hard", "learnable", "alibi", "convolution", "positional", "tolerance")
SOAKED = [case for case in PLAIN_CASES if case.variant in VARIANTS]
SOAKED += [case for case in CASES if str(case) in ("differential-softmax-default", "differential-lot-default")]


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def batch(generator):
    """Inputs of a random shape, and a ragged padding mask or, in half of the batches, None."""
    bsz, length = (int(torch.randint(1, top, (), generator=generator)) for top in (5, 25))
    inputs = [torch.randn(bsz, NUM_HEADS, length, HEAD_DIM, generator=generator) for _ in range(3)]
    lengths = torch.randint(1, length + 1, (bsz, 1), generator=generator)
    mask = torch.arange(length) >= lengths if torch.rand((), generator=generator) < 0.5 else None
    return [x.requires_grad_() for x in inputs], mask


@pytest.mark.slow
@pytest.mark.parametrize("case", SOAKED, ids=str)
def test_random_batches_give_no_nan_and_leak_no_memory(case):
    mechanism = case.build(torch.float32)
    generator = torch.Generator().manual_seed(11)
    for number in range(BATCHES):
        inputs, mask = batch(generator)
        values = mechanism(*inputs, mask, mask, need_weights=number % 4 == 0).values
        values.square().sum().backward()
        leaves = [*inputs, *mechanism.parameters()]
        assert values.isfinite().all() and all(x.grad.isfinite().all() for x in leaves)
        del leaves
        mechanism.zero_grad(set_to_none=True)
        if number == WARM_UP:
            gc.collect()
            tensors, memory = sum(type(x) is torch.Tensor for x in gc.get_objects()), resident()
    del values, inputs, mask
    gc.collect()
    assert sum(type(x) is torch.Tensor for x in gc.get_objects()) <= tensors
    assert resident() - memory < 16 * 2**20
