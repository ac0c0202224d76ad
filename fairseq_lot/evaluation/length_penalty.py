"""Choice of the length penalty of fairseq's beam search on the validation set.

fairseq divides the log-probability of each finished hypothesis by ``pieces ** lenpen``, then sorts the hypotheses of a
sentence. The search itself does not use the penalty: neither which hypotheses finish nor when it stops. So one
translation with all hypotheses of the beam shows the best ones for every penalty.
"""

from collections.abc import Sequence

from fairseq_lot.evaluation.bleu import TOKENISED, corpus_score, sentence_statistics
from fairseq_lot.evaluation.hypotheses import Hypothesis

GRID = tuple(quarters / 4 for quarters in range(2, 13))  # 0.5 to 3; fairseq's default is 1


def rank(nbest: Sequence[Sequence[Hypothesis]], lenpen: float) -> list[int]:
    """The index of each sentence's best hypothesis under a length penalty.

    ``fairseq-generate --lenpen`` gives the same one, unless the best two scores differ by less than 5e-7, relative:
    fairseq divides in float32 and prints rounded scores, so either of the two may come first.

    Args:
        nbest: the hypotheses of each sentence, generated with ``--lenpen 1``.
        lenpen: the length penalty.
    """
    places = []
    for hypotheses in nbest:
        scores = [one.score * one.pieces ** (1 - lenpen) for one in hypotheses]
        places.append(scores.index(max(scores)))
    return places


def choose(nbest: Sequence[Sequence[Hypothesis]], references: Sequence[str]) -> tuple[float, dict[float, float]]:
    """The length penalty of ``GRID`` with the highest tokenised BLEU, and the BLEU of each penalty.

    Of penalties with equal BLEU the nearest to 1, fairseq's default, is chosen.

    Args:
        nbest: as for :func:`rank`.
        references: of the same sentences, as words.
    """
    ranked = {lenpen: list(enumerate(rank(nbest, lenpen))) for lenpen in GRID}
    used = sorted({place for places in ranked.values() for place in places})
    texts = [nbest[sentence][place].text for sentence, place in used]
    statistics = sentence_statistics(texts, [references[sentence] for sentence, _ in used], metric=TOKENISED)
    line = {place: number for number, place in enumerate(used)}
    scores = {lenpen: corpus_score(statistics[[line[place] for place in own]]) for lenpen, own in ranked.items()}
    return max(GRID, key=lambda lenpen: (scores[lenpen], -abs(lenpen - 1))), scores
