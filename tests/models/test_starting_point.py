"""What a training inherits from a checkpoint; it is decided from arguments alone, without a file or a model."""

import copy
import dataclasses
import logging
from argparse import ArgumentParser, Namespace

import pytest

from fairseq_lot.errors import InputError
from fairseq_lot.models.model_attention import completed
from fairseq_lot.models.saved import Saved
from fairseq_lot.models.starting_point import Defaults, mark_parsed, plan, starting_point, take_mark
from fairseq_lot.modules.flat_options import set_defaults

SIZES = {"embed_dim": 8, "ffn_embed_dim": 8, "layers": 1, "attention_heads": 2}
MODEL = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()}
LOT = Defaults({"attention": "lot"}, lambda args: set_defaults(args, MODEL))
STOCK, DIFFERENTIAL = Defaults({}, LOT.size), Defaults({"differential": True}, LOT.size)
INFO, WARNING = logging.INFO, logging.WARNING


def saved(path="base.pt", *, has_optimiser=False, task=None, **model):
    own = {"arch": "lot_transformer", "attention": "lot", "lot_num_pivots": 3, **MODEL, **model}
    args = Namespace(**own)
    return Saved(path, completed(args) if args.attention else args, task or {}, has_optimiser)


def typed(arch="lot_transformer", *, start="base.pt", **options):
    """The command line of a fine-tuning, or with ``start=None`` of a training that is resumed."""
    own = {"arch": arch, "finetune_from_model": start, "reset_optimizer": False, "reset_dataloader": False}
    return Namespace(**own | options)


def attention_of(inherited):
    """The values of our options, without the sizes."""
    return {name: value for name, value in inherited.values.items() if name.startswith(("attention", "lot_"))}


def test_nothing_is_changed_until_it_is_applied(caplog):
    caplog.set_level("INFO")
    checkpoint, args = saved(), typed()
    before = copy.deepcopy((checkpoint, args))
    inherited = plan(checkpoint, args, LOT)
    assert (checkpoint, args) == before and not caplog.records
    with pytest.raises(dataclasses.FrozenInstanceError):
        inherited.values = {}
    inherited.apply(args)
    assert (args.attention, args.lot_num_pivots, args.encoder_layers) == ("lot", 3, 1)
    assert [record.getMessage() for record in caplog.records] == [note for _, note in inherited.notes]


def test_attention_sites_and_options_are_kept():
    inherited = plan(saved(attention_sites="encoder,cross", lot_epsilon=0.5), typed(), LOT)
    kept = {"attention": "lot", "attention_sites": "encoder,cross", "lot_num_pivots": 3, "lot_epsilon": 0.5}
    assert kept.items() <= attention_of(inherited).items() and inherited.has_attention
    (level, note) = inherited.notes[-1]
    assert level == INFO
    assert note == "base.pt has lot (num_pivots=3, epsilon=0.5) attention at encoder,cross, which is kept"


def test_typed_options_win_with_a_warning():
    inherited = plan(saved(), typed(lot_num_pivots=4, lot_epsilon=0.5), LOT)
    assert not {"lot_num_pivots", "lot_epsilon"} & inherited.values.keys()
    assert inherited.values["redrawn_attention"] == {
        "encoder.layers.self_attn.mechanism." + x for x in ("pivots", "mass_logits")
    }
    (level, note) = inherited.notes[-1]
    assert level == WARNING and "--lot-num-pivots 3 becomes 4, --lot-epsilon 1.0 becomes 0.5" in note
    assert note.endswith("parameters that are new or of another shape are drawn")


def test_the_parameters_of_another_mechanism_are_redrawn():
    """Both mechanisms have pivots of the same name and shape."""
    inherited = plan(saved(), typed(attention="set", set_num_pivots=3), LOT)
    assert "encoder.layers.self_attn.mechanism.pivots" in inherited.values["redrawn_attention"]
    assert "lot_num_pivots" not in inherited.values


