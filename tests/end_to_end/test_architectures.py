"""Train, swap, generate and score on 60 sentences, for a small model of every family and for three larger ones."""

import json

import pytest

from fairseq_lot.pretrained.checkpoint import load_checkpoint
from tests.end_to_end.conftest import fairseq_lot, fields, generate, hypotheses, swapped, train

FAMILIES = {
    "lot_transformer": "esp",
    "esp_transformer": "sinkhorn",
    "set_transformer": "sinkhorn",
    "sinkhorn_transformer": "lot",
    "softmax_transformer": "set",
    "diff_transformer": "lot",
}
WIDE = {"lot_transformer": 512, "lot_transformer_medium": 256, "diff_transformer_iwslt_de_en": 512}
ARCHITECTURES = [f"{family}_small" for family in FAMILIES] + list(WIDE)


@pytest.mark.fast_if(lambda arch: arch in ("lot_transformer_small", "diff_transformer_small"))
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_train_swap_generate_score(arch, data, tmp_path):
    family = next(family for family in FAMILIES if arch.startswith(family))
    # larger ones have one layer, so that the test takes seconds
    shallow = () if arch.endswith("_small") else ("--encoder-layers", 1, "--decoder-layers", 1)
    sites = ("--attention-sites", "encoder,cross,decoder") if arch == "lot_transformer_small" else ()
    checkpoint = train(data / "bin", tmp_path, "--arch", arch, "--share-all-embeddings", *shallow, *sites, updates=3)
    trained = load_checkpoint(checkpoint).model_args
    differential = family == "diff_transformer"
    assert trained.attention == ("softmax" if differential else family.removesuffix("_transformer"))
    assert trained.differential == differential
    assert trained.encoder_embed_dim == trained.decoder_embed_dim == WIDE.get(arch, 128)

    output = generate(data / "bin", swapped(checkpoint, tmp_path / "swapped.pt", FAMILIES[family]))
    assert len(fields(output, "H")) == 60
    assert hypotheses(output) != hypotheses(generate(data / "bin", checkpoint)), "the swap changed nothing"

    (tmp_path / "test.out").write_text(output)
    results = tmp_path / "results.jsonl"
    fairseq_lot(
        "score", "--generated", tmp_path / "test.out", "--out", results,
        "--tokenised-reference", data / "text" / "test.en", "--raw-reference", data / "text" / "raw" / "test.en",
        "--label", json.dumps({"system": arch, "settings": {"attention": FAMILIES[family]}, "stage": "plug-and-play"}),
    )  # fmt: skip
    row = json.loads(results.read_text())
    assert row["sentences"] == 60 and row["reference"] == "raw" and 0 <= row["sacrebleu"]["score"] <= 100
