"""Trainings that start from a checkpoint of ours keep its attention; typed options win, and a line says so."""

import shlex
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils, options
from fairseq.dataclass.configs import FairseqConfig
from omegaconf import OmegaConf
from torch import nn

from fairseq_lot.errors import InputError, flag
from fairseq_lot.models.starting_point import starting_point, take_mark
from fairseq_lot.plug_and_play.swap import fine_tuning_command, swap_as_drawn
from fairseq_lot.pretrained.checkpoint import load_checkpoint
from tests.end_to_end.conftest import TINY, edited, generate, hypotheses, swapped, train, weights_of
from tests.plug_and_play import in_memory

TINY += ("--lr", 0)
SHALLOW = ("--encoder-layers", 1, "--decoder-layers", 1)
SOFT = {"sinkhorn_epsilon": 1.0, "sinkhorn_num_updates": 3}


@pytest.fixture(scope="module")
def sinkhorn_checkpoint(stock_checkpoint, tmp_path_factory):
    """The stock model with Sinkhorn attention at epsilon 1, softmax's own temperature and not the default."""
    return save(swap_as_drawn(stock_checkpoint, attention="sinkhorn", **SOFT), tmp_path_factory.mktemp("sinkhorn"))


@pytest.fixture
def fine_tuned(data, tmp_path):
    """A function that trains for two updates; it returns the arguments and the weights of the checkpoint."""

    def fine_tuned(*flags, save=tmp_path / "fine-tuned", updates=2):
        checkpoint = train(data / "bin", save, *flags, updates=updates)
        return load_checkpoint(checkpoint).model_args, weights_of(checkpoint)

    return fine_tuned


def save(state, folder):
    torch.save(state, folder / "swapped.pt")
    return folder / "swapped.pt"


def words(flags):
    """The words of a command line that sets these options."""
    return [word for name, value in flags.items() for word in [flag(name), *([] if value is True else [value])]]


