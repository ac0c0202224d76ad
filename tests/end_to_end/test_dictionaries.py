"""A dictionary with the same pieces in another order fits every weight, but every command refuses it."""

import random
import shutil

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset
from fairseq_cli.validate import cli_main as fairseq_validate

from fairseq_lot import Translator, calibrate, cli
from fairseq_lot.errors import InputError
from fairseq_lot.experiment import score
from fairseq_lot.models.dictionaries import check_dictionaries, fingerprint
from fairseq_lot.plug_and_play.swap import swap_as_drawn
from fairseq_lot.pretrained import pairs
from fairseq_lot.pretrained.checkpoint import load_checkpoint
from tests.end_to_end.conftest import (
    command,
    contents,
    edited,
    fairseq_lot,
    generate,
    in_this_process,
    refuse,
    refuse_and_keep,
    swapped,
    train,
)

NAMES = ("source_fingerprint", "target_fingerprint")
FIT = ("--steps", 2, "--joint-steps", 1, "--held-out", 8)


def reorder(folder, *languages):
    """Shuffle the dictionaries of a data folder, and encode its text with them."""
    for language in languages:
        file = folder / f"dict.{language}.txt"
        before, lines = Dictionary.load(str(file)), file.read_text(encoding="utf-8").splitlines(keepends=True)
        random.Random(1).shuffle(lines)
        file.write_text("".join(lines), encoding="utf-8")
        after = Dictionary.load(str(file))
        new = np.array([after.index(symbol) for symbol in before.symbols])
        for part in folder.glob(f"*.{language}.bin"):
            dtype = MMapIndexedDataset(str(part.with_suffix("")))._index.dtype
            new[np.fromfile(part, dtype)].astype(dtype).tofile(part)


@pytest.fixture(scope="module")
def reordered(data, tmp_path_factory):
    """The corpus of ``data``, encoded with shuffled dictionaries."""
    home = tmp_path_factory.mktemp("reordered")
    for name in ("bin", "text", "raw"):
        shutil.copytree(data / name, home / name)
    reorder(home / "bin", "de", "en")
    return home


def moved(checkpoint, out, *, fingerprints):
    """A checkpoint whose training data are not here; without fingerprints it is like one that fairseq alone wrote."""
    with edited(checkpoint, out) as state:
        state.settings("task")["data"] = "not/here"
        for name in () if fingerprints else NAMES:
            vars(state["cfg"]["model"]).pop(name, None)
    return out


@pytest.fixture(scope="module")
def ours(lot_checkpoint, tmp_path_factory):
    """A checkpoint with fingerprints, whose training data are not here."""
    return moved(lot_checkpoint, tmp_path_factory.mktemp("ours") / "ours.pt", fingerprints=True)


@pytest.fixture(scope="module")
def foreign(data, tmp_path_factory):
    """A stock model without fingerprints that has learnt which pieces follow each other."""
    folder = tmp_path_factory.mktemp("foreign")
    flags = ("--arch", "transformer_tiny", "--share-decoder-input-output-embed", "--lr", "5e-3")
    return moved(train(data / "bin", folder, *flags, updates=200), folder / "foreign.pt", fingerprints=False)


@pytest.mark.parametrize("entry", [generate, "validate", "hub"])
def test_fairseq_s_commands_refuse_another_order(entry, data, reordered, ours, tmp_path):
    def run(folder):
        if entry == "hub":
            import fairseq_lot.models.pluggable_transformer as models

            names = {"data_name_or_path": str(folder), "checkpoint_file": ours.name}
            models.PluggableTransformerModel.from_pretrained(str(ours.parent), **names)
        elif entry == "validate":
            words = (folder, "--task", "translation", "-s", "de", "-t", "en", "--path", ours, "--valid-subset", "valid")
            words += ("--batch-size", 64, "--num-workers", 0, "--cpu", "--user-dir", "fairseq_lot")
            in_this_process(fairseq_validate, *words)
        else:
            generate(folder, ours)

    run(data / "bin")
    with pytest.raises(InputError, match=r"/dict\.de\.txt has other pieces .* of ours\.pt|/ours\.pt, or the same in"):
        run(reordered / "bin")


def test_the_commands_themselves_end_with_one_line(reordered, ours):
    words = (
        "fairseq-interactive",
        reordered / "bin",
        "-s",
        "de",
        "-t",
        "en",
        "--path",
        ours,
        "--user-dir",
        "fairseq_lot",
    )
    done = command(*words, check=False)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("fairseq_lot: error: ")
    assert "Traceback" not in done.stderr and str(ours) in done.stderr


