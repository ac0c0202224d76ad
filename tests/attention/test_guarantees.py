"""The table of guarantees in docs/mechanisms.md: every cell is measured, and the page has this table."""

from dataclasses import dataclass, field

import pytest
import torch

from fairseq_lot.attention.registry import MECHANISMS, build_mechanism
from tests import reference
from tests.conftest import ROOT, close, random
from tests.variants import build_differential

N, HEADS, WIDTH = 7, 2, 8
EXACT, LIMIT, NO, ROWS_ALONE = "exact", "as T grows", "no", "with rows alone"
BOTH_PLANS, ONE_AND_ONE = "its two plans, as T grows", "its two plans: rows alone, as T grows"
FEW, MANY = 2, 4001  # numbers of updates: the fewest of T >= 2, and enough to converge
PIVOTS = {"num_pivots": 5, "epsilon": 0.7}
FAR = {"num_features": 4, "window": 1}
SOFT = {"sort_temperature": 0.3, "slice_inverse_temperature": 1.0}


@dataclass(frozen=True)
class Guarantee:
    """What A promises for queries and keys of one sentence.

    Attributes:
        name, when: the mechanism, and the options that the promise is for, as the page shows them.
        rows: the rows of A sum to 1.
        columns: the columns of A sum to n/m.
        entropic: A is the entropic plan of its kernel.
        couples: row i depends on other queries than query i.
        few, many: options with a few updates and with many.
    """

    name: str
    when: str
    rows: str
    columns: str
    entropic: str
    couples: str
    few: dict = field(hash=False)
    many: dict | None = field(hash=False, default=None)

    def __str__(self):
        return f"{self.name}, {self.when}"

    def line(self):
        return f"| {self.name} | {self.when} | {self.rows} | {self.columns} | {self.entropic} | {self.couples} |"


def updates(**options):
    """The same options with few updates and with many."""
    return {**options, "num_updates": FEW}, {**options, "num_updates": MANY}


GUARANTEES = [
    Guarantee("softmax", "always", EXACT, NO, ROWS_ALONE, "no", {}),
    Guarantee("sinkhorn", "T = 1", EXACT, NO, ROWS_ALONE, "no", {"num_updates": 1, "epsilon": 0.7}),
    Guarantee("sinkhorn", "T ≥ 2", EXACT, LIMIT, LIMIT, "yes", *updates(epsilon=0.7)),
    Guarantee("esp", "soft sorting", NO, NO, NO, "yes", SOFT),
    Guarantee("esp", "`--esp-hard`", EXACT, EXACT, NO, "yes", {"hard": True, **SOFT}),
    Guarantee("lot", "T = 1", EXACT, NO, NO, "no", {**PIVOTS, "num_updates": 1}),
    Guarantee("lot", "T ≥ 2", EXACT, LIMIT, BOTH_PLANS, "yes", *updates(**PIVOTS)),
    Guarantee(
        "lot", "`--lot-query-updates 1`, T ≥ 2", EXACT, NO, ONE_AND_ONE, "no", *updates(**PIVOTS, query_updates=1)
    ),
    Guarantee("near_far", "T = 1", EXACT, NO, ROWS_ALONE, "no", FAR),
    Guarantee("near_far", "T ≥ 2", EXACT, LIMIT, LIMIT, "yes", *updates(**FAR)),
    Guarantee("set", "T = 1", EXACT, NO, NO, "yes", {**PIVOTS, "num_updates": 1}),
    Guarantee("set", "T ≥ 2", EXACT, LIMIT, BOTH_PLANS, "yes", *updates(**PIVOTS)),
    Guarantee("set", "a position factor", EXACT, NO, NO, "yes", *updates(**PIVOTS, positional_temperature=0.4)),
]
every_row = pytest.mark.parametrize("row", GUARANTEES, ids=str)


def built(row, options):
    """The mechanism in float64, with unequal pivot masses, and q, k and v of one sentence."""
    mechanism = build_mechanism(row.name, num_heads=HEADS, head_dim=WIDTH, **options).double()
    with torch.no_grad():
        for name, parameter in mechanism.named_parameters():
            if name == "mass_logits":
                parameter.copy_(random(*parameter.shape, seed=3))
    return mechanism, 2 * random(3, 1, HEADS, N, WIDTH)


def weights_of(row, options):
    mechanism, (q, k, v) = built(row, options)
    return mechanism(q, k, v, need_weights=True).weights[0]


def check(promise, few, many):
    """Assert that the error is zero (EXACT), vanishes with many updates (LIMIT) or stays (NO)."""
    errors = [error for error in (few, many) if error is not None]
    if promise == EXACT:
        assert max(errors) < 1e-9
    elif promise == LIMIT:
        assert few > 1e-3 and many < 1e-9
    else:
        assert promise == NO and min(errors) > 1e-3


def both(row, error):
    """The error with few updates, and the error with many where the row has them."""
    return error(row.few), None if row.many is None else error(row.many)


