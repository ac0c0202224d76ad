"""The cost of a swap: how it is measured, and how places are given up until it fits a budget."""

import math

import pytest
import torch

from fairseq_lot.errors import InputError
from fairseq_lot.plug_and_play import cost as costs
from fairseq_lot.plug_and_play.cost import DEFAULT_BUDGET, Budget, Comparison, Cost, shown
from tests.plug_and_play.in_memory import LAYERS, load

LENGTHS = tuple(3 + i % 7 for i in range(24))
EVERYWHERE = "encoder,cross,decoder"


def compared(name="lot", **options):
    """A model with mechanism ``name``, the same model with softmax, and their comparison on eight sentences."""
    options = {"lengths": LENGTHS, "lot_num_pivots": 5, **options}
    student, teacher = load(attention=name, **options), load(attention="softmax", **options)
    assert not teacher.model.load_state_dict(student.model.state_dict(), strict=False).missing_keys
    sample = teacher.batch(range(8))
    return student.model, teacher.model, Comparison(student.model, teacher.model, sample, part=None, text=None)


@torch.no_grad()
def by_hand(student, teacher, pairs):
    """KL divergence a piece between the predictions of two models: sentence by sentence, in float64."""
    student, teacher, found, pieces = student.double(), teacher.double(), 0.0, 0
    for sources, targets in pairs:
        for source, target in zip(sources, targets, strict=True):
            source, target = source[source.ne(1)][None], target[target.ne(1)][None]
            ours, theirs = (m(source, torch.tensor([source.numel()]), target)[0][0] for m in (student, teacher))
            p, q = theirs.softmax(-1), ours.softmax(-1)
            found += (p * (p / q).log()).sum().item()
            pieces += target.numel()
    return found / pieces


@pytest.mark.parametrize("sites", ["encoder", EVERYWHERE])
def test_the_cost_is_the_divergence_of_the_predictions(sites, monkeypatch):
    student, teacher, one_batch = compared(attention_sites=sites)
    monkeypatch.setattr(costs, "_BATCH", 20)
    _, _, several = compared(attention_sites=sites)
    assert len(several._pairs) > len(one_batch._pairs) == 1
    cost, again = one_batch.cost(), several.cost()
    assert cost.nats == pytest.approx(again.nats, rel=1e-3) and cost.error == pytest.approx(again.error, rel=1e-3)
    assert list(cost.by_place) == [f"{site}.{layer}" for site in sites.split(",") for layer in range(LAYERS)]
    assert cost.nats == pytest.approx(by_hand(student, teacher, one_batch._pairs), rel=1e-3) and cost.nats > 1e-4
    assert cost.measured_on == "8 random sentences of 2 to 8 pieces that were not fitted on"


def test_the_cost_of_a_place_is_the_cost_of_a_swap_only_there():
    """The other places have softmax meanwhile. Afterwards the teacher has all its own modules again."""
    student, teacher, comparison = compared(attention_sites=EVERYWHERE)
    own = {name: id(module) for name, module in teacher.named_modules()}
    cost = comparison.cost()
    assert {name: id(module) for name, module in teacher.named_modules()} == own
    alone = load(attention="lot", lengths=LENGTHS, lot_num_pivots=5, attention_sites="decoder").model
    softmax = load(attention="softmax", lengths=LENGTHS, attention_sites="decoder").model
    alone.load_state_dict(student.state_dict(), strict=False)
    softmax.load_state_dict(teacher.state_dict(), strict=False)
    alone.decoder.layers[0].self_attn = softmax.decoder.layers[0].self_attn
    assert cost.by_place["decoder.1"] == pytest.approx(by_hand(alone, softmax, comparison._pairs), rel=1e-3)


def test_softmax_for_softmax_costs_zero_without_a_measurement(monkeypatch):
    monkeypatch.setattr(costs, "translate_greedily", lambda *_: pytest.fail("it translates"))
    _, _, comparison = compared("softmax")
    assert comparison.cost() == Cost(0.0) and "cannot change" in str(comparison.cost())
    assert comparison.within(Cost(0.0), Budget(nats=0.0)) == (Cost(0.0), {})


