"""The scripts prepare_*.sh on a tiny text: result, reuse and bad input."""

import http.server
import io
import lzma
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from fairseq_lot.corpus.iwslt14 import fetch
from fairseq_lot.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
BINARIES = [f"{split}.de-en.{side}.{kind}" for split in ("train", "valid", "test") for side in ("de", "en") for kind in
            ("bin", "idx")]  # fmt: skip
OTHERS = ["dict.de.txt", "dict.en.txt", "sentencepiece.bpe.model", "vocab_size"]


def prepare(script, tmp_path, path_first=None, **variables):
    """Run a script in the environment of this interpreter; OUT is tmp_path/data."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    path = [path_first, Path(sys.executable).parent, os.environ["PATH"]]
    environment = {
        **kept,
        "PATH": os.pathsep.join(str(part) for part in path if part),
        "VIRTUAL_ENV": sys.prefix,
        "OMP_NUM_THREADS": "1",
        "OUT": str(tmp_path / "data"),
        "WORKERS": "1",
        **{name: str(value) for name, value in variables.items()},
    }
    command = ["bash", str(ROOT / "scripts" / script)]
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)


def write_text(folder):
    """Write a small tokenised corpus."""
    folder.mkdir()
    for split, count in (("train", 60), ("valid", 5), ("test", 4)):
        for language, words in (("de", "das haus ist nummer"), ("en", "the house &apos;s number is")):
            lines = [f"{words} {number * number} ." for number in range(count)]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A data folder made over the remains of an interrupted one, with raw references; and the run that made it."""
    tmp_path = tmp_path_factory.mktemp("prepared")
    text = write_text(tmp_path / "text")
    (text / "raw").mkdir()
    (text / "raw" / "test.en").write_text("The house's number.\n" * 4)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dict.de.txt").write_text("half a di")
    (tmp_path / "data" / "vocab_size").write_text("50\n")
    (tmp_path / "data" / "leftover").write_text("")
    run = prepare("prepare_iwslt14.sh", tmp_path, TOKENISED=text, VOCAB_SIZE=50, NAME="tiny")
    return tmp_path, run


def assert_refused(run, tmp_path, expected, left=("text",)):
    """Check exit code 2, one line, and that nothing new was left behind."""
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    assert len(run.stderr.splitlines()) == 1 and expected in run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(left)


def test_tokenised_folder_becomes_a_data_folder(prepared):
    tmp_path, run = prepared
    assert run.returncode == 0, run.stderr
    assert run.stderr == "" and len(run.stdout.splitlines()) == 1
    data = tmp_path / "data"
    found = {str(path.relative_to(data)) for path in data.rglob("*") if path.is_file()}
    assert found == {*BINARIES, *OTHERS, "text/test.de", "text/test.en", "raw/test.en", "preprocess.log"}
    assert (data / "dict.de.txt").read_bytes() == (data / "dict.en.txt").read_bytes()
    assert (data / "text" / "test.en").read_bytes() == (tmp_path / "text" / "test.en").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "text"]


def test_complete_folder_is_reused_at_once(prepared):
    tmp_path, _ = prepared
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    run = prepare("prepare_iwslt14.sh", tmp_path, TOKENISED="nowhere")
    assert run.returncode == 0 and "is complete" in run.stdout and len(run.stdout.splitlines()) == 1
    assert prepare("prepare_synthetic.sh", tmp_path, VOCAB_SIZE=50).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == before


@pytest.mark.parametrize(
    "script, variables, expected",
    [
        ("prepare_iwslt14.sh", {"VOCAB_SIZE": 60}, "made with VOCAB_SIZE=50, not 60"),
        ("prepare_iwslt14.sh", {"BPE": "subword_nmt"}, "made with BPE=sentencepiece, not subword_nmt"),
        ("prepare_iwslt14.sh", {"JOINED": "no"}, "made with JOINED=yes, not no"),
        (
            "prepare_corpus.sh",
            {"SRC": "fr", "TGT": "en", "TRAIN": "a", "VALID": "b", "TEST": "c"},
            "is not of fr-en; remove it or give another OUT",
        ),
    ],
)
def test_a_folder_made_otherwise_is_refused(script, variables, expected, prepared):
    tmp_path, _ = prepared
    run = prepare(script, tmp_path, **variables)
    assert_refused(run, tmp_path, expected, left=("data", "text"))


