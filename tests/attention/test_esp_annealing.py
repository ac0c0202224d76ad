"""ESP's soft sort gets colder with the epochs, and a checkpoint knows how cold it was."""

import pytest
import torch

from fairseq_lot.attention.registry import build_mechanism
from tests.variants import HEAD_DIM, NUM_HEADS, draw

CONTEXT = {"num_heads": NUM_HEADS, "head_dim": HEAD_DIM}
LIKE = torch.zeros(1, dtype=torch.float64)


def esp(**options):
    return build_mechanism("esp", **CONTEXT, **options)


@pytest.mark.parametrize("anneal", [0.8, 0.5])
def test_temperature_is_multiplied_once_per_epoch(anneal):
    mechanism = esp(anneal=anneal, sort_temperature=0.1)
    assert mechanism.sort_temperature(LIKE).item() == pytest.approx(0.1)
    previous = 0.1
    for epoch in range(2, 12):
        mechanism.set_epoch(epoch)
        now = mechanism.sort_temperature(LIKE).item()
        assert now == pytest.approx(anneal * previous)
        previous = now


def test_epochs_may_be_skipped_and_repeated():
    mechanism = esp(anneal=0.8)
    for epoch in (7, 7, 3, 7):
        mechanism.set_epoch(epoch)
    assert mechanism.sort_temperature(LIKE).item() == pytest.approx(1e-3 * 0.8**6)


def test_annealed_sort_is_the_sort_at_that_temperature():
    mechanism = esp(anneal=0.5, sort_temperature=0.8)
    mechanism.set_epoch(4)
    expected = esp(sort_temperature=0.1)(*draw(), need_weights=True)
    output = mechanism(*draw(), need_weights=True)
    torch.testing.assert_close(output.values, expected.values)
    torch.testing.assert_close(output.weights, expected.weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_annealing_stops_before_gradients_are_rounding_errors(dtype):
    mechanism = esp(anneal=0.5)
    mechanism.set_epoch(1_000)
    assert mechanism.sort_temperature(LIKE.to(dtype)).item() == pytest.approx(1e-8)
    inputs = [x.requires_grad_() for x in draw(dtype=dtype)]
    values = mechanism(*inputs).values
    assert values.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(values.square().sum(), inputs))


def test_a_start_below_the_minimum_stays():
    mechanism = esp(anneal=0.5, sort_temperature=1e-9)
    mechanism.set_epoch(9)
    assert mechanism.sort_temperature(LIKE).item() == pytest.approx(1e-9)


def test_without_annealing_epochs_change_nothing():
    mechanism = esp()
    before = mechanism(*draw()).values
    mechanism.set_epoch(50)
    assert torch.equal(mechanism(*draw()).values, before)
    assert not mechanism.state_dict()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_epoch_is_in_the_checkpoint(dtype):
    trained = esp(anneal=0.8).to(dtype)
    trained.set_epoch(30)
    loaded = esp(anneal=0.8)
    loaded.load_state_dict(trained.state_dict())
    assert loaded.sort_temperature(LIKE).item() == pytest.approx(1e-3 * 0.8**29)
    assert torch.equal(loaded(*draw()).values, trained.double()(*draw()).values)
