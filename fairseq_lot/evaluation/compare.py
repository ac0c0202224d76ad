"""``fairseq-lot compare``: differences in BLEU between systems, pair by pair, with a paired bootstrap test."""

import argparse
from itertools import combinations

import numpy as np

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation import bootstrap
from fairseq_lot.evaluation.bleu import corpus_score, resampled_scores
from fairseq_lot.evaluation.results import BASE, FINE_TUNED, STAGES, at_stage, by_system, read_rows, tables
from fairseq_lot.evaluation.sentences import path_of, read_statistics
from fairseq_lot.output.tables import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("results", metavar="RESULTS.jsonl", help="rows of fairseq-lot score, with the counts of their "
        "sentences beside them in RESULTS.sentences.tsv")  # fmt: skip
    stages = [stage for stage in STAGES if stage != BASE]
    parser.add_argument("--stage", choices=stages, default=FINE_TUNED, help="default: %(default)s")
    bootstrap.add_arguments(parser.add_argument_group("bootstrap"))


def run(args: argparse.Namespace) -> int:
    """Print a table for each experiment and backbone.

    Raises:
        InputError: an option or a results file is not as it must be, or no two systems have counts.
    """
    resampling = bootstrap.settings(args)
    rows = read_rows([args.results])
    statistics = read_statistics(args.results, rows)
    found = []
    for part in tables(row for row in rows if row.key in statistics):
        of_backbone: dict[str, dict[str, dict[int, np.ndarray]]] = {}
        for (backbone, system), own in by_system(part).items():
            by_seed = {seed: statistics[row.key] for seed, row in sorted(at_stage(own, args.stage).items())}
            if by_seed:
                of_backbone.setdefault(backbone, {})[system] = by_seed
        for backbone, systems in of_backbone.items():
            if len(systems) > 1:
                heading = f"**{part[0].dataset}**, {part[0].experiment}, {backbone}, {args.stage}"
                _same_references(systems, args.results)
                found.append(compare(systems, part[0].tokenised.signature, heading=heading, **resampling))
    if not found:
        raise InputError(
            f"no two systems of stage {args.stage} in {args.results} have counts in {path_of(args.results)}; "
            "score them once more"
        )
    print("\n\n".join(table.markdown() for table in found))
    return 0


def _same_references(systems, path):
    """The lengths of the references are the same for all systems."""
    lengths = [counts[:, 1] for by_seed in systems.values() for counts in by_seed.values()]
    if any(not np.array_equal(one, lengths[0]) for one in lengths):
        raise InputError(f"{path}: {', '.join(systems)} were scored on different references")


def compare(
    systems: dict[str, dict[int, np.ndarray]], signature: str, *, samples: int, seed: int, heading: str = ""
) -> Table:
    """A row for each pair of systems: the mean over seeds of their difference in tokenised BLEU.

    All systems and seeds are scored on the same resamples of the test set, so the interval and p speak of other
    sentences, not of other seeds; the differences by seed stand beside them.

    Args:
        systems: for each system and seed the statistics of the same sentences; a pair is compared on common seeds.
        signature: of sacreBLEU.
        samples: bootstrap resamples.
        seed: of the resampling.
        heading: the line above the table.
    """
    runs = [(name, number) for name, by_seed in systems.items() for number in by_seed]
    statistics = [systems[name][number] for name, number in runs]
    scores = dict(zip(runs, map(corpus_score, statistics), strict=True))
    resampled = dict(zip(runs, resampled_scores(statistics, samples=samples, seed=seed), strict=True))
    seeds = {number for _, number in runs}
    rows = []
    for one, other in combinations(systems, 2):
        common = [number for number in systems[one] if number in systems[other]]
        if not common:
            continue

        def mean(of, name, common=common):
            return np.mean([of[name, number] for number in common], axis=0)

        by_seed = [scores[one, number] - scores[other, number] for number in common]
        differences = mean(resampled, one) - mean(resampled, other)
        low, high = bootstrap.interval(differences)
        difference = mean(scores, one) - mean(scores, other)
        p = bootstrap.paired_p_value(differences, difference)
        cells = [one, other, f"{mean(scores, one):.2f}", f"{mean(scores, other):.2f}"]
        cells += [f"{difference:+.2f}{'*' if p < bootstrap.LEVEL else ''} [{low:+.2f}, {high:+.2f}]"]
        lacking = "" if set(common) == seeds else f" (seed {', '.join(map(str, common))})"
        cells += [", ".join(f"{change:+.2f}" for change in by_seed) + lacking, f"{p:.4f}"]
        rows.append(cells)
    return Table(
        ["A", "B", "BLEU of A", "of B", "A - B, mean of the seeds", "by seed", "p"],
        rows,
        heading=heading,
        notes=[
            f"Tokenised BLEU, {len(statistics[0])} sentences, `{signature}`.",
            "[low, high]: 95 % interval, p: paired test, both by bootstrap of the sentences "
            f"({samples} resamples, seed {seed}); * where p < {bootstrap.LEVEL}; "
            f"pairs that are compared: {len(rows)}.",
        ],
    )
