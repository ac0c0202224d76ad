"""The scripts prepare_*.sh on a tiny text: result, reuse and bad input."""

import http.server
import lzma
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fairseq_lot.corpus.iwslt14 import fetch
from fairseq_lot.errors import InputError
from tests.conftest import ROOT
from tests.corpus.test_iwslt14 import files, pack

BINARIES = [f"{split}.de-en.{side}.{kind}" for split in ("train", "valid", "test") for side in ("de", "en") for kind in
            ("bin", "idx")]  # fmt: skip
OTHERS = ["dict.de.txt", "dict.en.txt", "preprocess.log", "settings", "sources", "text/test.de", "text/test.en"]


def prepare(script, tmp_path, path_first=None, **variables):
    """Run a script in the environment of this interpreter; OUT is tmp_path/data."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    path = [str(part) for part in (path_first, Path(sys.executable).parent, os.environ["PATH"]) if part]
    always = {"PATH": ":".join(path), "VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1", "WORKERS": "1"}
    given = {name: str(value) for name, value in {"OUT": tmp_path / "data", **variables}.items()}
    command = ["bash", str(ROOT / "scripts" / script)]
    environment = kept | always | given
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)


@pytest.fixture
def text(tmp_path):
    """A small tokenised corpus."""
    folder = tmp_path / "text"
    folder.mkdir()
    for split, count in (("train", 60), ("valid", 5), ("test", 4)):
        for language, words in (("de", "das haus ist nummer"), ("en", "the house &apos;s number is")):
            lines = [f"{words} {number * number} ." for number in range(count)]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    return folder


def names_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def assert_refused(run, tmp_path, expected, left=("text",)):
    """Check exit code 2, one line, and that nothing new was left behind."""
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    assert len(run.stderr.splitlines()) == 1 and expected in run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(left)


def test_a_tokenised_folder_becomes_a_data_folder_once(text, tmp_path):
    (text / "raw").mkdir()
    (text / "raw" / "test.en").write_text("The house's number.\n" * 4)
    run = prepare("prepare_iwslt14.sh", tmp_path, TOKENISED=text, VOCAB_SIZE=50, NAME="tiny")
    assert run.returncode == 0, run.stderr
    assert run.stderr == "" and len(run.stdout.splitlines()) == 1
    data = tmp_path / "data"
    assert names_in(data) == {*BINARIES, *OTHERS, "sentencepiece.bpe.model", "raw/test.en"}
    assert (data / "dict.de.txt").read_bytes() == (data / "dict.en.txt").read_bytes()
    assert (data / "text" / "test.en").read_bytes() == (text / "test.en").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "text"]
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    run = prepare("prepare_iwslt14.sh", tmp_path, TOKENISED="nowhere", VOCAB_SIZE=50)
    assert_refused(run, tmp_path, "', not 'TOKENISED=nowhere ARCHIVE= URL=http", left=("data", "text"))
    run = prepare("prepare_iwslt14.sh", tmp_path, TOKENISED=text, VOCAB_SIZE=50)
    assert run.returncode == 0 and "is complete" in run.stdout and len(run.stdout.splitlines()) == 1
    expected = "VOCAB_SIZE=50 BPE=sentencepiece JOINED=yes DOCUMENTS=no', not 'de-en VOCAB_SIZE=50 BPE=subword_nmt"
    run = prepare("prepare_iwslt14.sh", tmp_path, TOKENISED=text, VOCAB_SIZE=50, BPE="subword_nmt")
    assert_refused(run, tmp_path, expected, left=("data", "text"))
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before
    (data / "sources").unlink()
    run = prepare("prepare_iwslt14.sh", tmp_path, TOKENISED="nowhere", VOCAB_SIZE=50)
    assert run.returncode == 0, "folders of early versions lack sources"


@pytest.mark.slow
def test_sentences_become_documents(text, tmp_path):
    run = prepare("prepare_iwslt14.sh", tmp_path, TOKENISED=text, VOCAB_SIZE=50, DOCUMENTS="yes")
    assert run.returncode == 0, run.stderr
    data, usual = tmp_path / "data", {*BINARIES, *OTHERS, "sentencepiece.bpe.model", "documents.txt"}
    of_test = {name for name in usual if Path(name).name.startswith("test.")}
    assert names_in(data) == usual | {name.replace("test.", f"test{n}.") for name in of_test for n in (1, 2, 3)}
    counts = [
        len((data / "text" / f"{test}.en").read_text().splitlines()) for test in ("test", "test1", "test2", "test3")
    ]
    assert counts == [4, 1, 1, 1]


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"TOKENISED": "no/such/folder"}, "no/such/folder is not a folder"),
        ({"ARCHIVE": "no/such/archive.tgz"}, "no/such/archive.tgz is not a file"),
        ({"TOKENISED": "{text}"}, "--vocab-size 10000 does not fit this text"),
        ({"TOKENISED": "{text}", "JOINED": "maybe"}, "JOINED=maybe is neither yes nor no"),
        ({"TOKENISED": "{text}", "OUT": "{text}/train.de/data"}, "cannot write in"),
        ({"TOKENISED": "{text}", "OUT": "{text}/a,b"}, "has a comma"),
        ({"TOKENISED": "{text}", "OUT": "{text}"}, "exists and was not made by prepare_*.sh"),
    ],
)
def test_bad_variables_are_refused_in_one_line(variables, expected, text, tmp_path):
    before = names_in(text)
    filled = {name: value.format(text=text) for name, value in variables.items()}
    assert_refused(prepare("prepare_iwslt14.sh", tmp_path, **filled), tmp_path, expected)
    assert names_in(text) == before


@pytest.fixture
def preprocess(tmp_path):
    """A function that makes a fast stub of fairseq-preprocess from shell code; it returns the stub's folder."""

    def put(shell):
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "fairseq-preprocess").write_text(f"#!/bin/sh\n{shell}\n")
        (tmp_path / "bin" / "fairseq-preprocess").chmod(0o755)
        return tmp_path / "bin"

    return put