def test_a_folder_of_fairseq_preprocess_alone_is_left_alone(text, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dict.de.txt").write_text("das 1\n")
    run = prepare("prepare_iwslt14.sh", tmp_path, TOKENISED=text, VOCAB_SIZE=50)
    assert_refused(run, tmp_path, "exists and was not made by prepare_*.sh", left=("data", "text"))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["dict.de.txt"]


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("valid.en", None, "valid.en is missing"),
        ("valid.en", b"one\n", "valid.de has 5 lines but"),
        ("test.de", b"gut\nsch\xf6n\ngut\ngut\n", "test.de, line 2: not valid UTF-8"),
        ("test.de", b"gut\n\ngut\ngut\n", "test.de, line 2: empty line"),
    ],
)
def test_bad_text_is_one_line(name, content, expected, text, tmp_path):
    (text / name).unlink()
    if content is not None:
        (text / name).write_bytes(content)
    assert_refused(prepare("prepare_iwslt14.sh", tmp_path, TOKENISED=text, VOCAB_SIZE=50), tmp_path, expected)


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"TOKENISED": "no/such/folder"}, "no/such/folder is not a folder"),
        ({"ARCHIVE": "no/such/archive.tgz"}, "no/such/archive.tgz is not a file"),
        ({"TOKENISED": "{text}"}, "--vocab-size 10000 is too large"),
        ({"TOKENISED": "{text}", "VOCAB_SIZE": "0"}, "--vocab-size 0"),
        ({"TOKENISED": "{text}", "BPE": "fastbpe"}, "BPE: there is no 'fastbpe'; use sentencepiece, subword_nmt"),
        ({"TOKENISED": "{text}", "JOINED": "maybe"}, "JOINED: there is no 'maybe'; use yes, no"),
        ({"TOKENISED": "{text}", "VOCAB_SIZE": "many"}, "VOCAB_SIZE=many is not a whole number"),
        ({"TOKENISED": "{text}", "OUT": "{text}/train.de/data"}, "cannot write in"),
        ({"TOKENISED": "{text}", "OUT": "{text}"}, "exists and was not made by prepare_*.sh"),
    ],
)
def test_bad_variables_are_one_line(variables, expected, text, tmp_path):
    filled = {name: value.format(text=text) for name, value in variables.items()}
    assert_refused(prepare("prepare_iwslt14.sh", tmp_path, **filled), tmp_path, expected)
    assert len(list(text.iterdir())) == 6


def test_failing_preprocess_leaves_only_its_log(text, tmp_path):
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "fairseq-preprocess").write_text("#!/bin/sh\necho chatter\necho 'No space left on device' >&2\nexit 1\n")
    (fake / "fairseq-preprocess").chmod(0o755)
    run = prepare("prepare_iwslt14.sh", tmp_path, path_first=fake, TOKENISED=text, VOCAB_SIZE=50)
    expected = f"fairseq-preprocess failed: No space left on device (whole log: {tmp_path}/data.log)"
    assert_refused(run, tmp_path, expected, left=("bin", "data.log", "text"))
    assert (tmp_path / "data.log").read_text() == "chatter\nNo space left on device\n"


def write_archive(path):
    """Write a tiny archive of IWSLT'14's form."""
    sets = ["TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012"]
    with tarfile.open(path, "w:gz") as tar:
        for language, words in (("de", "Das Haus, Nummer"), ("en", "The house's number")):
            content = {f"de-en/train.tags.de-en.{language}": "".join(f"{words} {n}.\n" for n in range(50))}
            for name in sets:
                content[f"de-en/IWSLT14.{name}.de-en.{language}.xml"] = f'<seg id="1"> {words} {name} now. </seg>\n'
            for name, lines in content.items():
                member = tarfile.TarInfo(name)
                member.size = len(lines.encode())
                tar.addfile(member, io.BytesIO(lines.encode()))


def test_raw_archive_is_fetched_and_becomes_a_data_folder(tmp_path):
    """The archive goes through extraction, tokenisation and BPE; the raw reference is kept."""
    write_archive(tmp_path / "remote.tgz")
    run = prepare("prepare_iwslt14.sh", tmp_path, URL=f"file://{tmp_path}/remote.tgz", VOCAB_SIZE=60)
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "de-en.tgz", "remote.tgz"]
    data = tmp_path / "data"
    assert (data / "raw" / "test.en").read_text().startswith("The house's number TED.dev2010 now.\n")
    assert (data / "text" / "test.en").read_text().startswith("the house &apos;s number ted.dev2010 now .\n")


def test_failed_download_is_one_line(tmp_path):
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


def test_interrupt_leaves_nothing(text, tmp_path):
    """A script that is stopped while fairseq-preprocess runs removes what it had begun."""
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "fairseq-preprocess").write_text('#!/bin/sh\nkill -TERM "$PPID"\nsleep 1\n')
    (fake / "fairseq-preprocess").chmod(0o755)
    run = prepare("prepare_iwslt14.sh", tmp_path, path_first=fake, TOKENISED=text, VOCAB_SIZE=50)
    assert run.returncode == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "text"]


def test_the_synthetic_corpus_is_tokenised_and_keeps_its_raw_reference(tmp_path):
    run = prepare("prepare_synthetic.sh", tmp_path)
    assert run.returncode == 0, run.stderr
    data, frozen = tmp_path / "data", ROOT / "examples" / "corpus" / "test.en.xz"
    assert (data / "raw" / "test.en").read_bytes() == lzma.decompress(frozen.read_bytes())
    line = (data / "text" / "test.en").read_text().splitlines()[1]
    assert line == "they will not give the expensive tea to a farmer ."


