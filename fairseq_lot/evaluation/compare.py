"""``fairseq-lot compare``: differences in BLEU between all pairs of systems, with a paired bootstrap test."""

import argparse
import sys
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation import bleu, results
from fairseq_lot.experiment.spec import BASE, FINE_TUNED, STAGES, Row
from fairseq_lot.output.tables import MISSING, Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("results", metavar="RESULTS.jsonl", help="rows of fairseq-lot score, with the counts of their "
        "sentences beside them in RESULTS.sentences.tsv")  # fmt: skip
    stages = [stage for stage in STAGES if stage != BASE]
    parser.add_argument("--stage", choices=stages, default=FINE_TUNED, help="default: %(default)s")
    parser.add_argument("--against", metavar="SYSTEM", help="only pairs with this system; default: all pairs")
    bleu.add_bootstrap_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Run ``fairseq-lot compare``: print a table for each experiment and backbone."""
    resampling = bleu.bootstrap_settings(args)
    rows = results.read_rows([args.results])
    statistics, file = results.read_statistics(args.results, rows), results.path_of(args.results)
    found, left_out = [], [row for row in rows if row.key not in statistics and results.is_at(row, args.stage)]
    for part in results.tables(row for row in rows if row.key in statistics):
        own = {key: results.at_stage(of_system, args.stage) for key, of_system in results.by_system(part).items()}
        for backbone in dict.fromkeys(backbone for backbone, _ in own):
            scored = {system: by_seed for (place, system), by_seed in own.items() if place == backbone and by_seed}
            systems = {
                system: {seed: statistics[row.key] for seed, row in sorted(by_seed.items())}
                for system, by_seed in scored.items()
            }
            lengths = [counts[:, 1] for by_seed in systems.values() for counts in by_seed.values()]
            if any(not np.array_equal(one, lengths[0]) for one in lengths):
                raise InputError(f"{args.results}: {', '.join(systems)} were scored on different references")
            if len(systems) > 1 and args.against in (None, *systems):
                heading = f"**{part[0].dataset}**, {part[0].experiment}, {backbone}, {args.stage}"
                signature = part[0].tokenised.signature
                more = _detokenised(scored)
                table = compare(
                    systems, signature, heading=heading, against=args.against, detokenised=more, **resampling
                )
                found.append(table)
    found = [table for table in found if table.rows]
    if not found:
        raise InputError(
            f"no two systems of stage {args.stage} in {args.results} have counts of one seed in {file}"
            + ("; score them once more" if args.against is None else f", or none of them is {args.against!r}")
        )
    print("\n\n".join(table.markdown() for table in found))
    if left_out:
        names = ", ".join(f"{row.system} (seed {row.seed})" for row in left_out)
        print(f"{file} lacks counts of {names}: left out", file=sys.stderr)


def _detokenised(scored: dict[str, dict[int, Row]]) -> dict[str, dict[str, dict[int, float]]]:
    """Scores of detokenised text: metric, then system, then seed to score; chrF is absent in old rows."""
    found: dict[str, dict[str, dict[int, float]]] = {"sacreBLEU": {}, "chrF": {}}
    for system, by_seed in scored.items():
        found["sacreBLEU"][system] = {seed: row.sacrebleu.score for seed, row in by_seed.items()}
        found["chrF"][system] = {seed: row.chrf for seed, row in by_seed.items() if row.chrf is not None}
    return {name: by_system for name, by_system in found.items() if any(by_system.values())}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two systems in tokenised BLEU, system minus other, in percent.

    Attributes:
        system, other: their names.
        scores: BLEU of both, averaged over the seeds that both have.
        by_seed: the difference for each of these seeds; ``mean`` is their mean.
        low, high: bounds of the 95 % bootstrap interval of ``mean``.
        p: p-value of the paired bootstrap test of ``mean``.
    """

    system: str
    other: str
    scores: tuple[float, float]
    by_seed: dict[int, float]
    low: float
    high: float
    p: float

    @property
    def mean(self) -> float:
        """The mean difference over the seeds."""
        return sum(self.by_seed.values()) / len(self.by_seed)

    @property
    def star(self) -> str:
        """An asterisk if p is below the level, else empty."""
        return "*" if self.p < bleu.LEVEL else ""

    def __str__(self) -> str:
        return f"{self.mean:+.2f}{self.star} [{self.low:+.2f}, {self.high:+.2f}]"


