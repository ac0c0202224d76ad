"""Marginals: uniform on real tokens, nothing on pads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_lot.transport.marginals import at_least_float32, marginal_error, uniform_log_mass, without_empty


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4))
def test_mass_is_shared_by_the_real_tokens(pads):
    mask = torch.tensor(pads)
    mass = uniform_log_mass(mask, torch.zeros(len(pads), 4, 2, dtype=torch.float64)).exp()
    for row, pad in zip(mass, mask, strict=True):
        real = ~pad if not pad.all() else torch.ones(4, dtype=torch.bool)
        torch.testing.assert_close(row, real.double() / real.sum())
        assert row[~real].eq(0).all()


def test_no_mask_is_no_padding():
    like = torch.zeros(2, 5, 3, dtype=torch.float64)
    without = uniform_log_mass(None, like)
    torch.testing.assert_close(without.expand(2, 5), uniform_log_mass(torch.zeros(2, 5, dtype=torch.bool), like))
    assert without.dtype == torch.float64


def test_only_sentences_of_pads_alone_lose_their_pads():
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    assert without_empty(mask).tolist() == [[False, False], [True, False], [False, False]]
    assert mask[0].all()
    assert without_empty(None) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_becomes_float32(dtype):
    x = torch.ones(2, dtype=dtype)
    raised = at_least_float32(x)
    assert raised is x if dtype in (torch.float32, torch.float64) else raised.dtype == torch.float32


def test_marginal_error_adds_both_sides():
    plan = torch.tensor([[[0.5, 0.0], [0.25, 0.25]], [[0.25, 0.25], [0.25, 0.25]]])
    uniform = torch.tensor([0.5, 0.5])
    assert marginal_error(plan, uniform, uniform).tolist() == [0.5, 0.0]
    assert marginal_error(plan, torch.tensor([1.0, 0.0]), uniform).tolist() == [1.5, 1.0]
