"""The naive twin of every case, inside the differential wrapper too."""

import torch

from fairseq_lot.modules.sites import unwrapped
from tests import reference
from tests.variants import NUM_HEADS


def _slices(mechanism, head):
    axes = torch.eye(mechanism.num_slices, mechanism.head_dim, dtype=torch.float64)
    return axes if mechanism.slices is None else mechanism.slices[head]


def _epsilon(mechanism, head):
    return mechanism.options.epsilon if mechanism.log_epsilon is None else torch.exp(mechanism.log_epsilon[head])


def _slope(mechanism, head):
    return reference.alibi_slopes(mechanism.num_heads)[head] if mechanism.options.prior == "alibi" else 0.0


# mechanism: the plan of one of its heads for q and k
TWINS = {
    "esp": lambda m, head, q, k: reference.esp_plan(
        q,
        k,
        _slices(m, head),
        sort_temperature=m.options.sort_temperature,
        slice_inverse_temperature=m.options.slice_inverse_temperature,
        hard=m.options.hard,
    ),
    "lot": lambda m, head, q, k: reference.lot_plan(
        q,
        k,
        m.pivots[head],
        m.mass_logits[head],
        epsilon=m.options.epsilon,
        num_updates=m.options.num_updates,
        query_updates=m.options.query_updates,
    ),
    "near_far": lambda m, head, q, k: reference.near_far_plan(
        q,
        k,
        m.features[head] if m.options.num_features else torch.empty(0),
        m.feature_bias[head] if m.options.num_features else torch.empty(0),
        window=m.options.window,
        num_updates=m.options.num_updates,
        band=m.options.band,
        exact_up_to=m.options.exact_up_to,
        tangents=m.options.tangents,
        slope=_slope(m, head),
    ),
    "set": lambda m, head, q, k: reference.set_plan(
        (q + k) / 2,
        m.pivots[head],
        epsilon=m.options.epsilon,
        num_updates=m.options.num_updates,
        positional_temperature=m.options.positional_temperature,
    ),
    "sinkhorn": lambda m, head, q, k: reference.sinkhorn_plan(
        q, k, epsilon=_epsilon(m, head), num_updates=m.options.num_updates, slope=_slope(m, head)
    ),
    "softmax": lambda m, head, q, k: reference.softmax_plan(q, k, slope=_slope(m, head)),
}


def mixed(mechanism, v):
    """What the plan is applied to: v, or v after its convolution."""
    if not mechanism.traits.mixes_values:
        return v
    weights = mechanism.convolution.weight
    return torch.stack([reference.convolution(*head) for head in zip(v, weights, strict=True)])


def twin(case, mechanism, q, k, v):
    """Values and A of one sentence from the slow twin: ``(heads, n, d)`` and ``(heads or pairs, n, m)``."""
    assert case.name in TWINS, f"{case.name} attention has no twin: add one to tests/reference.py and to TWINS"
    plans = [TWINS[case.name](unwrapped(mechanism), head, q[head], k[head]) for head in range(NUM_HEADS)]
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
