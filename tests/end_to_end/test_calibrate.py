"""``fairseq-lot calibrate`` and ``swap --calibrate`` as a user runs them."""

import contextlib
import errno
import io
import os
import re
import shutil
import signal
from itertools import pairwise

import pytest
import torch

from fairseq_lot import cli
from fairseq_lot.errors import InputError
from fairseq_lot.plug_and_play import calibrate as calibration
from fairseq_lot.plug_and_play import distillation
from fairseq_lot.plug_and_play.distillation import Distillation
from fairseq_lot.plug_and_play.sentences import is_text_file
from fairseq_lot.plug_and_play.swap import swap_as_drawn
from fairseq_lot.pretrained.checkpoint import load_checkpoint
from tests.end_to_end.conftest import (
    differing,
    edited,
    fairseq_lot,
    generate,
    hypotheses,
    refuse,
    refuse_and_keep,
    swapped,
    train,
)

OURS = {"arch": "lot_transformer", "_name": "lot_transformer"}
FIT = ("--steps", 12, "--joint-steps", 4, "--held-out", 16, "--max-tokens", 300)


def calibration_of(checkpoint):
    """The line in a checkpoint's arguments that says how it was calibrated."""
    return load_checkpoint(checkpoint).model_args.calibration


@pytest.fixture(scope="module")
def calibrated(data, lot_checkpoint, tmp_path_factory):
    """The folder of ``lot_checkpoint`` calibrated on text (``lot.pt``), with the output of the command."""
    folder = tmp_path_factory.mktemp("calibrated")
    words = ("calibrate", data / "bin", "--path", lot_checkpoint, "--out", folder / "lot.pt", *FIT)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        fairseq_lot(*words)
    return folder, told.getvalue()


def test_calibration_changes_new_parameters_only_and_reduces_errors(lot_checkpoint, calibrated):
    folder, told = calibrated
    changed = differing(lot_checkpoint, folder / "lot.pt")
    assert changed and all(key.endswith(("mechanism.pivots", "mechanism.mass_logits")) for key in changed)
    lines = re.findall(r"^\| encoder +\| +(\d) (.*) \|$", told, re.MULTILINE)
    assert [int(layer) for layer, _ in lines] == list(range(len(lines))) and lines
    heads = [tuple(map(float, pair)) for _, cells in lines for pair in re.findall(r"([\d.]+) → ([\d.]+)", cells)]
    assert sum(after for _, after in heads) < sum(before for before, _ in heads)
    output = re.search(r"after 12 steps on the heads and 4 on the output: ([\d.]+) → ([\d.]+)", told)
    assert float(output[2]) <= float(output[1]) and str(folder / "lot.pt") in told


@pytest.mark.parametrize("joint_steps", [0, 20])
def test_no_head_is_worse_after_the_fit(joint_steps, lot_checkpoint):
    few = {"steps": 3, "joint_steps": joint_steps, "held_out": 8, "max_tokens": 100}
    done = calibration.calibrate(lot_checkpoint, learning_rate=4.0, **few)
    assert (done.after <= done.before).all() and done.fits[1].after <= done.fits[1].before


def test_files_that_cannot_be_written_are_refused_before_the_fit(lot_checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: pytest.fail("it fits"))
    path = "--path", shutil.copy(lot_checkpoint, tmp_path / "lot.pt")
    (tmp_path / "file").touch()
    for words, message in (
        ((*path, "--out", tmp_path / "." / "lot.pt"), "--path and --out are both"),
        ((*path, "--out", tmp_path / "file" / "x.pt"), "x.pt: File exists"),
        ((tmp_path / "file", *path, "--out", tmp_path / "file"), "DATA and --out are both"),
    ):
        refuse_and_keep(capsys, tmp_path, "calibrate", *words, naming=[message])


