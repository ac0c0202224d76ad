"""The naive twin of every case, inside the differential wrapper too."""

import torch

from fairseq_lot.attention import reference
from tests.variants import NUM_HEADS, inner


def mixed(mechanism, v):
    """What the plan is applied to: v, or v after its convolution."""
    if not mechanism.mixes_values:
        return v
    weights = mechanism.convolution.weight
    return torch.stack([reference.convolution(*head) for head in zip(v, weights, strict=True)])


def twin(case, mechanism, q, k, v):
    """Values and A of one sentence from the slow twin: ``(heads, n, d)`` and ``(heads or pairs, n, m)``."""
    assert case.name in reference.TWINS, f"{case.name} attention has no twin: add one to attention/reference.py"
    plans = [reference.TWINS[case.name](inner(mechanism), head, q[head], k[head]) for head in range(NUM_HEADS)]
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
