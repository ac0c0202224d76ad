"""Errors are one line and name the option or the file."""

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from fairseq_lot import cli
from fairseq_lot.errors import InputError, check_least, first_line
from fairseq_lot.plug_and_play.calibrate import FitOptions


def test_errors_of_commands_name_the_flag_instead_of_the_field():
    error = InputError("must be at least 1, got 0", field="held_out")
    assert str(error) == "held_out must be at least 1, got 0"
    assert str(error.on_command_line()) == "--held-out must be at least 1, got 0"
    assert str(InputError("a word -- more").on_command_line()) == "a word -- more"


def test_a_first_line_that_ends_with_a_colon_is_joined_with_the_second():
    errors = RuntimeError("Errors in loading:\n\tMissing key x.\n\tMore."), KeyError(), ValueError("one\ntwo")
    assert [first_line(error) for error in errors] == ["Errors in loading: Missing key x.", "KeyError", "one"]


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"steps": 1.5}, {"learning_rate": float("inf")}, {"learning_rate": 0.0}]
)
def test_errors_of_options_name_the_wrong_field(options):
    with pytest.raises(InputError) as caught:
        FitOptions(**options)
    assert [caught.value.field] == list(options)


@pytest.mark.parametrize("given, said", [(0, "at least 1, got 0"), (10**20, f"at most {2**53}, got {10**20}")])
def test_a_number_out_of_range_names_its_flag(given, said):
    check_least(Namespace(threads=None, sentences=1), threads=1, sentences=1)
    with pytest.raises(InputError, match=f"^--threads must be {said}$"):
        check_least(Namespace(threads=given), threads=1)


def test_a_full_disk_behind_the_output_is_an_error_of_one_line():
    words = [sys.executable, "-m", "fairseq_lot.cli", "table", "results/quickstart.jsonl"]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
    assert "No space left" in ran.stderr


def test_a_name_that_is_not_utf8_is_an_error_of_one_line(capsys):
    parser = ArgumentParser()
    parser.set_defaults(run=lambda args: "caf\udce9.pt".encode())
    assert cli.run(lambda: parser, []) == 2
    assert capsys.readouterr().err == "fairseq-lot: error: 'caf\\udce9.pt' is not valid UTF-8; rename it\n"


def test_a_text_that_the_encoding_of_the_output_lacks_is_an_error_of_one_line(capsys):
    parser = ArgumentParser()
    parser.set_defaults(run=lambda args: "Δ vs. base".encode("ascii"))
    assert cli.run(lambda: parser, []) == 2
    assert capsys.readouterr().err == "fairseq-lot: error: 'Δ vs. base' is not ascii; set PYTHONIOENCODING=utf-8\n"
