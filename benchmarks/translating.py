"""``python -m benchmarks translate``: measure fairseq's beam search on documents, by part of the model.

Models have random weights. They translate documents of random pieces into as many pieces, so all models take equally
many decoding steps. Times are CPU times, on one thread by default. Models take turns. The shortest time of all turns
is reported, because other load on the machine only adds time.
"""

import functools
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from time import process_time
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator

from benchmarks.mechanisms import EVERYWHERE
from benchmarks.model import ModelBench
from fairseq_lot import cli
from fairseq_lot.attention.registry import DEFAULT
from fairseq_lot.errors import check_least
from fairseq_lot.output.tables import Table

NAME = "python -m benchmarks translate"
#: the timed methods by column of the table: attribute of a model or of its decoder's layers, with the method's name
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "encoder": (("encoder", "forward"),),
    "decoder's self-attention": (("self_attn", "forward"), ("self_attn", "reorder_incremental_state")),
    "cross-attention": (("encoder_attn", "forward"), ("encoder_attn", "reorder_incremental_state")),
    "copies of the encoder's output": (("encoder", "reorder_encoder_out"),),
}
Seconds = dict[str, float]


def timed(function: Callable[..., Any], name: str, spent: Seconds) -> Callable[..., Any]:
    """Wrap a function: each call adds its CPU seconds to ``spent[name]``."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        begin = process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += process_time() - begin

    return run


def translate(model: TransformerModel, source: torch.Tensor, beam: int) -> Seconds:
    """Translate a batch; return the CPU seconds of each part and of the whole (``"all"``).

    Translations have as many pieces as their sources.
    """
    length = source.size(1)
    search = {"beam_size": beam, "max_len_a": 0, "max_len_b": length - 1, "min_len": length - 1}
    generator = SequenceGenerator([model], model.encoder.dictionary, **search)
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.new_full((len(source),), length)}}
    spent: Seconds = defaultdict(float)
    holders = [model, *model.decoder.layers]
    with_clocks = [
        (getattr(holder, attribute), method, name)
        for name, methods in PARTS.items()
        for attribute, method in methods
        for holder in holders
        if hasattr(holder, attribute)
    ]
    for module, method, name in with_clocks:
        setattr(module, method, timed(getattr(module, method), name, spent))
    try:
        with torch.no_grad():
            timed(generator.forward, "all", spent)(sample)
    finally:
        for module, method, _ in with_clocks:
            delattr(module, method)
    return dict(spent)


def measure(bench: ModelBench, length: int, documents: int, beam: int, turns: int) -> list[list]:
    """The rows of the table, one for each model."""
    least: dict[str, Seconds] = {}
    source = torch.randint(Dictionary().nspecial, bench.vocabulary, (documents, length))
    source[:, -1] = Dictionary().eos()
    models = {}
    for name, model in bench.contenders.items():
        models[name] = model.eval()
        model.make_generation_fast_()
    for _ in range(turns):
        for name, model in models.items():
            seconds = translate(model, source, beam)
            if name not in least or seconds["all"] < least[name]["all"]:
                least[name] = seconds
    of_base = least[bench.base]["all"]
    rows = []
    for name, seconds in least.items():
        parts = [seconds[part] for part in PARTS]
        rest = seconds["all"] - sum(parts)
        rows.append([name, f"{of_base / seconds['all']:.2f}", *(f"{x:.1f}" for x in (seconds["all"], *parts, rest))])
    return rows


def build_parser() -> cli.OneLineParser:
    """The options of the command."""
    parser = cli.OneLineParser(prog=NAME, description=__doc__)
    parser.set_defaults(run=run)
    add = parser.add_argument
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    text = "the architecture of all models (default: %(default)s)"
    add("--model", default="lot_transformer_small", metavar="ARCH", help=text)
    text = "a mechanism with its options in quotes, as for python -m benchmarks; repeat it for several mechanisms. "
    text += f"{DEFAULT} is always measured, too (default: {EVERYWHERE})"
    add("--mechanism", dest="mechanisms", action="append", metavar="WAY", help=text)
    add("--length", **number, default=2000, help="pieces in a document (default: %(default)s)")
    add("--documents", **number, default=1, help="documents in the batch (default: %(default)s)")
    add("--beam", **number, default=5, help="beam size (default: %(default)s)")
    add("--vocabulary", **number, default=4000, help="size of the dictionary (default: %(default)s)")
    add("--turns", **number, default=2, help="translations by each model (default: %(default)s)")
    add("--threads", **number, default=1, help="torch's threads (default: %(default)s)")
    return parser


def run(args: Namespace) -> None:
    """Print the table."""
    check_least(args, length=2, documents=1, beam=1, vocabulary=8, turns=1, threads=1)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"longest": args.length + 1, "prefix": 1, "vocabulary": args.vocabulary}
    place: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    bench = ModelBench(args.model, args.mechanisms or [EVERYWHERE], [32], **sizes, **place)
    head = ["", f"{bench.base} ÷ it", "seconds", *PARTS, "the rest"]
    rows = measure(bench, args.length, args.documents, args.beam, args.turns)
    print(Table(head, rows, align="<" + ">" * (len(head) - 1)).markdown())
