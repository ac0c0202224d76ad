"""A training ends with one line that says why, if the checkpoint that it starts from does not fit."""

import shutil

import pytest

from fairseq_lot.errors import InputError
from tests.end_to_end.conftest import command, edited, train

SIZES = [
    ("stock_checkpoint", "transformer_tiny", ("--encoder-ffn-embed-dim", 32), "--encoder-ffn-embed-dim 64 (here 32)"),
    ("stock_checkpoint", "transformer_tiny", ("--encoder-learned-pos",), "--encoder-learned-pos False (here True)"),
    ("lot_checkpoint", "lot_transformer", ("--encoder-layers", 3), "--encoder-layers 2 (here 3)"),
]


def refused(*words):
    """Run fairseq-train, which must refuse; return its one-line message."""
    with pytest.raises(InputError) as caught:
        train(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("start", ["--restore-file", "--finetune-from-model"])
@pytest.mark.parametrize("base, arch, flags, expected", SIZES, ids=lambda value: str(value)[:20])
def test_sizes_that_differ_are_named(start, base, arch, flags, expected, data, tmp_path, request):
    checkpoint = request.getfixturevalue(base)
    line = refused(data / "bin", tmp_path, "--arch", arch, start, checkpoint, *flags)
    assert line.startswith(f"{checkpoint} does not fit this model: it has ") and expected in line
    assert ("--finetune-from-model" in line) == (start == "--restore-file")


@pytest.mark.parametrize("start", ["--restore-file", "--finetune-from-model"])
def test_another_dictionary_is_named(start, data, stock_checkpoint, tmp_path):
    """The checkpoint has no fingerprints, like those that fairseq alone writes."""
    with edited(stock_checkpoint, tmp_path / "foreign.pt") as state:
        for side in ("source", "target"):
            vars(state["cfg"]["model"]).pop(f"{side}_fingerprint", None)
    smaller = shutil.copytree(data / "bin", tmp_path / "bin")
    for language in ("de", "en"):
        path = smaller / f"dict.{language}.txt"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-20]))
    line = refused(smaller, tmp_path / "out", "--arch", "transformer_tiny", start, tmp_path / "foreign.pt")
    assert f"foreign.pt was trained with 288 symbols, but {smaller}/dict.de.txt has 268; use the data" in line


@pytest.mark.parametrize(
    "flags, expected",
    [
        (("--restore-file", "BASE", "--criterion", "label_smoothed_cross_entropy"), "please reset the optimizer"),
        (("--restore-file", "BASE", "--optimizer", "sgd"), "please reset the optimizer"),
        (("--finetune-from-model", "BASE", "--reset-optimizer"), "can not be set together"),
        (("--finetune-from-model", "BASE", "--restore-file", "BASE"), "can not be specified together"),
        (("--finetune-from-model", "nowhere.pt"), "nowhere.pt does not exist"),
    ],
    ids=str,
)
def test_contradictory_flags_are_refused_in_one_line(flags, expected, data, stock_checkpoint, tmp_path):
    flags = [stock_checkpoint if word == "BASE" else word for word in flags]
    line = refused(data / "bin", tmp_path, "--arch", "transformer_tiny", "--share-decoder-input-output-embed", *flags)
    assert expected in line and len(line) < 400


def test_the_command_ends_with_exit_code_2(data, stock_checkpoint, tmp_path):
    words = ("fairseq-train", data / "bin", "--user-dir", "fairseq_lot", "--arch", "transformer_tiny", "--cpu")
    words += ("--restore-file", stock_checkpoint, "--encoder-learned-pos", "--optimizer", "adam", "--max-tokens", 400)
    done = command(*words, "--save-dir", tmp_path / "out", check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"fairseq_lot: error: {stock_checkpoint} does not fit this model")
    assert not list(tmp_path.rglob("*.pt"))


def test_importing_the_models_registers_them(tmp_path):
    code = "import fairseq_lot.models, fairseq.models; print('lot_transformer' in fairseq.models.ARCH_MODEL_REGISTRY)"
    assert command("python", "-c", code, cwd=tmp_path).stdout.split()[-1] == "True"
