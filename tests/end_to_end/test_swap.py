"""Swapping a checkpoint: what it keeps, what it changes, and that every fairseq command accepts the result."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq_cli.interactive import cli_main as fairseq_interactive
from fairseq_cli.validate import cli_main as fairseq_validate

from fairseq_lot.attention.lot import Lot
from fairseq_lot.attention.near_far import EXACT_UP_TO
from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.errors import InputError
from fairseq_lot.models.contradictions import check_overridden
from fairseq_lot.models.pluggable_transformer import PluggableTransformerModel
from fairseq_lot.plug_and_play.calibrate import calibrate
from fairseq_lot.plug_and_play.distillation import Distillation
from fairseq_lot.plug_and_play.sentences import in_batches
from fairseq_lot.plug_and_play.swap import swap_as_drawn
from fairseq_lot.pretrained.checkpoint import load_checkpoint
from fairseq_lot.pretrained.loading import Loaded, build, load_data
from tests.end_to_end.conftest import (
    TINY,
    differing,
    edited,
    fairseq_lot,
    fields,
    generate,
    hypotheses,
    in_this_process,
    refuse,
    swapped,
    train,
    weights_of,
)


@pytest.mark.parametrize("base", ["stock_checkpoint", "diff_checkpoint"])
def test_softmax_for_softmax_is_the_identity_bit_for_bit(base, data, stock_checkpoint, tmp_path, request):
    base = request.getfixturevalue(base)
    out = swapped(base, tmp_path / "softmax.pt", "softmax")
    assert not differing(out, base)
    if base == stock_checkpoint:  # translations with the score of every token, to all printed digits
        assert hypotheses(generate(data / "bin", base)) == hypotheses(generate(data / "bin", out))


def test_swap_without_a_mechanism_is_near_far_at_the_encoder(stock_checkpoint, tmp_path):
    unnamed = tmp_path / "swapped.pt"
    fairseq_lot("swap", "--path", stock_checkpoint, "--no-calibrate", "--out", unnamed)
    args = load_checkpoint(unnamed).model_args
    assert (args.attention, args.attention_sites, args.near_far_window) == ("near_far", "encoder", 8)
    assert swap_as_drawn(stock_checkpoint).model_args.attention == "near_far"
    named = swapped(stock_checkpoint, tmp_path / "named.pt", "near_far")
    assert load_checkpoint(named).model_args == args
    assert not differing(named, unnamed)


def exact_up_to(checkpoint):
    """The option ``near_far_exact_up_to`` of a checkpoint, or None."""
    return getattr(load_checkpoint(checkpoint).model_args, "near_far_exact_up_to", None)


@pytest.mark.parametrize("sites", ["encoder", "encoder,decoder", "encoder,decoder,cross"])
def test_a_plain_swap_changes_no_translation_of_a_sentence(sites, data, stock_checkpoint, tmp_path):
    """The default swap is exact on sentences; with ``--near-far-exact-up-to 0``, as drawn, translations change."""
    where = ("--attention-sites", sites, "--near-far-window", 1)
    swaps = {name: tmp_path / f"{name}.pt" for name in ("exact", "linear")}
    swapped(stock_checkpoint, swaps["exact"], "near_far", *where)
    swapped(stock_checkpoint, swaps["linear"], "near_far", *where, "--near-far-exact-up-to", 0)
    assert [exact_up_to(swaps[name]) for name in swaps] == [EXACT_UP_TO, 0]
    base, exact, linear = (fields(generate(data / "bin", path), "H") for path in (stock_checkpoint, *swaps.values()))
    assert [text for _, text in exact.values()] == [text for _, text in base.values()]
    for (ours, _), (score, _) in zip(exact.values(), base.values(), strict=True):
        assert float(ours) == pytest.approx(float(score), abs=1e-4)
    assert [text for _, text in linear.values()] != [text for _, text in base.values()]
    overridden = generate(data / "bin", swaps["exact"], "--model-overrides", "{'near_far_exact_up_to': 0}")
    assert hypotheses(overridden) == hypotheses(generate(data / "bin", swaps["linear"]))


@pytest.mark.slow
def test_a_new_swap_of_a_near_far_model_keeps_its_exact_length(stock_checkpoint, tmp_path):
    for exact in (None, 0, 7):
        with edited(swapped(stock_checkpoint, tmp_path / "near_far.pt", "near_far"), tmp_path / "trained.pt") as state:
            args = state.model_args
            del args.trained_attention, args.trained_sites, args.near_far_exact_up_to  # as after fairseq-train
            if exact is not None:
                args.near_far_exact_up_to = exact
        again = swap_as_drawn(tmp_path / "trained.pt", attention_sites="encoder,decoder").model_args
        assert (again.near_far_exact_up_to, again.trained_attention.split()[0]) == (exact or 0, "near_far")
        assert swap_as_drawn(tmp_path / "trained.pt", near_far_exact_up_to=9).model_args.near_far_exact_up_to == 9
    with edited(tmp_path / "near_far.pt", tmp_path / "old.pt") as state:
        del state.model_args.near_far_exact_up_to  # early versions did not write it
    (layer, *_) = build(load_checkpoint(tmp_path / "old.pt")).encoder.layers
    assert layer.self_attn.mechanism.exact is None


def test_a_swap_that_is_always_exact_is_not_fitted_and_says_so(stock_checkpoint, tmp_path, capsys):
    with edited(stock_checkpoint, tmp_path / "base.pt") as state:
        state.model_args.max_source_positions = 512
    fairseq_lot("swap", "--path", tmp_path / "base.pt", "--out", tmp_path / "swapped.pt")
    said = "not calibrated: it is exact up to 512 tokens, and the model takes at most 512"
    assert said in capsys.readouterr().out
    drawn = swapped(tmp_path / "base.pt", tmp_path / "drawn.pt", "near_far")
    assert not differing(tmp_path / "swapped.pt", drawn)
    fairseq_lot(
        "swap", "--path", tmp_path / "base.pt", "--out", tmp_path / "fitted.pt", "--near-far-exact-up-to", 511,
        "--steps", 2, "--joint-steps", 1,
    )  # fmt: skip
    assert "calibrated on random pieces, 511 to 511 at a time" in capsys.readouterr().out
    assert differing(tmp_path / "fitted.pt", drawn)


def test_an_exact_length_below_zero_is_refused(stock_checkpoint, tmp_path, capsys):
    words = ("swap", "--path", stock_checkpoint, "--out", tmp_path / "o.pt", "--near-far-exact-up-to")
    refuse(capsys, *words, -1, naming=["near_far attention: exact_up_to must be at least 0, got -1"])
    refuse(capsys, *words, 512, "--longest", 90, naming=["--longest 90 is too short", "give at least 512"])
    assert not (tmp_path / "o.pt").exists()


def test_a_training_takes_the_exact_length_of_its_checkpoint_or_zero(data, stock_checkpoint, tmp_path):
    start = swapped(stock_checkpoint, tmp_path / "start.pt", "near_far")
    tuned = ("--arch", "pluggable_transformer", "--finetune-from-model", start)
    flags = {"tuned": tuned, "typed": (*tuned, "--near-far-exact-up-to", 3)}
    flags["scratch"] = ("--arch", "near_far_transformer", *TINY)
    saved = {name: train(data / "bin", tmp_path / name, *words, updates=1) for name, words in flags.items()}
    assert {name: exact_up_to(path) for name, path in saved.items()} == {"tuned": EXACT_UP_TO, "typed": 3, "scratch": 0}


def test_near_far_has_tangents_where_it_replaces_softmax(data, stock_checkpoint, tmp_path):
    assert swap_as_drawn(stock_checkpoint).model_args.near_far_tangents
    assert not swap_as_drawn(stock_checkpoint, near_far_tangents=False).model_args.near_far_tangents
    trained = train(data / "bin", tmp_path, "--arch", "near_far_transformer_small", updates=1)
    assert not load_checkpoint(trained).model_args.near_far_tangents
    assert not swap_as_drawn(trained, near_far_window=2).model_args.near_far_tangents


def test_a_checkpoint_from_before_tangents_computes_what_it_did(stock_checkpoint, tmp_path):
    with edited(
        swapped(stock_checkpoint, tmp_path / "now.pt", "near_far", "--near-far-window", 0, "--near-far-exact-up-to", 0),
        tmp_path / "old.pt",
    ) as state:
        del state.model_args.near_far_tangents
    tokens = torch.tensor([[5, 6, 7, 8, 9, 2]])
    outputs = [
        build(load_checkpoint(path), **overrides).encoder(tokens, torch.tensor([6]))["encoder_out"][0]
        for path, overrides in (
            (tmp_path / "old.pt", {}),
            (tmp_path / "now.pt", {"near_far_tangents": False}),
            (tmp_path / "now.pt", {}),
        )
    ]
    torch.testing.assert_close(outputs[0], outputs[1], atol=0, rtol=0)
    assert (outputs[0] - outputs[2]).abs().max() > 1e-3


SYM_MATH = Path(__file__).parents[2].parent / "shared/data/sym-math"


@pytest.mark.skipif(not SYM_MATH.is_dir(), reason="../shared has no sym-math")
def test_near_far_as_drawn_follows_a_model_with_scores_of_thousands():
    state = swap_as_drawn(SYM_MATH / "checkpoint_best.pt", near_far_exact_up_to=0)
    student, teacher = (build(state, **options) for options in ({}, {"attention": "softmax"}))
    task, sentences = load_data(state, SYM_MATH / "data-bin", "valid", needs_target=False)
    loaded = Loaded(teacher, task, sentences, state.path)
    both = Distillation(student, teacher)
    with torch.no_grad():
        errors = [both.output_error(loaded.batch(batch)).item() for batch in in_batches(loaded, np.arange(40), 2048)]
    assert max(errors) < 0.05, errors


def test_an_architecture_of_ones_own_becomes_ours(stock_checkpoint, tmp_path, monkeypatch):
    for registry in (ARCH_MODEL_REGISTRY, ARCH_CONFIG_REGISTRY):  # as register_model_architecture does
        monkeypatch.setitem(registry, "my_wide", registry["transformer"])
    with edited(stock_checkpoint, tmp_path / "mine.pt") as state:
        state["cfg"]["model"].arch = state["cfg"]["model"]._name = "my_wide"
    args = swap_as_drawn(tmp_path / "mine.pt").model_args
    assert args.arch == args._name == "lot_transformer"


@pytest.mark.slow
def test_model_overrides_give_the_same_model_as_swap(data, stock_checkpoint, tmp_path):
    out = swapped(stock_checkpoint, tmp_path / "lot.pt", "lot", "--lot-num-pivots", 7)
    overrides = "{'attention': 'lot', 'attention_dropout': 0.1, 'lot_num_pivots': 7}"
    by_overrides = generate(data / "bin", stock_checkpoint, "--model-overrides", overrides)
    assert hypotheses(by_overrides) == hypotheses(generate(data / "bin", out))
    ours = swapped(stock_checkpoint, tmp_path / "ours.pt", "softmax")
    assert hypotheses(generate(data / "bin", ours, "--model-overrides", overrides)) == hypotheses(by_overrides)
    assert len(hypotheses(generate(data / "bin", out, "--model-overrides", "{'lot_num_updates': 1}"))) == 120
    for others in ("{'attention': 'set', 'set_num_pivots': 7}", "{'lot_num_pivots': 8}"):
        with pytest.raises(InputError, match="has lot .num_pivots=7. attention .* not those of .*; use swap"):
            generate(data / "bin", out, "--model-overrides", others)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"lot_num_pivots": 8}, "fairseq's own attention, which does not read lot_num_pivots"),
        ({"attention_sites": "cross"}, "does not read attention_sites"),
        ({"attention": "sinkhorn", "lot_num_pivots": 8}, "--lot-num-pivots does not belong to sinkhorn"),
    ],
)
def test_an_override_that_nothing_would_read_is_refused(overrides, message, data, stock_checkpoint):
    with pytest.raises(InputError, match=message):
        generate(data / "bin", stock_checkpoint, "--model-overrides", str(overrides))


@pytest.mark.parametrize("arch", ["bart_base", "transformer_align"])
def test_an_override_of_a_model_that_is_no_plain_transformer_is_refused(arch, stock_checkpoint, tmp_path):
    """Otherwise its softmax translations would pass for LOT's."""
    with edited(stock_checkpoint, tmp_path / "other.pt") as state:
        state["cfg"]["model"].arch = state["cfg"]["model"]._name = arch
    with pytest.raises(InputError, match=f"is a {arch}, whose attention cannot be overridden"):
        check_overridden(str(tmp_path / "other.pt"), {"attention": "lot"})


