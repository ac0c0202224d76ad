"""Measures and certificates of one captured attention, for each head.

A certificate is a measured change under a perturbation, divided by its proved bound: at most 1 if the bound holds.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch

from fairseq_lot.inspection.capture import Captured
from fairseq_lot.modules.sites import unwrapped
from fairseq_lot.transport import diagnostics
from fairseq_lot.transport.certificates import coupling_certificate, perturbation_certificate

# measure: (title in the table, number format)
MEASURES = {
    "marginal_error": ("marginal error", ".1e"),
    "receiver_min": ("m(A) min", ".3f"),
    "receiver_max": ("m(A) max", ".3f"),
    "imbalance": ("Δ(A)", ".3f"),
    "entropy": ("entropy", ".3f"),
    "effective_rank": ("eff. rank", ".2f"),
    "softmax_distance": ("to softmax", ".3f"),
    "mean_shift": ("mean shift", ".4f"),
}
CERTIFICATES = {
    "epsilon": ("τ", "g"),
    "plan_ratio": ("(31) largest", ".3f"),
    "plan_ratio_mean": ("(31) mean", ".3f"),
    "output_ratio": ("output largest", ".3f"),
    "output_ratio_mean": ("output mean", ".3f"),
    "inequality_44_ratio": ("(44) largest", ".3f"),
    "inequality_44_ratio_mean": ("(44) mean", ".3f"),
    "marginal_error": ("marginal error", ".1e"),
}
COUPLING_CERTIFICATES = {
    "epsilon": ("ε", "g"),
    "query_updates": ("T, queries", "d"),
    "key_updates": ("T, keys", "d"),
    "plan_ratio": ("A largest", ".3f"),
    "plan_ratio_mean": ("A mean", ".3f"),
    "output_ratio": ("output largest", ".3f"),
    "output_ratio_mean": ("output mean", ".3f"),
    "as_run_ratio": ("as run largest", ".3f"),
    "as_run_ratio_mean": ("as run mean", ".3f"),
    "marginal_error": ("marginal error", ".1e"),
}
# sizes of the perturbations: in units of τ for scores, of the root mean square for values
_NOISE_SIZES = (0.01, 0.1, 1.0)


def measure_heads(
    attention: Captured,
    query_padding_mask: torch.Tensor,
    key_padding_mask: torch.Tensor,
    measures: Collection[str] = tuple(MEASURES),
) -> dict[str, torch.Tensor]:
    """Measure one attention on one batch.

    Args:
        attention: the record.
        query_padding_mask: ``(bsz, tgt_len)`` bool, True = pad.
        key_padding_mask: ``(bsz, src_len)`` bool, True = pad.
        measures: some of ``MEASURES``, which :mod:`fairseq_lot.transport.diagnostics` defines. The effective rank takes
            cubic time, far longer than the others.

    Returns:
        For each measure a ``(bsz, heads)`` tensor in float64.
    """
    weights, masks = attention.weights.double(), (query_padding_mask.unsqueeze(1), key_padding_mask.unsqueeze(1))
    functions: dict[str, Callable[[], torch.Tensor]] = {
        "marginal_error": lambda: diagnostics.attention_marginal_error(weights, *masks),
        "receiver_min": lambda: diagnostics.receiver_extremes(weights, *masks)[0],
        "receiver_max": lambda: diagnostics.receiver_extremes(weights, *masks)[1],
        "imbalance": lambda: diagnostics.imbalance(weights, *masks),
        "entropy": lambda: diagnostics.row_entropy(weights, *masks),
        "effective_rank": lambda: diagnostics.effective_rank(weights, *masks),
        "softmax_distance": lambda: diagnostics.row_distance(
            weights, attention.softmax_weights(key_padding_mask).double(), *masks
        ),
        "mean_shift": lambda: diagnostics.mean_shift(weights, attention.values(key_padding_mask).double(), *masks),
    }
    return {measure: functions[measure]() for measure in measures}


def mean_rows(site: str, layer: int, name: str, signed: bool, parts: list[dict]) -> Iterator[dict]:
    """One row of the table per head, with the mean of each measure over all sentences.

    Args:
        site, layer, name, signed: the attention, see :class:`Captured`.
        parts: for each batch the result of :func:`measure_heads`.
    """
    means = {measure: torch.cat([part[measure] for part in parts]).mean(0).tolist() for measure in parts[0]}
    for head in range(len(next(iter(means.values())))):
        figures = {measure: heads[head] for measure, heads in means.items()}
        yield {"site": site, "layer": layer, "head": head, "attention": name, "signed": signed, **figures}


def certify(attention: Captured, padding_mask: torch.Tensor, perturbations: int, seeds: list) -> Iterator[dict]:
    """Certificates of the exact plan of q·k for each sentence.

    Scores and values are perturbed by random signs times ``_NOISE_SIZES`` in turn.

    Args:
        attention: the record of self-attention.
        padding_mask: ``(bsz, len)`` bool, True = pad.
        perturbations: number of perturbations per sentence.
        seeds: one for each sentence.

    Yields:
        The fields of :class:`~fairseq_lot.transport.certificates.Certificate`, with ``attention`` and ``epsilon``.
    """
    values = attention.values_of_plans(padding_mask)
    for q, k, v, pads, seed in zip(attention.q, attention.k, values, padding_mask, seeds, strict=True):
        q, k, v = (x[:, ~pads].double() for x in (q, k, v))
        scores = (q * q.size(-1) ** -0.5) @ k.transpose(-1, -2)
        random = np.random.default_rng(seed)
        noise, value_noise = (_signs(random, perturbations, x) for x in (scores, v))
        found = perturbation_certificate(
            scores, v, attention.epsilon * noise, _size_of(v) * value_noise, epsilon=attention.epsilon
        )
        epsilon = torch.as_tensor(attention.epsilon).mean().item()
        yield {"attention": attention.name, "epsilon": epsilon, **vars(found)}


def certify_coupling(
    attention: Captured, padding_mask: torch.Tensor, perturbations: int, seeds: list
) -> Iterator[dict]:
    """:func:`certify` for LOT's two plans, each with its own noise; yields nothing for other mechanisms."""
    mechanism = unwrapped(attention.mechanism)
    problem = None if mechanism is None else mechanism.pivot_problem(attention.q, attention.k)
    if problem is None:
        return
    log_masses = torch.log_softmax(problem.log_masses.double(), -1)  # so that they sum to 1 in float64
    sides = problem.query_scores, problem.key_scores, attention.values_of_plans(padding_mask)
    updates = {"query_updates": problem.query_updates, "key_updates": problem.key_updates}
    for *parts, pads, seed in zip(*sides, padding_mask, seeds, strict=True):
        query_scores, key_scores, v = (x[:, ~pads].double() for x in parts)
        random = np.random.default_rng(seed)
        query_noise, key_noise, value_noise = (_signs(random, perturbations, x) for x in (query_scores, key_scores, v))
        found = coupling_certificate(
            query_scores, key_scores, log_masses, v, query_noise, key_noise, _size_of(v) * value_noise, **updates
        )
        yield {"attention": attention.name, "epsilon": attention.epsilon, **updates, **vars(found)}