def lines(caplog):
    """The lines that this package logged."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("fairseq_lot")]


def test_the_layer_of_quantisation_noise_is_kept(data, tmp_path, caplog):
    caplog.set_level("INFO")
    noise = ("--quant-noise-pq", 0.1, "--quant-noise-pq-block-size", 4)
    base = train(data / "bin", tmp_path / "base", "--arch", "transformer_tiny", *noise, updates=1)
    out = save(swap_as_drawn(base, attention="lot"), tmp_path)
    flags = ("--arch", "pluggable_transformer", "--finetune-from-model", out)
    child = train(data / "bin", tmp_path / "child", *flags, updates=1)
    assert "encoder.quant_noise.weight" in weights_of(child) and list(weights_of(child)) == list(weights_of(out))
    assert any("--quant-noise-pq 0.1" in line and "is kept" in line for line in lines(caplog))


@pytest.mark.parametrize("arch", ["sinkhorn_transformer", "transformer_tiny"])
def test_the_attention_of_a_swapped_checkpoint_is_kept(arch, sinkhorn_checkpoint, fine_tuned, caplog):
    caplog.set_level("INFO")
    args, _ = fine_tuned("--arch", arch, *TINY, "--finetune-from-model", sinkhorn_checkpoint)
    assert args.attention == "sinkhorn" and {name: getattr(args, name) for name in SOFT} == SOFT
    assert args.arch.partition("_transformer")[0] in ("sinkhorn", "lot"), "fairseq alone would take it for its own"
    (line,) = lines(caplog)
    assert str(sinkhorn_checkpoint) in line and "epsilon=1.0, num_updates=3" in line and line.endswith("is kept")


def test_the_command_that_swap_prints_keeps_all(data, stock_checkpoint, fine_tuned, tmp_path, capsys):
    out = tmp_path / "with blank.pt"
    options = ("--lot-num-pivots", 6, "--lot-epsilon", 0.5, "--attention-sites", "encoder,cross")
    swapped(stock_checkpoint, out, "lot", *options)
    command = capsys.readouterr().out.splitlines()[-1].partition(": ")[2]
    program, folder, *flags, dots = shlex.split(command)
    assert (program, folder, dots) == ("fairseq-train", str(data / "bin"), "...") and "\n" not in command
    assert flags[-4:] == ["-s", "de", "-t", "en"]
    args, weights = fine_tuned(*flags, "--lr", 0)
    assert (args.lot_num_pivots, args.lot_epsilon, args.attention_sites) == (6, 0.5, "encoder,cross")
    # fairseq's script that averages checkpoints compares the lists of their names
    assert list(weights) == list(weights_of(out))
    torch.testing.assert_close(weights, weights_of(out), atol=1e-6, rtol=0)


@pytest.mark.parametrize("differential", [False, True])
def test_the_sizes_of_the_checkpoint_are_kept(differential, data, fine_tuned, tmp_path, caplog):
    """A fine-tuning that resumes keeps them, too; options of training, such as dropout, are not kept."""
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "decoder_normalize_before": True, "no_decoder_final_norm": True}
    sizes |= {"max_source_positions": 77, "encoder_embed_dim": 128, "share_decoder_input_output_embed": True}
    arch = "diff_transformer_small" if differential else "lot_transformer_small"
    base = train(data / "bin", tmp_path / "base", "--arch", arch, *words(sizes), "--dropout", 0.4, updates=1)
    caplog.set_level("INFO")
    start = ("--arch", "pluggable_transformer", "--finetune-from-model", base)
    for updates in (1, 2):
        caplog.clear()
        args, _ = fine_tuned(*start, updates=updates)
        assert {name: getattr(args, name) for name in sizes} == sizes and args.dropout == 0.1
        assert args.differential is differential and args.attention == ("softmax" if differential else "lot")
        assert "--encoder-layers 1, " in lines(caplog)[0] and "dropout" not in lines(caplog)[0]
    args, _ = fine_tuned(*start, "--max-source-positions", 1024, save=tmp_path / "longer")
    assert args.max_source_positions == 1024


def test_the_sizes_of_a_stock_checkpoint_are_kept(stock_checkpoint, fine_tuned):
    args, weights = fine_tuned("--arch", "pluggable_transformer", "--finetune-from-model", stock_checkpoint, "--lr", 0)
    assert args.attention == "softmax" and args.encoder_embed_dim == 64
    torch.testing.assert_close(weights, weights_of(stock_checkpoint))


def test_a_training_of_other_sizes_in_the_same_folder_is_refused(data, tmp_path):
    """The second training has other sizes, but by mistake the folder of the first."""
    train(data / "bin", tmp_path, "--arch", "lot_transformer_small", *SHALLOW, updates=1)
    with pytest.raises(InputError, match="does not fit this model: it has --encoder-layers 1 .here 3., --decoder"):
        train(data / "bin", tmp_path, "--arch", "lot_transformer_small", updates=2)


def test_the_starting_point_is_the_file_that_fairseq_prefers(tmp_path):
    """fairseq prefers ``--continue-once`` to ``--finetune-from-model``, and ``checkpoint_last.pt`` to both."""
    paths = [tmp_path / name for name in ("tuned.pt", "once.pt", "checkpoint_last.pt")]
    args = Namespace(checkpoint_suffix="", restore_file="checkpoint_last.pt", save_dir=str(tmp_path))
    args.finetune_from_model, args.continue_once = map(str, paths[:2])
    assert starting_point(args) is None
    for path in paths[:0:-1]:
        path.touch()
        assert starting_point(args) == str(path)
        path.unlink()
    args.continue_once = None
    paths[0].touch()
    assert starting_point(args) == str(paths[0])


def test_embeddings_that_the_base_started_from_may_be_gone(stock_checkpoint, fine_tuned, tmp_path):
    with edited(stock_checkpoint, tmp_path / "base.pt") as state:
        vars(state.model_args).update(encoder_embed_path="/gone/vectors.txt", decoder_embed_path="/gone/vectors.txt")
    args, _ = fine_tuned("--arch", "pluggable_transformer", "--finetune-from-model", tmp_path / "base.pt", updates=1)
    assert args.encoder_embed_path is args.decoder_embed_path is None


def test_the_command_of_a_checkpoint_that_names_no_task(stock_checkpoint):
    state = swap_as_drawn(stock_checkpoint)
    state["cfg"] = {"model": state["cfg"]["model"]}
    assert fine_tuning_command(state, "x.pt").startswith("fairseq-train DATA ")


@pytest.mark.parametrize("shared", [False, True])
def test_embeddings_are_shared_where_the_checkpoint_shares_them(shared, data, fine_tuned, tmp_path, caplog):
    """Otherwise one of two different tensors would silently overwrite the other."""
    flag = "--share-decoder-input-output-embed"
    sizes = tuple(word for word in TINY if word != flag)
    base = train(data / "bin", tmp_path / "base", "--arch", "transformer", *sizes, *[flag] * shared, updates=1)
    start = save(swap_as_drawn(base, attention="sinkhorn"), tmp_path)
    caplog.set_level("INFO")
    words = ("--arch", "sinkhorn_transformer", *sizes, *[flag] * (not shared), "--finetune-from-model", start)
    args, weights = fine_tuned(*words)
    assert args.share_decoder_input_output_embed is shared
    before = weights_of(start)
    assert all(torch.equal(value, before[name]) for name, value in weights.items())
    same = torch.equal(weights["decoder.embed_tokens.weight"], weights["decoder.output_projection.weight"])
    assert same is shared
    said = f"has {flag} True, which is kept" if shared else f"was trained without {flag}, which is kept"
    assert any(said in line for line in lines(caplog))


def test_sizes_that_no_weight_shows_are_kept(stock_checkpoint, fine_tuned, caplog):
    other = ("--encoder-attention-heads", 4, "--activation-fn", "gelu", "--no-scale-embedding")
    args, _ = fine_tuned("--arch", "lot_transformer", *TINY, *other, "--finetune-from-model", stock_checkpoint)
    assert (args.encoder_attention_heads, args.activation_fn, args.no_scale_embedding) == (2, "relu", False)
    said = "\n".join(lines(caplog))
    assert "--encoder-attention-heads 2, which is kept" in said and "--activation-fn relu, which is kept" in said


@pytest.fixture
def parsed(data, tmp_path):
    """A function that parses the flags of a training, without running it; it returns the arguments."""

    def parsed(*flags, arch="lot_transformer"):
        words = (data / "bin", "--user-dir", "fairseq_lot", "--arch", arch, *TINY, "--save-dir", tmp_path, *flags)
        return options.parse_args_and_arch(options.get_training_parser(), list(map(str, words)))

    return parsed


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("--decoder-attention-heads 4", 2),
        ("--no-token-positional-embeddings", False),
        ("--cross-self-attention --no-cross-attention", False),
        ("--decoder-normalize-before", False),
    ],
)
def test_each_size_that_no_weight_shows_is_kept(typed, value, stock_checkpoint, parsed):
    args = parsed(*typed.split(), "--finetune-from-model", stock_checkpoint)
    assert getattr(args, typed.split()[0][2:].replace("-", "_")) == value


def test_sites_in_another_order_are_the_same(everywhere, parsed, caplog):
    caplog.set_level("INFO")
    parsed("--finetune-from-model", everywhere, "--attention-sites", "decoder, encoder,cross")
    assert lines(caplog)[-1].endswith("which is kept")


def test_without_the_state_of_an_optimiser_parameters_may_change(lot_checkpoint, parsed):
    assert parsed("--restore-file", lot_checkpoint, "--lot-num-pivots", 7).lot_num_pivots == 7


def test_the_direction_is_kept_where_no_languages_are_typed(lot_checkpoint, parsed, tmp_path, caplog):
    with edited(lot_checkpoint, tmp_path / "reversed.pt") as state:
        state["cfg"]["task"].update(source_lang="en", target_lang="de")

    def languages(*typed):
        args = parsed("--finetune-from-model", tmp_path / "reversed.pt", *typed)
        return args.source_lang, args.target_lang

    assert languages() == ("en", "de") and "translates en to de, which is kept" in "\n".join(lines(caplog))
    assert languages("-s", "de", "-t", "en") == ("de", "en")


def test_typed_options_win_and_a_line_names_both_values(lot_checkpoint, fine_tuned, caplog):
    caplog.set_level("INFO")
    typed = ("--lot-num-pivots", 8, "--lot-epsilon", 0.5)
    args, weights = fine_tuned("--arch", "lot_transformer", *TINY, "--finetune-from-model", lot_checkpoint, *typed)
    assert (args.lot_num_pivots, args.lot_epsilon) == (8, 0.5)
    assert weights["encoder.layers.0.self_attn.mechanism.pivots"].shape[1] == 8
    (line,) = lines(caplog)
    assert "--lot-num-pivots 6 becomes 8" in line and "--lot-epsilon 1.0 becomes 0.5" in line and "drawn" in line
    assert "redrawn_attention" not in vars(args) and not take_mark(args)


def test_another_mechanism_has_to_be_typed(sinkhorn_checkpoint, fine_tuned, tmp_path, caplog):
    words = ("--arch", "lot_transformer", *TINY, "--finetune-from-model", sinkhorn_checkpoint)
    with pytest.raises(InputError) as caught:
        fine_tuned(*words)
    message = str(caught.value)
    assert all(way in message for way in ("--arch sinkhorn_transformer ", "--attention lot", "sinkhorn (epsilon"))
    assert not (tmp_path / "fine-tuned").exists()
    args, weights = fine_tuned(*words, "--attention", "lot", "--lot-num-pivots", 5)
    assert args.lot_num_pivots == 5 and weights["encoder.layers.0.self_attn.mechanism.pivots"].shape[1] == 5
    (line,) = lines(caplog)
    assert "--attention sinkhorn becomes lot" in line


def test_typing_the_default_number_of_slices_keeps_learnt_slices(stock_checkpoint, fine_tuned, tmp_path):
    """The default depends on the model: it is the width of a head."""
    start = swap_as_drawn(stock_checkpoint, attention="esp", esp_slicer="learnable")
    key = "encoder.layers.0.self_attn.mechanism.slices"
    start["model"][key] = 2 * start["model"][key]  # as after a calibration
    slices = start["model"][key].shape[1]
    words = ("--arch", "esp_transformer", *TINY, "--finetune-from-model", save(start, tmp_path))
    _, weights = fine_tuned(*words, "--esp-num-slices", slices)
    torch.testing.assert_close(weights[key], start["model"][key], atol=1e-6, rtol=0)


def test_parameters_of_another_mechanism_are_not_loaded_even_if_they_fit(lot_checkpoint, fine_tuned, tmp_path):
    """LOT and SeT have pivots of the same name and shape, but SeT's start as swap draws them."""
    key = "encoder.layers.1.self_attn.mechanism.pivots"
    with edited(lot_checkpoint, tmp_path / "lot.pt") as state:
        state["model"][key] = 2 * state["model"][key]  # because LOT and SeT draw the same pivots
    typed = ("--attention", "set", "--set-num-pivots", 6)
    _, weights = fine_tuned("--arch", "lot_transformer", *TINY, "--finetune-from-model", tmp_path / "lot.pt", *typed)
    expected = swap_as_drawn(lot_checkpoint, attention="set", set_num_pivots=6)["model"]
    assert torch.equal(weights[key], expected[key])
    assert weights[key].shape == state["model"][key].shape and not torch.equal(weights[key], state["model"][key])