@every_row
def test_row_sums_are_as_the_table_says(row):
    check(row.rows, *both(row, lambda options: (weights_of(row, options).sum(-1) - 1).abs().max().item()))


@every_row
def test_column_sums_are_as_the_table_says(row):
    check(row.columns, *both(row, lambda options: (weights_of(row, options).sum(-2) - 1).abs().max().item()))


@every_row
def test_another_query_changes_a_row_where_the_table_says_so(row):
    """The last query is changed and the first row compared. In set a token is query and key, so the row changes."""
    mechanism, (q, k, v) = built(row, row.few)
    other = q.clone()
    other[:, :, -1] += 1
    first, second = (mechanism(x, k, v, need_weights=True).weights[0, :, 0] for x in (q, other))
    moved = (first - second).abs().max().item()
    assert moved < 1e-12 if row.couples == "no" else moved > 1e-6


def log_kernel(row, head, q, k, mechanism):
    """log K of one head; its entropic plan is K with scaled rows and columns."""
    if row.name == "near_far":  # the twin without any update is its kernel
        far = mechanism.features[head], mechanism.feature_bias[head]
        return reference.near_far_plan(q, k, *far, window=mechanism.options.window, num_updates=0).log()
    return reference.scores(q, k) / getattr(mechanism.options, "epsilon", 1.0)


def row_centred(x):
    """x without its row means: 0 if every row is constant."""
    return x - x.mean(-1, keepdim=True)


def doubly_centred(x):
    """x without its row and column means: 0 if x is a sum of a constant per row and one per column."""
    return row_centred(row_centred(x).mT).mT


@every_row
def test_plans_are_entropic_where_the_table_says_so(row):
    """A plan is entropic if it is its kernel with scaled rows and columns and has the marginals.

    "With rows alone": only rows are scaled, and only their marginal holds.
    """
    for options in filter(None, (row.few, row.many)):
        mechanism, (q, k, _) = built(row, options)
        weights = weights_of(row, options)
        kernels = torch.stack([log_kernel(row, h, q[0, h], k[0, h], mechanism) for h in range(HEADS)])
        if row.entropic == ROWS_ALONE:
            close(row_centred(weights.log() - kernels), torch.zeros_like(kernels), 1e-9)
        elif row.entropic == LIMIT:
            assert row.columns == LIMIT
            close(doubly_centred(weights.log() - kernels), torch.zeros_like(kernels), 1e-8)
        else:  # A scales the kernel at no temperature: centred logs are not proportional
            log_weights, plain = (doubly_centred(x).flatten(1) for x in (weights.clamp(min=1e-300).log(), kernels))
            assert torch.cosine_similarity(log_weights, plain).max() < 0.99
        if row.entropic in (BOTH_PLANS, ONE_AND_ONE):
            coupling = mechanism.coupling(q, k)
            if row.name == "set":
                distances = ((q[0] + k[0]).unsqueeze(-2) / 2 - mechanism.pivots.unsqueeze(-3)).square().sum(-1)
                of_queries = of_keys = -distances / 2 * WIDTH**-0.5 / mechanism.options.epsilon
                masses = reference.uniform(PIVOTS["num_pivots"]).expand(HEADS, -1)
            else:
                of_queries, of_keys = mechanism.scores(q)[0], mechanism.scores(k)[0]
                masses = mechanism.log_masses().exp()
            from_queries, to_keys = (x[0] for x in coupling.factors)
            left = (row_centred if row.entropic == ONE_AND_ONE else doubly_centred)(from_queries.log() - of_queries)
            assert left.abs().max() < 1e-9
            assert doubly_centred(to_keys.log() - of_keys.mT).abs().max() < 1e-9
            at_pivots = (from_queries.mean(-2) - masses).abs().max().item()
            check(NO if row.entropic == ONE_AND_ONE or options is row.few else EXACT, at_pivots, None)
            at_keys = ((masses[:, None] @ to_keys)[:, 0] - 1 / N).abs().max().item()
            check(NO if options is row.few else EXACT, at_keys, None)


def test_a_differential_form_has_rows_of_one_minus_lambda():
    mechanism = build_differential("sinkhorn", num_heads=HEADS, head_dim=WIDTH, epsilon=0.7).double()
    weights = mechanism(*random(3, 1, HEADS, N, WIDTH), need_weights=True).weights
    total = 1 - mechanism.difference_weight()
    close(weights.sum(-1), total.expand(weights.shape[:-1]), 1e-9)


def test_the_page_has_this_table():
    page = (ROOT / "docs/mechanisms.md").read_text(encoding="utf-8")
    head = "| A of | when | rows sum to 1 | columns sum to n/m | is the entropic plan of its kernel | couples queries |"
    lines = [head, "| --- | --- | --- | --- | --- | --- |", *(row.line() for row in GUARANTEES)]
    assert "\n".join(lines) in page
    assert {row.name for row in GUARANTEES} == set(MECHANISMS)