def _signs(random: np.random.Generator, perturbations: int, like: torch.Tensor) -> torch.Tensor:
    """Random signs times ``_NOISE_SIZES`` in turn, ``(perturbations, *like.shape)``."""
    signs = torch.from_numpy(random.choice([-1.0, 1.0], (perturbations, *like.shape))).to(like)
    sizes = torch.tensor([_NOISE_SIZES[i % len(_NOISE_SIZES)] for i in range(perturbations)]).to(like)
    return sizes[:, None, None, None] * signs


def _size_of(v: torch.Tensor) -> torch.Tensor:
    """Root mean square of each head's values, ``(heads, 1, 1)``."""
    return v.square().mean((-1, -2), keepdim=True).sqrt()


def summary(layer: int, parts: list[dict]) -> dict:
    """Summarise the certificates of one layer over its sentences.

    Args:
        layer: number of the layer.
        parts: the certificates of each sentence.

    Returns:
        The layer, the largest and the mean of each ratio, the largest marginal error, and the settings that all
        sentences share.
    """
    figures: dict[str, Any] = {"layer": layer}
    for name, first in parts[0].items():
        if not isinstance(first, torch.Tensor):  # equal for all sentences
            figures[name] = first
            continue
        values = torch.stack([part[name] for part in parts])
        figures[name] = values.max().item()
        if name.endswith("_ratio"):
            figures[f"{name}_mean"] = values.mean().item()
    return figures