@pytest.mark.parametrize(
    ("sites", "text", "measure"),
    [("encoder", False, "of the output"), ("encoder,cross", True, "divergence of the predictions in nats")],
)
def test_distillation_fits_the_projections_after_which_softmax_is_no_teacher(
    data, stock_checkpoint, tmp_path, capsys, sites, text, measure
):
    out = tmp_path / "lot.pt"
    drawn = swapped(stock_checkpoint, tmp_path / "drawn.pt", "lot", "--attention-sites", sites)
    words = "calibrate", *([data / "bin"] if text else []), "--path", drawn
    fairseq_lot(*words, "--out", out, *FIT, "--distill-steps", 12)
    changed, after = differing(drawn, out), load_checkpoint(out)
    assert after["extra_state"]["ema"] == {}, "averages are of other weights"
    blocks = r"encoder\.layers\.\d\.self_attn" + (r"|decoder\.layers\.\d\.encoder_attn" if "cross" in sites else "")
    assert all(re.match(rf"({blocks})\.(mechanism|[qkv]_proj|out_proj)\.", key) for key in changed)
    weights = {key for key in after["model"] if re.match(rf"({blocks})\.v_proj\.weight", key)}
    assert weights and weights <= changed
    told = re.search(rf"{measure}, in 12 more steps.*: ([\d.]+) → ([\d.]+)", capsys.readouterr().out)
    old, new = map(float, told.groups())
    assert new < old
    assert after.model_args.calibration.endswith("projections included")
    # the projections changed, so softmax in these layers is no longer the base and cannot be a teacher
    assert after.model_args.trained_attention.startswith("lot")
    assert after.model_args.trained_sites == after.model_args.attention_sites
    refuse(capsys, "calibrate", "--path", out, "--out", tmp_path / "again.pt", *FIT, naming=["was trained with lot"])


@pytest.mark.parametrize(
    ("checkpoint", "whole"), [("lot_checkpoint", "output_error"), ("everywhere", "output_divergence")]
)
def test_each_stage_of_the_fit_has_its_own_error_and_learning_rate(checkpoint, whole, request, monkeypatch):
    told, fit = [], calibration.fit

    def keep(fitted, errors, *others, **how):
        told.append((errors.__name__, *(rate for _, rate in fitted)))
        return fit(fitted, errors, *others, **how)

    monkeypatch.setattr(calibration, "fit", keep)
    few = {"steps": 1, "joint_steps": 1, "distill_steps": 1, "held_out": 4}
    calibration.calibrate(request.getfixturevalue(checkpoint), **few, learning_rate=0.4, distill_rate=0.01)
    assert told == [("head_errors", 0.4), ("output_error", 0.1), (whole, 0.1, 0.01)]


def test_calibration_keeps_weights_in_half_precision(lot_checkpoint):
    """Trainings with --fp16 save such weights."""
    state = load_checkpoint(lot_checkpoint)
    state["model"] = {name: x.half() if x.is_floating_point() else x for name, x in state["model"].items()}
    fitted = calibration.calibrate(state, steps=1, joint_steps=0, distill_steps=1, held_out=4).state["model"]
    assert {name: x.dtype for name, x in fitted.items()} == {name: x.dtype for name, x in state["model"].items()}


def test_a_split_of_no_folder_is_refused(data, stock_checkpoint, lot_checkpoint, tmp_path, capsys):
    words = ("--out", tmp_path / "out.pt", "--split", "valid")
    for text in ([], [data / "raw" / "train.de"]):
        refuse(capsys, "calibrate", *text, "--path", lot_checkpoint, *words, naming=["--split valid"])
        calibrate = ["--calibrate", *text] if text else []
        refuse(capsys, "swap", "--path", stock_checkpoint, *calibrate, *words, naming=["--split valid"])
    assert list(tmp_path.iterdir()) == []