def test_overrides_of_a_language_model_are_not_refused(stock_checkpoint, tmp_path):
    """fairseq-generate applies --model-overrides to the model of --lm-path, too."""
    with edited(stock_checkpoint, tmp_path / "lm.pt") as state:
        state["cfg"]["model"].arch = state["cfg"]["model"]._name = "transformer_lm"
    check_overridden(str(tmp_path / "lm.pt"), {"attention": "lot", "lot_num_pivots": 7})


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"sinkhorn_epsilon": 0.5}, "--sinkhorn-epsilon does not belong to lot"),
        ({"differential_lambda_init": 0.3}, "--differential-lambda-init does not belong"),
        ({"differential": True}, "is not trained as differential lot"),
    ],
)
def test_an_override_that_does_not_fit_the_swapped_model_is_refused(overrides, message, data, lot_checkpoint):
    with pytest.raises(InputError, match=message):
        generate(data / "bin", lot_checkpoint, "--model-overrides", str(overrides))


def test_a_second_swap_draws_anew(stock_checkpoint):
    """The second swap discards a calibration after the first one, and the checkpoint no longer claims it."""
    once = swap_as_drawn(stock_checkpoint, attention="lot", lot_num_pivots=6)
    fitted = calibrate(once, steps=1, joint_steps=0, held_out=4).state
    again = swap_as_drawn(fitted, attention="lot", lot_num_pivots=6)
    key = "encoder.layers.0.self_attn.mechanism.pivots"
    assert torch.equal(again["model"][key], once["model"][key])
    assert not hasattr(again.model_args, "calibration") and hasattr(fitted.model_args, "calibration")
    other = swap_as_drawn(fitted, attention="lot", lot_num_pivots=6, lot_seed=7)
    assert not torch.equal(other["model"][key], once["model"][key])


