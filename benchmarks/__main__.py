"""``python -m benchmarks``: time and memory of one attention layer, or of a whole model, against sentence length."""

import math
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from benchmarks.layer import LayerBench
from benchmarks.measure import Figures, Job, measure
from benchmarks.render import Measure, Results, write
from fairseq_lot import cli
from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.errors import InputError, check_least
from fairseq_lot.output.provenance import current_commit
from fairseq_lot.pretrained.device import add_device_argument, choose_device

NAME = "python -m benchmarks"
# what each kind measures by default; options that only one of them has are refused by the other
LAYER: dict[str, Any] = {"lengths": [2**i for i in range(5, 15)], "tokens": 4096, "patience": 2.0}
OF_LAYER: dict[str, Any] = {"num_heads": 4, "head_dim": 64, "peer": []}
MODEL: dict[str, Any] = {"lengths": [32, 256, 1024, 2048, 4096], "tokens": 2048, "patience": math.inf}
OF_MODEL: dict[str, Any] = {"vocabulary": 10_000, "prefix": 32}


def build_parser() -> ArgumentParser:
    """The options of the command."""
    parser = cli.OneLineParser(prog=NAME, description=__doc__)
    parser.set_defaults(run=run)
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
        action="append",
        metavar="NAME=FOLDER",
        help="attention of another project: the folder has a file peer.py, in which build(num_heads, head_dim, "
        "num_pivots) returns a function of q, k, v, each (bsz, num_heads, n, head_dim); may be given several times",
    )
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    seconds: dict[str, Any] = {"type": float, "metavar": "SECONDS"}
    of_model = ", ".join(map(str, MODEL["lengths"]))
    lengths = f"default: powers of 2, {LAYER['lengths'][0]} to {LAYER['lengths'][-1]}; of a model {of_model}"
    tokens = f"default: {LAYER['tokens']}; of a model {MODEL['tokens']}"
    add("--lengths", **number, nargs="+", help=f"tokens of a sentence ({lengths})")
    add("--num-pivots", **number, nargs="+", default=[32], help="ranks, for what has pivots or features (default: 32)")
    add("--tokens", **number, help=f"of all sentences of a batch ({tokens})")
    for name, what in {
        "num_heads": "of a layer",
        "head_dim": "of a layer",
        "vocabulary": "pieces of a model, random ones",
        "prefix": "tokens that a model's decoding step has behind it",
    }.items():
        default = {**OF_LAYER, **OF_MODEL}[name]
        add(f"--{name.replace('_', '-')}", **number, help=f"{what} (default: {default})")
    add("--repeats", **number, default=9, help="rounds, of which the lower quartile counts (default: %(default)s)")
    add("--warm-up", **number, default=2, help="rounds before (default: %(default)s)")
    limit = "no more rounds of a length after so many seconds, but one that counts (default: none)"
    add("--limit", **seconds, default=math.inf, help=limit)
    add(
        "--patience",
        **seconds,
        help="a contender that takes longer for a work is left out at longer lengths, as is one that memory did not "
        f"suffice for (default: {LAYER['patience']:g}; of a model none)",
    )
    add_device_argument(parser)
    dtypes = ("float32", "float64", "bfloat16", "float16")
    add("--dtype", default="float32", choices=dtypes, help="default: %(default)s")
    add("--threads", **number, help="of torch on the CPU (default: torch's own choice)")
    return parser


def run(args: Namespace) -> None:
    """Measure length by length, write the files after each, print the Markdown."""
    check_least(args, tokens=1, num_heads=1, head_dim=1, repeats=1, threads=1, warm_up=0, prefix=1, vocabulary=8)
    shared, own = (LAYER, OF_LAYER) if args.model is None else (MODEL, OF_MODEL)
    lengths, tokens, patience = (_given(args, shared)[name] for name in shared)
    lengths = sorted(set(lengths))
    if min(*lengths, *args.num_pivots) < 1:
        raise InputError("--lengths and --num-pivots must be at least 1")
    for name in (OF_MODEL if own is OF_LAYER else OF_LAYER).keys() & _given(args):
        whose = "a whole model: give --model" if own is OF_LAYER else "one layer: leave it, or --model, out"
        raise InputError(f"--{name.replace('_', '-')} is for {whose}")
    if args.threads:
        torch.set_num_threads(args.threads)
    device = choose_device(args.device)
    settings = {**_given(args, own), "device": device, "dtype": getattr(torch, args.dtype)}
    torch.manual_seed(0)
    bench: Bench
    if args.model is None:
        bench = LayerBench(args.mechanisms, args.num_pivots, **settings)
    else:
        from benchmarks.model import ModelBench  # a layer needs nothing of fairseq

        bench = ModelBench(args.model, args.mechanisms, args.num_pivots, longest=lengths[-1], **settings)
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
                tell=partial(_tell, progress, length),
            )
            results.rows |= {(name, length): found for name, found in figures.items()}
            text = write(Path(args.out), results)
            contenders = {name: one for name, one in contenders.items() if _goes_on(figures[name], patience)}
    print(text)


class Bench(Protocol):
    """What is compared.

    Attributes:
        base: the contender that the others are compared with.
        measures: what is measured.
        turn: seconds that a work of a contender is repeated for in one round.
        contenders: functions of q, k and v, or models in training mode, by name.
        words: what of it stands in the header.
    """

    base: str
    measures: tuple[Measure, ...]
    turn: float
    contenders: dict[str, Any]
    words: str

    def jobs(self, contenders: dict[str, Any], bsz: int, length: int) -> dict[str, Callable[[], Job]]:
        """What makes the job of each contender; all get the same input."""


def _tell(progress: tqdm, length: int, text: str) -> None:
    progress.set_postfix_str(f"{length} tokens, {text}")


def _given(args: Namespace, defaults: dict[str, Any] | None = None) -> dict[str, Any]:
    """The options that were given; with defaults, those of the names there."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    return given if defaults is None else {name: given.get(name, default) for name, default in defaults.items()}


def _goes_on(figures: Figures | None, patience: float) -> bool:
    """Whether a contender has a chance at a longer length."""
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
    return cli.run(build_parser, sys.argv[1:] if argv is None else argv, NAME)


if __name__ == "__main__":
    sys.exit(main())
