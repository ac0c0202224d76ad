"""The same seed gives the same bits; the stored translations give the same scores."""

import json

import pytest
import torch

from tests.end_to_end.conftest import fairseq_lot, generate, train, weights_of


def score(data, translations, results):
    fairseq_lot(
        "score", "--generated", translations, "--out", results,
        "--tokenised-reference", data / "text" / "test.en", "--raw-reference", data / "text" / "raw" / "test.en",
        "--label", json.dumps({"system": "LOT", "settings": {"attention": "lot"}, "stage": "base"}),
    )  # fmt: skip
    return json.loads(results.read_text())


@pytest.mark.fast_if(lambda family: family == "lot")
@pytest.mark.parametrize("family", ("lot", "esp", "near_far", "set", "sinkhorn", "softmax", "diff"))
def test_same_seed_same_bits(family, data, tmp_path):
    """In one process, with dropout; another seed gives another model."""
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        flags = ("--arch", f"{family}_transformer_small", "--dropout", 0.3, "--attention-dropout", 0.1, "--seed", seed)
        flags += ("--encoder-layers", 1, "--decoder-layers", 1)
        weights.append(weights_of(train(data / "bin", tmp_path / name, *flags, updates=4)))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert any(not torch.equal(value, weights[2][name]) for name, value in weights[0].items())


@pytest.mark.slow
def test_same_seed_same_scores(data, tmp_path):
    checkpoints = [train(data / "bin", tmp_path / name, "--arch", "lot_transformer_small") for name in ("a", "b")]
    rows = []
    for path in checkpoints:
        translations = path.with_name("test.out")
        translations.write_text(generate(data / "bin", path))
        rows.append(score(data, translations, path.with_name("r.jsonl")))
    again = score(data, checkpoints[0].with_name("test.out"), tmp_path / "again.jsonl")
    assert rows[0] == rows[1] == again