def test_the_length_of_random_sentences_beside_text_is_refused(
    data, stock_checkpoint, lot_checkpoint, tmp_path, capsys
):
    words = ("--out", tmp_path / "out.pt", "--longest", 90)
    for text in (data / "bin", data / "raw" / "train.de"):
        refuse(capsys, "calibrate", text, "--path", lot_checkpoint, *words, naming=["--longest 90", "text is given"])
        refuse(capsys, "swap", "--path", stock_checkpoint, "--calibrate", text, *words, naming=["--longest 90"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["calibrate", "swap", "sweep"])
def test_random_sentences_for_which_the_model_has_no_positions_are_refused(
    command, data, stock_checkpoint, lot_checkpoint, tmp_path, capsys
):
    path = lot_checkpoint if command == "calibrate" else stock_checkpoint
    words = [command, "--path", path, "--out", tmp_path / "out", "--longest", 1024]
    words += [data / "bin", "--try", "lot"] if command == "sweep" else []
    refuse_and_keep(capsys, tmp_path, *words, naming=[f"{path} takes at most 1023 pieces, not --longest 1024"])


@pytest.mark.parametrize(
    ("name", "typed", "implied"),
    [
        ("random_pieces", {}, {"shortest": 1, "longest": 80}),
        ("random_pieces", {"longest": 90}, {"shortest": 1}),
        ("from_text", {}, {}),
    ],
)
def test_sentences_are_drawn_as_asked(name, typed, implied, data, lot_checkpoint, monkeypatch):
    asked, told, draw = {"max_tokens": 90, "held_out": 3, "seed": 7} | typed, {}, getattr(calibration, name)
    monkeypatch.setattr(calibration, name, lambda *a, **how: told.update(how) or draw(*a, **how))
    text = data / "bin" if name == "from_text" else None
    calibration.calibrate(lot_checkpoint, text, steps=1, joint_steps=0, **asked)
    assert told == asked | implied


@pytest.mark.parametrize(("text", "part"), [(False, 80), (True, None)])
def test_random_pieces_are_translated_in_parts_as_long_as_sentences(text, part, data, everywhere, monkeypatch):
    parts, translate = set(), distillation.translate_greedily
    monkeypatch.setattr(distillation, "translate_greedily", lambda *a: parts.add(a[2]) or translate(*a))
    source, longest = (data / "raw" / "test.de", {}) if text else (None, {"longest": 90})
    calibration.calibrate(everywhere, source, steps=1, joint_steps=0, held_out=2, **longest)
    assert parts == {part}


def test_swap_can_calibrate_at_once(data, stock_checkpoint, calibrated, tmp_path):
    out = swap_to(tmp_path / "lot.pt", stock_checkpoint, "--calibrate", data / "bin", *FIT)
    assert not differing(out, calibrated[0] / "lot.pt")


def test_ambiguous_languages_can_be_typed(data, stock_checkpoint, tmp_path, capsys):
    with edited(stock_checkpoint, tmp_path / "classic.pt") as state:
        state["cfg"]["task"].update(source_lang=None, target_lang=None)
    shutil.copytree(data / "bin", tmp_path / "bin")
    (tmp_path / "bin" / "train.de-fr.de.idx").touch()
    words = "swap", "--path", tmp_path / "classic.pt", "--attention", "lot", "--calibrate", tmp_path / "bin", *FIT
    out = tmp_path / "lot.pt"
    refuse(capsys, *words, "--out", out, naming=["has de-en and de-fr; give the languages by --source-lang"])
    assert not out.exists()
    fairseq_lot(*words, "--out", out, "--source-lang", "de", "--target-lang", "en")
    assert "calibrated on" in calibration_of(out)


def test_a_swap_without_calibration_refuses_the_opposite_direction_too(stock_checkpoint, tmp_path, capsys):
    words = "swap", "--no-calibrate", "--path", stock_checkpoint, "--out", tmp_path / "lot.pt"
    refuse(
        capsys, *words, "--source-lang", "en", "--target-lang", "de", naming=[stock_checkpoint, "translates de to en"]
    )


def test_calibrating_without_new_parameters_is_refused(data, stock_checkpoint, tmp_path, capsys):
    out = tmp_path / "sinkhorn.pt"
    words = ("swap", "--path", stock_checkpoint, "--attention", "sinkhorn", "--out", out)
    refuse(capsys, *words, "--calibrate", data / "bin", *FIT, naming=["nothing to calibrate"])
    assert not out.exists()


def test_a_fitted_model_is_saved_even_if_the_output_is_closed(stock_checkpoint, tmp_path, monkeypatch, capfd):
    def closed(text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("sys.stdout.write", closed)
    words = ("swap", "--path", stock_checkpoint, "--attention", "lot", "--out", tmp_path / "lot.pt", *FIT)
    assert cli.main([str(word) for word in words]) == 141
    assert "calibrated on" in calibration_of(tmp_path / "lot.pt")


@pytest.fixture
def foreground():
    """Make Ctrl-C interrupt this process; shells let background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(call, monkeypatch):
    """Raise Ctrl-C at the ``call``-th call of ``Distillation.head_errors``."""
    calls, real = [], Distillation.head_errors

    def head_errors(*arguments):
        calls.append(None)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(Distillation, "head_errors", head_errors)


@pytest.mark.parametrize("command", ["swap", "calibrate", "sweep"])
def test_ctrl_c_leaves_nothing_that_scripts_would_take_for_finished(
    command, data, stock_checkpoint, lot_checkpoint, tmp_path, monkeypatch, foreground
):
    interrupt_at(5, monkeypatch)
    words = {
        "swap": ("swap", "--attention", "lot", "--calibrate", data / "bin"),
        "calibrate": ("calibrate", data / "bin"),
        "sweep": ("sweep", data / "bin", "--try", "lot", "--text", "--no-bleu"),
    }[command]
    path = lot_checkpoint if command == "calibrate" else stock_checkpoint
    assert cli.main([str(word) for word in (*words, "--path", path, "--out", tmp_path / "o", *FIT)]) == 130
    if command != "sweep":
        assert list(tmp_path.iterdir()) == []
    else:
        assert '"calibrated_on": "text"' not in (tmp_path / "o" / "sweep.jsonl").read_text()


def test_the_table_has_gaps_where_an_attention_has_fewer_heads(data, tmp_path, capsys):
    heads = ("--encoder-attention-heads", 4, "--decoder-attention-heads", 2)
    base = train(data / "bin", tmp_path, "--arch", "transformer_tiny", *heads, "--lr", 0, updates=1)
    swap_to(tmp_path / "lot.pt", base, "--attention-sites", "encoder,cross", "--steps", 1, "--joint-steps", 1)
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| cross")]
    assert len(lines) == 2 and all([cell.strip() for cell in line[-2:]] == ["–", "–"] for line in lines)
    assert all("→" in cell for line in lines for cell in line[2:4])


def test_a_checkpoint_without_optimiser_that_no_swap_wrote_was_trained_with_its_attention(lot_checkpoint):
    state = load_checkpoint(lot_checkpoint)
    del state.model_args.trained_attention  # as fairseq-train writes it, but without the optimiser
    assert state.attention_of_training()[0].startswith("lot")


def test_a_swap_without_an_entry_for_the_optimiser_was_trained_with_softmax(lot_checkpoint):
    state = load_checkpoint(lot_checkpoint)
    del state["last_optimizer_state"]  # scripts that publish checkpoints remove it
    assert state.attention_of_training() == ("softmax", "encoder")


def test_the_decoder_of_an_adaptive_softmax_is_not_distilled(data, tmp_path, capsys):
    flags = ("--adaptive-softmax-cutoff", "50,100", "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp")
    base = train(data / "bin", tmp_path / "base", "--arch", "transformer_tiny", *flags, updates=1)
    words = ("swap", "--path", base, "--out", tmp_path / "o.pt", "--attention", "lot", *FIT, "--distill-steps", 2)
    refuse_and_keep(capsys, tmp_path, *words, "--attention-sites", "decoder", naming=["--distill-steps", "encoder"])
    fairseq_lot(*words, "--attention-sites", "encoder")


def test_a_model_that_was_not_trained_with_softmax_is_not_fitted_to_it(data, stock_checkpoint, tmp_path, capsys):
    """A checkpoint records the attention and the sites of its training, even after several swaps."""
    for number, change in enumerate(
        ({"attention": "sinkhorn"}, {"softmax_prior": "alibi", "attention_sites": "decoder"})
    ):
        paths = [tmp_path / f"{number}.{name}.pt" for name in ("base", "lot", "again")]
        with edited(stock_checkpoint, paths[0]) as state:
            vars(state["cfg"]["model"]).update(OURS | {"attention": "softmax"} | change)
        for path, out in pairwise(paths):
            swapped(path, out, "lot", "--lot-num-pivots", 4)
        named = ["was trained with", *change.values()]
        refuse(capsys, "calibrate", data / "bin", "--path", paths[2], "--out", tmp_path / "o.pt", *FIT, naming=named)
    assert not (tmp_path / "o.pt").exists()


@pytest.mark.slow
def test_a_base_with_a_prior_is_its_own_teacher(stock_checkpoint, tmp_path):
    """near_far with a window over the whole sentence equals this softmax only if it has the same prior."""
    with edited(stock_checkpoint, tmp_path / "base.pt") as state:
        alibi = {"softmax_prior": "alibi", "attention_sites": "encoder,decoder"}
        vars(state["cfg"]["model"]).update(OURS | {"attention": "softmax"} | alibi)
    same = {"attention_sites": "decoder, encoder,decoder", "near_far_window": 1000, "near_far_exact_up_to": 0}
    errors = []
    for prior in ({"near_far_prior": "alibi"}, {}):
        once = swap_as_drawn(tmp_path / "base.pt", attention="lot")
        both = [swap_as_drawn(path, attention="near_far", **same, **prior) for path in (tmp_path / "base.pt", once)]
        done = [calibration.calibrate(state, steps=1, joint_steps=1, held_out=4) for state in both]
        torch.testing.assert_close(done[0].before, done[1].before, atol=0, rtol=0)
        errors.append(done[0].before.max().item())
    assert errors[0] < 1e-9 < 1e-3 < errors[1]

    del once.model_args.trained_sites  # early versions of swap did not record them
    with pytest.raises(InputError, match=r"softmax \(prior=alibi\) attention at unknown sites; calibration fits to"):
        calibration.calibrate(once)


def swap_to(out, checkpoint, *options):
    """Swap a checkpoint to LOT with 6 pivots; return ``out``."""
    fairseq_lot("swap", "--path", checkpoint, "--attention", "lot", "--lot-num-pivots", 6, "--out", out, *options)
    return out


def test_swap_calibrates_by_itself_without_data(stock_checkpoint, lot_checkpoint, tmp_path, capsys):
    """Random pieces follow the counts of the training's dictionaries; without these files they are uniform."""
    quick = FIT[:6]
    out = swap_to(tmp_path / "lot.pt", stock_checkpoint, *quick)
    said = capsys.readouterr().out
    assert calibration_of(out) in said
    assert "calibrated on random pieces, up to 80 at a time, by the dictionary's counts (12 + 4 steps, seed 1)" in said
    changed = differing(lot_checkpoint, out)
    assert changed and all(key.endswith(("mechanism.pivots", "mechanism.mass_logits")) for key in changed)
    assert not differing(out, swap_to(tmp_path / "again.pt", stock_checkpoint, *quick))

    with edited(stock_checkpoint, tmp_path / "moved.pt") as state:
        state["cfg"]["task"]["data"] = str(tmp_path / "gone")
    uniform = swap_to(tmp_path / "uniform.pt", tmp_path / "moved.pt", *quick)
    assert "random pieces, up to 80 at a time, all equally likely" in calibration_of(uniform)
    assert differing(out, uniform)


@pytest.mark.slow
def test_swap_calibrates_learnt_temperatures_of_sinkhorn(data, stock_checkpoint, tmp_path, capsys):
    options = ("--attention", "sinkhorn", "--sinkhorn-learn-epsilon", "--sinkhorn-epsilon", 0.3)
    paths = [tmp_path / "drawn.pt", tmp_path / "fitted.pt"]
    for path, more in zip(paths, (("--no-calibrate",), FIT), strict=True):
        fairseq_lot("swap", "--path", stock_checkpoint, *options, "--out", path, *more)
    said = capsys.readouterr().out
    assert "calibrated on random pieces" in said and "sinkhorn attention at encoder" in said
    before, after = zip(*re.findall(r"([0-9.]+) → ([0-9.]+) +\|", said), strict=True)
    assert sum(map(float, after)) < 0.9 * sum(map(float, before))
    args, drawn = load_checkpoint(paths[1]).model_args, load_checkpoint(paths[0])["model"]
    assert args.sinkhorn_epsilon == 0.3 and args.sinkhorn_learn_epsilon is True
    names = [f"encoder.layers.{layer}.self_attn.mechanism.log_epsilon" for layer in range(args.encoder_layers)]
    assert differing(*paths) == set(names)
    assert all(drawn[name].exp().sub(0.3).abs().max() < 1e-6 for name in names)
    drawn, fitted = (hypotheses(generate(data / "bin", path)) for path in paths)
    assert drawn != fitted


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("lot", "--no-calibrate"), "as drawn"),
        *(((x,), "no parameters that a fit could change") for x in ("sinkhorn", "softmax")),
    ],
)
def test_a_swap_that_is_not_calibrated_says_why(options, reason, stock_checkpoint, tmp_path, capsys):
    fairseq_lot("swap", "--path", stock_checkpoint, "--out", tmp_path / "out.pt", "--attention", *options)
    said = capsys.readouterr().out
    assert "not calibrated" in said and reason in said
    assert "lot" in options or not differing(stock_checkpoint, tmp_path / "out.pt")