def test_a_swap_drops_averages_of_the_base_s_weights(stock_checkpoint):
    state = load_checkpoint(stock_checkpoint)
    state["extra_state"] = {**state["extra_state"], "ema": {"x": torch.ones(1)}, "ema_fp32_params": {}}
    assert swap_as_drawn(state)["extra_state"] == load_checkpoint(stock_checkpoint)["extra_state"] | {"ema": {}}
    assert "ema" in state["extra_state"], "the argument was changed"


def test_impossible_swaps_are_refused(data, stock_checkpoint, tmp_path, capsys):
    words = ("--no-cross-attention", "--cross-self-attention", "--arch", "transformer_tiny", "--lr", 0)
    without_cross = train(data / "bin", tmp_path, *words, updates=1)
    with pytest.raises(InputError, match="has no attention at cross; give other sites"):
        swap_as_drawn(without_cross, attention="lot", attention_sites="encoder,cross")
    with pytest.raises(InputError, match="does not change the differential form"):
        swap_as_drawn(stock_checkpoint, attention="lot", differential=True)
    to = ("--path", stock_checkpoint, "--out", tmp_path / "o.pt")
    unused = ("--no-calibrate", "--distill-steps", 5)
    refuse(
        capsys, "swap", *to, *unused, naming=["--distill-steps is for a calibration; leave it out, or --no-calibrate"]
    )
    text = tmp_path / "text"
    text.write_text("ein Satz\n")
    onto_input = ("--path", stock_checkpoint, "--calibrate", text, "--out", text)
    refuse(capsys, "swap", *onto_input, naming=["--calibrate and --out are both"])
    assert text.read_text() == "ein Satz\n"


