"""Benchmark of one attention layer: the forward pass alone, then the forward with the backward pass."""

import copy
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measure import Job
from benchmarks.mechanisms import read_ways, with_rank
from benchmarks.render import MEBIBYTES, MILLISECONDS, Measure
from fairseq_lot.attention.base import Mechanism
from fairseq_lot.attention.registry import MECHANISMS, build_mechanism
from fairseq_lot.errors import InputError

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Values(torch.nn.Module):
    """A module that returns only the values of a mechanism."""

    def __init__(self, mechanism: Mechanism):
        super().__init__()
        self.mechanism = mechanism

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.mechanism(q, k, v).values


class LayerBench:
    """The benchmark of a layer on random q, k and v.

    The contenders are torch's softmax attention, the mechanisms, other projects' attention, and :func:`products`, the
    matrix products alone.

    Args:
        mechanisms: as :func:`~benchmarks.mechanisms.read_ways` takes them; None: all, with their defaults.
        ranks: numbers of pivots or features.
        peers: attention of other projects, as :func:`read_peer` takes it.
        graphs: replay contenders from CUDA graphs, without the time that Python takes to launch kernels.
    """

    base, turn = "sdpa", 0.0
    lengths, tokens, patience = [2**i for i in range(5, 15)], 4096, 2.0
    measures: tuple[Measure, ...] = (
        Measure("forward", "forward_seconds", *MILLISECONDS),
        Measure("forward + backward", "forward_backward_seconds", *MILLISECONDS),
        Measure("peak memory", "peak_bytes", *MEBIBYTES),
    )

    def __init__(
        self,
        mechanisms: Iterable[str] | None,
        ranks: list[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
        num_heads: int,
        head_dim: int,
        peers: Sequence[str] = (),
        graphs: bool = False,
    ):
        self.graphs = graphs
        if graphs:  # a graph holds its memory from its capture on, so there is no peak to measure
            self.measures = self.measures[:2]
        self.shape, self.factory = (num_heads, head_dim), cast(dict[str, Any], {"device": device, "dtype": dtype})
        self.words = f"heads {num_heads}, head_dim {head_dim}{', replayed from CUDA graphs' * graphs}"
        self.contenders: dict[str, Attention] = {self.base: scaled_dot_product_attention}
        for label, way in read_ways(mechanisms or MECHANISMS, ranks).items():
            prefix = f"{way.attention}_"
            options: dict[str, Any] = {name.removeprefix(prefix): value for name, value in way.options.items()}
            mechanism = build_mechanism(way.attention, num_heads=num_heads, head_dim=head_dim, **options)
            self.contenders[label] = Values(mechanism.to(**self.factory))
        for rank in ranks:
            for text in peers:
                name, attend = read_peer(text, num_heads, head_dim, rank)
                self.contenders[with_rank(name, rank)] = attend
            pivots = torch.randn(num_heads, head_dim, rank, **self.factory)
            self.contenders[with_rank("products alone", rank)] = partial(products, pivots)

    def jobs(self, names: Iterable[str], bsz: int, length: int) -> dict[str, Callable[[], Job]]:
        """Functions that make the job of each contender; all get the same q, k, v and gradient."""
        num_heads, head_dim = self.shape
        *inputs, gradient = (torch.randn(bsz, num_heads, length, head_dim, **self.factory) for _ in range(4))
        for x in inputs:
            x.requires_grad_()
        return {name: partial(job, self.contenders[name], inputs, gradient, self.graphs) for name in names}


def job(attend: Attention, inputs: Sequence[torch.Tensor], gradient: torch.Tensor, graphs: bool = False) -> Job:
    """The timed passes: forward without gradients; forward with backward."""
    if graphs:  # a copy, because the module is changed
        attend = cast(Attention, torch.cuda.make_graphed_callables(copy.copy(attend), tuple(inputs)))

    @torch.no_grad()
    def forward():
        attend(*inputs)

    def both():
        attend(*inputs).backward(gradient)
        for x in inputs:
            x.grad = None

    return Job({"forward_seconds": forward, "forward_backward_seconds": both})


def products(pivots: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The four products that any attention through pivots needs; scores are used as weights."""
    to_pivots = torch.bmm(q.flatten(0, 1), pivots.repeat(q.size(0), 1, 1))
    from_pivots = torch.bmm(k.flatten(0, 1), pivots.repeat(k.size(0), 1, 1))
    return torch.bmm(to_pivots, torch.bmm(from_pivots.transpose(-1, -2), v.flatten(0, 1))).view(v.shape)


def read_peer(text: str, num_heads: int, head_dim: int, num_pivots: int) -> tuple[str, Attention]:
    """The name and the attention of another project, from ``NAME=FOLDER``.

    The folder's file ``peer.py`` has a function ``build(num_heads=..., head_dim=..., num_pivots=...)``, which returns a
    function of q, k and v. ``peer.py`` can import modules of its folder.

    Raises:
        InputError: no such file, or it does not define ``build`` or fails.
    """
    name, _, folder = text.partition("=")
    sys.path.insert(0, str(Path(folder).resolve()))
    try:
        build = runpy.run_path(str(Path(folder, "peer.py")))["build"]
        return name, build(num_heads=num_heads, head_dim=head_dim, num_pivots=num_pivots)
    except Exception as error:
        raise InputError(f"--peer {text!r} is not NAME=FOLDER with a working peer.py: {error!r}") from error
