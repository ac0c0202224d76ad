"""``fairseq-lot score``: score the output of fairseq-generate, as one JSON line."""

import argparse
import math
import re
from pathlib import Path

import numpy as np

from fairseq_lot.corpus.moses import detokenise
from fairseq_lot.errors import InputError
from fairseq_lot.evaluation import bleu
from fairseq_lot.evaluation.hypotheses import check_joined, read_hypotheses
from fairseq_lot.evaluation.results import format_statistics, parse, path_of, read_rows
from fairseq_lot.experiment.spec import Label, MetricScore, Row
from fairseq_lot.output.files import atomic_write, read_lines
from fairseq_lot.output.provenance import current_commit

_LANGUAGE = re.compile(r"[A-Za-z]{2,3}([_-]\w+)*")
_NAME = re.compile(r"[A-Za-z][\w-]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument_group("translations and references").add_argument
    add("--generated", required=True, metavar="FILE", help="output of fairseq-generate")
    add("--tokenised-reference", required=True, metavar="FILE", help="tokens as in the data, a sentence per line")
    add("--raw-reference", metavar="FILE", help="untokenised reference; without it the tokens are detokenised")
    add("--baseline-generated", metavar="FILE", help="output of the base, for the paired test")
    add("--target-lang", metavar="LANG", help="for detokenising, en or eng or en_XX; a name that is no code has no "
        "language's rules; default: the end of the reference's name, as in test.en")  # fmt: skip
    add("--out", required=True, metavar="FILE.jsonl", help="the row; beside it, in FILE.sentences.tsv, the counts of "
        "its sentences, for fairseq-lot compare. Rows of several systems in one file make a table")  # fmt: skip

    add = parser.add_argument_group("the system and where its translations come from").add_argument
    names = ", ".join(Label.model_fields)
    add("--label", required=True, metavar="JSON", help=f"an object of {names}; system, settings and stage are needed: "
        """'{"system": "LOT", "settings": {"attention": "lot"}, "stage": "plug-and-play"}'""")  # fmt: skip
    add("--device", default="unknown", metavar="TEXT")
    add("--seconds", type=float, metavar="FLOAT", help="generation time")
    add("--lenpen", type=float, metavar="FLOAT", help="the length penalty, if it was chosen on validation")
    # The parser of fairseq-lot keeps the subcommand under the name "command".
    add("--command", dest="made_with", default="", metavar="TEXT", help="what made the translations")
    bleu.add_bootstrap_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Run ``fairseq-lot score``: write the row and its counts, print one line."""
    if Path(args.out).suffix != ".jsonl":  # the name of the counts' file comes from it
        raise InputError(f"--out {args.out} must end in .jsonl")
    if not 0 <= (args.seconds or 0) < math.inf:
        raise InputError(f"--seconds must be a number of seconds, not {args.seconds}")
    if args.lenpen is not None and not math.isfinite(args.lenpen):
        raise InputError(f"--lenpen must be a number, not {args.lenpen}")
    label = read_label(args.label)
    if Path(args.out).exists() and any(row.key != label.key for row in read_rows([args.out])):
        raise InputError(f"{args.out} has rows of other systems; give another --out")
    row, statistics = score(args, label)
    with atomic_write(args.out) as rows, atomic_write(path_of(args.out)) as counts:
        rows.write(row.line + "\n")
        counts.write(format_statistics(row, statistics) + "\n")
    print(
        f"{row.backbone}, {row.system}, {row.stage}, seed {row.seed}, {row.sentences} sentences: "
        f"tokenised BLEU {_describe(row.tokenised)}, sacreBLEU {_describe(row.sacrebleu)}, chrF {row.chrf:.2f}"
    )


def read_label(text: str) -> Label:
    """Parse the JSON of ``--label``; InputError if it is not a label."""
    try:
        return parse(Label, text, "label")
    except ValueError as error:
        raise InputError(f"--label {text!r}: {error}") from error


def score(args: argparse.Namespace, label: Label) -> tuple[Row, np.ndarray]:
    """Score the translations that the options name; nothing is written.

    Args:
        args: options of the command.
        label: the label of the row.

    Returns:
        The row, and the :func:`~fairseq_lot.evaluation.bleu.sentence_statistics` of the tokenised translations.
    """
    resampling, language = bleu.bootstrap_settings(args), target_language(args)
    references = read_lines(args.tokenised_reference)
    check_joined(references, args.tokenised_reference)
    raw = detokenise(references, language=language) if args.raw_reference is None else read_lines(args.raw_reference)
    if len(raw) != len(references):
        raise InputError(
            f"unequal line counts: {len(raw)} in {args.raw_reference}, {len(references)} in {args.tokenised_reference}"
        )

    def read(path: str) -> tuple[list[str], list[str], set[str]]:
        tokens, given = read_hypotheses(path, len(references))
        return tokens, detokenise(tokens, language=language), given

    tokens, plain, ours = read(args.generated)
    base = plain_base = None
    if args.baseline_generated is not None:
        base, plain_base, theirs = read(args.baseline_generated)
        if ours and theirs and 2 * len(ours & theirs) < len(ours):  # with another dictionary a few lines differ
            other = f"{args.baseline_generated} has translations of other sentences than {args.generated}"
            raise InputError(f"{other}; give those of the same test set")
    statistics = bleu.sentence_statistics(tokens, references, metric=bleu.TOKENISED)
    row = Row(
        **dict(label),
        sentences=len(references),
        length=bleu.relative_length(statistics),
        tokenised=bleu.measure(tokens, references, metric=bleu.TOKENISED, base=base, **resampling),
        sacrebleu=bleu.measure(
            plain, raw, metric=bleu.for_language(bleu.SACREBLEU, language), base=plain_base, **resampling
        ),
        chrf=bleu.chrf(plain, raw),
        reference="detokenised with sacremoses" if args.raw_reference is None else "raw",
        bootstrap_samples=resampling["samples"],
        bootstrap_seed=resampling["seed"],
        device=args.device,
        seconds=args.seconds,
        lenpen=args.lenpen,
        commit=current_commit(),
        command=args.made_with,
    )
    return row, statistics


def target_language(args: argparse.Namespace) -> str:
    """The target language: ``--target-lang``, else the ending of the tokenised reference's file name."""
    typed = args.target_lang
    language = Path(args.tokenised_reference).suffix[1:] if typed is None else typed
    if language == "txt" or not (_LANGUAGE if typed is None else _NAME).fullmatch(language):
        raise InputError(f"{language!r} is not a language code such as en; give --target-lang")
    return language


def _describe(metric: MetricScore) -> str:
    return str(metric) if metric.delta is None else f"{metric}, {metric.delta:+.2f} to the base (p = {metric.p:.4f})"