def test_the_first_of_several_data_folders_is_used(data, stock_checkpoint):
    state = load_checkpoint(stock_checkpoint)
    state["cfg"]["task"]["data"] = f"{data / 'bin'}:elsewhere"
    assert state.task_options()["data"] == str(data / "bin")


def test_a_misspelt_model_override_is_refused(data, stock_checkpoint):
    with pytest.raises(InputError, match="no option 'lot_pivots' to override; .*lot_num_pivots"):
        generate(data / "bin", stock_checkpoint, "--model-overrides", "{'attention': 'lot', 'lot_pivots': 16}")


@pytest.mark.slow
def test_every_fairseq_command_takes_the_swapped_file(data, stock_checkpoint, tmp_path, caplog):
    out = swapped(stock_checkpoint, tmp_path / "lot.pt", "lot")
    common = ("--user-dir", "fairseq_lot", "--path", out, "--cpu", "--max-tokens", 400)
    caplog.set_level("INFO")
    words = ("--task", "translation", "--valid-subset", "valid")
    in_this_process(fairseq_validate, data / "bin", *common, *words)
    assert "| loss " in caplog.text
    (tmp_path / "lines").write_text("▁sie ▁singt ▁.\n▁wo ▁ist ▁er ▁?\n")
    words = ("-s", "de", "-t", "en", "--remove-bpe", "sentencepiece", "--input", tmp_path / "lines")
    output = in_this_process(fairseq_interactive, data / "bin", *common, *words)
    assert len(fields(output, "H")) == 2
    flags = ("--arch", "lot_transformer", *TINY, "--finetune-from-model", out, "--lr", "1e-9")
    finetuned = train(data / "bin", tmp_path / "finetuned", *flags, updates=2)
    torch.testing.assert_close(weights_of(finetuned), weights_of(out), atol=1e-6, rtol=1e-5)


