"""A tiny synthetic data folder, tiny trained models, and functions that run the real commands as a user does."""

import contextlib
import io
import itertools
import lzma
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq_cli.generate import cli_main as fairseq_generate
from fairseq_cli.preprocess import cli_main as fairseq_preprocess
from fairseq_cli.train import cli_main as fairseq_train

from fairseq_lot import cli
from fairseq_lot.pretrained.checkpoint import Checkpoint, load_checkpoint
from tests.conftest import ROOT

# flags that give our architectures the sizes of transformer_tiny
TINY = ("--encoder-embed-dim", 64, "--encoder-ffn-embed-dim", 64, "--encoder-layers", 2, "--decoder-layers", 2)
TINY += ("--encoder-attention-heads", 2, "--decoder-attention-heads", 2, "--share-decoder-input-output-embed")
BIN = Path(sys.executable).parent


def command(*words, check=True, **options):
    """Run a console script of this environment; return the finished process with its text output."""
    words = [str(BIN / words[0]), *map(str, words[1:])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, **options)
    if check:
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def fairseq_lot(*words):
    """Run fairseq-lot in this process, seconds faster than in a new one, which has to import torch and fairseq."""
    assert cli.main([str(word) for word in words]) == 0


def refuse(capsys, *words, naming=()):
    """Run fairseq-lot in this process; it must refuse with one line, which is returned."""
    try:
        code = cli.main([str(word) for word in words])
    except SystemExit as stop:  # argparse
        code = stop.code
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and len(lines) == 1, (code, lines)
    for name in naming:
        assert str(name) in lines[0], lines[0]
    return lines[0]


def contents(folder):
    """Every file below a folder with its bytes."""
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def refuse_and_keep(capsys, folder, *words, naming=()):
    """Run fairseq-lot in this process; it must refuse with one line, and no file in the folder appears or changes."""
    before = contents(folder)
    refuse(capsys, *words, naming=naming)
    assert contents(folder) == before


def in_this_process(main, *words):
    """Run the entry point of a fairseq command in this process; return its standard output."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "argv", [main.__module__.replace("fairseq_cli.", "fairseq-"), *map(str, words)])
        main()
    return output.getvalue()


def train(data, save, *flags, updates=20, launcher=(), languages=("-s", "de", "-t", "en")):
    """Run fairseq-train for a few updates, in this process unless a launcher is given; return the last checkpoint."""
    words = (
        data, *languages, "--save-dir", save, "--cpu", "--distributed-world-size", 1,
        "--num-workers", 0,
        "--max-update", updates, "--optimizer", "adam", "--lr", "1e-3", "--max-tokens", 400, "--seed", 1,
        "--no-epoch-checkpoints", "--disable-validation", "--user-dir", "fairseq_lot", *flags,
    )  # fmt: skip
    if launcher:
        command(*launcher, *words)
    else:
        in_this_process(fairseq_train, *words)
    return Path(save) / "checkpoint_last.pt"


def swapped(checkpoint, out, attention, *options):
    """Swap a checkpoint's attention as drawn, without calibration; return ``out``."""
    fairseq_lot("swap", "--path", checkpoint, "--attention", attention, *options, "--no-calibrate", "--out", out)
    return out


def weights_of(checkpoint):
    """The weights by name, without fairseq's uninitialised buffer and without the buffer that marks a swap."""
    weights = load_checkpoint(checkpoint)["model"]
    return {name: x for name, x in weights.items() if not name.endswith(("._float_tensor", ".is_plugged_in"))}


def differing(one, other):
    """The names of the weights that differ between two checkpoints; both must list the same names in one order."""
    one, other = weights_of(one), weights_of(other)
    assert list(one) == list(other)
    return {name for name, value in one.items() if not torch.equal(value, other[name])}


@contextlib.contextmanager
def edited(checkpoint, out):
    """Context manager: yields the contents of a checkpoint, which the caller changes; then saves them to ``out``."""
    state = Checkpoint(torch.load(checkpoint, weights_only=True))
    yield state
    torch.save(state, out)


