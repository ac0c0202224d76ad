"""Measures of attention matrices, on matrices that are small enough to compute them by hand."""

import math

import pytest
import torch

from fairseq_lot.transport import diagnostics
from fairseq_lot.transport.certificates import perturbation_certificate
from fairseq_lot.transport.marginals import marginal_error
from tests.conftest import close, random

MATRIX_MEASURES = [
    diagnostics.attention_marginal_error,
    diagnostics.receiver_mass,
    diagnostics.imbalance,
    diagnostics.row_entropy,
    diagnostics.effective_rank,
]


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64)


A = table((1, 0), (0.5, 0.5))
WIDE = table((0.5, 0.5, 0, 0), (0, 0, 0.5, 0.5))  # n = 2, m = 4, balanced
SIGNED = table((1, -0.5), (-0.5, 1))


@pytest.mark.parametrize(
    "measure, matrix, expected",
    [
        (diagnostics.attention_marginal_error, A, 0.5),
        (diagnostics.attention_marginal_error, WIDE, 0.0),
        (diagnostics.attention_marginal_error, SIGNED, 1.0),
        (diagnostics.attention_marginal_error, torch.eye(3), 0.0),
        (diagnostics.receiver_mass, A, [1.5, 0.5]),
        (diagnostics.receiver_mass, WIDE, [1, 1, 1, 1]),
        (diagnostics.receiver_mass, table((1, 0, 0, 0), (1, 0, 0, 0)), [4, 0, 0, 0]),
        (diagnostics.receiver_mass, SIGNED, [0.5, 0.5]),
        (diagnostics.imbalance, A, 0.5),
        (diagnostics.imbalance, WIDE, 0.0),
        (diagnostics.imbalance, table((1, 0, 0, 0), (1, 0, 0, 0)), 3.0),
        (diagnostics.row_entropy, A, math.log(2) / 2),
        (diagnostics.row_entropy, WIDE, math.log(2)),
        (diagnostics.row_entropy, torch.ones(5, 7), math.log(7)),
        (diagnostics.row_entropy, SIGNED, math.log(3) - math.log(4) / 3),
        (diagnostics.effective_rank, torch.eye(3), 3.0),
        (diagnostics.effective_rank, torch.ones(4, 6), 1.0),
        (diagnostics.effective_rank, WIDE, 2.0),
        (diagnostics.effective_rank, torch.diag(torch.tensor([0.75, 0.25])), 4 / 3**0.75),
    ],
)
def test_values_by_hand(measure, matrix, expected):
    expected = torch.tensor(expected, dtype=torch.float64)
    close(measure(matrix.double()), expected, 1e-14, relative=1e-12)


V = table((2, 0), (0, 0))  # mean (1, 0), mean of A V (1.5, 0), root mean square norm √2


@pytest.mark.parametrize(
    "measure, first, second, expected",
    [
        (diagnostics.row_distance, A, torch.eye(2).double(), 0.5),
        (diagnostics.row_distance, A, A.flip(-1), 1.0),
        (diagnostics.row_distance, torch.eye(2).double(), torch.eye(2).double().flip(-1), 2.0),
        (diagnostics.mean_shift, A, V, 0.5 / 2**0.5),
        (diagnostics.mean_shift, torch.eye(2).double(), V, 0.0),
        (diagnostics.mean_shift, WIDE, random(4, 3), 0.0),
        (diagnostics.mean_shift, A, torch.zeros(2, 2).double(), 0.0),
    ],
)
def test_values_of_two_matrices_by_hand(measure, first, second, expected):
    close(measure(first, second).item(), expected, 1e-15)


def test_receiver_extremes_are_the_least_and_the_largest_receiver_mass():
    assert [x.item() for x in diagnostics.receiver_extremes(A)] == [0.5, 1.5]


def test_attention_has_the_marginal_error_of_its_plan():
    attention = random(3, 2, 5, 7).abs()
    a, b = (torch.full((n,), 1 / n, dtype=torch.float64) for n in (5, 7))
    close(diagnostics.attention_marginal_error(attention), marginal_error(attention / 5, a, b))


