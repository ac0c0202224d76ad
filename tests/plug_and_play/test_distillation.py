"""Calibration: which parameters are fitted, which stay as they are, and which of the fitted values are kept."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.errors import InputError
from fairseq_lot.plug_and_play import distillation
from fairseq_lot.plug_and_play.distillation import LONG, Distillation, Fit, copies, fit, translate_greedily, undo_harm
from tests.plug_and_play.in_memory import HEADS, LAYERS, load

LENGTHS = tuple(3 + i % 7 for i in range(24))
# options with which these mechanisms have parameters to fit
OPTIONS = {
    "esp": {"esp_slicer": "learnable", "esp_num_slices": 3, "esp_sort_temperature": 0.1},
    "lot": {"lot_num_pivots": 5},
    "near_far": {"near_far_num_features": 5, "near_far_window": 1},
    "sinkhorn": {"sinkhorn_learn_epsilon": True, "sinkhorn_epsilon": 0.1},
}
LEARNING = [name for name in MECHANISMS if name != "softmax"]


def models(name, **options):
    """The distillation of softmax into mechanism ``name`` in the encoder, and the teacher with its sentences."""
    options = {"lengths": LENGTHS, **OPTIONS.get(name, {}), **options}
    student, teacher = load(attention=name, **options), load(attention="softmax", **options)
    missing = teacher.model.load_state_dict(student.model.state_dict(), strict=False)
    assert not missing.missing_keys
    return Distillation(student.model, teacher.model), teacher


def sample(pair, sentences, indices):
    return pair.readable(sentences.batch(indices))


def calibrate(pair, sentences, *, steps=30, seed=1, rate=0.1, errors=None, **options) -> Fit:
    """Fit on random batches of sentences 8 to 23; sentences 0 to 7 are held out."""
    order = np.random.default_rng(seed)
    samples = (sample(pair, sentences, order.integers(8, 24, 5)) for _ in itertools.count())
    held_out = sample(pair, sentences, range(8))
    options |= {} if errors else {"rows": pair.rows}
    return fit([(pair.added, rate)], errors or pair.head_errors, samples, held_out, steps=steps, **options)


def test_encoder_and_decoder_may_have_different_numbers_of_heads():
    pair, sentences = models("lot", attention_sites="encoder,cross", decoder_attention_heads=2)
    fitted = calibrate(pair, sentences, steps=3)
    assert fitted.before.shape == (2 * LAYERS, HEADS) and (fitted.before[:LAYERS] > 0).all()
    assert (fitted.before[LAYERS:, :2] > 0).all() and not fitted.before[LAYERS:, 2:].any()


def test_a_teacher_that_gives_nan_is_refused():
    pair, sentences = models("lot")
    with torch.no_grad():
        pair.teacher.encoder.layers[1].fc1.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match="is not finite"):
        calibrate(pair, sentences, errors=pair.output_error)


@pytest.mark.fast_if(lambda name, differential: name == "lot" or not differential)
@pytest.mark.parametrize("differential", [False, True])
@pytest.mark.parametrize("name", LEARNING)
def test_heads_get_closer_to_softmax_and_no_other_parameter_changes(name, differential):
    pair, sentences = models(name, differential=differential)
    # fairseq never fills _float_tensor: it may hold NaN
    start = {k: value.clone() for k, value in pair.student.state_dict().items() if not k.endswith("._float_tensor")}
    fitted = calibrate(pair, sentences)
    assert [(one.site, one.layer) for one in pair.matched] == [("encoder", layer) for layer in range(LAYERS)]
    assert fitted.before.shape == fitted.after.shape == (LAYERS, HEADS)
    assert fitted.after.sum() < 0.97 * fitted.before.sum() and fitted.steps == 30
    state = pair.student.state_dict()
    moved = {key for key, value in start.items() if not torch.equal(value, state[key])}
    fittable = {key for key in start if ".mechanism." in key and "lambda_" not in key and ".norm." not in key}
    assert moved and moved <= fittable
    assert all(any(f"layers.{layer}." in key for key in moved) for layer in range(LAYERS))


@pytest.mark.parametrize("start", [0.1, 5.0])
def test_sinkhorn_of_one_update_learns_the_temperature_of_softmax(start):
    """Sinkhorn of one update is softmax at temperature ε, so the best ε is known: 1 in every head."""
    pair, sentences = models("sinkhorn", sinkhorn_epsilon=start, sinkhorn_num_updates=1)
    fitted = calibrate(pair, sentences, steps=120, rate=0.2)
    assert fitted.after.max() < 1e-4 < 0.05 < fitted.before.min()
    for one in pair.matched:
        torch.testing.assert_close(one.student.epsilon().flatten(), torch.ones(HEADS), atol=0.05, rtol=0)


def test_the_error_of_a_head_is_relative_and_ignores_pads():
    pair, sentences = models("lot")
    batch, (match, *_), seen = sentences.batch(range(8)), pair.matched, []
    assert batch["net_input"]["src_tokens"].eq(sentences.pad).any()
    found = pair.head_errors(batch)[0]
    match.teacher.register_forward_hook(lambda _, *call: seen.append(call), with_kwargs=True)
    alone = torch.zeros(HEADS), torch.zeros(HEADS)
    for i in range(8):
        pair.head_errors(sentences.batch([i]))
        args, kwargs, output = seen.pop()
        difference = match.student(*args, **kwargs).values - output.values
        alone[0].add_(difference.square().sum((0, 2, 3)).detach())
        alone[1].add_(output.values.square().sum((0, 2, 3)))
    torch.testing.assert_close(found, alone[0] / alone[1], atol=1e-5, rtol=1e-4)
    pair.matched = [replace(one, student=copy.deepcopy(one.teacher)) for one in pair.matched]
    assert pair.head_errors(batch).eq(0).all()


def test_equal_seeds_fit_equal_parameters_and_other_seeds_do_not():
    def parameters(seed):
        pair, sentences = models("lot")
        calibrate(pair, sentences, steps=5, seed=seed)
        return pair.added

    first, again, other = parameters(1), parameters(1), parameters(2)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_a_fit_keeps_its_best_parameters():
    pair, sentences = models("lot")
    fitted = calibrate(pair, sentences, steps=20)
    torch.testing.assert_close(pair.head_errors(sample(pair, sentences, range(8))), fitted.after)
    assert fitted.after.sum() < fitted.before.sum()


def test_a_fit_that_only_gets_worse_changes_nothing():
    pair, sentences = models("lot")
    start = pair.added[0].detach().clone()
    fitted = calibrate(pair, sentences, rate=1e4, steps=3, errors=pair.output_error)
    assert torch.equal(fitted.before, fitted.after)
    assert torch.equal(pair.added[0], start)


def test_each_head_keeps_its_own_best():
    """The fit improves head 0 more than it harms head 1, so the sum of errors falls; head 1 keeps its old values."""
    weight, held_out = torch.nn.Parameter(torch.zeros(2, 3)), torch.tensor([[1.0], [0.0]])
    samples = itertools.repeat(torch.tensor([[1.0], [-0.5]]))
    fitted = fit(
        [([weight], 0.1)], lambda to: (weight - to).square().sum(1)[None], samples, held_out, steps=60, rows=[0]
    )
    assert fitted.after[0, 0] < 0.01 < fitted.before[0, 0] and fitted.after[0, 1] == fitted.before[0, 1] == 0
    assert not weight[1].any() and (weight[0] > 0.9).all()


@pytest.mark.parametrize("name", LEARNING)
def test_the_first_axis_of_every_fitted_parameter_is_the_heads(name):
    """The fit keeps and restores the values of each head by itself."""
    pair, _ = models(name, **({"lot_conv_kernel": 3} if name == "lot" else {}))
    assert all(parameter.shape[0] == HEADS for parameter in pair.added)


def test_heads_that_a_joint_fit_harms_get_their_earlier_values_back():
    pair, sentences = models("lot")
    held_out = sample(pair, sentences, range(8))
    heads, apart = calibrate(pair, sentences), copies(pair.added)
    output = pair.output_error(held_out).detach()
    together = Fit("error of the output", output, output / 2, 1)
    assert undo_harm(pair, held_out, apart, heads, together) is together
    harmed, limits = [(0, 1), (1, 3)], torch.full((LAYERS, HEADS), torch.inf)
    for one in harmed:
        limits[one] = 0.0
    heads = replace(heads, before=limits)
    with torch.no_grad():
        for parameter in pair.added:
            parameter *= 1.01
        joint = copies(pair.added)
    after = undo_harm(pair, held_out, apart, heads, replace(together, before=output * 2)).after
    torch.testing.assert_close(pair.output_error(held_out), after)
    for parameter, row, was, jointly in zip(pair.added, pair.rows, apart, joint, strict=True):
        for head in range(HEADS):
            assert torch.equal(parameter[head], (was if (row, head) in harmed else jointly)[head])

    # if the output's error is then larger than before the joint fit, all heads get their earlier values back
    with torch.no_grad():
        for parameter, value in zip(pair.added, joint, strict=True):
            parameter.copy_(value)
    undone = undo_harm(pair, held_out, apart, heads, replace(together, before=torch.tensor(0.0)))
    assert undone.after == 0 and all(map(torch.equal, pair.added, apart))


def test_the_learning_rate_falls_to_zero_and_the_last_step_is_measured(monkeypatch):
    rates, schedules, measured, held_out, weight = [], [], [], {}, torch.nn.Parameter(torch.zeros(()))
    monkeypatch.setattr(
        distillation, "CosineAnnealingLR", lambda *a: schedules.append(CosineAnnealingLR(*a)) or schedules[-1]
    )

    def errors(sample):
        measured.append(sample is held_out)
        if sample is not held_out:
            rates.extend(schedules[-1].get_last_lr())
        return (weight - 1).square()

    fit([([weight], 0.1)], errors, itertools.repeat({"a": "sample"}), held_out, steps=50)
    assert len(rates) == 50 and [rates[0], rates[25], *schedules[-1].get_last_lr()] == pytest.approx([0.1, 0.05, 0])
    measured.clear()
    fit([([weight], 0.1)], errors, itertools.repeat({"a": "sample"}), held_out, steps=41)
    assert measured[-1] and sum(measured) == 1 + 20 + 1


def test_a_long_fit_without_a_terminal_logs_its_errors(capsys):
    weight = torch.nn.Parameter(torch.zeros(1, 2))
    for steps, lines in ((LONG, 4), (LONG - 1, 0)):
        fit([([weight], 0.1)], lambda sample: (weight - 1).square(), itertools.repeat({}), {}, steps=steps)
        said = capsys.readouterr().err.splitlines()
        assert len(said) == lines and all(line.startswith("error: step ") for line in said)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax", {}),
        ("sinkhorn", {"sinkhorn_learn_epsilon": False}),
        *[("esp", {"esp_slicer": "learnable", exact: True}) for exact in ("esp_hard", "esp_hard_inference")],
    ],
)
def test_nothing_to_fit_is_an_error(name, options):
    with pytest.raises(InputError, match="nothing to calibrate"):
        models(name, **options)


@pytest.mark.parametrize("source_only", [False, True])
def test_decoder_sites_are_fitted_with_and_without_targets(source_only):
    pair, sentences = models("lot", attention_sites="encoder,cross,decoder", source_only=source_only)
    fitted = calibrate(pair, sentences, steps=10)
    assert [one.site for one in pair.matched] == ["encoder"] * LAYERS + ["cross"] * LAYERS + ["decoder"] * LAYERS
    after, before = fitted.after.sum(1), fitted.before.sum(1)
    assert (after < before).sum() >= 4 and after.sum() < before.sum()


def test_fitting_encoder_sites_never_runs_the_decoder(monkeypatch):
    pair, sentences = models("lot", source_only=True)
    monkeypatch.setattr(pair.teacher.decoder, "forward", lambda *args, **kwargs: pytest.fail("the decoder ran"))
    calibrate(pair, sentences, steps=2)


@pytest.mark.parametrize("sites", ["encoder", "encoder,cross"])
def test_the_output_of_the_stack_can_be_fitted(sites):
    pair, sentences = models("lot", attention_sites=sites)
    held_out = sample(pair, sentences, range(8))
    assert Distillation(pair.student, pair.student).output_error(held_out) == 0
    fitted = calibrate(pair, sentences, errors=pair.output_error, rate=0.05)
    assert fitted.after < 0.97 * fitted.before
    torch.testing.assert_close(pair.output_error(held_out), fitted.after)


def test_the_divergence_is_between_predictions_and_ignores_pads():
    pair, sentences = models("lot", attention_sites="encoder,cross")
    found, pieces = 0.0, 0
    with torch.no_grad():
        for i in range(8):
            sample = sentences.batch([i])["net_input"]
            ours, theirs = (model(**sample)[0].log_softmax(-1) for model in (pair.student, pair.teacher))
            found += torch.nn.functional.kl_div(ours, theirs, reduction="sum", log_target=True)
            pieces += sample["prev_output_tokens"].numel()
        batch = sentences.batch(range(8))
        assert batch["net_input"]["prev_output_tokens"].eq(sentences.pad).any()
        torch.testing.assert_close(pair.output_divergence(batch), found / pieces, atol=1e-6, rtol=1e-4)


def test_greedy_translations_are_the_decoders_own_choices():
    pair, sentences = models("lot", source_only=True)
    batch = sentences.batch(range(4))
    tokens = translate_greedily(pair.teacher, batch)
    eos = sentences.task.target_dictionary.eos()
    assert tokens[:, 0].eq(eos).all()
    with torch.no_grad():
        logits, _ = pair.teacher(**batch["net_input"], prev_output_tokens=tokens)
    for row, chosen in zip(tokens, logits.argmax(-1), strict=True):
        length = int(row.ne(sentences.pad).sum())
        assert torch.equal(row[1:length], chosen[: length - 1])


@pytest.fixture
def translated():
    """A function that translates texts with the teacher; larger values in cross-attention make sources matter."""
    pair, sentences = models("lot", source_only=True, lengths=(8, 4, 7, 3, 2), decoder_learned_pos=True)
    pad, eos = sentences.pad, sentences.task.source_dictionary.eos()
    with torch.no_grad():
        for layer in pair.teacher.decoder.layers:
            layer.encoder_attn.v_proj.weight *= 50

    def translated(*texts, part=None):
        lengths = torch.tensor([len(text) + 1 for text in texts])
        tokens = torch.full((len(texts), max(lengths)), pad)
        for row, text in zip(tokens, texts, strict=True):
            row[len(row) - len(text) - 1 :] = torch.tensor([*text, eos])
        output = translate_greedily(pair.teacher, {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}, part)
        assert output[:, 0].eq(eos).all()
        return [row[1:][row[1:].ne(pad)].tolist() for row in output]

    translated.texts = [sentences.sentences.src[index][:-1].tolist() for index in range(5)]
    translated.teacher = pair.teacher
    return translated


def test_a_long_source_is_translated_in_parts(translated):
    seven, three, six, two, one = texts = translated.texts
    assert list(map(len, texts)) == [7, 3, 6, 2, 1]
    parts = [[seven[:3], seven[3:5], seven[5:]], [three], [six[:3], six[3:]], [two], [one]]
    joined = translated(*texts, part=3)
    # the length limit of translations depends on the longest source of a batch
    assert joined == [[piece for part in own for piece in translated(part, three)[0]] for own in parts]
    assert len({piece for own in joined for piece in own}) > 1
    whole = translated(*texts)
    assert whole == translated(*texts, part=7) == [translated(text, seven)[0] for text in texts] != joined


def test_a_translation_may_be_longer_than_its_source(translated):
    assert max(map(len, translated(*translated.texts))) == int(1.2 * 8 + 10), "the longest has 8 tokens"


def test_joined_translations_are_cut_to_the_decoders_positions(translated, monkeypatch):
    joined = translated(*translated.texts, part=1)
    most = max(map(len, joined)) // 2
    monkeypatch.setattr(translated.teacher, "max_positions", lambda: (1024, most + 1))
    assert translated(*translated.texts, part=1) == [text[:most] for text in joined]
