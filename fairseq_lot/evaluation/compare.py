"""``fairseq-lot compare``: differences in BLEU between systems, pair by pair, with a paired bootstrap test."""

import argparse
from itertools import combinations

import numpy as np
from sacrebleu.metrics import BLEU

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation import bootstrap
from fairseq_lot.evaluation.bleu import TOKENISED, corpus_score, resampled_scores, sentence_statistics
from fairseq_lot.evaluation.hypotheses import read_matching
from fairseq_lot.evaluation.results import FINE_TUNED, PLUG_AND_PLAY, Row, read_rows
from fairseq_lot.evaluation.sentences import path_of, read_statistics
from fairseq_lot.evaluation.systems import at_stage, by_system, only, tables
from fairseq_lot.output.files import read_lines
from fairseq_lot.output.tables import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "systems",
        nargs="*",
        metavar="NAME=FILE[,FILE...]",
        help="outputs of fairseq-generate, one for each seed, the seeds in the same order for all systems",
    )
    add("--tokenised-reference", metavar="FILE", help="for these: Moses tokens, one sentence per line")
    scored = parser.add_argument_group("or what fairseq-lot score has kept")
    add = scored.add_argument
    add("--results", metavar="FILE.jsonl", help="all systems of a results file, of each table and backbone on its own")
    add("--stage", choices=(PLUG_AND_PLAY, FINE_TUNED), default=FINE_TUNED, help="default: %(default)s")
    add("--dataset", metavar="LABEL", help="only this dataset")
    add("--protocol", metavar="LABEL", help="only this protocol")
    bootstrap.add_arguments(parser.add_argument_group("bootstrap"))


def run(args: argparse.Namespace) -> int:
    """Print the tables.

    Raises:
        InputError: an option, a translation, the reference or a results file is not as it must be.
    """
    resampling = bootstrap.settings(args)
    if (args.results is None) == (not args.systems) or (args.tokenised_reference is None) != (not args.systems):
        raise InputError("give either --results FILE.jsonl, or NAME=FILE twice or more with --tokenised-reference FILE")
    if args.results is not None:
        rows = only(read_rows(args.results), dataset=args.dataset, protocol=args.protocol)
        found = compare_results(args.results, rows, args.stage, **resampling)
        print("\n\n".join(table.markdown() for table in found))
        return 0
    files = _parse(args.systems)
    references = read_lines(args.tokenised_reference)
    hypotheses = {
        name: [read_matching(path, references, args.tokenised_reference) for path in paths]
        for name, paths in files.items()
    }
    print(compare(hypotheses, references, **resampling).markdown())
    return 0


def compare(hypotheses: dict[str, list[list[str]]], references: list[str], **resampling) -> Table:
    """Compare systems of which the translations are there.

    Args:
        hypotheses: for each system the sentences of each seed; equally many seeds, in the same order.
        references: as many sentences.
        **resampling: ``samples`` and ``seed`` of :func:`compare_statistics`.
    """
    bleu = BLEU(**TOKENISED)
    bleu.corpus_score(references, [references])  # its signature names the number of references
    statistics = {
        name: {
            place: sentence_statistics(sentences, references, metric=TOKENISED)
            for place, sentences in enumerate(runs, start=1)
        }
        for name, runs in hypotheses.items()
    }
    return compare_statistics(statistics, signature=bleu.get_signature().format(), **resampling)


def compare_results(results: str, rows: list[Row], stage: str, **resampling) -> list[Table]:
    """Compare the systems of a results file: a table for each backbone of each of its tables.

    Args:
        results: the file, beside which the counts of the sentences stand.
        rows: its rows that are to be compared.
        stage: ``PLUG_AND_PLAY`` or ``FINE_TUNED``.
        **resampling: ``samples`` and ``seed`` of :func:`compare_statistics`.

    Raises:
        InputError: no two systems have counts, or they are of different references.
    """
    statistics = read_statistics(results, rows)
    found = []
    for part in tables(rows):
        for backbone in dict.fromkeys(key[0] for key in by_system(part)):
            systems: dict[str, dict[int, np.ndarray]] = {}
            chosen = [row for row in part if row.backbone == backbone and row.key in statistics]
            for (_, mechanism, options), own in by_system(chosen).items():
                by_seed = {row.seed: statistics[row.key] for row in at_stage(own, stage)}
                if by_seed:
                    systems[f"{mechanism} {options}".strip()] = dict(sorted(by_seed.items()))
            if len(systems) > 1:
                of_first = next(iter(next(iter(systems.values())).values()))
                if any(not np.array_equal(s[:, 1], of_first[:, 1]) for runs in systems.values() for s in runs.values()):
                    raise InputError(f"{results}: the systems of {part[0].dataset} were scored on different references")
                heading = f"**{part[0].dataset}**, protocol {part[0].protocol}, {backbone}, {stage}"
                signature = chosen[0].tokenised.signature
                found.append(compare_statistics(systems, signature=signature, heading=heading, **resampling))
    if not found:
        raise InputError(
            f"no two systems of stage {stage} in {results} have counts in {path_of(results)}; score them once more"
        )
    return found


def compare_statistics(
    systems: dict[str, dict[int, np.ndarray]], *, signature: str, samples: int, seed: int, heading: str = ""
) -> Table:
    """Return a row for each pair of systems: the mean over seeds of their difference in tokenised BLEU.

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
