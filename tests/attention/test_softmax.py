"""Softmax with a prior: the optimum it stands for and the positions it sees."""

import pytest
import torch

from fairseq_lot.attention import reference
from fairseq_lot.attention import softmax as softmax_file
from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.transport.positions import alibi_log_prior, positions
from fairseq_lot.transport.positions import alibi_slopes as slopes_of
from tests.conftest import close
from tests.variants import draw, padding_mask


def build(num_heads=2, **options):
    return build_mechanism("softmax", num_heads=num_heads, head_dim=4, **options)


def alibi_slopes(num_heads):
    return slopes_of(num_heads, dtype=torch.float64).tolist()


def sentence(n=6, num_heads=2, seed=1):
    return draw(1, n, n, num_heads=num_heads, seed=seed)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20])
def test_slopes_are_those_of_press_et_al(num_heads):
    slopes = alibi_slopes(num_heads)
    assert slopes == pytest.approx(reference.alibi_slopes(num_heads))
    assert len(set(slopes)) == num_heads and all(0 < slope < 1 for slope in slopes)
    two_tokens = torch.zeros(1, num_heads, 2, 1)
    prior = alibi_log_prior(None, two_tokens, two_tokens)
    assert prior[0, :, 1, 0].tolist() == pytest.approx([-slope for slope in slopes])


def test_slopes_of_eight_heads_are_halves():
    assert alibi_slopes(8) == [2**-h for h in range(1, 9)]


@pytest.mark.parametrize("causal", [False, True])
def test_rows_are_the_optimum_relative_to_the_prior(causal):
    """There ``⟨P, S⟩ - KL(P‖π)`` has the same derivative in every direction that mass may move."""
    q, k, v = sentence()
    attention = build(prior="alibi")(q, k, v, need_weights=True, causal=causal).weights[0]
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    for head in range(2):
        log_prior = -alibi_slopes(2)[head] * distance
        for i in range(6):
            seen = i + 1 if causal else 6
            row = attention[head, i, :seen]
            slack = reference.scores(q[0, head], k[0, head])[i, :seen] - row.log() + log_prior[i, :seen]
            close(slack, slack[:1].expand(seen), 1e-12)
            close(row.sum(), torch.tensor(1.0).double(), 1e-12)
            assert attention[head, i, seen:].eq(0).all()


@pytest.mark.parametrize("layout", ["right", "left", "scattered"])
def test_positions_are_counted_over_real_tokens(layout):
    mask = padding_mask((5, 3, 1), 5, layout)
    counted = positions(mask, draw(tgt_len=5)[0])
    for row, pads in zip(counted, mask, strict=True):
        assert row[~pads].tolist() == list(range(int((~pads).sum())))


@pytest.mark.parametrize("layout", [None, "left", "right"])
def test_decoding_steps_have_the_positions_of_the_whole(layout):
    q, k, v = draw(3, 6, 6)
    mask = None if layout is None else padding_mask((6, 4, 3), 6, layout)
    mechanism = build(prior="alibi")
    whole = mechanism(q, k, v, None, mask, causal=True).values
    for i in range(3 if layout == "left" else 0, 6):
        seen = None if mask is None else mask[:, : i + 1]
        # one step needs no causal flag; a chunk of steps does
        step = mechanism(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], None, seen).values
        torch.testing.assert_close(step[:, :, 0], whole[:, :, i], atol=1e-12, rtol=0)
    chunk = mechanism(q[:, :, 4:], k, v, None, mask, causal=True).values
    torch.testing.assert_close(chunk, whole[:, :, 4:], atol=1e-12, rtol=0)


def test_more_queries_than_keys_are_refused():
    q, k, v = draw(1, 5, 3)
    with pytest.raises(InputError, match="5 queries, 3 keys"):
        build(prior="alibi")(q, k, v)


def test_prior_in_half_precision_reaches_far():
    """Distances above 2,048 are no float16 numbers, so they must be counted in a wider type."""
    k = torch.zeros(1, 2, 3_000, 4, dtype=torch.float16)
    prior = alibi_log_prior(None, k[:, :, -1:], k)
    assert prior.dtype == torch.float32 and prior.shape == (1, 2, 1, 3_000)
    torch.testing.assert_close(prior[0, 1, 0], -alibi_slopes(2)[1] * torch.arange(2_999.0, -1, -1))


@pytest.mark.parametrize("prior", [None, "alibi"])
def test_without_the_plan_it_is_one_fused_kernel(prior, monkeypatch):
    calls = []

    def fused(*args, **options):
        calls.append(options["attn_mask"])
        return torch.nn.functional.scaled_dot_product_attention(*args, **options)

    monkeypatch.setattr(softmax_file, "scaled_dot_product_attention", fused)
    q, k, v = sentence()
    options = {} if prior is None else {"prior": prior}
    values = build(**options)(q, k, v).values
    assert len(calls) == 1 and (calls[0] is None) == (prior is None)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=calls[0])
    assert torch.equal(values, expected)