def test_from_pretrained_translates(data, stock_checkpoint, tmp_path):
    out = swapped(stock_checkpoint, tmp_path / "lot.pt", "lot")
    translator = PluggableTransformerModel.from_pretrained(
        str(tmp_path), out.name, data_name_or_path=str(data / "bin"), bpe="sentencepiece",
        sentencepiece_model=str(data / "bpe" / "sentencepiece.bpe.model"),
    )  # fmt: skip
    assert isinstance(translator.translate("sie singt .", beam=2), str)
    source = translator.encode("sie singt .")
    best = translator.generate(source, beam=2, print_alignment="hard")[0]
    assert best["alignment"] and all(0 <= int(at) < len(source) for at, _ in best["alignment"])


def test_the_swapped_attention_is_called_in_eval_mode_with_padding(stock_checkpoint, monkeypatch):
    model = build(swap_as_drawn(stock_checkpoint, attention="lot"))
    pad = model.encoder.padding_idx
    tokens = torch.randint(4, 100, (2, 7))
    tokens[1, :3] = pad  # fairseq pads sources on the left
    calls, attend = [], Lot.attend

    def spy(self, q, k, v, masks, need_weights):
        calls.append(masks.key_pads)
        return attend(self, q, k, v, masks, need_weights)

    monkeypatch.setattr(Lot, "attend", spy)
    with torch.no_grad():
        padded = model.encoder(tokens, (tokens != pad).sum(1))["encoder_out"][0]
        assert len(calls) == len(model.encoder.layers)
        assert all(mask is not None and mask.sum() == 3 for mask in calls)
        alone = model.encoder(tokens[1:, 3:], torch.tensor([4]))["encoder_out"][0]
    torch.testing.assert_close(padded[3:, 1], alone[:, 0], atol=1e-5, rtol=1e-5)


def test_swap_keeps_learnt_parameters_of_the_same_mechanism_only(data, tmp_path):
    checkpoint = train(data / "bin", tmp_path, "--arch", "lot_transformer_small", updates=5)
    state = load_checkpoint(checkpoint)
    key = "encoder.layers.0.self_attn.mechanism.pivots"
    learnt = state["model"][key]
    same = swap_as_drawn(state, attention="lot", lot_epsilon=0.5)
    assert torch.equal(same["model"][key], learnt) and same.model_args.lot_epsilon == 0.5
    assert swap_as_drawn(state, attention="lot", lot_num_pivots=8)["model"][key].shape[1] == 8
    gone = swap_as_drawn(state, attention="sinkhorn")
    assert not any(name.endswith("pivots") for name in gone["model"])
    assert torch.equal(state["model"][key], learnt), "the argument was changed"
    assert "lot_num_pivots" not in vars(gone.model_args)
    del state["last_optimizer_state"]  # trained with --no-save-optimizer-state
    assert swap_as_drawn(state, attention="near_far").model_args.trained_attention == "lot"
    for trained in (checkpoint, state, swap_as_drawn(state, attention="near_far")):
        with pytest.raises(InputError, match="was trained with lot attention at encoder; calibration fits to softmax"):
            calibrate(trained)


