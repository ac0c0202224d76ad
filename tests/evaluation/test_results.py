"""Rows of results files: round trip, replacing, refusing, surviving a kill."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.results import KEY, format_row, parse_row, put_row, read_rows


def test_round_trip_and_order_of_the_fields(make_row):
    row = make_row(options="ü\n\u2028|", seconds=None, delta=1.0, p=0.01)
    line = format_row(row)
    assert "\n" not in line and parse_row(line) == row
    assert list(json.loads(line)) == [field.name for field in dataclasses.fields(row)]
    assert row.key == ("toy", "transformer_small", "transformer", "softmax", row.options, "base", 1, "quick")


def test_append_then_replace_keeping_the_rest_byte_for_byte(tmp_path, make_row):
    path = tmp_path / "new" / "results.jsonl"
    put_row(path, make_row())
    put_row(path, make_row(stage="fine-tuned"))
    # A hand-written line: other spaces, other order, a Windows line end, blank lines.
    other = json.dumps(dataclasses.asdict(make_row(seed=2)), sort_keys=True, indent=None, separators=(" ,", " : "))
    path.write_bytes(path.read_bytes() + b"\n" + other.encode() + b"\r\n\n")
    before = path.read_bytes().split(b"\n")

    put_row(path, make_row(score=31.0))
    after = path.read_bytes().split(b"\n")
    assert after[1:] == before[1:] and after[0] != before[0]
    assert [row.tokenised.score for row in read_rows(path)] == [31.0, 30.0, 30.0]

    put_row(path, make_row(seed=3))
    assert path.read_bytes().split(b"\n")[:-2] == after[:-1]
    assert len(read_rows(path)) == 4


@pytest.mark.parametrize("name", KEY)
def test_each_part_of_the_key_makes_another_row(tmp_path, make_row, name):
    path = tmp_path / "results.jsonl"
    put_row(path, make_row())
    put_row(path, make_row(**{name: 9 if name == "seed" else "fine-tuned"}))
    assert len(read_rows(path)) == 2


def test_doubled_rows_become_one_and_a_missing_line_end_is_added(tmp_path, make_row):
    path = tmp_path / "results.jsonl"
    lines = [format_row(make_row()), format_row(make_row(seed=2)), format_row(make_row(score=29.0))]
    path.write_text("\n".join(lines), encoding="utf-8")
    put_row(path, make_row(score=32.0))
    assert [(row.seed, row.tokenised.score) for row in read_rows(path)] == [(1, 32.0), (2, 30.0)]
    assert path.read_bytes().endswith(b"}\n")


BROKEN = [
    ("{", "JSON"),
    ("[" * 100_000, "JSON"),
    ("[]", "not a JSON object"),
    ("null", "not a JSON object"),
    ("\x00\x01", "JSON"),
    ({"seed": "1"}, "seed must be of type int"),
    ({"seed": True}, "seed must be of type int"),
    ({"seed": None}, "seed must be of type int"),
    ({"dataset": 3}, "dataset must be of type str"),
    ({"seconds": float("nan")}, "seconds must be"),
    ({"stage": "later"}, "stage must be one of base, plug-and-play, fine-tuned"),
    ({"tokenised": 30.0}, "tokenised is not a JSON object"),
    ({"tokenised": {"score": 1}}, "tokenised lacks high, low, signature"),
    ({"colour": "red"}, "unknown colour"),
]


@pytest.mark.parametrize(("broken", "words"), BROKEN, ids=range(len(BROKEN)))
def test_broken_line_names_file_and_line_and_changes_nothing(tmp_path, make_row, broken, words):
    path = tmp_path / "results.jsonl"
    if isinstance(broken, dict):
        broken = json.dumps(dataclasses.asdict(make_row()) | broken)
    path.write_text(f"{format_row(make_row())}\n{broken}\n", encoding="utf-8")
    before = path.read_bytes()
    for action in (lambda: read_rows(path), lambda: put_row(path, make_row(seed=2))):
        with pytest.raises(InputError) as caught:
            action()
        assert str(caught.value).startswith(f"{path}, line 2: ") and words in str(caught.value)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["results.jsonl"]


def test_rows_from_before_precision_and_protocol_were_noted_are_read(tmp_path, make_row):
    path = tmp_path / "results.jsonl"
    later = ("precision", "protocol")
    old = {name: value for name, value in dataclasses.asdict(make_row()).items() if name not in later}
    path.write_text(json.dumps(old) + "\n", encoding="utf-8")
    before = path.read_bytes()
    assert [row.precision for row in read_rows(path)] == ["unknown"]
    put_row(path, make_row(seed=2, precision="bf16"))
    assert path.read_bytes().startswith(before) and [row.precision for row in read_rows(path)] == ["unknown", "bf16"]
    put_row(path, make_row(precision="fp16"))  # the same system, scored again
    assert [(row.seed, row.precision) for row in read_rows(path)] == [(1, "fp16"), (2, "bf16")]
    put_row(path, make_row(protocol="papers"))  # trained in another way, another system
    assert [row.protocol for row in read_rows(path)] == ["quick", "quick", "papers"]


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "results").glob("*.jsonl")), ids=lambda x: x.name)
def test_stored_results_are_read(path):
    assert len(read_rows(path)) == len(path.read_text(encoding="utf-8").splitlines())


def test_whole_numbers_are_read_as_numbers(make_row):
    line = format_row(make_row()).replace('"seconds": 2.5', '"seconds": 2')
    assert parse_row(line).seconds == 2.0


def test_text_that_is_no_utf_8_is_refused(tmp_path, make_row):
    path = tmp_path / "results.jsonl"
    with pytest.raises(InputError, match="not valid UTF-8"):
        put_row(path, make_row(options="lot \udcff"))
    assert not path.exists()


def test_full_disk_changes_nothing(tmp_path, make_row, monkeypatch):
    path = tmp_path / "results.jsonl"
    put_row(path, make_row())
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        put_row(path, make_row(seed=2))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["results.jsonl"]


def test_kill_while_writing_leaves_the_old_file(tmp_path, make_row):
    path = tmp_path / "results.jsonl"
    put_row(path, make_row())
    before = path.read_bytes()
    script = (
        "import os, signal, sys\n"
        "from fairseq_lot.evaluation.results import parse_row, put_row\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "put_row(sys.argv[1], parse_row(sys.argv[2]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path, format_row(make_row(seed=2))], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    put_row(path, make_row(seed=2))
    assert len(read_rows(path)) == 2


def test_writers_at_the_same_time_lose_no_row(tmp_path, make_row):
    path = tmp_path / "results.jsonl"
    script = (
        "import dataclasses, sys\n"
        "from fairseq_lot.evaluation.results import parse_row, put_row\n"
        "row = parse_row(sys.argv[2])\n"
        "for seed in range(20):\n"
        "    put_row(sys.argv[1], dataclasses.replace(row, seed=seed))\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script, path, format_row(make_row(mechanism=mechanism))])
        for mechanism in ("esp", "lot")
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    assert len(read_rows(path)) == 40