@pytest.fixture
def french(text):
    """The same text as fr and en, each split under a name of its own; variables that prepare_corpus.sh takes for it."""
    for split in ("train", "valid", "test"):
        (text / f"{split}.de").rename(text / f"my {split}.fr")
        (text / f"{split}.en").rename(text / f"my {split}.en")
    prefixes = {name: text / f"my {name.lower()}" for name in ("TRAIN", "VALID", "TEST")}
    return {"SRC": "fr", "TGT": "en", "TOKENISED": "yes", "VOCAB_SIZE": 40, **prefixes}


def names_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_ones_own_text_becomes_a_data_folder_as_fairseqs_recipe_makes_it(french, tmp_path):
    """subword-nmt, a dictionary for each language."""
    settings = {**french, "BPE": "subword_nmt", "JOINED": "no"}
    run = prepare("prepare_corpus.sh", tmp_path, **settings)
    assert run.returncode == 0, run.stderr
    assert run.stderr == "" and len(run.stdout.splitlines()) == 1
    data = tmp_path / "data"
    assert names_in(data) == {
        *(name.replace("de", "fr") for name in BINARIES), "dict.fr.txt", "dict.en.txt", "code",
        "vocab_size", "text/test.fr", "text/test.en", "preprocess.log",
    }  # fmt: skip
    assert (data / "dict.fr.txt").read_bytes() != (data / "dict.en.txt").read_bytes()
    assert "@@ " in (data / "dict.en.txt").read_text()
    assert (data / "text" / "test.fr").read_bytes() == (tmp_path / "text" / "my test.fr").read_bytes()
    assert "is complete" in prepare("prepare_corpus.sh", tmp_path, **settings).stdout
    (data / "text" / "test.fr").unlink()
    assert "is ready" in prepare("prepare_corpus.sh", tmp_path, **settings).stdout
    assert (data / "text" / "test.fr").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "text"]


def test_raw_text_is_tokenised_and_pairs_are_held_out(french, tmp_path):
    train = french["TRAIN"]
    for language in ("fr", "en"):
        lines = [f"Number {n}, isn't it?" for n in range(50)]
        (train.parent / f"{train.name}.{language}").write_text("\n".join(lines) + "\n")
    run = prepare("prepare_corpus.sh", tmp_path, **{**french, "TOKENISED": "no", "VALID": 5, "TEST": 4})
    assert run.returncode == 0, run.stderr
    data = tmp_path / "data"
    raw = (data / "raw" / "test.en").read_text().splitlines()
    tokens = (data / "text" / "test.en").read_text().splitlines()
    assert len(raw) == len(tokens) == 4 and raw[0].startswith("Number ") and tokens[0].startswith("number ")
    assert (data / "sentencepiece.bpe.model").is_file() and not (data / "code").exists()


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"SRC": ""}, "SRC is not set; give SRC, TGT, TRAIN, VALID and TEST"),
        ({"TEST": ""}, "TEST is not set"),
        ({"TGT": "fr"}, "SRC and TGT are both fr; give two different languages"),
        ({"TGT": "../en"}, "TGT=../en is not a language code"),
        ({"BPE": "fastbpe"}, "BPE: there is no 'fastbpe'; use sentencepiece, subword_nmt"),
        ({"TOKENISED": "folder"}, "TOKENISED: there is no 'folder'; use yes, no"),
        ({"CLEAN": "very"}, "CLEAN: there is no 'very'; use yes, no"),
        ({"SRC": "it"}, "my train.it is missing"),
        ({"VALID": "nowhere/valid"}, "nowhere/valid.fr is missing"),
        ({"VALID": "{text}/my test", "TEST": "{text}/unequal"}, "unequal.fr has 1 lines but"),
        ({"VALID": "60"}, "cannot hold out 60 pairs of the 60 in"),
        ({"BPE": "subword_nmt", "VOCAB_SIZE": "5000"}, "--vocab-size 5000 is too large for this text; give at most"),
    ],
)
def test_bad_variables_of_ones_own_text_are_one_line(variables, expected, french, text, tmp_path):
    (text / "unequal.fr").write_text("un\n")
    (text / "unequal.en").write_text("one\ntwo\n")
    filled = {name: value.format(text=text) for name, value in variables.items()}
    assert_refused(prepare("prepare_corpus.sh", tmp_path, **{**french, **filled}), tmp_path, expected)
    assert len(list(text.iterdir())) == 8


def test_without_subword_nmt_there_is_one_line_before_anything_is_done(french, tmp_path):
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "python").write_text("#!/bin/sh\nexit 1\n")
    (fake / "python").chmod(0o755)
    run = prepare("prepare_corpus.sh", tmp_path, path_first=fake, **{**french, "BPE": "subword_nmt"})
    assert_refused(run, tmp_path, "run 'pip install subword-nmt'", left=("bin", "text"))
