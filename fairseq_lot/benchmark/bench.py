"""``fairseq-lot bench``: time and memory of one attention layer against the length of its sentences."""

import math
import platform
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from tqdm import tqdm

from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.benchmark.contenders import mechanisms, peer, products, torch_attention
from fairseq_lot.benchmark.measure import first_seconds, measure
from fairseq_lot.benchmark.render import write
from fairseq_lot.errors import InputError, check_least
from fairseq_lot.output.provenance import current_commit

_DTYPES = ("float32", "float64", "bfloat16", "float16")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--out", required=True, metavar="FOLDER", help="bench.csv, bench.md and bench.svg are written here")
    add(
        "--mechanism",
        dest="mechanisms",
        action="append",
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"what to measure, as in esp:hard=true; may be given several times; default: {', '.join(MECHANISMS)}",
    )
    add(
        "--peer",
        dest="peers",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="attention of another project: the folder has a file peer.py, in which build(num_heads, head_dim, "
        "num_pivots) returns a function of q, k, v, each (bsz, num_heads, n, head_dim); may be given several times",
    )
    numbers = {"type": int, "nargs": "+", "metavar": "N"}
    lengths = [2**i for i in range(5, 15)]
    add("--lengths", **numbers, default=lengths, help="tokens of a sentence (default: powers of 2, 32 to 16384)")
    add("--num-pivots", **numbers, default=[32], help="ranks, for what has pivots (default: 32)")
    add("--tokens", type=int, default=4096, metavar="N", help="of all sentences of a batch (default: %(default)s)")
    add("--num-heads", type=int, default=4, metavar="N", help="default: %(default)s")
    add("--head-dim", type=int, default=64, metavar="N", help="default: %(default)s")
    add(
        "--repeats",
        type=int,
        default=9,
        metavar="N",
        help="rounds, of which the lower quartile counts (default: %(default)s)",
    )
    add("--warm-up", type=int, default=2, metavar="N", help="rounds before (default: %(default)s)")
    add(
        "--patience",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="a contender whose forward and backward pass takes longer is left out at longer lengths, "
        "one that does not fit in memory at once (default: %(default)s)",
    )
    add("--device", help="cpu, cuda, ... (default: cuda if there is one)")
    add("--dtype", default="float32", choices=_DTYPES, help="default: %(default)s")
    add("--threads", type=int, metavar="N", help="of torch on the CPU (default: torch's own choice)")


def run(args: Namespace) -> int:
    """Measure length by length, write the files after each, print the Markdown."""
    check_least(args, tokens=1, num_heads=1, head_dim=1, repeats=1, threads=1, warm_up=0)
    if min(*args.lengths, *args.num_pivots) < 1:
        raise InputError("--lengths and --num-pivots must be at least 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {args.device!r} cannot be used: {str(error).splitlines()[0]}") from None
    dtype, shape = getattr(torch, args.dtype), (args.num_heads, args.head_dim)
    contenders = [torch_attention(), *mechanisms(args.mechanisms, *shape, args.num_pivots)]
    for rank in args.num_pivots:
        contenders += [*(peer(text, *shape, rank) for text in args.peers), products(*shape, rank)]
    torch.manual_seed(0)
    attends = {one.label: one.build(device, dtype) for one in contenders}
    rows, text = {}, ""
    for length in tqdm(sorted(set(args.lengths)), desc="lengths", disable=None):
        bsz = max(1, args.tokens // length)
        inputs = [torch.randn(bsz, args.num_heads, length, args.head_dim, device=device, dtype=dtype) for _ in range(3)]
        gradient = torch.randn_like(inputs[0])
        for x in inputs:
            x.requires_grad_()
        seconds = {name: first_seconds(attend, inputs, gradient) for name, attend in attends.items()}
        attends = {name: attend for name, attend in attends.items() if seconds[name] < math.inf}
        figures = measure(attends, inputs, gradient, warm_up=args.warm_up, repeats=args.repeats)
        rows |= {(name, length): found for name, found in figures.items()}
        text = write(Path(args.out), header(args, device), rows)
        attends = {name: attend for name, attend in attends.items() if seconds[name] <= args.patience}
    print(text)
    return 0


def header(args: Namespace, device: torch.device) -> str:
    """Everything that the figures depend on, in one line."""
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads"
    return (
        f"{where}, torch {torch.__version__}, commit {current_commit()}, {args.dtype}, heads {args.num_heads}, "
        f"head_dim {args.head_dim}, sentences of N tokens in a batch of {args.tokens} tokens (one sentence at least), "
        f"warm-up {args.warm_up}, lower quartile of {args.repeats} interleaved rounds"
    )
