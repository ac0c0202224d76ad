"""BLEU by sacreBLEU, with bootstrap resampling of the test set from statistics of its sentences."""

import argparse
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from fairseq_lot.corpus.moses import rules_of
from fairseq_lot.errors import check_least
from fairseq_lot.experiment.spec import MetricScore

# the data is lower-cased, so case must not count
SACREBLEU: dict[str, Any] = {"lowercase": True}
# tokenizers for languages without spaces; sacreBLEU's default splits at spaces and punctuation
_WITHOUT_SPACES = {"zh": "zh", "yue": "zh", "ja": "char", "th": "char", "lo": "char", "km": "char", "my": "char"}
TOKENISED: dict[str, Any] = {"tokenize": "none", "force": True}
SAMPLES, SEED = 1000, 12345
LEVEL = 0.05  # tables mark differences with a smaller p-value


def add_bootstrap_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the bootstrap."""
    add = parser.add_argument_group("bootstrap").add_argument
    add("--bootstrap-samples", type=int, default=SAMPLES, metavar="N", help="default: %(default)s")
    add("--bootstrap-seed", type=int, default=SEED, metavar="INT", help="default: %(default)s")


def bootstrap_settings(args: argparse.Namespace) -> dict[str, int]:
    """The keyword arguments ``samples`` and ``seed`` from a command line; InputError for invalid values."""
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
    """Score a system and, if given, compare it with the base.

    Args:
        hypotheses, references: one per sentence.
        metric: keyword arguments of sacreBLEU's BLEU: ``SACREBLEU`` for detokenised text, ``TOKENISED`` for tokens.
        base: translations of the same sentences by the base, the system to compare with.
        samples, seed: number and seed of the resamples; the same seed gives the same interval and p-value.

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
    """The metric for a language; languages without spaces get a tokenizer that splits their sentences."""
    split = _WITHOUT_SPACES.get(rules_of(language))
    return metric if split is None else {**metric, "tokenize": split}


def _round(value: float, digits: int) -> float:
    return round(float(value), digits) + 0.0  # adding zero turns -0.0 into 0.0


def sentence_statistics(hypotheses: list[str], references: list[str], *, metric: dict[str, Any]) -> np.ndarray:
    """The counts that BLEU is computed from, ``(sentences, 2 + 2 * 4)``.

    The columns are the lengths of translation and reference, then for n = 1 to 4 the matching and the possible n-grams.
    """
    # effective_order avoids a warning; it changes a sentence's score, which is not used, but not its counts
    bleu = BLEU(effective_order=True, **metric)
    scores = [bleu.sentence_score(*pair) for pair in zip(hypotheses, [[x] for x in references], strict=True)]
    return np.array([[score.sys_len, score.ref_len, *score.counts, *score.totals] for score in scores], dtype=float)


def relative_length(statistics: np.ndarray) -> float:
    """The length of all translations divided by the length of the references, rounded to three decimals."""
    length, reference = statistics[:, :2].sum(0)
    return _round(length / max(reference, 1), 3)


def corpus_score(statistics: np.ndarray) -> float:
    """BLEU of all sentences in percent, as sacreBLEU's ``corpus_score``; see :func:`sentence_statistics`."""
    return _bleu(statistics.sum(0))


def _bleu(counts: np.ndarray) -> float:
    length, reference, correct, total = int(counts[0]), int(counts[1]), counts[2:6].tolist(), counts[6:].tolist()
    return BLEU.compute_bleu(correct, total, length, reference, smooth_method="exp").score


def resampled_scores(statistics: list[np.ndarray], *, samples: int, seed: int) -> np.ndarray:
    """Corpus BLEU in percent on bootstrap resamples of the test set, ``(systems, samples)``.

    All systems get the same resamples: the ones of sacreBLEU for the same seed.

    Args:
        statistics: for each system the :func:`sentence_statistics` of the same sentences.
        samples: number of resamples.
        seed: seed of the resamples.
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
    """The bounds of the 95 % interval of ``(samples,)`` resampled scores: 2.5 % of them lie outside at each end."""
    ordered = np.sort(scores)
    outside = len(ordered) // 40
    return ordered[outside], ordered[len(ordered) - outside - 1]


def paired_p_value(differences: np.ndarray, difference: float) -> float:
    """The two-sided p-value of a paired bootstrap test.

    It is the share of resamples whose centred difference is at least as large as the difference on the test set.
    sacreBLEU's paired test takes absolute values before it centres. That makes it one-sided for all but the smallest
    differences (its p is about half of this one) and gives two equal systems the smallest p; here they get 1.

    Args:
        differences: the difference of the two scores on each resample, ``(samples,)``.
        difference: the difference of the two scores on the test set.
    """
    if np.ptp(differences) == 0:  # one sentence, or sentences that are all the same
        return 1.0
    reached = np.abs(differences - differences.mean()) >= abs(difference)
    return (np.count_nonzero(reached) + 1) / (len(differences) + 1)
