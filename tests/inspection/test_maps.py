"""Attention maps in the report: they are faithful, and the page stays small."""

import numpy as np
import pytest
import torch

from fairseq_lot.attention.registry import MECHANISMS, build_mechanism
from fairseq_lot.inspection.charts import loss_curves
from fairseq_lot.inspection.maps import clusterings, quantise
from fairseq_lot.inspection.report import page
from fairseq_lot.inspection.training_log import Curves
from fairseq_lot.output.figures import as_bytes
from tests.inspection.unpacked import unpacked


def map_of(matrix, layer=0):
    """The map of one head, in the form that the page reads."""
    return {"site": "encoder", "layer": layer, "head": 0, "attention": "lot", "imbalance": 0.1, "map": quantise(matrix)}


@pytest.mark.parametrize("signed", [False, True])
def test_eight_bits_keep_a_matrix_to_half_a_step(signed):
    matrix = torch.rand(7, 5, generator=torch.Generator().manual_seed(1)) - 0.5 * signed
    error = np.abs(unpacked(quantise(matrix)) - matrix.numpy())
    assert error.max() <= (matrix.max() - min(0, matrix.min())) / 510 + 1e-5


def test_the_range_of_a_map_starts_at_zero_and_a_zero_matrix_is_kept():
    assert quantise(torch.tensor([[0.5, 1.0]]))["low"] == 0
    assert (unpacked(quantise(torch.zeros(2, 3))) == 0).all()


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_product_of_the_factors_is_the_attention_matrix(name):
    torch.manual_seed(1)
    mechanism = build_mechanism(name, num_heads=2, head_dim=8)
    q, k, v = torch.randn(3, 2, 2, 6, 8).unbind(0)
    pads = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    q, k = (x.masked_fill(pads[:, None, :, None], 0.0) for x in (q, k))
    coupling = mechanism.coupling(q, k, pads, pads)
    factors = coupling and coupling.factors
    assert (factors is None) == (name not in ("lot", "set"))
    if factors is not None:
        plan = mechanism(q, k, v, pads, pads, need_weights=True).weights
        product = (factors[0] @ factors[1]).masked_fill(pads[:, None, :, None], 0.0)
        torch.testing.assert_close(product, plan)
        for factor in factors:
            real = factor.sum(-1)[0]
            torch.testing.assert_close(real, torch.ones_like(real))


def test_the_plan_follows_from_both_clusterings():
    random = torch.Generator().manual_seed(1)
    factors = [torch.rand(shape, generator=random).softmax(-1) for shape in ((2, 5, 3), (2, 3, 4))]
    of_queries, of_keys = clusterings(*factors)
    key_mass = (factors[0] @ factors[1]).mean(1, keepdim=True)
    pivot_mass = of_queries.mean(1, keepdim=True)
    composed = (of_queries / pivot_mass) @ of_keys.transpose(1, 2) * key_mass
    torch.testing.assert_close(composed, factors[0] @ factors[1])
    torch.testing.assert_close(of_keys.sum(-1), torch.ones(2, 4))


def test_a_key_that_no_pivot_reaches_is_in_no_cluster():
    _, of_keys = clusterings(torch.full((2, 2), 0.5), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert of_keys.tolist() == [[0.5, 0.5], [0.0, 0.0]]


def test_ten_sentences_of_six_layers_and_four_heads_fit_into_five_megabytes():
    random = torch.Generator().manual_seed(1)
    n, r = 35, 32

    def one(layer):
        noise = [torch.rand(shape, generator=random) for shape in ((n, n), (n, r), (n, r))]  # does not compress
        sums = [round(x, 3) for x in torch.rand(n, generator=random).tolist()]
        more = {"row_sums": sums, "receiver_mass": sums, "pivots": [quantise(x) for x in noise[1:]]}
        return map_of(noise[0], layer) | more

    maps = [[one(layer) for layer in range(6) for _ in range(4)] for _ in range(2)]
    tokens = [f"token{i}" for i in range(n)]

    def size(maps):
        sentence = {"source": tokens, "target": tokens, "translation": "", "maps": maps}
        return len(page([], {}, {"models": ["a", "b"], "sentences": [sentence]}).encode())

    assert size([]) + 10 * (size(maps) - size([])) < 5e6


def test_curves_show_the_log_and_equal_curves_give_equal_bytes():
    """Training losses are dotted, validation losses solid."""
    figures = [loss_curves({"a": Curves({20: 3.0, 10: 4.0}, {20: 3.5})}) for _ in range(2)]
    lines = [(line.get_label(), line.get_xydata().tolist(), line.get_linestyle()) for line in figures[0].axes[0].lines]
    assert lines == [("training, a", [[10, 4], [20, 3]], ":"), ("validation, a", [[20, 3.5]], "-")]
    one, other = (as_bytes(figure, "svg") for figure in figures)
    assert one == other and b"<dc:date>" not in one


def test_names_with_dollar_signs_are_not_set_as_formulas():
    odd = "_$x_{$"
    assert odd in as_bytes(loss_curves({odd: Curves({1: 2.0}, {})}), "svg").decode("utf-8")
