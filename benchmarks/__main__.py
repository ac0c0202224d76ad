"""``python -m benchmarks``: time and memory of an attention layer or of a whole model, against sentence length.

Softmax attention is always measured, too: it is the base that all others are compared with.
"""

import math
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import costs, gpu, launches, translating, tune
from benchmarks.layer import LayerBench
from benchmarks.measure import Figures, measure
from benchmarks.model import ModelBench
from benchmarks.render import Results, write
from fairseq_lot import cli
from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.errors import InputError, check_least
from fairseq_lot.output.provenance import current_commit
from fairseq_lot.pretrained.device import add_device_argument, choose_device

NAME = "python -m benchmarks"
#: subcommands, by the first argument
OTHERS = {"costs": costs, "gpu": gpu, "launches": launches, "translate": translating, "tune": tune}


def build_parser() -> ArgumentParser:
    """The options of the command."""
    others = f"Other benchmarks: {NAME} COMMAND --help, with COMMAND = {', '.join(OTHERS)}; {NAME}.heads --help"
    parser = cli.OneLineParser(prog=NAME, description=__doc__, epilog=others)
    parser.set_defaults(run=run)
    add = parser.add_argument
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    seconds: dict[str, Any] = {"type": float, "metavar": "SECONDS"}
    add("--out", required=True, metavar="FOLDER", help="folder for bench.csv, bench.md and bench.svg")
    add(
        "--model",
        metavar="ARCH",
        help="measure a whole model of this architecture, such as lot_transformer_iwslt_de_en: its encoder, a training "
        "step (forward, loss, backward) and a decoding step (default: measure one attention layer)",
    )
    add(
        "--mechanism",
        dest="mechanisms",
        action="append",
        metavar="WAY",
        help="a mechanism with its options in quotes, as in 'lot --lot-num-pivots 16/32', which measures both values; "
        "with --model, --attention-sites in the quotes chooses the sites. Repeat it for several mechanisms. Default "
        f"for a layer: {', '.join(MECHANISMS)}; with --model: lot in the encoder, lot at all sites",
    )
    lengths, of_layer = ", ".join(map(str, ModelBench.lengths)), LayerBench.lengths
    text = f"tokens in a sentence (default: powers of 2, {of_layer[0]} to {of_layer[-1]}; with --model: {lengths})"
    add("--lengths", **number, nargs="+", help=text)
    text = "numbers of pivots or features, for mechanisms that have them; each is measured (default: 32)"
    add("--num-pivots", **number, nargs="+", default=[32], help=text)
    text = "tokens in a batch, which has at least one sentence"
    add("--tokens", **number, help=f"{text} (default: {LayerBench.tokens}; with --model: {ModelBench.tokens})")
    text = "measured rounds; the lower quartile of their times is reported (default: %(default)s)"
    add("--repeats", **number, default=9, help=text)
    add("--warm-up", **number, default=2, help="rounds before the measured ones (default: %(default)s)")
    text = "start no more rounds of a length after this time; at least one is measured (default: no limit)"
    add("--limit", **seconds, default=math.inf, help=text)
    text = (
        "leave a mechanism out at longer lengths once it ran out of memory or one of its passes took longer than this"
    )
    add("--patience", **seconds, help=f"{text} (default: {LayerBench.patience:g}; with --model: no limit)")
    add_device_argument(parser)
    dtypes = ("float32", "float64", "bfloat16", "float16")
    add("--dtype", default="float32", choices=dtypes, help="precision of parameters and inputs (default: %(default)s)")
    add("--threads", **number, help="torch's threads on the CPU (default: torch's own choice)")
    add = parser.add_argument_group("without --model").add_argument
    add("--num-heads", **number, default=4, help="attention heads (default: %(default)s)")
    add("--head-dim", **number, default=64, help="width of a head (default: %(default)s)")
    add(
        "--peer",
        dest="peers",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="attention of another project: FOLDER/peer.py defines build(num_heads, head_dim, num_pivots), which "
        "returns a function of q, k and v, each (bsz, num_heads, n, head_dim). Repeat it for several projects",
    )
    text = "replay passes from CUDA graphs: leaves out the time that Python takes to launch kernels; no peak memory"
    add("--graphs", action="store_true", help=text)
    add = parser.add_argument_group("with --model").add_argument
    text = "size of the dictionary, whose pieces are drawn at random (default: %(default)s)"
    add("--vocabulary", **number, default=10_000, help=text)
    text = "target tokens before the decoding step (default: %(default)s)"
    add("--prefix", **number, default=32, help=text)
    return parser


