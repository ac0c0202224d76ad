"""Where kernels are used: the environment variable, refusals, and the number of programs of a sentence."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.kernels import choice, launch


@pytest.fixture
def mode(monkeypatch):
    """A function that sets FAIRSEQ_LOT_KERNELS, outside Triton's interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return lambda value: monkeypatch.setenv(choice.VARIABLE, value)


def attend(name="lot", **arguments):
    x = torch.randn(2, 2, 5, 4)
    return build_mechanism(name, num_heads=2, head_dim=4)(x, x, x, **arguments)


def test_an_unknown_value_is_refused(mode):
    mode("fast")
    with pytest.raises(InputError, match="^FAIRSEQ_LOT_KERNELS must be auto, off or on, got 'fast'$"):
        attend()


@pytest.mark.parametrize("name", ["lot", "set", "sinkhorn"])
def test_kernels_asked_for_on_the_cpu_are_refused_with_the_reason(name, mode, monkeypatch):
    mode("on")
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: object())
    expected = "cannot be used: the tensors are on cpu, not on a CUDA device; set it to auto or off$"
    with pytest.raises(InputError, match=expected):
        attend(name)


def test_a_missing_triton_is_the_reason(mode, monkeypatch):
    mode("on")
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="cannot be used: triton is not installed; set it to auto or off$"):
        attend()


def test_an_old_device_is_the_reason(monkeypatch):
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for capability, expected in (((7, 5), "cuda:0 has compute capability 7.5, 8.0 is needed"), ((8, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert choice._unavailable(torch.device("cuda:0")) == expected


def test_mechanisms_without_a_kernel_are_computed_even_if_kernels_are_on(mode):
    mode("on")
    softmax = attend("softmax")
    assert softmax.values.isfinite().all()
    x = torch.randn(2, 2, 5, 4)
    causal = build_mechanism("lot", num_heads=2, head_dim=4, query_updates=1)(x, x, x, causal=True)
    assert causal.values.isfinite().all()


def test_on_the_cpu_triton_is_not_even_imported():
    code = (
        "import os, sys, torch\n"
        "from fairseq_lot.attention.registry import build_mechanism\n"
        "x = torch.randn(2, 2, 5, 4)\n"
        "for value in ('auto', 'off'):\n"
        f"    os.environ['{choice.VARIABLE}'] = value\n"
        "    for name in ('lot', 'near_far'):\n"
        "        build_mechanism(name, num_heads=2, head_dim=4)(x, x, x)\n"
        "kernels = 'triton', 'fairseq_lot.kernels.lot', 'fairseq_lot.kernels.near_far'\n"
        "sys.exit(str([name for name in sys.modules if name in kernels] or ''))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stderr.strip() == ""


@pytest.fixture
def h100(monkeypatch):
    """A device with the 132 processors of an H100."""
    monkeypatch.setattr(launch, "_processors", lambda device: 132)
    return torch.device("cuda")


@pytest.mark.parametrize("n", [512, 1024, 2048, 4096, 8192, 32_768])
def test_lot_fills_all_processors_at_8192_tokens_and_4_heads(n, h100):
    programs = 4 * max(1, 8192 // n)
    parts, length = launch.lot_parts(programs, n, h100)
    assert programs * parts >= 132
    assert (parts - 1) * length < n <= parts * length and length % 16 == 0


@pytest.mark.parametrize(("programs", "n"), [(132, 512), (256, 8192), (4, 255), (1, 1)])
def test_lot_is_not_split_where_programs_are_many_or_tokens_few(programs, n, h100):
    assert launch.lot_parts(programs, n, h100) == (1, n)


@pytest.mark.parametrize(
    ("programs", "n", "held", "parts"), [(16, 512, 32, 1), (4, 8192, 32, 4), (64, 512, 512, 1), (16, 2048, 2048, 10)]
)
def test_the_solver_is_split_where_programs_are_few_and_there_is_much_to_do(programs, n, held, parts, h100):
    found, length = launch.solver_parts(programs, n, held, h100)
    assert found == parts and (parts - 1) * length < n <= parts * length


def test_the_self_test_of_a_kernel_leaves_no_trace_in_the_pass_around_it():
    """It saves no tensor for activation checkpointing, keeps the random state, and ignores a default device."""

    def test():
        x = torch.randn(3).requires_grad_()
        x.exp().sum().backward()
        return x.detach().isnan().sum().item()  # which needs a real device

    def no_checkpointing(x):
        raise AssertionError("a tensor was saved in the pass around the test")

    state = torch.get_rng_state()
    with torch.autograd.graph.saved_tensors_hooks(no_checkpointing, no_checkpointing), torch.device("meta"):
        assert choice._failure(test) is None
    assert torch.equal(torch.get_rng_state(), state)
