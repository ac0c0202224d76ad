"""BLEU as sacreBLEU computes it, also on resamples of the test set, from statistics of its sentences."""

from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU
from sacremoses import MosesDetokenizer

from fairseq_lot.evaluation.bootstrap import SAMPLES, SEED, interval, paired_p_value
from fairseq_lot.evaluation.results import MetricScore

# The data is lower-cased, so that case must not count; "none" keeps the Moses tokens as they are.
SACREBLEU: dict[str, Any] = {"lowercase": True}
TOKENISED: dict[str, Any] = {"tokenize": "none", "force": True}
_ORDER = 4
_BATCH = 64


def detokenise(lines: list[str], *, language: str) -> list[str]:
    """Undo Moses tokenisation and its escapes (``&apos;`` and the like) with sacremoses."""
    detokenizer = MosesDetokenizer(lang=language)
    return [detokenizer.detokenize(line.split()) for line in lines]


def measure(
    hypotheses: list[str],
    references: list[str],
    *,
    metric: dict,
    base: list[str] | None = None,
    statistics: np.ndarray | None = None,
    samples: int = SAMPLES,
    seed: int = SEED,
) -> MetricScore:
    """Score a system, and compare it with the base when there is one.

    Args:
        hypotheses: the system's sentences.
        references: as many reference sentences.
        metric: keyword arguments of sacreBLEU's BLEU: SACREBLEU or TOKENISED.
        base: the base's translations of the same sentences.
        statistics: :func:`sentence_statistics` of the hypotheses, where they are known already.
        samples: bootstrap resamples of the test set.
        seed: seed of the resampling; the same seed gives the same interval and p-value.

    Returns:
        Scores rounded to two decimals, the p-value to four.
    """
    bleu = BLEU(**metric)
    score = bleu.corpus_score(hypotheses, [references]).score
    signature = bleu.get_signature().format()
    if statistics is None:
        statistics = sentence_statistics(hypotheses, references, metric=metric)
    if base is None:
        (scores,) = resampled_scores([statistics], samples=samples, seed=seed)
        comparison = {}
    else:
        base_score = BLEU(**metric).corpus_score(base, [references]).score
        base_statistics = sentence_statistics(base, references, metric=metric)
        scores, base_scores = resampled_scores([statistics, base_statistics], samples=samples, seed=seed)
        p = paired_p_value(scores - base_scores, score - base_score)
        comparison = {"base": _round(base_score), "delta": _round(score - base_score), "p": _round(p, 4)}
    low, high = interval(scores)
    return MetricScore(score=_round(score), low=_round(low), high=_round(high), signature=signature, **comparison)


def sentence_statistics(hypotheses: list[str], references: list[str], *, metric: dict) -> np.ndarray:
    """Return the counts that BLEU is made of, (sentences, 2 + 2 * 4).

    The columns are the two lengths, the matching and the possible n-grams for n = 1 to 4.
    """
    # effective_order changes the sentence's score, which is not used, and not its counts; it avoids a warning.
    bleu = BLEU(effective_order=True, **metric)
    scores = (
        bleu.sentence_score(hypothesis, [reference])
        for hypothesis, reference in zip(hypotheses, references, strict=True)
    )
    return np.array([[score.sys_len, score.ref_len, *score.counts, *score.totals] for score in scores], dtype=float)


def corpus_score(statistics: np.ndarray) -> float:
    """Return BLEU of all sentences, as sacreBLEU's ``corpus_score`` does."""
    return _bleu(statistics.sum(0))


def resampled_scores(statistics: list[np.ndarray], *, samples: int, seed: int) -> np.ndarray:
    """Return corpus BLEU on bootstrap resamples of the test set, (systems, samples).

    All systems see the same resamples, which are sacreBLEU's own for the same seed.
    """
    columns = np.hstack(statistics)
    sentences = len(columns)
    generator = np.random.default_rng(seed)
    scores = []
    for start in range(0, samples, _BATCH):
        batch = min(_BATCH, samples - start)
        drawn = generator.choice(sentences, size=(batch, sentences), replace=True)
        drawn += sentences * np.arange(batch)[:, None]
        times = np.bincount(drawn.ravel(), minlength=batch * sentences).reshape(batch, sentences)
        sums = (times @ columns).reshape(batch, len(statistics), -1)
        scores.extend([[_bleu(counts) for counts in systems] for systems in sums])
    return np.array(scores).T


def _bleu(counts):
    return BLEU.compute_bleu(
        correct=counts[2 : 2 + _ORDER].tolist(),
        total=counts[2 + _ORDER :].tolist(),
        sys_len=int(counts[0]),
        ref_len=int(counts[1]),
        smooth_method="exp",
    ).score


def _round(value, digits=2):
    # Adding zero turns -0.0 into 0.0.
    return round(float(value), digits) + 0.0
