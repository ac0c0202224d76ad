"""One attention layer: forward pass, and forward and backward pass."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fairseq_lot.benchmark.contenders import BASE, Attention, Contender, mechanisms, peer, products, torch_attention
from fairseq_lot.benchmark.measure import Job
from fairseq_lot.benchmark.render import MEBIBYTES, MILLISECONDS, Measure
from fairseq_lot.errors import InputError

MEASURES = (
    Measure("forward", "forward_seconds", **MILLISECONDS),
    Measure("forward + backward", "forward_backward_seconds", **MILLISECONDS),
    Measure("peak memory", "peak_bytes", **MEBIBYTES),
)


class LayerBench:
    """Mechanisms, torch's attention, attention of other projects and the products alone, on random q, k and v.

    Attributes:
        base: what the others are compared with.
        measures: what is measured.
        turn: seconds that a work of a contender is repeated for in one round.
        contenders: functions of q, k and v, by name.
        words: what of it stands in the header.
    """

    base, measures, turn = BASE, MEASURES, 0.0

    def __init__(self, args: Namespace, device: torch.device, dtype: torch.dtype):
        if args.prefix is not None or args.vocabulary is not None:
            raise InputError("--prefix and --vocabulary are for --model, without which one layer is measured")
        self.num_heads = 4 if args.num_heads is None else args.num_heads
        self.head_dim = 64 if args.head_dim is None else args.head_dim
        self.device, self.dtype = device, dtype
        shape = self.num_heads, self.head_dim
        found: list[Contender] = [torch_attention(), *mechanisms(args.mechanisms, *shape, args.num_pivots)]
        for rank in args.num_pivots:
            found += [*(peer(text, *shape, rank) for text in args.peers), products(*shape, rank)]
        self.contenders = {one.label: one.build(device, dtype) for one in found}
        self.words = f"heads {self.num_heads}, head_dim {self.head_dim}"

    def jobs(self, contenders: dict[str, Attention], bsz: int, length: int) -> dict[str, Callable[[], Job]]:
        """What makes the job of each contender; all get the same q, k, v and gradient."""
        shape = bsz, self.num_heads, length, self.head_dim
        *inputs, gradient = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(4))
        for x in inputs:
            x.requires_grad_()
        return {name: partial(job, attend, inputs, gradient) for name, attend in contenders.items()}


def job(attend: Attention, inputs: Sequence[torch.Tensor], gradient: torch.Tensor) -> Job:
    """A forward pass without gradients, and a forward and a backward pass."""

    @torch.no_grad()
    def forward():
        attend(*inputs)

    def both():
        attend(*inputs).backward(gradient)
        for x in inputs:
            x.grad = None

    return Job({"forward_seconds": forward, "forward_backward_seconds": both})
