"""Theorems 6 and 7 of [CETA] on every mechanism whose A has rows of a probability vector; 10 is in test_claims.py.

Theorem 8, on a residual step ``(1 - α) X + α A X``, is the triangle inequality of 7.

They need no columns, so that softmax and the couplings fulfil them as well as the exact plan does. A differential A is
signed, a soft sort moves mass between the tokens, and a convolution mixes values before A does: those are left out.
"""

import pytest
import torch

from tests.attention.test_contract import masks_of
from tests.conftest import close, random
from tests.variants import PLAIN_CASES

CASES = [case for case in PLAIN_CASES if case.rows_exact and not case.flag("mixes_values")]

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def largest_row(x):
    """``‖x‖_{∞,2}`` of every head of every sentence."""
    return x.norm(dim=-1).amax(-1)


@every_case
def test_theorem_6_rows_of_the_output_lie_in_the_convex_hull_of_the_values(case):
    """The values are unit vectors, so that a row of the output holds its shares of them."""
    query_mask, key_mask = masks_of(case.kinds[-1], "scattered")
    q, k, _ = case.draw(src_len=key_mask.size(1))
    v = torch.eye(key_mask.size(1), dtype=torch.float64).expand(*q.shape[:2], -1, -1)
    shares = case.build()(q, k, v, query_mask, key_mask).values
    assert shares.min() > -1e-9
    assert shares.masked_select(key_mask[:, None, None]).eq(0).all(), "pads have no share"
    close(shares.sum(-1), (~query_mask).double()[:, None].expand(*shares.shape[:3]), 1e-9)


@every_case
def test_theorem_7_attention_spreads_values_no_further(case):
    """``‖AV - AW‖_{∞,2} ≤ ‖V - W‖_{∞,2}``, and both are equal where V - W is the same everywhere."""
    mechanism, (q, k, v) = case.build(), case.draw()
    for seed in range(5):
        w = v + random(*v.shape, seed=seed) * random(*v.shape[:-1], 1, seed=seed + 10)
        apart = mechanism(q, k, v).values - mechanism(q, k, w).values
        assert (largest_row(apart) <= largest_row(v - w) + 1e-9).all()
    everywhere = random(*v.shape[:2], 1, v.size(-1))
    apart = mechanism(q, k, v + everywhere).values - mechanism(q, k, v).values
    close(apart, everywhere.expand_as(apart), 1e-9)
