"""``fairseq-lot score``: score the output of fairseq-generate, as one JSON line."""

import argparse
import math
import re
from pathlib import Path

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation import bootstrap
from fairseq_lot.evaluation.bleu import SACREBLEU, TOKENISED, detokenise, measure
from fairseq_lot.evaluation.hypotheses import read_matching
from fairseq_lot.evaluation.results import PRECISIONS, STAGES, MetricScore, Row, put_row, read_rows
from fairseq_lot.output.files import read_lines
from fairseq_lot.output.provenance import current_commit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    files = parser.add_argument_group("translations and references")
    files.add_argument("--generated", required=True, metavar="FILE", help="output of fairseq-generate")
    files.add_argument(
        "--tokenised-reference", required=True, metavar="FILE", help="Moses tokens, lower-cased, one sentence per line"
    )
    files.add_argument(
        "--raw-reference", metavar="FILE", help="untokenised reference; without it the tokens are detokenised"
    )
    files.add_argument("--baseline-generated", metavar="FILE", help="output of the base, for the paired test")
    files.add_argument(
        "--target-lang",
        metavar="LANG",
        help="for detokenising; default: the end of the reference's name, as in test.en",
    )
    files.add_argument("--results", required=True, metavar="FILE.jsonl", help="where the row is written or replaced")

    key = parser.add_argument_group("the system; a row with the same values is replaced")
    key.add_argument("--dataset", required=True, metavar="TEXT", help="label of the data")
    key.add_argument("--architecture", required=True, metavar="TEXT")
    key.add_argument("--backbone", required=True, metavar="TEXT", help="transformer or diff_transformer")
    key.add_argument("--mechanism", required=True, metavar="TEXT", help="softmax, sinkhorn, esp, lot, ...")
    key.add_argument("--options", default="", metavar="TEXT", help="the mechanism's options as given")
    key.add_argument("--stage", required=True, choices=STAGES)
    key.add_argument("--seed", required=True, type=int, metavar="INT", help="seed of the training")

    origin = parser.add_argument_group("where the translations come from")
    origin.add_argument("--device", default="unknown", metavar="TEXT")
    origin.add_argument("--precision", default=Row.precision, choices=PRECISIONS, help="of the translations")
    origin.add_argument("--seconds", type=float, metavar="FLOAT", help="generation time")
    # The parser of fairseq-lot keeps the subcommand under the name "command".
    origin.add_argument(
        "--command", dest="made_with", default="", metavar="TEXT", help="the command that made the translations"
    )
    origin.add_argument("--commit", metavar="TEXT", help="default: the commit of this code, with -dirty if changed")

    bootstrap.add_arguments(parser.add_argument_group("bootstrap"))


def run(args: argparse.Namespace) -> int:
    """Score, write the row, print one line.

    Raises:
        InputError: an option, a translation, a reference or the results file is not as it must be.
    """
    _check_options(args)
    row = score(args)
    put_row(args.results, row)
    print(
        f"{row.backbone} {row.mechanism} {row.stage}, seed {row.seed}, {row.sentences} sentences: "
        f"tokenised BLEU {_describe(row.tokenised)}, sacreBLEU {_describe(row.sacrebleu)}"
    )
    return 0


def score(args: argparse.Namespace) -> Row:
    """Return the row of the system that the options describe, without writing it."""
    resampling = bootstrap.settings(args)
    references = read_lines(args.tokenised_reference)
    raw = None if args.raw_reference is None else read_lines(args.raw_reference)
    if raw is not None and len(raw) != len(references):
        raise InputError(
            f"unequal line counts: {len(raw)} in {args.raw_reference}, {len(references)} in {args.tokenised_reference}"
        )
    hypotheses = read_matching(args.generated, references, args.tokenised_reference)
    base = None
    if args.baseline_generated is not None:
        base = read_matching(args.baseline_generated, references, args.tokenised_reference)

    tokenised = measure(hypotheses, references, metric=TOKENISED, base=base, **resampling)
    plain = {"language": target_language(args)}
    sacrebleu = measure(
        detokenise(hypotheses, **plain),
        detokenise(references, **plain) if raw is None else raw,
        metric=SACREBLEU,
        base=None if base is None else detokenise(base, **plain),
        **resampling,
    )
    return Row(
        dataset=args.dataset,
        architecture=args.architecture,
        backbone=args.backbone,
        mechanism=args.mechanism,
        options=args.options,
        stage=args.stage,
        seed=args.seed,
        sentences=len(hypotheses),
        tokenised=tokenised,
        sacrebleu=sacrebleu,
        reference="detokenised with sacremoses" if raw is None else "raw",
        bootstrap_samples=resampling["samples"],
        bootstrap_seed=resampling["seed"],
        device=args.device,
        precision=args.precision,
        seconds=args.seconds,
        commit=current_commit() if args.commit is None else args.commit,
        command=args.made_with,
    )


def _check_options(args):
    for name in ("dataset", "architecture", "backbone", "mechanism"):
        if not getattr(args, name).strip():
            raise InputError(f"--{name} is empty; give it a name")
    if args.seconds is not None and not (math.isfinite(args.seconds) and args.seconds >= 0):
        raise InputError(f"--seconds must be a number of seconds, not {args.seconds}")
    target_language(args)
    if Path(args.results).exists():
        # A broken results file is found before the work and not after it.
        read_rows(args.results)


def target_language(args: argparse.Namespace) -> str:
    """The language that was typed, else the one that the tokenised reference's name ends with."""
    typed, named = args.target_lang, Path(args.tokenised_reference).suffix[1:]
    language = named if typed is None else typed
    if re.fullmatch(r"[A-Za-z]{2,3}([_-]\w+)?", language) and (typed is not None or named != "txt"):
        return language
    if typed is not None:
        raise InputError(f"--target-lang must be a language code such as en, not {typed!r}")
    raise InputError(f"the name of {args.tokenised_reference} does not end with a language; give --target-lang")


def _describe(metric: MetricScore) -> str:
    text = f"{metric.score:.2f} [{metric.low:.2f}, {metric.high:.2f}]"
    return text if metric.delta is None else f"{text}, {metric.delta:+.2f} to the base (p = {metric.p:.4f})"