def test_decoder_sites_are_calibrated_without_data_too(stock_checkpoint, everywhere, tmp_path):
    few = ("--steps", 3, "--joint-steps", 1, "--attention-sites", "encoder,cross,decoder")
    changed = differing(everywhere, swap_to(tmp_path / "lot.pt", stock_checkpoint, *FIT, *few))
    stacks = ["encoder.*self_attn", "decoder.*encoder_attn", "decoder.*self_attn"]
    assert all(any(re.match(stack, key) for key in changed) for stack in stacks)
    assert all(any(re.match(stack, key) for stack in stacks) for key in changed)


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "cpu:x"])
def test_a_device_that_is_not_there_is_refused(device, data, stock_checkpoint, lot_checkpoint, tmp_path, capsys):
    out = ("--out", tmp_path / "out")
    for words in (
        ("calibrate", "--path", lot_checkpoint, *out),
        ("swap", "--path", stock_checkpoint, "--attention", "lot", *out),
        ("sweep", data / "bin", "--path", stock_checkpoint, "--try", "lot", *out),
        ("diagnose", data / "bin", "--path", stock_checkpoint),
        ("translate", "--path", stock_checkpoint, "das"),
    ):
        refuse(capsys, *words, "--device", device, naming=["--device", device])
    assert list(tmp_path.iterdir()) == []


