"""The same seed gives the same bits; the stored translations give the same scores."""

import json

import pytest
import torch

from tests.end_to_end.conftest import fairseq_lot, generate, train, weights_of


def score(data, translations, results):
    fairseq_lot(
        "score", "--generated", translations, "--results", results, "--dataset", "synthetic",
        "--tokenised-reference", data / "text" / "test.en", "--raw-reference", data / "text" / "raw" / "test.en",
        "--architecture", "a", "--backbone", "b", "--mechanism", "lot", "--stage", "base", "--seed", 1,
    )  # fmt: skip
    return json.loads(results.read_text())


@pytest.mark.slow
def test_same_seed_same_bits_same_scores(data, tmp_path):
    checkpoints = [train(data / "bin", tmp_path / name, "--arch", "lot_transformer_small") for name in ("a", "b")]
    weights = [weights_of(path) for path in checkpoints]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    other = weights_of(train(data / "bin", tmp_path / "c", "--arch", "lot_transformer_small", "--seed", 2))
    name = "encoder.layers.0.fc1.weight"
    assert not torch.equal(other[name], weights[0][name])

    rows = []
    for path in checkpoints:
        translations = path.with_name("test.out")
        translations.write_text(generate(data / "bin", path))
        rows.append(score(data, translations, path.with_name("r.jsonl")))
    again = score(data, checkpoints[0].with_name("test.out"), tmp_path / "again.jsonl")
    assert rows[0] == rows[1] == again
