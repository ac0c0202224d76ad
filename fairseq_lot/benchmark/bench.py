"""``fairseq-lot bench``: time and memory of one attention layer, or of a whole model, against sentence length."""

import math
import platform
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from tqdm import tqdm

from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.benchmark.layer import LayerBench
from fairseq_lot.benchmark.measure import measure
from fairseq_lot.benchmark.render import Results, write
from fairseq_lot.errors import InputError, check_least
from fairseq_lot.output.provenance import current_commit
from fairseq_lot.pretrained.device import add_device_argument, choose_device

_DTYPES = ("float32", "float64", "bfloat16", "float16")
_LENGTHS, _MODEL_LENGTHS = [2**i for i in range(5, 15)], [32, 256, 1024, 2048, 4096]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--out", required=True, metavar="FOLDER", help="bench.csv, bench.md and bench.svg are written here")
    add(
        "--model",
        metavar="ARCH",
        help="measure a whole model of this architecture, such as lot_transformer_iwslt_de_en, not one layer: its "
        "encoder, a training step (forward, loss, backward) and a decoding step",
    )
    add(
        "--mechanism",
        dest="mechanisms",
        action="append",
        metavar="NAME[@SITES][:OPTION=VALUE,...]",
        help="what to measure, as in esp:hard=true; in a model, SITES says where it stands, as in lot@encoder,cross or "
        "lot@all:num_pivots=64; may be given several times; default: of a layer "
        f"{', '.join(MECHANISMS)}; of a model lot@encoder, lot@all, beside softmax",
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
    add(
        "--lengths",
        **numbers,
        help=f"tokens of a sentence (default: powers of 2, {_LENGTHS[0]} to {_LENGTHS[-1]}; of a model "
        f"{', '.join(map(str, _MODEL_LENGTHS))})",
    )
    add("--num-pivots", **numbers, default=[32], help="ranks, for what has pivots (default: 32)")
    add("--tokens", type=int, metavar="N", help="of all sentences of a batch (default: 4096; of a model 2048)")
    add("--num-heads", type=int, metavar="N", help="of a layer (default: 4)")
    add("--head-dim", type=int, metavar="N", help="of a layer (default: 64)")
    add("--vocabulary", type=int, metavar="N", help="pieces of a model, random ones (default: 10000)")
    add("--prefix", type=int, metavar="N", help="tokens that a model's decoding step has behind it (default: 32)")
    add(
        "--repeats",
        type=int,
        default=9,
        metavar="N",
        help="rounds, of which the lower quartile counts (default: %(default)s)",
    )
    add("--warm-up", type=int, default=2, metavar="N", help="rounds before (default: %(default)s)")
    add(
        "--limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="no more rounds of a length after so many seconds, but one that counts (default: none)",
    )
    add(
        "--patience",
        type=float,
        metavar="SECONDS",
        help="a contender that takes longer for a forward and backward pass is left out at longer lengths, as is one "
        "that memory did not suffice for (default: 2; of a model none)",
    )
    add_device_argument(parser)
    add("--dtype", default="float32", choices=_DTYPES, help="default: %(default)s")
    add("--threads", type=int, metavar="N", help="of torch on the CPU (default: torch's own choice)")


def run(args: Namespace) -> int:
    """Measure length by length, write the files after each, print the Markdown."""
    check_least(args, tokens=1, num_heads=1, head_dim=1, repeats=1, threads=1, warm_up=0, prefix=1, vocabulary=8)
    lengths = sorted(set(args.lengths or (_LENGTHS if args.model is None else _MODEL_LENGTHS)))
    if min(*lengths, *args.num_pivots) < 1:
        raise InputError("--lengths and --num-pivots must be at least 1")
    tokens = args.tokens or (4096 if args.model is None else 2048)
    patience = args.patience if args.patience is not None else (2.0 if args.model is None else math.inf)
    if args.threads:
        torch.set_num_threads(args.threads)
    device, dtype = choose_device(args.device), getattr(torch, args.dtype)
    torch.manual_seed(0)
    if args.model is None:
        bench = LayerBench(args, device, dtype)
    else:
        from fairseq_lot.benchmark.whole_model import ModelBench  # a layer needs nothing of fairseq

        bench = ModelBench(args, device, dtype, longest=lengths[-1])
    results = Results(header(args, device, bench.words, tokens), bench.base, bench.measures)
    contenders, text = bench.contenders, ""
    with tqdm(lengths, desc="lengths", disable=None) as progress:
        for length in progress:
            figures = measure(
                bench.jobs(contenders, max(1, tokens // length), length),
                device,
                warm_up=args.warm_up,
                repeats=args.repeats,
                limit=args.limit,
                turn=bench.turn,
                tell=lambda text, length=length: progress.set_postfix_str(f"{length} tokens, {text}"),
            )
            results.rows |= {(name, length): found for name, found in figures.items()}
            text = write(Path(args.out), results)
            contenders = {name: one for name, one in contenders.items() if _goes_on(figures[name], patience)}
    print(text)
    return 0


def _goes_on(figures, patience):
    """Whether a contender has a chance at a longer length."""
    return figures is not None and max(x for key, x in figures.items() if key.endswith("_seconds")) <= patience


def header(args: Namespace, device: torch.device, words: str, tokens: int) -> str:
    """Everything that the figures depend on, in one line."""
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads"
    limit = "" if args.limit == math.inf else f" (fewer where they take more than {args.limit:g} s)"
    memory = "of the allocator" if device.type == "cuda" else "of live tensors"
    return (
        f"{where}, torch {torch.__version__}, commit {current_commit()}, {args.dtype}, {words}, sentences of N "
        f"tokens in a batch of {tokens} tokens (one sentence at least), warm-up {args.warm_up}, lower quartile of "
        f"{args.repeats} interleaved rounds{limit}, memory {memory}"
    )
