"""Figures of one captured attention: the measures of each head, and the certificates of its scores."""

from collections.abc import Iterator

import numpy as np
import torch

from fairseq_lot.inspection.capture import Captured
from fairseq_lot.transport import diagnostics
from fairseq_lot.transport.certificates import perturbation_certificate

# measure: (title in the table, format of a figure)
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
    "marginal_error": ("marginal error", ".1e"),
}
# sizes of the score perturbations, in units of τ
_NOISE_SIZES = (0.01, 0.1, 1.0)


def measure(attention: Captured, query_padding_mask: torch.Tensor, key_padding_mask: torch.Tensor) -> dict:
    """All of ``MEASURES`` of one attention on one batch.

    Args:
        query_padding_mask: ``(bsz, tgt_len)`` and key_padding_mask: ``(bsz, src_len)`` bool, True = pad.

    Returns:
        For each measure a ``(bsz, heads)`` tensor in float64.
    """
    weights, v = attention.weights.double(), attention.values.double()
    other = attention.softmax_weights(key_padding_mask).double()
    masks = query_padding_mask.unsqueeze(1), key_padding_mask.unsqueeze(1)
    least, largest = diagnostics.receiver_extremes(weights, *masks)
    return {
        "marginal_error": diagnostics.attention_marginal_error(weights, *masks),
        "receiver_min": least,
        "receiver_max": largest,
        "imbalance": diagnostics.imbalance(weights, *masks),
        "entropy": diagnostics.row_entropy(weights, *masks),
        "effective_rank": diagnostics.effective_rank(weights, *masks),
        "softmax_distance": diagnostics.row_distance(weights, other, *masks),
        "mean_shift": diagnostics.mean_shift(weights, v, *masks),
    }


def mean_rows(site, layer, name, signed, parts) -> Iterator[dict]:
    """One row per head: the mean over the sentences of all batches."""
    means = {measure: torch.cat([part[measure] for part in parts]).mean(0).tolist() for measure in MEASURES}
    for head in range(len(means["entropy"])):
        figures = {measure: heads[head] for measure, heads in means.items()}
        yield {"site": site, "layer": layer, "head": head, "attention": name, "signed": signed, **figures}


def certify(attention: Captured, padding_mask: torch.Tensor, perturbations: int, seeds: list) -> Iterator[dict]:
    """Perturb the scores of each sentence by random signs of a few sizes; one dictionary per sentence."""
    for q, k, v, pads, seed in zip(attention.q, attention.k, attention.v, padding_mask, seeds, strict=True):
        q, k, v = (x[:, ~pads].double() for x in (q, k, v))
        scores = (q * q.size(-1) ** -0.5) @ k.transpose(-1, -2)
        random = np.random.default_rng(seed)
        signs = torch.from_numpy(random.choice([-1.0, 1.0], (perturbations, *scores.shape)))
        sizes = torch.tensor([_NOISE_SIZES[i % len(_NOISE_SIZES)] for i in range(perturbations)], dtype=signs.dtype)
        noise = attention.epsilon * sizes[:, None, None, None] * signs
        found = perturbation_certificate(scores, v, noise, epsilon=attention.epsilon)
        yield {"epsilon": torch.as_tensor(attention.epsilon).mean().item(), **vars(found)}


def summary(layer, parts):
    """The largest ratios of one layer, and the largest marginal error that was left; τ is the mean over the heads."""
    plan, output, error = (
        torch.stack([part[name] for part in parts]) for name in ("plan_ratio", "output_ratio", "marginal_error")
    )
    return {
        "layer": layer,
        "epsilon": parts[0]["epsilon"],
        "plan_ratio": plan.max().item(),
        "plan_ratio_mean": plan.mean().item(),
        "output_ratio": output.max().item(),
        "output_ratio_mean": output.mean().item(),
        "marginal_error": error.max().item(),
    }