def generate(data, checkpoint, *flags):
    """Run fairseq-generate on the test set in this process; return its standard output."""
    return in_this_process(
        fairseq_generate, data, "-s", "de", "-t", "en", "--path", checkpoint, "--user-dir", "fairseq_lot", "--cpu",
        "--beam", 3, "--remove-bpe", "sentencepiece", "--max-len-b", 20, "--batch-size", 64, "--num-workers", 0,
        *flags,
    )  # fmt: skip


@contextlib.contextmanager
def dtypes_of(kind):
    """Context manager: collects the dtypes of the outputs of all modules of a class, in every model."""
    seen = set()

    def look(module, args, output):
        if isinstance(module, kind):
            seen.add((output[0] if isinstance(output, tuple) else output).dtype)

    handle = torch.nn.modules.module.register_module_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def fields(output, kind):
    """``{sentence: fields}`` from the last line of a kind (such as ``H``) of each sentence, in the corpus's order."""
    rows = [line.split("\t") for line in output.splitlines() if re.match(rf"{kind}-\d", line)]
    return dict(sorted((int(name[2:]), values) for name, *values in rows))


def hypotheses(output):
    """The H- and P- lines of fairseq-generate: translations with the score of every token."""
    return sorted(line for line in output.splitlines() if line.startswith(("H-", "P-")))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A preprocessed corpus: 300 synthetic sentences for training, 60 for validation and 60 for testing."""
    home = tmp_path_factory.mktemp("data")
    (home / "raw").mkdir()
    for file in (ROOT / "tests" / "synthetic").glob("*.xz"):
        with lzma.open(file) as lines:
            first = itertools.islice(lines, 300 if file.name.startswith("train") else 60)
            (home / "raw" / file.stem).write_bytes(b"".join(first))
    pair = ("--source", "de", "--target", "en")
    fairseq_lot("tokenise", "--raw", home / "raw", "--out", home / "text", "--no-clean", *pair)
    fairseq_lot("encode", "--text", home / "text", "--out", home / "bpe", "--vocab-size", 300, *pair)
    prefixes = [word for split in ("train", "valid", "test") for word in (f"--{split}pref", home / "bpe" / split)]
    words = ("-s", "de", "-t", "en", "--joined-dictionary", "--destdir", home / "bin", *prefixes)
    in_this_process(fairseq_preprocess, *words)
    shutil.copy(home / "bpe" / "sentencepiece.bpe.model", home / "bin")
    return home


@pytest.fixture(scope="session")
def stock_checkpoint(data, tmp_path_factory):
    """fairseq's own ``transformer``, trained until its translations differ from each other."""
    save = tmp_path_factory.mktemp("stock")
    flags = ("--arch", "transformer_tiny", "--share-decoder-input-output-embed", "--lr", "3e-3")
    return train(data / "bin", save, *flags, updates=80)


@pytest.fixture(scope="session")
def lot_checkpoint(stock_checkpoint, tmp_path_factory):
    """``stock_checkpoint`` with LOT as drawn in the encoder."""
    return swapped(stock_checkpoint, tmp_path_factory.mktemp("lot") / "lot.pt", "lot", "--lot-num-pivots", 6)


@pytest.fixture(scope="session")
def everywhere(stock_checkpoint, tmp_path_factory):
    """``stock_checkpoint`` with LOT as drawn at all sites."""
    options = ("--lot-num-pivots", 6, "--attention-sites", "encoder,cross,decoder")
    return swapped(stock_checkpoint, tmp_path_factory.mktemp("everywhere") / "lot.pt", "lot", *options)


@pytest.fixture(scope="session")
def diff_checkpoint(data, tmp_path_factory):
    """Our differential Transformer with softmax, after five updates."""
    return train(data / "bin", tmp_path_factory.mktemp("diff"), "--arch", "diff_transformer_small", updates=5)
