"""``fairseq-lot compare``: differences in BLEU between systems, pair by pair, with a paired bootstrap test."""

import argparse
from itertools import combinations

import numpy as np
from sacrebleu.metrics import BLEU

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation import bootstrap
from fairseq_lot.evaluation.bleu import TOKENISED, resampled_scores, sentence_statistics
from fairseq_lot.evaluation.hypotheses import read_matching
from fairseq_lot.output.files import read_lines
from fairseq_lot.output.tables import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "systems",
        nargs="+",
        metavar="NAME=FILE[,FILE...]",
        help="outputs of fairseq-generate, one for each seed, the seeds in the same order for all systems",
    )
    add("--tokenised-reference", required=True, metavar="FILE", help="Moses tokens, one sentence per line")
    bootstrap.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table.

    Raises:
        InputError: an option, a translation or the reference is not as it must be.
    """
    resampling = bootstrap.settings(args)
    files = _parse(args.systems)
    references = read_lines(args.tokenised_reference)
    hypotheses = {
        name: [read_matching(path, references, args.tokenised_reference) for path in paths]
        for name, paths in files.items()
    }
    print(compare(hypotheses, references, **resampling).markdown())
    return 0


def compare(hypotheses: dict[str, list[list[str]]], references: list[str], *, samples: int, seed: int) -> Table:
    """Return a row for each pair of systems: the mean over seeds of their difference in tokenised BLEU.

    All systems and seeds are scored on the same resamples of the test set, so the interval and p speak of other
    sentences, not of other seeds; the differences by seed stand beside them.

    Args:
        hypotheses: for each system the sentences of each seed; equally many seeds, in the same order.
        references: as many sentences.
        samples: bootstrap resamples.
        seed: of the resampling.
    """
    bleu = BLEU(**TOKENISED)
    scores = {
        name: np.array([bleu.corpus_score(sentences, [references]).score for sentences in runs])
        for name, runs in hypotheses.items()
    }
    statistics = [
        sentence_statistics(sentences, references, metric=TOKENISED)
        for runs in hypotheses.values()
        for sentences in runs
    ]
    resampled = resampled_scores(statistics, samples=samples, seed=seed).reshape(len(hypotheses), -1, samples).mean(1)
    resampled = dict(zip(hypotheses, resampled, strict=True))
    rows = []
    for one, other in combinations(hypotheses, 2):
        by_seed, differences = scores[one] - scores[other], resampled[one] - resampled[other]
        low, high = bootstrap.interval(differences)
        p = bootstrap.paired_p_value(differences, by_seed.mean())
        cells = [one, other, f"{scores[one].mean():.2f}", f"{scores[other].mean():.2f}"]
        cells += [f"{by_seed.mean():+.2f}{'*' if p < bootstrap.LEVEL else ''} [{low:+.2f}, {high:+.2f}]"]
        cells += [", ".join(f"{difference:+.2f}" for difference in by_seed), f"{p:.4f}"]
        rows.append(cells)
    return Table(
        ["A", "B", "BLEU of A", "of B", "A - B, mean of the seeds", "by seed", "p"],
        rows,
        notes=[
            f"Tokenised BLEU, {len(references)} sentences, `{bleu.get_signature().format()}`.",
            f"[low, high]: 95 % interval, p: paired test, both by bootstrap of the sentences ({samples} resamples, "
            f"seed {seed}); * where p < {bootstrap.LEVEL}; pairs that are compared: {len(rows)}.",
        ],
    )


def _parse(systems):
    """``NAME=FILE,FILE`` as a dict of lists of paths."""
    files = {}
    for text in systems:
        name, equals, paths = text.partition("=")
        paths = paths.split(",")
        if not (equals and name and all(paths)):
            raise InputError(f"{text!r} is not NAME=FILE[,FILE...]")
        if name in files:
            raise InputError(f"{name!r} is given twice; put its seeds into one list, separated by commas")
        files[name] = paths
    if len(files) < 2:
        raise InputError("give at least two systems")
    if len({len(paths) for paths in files.values()}) > 1:
        counts = ", ".join(f"{name} {len(paths)}" for name, paths in files.items())
        raise InputError(f"the systems must have equally many seeds; there are: {counts}")
    return files