@pytest.mark.parametrize("measure", [*MATRIX_MEASURES, diagnostics.row_distance, diagnostics.mean_shift])
@pytest.mark.parametrize("garbage", [7.0, float("nan")])
def test_pads_never_count(measure, garbage):
    """Garbage in the pads of two sentences, three heads each, changes no measure."""
    rows, columns = torch.tensor([0, 2, 3]), torch.tensor([1, 2, 4, 5])
    query_pads, key_pads = torch.ones(1, 1, 5, dtype=torch.bool), torch.ones(1, 1, 6, dtype=torch.bool)
    query_pads[..., rows], key_pads[..., columns] = False, False

    def with_pads(part):
        full = torch.full((2, 3, 5, 6), garbage, dtype=torch.float64)
        full[..., rows[:, None], columns] = part
        return full

    parts = [torch.softmax(random(2, 3, 3, 4, seed=seed), -1) for seed in (1, 2)]
    if measure is not diagnostics.row_distance:
        parts.pop()
    fulls = [with_pads(part) for part in parts]
    if measure is diagnostics.mean_shift:
        parts.append(random(2, 3, 4, 3))
        fulls.append(torch.full((2, 3, 6, 3), garbage, dtype=torch.float64))
        fulls[1][..., columns, :] = parts[1]
    found, expected = measure(*fulls, query_pads, key_pads), measure(*parts)
    if measure is diagnostics.receiver_mass:
        assert found[..., [0, 3]].eq(0).all()
        found = found[..., columns]
        extremes = diagnostics.receiver_extremes(fulls[0], query_pads, key_pads)
        close(torch.stack(extremes), torch.stack([expected.amin(-1), expected.amax(-1)]))
    close(found, expected, 1e-7)


@pytest.mark.parametrize("measure", MATRIX_MEASURES)
def test_sentences_of_pads_alone_give_no_nan(measure):
    pads = torch.ones(2, 3, dtype=torch.bool)
    assert measure(random(2, 3, 3), pads, pads).isfinite().all()


def test_certificate_of_a_change_that_is_known_in_closed_form():
    # n = 2, S = 0: the plan is uniform; T = S + δ[[1, -1], [-1, 1]] gives p = 1/(1 + exp(-2δ/τ)) on the diagonal
    scores, delta, epsilon = torch.zeros(2, 2).double(), 0.3, 0.7
    noise = delta * table((1, -1), (-1, 1)).unsqueeze(0)
    v = table((1, 0), (0, 3))
    found = perturbation_certificate(scores, v, noise, epsilon=epsilon)
    moved = 1 / (1 + math.exp(-2 * delta / epsilon)) - 0.5
    bound = 2 / epsilon * delta
    assert found.plan_ratio.item() == pytest.approx(4 * moved / bound, rel=1e-7)
    # both rows of the output move by moved·(v_1 - v_2); the radius is half the distance of the two values
    assert found.output_ratio.item() == pytest.approx(2 * moved * 10**0.5 / (bound * 10**0.5 / 2), rel=1e-7)
    assert found.marginal_error.item() < 1e-10


def test_certificate_takes_an_epsilon_for_each_plan():
    scores, v, noise = random(2, 4, 4), random(2, 4, 3), random(3, 2, 4, 4)
    temperatures, exact = (0.4, 2.0), {"tolerance": 1e-13}
    epsilons = torch.tensor(temperatures, dtype=torch.float64)[:, None, None]
    found = perturbation_certificate(scores, v, noise, epsilon=epsilons, **exact)
    for head, epsilon in enumerate(temperatures):
        alone = perturbation_certificate(scores[head], v[head], noise[:, head], epsilon=epsilon, **exact)
        close(found.plan_ratio[:, head], alone.plan_ratio, 1e-9, relative=1e-9)
        close(found.output_ratio[:, head], alone.output_ratio, 1e-9, relative=1e-9)


def test_a_constant_added_to_rows_or_columns_changes_no_plan():
    scores = random(4, 4)
    noise = torch.stack([random(4, 1).expand(4, 4), random(1, 4).expand(4, 4)])
    found = perturbation_certificate(scores, random(4, 2), noise, epsilon=0.5)
    assert found.plan_ratio.max() < 1e-8 and found.output_ratio.max() < 1e-8