def run(args: Namespace) -> None:
    """Measure length by length; write the files after each length; print the Markdown."""
    check_least(args, tokens=1, num_heads=1, head_dim=1, repeats=1, threads=1, warm_up=0, prefix=1, vocabulary=8)
    kind = LayerBench if args.model is None else ModelBench
    lengths, tokens = sorted(set(args.lengths or kind.lengths)), args.tokens or kind.tokens
    if min(*lengths, *args.num_pivots) < 1:
        raise InputError("--lengths and --num-pivots must be at least 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    device = choose_device(args.device)
    if args.graphs and (args.model or device.type != "cuda"):
        raise InputError("--graphs is for a layer on a GPU")
    shared: dict[str, Any] = {"device": device, "dtype": getattr(torch, args.dtype)}
    torch.manual_seed(0)
    bench: LayerBench | ModelBench
    if args.model is None:
        shape = {"num_heads": args.num_heads, "head_dim": args.head_dim}
        bench = LayerBench(args.mechanisms, args.num_pivots, peers=args.peers, graphs=args.graphs, **shape, **shared)
    else:
        sizes = {"longest": lengths[-1], "prefix": args.prefix, "vocabulary": args.vocabulary}
        bench = ModelBench(args.model, args.mechanisms, args.num_pivots, **sizes, **shared)
    results = Results(header(args, device, bench.words, tokens), bench.base, bench.measures)
    patience = bench.patience if args.patience is None else args.patience
    rounds = {"warm_up": args.warm_up, "repeats": args.repeats}
    names, text = list(bench.contenders), ""
    for length in tqdm(lengths, desc="lengths", disable=None):
        jobs = bench.jobs(names, max(1, tokens // length), length)
        figures = measure(jobs, device, limit=args.limit, turn=bench.turn, **rounds)
        results.rows |= {(name, length): found for name, found in figures.items()}
        text = write(Path(args.out), results)
        names = [name for name in names if _goes_on(figures[name], patience)]
    print(text)


def _goes_on(figures: Figures | None, patience: float) -> bool:
    """Whether a contender is measured at longer lengths: it had enough memory and took at most ``patience`` seconds."""
    return figures is not None and max(x for key, x in figures.items() if key.endswith("_seconds")) <= patience


def header(args: Namespace, device: torch.device, words: str, tokens: int) -> str:
    """Everything that the figures depend on, in one line."""
    if device.type == "cuda":
        where, memory = torch.cuda.get_device_name(device), "of the allocator"
    else:
        where, memory = f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads", "of live tensors"
    limit = "" if args.limit == math.inf else f" (fewer where they take more than {args.limit:g} s)"
    return (
        f"{where}, torch {torch.__version__}, commit {current_commit()}, {args.dtype}, {words}, sentences of N "
        f"tokens in a batch of {tokens} tokens (one sentence at least), warm-up {args.warm_up}, lower quartile of "
        f"{args.repeats} interleaved rounds{limit}, memory {memory}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    other = OTHERS.get(arguments[0]) if arguments else None
    if other is not None:
        return cli.run(other.build_parser, arguments[1:], other.NAME)
    return cli.run(build_parser, arguments, NAME)


if __name__ == "__main__":
    sys.exit(main())
