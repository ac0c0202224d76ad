"""BLEU as sacreBLEU computes it, and its bootstrap: the test set resampled, from statistics of its sentences."""

import argparse
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from fairseq_lot.corpus.moses import rules_of
from fairseq_lot.errors import check_least
from fairseq_lot.experiment.spec import MetricScore

# The data is lower-cased, so that case must not count; "none" keeps the tokens as they are.
SACREBLEU: dict[str, Any] = {"lowercase": True}
# sacreBLEU's default splits by spaces and punctuation
_WITHOUT_SPACES = {"zh": "zh", "yue": "zh", "ja": "char", "th": "char", "lo": "char", "km": "char", "my": "char"}
TOKENISED: dict[str, Any] = {"tokenize": "none", "force": True}
SAMPLES, SEED = 1000, 12345
LEVEL = 0.05  # a difference with a smaller p-value is marked in the tables


def add_bootstrap_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the bootstrap."""
    add = parser.add_argument_group("bootstrap").add_argument
    add("--bootstrap-samples", type=int, default=SAMPLES, metavar="N", help="default: %(default)s")
    add("--bootstrap-seed", type=int, default=SEED, metavar="INT", help="default: %(default)s")


def bootstrap_settings(args: argparse.Namespace) -> dict[str, int]:
    """Return the keyword arguments ``samples`` and ``seed``; InputError where an option is not as it must be."""
    check_least(args, bootstrap_samples=1, bootstrap_seed=0)
    return {"samples": args.bootstrap_samples, "seed": args.bootstrap_seed}


def measure(
    hypotheses: list[str],
    references: list[str],
    *,
    metric: dict[str, Any],
    base: list[str] | None = None,
    samples: int = SAMPLES,
    seed: int = SEED,
) -> MetricScore:
    """Score a system, and compare it with the base when there is one.

    Args:
        metric: keyword arguments of sacreBLEU's BLEU: SACREBLEU or TOKENISED.
        base: the base's translations of the same sentences.
        samples, seed: of the bootstrap; the same seed gives the same interval and p-value.

    Returns:
        Scores rounded to two decimals, the p-value to four.
    """
    bleu = BLEU(**metric)
    score = bleu.corpus_score(hypotheses, [references]).score
    systems = [hypotheses] if base is None else [hypotheses, base]
    statistics = [sentence_statistics(lines, references, metric=metric) for lines in systems]
    resampled = resampled_scores(statistics, samples=samples, seed=seed)
    low, high = interval(resampled[0])
    found = {"score": score, "low": low, "high": high}
    p = None
    if base is not None:
        found["base"] = corpus_score(statistics[1])
        found["delta"] = score - found["base"]
        p = _round(paired_p_value(resampled[0] - resampled[1], found["delta"]), 4)
    rounded = {name: _round(value, 2) for name, value in found.items()}
    return MetricScore(**rounded, p=p, signature=bleu.get_signature().format())


def sacrebleu(hypotheses: list[str], references: list[str], language: str) -> float:
    """sacreBLEU of detokenised text, in percent, rounded to two decimals."""
    return _round(BLEU(**for_language(SACREBLEU, language)).corpus_score(hypotheses, [references]).score, 2)


def chrf(hypotheses: list[str], references: list[str]) -> float:
    """sacreBLEU's chrF, in percent, rounded to two decimals."""
    return _round(CHRF().corpus_score(hypotheses, [references]).score, 2)


def for_language(metric: dict[str, Any], language: str) -> dict[str, Any]:
    """The metric, but for a language that is written without spaces with a tokenizer that splits its sentences."""
    split = _WITHOUT_SPACES.get(rules_of(language))
    return metric if split is None else {**metric, "tokenize": split}


def _round(value: float, digits: int) -> float:
    return round(float(value), digits) + 0.0  # adding zero turns -0.0 into 0.0


def sentence_statistics(hypotheses: list[str], references: list[str], *, metric: dict[str, Any]) -> np.ndarray:
    """Return the counts that BLEU is made of, (sentences, 2 + 2 * 4).

    The columns are the two lengths, the matching and the possible n-grams for n = 1 to 4.
    """
    # effective_order changes the sentence's score, which is not used, and not its counts; it avoids a warning.
    bleu = BLEU(effective_order=True, **metric)
    scores = [bleu.sentence_score(*pair) for pair in zip(hypotheses, [[x] for x in references], strict=True)]
    return np.array([[score.sys_len, score.ref_len, *score.counts, *score.totals] for score in scores], dtype=float)


def relative_length(statistics: np.ndarray) -> float:
    """Return the length of all translations divided by that of their references, rounded to three decimals."""
    length, reference = statistics[:, :2].sum(0)
    return _round(length / max(reference, 1), 3)


def corpus_score(statistics: np.ndarray) -> float:
    """Return BLEU of all sentences, as sacreBLEU's ``corpus_score`` does."""
    return _bleu(statistics.sum(0))


def _bleu(counts: np.ndarray) -> float:
    length, reference, correct, total = int(counts[0]), int(counts[1]), counts[2:6].tolist(), counts[6:].tolist()
    return BLEU.compute_bleu(correct, total, length, reference, smooth_method="exp").score


def resampled_scores(statistics: list[np.ndarray], *, samples: int, seed: int) -> np.ndarray:
    """Return corpus BLEU on bootstrap resamples of the test set, (systems, samples).

    All systems see the same resamples, which are sacreBLEU's own for the same seed.
    """
    columns = np.hstack(statistics)
    sentences = len(columns)
    generator = np.random.default_rng(seed)
    scores = []
    for _ in range(samples):
        times = np.bincount(generator.choice(sentences, sentences), minlength=sentences)
        scores.append([_bleu(counts) for counts in (times @ columns).reshape(len(statistics), -1)])
    return np.array(scores).T


def interval(scores: np.ndarray) -> tuple[float, float]:
    """Return the bounds of the 95 % interval: one fortieth of the resamples lies outside at either end."""
    ordered = np.sort(scores)
    outside = len(ordered) // 40
    return ordered[outside], ordered[len(ordered) - outside - 1]


def paired_p_value(differences: np.ndarray, difference: float) -> float:
    """Return the two-sided p-value of a paired bootstrap test.

    It is the share of resamples whose centred difference is at least as large as that on the test set. sacreBLEU's
    paired test folds the differences before it centres them, which makes it one-sided for all but the
    smallest differences (its p is about half of this one), and gives two equal systems the smallest p; here
    they get 1.
    """
    if np.ptp(differences) == 0:  # nothing was drawn: one sentence, or sentences that are all the same
        return 1.0
    reached = np.abs(differences - differences.mean()) >= abs(difference)
    return (np.count_nonzero(reached) + 1) / (len(differences) + 1)