def test_failing_preprocess_leaves_only_its_log(text, tmp_path, preprocess):
    fake = preprocess("echo chatter; echo 'No space left on device' >&2; exit 1")
    run = prepare("prepare_iwslt14.sh", tmp_path, path_first=fake, TOKENISED=text, VOCAB_SIZE=50)
    expected = f"fairseq-preprocess failed: No space left on device (whole log: {tmp_path}/data.log)"
    assert_refused(run, tmp_path, expected, left=("bin", "data.log", "text"))
    assert (tmp_path / "data.log").read_text() == "chatter\nNo space left on device\n"


def test_the_order_of_test_sets_does_not_depend_on_the_locale(text, tmp_path, preprocess):
    make = ["localedef", "-i", "en_US", "-f", "UTF-8", str(tmp_path / "en_US.UTF-8")]
    if not shutil.which("localedef") or subprocess.run(make, capture_output=True, check=False).returncode:
        pytest.skip("no source of the locale en_US")
    fake = preprocess('echo "$@"; exit 1')
    english = {"LOCPATH": tmp_path, "LC_ALL": "en_US.UTF-8"}
    prepare("prepare_iwslt14.sh", tmp_path, fake, TOKENISED=text, VOCAB_SIZE=50, DOCUMENTS="yes", **english)
    sets = re.search(r"--testpref (\S+)", (tmp_path / "data.log").read_text())[1]
    assert [Path(name).name for name in sets.split(",")] == ["test", "test1", "test2", "test3"]


def test_interrupt_leaves_nothing(text, tmp_path, preprocess):
    """A script that is stopped while fairseq-preprocess runs removes what it had begun."""
    fake = preprocess('kill -TERM "$PPID"; sleep 1')
    run = prepare("prepare_iwslt14.sh", tmp_path, path_first=fake, TOKENISED=text, VOCAB_SIZE=50)
    assert run.returncode == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "text"]


def test_a_folder_that_another_call_made_meanwhile_stays(text, tmp_path, preprocess):
    settings = "de-en VOCAB_SIZE=50 BPE=sentencepiece JOINED=yes DOCUMENTS=no"
    fake = preprocess(f"mkdir {tmp_path}/data; echo '{settings}' >{tmp_path}/data/settings")
    run = prepare("prepare_iwslt14.sh", tmp_path, path_first=fake, TOKENISED=text, VOCAB_SIZE=50)
    assert run.returncode == 0 and run.stdout == f"{tmp_path}/data is ready: {settings}\n", run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "data", "text"]
    assert names_in(tmp_path / "data") == {"settings"}


def test_raw_archive_is_fetched_and_becomes_a_data_folder(tmp_path, preprocess):
    """The archive goes through extraction, tokenisation and BPE; the raw reference is kept."""
    (tmp_path / "remote.tgz").write_bytes(pack(files()))
    url = f"file://{tmp_path}/remote.tgz"
    run = prepare("prepare_iwslt14.sh", tmp_path, path_first=preprocess("exit 0"), URL=url, VOCAB_SIZE=60)
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "data", "de-en.tgz", "remote.tgz"]
    data = tmp_path / "data"
    assert (data / "raw" / "test.en").read_text().startswith("It's IWSLT14.TED.dev2010.de-en en\n")
    assert (data / "text" / "test.en").read_text().startswith("it &apos;s iwslt14.ted.dev2010.de-en en\n")


def test_only_the_pairs_of_a_list_are_taken(text, tmp_path):
    lines = {language: (text / f"train.{language}").read_text().splitlines() for language in ("de", "en")}
    (tmp_path / "part").mkdir()
    for language, sentences in lines.items():
        (tmp_path / "part" / f"train.{language}").write_text("\n".join(sentences[40:10:-1]) + "\n")
    subprocess.run(
        [sys.executable, ROOT / "scripts/subset.py", tmp_path / "list", tmp_path / "part", "--make"], check=True
    )
    run = prepare("prepare_iwslt14.sh", tmp_path, TOKENISED=text, PAIRS=tmp_path / "list", VOCAB_SIZE=50)
    assert run.returncode == 0 and "/subset: 30 of 30 pairs\n" in run.stdout
    assert "train.de: 30 sents" in (tmp_path / "data" / "preprocess.log").read_text()
    run = prepare("prepare_iwslt14.sh", tmp_path, TOKENISED=text, VOCAB_SIZE=50)
    assert run.returncode == 2 and "PAIRS=" in run.stderr and "remove it or give another OUT" in run.stderr