@pytest.mark.parametrize("attention", MECHANISMS)
@pytest.mark.parametrize("base", ["stock_checkpoint", "diff_checkpoint"])
def test_parameters_stand_in_the_order_of_the_model(base, attention, request):
    """fairseq's script that averages checkpoints compares the lists of their names."""
    everywhere = {"attention_sites": "encoder,cross,decoder"} if attention in ("lot", "softmax") else {}
    state = swap_as_drawn(request.getfixturevalue(base), attention=attention, **everywhere)
    assert list(state["model"]) == list(build(state).state_dict())
    assert state["last_optimizer_state"] is None


def test_embeddings_that_a_training_started_from_may_be_gone(stock_checkpoint):
    state = load_checkpoint(stock_checkpoint)
    args = state.model_args
    args.encoder_embed_path = args.decoder_embed_path = "/gone/vectors.txt"
    assert len(swap_as_drawn(state)["model"]) > len(state["model"])


def test_old_checkpoints_with_fused_projections_can_be_swapped(stock_checkpoint, lot_checkpoint, tmp_path):
    """Before 2019, fairseq saved q, k and v of an attention in one tensor."""
    with edited(stock_checkpoint, tmp_path / "old.pt") as state:
        weights = state["model"]
        for name in [name for name in weights if name.endswith("self_attn.q_proj.weight")]:
            prefix = name.removesuffix("q_proj.weight")
            for kind in ("weight", "bias"):
                parts = [weights.pop(f"{prefix}{x}_proj.{kind}") for x in "qkv"]
                weights[f"{prefix}in_proj_{kind}"] = torch.cat(parts)
    out = swapped(tmp_path / "old.pt", tmp_path / "lot.pt", "lot", "--lot-num-pivots", 6)
    assert not differing(out, lot_checkpoint)


def test_a_file_that_the_first_version_swapped_translates(data, stock_checkpoint, lot_checkpoint, tmp_path):
    """The test writes its arguments and parameters by name, because the code that wrote them is gone."""
    with edited(stock_checkpoint, tmp_path / "old.pt") as state:
        args = state.model_args
        args.arch = args._name = "lot_transformer"
        args.attention, args.attention_sites, args.trained_attention = "lot", "encoder", "softmax"
        args.differential, args.lot_learn_pivots, args.lot_learn_masses = False, True, True
        args.lot_num_pivots, args.lot_epsilon, args.lot_num_updates, args.lot_seed = 6, 1.0, 5, 0
        args.lot_mass_temperature = 1.0
        for layer in range(args.encoder_layers):
            for name in ("pivots", "mass_logits"):
                key = f"encoder.layers.{layer}.self_attn.mechanism.{name}"
                state["model"][key] = weights_of(lot_checkpoint)[key]
        state["last_optimizer_state"] = None
    old, new = (hypotheses(generate(data / "bin", path)) for path in (tmp_path / "old.pt", lot_checkpoint))
    assert old == new and len(old) == 60 * 2


ALIBI = {"attention": "softmax", "softmax_prior": "alibi"}


@pytest.mark.parametrize(
    ("changes", "attention", "lost"),
    [
        ({"attention_sites": "encoder,cross"}, "sinkhorn", "lot attention at cross"),
        ({"attention_sites": "encoder,cross"} | ALIBI, "sinkhorn", None),  # softmax has no prior at cross
        ({"attention_sites": "encoder,cross,decoder"} | ALIBI, "sinkhorn", None),  # at decoder it stays
        ({"attention_sites": "encoder,cross,decoder"} | ALIBI, "softmax", "softmax attention at decoder"),
    ],
)
def test_a_site_that_goes_back_to_plain_softmax_is_named(changes, attention, lost, lot_checkpoint, tmp_path, capsys):
    with edited(lot_checkpoint, tmp_path / "base.pt") as state:
        del state.model_args.trained_attention  # as if it had been trained so
        vars(state.model_args).update(changes)
    words = ("swap", "--path", tmp_path / "base.pt", "--no-calibrate", "--out", tmp_path / "out.pt", "--attention")
    fairseq_lot(*words, attention)
    said = capsys.readouterr().out
    assert f"base.pt also has {lost}; it becomes plain softmax" in said if lost else "plain softmax" not in said
    fairseq_lot(*words, "lot", "--attention-sites", "cross,encoder,decoder", "--lot-query-updates", 1)
    assert "plain softmax" not in capsys.readouterr().out
