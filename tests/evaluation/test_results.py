"""Rows of results files: round trip, refusing what is broken or contradicts itself."""

import dataclasses
import json
from pathlib import Path

import pytest

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.results import Row, format_row, parse, read_rows
from tests.evaluation.conftest import write_rows


def test_round_trip_and_order_of_the_fields(make_row):
    settings = {"attention": "lot", "options": {"a": True, "b": 3, "c": 0.5, "d": "ü\n|"}, "from-scratch": True}
    row = make_row("LOT", settings=settings, seconds=None, delta=1.0, p=0.01, chrf=55.5)
    line = format_row(row)
    assert "\n" not in line and parse(Row, line, "row") == row
    options = parse(Row, line, "row").settings["options"]
    assert [type(value) for value in options.values()] == [bool, int, float, str]
    assert list(json.loads(line)) == [field.name for field in dataclasses.fields(row)]
    assert row.key == ("toy", "short", "transformer", "LOT", "base", 1)
    whole = format_row(make_row(seconds=2.0)).replace('"seconds": 2.0', '"seconds": 2')
    assert parse(Row, whole, "row").seconds == 2.0


BROKEN = [
    ("{", "JSON"),
    ("[" * 100_000, "JSON"),
    ("[]", "the row is wrong: "),
    ({"seed": "1"}, "at seed: Input should be a valid integer"),
    ({"seed": True}, "at seed: "),
    ({"dataset": 3}, "at dataset: Input should be a valid string"),
    ({"system": " "}, "at system: "),
    ({"seconds": float("nan")}, "at seconds: Input should be a finite number"),
    ({"stage": "later"}, "at stage: Input should be 'base', 'from scratch', 'plug-and-play' or 'fine-tuned'"),
    ({"tokenised": 30.0}, "at tokenised: "),
    ({"tokenised": {"score": 1}}, "at tokenised.low: Field required"),
    ({"settings": {}}, "at settings.attention: Field required"),
    ({"settings": {"attention": "lot", "optoins": {}}}, "at settings.optoins: Extra inputs are not permitted"),
    ({"settings": {"attention": "lot", "options": {"a": [1]}}}, "at settings.options.a"),
    ({"colour": "red"}, "at colour: "),
]


@pytest.mark.parametrize(("broken", "words"), BROKEN, ids=range(len(BROKEN)))
def test_broken_line_names_file_and_line(tmp_path, make_row, broken, words):
    path = tmp_path / "results.jsonl"
    if isinstance(broken, dict):
        broken = json.dumps(dataclasses.asdict(make_row()) | broken)
    path.write_text(f"{format_row(make_row())}\n\n{broken}\n", encoding="utf-8")
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
def test_one_name_stands_for_one_thing(tmp_path, make_row, changes, words):
    """Systems, trainings and test sets of an experiment, and rows, also in several files."""
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
def test_stored_results_are_read(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [format_row(row) for row in read_rows([path])] == lines
