"""Checkpoints that are damaged, have wrong types or try to run code: every command refuses them with one line."""

import os
import pickle
import subprocess
from argparse import Namespace

import pytest
import torch

from tests.end_to_end.conftest import edited, refuse, refuse_and_keep

COMMANDS = ("calibrate", "check", "diagnose", "report", "sweep", "swap", "translate")


def words_of(command, data, path, out):
    """The words of a command that reads the checkpoint ``path`` and writes only below ``out``."""
    return {
        "calibrate": ("calibrate", data, "--path", path, "--out", out / "o.pt"),
        "check": ("check", data, "--path", path),
        "diagnose": ("diagnose", data, "--path", path, "--json", out / "o.json"),
        "report": (
            *("report", "--data", data, "--path", path, "--out", out / "o.html"),
            *("--sentences", data.parent / "text" / "test.de", "--tokenised"),
        ),
        "sweep": ("sweep", data, "--path", path, "--out", out / "sweep", "--try", "lot", "--no-bleu"),
        "swap": ("swap", "--path", path, "--attention", "lot", "--no-calibrate", "--out", out / "o.pt"),
        "translate": ("translate", "ein satz", "--data", data, "--path", path, "--tokenised"),
    }[command]


def refuse_file(capsys, command, data, path, naming=()):
    refuse_and_keep(capsys, path.parent, *words_of(command, data / "bin", path, path.parent), naming=naming)


@pytest.mark.fast_if(lambda tenth, damage, command: tenth == 5 or command == "swap")
@pytest.mark.parametrize("damage, command", [*(("cut", command) for command in COMMANDS), ("overwritten", "swap")])
@pytest.mark.parametrize("tenth", range(10))
def test_files_damaged_at_each_tenth_are_refused(tenth, damage, command, data, stock_checkpoint, tmp_path, capsys):
    """The file is cut off there, or has 4 KiB of other bytes there, as after a disk error."""
    whole, path = stock_checkpoint.read_bytes(), tmp_path / "damaged.pt"
    start = len(whole) * tenth // 10
    path.write_bytes(whole[:start] + (b"" if damage == "cut" else b"\xa5" * 4096 + whole[start + 4096 :]))
    refuse_file(capsys, command, data, path, naming=[path])


def test_files_that_are_no_checkpoint_are_refused(data, tmp_path, capsys):
    path = tmp_path / "no.pt"
    refuse_file(capsys, "swap", data, path, naming=[path])
    refuse(capsys, "check", data / "bin", "--path", data / "bin", naming=[f"{data / 'bin'} is a folder"])
    path.write_bytes(b"not a checkpoint\n")
    refuse_file(capsys, "swap", data, path, naming=[path])
    path.write_bytes(pickle.dumps({"model": 1}))
    refuse_file(capsys, "swap", data, path, naming=[path])
    for content in ([1], {"cfg": {}}, {"model": {"w": torch.ones(1)}}, {"model": {"w": 1}}):
        torch.save(content, path)
        refuse_file(capsys, "swap", data, path, naming=[path])


@pytest.mark.parametrize("words", [("swap", "--no-calibrate", "--out"), ("diagnose", "data", "--json")])
def test_no_command_overwrites_the_checkpoint_that_it_reads(words, stock_checkpoint, capsys):
    words += (stock_checkpoint, "--path", stock_checkpoint)
    refuse_and_keep(capsys, stock_checkpoint.parent, *words, naming=["give another file"])


def in_model(**changes):
    """A change of the model's arguments."""
    return lambda state: [vars(state["cfg"]["model"]).update(changes)]


def set_weight(name, value):
    """A change of one weight."""
    return lambda state: state["model"].update({name: value})


# changes of a sound checkpoint that every command notices
WRONG = {
    "model-none": lambda state: state.update(model=None),
    "model-list": lambda state: state.update(model=[torch.ones(1)]),
    "model-text": lambda state: state.update(model="weights"),
    "model-empty": lambda state: state.update(model={}),
    "weight-number": set_weight("encoder.embed_tokens.weight", 1.0),
    "weight-of-no-rows": set_weight("encoder.embed_tokens.weight", torch.ones(())),
    "weight-name-number": set_weight(3, torch.ones(1)),
    "no-embedding": lambda state: state["model"].pop("encoder.embed_tokens.weight"),
    "cfg-text": lambda state: state.update(cfg="text"),
    "cfg-number": lambda state: state.update(cfg=5),
    "cfg-model-dict": lambda state: state["cfg"].update(model={"arch": "transformer"}),
    "cfg-model-none": lambda state: state["cfg"].update(model=None),
    "no-model-arguments": lambda state: state["cfg"].update(model=Namespace()),
    "arch-none": in_model(arch=None),
    "arch-number": in_model(arch=3),
    "arch-list": in_model(arch=["transformer"]),
    "arch-foreign": in_model(arch="lstm"),
    "layers-text": in_model(encoder_layers="two"),
    "layers-none": in_model(encoder_layers=None),
    "layers-negative": in_model(encoder_layers=-1),
    "heads-text": in_model(encoder_attention_heads="two"),
    "width-text": in_model(encoder_embed_dim="wide"),
    "positions-text": in_model(max_source_positions="many"),
}
# changes that only commands which build the model notice
WRONG_WHEN_BUILT = {
    "heads-zero": in_model(encoder_attention_heads=0),
    "weight-of-other-rows": set_weight("encoder.embed_tokens.weight", torch.ones(7, 64)),
    "attention-unknown": in_model(attention="magic", arch="lot_transformer"),
    "attention-number": in_model(attention=7, arch="lot_transformer"),
    "option-text": in_model(attention="lot", lot_num_pivots="many", arch="lot_transformer"),
    "weight-of-other-shape": set_weight("encoder.layers.0.fc1.weight", torch.ones(2, 2)),
    "weight-missing": lambda state: state["model"].pop("encoder.layers.0.fc1.weight"),
    "weight-unknown": set_weight("encoder.layers.0.magic", torch.ones(2)),
    "task-none": lambda state: state["cfg"].update(task=None),
    "task-number": lambda state: state["cfg"].update(task=7),
}


