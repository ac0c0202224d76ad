"""Code that people copy: public names, examples in docstrings, and the example in plain PyTorch."""

import doctest
import subprocess
import sys

import pytest
import torch

import fairseq_lot
from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.transport.pivots import pivot_coupling
from fairseq_lot.transport.sinkhorn import solve
from tests.conftest import ROOT, program


def test_public_names_are_imported_when_they_are_used():
    code = (
        "import sys, fairseq_lot; assert 'torch' not in sys.modules; fairseq_lot.build_mechanism;"
        "assert 'torch' in sys.modules and 'fairseq' not in sys.modules;"
        "from fairseq_lot import *; print(swap.__name__, calibrate.__name__, Translator.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "swap calibrate Translator\n", done.stderr
    assert set(fairseq_lot.__all__) <= set(dir(fairseq_lot))
    with pytest.raises(AttributeError, match="'fairseq_lot' has no attribute 'swop'"):
        _ = fairseq_lot.swop


def test_the_package_ships_its_types():
    assert (ROOT / "fairseq_lot" / "py.typed").is_file() and '"py.typed"' in (ROOT / "setup.py").read_text()


@pytest.mark.parametrize("function", [solve, pivot_coupling, build_mechanism])
def test_examples_in_docstrings_run(function):
    (example,) = doctest.DocTestFinder(recurse=False).find(function, globs=function.__globals__ | {"torch": torch})
    result = doctest.DocTestRunner().run(example)
    assert result.attempted >= 3 and result.failed == 0


def test_the_example_in_plain_pytorch_learns(capsys):
    plain = program("examples/plain_pytorch.py")
    losses, weights = plain.main()
    assert sum(losses[-5:]) / 5 < 0.2 * losses[0]
    n = weights.size(-1)
    torch.testing.assert_close(weights.sum(-1), torch.ones(plain.HEADS, n))
    assert "loss" in capsys.readouterr().out


def test_pads_change_nothing_in_the_example_in_plain_pytorch():
    plain = program("examples/plain_pytorch.py")
    model, tokens = plain.Model(num_pivots=4), plain.sentences(1)
    n = int((tokens != plain.PAD).sum())
    assert n < tokens.size(1)
    padded, _ = model(tokens)
    alone, _ = model(tokens[:, :n])
    torch.testing.assert_close(padded[:, :n], alone)
    alone.sum().backward()
    assert model.attention.mechanism.pivots.grad.abs().sum() > 0
