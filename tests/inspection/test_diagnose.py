"""Diagnosing models with random weights on random sentences, in memory."""

import numpy as np
import pytest
import torch

from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.errors import InputError
from fairseq_lot.inspection import per_head
from fairseq_lot.inspection.capture import capture
from fairseq_lot.inspection.diagnose import BALANCE, _batches, diagnose, encoder_balance, render
from fairseq_lot.inspection.per_head import MEASURES, summary
from fairseq_lot.modules.sites import unwrapped
from tests.plug_and_play.in_memory import HEADS, LAYERS, LENGTHS, load

OPTIONS = {"sentences": 6, "batch": 3, "perturbations": 2, "seed": 1}
BALANCED = {"sinkhorn_epsilon": 1.0, "sinkhorn_num_updates": 401}


def encoder_rows(loaded):
    return [row for row in diagnose(loaded, **OPTIONS)["rows"] if row["site"] == "encoder"]


ATTENTIONS = [(name, differential) for name in MECHANISMS for differential in (False, True)]


@pytest.mark.parametrize("name, differential", ATTENTIONS)
def test_every_mechanism_has_a_row_per_site_layer_and_head(name, differential):
    report = diagnose(load(attention=name, differential=differential), **OPTIONS)
    heads, kind = (HEADS // 2, "differential ") if differential else (HEADS, "")
    places = [(row["site"], row["layer"], row["head"]) for row in report["rows"]]
    expected = [(s, x, h) for s in ("encoder", "cross", "decoder") for x in range(LAYERS) for h in range(heads)]
    assert places == expected and report["sentences"] == len(LENGTHS)
    for row in report["rows"]:
        listed = name if row["site"] == "encoder" else "softmax"
        assert row["attention"] == kind + listed
        assert row["signed"] == differential
        assert all(np.isfinite(row[measure]) for measure in MEASURES)
        if not differential:
            assert row["entropy"] >= 0 and 0 <= row["softmax_distance"] <= 2 + 1e-5
            assert row["receiver_min"] <= 1 + 1e-5 <= row["receiver_max"] + 2e-5
        if listed == "softmax":
            assert row["softmax_distance"] < 1e-5
    assert [row["layer"] for row in report["certificates"]] == list(range(LAYERS))
    couplings = report["coupling_certificates"]
    assert [row["layer"] for row in couplings] == (list(range(LAYERS)) if name == "lot" else [])
    for row in report["certificates"] + couplings:
        assert row["attention"] == kind + name
        ratios = [value for key, value in row.items() if key.endswith("_ratio")]
        assert len(ratios) == 3 and all(0 < ratio <= 1 for ratio in ratios)
    text = render(report, title="")
    assert (f"nothing about this model's {kind}{name}." in text) == (kind + name != "sinkhorn")
    assert ("LOT's two plans" in text) == (name == "lot")
    assert ("Differential attention has one A" in text) == differential


def test_sentences_that_the_model_cannot_take_are_named():
    report = diagnose(load(max_source_positions=8), **OPTIONS)
    assert report["left_out"] == [2] and report["sentences"] == len(LENGTHS) - 1
    assert render(report, title="").count("too long for the model and were not drawn: 2.") == 1
    assert "too long" not in render(diagnose(load(), **OPTIONS), title="")


def test_softmax_is_not_balanced_and_sinkhorn_is():
    for row in encoder_rows(load("transformer")):
        assert row["marginal_error"] > 0.05 and row["imbalance"] > 0.05 and row["mean_shift"] > 1e-3
    for row in encoder_rows(load(attention="sinkhorn", **BALANCED)):
        assert row["marginal_error"] < 1e-4 and row["imbalance"] < 1e-3 and row["mean_shift"] < 1e-4
        assert row["softmax_distance"] > 0.01


def test_the_balance_of_a_model_is_measured_in_its_encoder():
    balance = encoder_balance(load(attention="sinkhorn", **BALANCED))
    assert tuple(balance) == BALANCE and max(balance.values()) < 1e-3


def test_stock_and_pluggable_softmax_measure_the_same():
    stock, ours = load("transformer"), load(attention="softmax")
    ours.model.load_state_dict(stock.model.state_dict())
    for first, second in zip(diagnose(stock, **OPTIONS)["rows"], diagnose(ours, **OPTIONS)["rows"], strict=True):
        assert first == pytest.approx(second, abs=1e-5)


@pytest.mark.fast_if(lambda name, differential: name == "lot" or not (differential or name == "sinkhorn"))
@pytest.mark.parametrize("name, differential", [*ATTENTIONS, ("transformer", False)])
def test_padding_changes_no_measure(name, differential):
    loaded = load("transformer") if name == "transformer" else load(attention=name, differential=differential)
    padded = diagnose(loaded, **{**OPTIONS, "batch": 6})
    alone = diagnose(loaded, **{**OPTIONS, "batch": 1})
    for first, second in zip(padded["rows"], alone["rows"], strict=True):
        assert first == pytest.approx(second, abs=2e-4)
    for kind in ("certificates", "coupling_certificates"):
        for first, second in zip(padded[kind], alone[kind], strict=True):
            assert first == pytest.approx(second, abs=1e-3)


@pytest.mark.parametrize("arch, options", [("transformer", {}), ("lot_transformer", {"attention": "lot"})])
def test_captured_weights_are_those_that_the_model_uses(arch, options):
    loaded = load(arch, **options)
    sample = loaded.sentences.collater([loaded.sentences[i] for i in range(6)])["net_input"]
    with torch.no_grad():
        expected, _ = loaded.model(**sample)
        with capture(loaded.model) as seen:
            found, _ = loaded.model(**sample)
        again, _ = loaded.model(**sample)
    assert torch.equal(found, expected), "capture changes no output"
    assert torch.equal(again, expected) and len(seen) == 3 * LAYERS, "capture leaves no hook behind"
    # the decoder's last cross-attention is what fairseq itself returns as alignment
    with torch.no_grad():
        state = loaded.model.encoder(sample["src_tokens"], sample["src_lengths"])
        _, extra = loaded.model.decoder(sample["prev_output_tokens"], encoder_out=state, full_context_alignment=False)
    cross = next(x for x in seen if x.site == "cross" and x.layer == LAYERS - 1)
    torch.testing.assert_close(cross.weights.mean(1), extra["attn"][0], atol=1e-6, rtol=0)
    assert [x.causal for x in seen] == [x.site == "decoder" for x in seen]
    assert next(x for x in seen if x.site == "decoder").weights.triu(1).eq(0).all()


def test_same_seed_same_sentences():
    loaded = load()
    first = diagnose(loaded, **{**OPTIONS, "sentences": 3})
    assert first == diagnose(loaded, **{**OPTIONS, "sentences": 3})
    assert first["rows"] != diagnose(loaded, **{**OPTIONS, "sentences": 3, "seed": 2})["rows"]
    assert first["sentences"] == 3


def test_every_head_is_certified_at_its_own_temperature():
    loaded = load(attention="sinkhorn", sinkhorn_learn_epsilon=True)
    for block in loaded.model.encoder.layers:
        block.self_attn.mechanism.log_epsilon.data.copy_(torch.tensor([0.25, 0.5, 1.0, 4.0]).log())
    for row in diagnose(loaded, **OPTIONS)["certificates"]:
        assert row["epsilon"] == pytest.approx(5.75 / HEADS)
        assert 0 < row["plan_ratio"] <= 1 and 0 < row["output_ratio"] <= 1 and row["marginal_error"] < 1e-4


def test_perturbations_are_in_units_of_the_temperature_and_of_the_values(monkeypatch):
    sizes, certify = [], per_head.perturbation_certificate

    def record(scores, v, noise, value_noise, *, epsilon):
        of_values = value_noise / v.square().mean((1, 2), keepdim=True).sqrt()
        sizes.extend(torch.cat([(noise / epsilon).flatten(1), of_values.flatten(1)], 1).abs().tolist())
        return certify(scores, v, noise, value_noise, epsilon=epsilon)

    monkeypatch.setattr(per_head, "perturbation_certificate", record)
    diagnose(load(attention="sinkhorn", sinkhorn_epsilon=0.25), **{**OPTIONS, "perturbations": 3})
    assert len(sizes) == 3 * LAYERS * len(LENGTHS)
    for number, found in enumerate(sizes):
        assert found == pytest.approx([(0.01, 0.1, 1.0)[number % 3]] * len(found))


def test_batches_of_long_sentences_are_smaller(monkeypatch):
    loaded, longest = load(attention="sinkhorn"), max(LENGTHS)
    for entries, most in ((3 * longest**2, 3), (2 * longest**2, 2), (1, 1)):
        monkeypatch.setattr("fairseq_lot.inspection.diagnose._ENTRIES", entries)
        batches = list(_batches(loaded, range(len(LENGTHS)), 3))
        assert sum(batches, []) == list(range(len(LENGTHS)))
        assert max(map(len, batches)) == most


@pytest.mark.parametrize("differential", [False, True])
def test_certificates_are_of_the_values_that_the_model_uses(monkeypatch, differential):
    """The model has a convolution: the plan of each head times the certified values is the head's output."""
    loaded = load(attention="lot", lot_conv_kernel=3, differential=differential)
    for block in loaded.model.encoder.layers:
        unwrapped(block.self_attn.mechanism).convolution.weight.data.normal_(generator=torch.Generator().manual_seed(4))
    certified, coupling = [], per_head.coupling_certificate

    def record(query_scores, key_scores, log_masses, v, *noise, **options):
        certified.append(v)
        return coupling(query_scores, key_scores, log_masses, v, *noise, **options)

    monkeypatch.setattr(per_head, "coupling_certificate", record)
    sample = loaded.batch([0, 1, 2])
    pads = sample["net_input"]["src_tokens"].eq(loaded.pad)
    assert pads.any()
    with torch.no_grad(), capture(loaded.model) as seen:
        loaded.model(**sample["net_input"])
        attention = next(x for x in seen if x.site == "encoder")
        lot = unwrapped(attention.mechanism)
        found = list(per_head.certify_coupling(attention, pads, 2, [[0, i] for i in range(3)]))
        expected = lot(attention.q, attention.k, attention.v, pads, pads, need_weights=True)
    for sentence, v in enumerate(certified):
        real = ~pads[sentence]
        plans = expected.weights[sentence][:, real][..., real].double()
        assert (plans @ v - expected.values[sentence][:, real]).abs().max() < 1e-5
    assert len(found) == len(certified) == 3
    if not differential:
        assert (attention.weights @ attention.values(pads) - expected.values).abs().max() < 1e-5


def test_the_summary_of_a_layer_has_the_largest_and_the_mean_ratio():
    parts = [{"epsilon": 0.5, "plan_ratio": torch.tensor(ratios)} for ratios in ([0.25, 0.75], [0.5, 0.5])]
    assert summary(3, parts) == {"layer": 3, "epsilon": 0.5, "plan_ratio": 0.75, "plan_ratio_mean": 0.5}


@pytest.mark.parametrize("name", ["sinkhorn", "softmax", "near_far"])
@pytest.mark.parametrize("differential", [False, True])
def test_the_report_says_that_certificates_do_not_cover_attention_with_a_prior(name, differential):
    report = diagnose(load(attention=name, differential=differential, **{f"{name}_prior": "alibi"}), **OPTIONS)
    called = "differential " * differential + f"{name} with alibi"
    assert {row["attention"] for row in report["certificates"]} == {called}
    assert f"nothing about this model's {called}." in render(report, title="")


def test_without_perturbations_there_are_no_certificates():
    report = diagnose(load(), **{**OPTIONS, "perturbations": 0})
    assert report["certificates"] == report["coupling_certificates"] == [] and "(31)" not in render(report, title="")


def test_damaged_weights_are_an_error():
    loaded = load()
    with torch.no_grad():
        loaded.model.encoder.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match="model.pt: the attention at encoder, layer 1 is not finite"):
        diagnose(loaded, **OPTIONS)