def differences(
    systems: dict[str, dict[int, np.ndarray]], *, samples: int, seed: int, against: str | None = None
) -> list[Difference]:
    """Compare all pairs of systems on the seeds that both have.

    All systems and seeds are scored on the same resamples of the test set. So the interval and p express the
    uncertainty from the choice of test sentences, not from the training seed; ``by_seed`` shows the latter.

    Args:
        systems: for each system and seed the :func:`~fairseq_lot.evaluation.bleu.sentence_statistics` of the same
            sentences.
        samples, seed: number and seed of the bootstrap's resamples.
        against: only pairs with this system; None: all.
    """
    runs = [(name, number) for name, by_seed in systems.items() for number in by_seed]
    statistics = [systems[name][number] for name, number in runs]
    scores = np.array([bleu.corpus_score(counts) for counts in statistics])
    resampled = bleu.resampled_scores(statistics, samples=samples, seed=seed)
    found = []
    for one, other in combinations(systems, 2):
        common = [number for number in systems[one] if number in systems[other]]
        if not common or against not in (None, one, other):
            continue
        mine, theirs = ([runs.index((name, number)) for number in common] for name in (one, other))
        by_seed = scores[mine] - scores[theirs]
        drawn = (resampled[mine] - resampled[theirs]).mean(0)
        low, high = bleu.interval(drawn)
        found.append(
            Difference(
                system=one,
                other=other,
                scores=(scores[mine].mean(), scores[theirs].mean()),
                by_seed=dict(zip(common, by_seed, strict=True)),
                low=low,
                high=high,
                p=bleu.paired_p_value(drawn, by_seed.mean()),
            )
        )
    return found


def compare(
    systems: dict[str, dict[int, np.ndarray]],
    signature: str,
    *,
    samples: int,
    seed: int,
    heading: str = "",
    against: str | None = None,
    detokenised: dict[str, dict[str, dict[int, float]]] | None = None,
) -> Table:
    """A table with a row for each difference; arguments as for :func:`differences`.

    Args:
        signature: sacreBLEU's signature, for the notes.
        heading: heading of the table.
        detokenised: scores by further metrics: metric, then system, then seed to score. Each metric is a column.
    """
    detokenised = detokenised or {}
    seeds = {number for by_seed in systems.values() for number in by_seed}
    rows = []
    for found in differences(systems, samples=samples, seed=seed, against=against):
        lacking = "" if set(found.by_seed) == seeds else f" (seed {', '.join(map(str, found.by_seed))})"
        changes = ", ".join(f"{change:+.2f}" for change in found.by_seed.values())
        scores = (f"{score:.2f}" for score in found.scores)
        others = [_mean_change(by_system[found.system], by_system[found.other]) for by_system in detokenised.values()]
        rows.append([found.system, found.other, *scores, str(found), changes + lacking, f"{found.p:.4f}", *others])
    sentences = len(next(iter(next(iter(systems.values())).values())))
    return Table(
        [
            *("System", "Other", "BLEU", "of the other", "System minus other, mean of the seeds", "by seed", "p"),
            *(f"in {name}" for name in detokenised),
        ],
        rows,
        heading=heading,
        notes=[
            f"Tokenised BLEU, {sentences} sentences, `{signature}`.",
            "[low, high]: 95 % interval, p: paired test, both by bootstrap of the sentences "
            f"({samples} resamples, seed {seed}); * where p < {bleu.LEVEL}; "
            f"pairs that are compared: {len(rows)}.",
            *([f"In {' and '.join(detokenised)}: the mean difference, of detokenised text."] if detokenised else []),
        ],
    )


def _mean_change(mine: dict[int, float], theirs: dict[int, float]) -> str:
    """The mean difference over the seeds that both have, as text; arguments: seed to score."""
    changes = [mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()]
    return f"{sum(changes) / len(changes):+.2f}" if changes else MISSING
