"""Sinkhorn attention: its tolerance mode, and a learnt epsilon."""

import math

import pytest
import torch

from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.transport.marginals import marginal_error
from tests.variants import HEAD_DIM, NUM_HEADS, draw, padding_mask

LENGTHS = (6, 4, 2)


def attention(q, k, mask=None, **options):
    """A of every sentence and head."""
    mechanism = build_mechanism("sinkhorn", num_heads=NUM_HEADS, head_dim=HEAD_DIM, **options)
    return mechanism(q, k, k, mask, mask, need_weights=True).weights


def errors(a, mask):
    """Marginal error of the plans behind A, ``(bsz, heads)``."""
    uniform = (~mask).double() / (~mask).sum(-1, keepdim=True)
    return marginal_error(uniform[:, None, :, None] * a, uniform[:, None], uniform[:, None])


@pytest.mark.parametrize("layout", ["right", "left", "scattered"])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-5, 1e-9])
def test_tolerance_is_reached_by_every_sentence_of_a_ragged_batch(tolerance, layout):
    q, k, _ = draw(3, 6, 6)
    mask = padding_mask(LENGTHS, 6, layout)
    options = {"epsilon": 0.5, "num_updates": 2_001}
    stopped = errors(attention(q, k, mask, **options, tolerance=tolerance), mask)
    assert stopped.max() <= tolerance
    assert stopped.max() > 100 * errors(attention(q, k, mask, **options), mask).max()  # it did stop early


@pytest.mark.parametrize("num_updates", [1, 2, 3, 6, 7])
def test_tolerance_out_of_reach_stops_at_the_number_of_updates(num_updates):
    q, k, _ = draw(3, 6, 6)
    mask = padding_mask(LENGTHS, 6, "left")
    options = {"epsilon": 0.1, "num_updates": num_updates}
    limited = attention(q, k, mask, **options, tolerance=1e-15)
    assert torch.equal(limited, attention(q, k, mask, **options))
    assert errors(limited, mask).max() > 1e-3


def test_log_epsilon_in_half_precision_is_exponentiated_in_float32():
    mechanism = build_mechanism("sinkhorn", num_heads=NUM_HEADS, head_dim=HEAD_DIM, learn_epsilon=True).half()
    assert mechanism.log_epsilon.shape == (NUM_HEADS,)
    mechanism.log_epsilon.data.fill_(math.log(1e-6))  # subnormal in float16, whose spacing there is 6e-8
    expected = mechanism.log_epsilon.float().exp()
    assert mechanism.epsilon().dtype == torch.float32 and torch.equal(mechanism.epsilon().flatten(), expected)