def test_sentences_that_the_model_cannot_take_are_left_out(capsys):
    report = diagnose(load(max_source_positions=6, max_target_positions=1024), **OPTIONS)
    assert report["sentences"] == sum(length <= 6 for length in LENGTHS)
    assert "of 6 sentences are left out" in capsys.readouterr().err
    with pytest.raises(InputError, match="no sentence fits"):
        diagnose(load(max_source_positions=2, max_target_positions=1024), **OPTIONS)


def test_a_decoder_that_attends_to_source_and_target_at_once_is_diagnosed():
    """With fairseq's --cross-self-attention the keys are the source's, followed by the target's."""
    both = {"no_cross_attention": True, "cross_self_attention": True}
    report = diagnose(load(**both), **OPTIONS)
    rows = {(row["site"], row["layer"], row["head"]): row for row in report["rows"] if row["site"] == "decoder"}
    assert len(rows) == LAYERS * HEADS
    # one sentence a batch, so no pads
    alone = diagnose(load(**both), **{**OPTIONS, "batch": 1})
    for row in alone["rows"]:
        if row["site"] == "decoder":
            other = rows[row["site"], row["layer"], row["head"]]
            assert row["entropy"] == pytest.approx(other["entropy"], abs=1e-5)
            assert row["marginal_error"] == pytest.approx(other["marginal_error"], abs=1e-5)


def test_sentences_of_one_piece_have_finite_measures():
    for row in diagnose(load(lengths=(1, 1, 2)), **OPTIONS)["rows"]:
        assert all(np.isfinite(row[measure]) for measure in MEASURES)
