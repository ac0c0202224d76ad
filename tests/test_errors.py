"""An error knows which option it is about."""

import pytest

from fairseq_lot.errors import InputError, first_line
from fairseq_lot.plug_and_play.calibrate import FitOptions


def test_the_flag_takes_the_place_of_the_field():
    error = InputError("must be at least 1, got 0", field="held_out")
    assert str(error) == "held_out must be at least 1, got 0"
    assert str(error.on_command_line()) == "--held-out must be at least 1, got 0"
    assert str(InputError("a word -- more").on_command_line()) == "a word -- more"


def test_a_first_line_that_promises_more_brings_it():
    assert (
        first_line(RuntimeError("Errors in loading:\n\tMissing key x.\n\tMore.")) == "Errors in loading: Missing key x."
    )
    assert [first_line(error) for error in (KeyError(), ValueError("one\ntwo"))] == ["KeyError", "one"]


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"steps": 1.5}, {"learning_rate": float("inf")}, {"learning_rate": 0.0}]
)
def test_options_name_the_field_that_is_wrong(options):
    with pytest.raises(InputError) as caught:
        FitOptions(**options)
    assert [caught.value.field] == list(options)