def test_a_smaller_dictionary_is_refused_in_one_line_too(data, ours, tmp_path):
    shutil.copytree(data / "bin", tmp_path / "bin")
    lines = (tmp_path / "bin" / "dict.en.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "bin" / "dict.en.txt").write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(InputError, match=r"dict\.en\.txt has other pieces"):
        generate(tmp_path / "bin", ours)


@pytest.mark.parametrize("arch", ["pluggable_transformer", "transformer_tiny"])
@pytest.mark.parametrize("option", ["--finetune-from-model", "--restore-file"])
def test_a_training_refuses_to_start_from_another_order(option, arch, reordered, ours, tmp_path):
    save = tmp_path / "save"
    reset = () if option == "--finetune-from-model" else ("--reset-optimizer", "--reset-dataloader", "--reset-meters")
    with pytest.raises(InputError, match=f"dict.de.txt has other pieces than that of the training of {ours}, or the"):
        train(reordered / "bin", save, "--arch", arch, option, ours, *reset, updates=1)
    assert not save.exists() or list(save.iterdir()) == []


def test_a_resumed_training_refuses_another_order(data, reordered, tmp_path):
    flags = ("--arch", "lot_transformer_small")
    train(data / "bin", tmp_path, *flags, updates=1)
    with pytest.raises(InputError, match="checkpoint_last.pt, or the same in another order"):
        train(reordered / "bin", tmp_path, *flags, updates=2)
    train(data / "bin", tmp_path, *flags, updates=2)


def words_of(name, data, path, out):
    """The words of a command that reads ``data`` with the model at ``path`` and writes to ``out``."""
    fit = ("--attention", "lot", *FIT, "--out", out / "swapped.pt")
    lines = ("--data", data, "--path", path)
    return {
        "check": ("check", data, "--path", path),
        "sweep": ("sweep", data, "--path", path, "--out", out / "sweep", "--try", "esp", "--beam", 1),
        "diagnose": ("diagnose", data, "--path", path, "--sentences", 5),
        "swap": ("swap", "--path", path, "--calibrate", data, *fit),
        "report": ("report", *lines, "--split", "test", "--out", out / "page.html"),
        "translate": ("translate", *lines, "das"),
    }[name]


@pytest.mark.parametrize("name", ["check", "sweep", "diagnose", "swap", "report", "translate"])
def test_our_commands_refuse_another_order(name, data, reordered, stock_checkpoint, tmp_path, capsys):
    path = moved(stock_checkpoint, tmp_path / "stock.pt", fingerprints=True)
    words = words_of(name, reordered / "bin", path, tmp_path)
    refuse_and_keep(capsys, tmp_path, *words, naming=["dict.de.txt has other pieces", "in another order", path])


@pytest.mark.parametrize("name", ["check", "sweep", "diagnose", "swap", "report"])
def test_a_foreign_model_that_is_sure_of_the_wrong_pieces_is_refused(name, reordered, foreign, tmp_path, capsys):
    words = words_of(name, reordered / "bin", foreign, tmp_path)
    refuse_and_keep(capsys, tmp_path, *words, naming=[foreign, "cannot predict the targets in", "--srcdict"])


@pytest.mark.parametrize("model", ["foreign", "ours"])
def test_nothing_is_scored_on_another_order(model, reordered, foreign, ours, tmp_path, capsys):
    label = '{"system": "softmax", "settings": {"attention": "softmax"}, "stage": "base"}'
    path = {"foreign": foreign, "ours": ours}[model]
    words = [str(word) for word in (path, reordered / "bin", tmp_path / "out", "-", label)]
    assert cli.run(score.build_parser, words, "score.sh") == 2
    said = capsys.readouterr().err
    assert {"foreign": "cannot predict the targets in", "ours": "dict.de.txt has other pieces"}[model] in said
    assert said.count("\n") == 1 and contents(tmp_path) == {}


@pytest.mark.parametrize("name", ["check", "diagnose", "swap"])
def test_a_foreign_model_is_let_through_with_its_own_dictionaries(name, data, foreign, tmp_path, capsys):
    capsys.readouterr()
    fairseq_lot(*words_of(name, data / "bin", foreign, tmp_path))
    err = capsys.readouterr().err
    assert "dict.en.txt fits; for dict.de.txt the loss is inconclusive" in err, "it reads no source after 200 updates"


def test_the_base_of_a_sweep_is_measured_once(data, foreign, tmp_path, capsys):
    words = words_of("sweep", data / "bin", foreign, tmp_path)
    fairseq_lot(*words, "--try", "lot", "--no-calibration", "--no-bleu")
    assert capsys.readouterr().err.count("the loss is inconclusive") == 1


def test_the_measured_loss_is_that_of_the_base_s_softmax(data, reordered, foreign, tmp_path, capsys, monkeypatch):
    """The loss of a swapped model may be high whatever the dictionaries are."""
    found, measure = [], pairs.measure
    monkeypatch.setattr(pairs, "measure", lambda *args, **how: found.append(measure(*args, **how)) or found[-1])
    path = swapped(foreign, tmp_path / "swapped.pt", "lot", "--attention-sites", "encoder,cross,decoder")
    for checkpoint in (foreign, path):
        fairseq_lot("check", data / "bin", "--path", checkpoint)
    assert found[0].model == pytest.approx(found[1].model, abs=1e-5)
    capsys.readouterr()
    refuse(capsys, "check", reordered / "bin", "--path", path, naming=["cannot predict"])


def test_a_model_of_few_updates_is_not_refused(data, reordered, tmp_path, capsys):
    """With either order its loss is near the entropy of its predictions: a line says that nothing can be known."""
    flags = ("--arch", "transformer_tiny", "--share-decoder-input-output-embed")
    young = moved(train(data / "bin", tmp_path, *flags, updates=1), tmp_path / "young.pt", fingerprints=False)
    for folder in (data, reordered):
        capsys.readouterr()
        fairseq_lot("check", folder / "bin", "--path", young)
        out, err = capsys.readouterr()
        assert err.count("\n") == 1 and f"{young}: it is not known whether {folder / 'bin'} has the dictionaries" in err


def test_without_targets_a_line_says_that_nothing_was_compared(data, foreign, capsys):
    capsys.readouterr()
    Translator(foreign, data / "bin", tokenised=True)
    assert "there are no pairs of sentences to try it on" in capsys.readouterr().err


def test_the_data_folder_of_the_training_stands_in_for_fingerprints(data, reordered, foreign, tmp_path, capsys):
    """If its dictionaries can be compared, the loss of a model without fingerprints is not measured."""
    with edited(foreign, tmp_path / "known.pt") as state:
        state.settings("task")["data"] = str(data / "bin")
    shutil.copytree(data / "bin", tmp_path / "copy")
    capsys.readouterr()
    fairseq_lot("check", tmp_path / "copy", "--path", tmp_path / "known.pt")
    assert capsys.readouterr().err == ""
    refuse(
        capsys, "check", reordered / "bin", "--path", tmp_path / "known.pt", naming=["than the one in", data / "bin"]
    )


def prints(checkpoint):
    """The source and target fingerprints of a checkpoint; None where it has none."""
    return tuple(getattr(load_checkpoint(checkpoint).model_args, name, None) for name in NAMES)


def test_every_checkpoint_of_ours_carries_fingerprints(data, stock_checkpoint, foreign, tmp_path):
    expected = (fingerprint(Dictionary.load(str(data / "bin" / "dict.de.txt"))),) * 2
    assert prints(stock_checkpoint) == expected
    plugged = swap_as_drawn(stock_checkpoint, attention="lot", lot_num_pivots=4)
    fitted = calibrate(plugged, steps=1, joint_steps=0, held_out=2, device="cpu").state
    torch.save(fitted, tmp_path / "fitted.pt")
    tuned = train(
        data / "bin", tmp_path / "tuned", "--arch", "pluggable_transformer", "--finetune-from-model",
        tmp_path / "fitted.pt", updates=1,
    )  # fmt: skip
    assert prints(plugged) == prints(fitted) == prints(tuned) == expected
    assert all(type(value) is str for value in prints(tuned)), "plain, so that fairseq alone reads the file"
    with edited(foreign, tmp_path / "found.pt") as state:
        state.settings("task")["data"] = str(data / "bin")
    assert prints(foreign) == prints(swap_as_drawn(foreign, attention="lot")) == (None, None), (
        "nothing tells its dictionaries"
    )
    found = swap_as_drawn(tmp_path / "found.pt", attention="lot")
    assert prints(found) == expected, "they were found in the folder of its training"
    assert prints(tmp_path / "found.pt") == (None, None), "what is swapped is not changed"


def test_fingerprints_ignore_counts_and_differ_by_side(data, tmp_path):
    first, counted, other = Dictionary(), Dictionary(), Dictionary()
    for symbol, count in zip("abc", (5, 3, 1), strict=True):
        first.add_symbol(symbol, n=count)
        counted.add_symbol(symbol)
    for symbol in "acb":
        other.add_symbol(symbol)
    assert fingerprint(first) == fingerprint(counted) != fingerprint(other)

    class Task:
        source_dictionary, target_dictionary = other, first
        cfg = type("cfg", (), {"data": "folder", "source_lang": "de", "target_lang": "en"})

    args = type("args", (), {"source_fingerprint": fingerprint(first), "target_fingerprint": fingerprint(other)})
    with pytest.raises(InputError, match="folder/dict.de.txt has other pieces than that of the training of here.pt"):
        check_dictionaries(args, Task, "here.pt")  # exchanged
    args.source_fingerprint, args.target_fingerprint = args.target_fingerprint, args.source_fingerprint
    check_dictionaries(args, Task, "here.pt")
