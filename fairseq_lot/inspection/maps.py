"""Attention maps of a few sentences, in 8 bits, for the report."""

import base64
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from fairseq_lot.errors import InputError
from fairseq_lot.inspection.capture import Captured, capture
from fairseq_lot.pretrained.multilingual import source_symbols
from fairseq_lot.pretrained.translate import Translator
from fairseq_lot.transport.diagnostics import imbalance, receiver_mass

_LEVELS = 255


def sentence_maps(models: Mapping[str, Translator], sentences: Sequence[Sequence[str]], sites: Sequence[str]) -> dict:
    """Attention maps of sentences in several models.

    All decoders get the first model's translation, so all maps have the same tokens.

    Args:
        models: the models by the name that the report shows; they share their vocabularies.
        sentences: the pieces of each sentence, without the end of sentence.
        sites: the sites to show.

    Returns:
        A dictionary for JSON with these keys. ``models``: the names. ``sentences``: for each its ``source`` pieces,
        ``target`` pieces, ``translation`` and ``maps``: for each model a list with one dictionary per site, layer and
        head. Matrices are as made by :func:`quantise`.

    Raises:
        InputError: vocabularies differ, a sentence is blank or too long, or an attention is not finite.
    """
    first_name, first = next(iter(models.items()))
    for name, model in models.items():
        for side in ("source_dictionary", "target_dictionary"):
            if getattr(model.loaded.task, side).symbols != getattr(first.loaded.task, side).symbols:
                raise InputError(f"{name} and {first_name} differ in vocabulary; compare models of one data folder")
    shown, dictionary = [], first.loaded.task.source_dictionary
    for number, pieces in enumerate(sentences, start=1):
        if not pieces:
            raise InputError(f"sentence {number} is blank; remove the line")
        source = first.symbols(pieces, f"sentence {number}")
        _maps_of(first, source, source[-1:], sites)  # refuses scores that are not finite: the search would not end
        target = first.search([source])[0]
        before = torch.cat([target[-1:], target[:-1]])  # fairseq's decoder starts with the end of sentence
        shown.append(
            {
                "source": [*(dictionary[i] for i in source_symbols(first.loaded.task)), *pieces, "</s>"],
                "target": [first.loaded.task.target_dictionary[i] for i in before],
                "translation": first.spell(target),
                "maps": [_maps_of(model, source, before, sites) for model in models.values()],
            }
        )
    return {"models": list(models), "sentences": shown}


@torch.no_grad()
def _maps_of(model: Translator, source: torch.Tensor, before: torch.Tensor, sites: Sequence[str]) -> list[dict]:
    """The maps of one sentence in one model.

    Args:
        model: the model.
        source: the encoder's input, ``(src_len,)``.
        before: the decoder's input, ``(tgt_len,)``.
        sites: the sites to show.
    """
    with capture(model.loaded.model) as seen:
        device = model.loaded.device
        inputs = source[None], torch.tensor([len(source)]), before[None]
        model.loaded.model(*(x.to(device) for x in inputs))
    for attention in seen:
        attention.check_finite(model.loaded.path)
    kept = [attention for attention in seen if attention.site in sites]
    return [map_ for attention in kept for map_ in _heads(attention)]


def _heads(attention: Captured) -> Iterator[dict]:
    """For each head of one attention a dictionary of its map, its measures and, for LOT, its pivots."""
    pivots = None
    if attention.mechanism is not None and not attention.causal:
        coupling = attention.mechanism.coupling(attention.q, attention.k)
        pivots = coupling and clusterings(*coupling.factors)
    for head, weights in enumerate(attention.weights[0].double()):
        yield {
            "site": attention.site,
            "layer": attention.layer,
            "head": head,
            "attention": attention.name,
            "map": quantise(weights),
            "row_sums": _rounded(weights.sum(-1)),
            "receiver_mass": _rounded(receiver_mass(weights)),
            "imbalance": round(imbalance(weights).item(), 4),
            "pivots": pivots and [quantise(clustering[0, head]) for clustering in pivots],
        }


def clusterings(from_queries: torch.Tensor, to_keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Soft assignments of tokens to pivots: ``p(pivot | query)`` and, by Bayes' rule, ``p(pivot | key)``.

    Args:
        from_queries: ``p(pivot | query)``, ``(..., n, r)``, for queries of equal mass.
        to_keys: ``p(key | pivot)``, ``(..., r, m)``.

    Returns:
        The two assignments, ``(..., n, r)`` and ``(..., m, r)``. Rows sum to 1, or to 0 for a key without mass.
    """
    joint = from_queries.mean(-2).unsqueeze(-1) * to_keys
    keys = joint / joint.sum(-2, keepdim=True).clamp_min(torch.finfo(joint.dtype).tiny)
    return from_queries, keys.transpose(-1, -2)


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


def quantise(matrix: torch.Tensor) -> dict:
    """A matrix in 8 bits per entry: value = low + (high - low)·byte/255.

    Returns:
        ``rows``, ``columns``, ``low``, ``high``, and ``bytes``: the entries row by row, in base64.
    """
    values = matrix.double().cpu().numpy()
    low, high = min(0.0, values.min()), values.max()
    size = (high - low) or 1.0
    data = np.rint((values - low) / size * _LEVELS).astype(np.uint8)
    rows, columns = data.shape
    return {
        "rows": rows,
        "columns": columns,
        "low": round(float(low), 6),
        "high": round(float(low + size), 6),
        "bytes": base64.b64encode(data.tobytes()).decode("ascii"),
    }
