"""The IWSLT'14 recipe on a tiny archive of the same form."""

import io
import tarfile

import pytest

from fairseq_lot.cli import main
from fairseq_lot.corpus import iwslt14
from fairseq_lot.corpus.iwslt14 import LANGUAGES, TEST, split_archive
from fairseq_lot.errors import InputError

TALK = "<url>http://x</url>\n<keywords>a, b</keywords>\n<speaker>X</speaker>\n<talkid>1</talkid>\n"


def train_file(language):
    """A title, a description and fifty sentences; sentence 5 is far longer in English than in German."""
    lines = [f"<title>Talk {language}</title>", f"<description>About {language}</description>"]
    for number in range(50):
        extra = " and so on and on" if number == 5 and language == "en" else ""
        lines.append(f" Word {number}{extra}. ")
    return TALK + "\n".join(lines) + "\n"


def file_of_test(name, language):
    body = f'<seg id="1"> It’s {name} {language} </seg>\n<seg id="2">Two &amp; more.</seg>\n'
    return f'<?xml version="1.0"?>\n<doc docid="1">\n<title>no</title>\n{body}</doc>\n'


def files():
    """The members of a well-formed archive."""
    content = {f"de-en/train.tags.de-en.{language}": train_file(language) for language in LANGUAGES}
    for name in TEST:
        content.update({f"de-en/{name}.{language}.xml": file_of_test(name, language) for language in LANGUAGES})
    content["de-en/README"] = "about"
    return content


def pack(content):
    """Return a .tgz of the given members as bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in content.items():
            data = text if isinstance(text, bytes) else text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "de-en.tgz"
    path.write_bytes(pack(files()))
    return path


def test_training_pairs_are_cleaned_and_every_23rd_is_for_validation(archive):
    splits = split_archive(archive)
    german, english = splits["train"]
    # 52 sentences, one dropped for its length ratio, then numbers 23 and 46 of the rest are validation
    assert len(german) == len(english) == 49
    assert english[:3] == ["Talk en", "About en", "Word 0."]
    assert "Word 5." not in german
    assert splits["valid"] == [["Word 21.", "Word 44."]] * 2
    assert splits["test"][0][:2] == ["It's IWSLT14.TED.dev2010.de-en de", "Two &amp; more."]
    assert [line.split()[1] for line in splits["test"][1][::2]] == list(TEST)


def test_metadata_and_tags_are_removed():
    lines = ["<url>x</url>", "a <talkid>1</talkid>", "<doc id='1'>", "A <b> c", "<title> T </title>"]
    assert iwslt14.train_lines(lines) == ["A <b> c", "T"]
    assert iwslt14.test_lines(["<hl>", '<seg id="12">  Don’t  </seg>  ']) == ["Don't"]


def test_command_writes_the_folder(archive, tmp_path, capsys):
    out = tmp_path / "raw"
    assert main(["iwslt14", "--archive", str(archive), "--out", str(out)]) == 0
    assert capsys.readouterr().err == "IWSLT'14 De-En pairs: train 49, valid 2, test 10\n"
    assert sorted(path.name for path in out.iterdir()) == sorted(
        f"{split}.{language}" for split in ("train", "valid", "test") for language in LANGUAGES
    )
    assert (out / "valid.en").read_text() == "Word 21.\nWord 44.\n"


def test_an_archive_that_is_there_is_not_fetched_again(archive, tmp_path):
    words = ["iwslt14", "--archive", str(archive), "--out", str(tmp_path / "raw")]
    assert main([*words, "--url", "file:///no/such/archive.tgz"]) == 0


def test_the_nested_archive_gives_the_same_splits(archive, tmp_path):
    outer, texts = tmp_path / "2014-01.tgz", "2014-01/texts"
    inner = {f"{texts}/en/de/en-de.tgz": b"another one", f"{texts}/de/en/de-en.tgz": archive.read_bytes()}
    outer.write_bytes(pack(inner))
    assert split_archive(outer) == split_archive(archive)


def test_members_outside_of_the_archive_are_not_written(tmp_path):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    names = ("../../evil", str(tmp_path / "evil"), "de-en/../../evil")
    (folder / "de-en.tgz").write_bytes(pack(files() | dict.fromkeys(names, b"no")))
    assert main(["iwslt14", "--archive", str(folder / "de-en.tgz"), "--out", str(folder / "out")]) == 0
    assert {path.name for path in folder.iterdir()} == {"de-en.tgz", "out"} and not list(tmp_path.rglob("evil*"))


@pytest.mark.parametrize("tenths", range(10))
def test_every_truncation_is_refused(tenths, archive):
    data = archive.read_bytes()
    archive.write_bytes(data[: tenths * len(data) // 10])
    with pytest.raises(InputError, match="truncated|lacks"):
        split_archive(archive)


def damaged(name, content=None):
    """An archive in which one file has other content; None: it is missing."""
    others = {key: value for key, value in files().items() if key != f"de-en/{name}"}
    return pack(others if content is None else {**others, f"de-en/{name}": content})


@pytest.mark.parametrize(
    "data, expected",
    [
        (None, "is not a file"),
        (b"<html>not found</html>", "truncated or not a .tgz archive"),
        (pack({"hello.txt": "hello"}), "lacks train.tags.de-en.de"),
        (pack({"texts/de/en/de-en.tgz": b"short"}), "truncated or not a .tgz archive"),
        (damaged(f"{TEST[1]}.en.xml"), f"lacks {TEST[1]}.en.xml"),
        (damaged("train.tags.de-en.de", "Eins.\n"), "1 German and 52 English lines"),
        (damaged(f"{TEST[0]}.de.xml", "<doc>"), "0 German and 2 English lines"),
        (damaged("train.tags.de-en.de", b"gut\n\xf6\n"), "line 2: not valid UTF-8"),
    ],
)
def test_a_bad_archive_is_refused_in_one_line(data, expected, tmp_path, refused):
    path = tmp_path / "archive.tgz"
    if data is not None:
        path.write_bytes(data)
    refused(["iwslt14", "--archive", path, "--out", tmp_path / "raw"], expected)
    assert not (tmp_path / "raw").exists()