def test_sinkhorn_of_one_update_costs_nothing():
    _, _, comparison = compared("sinkhorn", sinkhorn_epsilon=1.0, sinkhorn_num_updates=1)
    assert max(comparison.cost().nats, comparison.cost().error) < 1e-6


def test_predictions_of_nan_cost_more_than_any_budget():
    student, _, comparison = compared()
    with torch.no_grad():
        student.encoder.layers[1].self_attn.mechanism.pivots.fill_(math.nan)
    cost = comparison.cost()
    assert cost.nats == cost.by_place["encoder.1"] == math.inf > cost.by_place["encoder.0"]
    left, given_up = comparison.within(cost, Budget(nats=1e3))
    assert list(given_up) == ["encoder.1"] and list(left.by_place) == ["encoder.0"] and left.nats < math.inf


def test_the_most_expensive_places_are_given_up_first_and_the_rest_is_measured_again():
    _, _, comparison = compared(attention_sites=EVERYWHERE)
    cost = comparison.cost()
    cheapest, second, *_, worst = sorted(cost.by_place, key=cost.by_place.get)
    assert comparison.within(cost, Budget()) == (cost, {})
    ((nats, error),) = comparison.measured([[cheapest, second]])
    left, given_up = comparison.within(cost, Budget(nats=nats * 1.001))
    assert set(left.by_place) == {cheapest, second} and (left.nats, left.error) == (nats, error)
    assert next(iter(given_up)) == worst and given_up[worst] == (cost.nats, cost.error)
    assert all(nats > left.nats for nats, _ in given_up.values()) and len(given_up) == 3 * LAYERS - 2
    with pytest.raises(InputError, match=f"{cheapest}, the cheapest, alone costs 0.* and has an error of 0"):
        comparison.within(cost, Budget(nats=0.0))


def test_a_place_with_too_large_an_error_is_given_up():
    _, _, comparison = compared()
    cost = comparison.cost()
    worst = max(cost.error_by_place, key=cost.error_by_place.get)
    limit = min(cost.error_by_place.values()) * 1.001
    assert list(comparison.within(cost, Budget(nats=1e3, error=limit))[1]) == [worst]


def test_fewer_sentences_are_compared_if_they_are_long():
    tokens = torch.full((64, 1000), 5)
    assert len(costs._some(tokens, 1)) == 8
    tokens[:32, 100:] = 1
    assert {len(row) for row in costs._some(tokens, 1)} == {100, 1000}, "sentences of every length are kept"
    assert len(costs._some(torch.full((2, 20_000), 5), 1)) == 1


@pytest.mark.parametrize("given", ["many", "nan", "inf", "-1", -0.1, True, "", [1]])
def test_a_budget_that_is_no_number_of_nats_is_refused(given):
    with pytest.raises(InputError, match="budget must be a number of nats, 0 or more, or none, got "):
        Budget.read(given, fitted=True)


def test_budgets_are_read_and_their_use_is_the_larger_ratio():
    assert Budget.read("0.5", fitted=True) == Budget.read(0.5, fitted=False) == Budget(nats=0.5)
    assert Budget.read("default", fitted=True) == DEFAULT_BUDGET
    for given, fitted in (("default", False), (None, True), ("none", True)):
        assert Budget.read(given, fitted=fitted).use(math.inf, math.inf) == 0
    assert Budget(nats=0.0).use(0.0, 9.0) == 0 and Budget(nats=0.0).use(1e-9, 0.0) == math.inf
    assert Budget(nats=2.0, error=0.5).use(1.0, 1.0) == 2


def test_nats_are_shown_with_four_decimals():
    assert [shown(nats) for nats in (0.0, 3e-5, 0.00123)] == ["0.0000", "less than 0.0001", "0.0012"]