@pytest.mark.parametrize(
    ("checkpoint", "args", "defaults", "words"),
    [
        ({"attention": "sinkhorn"}, {}, LOT, "use --arch sinkhorn_transformer to keep it, or --attention lot"),
        (
            {},
            {},
            Defaults({"differential": True}, LOT.size),
            "use --arch lot_transformer to keep it, or --differential",
        ),
        (
            {"has_optimiser": True},
            {"start": None, "lot_num_pivots": 4},
            LOT,
            "--lot-num-pivots 3 becomes 4.*--reset-",
        ),
        ({"attention": None, "has_optimiser": True}, {"start": None}, LOT, "own attention; lot .* learns.*--reset-"),
        ({"arch": "transformer"}, {}, LOT, "lot attention under the name of fairseq's own architecture transformer"),
        ({}, {"keep_softmax": "encoder.0"}, LOT, "^base.pt: lot .* was trained at encoder, so there is no softmax"),
    ],
)
def test_command_lines_that_contradict_the_checkpoint_are_refused(checkpoint, args, defaults, words):
    with pytest.raises(InputError, match=words):
        plan(saved(**checkpoint), typed(**args), defaults)


@pytest.mark.parametrize("args", [{"reset_optimizer": True, "start": None}, {"start": "base.pt"}])
def test_without_the_optimiser_s_state_parameters_may_change(args):
    plan(saved(has_optimiser=True), typed(lot_num_pivots=4, **args), LOT)
    plan(saved(attention=None, has_optimiser=True), typed(**args), LOT)


def test_fairseq_s_own_attention_is_not_inherited():
    inherited = plan(saved(attention=None), typed(), LOT)
    assert not inherited.has_attention and not attention_of(inherited)
    assert inherited.notes[-1][0] == WARNING and "own attention; trained is lot attention" in inherited.notes[-1][1]
    assert plan(saved(attention=None), typed(), STOCK).notes == ()


def test_sizes_are_kept_by_a_fine_tuning_alone():
    wide = saved(encoder_layers=2, encoder_ffn_embed_dim=16, dropout=0.4)
    inherited = plan(wide, typed(encoder_ffn_embed_dim=32), LOT)
    assert (
        inherited.values["encoder_layers"] == 2 and not {"encoder_ffn_embed_dim", "dropout"} & inherited.values.keys()
    )
    assert inherited.notes[0] == (INFO, "base.pt has --encoder-layers 2, which is kept")
    assert plan(wide, typed(start=None), LOT).values["encoder_layers"] == 1


@pytest.mark.parametrize("there", [True, False])
def test_flags_that_no_weight_shows_are_kept(there):
    flags = {"share_decoder_input_output_embed": not there, "decoder_normalize_before": not there}
    model = dict.fromkeys(flags, there)
    inherited = plan(saved(**model), typed(start=None, **flags), LOT)
    assert model.items() <= inherited.values.items()
    how = "with" if there else "without"
    assert inherited.notes[:2] == (
        (WARNING, f"base.pt was trained {how} --share-decoder-input-output-embed, which is kept"),
        (WARNING, f"base.pt was trained with --decoder-normalize-before {there}, which is kept"),
    )


@pytest.mark.parametrize(
    ("languages", "of_training", "args", "kept"),
    [
        (("de", "en"), ("en", "de"), {}, True),
        (("de", "en"), ("de", "en"), {}, False),
        (("de", "en"), ("en", "de"), {"source_lang": "de", "target_lang": "en"}, False),
        ((None, None), ("en", "de"), {}, False),
        (("de", "en"), (None, None), {}, False),
    ],
)
def test_the_direction_is_kept_where_the_data_say_the_opposite(languages, of_training, args, kept):
    task = dict(zip(("source_lang", "target_lang"), of_training, strict=True))
    inherited = plan(saved(task=task), typed(**args), LOT, languages)
    assert (task.items() <= inherited.values.items()) is kept
    assert ((WARNING, "base.pt translates en to de, which is kept") in inherited.notes) is kept


@pytest.mark.parametrize(
    ("args", "again"), [({}, True), ({"start": None}, False), ({"start": None, "reset_dataloader": True}, True)]
)
def test_annealing_begins_again_with_the_epochs(args, again):
    esp = saved(attention="esp", esp_anneal=0.5)
    inherited = plan(esp, typed("esp_transformer", **args), Defaults({"attention": "esp"}, LOT.size))
    assert any("annealing begins again" in note for _, note in inherited.notes) is again


def test_a_command_line_is_known_by_the_mark_of_its_parser():
    parser = ArgumentParser()
    mark_parsed(parser.add_argument_group("model"))
    args = parser.parse_args([])
    assert take_mark(args) and not vars(args) and not take_mark(args)


def test_arguments_without_options_of_checkpoints_have_no_starting_point():
    assert starting_point(Namespace(arch="lot_transformer")) is None
