"""Settings of all tests, and helpers of many: random numbers, comparisons, gradients, fairseq in float64."""

import contextlib
import importlib.util
from pathlib import Path

import pytest
import torch
from fairseq import utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairseq_lot import cli
from fairseq_lot.numerics.devices import WAYS

ROOT = Path(__file__).resolve().parents[1]
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """``fast_if``: mark cases of a grid as slow if they do not meet its condition."""
    for item in items:
        for marker in item.iter_markers("fast_if"):
            if not marker.args[0](**item.callspec.params):
                item.add_marker("slow")


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test draws the same numbers, alone or among others."""
    torch.manual_seed(0)


@pytest.fixture
def refused(capfd):
    """A function that runs fairseq-lot, asserts that it fails with one line with these words, and returns the line."""

    def refused(argv, *words):
        capfd.readouterr()
        code = cli.main([str(word) for word in argv])
        out, err = capfd.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("fairseq-lot: error: "), err
        assert all(str(word) in err for word in words), err
        return err

    return refused


def program(path):
    """A Python file of the repository, imported as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random(*shape, seed=1, dtype=torch.float64):
    """Normal random numbers that depend only on the seed and the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(actual, expected, tolerance=1e-12, *, relative=0.0):
    """Assert that two tensors, or two sequences of tensors, have the same dtype and differ by at most the tolerance."""
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=relative)


def gradients(values, leaves):
    """Gradients of a fixed weighted sum of the values with respect to the leaves; zero for a leaf that is not used."""
    weights = random(*values.shape, seed=3, dtype=values.dtype)
    return torch.autograd.grad((values * weights).sum(), leaves, allow_unused=True, materialize_grads=True)


class Sizes(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operation returns, and of all returned tensors together."""

    def __init__(self):
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        stored = [x.untyped_storage().size() // x.element_size() for x in tree_leaves(out) if torch.is_tensor(x)]
        self.largest, self.total = max([self.largest, *stored]), self.total + sum(stored)
        return out


@contextlib.contextmanager
def softmax_in_its_own_dtype():
    """Make fairseq's attention compute its softmax in the dtype of the input; it uses float32 for all dtypes.

    A float64 model then computes in float64 throughout, so that results differ only by float64 rounding. They need not
    agree bit for bit: on some processors matrix products of different batch sizes differ in the last bit.
    """

    def softmax(x, dim, onnx_trace=False):
        return torch.softmax(x, dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "softmax", softmax)
        yield


def change_ways(monkeypatch, **changes):
    """Change choices of the CPU in the table ``WAYS``, so that it computes as another device would."""
    monkeypatch.setitem(WAYS, "cpu", WAYS["cpu"]._replace(**changes))
