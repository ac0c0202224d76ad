"""Softmax: the ALiBi prior, a single query among many keys, and the gradient of the scores."""

import pytest
import torch

from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.transport.positions import alibi_log_prior, alibi_slopes
from tests import reference
from tests.conftest import close, gradients, random
from tests.variants import draw, padding_mask


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20])
def test_slopes_are_those_of_press_et_al(num_heads):
    slopes = alibi_slopes(num_heads, dtype=torch.float64).tolist()
    assert slopes == pytest.approx(reference.alibi_slopes(num_heads))
    assert len(set(slopes)) == num_heads and all(0 < slope < 1 for slope in slopes)
    assert num_heads != 8 or slopes == [2**-h for h in range(1, 9)]
    two_tokens = torch.zeros(1, num_heads, 2, 1)
    prior = alibi_log_prior(None, two_tokens, two_tokens)
    assert prior[0, :, 1, 0].tolist() == pytest.approx([-slope for slope in slopes])


def test_more_queries_than_keys_are_refused():
    with pytest.raises(InputError, match="5 queries, 3 keys"):
        build_mechanism("softmax", num_heads=2, head_dim=4, prior="alibi")(*draw(1, 5, 3))


def test_prior_in_half_precision_reaches_far():
    """float16 does not represent every integer above 2,048, so distances need a wider type."""
    k = torch.zeros(1, 2, 3_000, 4, dtype=torch.float16)
    prior = alibi_log_prior(None, k[:, :, -1:], k)
    assert prior.dtype == torch.float32 and prior.shape == (1, 2, 1, 3_000)
    torch.testing.assert_close(prior[0, 1, 0], -(2**-8) * torch.arange(2_999.0, -1, -1))


@pytest.mark.parametrize("prior", [None, "alibi"])
@pytest.mark.parametrize("layout", [None, "right", "left"])
@pytest.mark.parametrize("src_len", [99, 100])
def test_one_query_among_many_keys_gives_its_row_of_the_sentence(prior, layout, src_len):
    """From 100 keys on, a query of width 4 is computed by two matrix products."""
    mechanism = build_mechanism("softmax", num_heads=2, head_dim=4, prior=prior)
    inputs = draw(3, src_len, src_len)
    mask = None if layout is None else padding_mask((src_len, 60, 1), src_len, layout)
    q, k, v = (x.requires_grad_() for x in inputs)
    whole = mechanism(q, k, v, None, mask).values[:, :, -1:]
    step = mechanism(q[:, :, -1:], k, v, None, mask)
    assert step.weights is None
    close(step.values, whole, 1e-12)
    close(gradients(step.values, [q, k, v]), gradients(whole, [q, k, v]), 1e-12)
    weights = mechanism(q[:, :, -1:], k, v, None, mask, need_weights=True).weights
    pads = torch.zeros(3, src_len, dtype=torch.bool) if mask is None else mask
    close(step.values, weights @ v.masked_fill(pads[:, None, :, None], 0.0), 1e-12)


@pytest.mark.parametrize("prior", [None, "alibi"])
def test_gradients_of_scores_follow_the_formula_of_the_page(prior):
    """docs/mechanisms.md: ``dL/dscores_ij = A_ij (g_j - Σ_j' A_ij' g_j')``. With these keys the scores equal q."""
    softmax = build_mechanism("softmax", num_heads=1, head_dim=6, prior=prior).double()
    q, k = random(1, 1, 6, 6).requires_grad_(), 6**0.5 * torch.eye(6, dtype=torch.float64).expand(1, 1, 6, 6)
    v, of_output = random(2, 1, 1, 6, 6, seed=2)
    output = softmax(q, k, v, need_weights=True)
    (gradient,) = torch.autograd.grad((output.values * of_output).sum(), q)
    g, weights = of_output @ v.mT, output.weights
    close(gradient, weights * (g - (weights * g).sum(-1, keepdim=True)), 1e-12)
