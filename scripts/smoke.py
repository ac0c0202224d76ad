"""Checks all mechanisms and kernels on a device against float64 on the CPU.

A check fails if the relative error is more than 1e-4, plus four times the CPU's error in the same precision, plus one
rounding to this precision. If a check fails, the exit code is 1.
"""

import argparse
import copy
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from fairseq_lot.attention.base import Mechanism
from fairseq_lot.attention.registry import MECHANISMS, build_mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.kernels import choice, naive
from fairseq_lot.numerics.log_domain import log_domain_sinkhorn
from fairseq_lot.output.tables import Table
from fairseq_lot.pretrained.device import add_device_argument, choose_device

Tensors = Sequence[torch.Tensor]
Function = Callable[..., Any]
Outcome = tuple[torch.Tensor, torch.Tensor]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CASES: list[tuple[str, dict[str, Any], bool]] = [
    *((name, {}, False) for name in MECHANISMS),
    ("lot", {"query_updates": 1}, True),
    ("near_far", {}, True),
    ("near_far", {"prior": "alibi"}, True),
    ("near_far", {"tangents": True}, False),
    ("sinkhorn", {"epsilon": 1.0, "prior": "alibi"}, False),
    ("softmax", {}, True),
]
HEADS = 4
#: by device: sentences, queries, keys, r, head_dim
SIZES = {
    "cuda": [(8, 200, 300, 32, 64), (1, 4096, 4096, 32, 64), (2, 100, 100, 64, 64), (2, 100, 100, 16, 128)],
    "cpu": [(2, 6, 7, 5, 16)],
}


def pads(bsz: int, n: int) -> torch.Tensor:
    """A padding mask: the last third of the first sentence is padding."""
    mask = torch.zeros(bsz, n, dtype=torch.bool)
    mask[0, n - n // 3 :] = True
    return mask


def results(function: Function, inputs: Tensors, learnt: Tensors = ()) -> Outcome:
    """Values of a function, with all its gradients in one vector; both in float64 on the CPU."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    values = function(*leaves)
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).to(values)
    grads = torch.autograd.grad(values, [*leaves, *learnt], weights, materialize_grads=True, allow_unused=True)
    return values.detach().double().cpu(), torch.cat([g.flatten().double().cpu() for g in grads])


def judge(found: Outcome, exact: Outcome, plain: Outcome, dtype: torch.dtype) -> list[str]:
    """Two cells of the table, for the values and for the gradients: the error, after FAILED if it is too large."""
    said = []
    for one, wish, other in zip(found, exact, plain, strict=True):
        error, usual = ((x - wish).norm() / wish.norm() for x in (one, other))
        allowed = choice.ERROR + 4 * usual + (0.0 if dtype == torch.float32 else torch.finfo(dtype).eps)
        said.append(f"{error:.1e}" if error <= allowed else f"FAILED: {error:.1e}, more than {allowed:.1e}")
    return said


def check_mechanisms(device: torch.device) -> Iterator[list[str]]:
    """Check every mechanism in every precision; a row of the table each."""
    bsz, n, _, _, d = SIZES[device.type][0]
    mask = pads(bsz, n)
    for (name, options, causal), (precision, dtype) in itertools.product(CASES, DTYPES.items()):
        torch.manual_seed(0)
        mechanism = build_mechanism(name, num_heads=HEADS, head_dim=d, **options).to(dtype)
        inputs = [torch.randn(bsz, HEADS, n, d).to(dtype) for _ in range(3)]
        outcomes = []
        for place, kind in ((device, dtype), ("cpu", torch.float64), ("cpu", dtype)):
            here, masks = copy.deepcopy(mechanism).to(place, kind), [mask.to(place)] * 2
            attend = partial(_attend, here, masks, causal)
            outcomes.append(results(attend, [x.to(place, kind) for x in inputs], list(here.parameters())))
        found, exact, plain = outcomes
        title = ", ".join([name, *(f"{option} {value}" for option, value in options.items()), *["causal"] * causal])
        yield [title, precision, *judge(found, exact, plain, dtype)]


def _attend(mechanism: Mechanism, masks: Tensors, causal: bool, *tensors: torch.Tensor) -> torch.Tensor:
    return mechanism(*tensors, *masks, causal=causal).values


def check_kernels(device: torch.device) -> Iterator[list[str]]:
    """Check the kernels against their twins in plain torch; each kernel must first pass its own test."""
    for bsz, n, m, r, d in SIZES[device.type]:
        masks, settings = [pads(bsz, n), pads(bsz, m)], naive.LotSettings(d**-0.5, 5, 5)
        here = [mask.to(device) for mask in masks]
        torch.manual_seed(0)
        q, k, v, pivots = (torch.randn(*shape, d) for shape in ((bsz, HEADS, n), *[(bsz, HEADS, m)] * 2, (HEADS, r)))
        log_masses = torch.randn(HEADS, r).log_softmax(-1)
        kernel, twin = partial(_lot, choice.lot, here, settings), partial(_lot, naive.lot, masks, settings)
        for precision, dtype in DTYPES.items():
            inputs = [*(x.to(dtype) for x in (q, k, v, pivots)), log_masses]
            title = f"lot, {bsz} x {n} x {m} tokens, r = {r}, width {d}"
            yield [title, precision, *compare(kernel, twin, inputs, device)]
        log_a = torch.zeros(bsz, 1, n).masked_fill(masks[0][:, None], -torch.inf).log_softmax(-1)
        inputs = [torch.randn(bsz, HEADS, n, r), log_a, log_masses]
        fast, plain = (
            partial(function, num_updates=5) for function in (choice.try_fused_sinkhorn, log_domain_sinkhorn)
        )
        yield [f"sinkhorn, {bsz} x {n} x {r}", "fp32", *compare(fast, plain, inputs, device)]


def _lot(function: Callable, masks: Tensors, settings: naive.LotSettings, *tensors: torch.Tensor) -> torch.Tensor:
    return function(naive.LotInputs(*tensors, *masks), settings)


def compare(kernel: Function, twin: Function, inputs: Tensors, device: torch.device) -> list[str]:
    """Compare a kernel on the device with its twin in float64 on the CPU."""
    try:
        found = results(kernel, [x.to(device) for x in inputs])
    except InputError as error:  # its one-line message says why the kernel cannot run
        return [f"{'FAILED' if device.type == 'cuda' else 'not run'}: {error}", ""]
    exact = results(twin, [x.double() for x in inputs])
    return judge(found, exact, exact, inputs[0].dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of all checks; return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_device_argument(parser)
    try:
        device = choose_device(parser.parse_args(arguments).device)
    except InputError as error:
        parser.error(str(error))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"# Smoke test on {where}, torch {torch.__version__}\n")
    head = ["", "precision", "error of the values", "of the gradients"]
    with warnings.catch_warnings():  # a kernel that fails its own test warns, and plain torch takes over
        warnings.filterwarnings("error", "plain torch instead of")
        mechanisms = list(check_mechanisms(device))
    print(Table(head, mechanisms, "Mechanisms").markdown(padded=True), end="\n\n", flush=True)
    before = os.environ.get(choice.VARIABLE, "auto")
    os.environ[choice.VARIABLE] = "on"
    kernels = list(check_kernels(device))
    os.environ[choice.VARIABLE] = before
    print(Table(head, kernels, "Kernels").markdown(padded=True), end="\n\n", flush=True)
    failed = [row for row in (*mechanisms, *kernels) if any("FAILED" in said for said in row[2:])]
    print(f"{len(failed)} of {len(mechanisms) + len(kernels)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
