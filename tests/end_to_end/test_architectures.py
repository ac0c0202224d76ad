"""Every architecture: preprocess, 20 updates, swap, generate, score on 60 sentences."""

import json

import pytest

from fairseq_lot.pretrained.checkpoint import load_checkpoint, model_args
from tests.end_to_end.conftest import fairseq_lot, generate, hypotheses, train

FAMILIES = {
    "lot_transformer": "esp",
    "esp_transformer": "sinkhorn",
    "set_transformer": "sinkhorn",
    "sinkhorn_transformer": "lot",
    "softmax_transformer": "set",
    "diff_transformer": "lot",
}
SIZES = ("", "_iwslt_de_en", "_small")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_train_swap_generate_score(family, size, data, tmp_path):
    # full-width architectures, but fewer layers, so that the test takes seconds
    shallow = ("--encoder-layers", 2, "--decoder-layers", 2) if size != "_small" else ()
    checkpoint = train(data / "bin", tmp_path, "--arch", family + size, "--share-all-embeddings", *shallow)
    trained = model_args(load_checkpoint(checkpoint), checkpoint)
    differential = family == "diff_transformer"
    assert trained.attention == ("softmax" if differential else family.removesuffix("_transformer"))
    assert trained.differential == differential

    swapped = tmp_path / "swapped.pt"
    fairseq_lot("swap", "--path", checkpoint, "--attention", FAMILIES[family], "--out", swapped)
    output = generate(data / "bin", swapped)
    assert sum(line.startswith("H-") for line in output.splitlines()) == 60
    assert hypotheses(output) != hypotheses(generate(data / "bin", checkpoint)), "the swap changed nothing"

    (tmp_path / "test.out").write_text(output)
    results = tmp_path / "results.jsonl"
    fairseq_lot(
        "score", "--generated", tmp_path / "test.out", "--results", results, "--dataset", "synthetic",
        "--tokenised-reference", data / "text" / "test.en", "--raw-reference", data / "text" / "raw" / "test.en",
        "--architecture", family + size, "--backbone", family, "--mechanism", FAMILIES[family],
        "--stage", "plug-and-play", "--seed", 1,
    )  # fmt: skip
    row = json.loads(results.read_text())
    assert row["sentences"] == 60 and row["reference"] == "raw" and 0 <= row["sacrebleu"]["score"] <= 100