def test_a_stock_model_sets_no_attention_and_a_line_says_so(stock_checkpoint, fine_tuned, caplog):
    args, _ = fine_tuned("--arch", "lot_transformer", *TINY, "--finetune-from-model", stock_checkpoint)
    assert args.attention == "lot"
    (line,) = lines(caplog)
    assert "fairseq's own attention" in line and "lot attention at encoder" in line


def test_a_resumed_training_keeps_its_attention(fine_tuned, tmp_path):
    """It continues from its folder's ``checkpoint_last.pt``, or from ``--restore-file``."""
    words = ("--arch", "lot_transformer_small", *SHALLOW)
    fine_tuned(*words, "--lot-num-pivots", 6, "--lot-epsilon", 0.5)
    last = tmp_path / "fine-tuned" / "checkpoint_last.pt"
    for folder, flags in (("elsewhere", ("--restore-file", last)), ("fine-tuned", ())):
        args, _ = fine_tuned(*words, *flags, updates=3, save=tmp_path / folder)
        assert (args.lot_num_pivots, args.lot_epsilon) == (6, 0.5)
        assert load_checkpoint(tmp_path / folder / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 3
    with pytest.raises(InputError, match="--lot-num-pivots 6 becomes 7.*--reset-optimizer"):
        fine_tuned(*words, "--lot-num-pivots", 7, updates=4)
    args, _ = fine_tuned(*words, "--lot-num-pivots", 7, "--reset-optimizer", updates=4)
    assert args.lot_num_pivots == 7


def test_a_stock_training_cannot_resume_with_attention_that_learns(stock_checkpoint, fine_tuned, tmp_path):
    start = (*TINY, "--restore-file", stock_checkpoint)
    with pytest.raises(InputError, match="fairseq's own attention; lot .* learns parameters.*--reset-optimizer"):
        fine_tuned("--arch", "lot_transformer", *start)
    fine_tuned("--arch", "sinkhorn_transformer", *start, "--reset-dataloader", updates=1)
    fine_tuned("--arch", "lot_transformer", *start, "--reset-optimizer", updates=1, save=tmp_path / "lot")


def test_a_differential_model_stays_one(data, fine_tuned, tmp_path):
    flags = ("--arch", "diff_transformer_small", *SHALLOW, "--differential-lambda-init", 0.3)
    base = train(data / "bin", tmp_path / "base", *flags, updates=2)
    for arch in ("diff_transformer_small", "softmax_transformer_small"):
        args, weights = fine_tuned("--arch", arch, *SHALLOW, "--finetune-from-model", base, save=tmp_path / arch)
        assert args.differential is True and args.differential_lambda_init == 0.3
        assert any("lambda_q1" in name for name in weights)


def test_a_plain_model_becomes_differential_when_that_is_typed(lot_checkpoint, fine_tuned):
    words = ("--arch", "diff_transformer", *TINY, "--finetune-from-model", lot_checkpoint)
    with pytest.raises(InputError, match="use --arch lot_transformer to keep it, or --differential to change it"):
        fine_tuned(*words)
    args, _ = fine_tuned(*words, "--differential")
    assert args.differential is True and (args.attention, args.lot_num_pivots) == ("lot", 6)


def test_a_fine_tuned_model_translates_when_its_start_is_gone(data, stock_checkpoint, fine_tuned, tmp_path):
    start = save(swap_as_drawn(stock_checkpoint, attention="sinkhorn", **SOFT), tmp_path)
    expected = hypotheses(generate(data / "bin", start))
    fine_tuned("--arch", "transformer_tiny", "--share-decoder-input-output-embed", "--lr", 0,
               "--finetune-from-model", start)  # fmt: skip
    start.write_text("another file by now")
    assert hypotheses(generate(data / "bin", tmp_path / "fine-tuned" / "checkpoint_last.pt")) == expected


def test_a_damaged_starting_checkpoint_is_refused_in_one_line(fine_tuned, tmp_path):
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(b"not a checkpoint\n")
    with pytest.raises(InputError, match="damaged.pt cannot be read as a checkpoint") as caught:
        fine_tuned("--arch", "lot_transformer_small", "--finetune-from-model", damaged)
    assert "\n" not in str(caught.value)


def test_hydra_has_to_repeat_the_attention(sinkhorn_checkpoint):
    """The test calls the function in which fairseq-hydra-train loads weights into the built model."""
    cfg = OmegaConf.create({
        "checkpoint_suffix": "", "restore_file": "checkpoint_last.pt", "save_dir": "nowhere", "continue_once": None,
        "finetune_from_model": str(sinkhorn_checkpoint), "optimizer_overrides": "{}",
        **{f"reset_{part}": False for part in ("optimizer", "lr_scheduler", "meters", "dataloader")},
    })  # fmt: skip

    class Loads(Exception):
        pass

    def load_checkpoint(*_, **__):
        raise Loads

    def start_training(name="lot_transformer", **model):
        cfg_of_all = FairseqConfig(model=OmegaConf.create({"_name": name, **model}))
        built = {"get_model": lambda: nn.Linear(1, 1), "load_checkpoint": load_checkpoint}
        trainer = SimpleNamespace(cfg=cfg_of_all, checkpoint_suffix="", **built)
        checkpoint_utils.load_checkpoint(cfg, trainer)

    expected = r"means lot attention.*\+model.attention=sinkhorn .*\+model.sinkhorn_epsilon=1"
    with pytest.raises(InputError, match=expected):
        start_training(attention="lot")
    with pytest.raises(Loads):
        start_training(attention="sinkhorn", **SOFT)
    with pytest.raises(InputError, match="the configuration means softmax"):
        start_training("transformer_iwslt_de_en")
    with pytest.raises(Loads):  # the attention of a language model is not ours
        start_training("transformer_lm")


@pytest.mark.parametrize(
    ("arch", "words", "option", "way_out"),
    [
        ("lot_transformer", ("--sinkhorn-epsilon", "1"), "--sinkhorn-epsilon", "--attention sinkhorn"),
        ("lot_transformer", ("--attention", "sinkhorn", "--lot-epsilon", "1"), "--lot-epsilon", "--attention lot"),
        ("diff_transformer", ("--esp-hard", "false"), "--esp-hard", "--attention esp"),
        ("lot_transformer", ("--differential-lambda-init", "0.5"), "--differential-lambda-init", "--differential"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(arch, words, option, way_out):
    with pytest.raises(InputError, match=f"^option {option} does not belong to .*; leave it out, or use {way_out}$"):
        options.parse_args_and_arch(options.get_training_parser(), ["data", "--arch", arch, *words])


def test_an_option_that_is_read_is_accepted_and_checkpoints_may_hold_others():
    words = "data --arch diff_transformer_small --attention esp --esp-hard --differential-lambda-init 0"
    args = options.parse_args_and_arch(options.get_training_parser(), words.split())
    assert args.esp_hard is True and args.differential is True and args.differential_lambda_init == 0
    in_memory.load("lot_transformer", sinkhorn_epsilon=1.0)  # early versions trained with such arguments