@pytest.mark.fast_if(lambda name, command: command == ("swap" if name in WRONG else "diagnose"))
@pytest.mark.parametrize(
    "name, command",
    [
        *((name, command) for name in WRONG for command in ("check", "diagnose", "swap")),
        *((name, command) for name in WRONG_WHEN_BUILT for command in ("calibrate", "diagnose")),
    ],
)
def test_wrong_types_and_models_that_cannot_be_built_are_refused(
    name, command, data, stock_checkpoint, tmp_path, capsys
):
    path = tmp_path / "wrong.pt"
    with edited(stock_checkpoint, path) as state:
        (WRONG | WRONG_WHEN_BUILT)[name](state)
    refuse_file(capsys, command, data, path, naming=[path] if name in WRONG else [])


@pytest.mark.parametrize("command", ("diagnose", "report", "swap", "calibrate"))
def test_weights_that_are_nan_are_refused(command, data, stock_checkpoint, tmp_path, capsys):
    path = tmp_path / "wrong.pt"
    with edited(stock_checkpoint, path) as state:
        state["model"]["decoder.layers.1.fc2.bias"].fill_(torch.nan)
    refuse_file(capsys, command, data, path, naming=[path, "decoder.layers.1.fc2.bias", "not finite"])


@pytest.mark.parametrize("command", ("diagnose", "report"))
def test_scores_that_overflow_are_refused(command, data, stock_checkpoint, tmp_path, capsys):
    path = tmp_path / "wrong.pt"
    with edited(stock_checkpoint, path) as state:
        for name in ("q", "k"):
            state["model"][f"encoder.layers.1.self_attn.{name}_proj.bias"].fill_(1e30)
    refuse_file(capsys, command, data, path, naming=[path, "encoder, layer 1", "is not finite"])


@pytest.mark.parametrize("command", ("report", "swap", "sweep", "translate"))
def test_predictions_that_overflow_are_refused(command, data, stock_checkpoint, tmp_path, capsys):
    path = tmp_path / "wrong.pt"
    with edited(stock_checkpoint, path) as state:
        state["model"]["decoder.layers.1.fc2.bias"].fill_(3e38)
    if command == "swap":  # the decoder is fitted on translations
        words = ["swap", "--path", path, "--attention", "lot", "--attention-sites", "decoder", "--out", tmp_path / "o"]
    else:
        words = [word for word in words_of(command, data / "bin", path, tmp_path) if word != "--no-bleu"]
    refuse_and_keep(capsys, tmp_path, *words, naming=["the model" if command == "swap" else path, "weights overflow"])


def test_a_loss_that_overflows_is_refused(data, stock_checkpoint, tmp_path, capsys):
    path = tmp_path / "wrong.pt"
    with edited(stock_checkpoint, path) as state:
        state["model"]["decoder.layers.1.fc2.bias"].fill_(3e38)
    words = words_of("sweep", data / "bin", path, tmp_path)
    refuse_and_keep(capsys, tmp_path, *words, naming=[f"{path} as softmax: the loss is nan; give another checkpoint"])


class Attack:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


ATTACKS = {
    "system": Attack(os.system, "touch executed"),
    "eval": Attack(eval, "open('executed', 'w')"),
    "exec": Attack(exec, "open('executed', 'w')"),
    "open": Attack(open, "executed", "w"),
    "mkdir": Attack(os.mkdir, "executed"),
    "process": Attack(subprocess.Popen, ["touch", "executed"]),
}
PLACES = {
    "whole": lambda state, attack: attack,
    "weights": lambda state, attack: {**state, "model": attack},
    "one-weight": lambda state, attack: {**state, "model": {**state["model"], "more": attack}},
    "arguments": lambda state, attack: {**state, "args": attack},
    "optimiser": lambda state, attack: {**state, "last_optimizer_state": attack},
    "key": lambda state, attack: {**state, "extra_state": {"list": [attack]}},
}


@pytest.mark.fast_if(lambda name, place, form: name == "system" or (place, form) == ("whole", "zip"))
@pytest.mark.parametrize("form", ("zip", "legacy", "pickle"))
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ATTACKS)
def test_code_is_refused_and_not_run(name, place, form, data, stock_checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "attack.pt"
    state = PLACES[place](torch.load(stock_checkpoint, weights_only=True), ATTACKS[name])
    if form == "pickle":
        path.write_bytes(pickle.dumps(state, protocol=2))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "zip")
    command = COMMANDS[list(PLACES).index(place) % len(COMMANDS)]
    naming = [path] if form == "pickle" else [f"{path} contains objects other than tensors and settings"]
    refuse_file(capsys, command, data, path, naming=naming)
    assert not os.path.exists("executed")