def test_the_encoding_of_a_plain_text_file_can_be_typed(data, stock_checkpoint, lot_checkpoint, tmp_path, capsys):
    folder, codes = shutil.copytree(data / "bin", tmp_path / "bin"), tmp_path / "mine.model"
    shutil.move(folder / "sentencepiece.bpe.model", codes)
    paths = {"calibrate": tmp_path / "lot.pt", "swap": tmp_path / "stock.pt"}
    for path, checkpoint in zip(paths.values(), (lot_checkpoint, stock_checkpoint), strict=True):
        with edited(checkpoint, path) as state:
            state["cfg"]["task"].update(data=str(folder))
    for command, given in (("calibrate", []), ("swap", ["--attention", "lot", "--calibrate"])):
        words = [command, "--path", paths[command], "--out", tmp_path / "out.pt", *FIT, *given]
        refuse(capsys, *words, data / "raw" / "train.de", naming=["give it by --bpe-codes"])
        refuse(capsys, *words, folder, "--tokenizer", "space", naming=["--tokenizer: needs a plain text file"])
        fairseq_lot(*words, data / "text" / "train.de", "--bpe-codes", codes, "--tokenised")
        assert "calibrated on text of" in calibration_of(tmp_path / "out.pt")


def test_a_plain_text_file_is_fitted_to_in_the_pieces_of_the_model(data, stock_checkpoint, tmp_path, capsys):
    """A data folder with the same sentences, without a target side, gives the same checkpoint."""
    raw, out = tmp_path / "raw.de", [tmp_path / "file.pt", tmp_path / "folder.pt"]
    folder = shutil.copytree(data / "bin", tmp_path / "bin")
    for file in folder.glob("train.de-en.en.*"):
        file.unlink()
    lines = (data / "raw" / "train.de").read_text(encoding="utf-8").splitlines()
    raw.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    words = ("swap", "--path", stock_checkpoint, "--near-far-num-features", 6, *FIT, "--calibrate")
    for source, file in zip((raw, folder), out, strict=True):
        fairseq_lot(*words, source, "--out", file)
    os.mkfifo(tmp_path / "pipe")
    assert is_text_file(tmp_path / "pipe") and is_text_file(raw) and not is_text_file(folder)
    assert f"calibrated on text of {raw} (12 + 4 steps" in capsys.readouterr().out
    assert not differing(*out)

    few, refused = tmp_path / "few.de", tmp_path / "refused.pt"
    twenty = "\n".join(lines[:20]) + "\n"
    for text, message in ((twenty, "20 sentences"), ("", "no sentence"), ("\n \n", "no sentence")):
        few.write_text(text, encoding="utf-8")
        refuse(capsys, *words, few, "--out", refused, naming=[few, message])
    (tmp_path / "incomplete").mkdir()
    for name, way_out in (("gone", "calibrate: instead of a text file"), ("incomplete", "make it with fairseq-")):
        with edited(stock_checkpoint, tmp_path / "moved.pt") as state:
            state["cfg"]["task"]["data"] = str(tmp_path / name)
        moved = ("swap", "--path", tmp_path / "moved.pt", "--calibrate", raw, "--out", refused)
        refuse(capsys, *moved, naming=[tmp_path / name, way_out])
    assert not refused.exists()
