"""The slow twin of every case, from the functions of ``reference``."""

import torch

from tests import reference
from tests.variants import HEAD_DIM, NUM_HEADS


def inner(mechanism):
    """The mechanism that makes the plans."""
    return getattr(mechanism, "inner", mechanism)


def slices_of(mechanism, head):
    axes = torch.eye(mechanism.num_slices, HEAD_DIM, dtype=torch.float64)
    return axes if mechanism.slices is None else mechanism.slices[head]


TWINS = {
    "esp": lambda m, head, q, k: reference.esp_plan(
        q,
        k,
        slices_of(m, head),
        sort_temperature=m.options.sort_temperature,
        slice_inverse_temperature=m.options.slice_inverse_temperature,
        hard=m.options.hard,
    ),
    "lot": lambda m, head, q, k: reference.lot_plan(
        q,
        k,
        m.pivots[head],
        m.mass_logits[head] / m.options.mass_temperature,
        epsilon=m.options.epsilon,
        num_updates=m.options.num_updates,
        query_updates=m.options.query_updates,
    ),
    "set": lambda m, head, q, k: reference.set_plan(
        (q + k) / 2,
        m.pivots[head],
        epsilon=m.options.epsilon,
        num_updates=m.options.num_updates,
        positional_temperature=m.options.positional_temperature,
    ),
    "sinkhorn": lambda m, head, q, k: reference.sinkhorn_plan(
        q, k, epsilon=m.options.epsilon, num_updates=m.options.num_updates
    ),
    "softmax": lambda m, head, q, k: reference.softmax_plan(
        q, k, slope=reference.alibi_slopes(NUM_HEADS)[head] if m.options.prior == "alibi" else 0.0
    ),
}


def mixed(mechanism, v):
    """What the plan is applied to: v, or v after its convolution."""
    if not mechanism.mixes_values:
        return v
    weights = mechanism.convolution.weight
    return torch.stack([reference.convolution(*head) for head in zip(v, weights, strict=True)])


def twin(case, mechanism, q, k, v):
    """Values and A of one sentence from the slow twin: ``(heads, n, d)`` and ``(heads or pairs, n, m)``."""
    assert case.name in TWINS, f"{case.name} attention has no slow twin: add one to tests/reference.py and to TWINS"
    plans = [TWINS[case.name](inner(mechanism), head, q[head], k[head]) for head in range(NUM_HEADS)]
    if not case.differential:
        attention = torch.stack([q.size(1) * plan for plan in plans])
        return attention @ mixed(mechanism, v), attention
    lambdas = [getattr(mechanism, f"lambda_{x}") for x in ("q1", "k1", "q2", "k2")]
    values, attention = [], []
    for head in range(0, NUM_HEADS, 2):
        pair = (plans[head], plans[head + 1], v[head], v[head + 1], mechanism.norm.weight, lambdas)
        difference, *halves = reference.differential_values(*pair, lambda_init=mechanism.lambda_init)
        values += halves
        attention.append(difference)
    return torch.stack(values), torch.stack(attention)


def has_a_twin(case):
    """Values that are mixed inside the differential wrapper are tested in test_lot.py."""
    return not (case.differential and case.flag("mixes_values"))
