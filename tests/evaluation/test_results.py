"""Rows of results files: round trip, and the refusal of broken and contradictory rows."""

import json
from pathlib import Path

import pytest

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.results import parse, read_rows
from fairseq_lot.experiment.spec import Row
from tests.evaluation.conftest import write_rows


def test_rows_survive_a_round_trip_and_keep_the_order_of_their_fields(make_row):
    settings = {"attention": "lot", "options": {"a": True, "b": 3, "c": 0.5, "d": "ü\n|"}, "from-scratch": True}
    row = make_row("LOT", settings=settings, seconds=None, delta=1.0, p=0.01, chrf=55.5, lenpen=1.5)
    line = row.line
    assert "\n" not in line and parse(Row, line, "row") == row
    options = parse(Row, line, "row").settings.options
    assert [type(value) for value in options.values()] == [bool, int, float, str]
    assert list(json.loads(line)) == list(Row.model_fields)
    assert row.key == ("toy", "short", "transformer", "LOT", "base", 1)
    plain = list(json.loads(make_row().line))
    assert [name for name in Row.model_fields if name not in plain] == ["chrf", "lenpen"]
    whole = make_row(seconds=2.0).line.replace('"seconds": 2.0', '"seconds": 2')
    assert parse(Row, whole, "row").seconds == 2.0


BROKEN = [
    ("{", "JSON"),
    ("[" * 100_000, "JSON"),
    ("[]", "the row is wrong: "),
    ({"seed": "1"}, "at seed: should be a valid integer, not '1'"),
    ({"seed": True}, "at seed: "),
    ({"dataset": 3}, "at dataset: should be a valid string, not 3"),
    ({"system": " "}, "at system: "),
    ({"seconds": float("nan")}, "at seconds: should be a finite number"),
    ({"stage": "later"}, "at stage: should be 'base', 'from scratch', 'plug-and-play' or 'fine-tuned', not 'later'"),
    ({"tokenised": 30.0}, "at tokenised: "),
    ({"tokenised": {"score": 1}}, "at tokenised.low: required, but not there"),
    ({"settings": {}}, "at settings.attention: required, but not there"),
    ({"settings": {"attention": "lot", "optoins": {}}}, "at settings: unknown entry 'optoins'; did you mean options?"),
    ({"settings": {"attention": "lot", "options": {"a": [1]}}}, "at settings.options.a"),
    ({"colour": "red"}, "the row is wrong: unknown entry 'colour'; known are dataset, "),
]


@pytest.mark.parametrize(("broken", "words"), BROKEN, ids=range(len(BROKEN)))
def test_the_error_of_a_broken_line_names_file_and_line(tmp_path, make_row, broken, words):
    path = tmp_path / "results.jsonl"
    if isinstance(broken, dict):
        broken = json.dumps(make_row().model_dump() | broken)
    path.write_text(f"{make_row().line}\n\n{broken}\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_rows([path])
    message = str(caught.value)
    assert message.startswith(f"{path}, line 3: ") and words in message and "\n" not in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": {"attention": "lot", "options": {"lot-num-pivots": 3}}, "seed": 2}, "('system', 'short', 'LOT')"),
        ({"training": {"size": "small"}, "seed": 2}, "('training', 'short', 'transformer')"),
        ({"sentences": 7, "seed": 2}, "('sentences', 'toy', 'short')"),
        ({"score": 31.0}, "('row', 'toy', 'short', 'transformer', 'LOT', 'plug-and-play', 1)"),
    ],
)
def test_one_name_for_two_things_is_refused(tmp_path, make_row, changes, words):
    """A name of a system, a training, a test set or a row of an experiment; also across files."""
    row = {"stage": "plug-and-play", "settings": {"attention": "lot"}}
    one = write_rows(tmp_path / "one.jsonl", make_row("LOT", **row))
    other = write_rows(tmp_path / "other.jsonl", make_row("LOT", **row | changes))
    with pytest.raises(InputError) as caught:
        read_rows([one, other])
    assert f"{one}, line 1 and {other}, line 1 have different values of {words}" in str(caught.value)
    assert len(read_rows([one, one])) == 1
    write_rows(other, make_row("LOT", **row | changes | {"experiment": "long"}))
    assert len(read_rows([one, other])) == 2


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "results").glob("*.jsonl")), ids=lambda x: x.name)
def test_stored_results_are_read_and_written_unchanged(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [row.line for row in read_rows([path])] == lines