def test_a_failed_download_is_reported_in_one_line(tmp_path):
    run = prepare("prepare_iwslt14.sh", tmp_path, URL=f"file://{tmp_path}/nothing.tgz")
    assert_refused(run, tmp_path, "cannot download", left=())


class Short(http.server.BaseHTTPRequestHandler):
    """Promises more bytes than it sends."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"x" * 10)

    def log_message(self, *_):
        pass


def test_a_download_that_ends_early_leaves_nothing(tmp_path):
    with http.server.HTTPServer(("127.0.0.1", 0), Short) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(InputError, match="ended after 10 of 1000 bytes; try again"):
            fetch(f"http://127.0.0.1:{server.server_port}/a.tgz", tmp_path / "a.tgz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_corpus_is_tokenised_and_keeps_its_raw_reference(tmp_path):
    frozen = ROOT / "tests" / "synthetic"
    prefixes = {split.upper(): frozen / split for split in ("train", "valid", "test")}
    run = prepare("prepare_corpus.sh", tmp_path, SRC="de", TGT="en", CLEAN="no", VOCAB_SIZE=1000, **prefixes)
    assert run.returncode == 0, run.stderr
    data = tmp_path / "data"
    assert (data / "raw" / "test.en").read_bytes() == lzma.decompress((frozen / "test.en.xz").read_bytes())
    line = (data / "text" / "test.en").read_text().splitlines()[1]
    assert line == "they will not give the expensive tea to a farmer ."


@pytest.fixture
def french(text):
    """Rename the text to fr and en, with another prefix for each split; return the variables of prepare_corpus.sh."""
    for split in ("train", "valid", "test"):
        (text / f"{split}.de").rename(text / f"my {split}.fr")
        (text / f"{split}.en").rename(text / f"my {split}.en")
    prefixes = {name: text / f"my {name.lower()}" for name in ("TRAIN", "VALID", "TEST")}
    return {"SRC": "fr", "TGT": "en", "TOKENISED": "yes", "VOCAB_SIZE": 40, **prefixes}


@pytest.mark.slow
def test_ones_own_text_becomes_a_data_folder_as_fairseqs_recipe_makes_it(french, tmp_path):
    """subword-nmt, a dictionary for each language."""
    run = prepare("prepare_corpus.sh", tmp_path, **french, BPE="subword_nmt", JOINED="no")
    assert run.returncode == 0, run.stderr
    assert run.stderr == "" and len(run.stdout.splitlines()) == 1
    data = tmp_path / "data"
    assert names_in(data) == {re.sub(r"\bde\b", "fr", name) for name in (*BINARIES, *OTHERS)} | {"code"}
    assert (data / "dict.fr.txt").read_bytes() != (data / "dict.en.txt").read_bytes()
    assert "@@ " in (data / "dict.en.txt").read_text()
    assert (data / "text" / "test.fr").read_bytes() == (tmp_path / "text" / "my test.fr").read_bytes()


@pytest.mark.parametrize("clean", ["yes", "no"])
def test_raw_text_is_tokenised_and_pairs_are_held_out(clean, french, tmp_path, preprocess):
    train = french["TRAIN"]
    for language in ("fr", "en"):
        lines = [f"Number {n}, isn't it?" for n in range(50)]
        lines[3] += " And so on, and on, and on." * (language == "en")
        (train.parent / f"{train.name}.{language}").write_text("\n".join(lines) + "\n")
    variables = french | {"TOKENISED": "no", "VALID": 5, "TEST": 4, "CLEAN": clean}
    run = prepare("prepare_corpus.sh", tmp_path, path_first=preprocess("exit 0"), **variables)
    assert run.returncode == 0, run.stderr
    assert ("cleaning dropped 1 pairs of train" in run.stderr) == (clean == "yes")
    data = tmp_path / "data"
    raw = (data / "raw" / "test.en").read_text().splitlines()
    tokens = (data / "text" / "test.en").read_text().splitlines()
    assert len(raw) == len(tokens) == 4 and raw[0].startswith("Number ") and tokens[0].startswith("number ")
    assert (data / "sentencepiece.bpe.model").is_file() and not (data / "code").exists()


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"TEST": ""}, "TEST is not set; give SRC, TGT, TRAIN, VALID and TEST"),
        ({"TGT": "fr"}, "both languages are 'fr'; give two different ones"),
        ({"TGT": "../en"}, "TGT=../en must be two language codes"),
        ({"VALID": "nowhere/valid"}, "nowhere/valid.fr is missing"),
        ({"VALID": "60"}, "cannot hold out 60 of the 60 pairs in"),
    ],
)
def test_bad_variables_of_ones_own_text_are_refused_in_one_line(variables, expected, french, tmp_path):
    assert_refused(prepare("prepare_corpus.sh", tmp_path, **{**french, **variables}), tmp_path, expected)
