"""What the kernel of LOT computes, in plain operations of torch: of any dtype, on any device, with gradients."""

from typing import NamedTuple

from torch import Tensor

from fairseq_lot.numerics.log_domain import log_domain_sinkhorn, pad_log_mass


class LotInputs(NamedTuple):
    """The tensors of LOT attention.

    Attributes:
        q: ``(bsz, num_heads, n, d)``, k: ``(bsz, num_heads, m, d)`` and v: ``(bsz, num_heads, m, value_dim)``.
        pivots: ``(num_heads, r, d)``.
        log_masses: ``(num_heads, r)``, float32.
        query_padding_mask: ``(bsz, n)`` and key_padding_mask: ``(bsz, m)``, bool, True = pad; None = no pads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pivots: Tensor
    log_masses: Tensor
    query_padding_mask: Tensor | None = None
    key_padding_mask: Tensor | None = None


class LotSettings(NamedTuple):
    """The numbers of LOT attention.

    Attributes:
        scale: the scores are ``scale·x·z``.
        query_updates, key_updates: half-updates on either side.
        dropout: probability of dropping an entry of the query side.
    """

    scale: float
    query_updates: int
    key_updates: int
    dropout: float = 0.0


def lot(inputs: LotInputs, settings: LotSettings) -> Tensor:
    """Values of LOT attention without dropout, ``(bsz, num_heads, n, value_dim)``; no sentence may be of pads alone."""
    q, k, v, pivots, log_masses, query_padding_mask, key_padding_mask = inputs
    query_scores, key_scores = (settings.scale * x @ pivots.transpose(-1, -2) for x in (q, k))
    log_a, log_b = (
        x.new_zeros(x.size(0), 1, x.size(2)) if pads is None else pad_log_mass(pads, x)
        for x, pads in ((q, query_padding_mask), (k, key_padding_mask))
    )
    from_queries = log_domain_sinkhorn(query_scores, log_a, log_masses, num_updates=settings.query_updates)
    to_keys = log_domain_sinkhorn(key_scores.transpose(-1, -2), log_masses, log_b, num_updates=settings.key_updates)
    values = from_queries @ (to_keys @ v)
    return values if query_padding_mask is None else values.masked_fill(query_padding_mask[:, None, :, None], 0.0)
