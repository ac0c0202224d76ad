"""prepare_iwslt14.sh and prepare_synthetic.sh on a tiny tokenised folder: result, reuse and bad input."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BINARIES = [f"{split}.de-en.{side}.{kind}" for split in ("train", "valid", "test") for side in ("de", "en") for kind in
            ("bin", "idx")]  # fmt: skip
OTHERS = ["dict.de.txt", "dict.en.txt", "sentencepiece.bpe.model", "description.txt", "vocab_size"]


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
    assert (data / "description.txt").read_text() == "tiny\n"
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


def test_another_vocabulary_is_refused(prepared):
    tmp_path, _ = prepared
    run = prepare("prepare_iwslt14.sh", tmp_path, TOKENISED=tmp_path / "text", VOCAB_SIZE=60)
    assert_refused(run, tmp_path, "made with VOCAB_SIZE=50, not 60", left=("data", "text"))


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
        ({"TOKENISED": "{text}", "VOCAB_SIZE": "many"}, "VOCAB_SIZE=many is not a whole number"),
        ({"TOKENISED": "{text}", "OUT": "{text}/train.de/data"}, "cannot write in"),
        ({"TOKENISED": "{text}", "OUT": "{text}"}, "exists and is not a data folder"),
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
    assert (data / "description.txt").read_text() == "IWSLT'14 De-En\n"
    assert (data / "raw" / "test.en").read_text().startswith("The house's number TED.dev2010 now.\n")
    assert (data / "text" / "test.en").read_text().startswith("the house &apos;s number ted.dev2010 now .\n")


def test_failed_download_is_one_line(tmp_path):
    run = prepare("prepare_iwslt14.sh", tmp_path, URL=f"file://{tmp_path}/nothing.tgz")
    assert_refused(run, tmp_path, "cannot download", left=())


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
    """A small text stands in for the generator's, which has its own tests."""
    raw = write_text(tmp_path / "text")
    (raw / "test.en").write_text("The house's number.\n" * 4)
    fake = tmp_path / "bin"
    fake.mkdir()
    real = Path(sys.executable).parent / "fairseq-lot"
    (fake / "fairseq-lot").write_text(
        f'#!/bin/sh\nif [ "$1" = synthetic ]; then cp -R "{raw}" "$3"; else exec "{real}" "$@"; fi\n'
    )
    (fake / "fairseq-lot").chmod(0o755)
    run = prepare("prepare_synthetic.sh", tmp_path, path_first=fake, VOCAB_SIZE=50)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "data" / "description.txt").read_text() == "synthetic German-English\n"
    assert (tmp_path / "data" / "raw" / "test.en").read_text() == "The house's number.\n" * 4
    assert (tmp_path / "data" / "text" / "test.en").read_text() == "the house &apos;s number .\n" * 4
