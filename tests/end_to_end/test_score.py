"""``scripts/score.sh``: its row covers the whole test set and compares words with words."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from fairseq.data import Dictionary
from fairseq_cli.preprocess import cli_main as fairseq_preprocess

from fairseq_lot import cli
from fairseq_lot.errors import InputError
from fairseq_lot.experiment import score
from fairseq_lot.pretrained.text import joins
from tests.end_to_end.conftest import contents, in_this_process, train
from tests.end_to_end.deadly import finish, start

LABEL = '{"system": "softmax", "settings": {"attention": "softmax"}, "stage": "base"}'


@pytest.fixture
def refused(capsys):
    """A function that runs score.sh in this process, which must refuse with one line; it returns the line."""

    def refused(checkpoint, folder, out, *flags, base="-", label=LABEL):
        capsys.readouterr()
        words = [str(word) for word in (checkpoint, folder, out, base, label, *flags)]
        assert cli.run(score.build_parser, words, "score.sh") == 2
        error = capsys.readouterr().err
        assert error.startswith("score.sh: error: ") and error.count("\n") == 1
        return error

    return refused


@pytest.fixture(scope="module")
def foreign(data, tmp_path_factory):
    """A data folder without text and BPE model; its further test sets have sentences of more than 80 pieces."""
    home = tmp_path_factory.mktemp("foreign")
    lines = {side: (data / "bpe" / f"test.{side}").read_text(encoding="utf-8").splitlines() for side in ("de", "en")}
    places = {"test": (), "test1": (28, 29), "test2": (14,), "test3": (0,)}
    for name, long in places.items():
        for side, text in lines.items():
            made = [" ".join([text[i]] * 40).split()[:100] if i in long else text[i].split() for i in range(30)]
            (home / f"{name}.{side}").write_text("".join(" ".join(line) + "\n" for line in made), encoding="utf-8")
    prefixes = ("--testpref", ",".join(str(home / name) for name in places))
    words = ("-s", "de", "-t", "en", "--joined-dictionary", "--srcdict", data / "bin" / "dict.de.txt")
    in_this_process(fairseq_preprocess, *words, "--destdir", home / "bin", *prefixes)
    for file in (data / "bin").glob("*.de-en.*"):
        if not file.name.startswith("test"):
            shutil.copy(file, home / "bin")
    return home / "bin"


@pytest.fixture(scope="module")
def short_checkpoint(data, tmp_path_factory):
    """A model with 80 positions."""
    flags = ("--arch", "softmax_transformer_small", "--max-source-positions", 80, "--max-target-positions", 80)
    return train(data / "bin", tmp_path_factory.mktemp("short"), *flags, updates=5)


@pytest.mark.parametrize("skip", [(), ("--skip-invalid-size-inputs-valid-test",)], ids=["stops", "skips"])
@pytest.mark.parametrize(("subset", "sentences"), [("test1", "29, 30"), ("test2", "15"), ("test3", "1")])
def test_a_test_set_with_too_long_sentences_has_no_row(
    subset, sentences, skip, short_checkpoint, foreign, tmp_path, refused
):
    """The too long sentences are the last ones, one in the middle, or the first one."""
    large = ("--max-source-positions", 200, "--max-target-positions", 200)
    error = refused(short_checkpoint, foreign, tmp_path / "out", "--gen-subset", subset, *large, *skip)
    assert f"split {subset}: source {sentences} of 30 ha" in error and f"target {sentences} of 30 ha" in error
    assert "the model takes 80" in error and "remove them from both sides, or train with a larger --max-source" in error
    assert ("leave out --skip-invalid-size-inputs-valid-test" in error) == bool(skip)
    assert contents(tmp_path) == {}


def test_the_limits_of_the_flags_count_too(stock_checkpoint, foreign, tmp_path, refused):
    words = (stock_checkpoint, foreign, tmp_path / "out", "--gen-subset", "test2")
    error = refused(*words, "--max-source-positions", 60)
    assert "source 15 of 30 has 101 pieces" in error and "fairseq-generate takes 60; shorten it" in error
    assert "--max-tokens is 50" in refused(*words, "--max-tokens", 50)


@pytest.mark.slow
def test_a_data_folder_without_text_gives_a_row_of_the_whole_test_set(stock_checkpoint, foreign, tmp_path):
    """Only the dictionary shows how pieces are joined. A second call does not translate again."""
    words = (stock_checkpoint, foreign, tmp_path / "out", "-", LABEL, "--beam", 1, "--cpu", "--gen-subset", "test2")
    for time in (None, 1):
        finish(start("bash", "scripts/score.sh", *words))
        if time is not None:
            assert (tmp_path / "out.out").stat().st_mtime == time
        os.utime(tmp_path / "out.out", (1, 1))
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert row["sentences"] == 30 and row["device"].startswith("CPU, threads: ") and row["seconds"] > 0
    assert "--remove-bpe sentencepiece" in row["command"] and "--source-lang de --target-lang en" in row["command"]
    lines = (tmp_path / "out.en").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 30 and "\u2581" not in "".join(lines)


def test_input_that_cannot_be_scored_is_refused_in_one_line(
    stock_checkpoint, data, foreign, tmp_path, refused, monkeypatch
):
    out = tmp_path / "out"
    assert "there is no checkpoint no.pt" in refused("no.pt", foreign, out)
    assert "no translations of the base, no.out" in refused(stock_checkpoint, foreign, out, base="no.out")
    assert "--label '{'" in refused(stock_checkpoint, foreign, out, label="{")
    assert "fairseq-generate refuses its flags: unrecognized" in refused(stock_checkpoint, foreign, out, "--magic")
    assert "test9.de-en.de.bin is missing" in refused(stock_checkpoint, foreign, out, "--gen-subset", "test9")
    error = refused(stock_checkpoint, foreign, out, "--remove-bpe")
    assert "does not join" in error and "dict.en.txt, pieces of sentencepiece" in error
    (tmp_path / "file").touch()
    assert "cannot write in" in refused(stock_checkpoint, foreign, tmp_path / "file" / "out")
    assert sorted(contents(tmp_path)) == [tmp_path / "file"]
    (tmp_path / "text").mkdir()
    folder = shutil.copytree(foreign, tmp_path / "bin")
    (folder / "text").mkdir()
    shutil.copy(data / "bpe" / "valid.en", folder / "text" / "valid.en")  # in pieces
    monkeypatch.setattr(score, "translate", lambda *_, **__: None)
    for name, text in (("out", "H-0\t-1\ta\n"), ("err", ""), ("device", "CPU\n")):
        (tmp_path / f"out.{name}").write_text(text)
    assert "valid.en, line 1: has pieces" in refused(stock_checkpoint, folder, out, "--gen-subset", "valid")


def test_translations_are_made_again_for_other_data_or_flags_only(tmp_path):
    checkpoint, data, out = tmp_path / "a.pt", tmp_path / "data", tmp_path / "folder" / "out"
    checkpoint.touch()
    data.mkdir()
    made = []

    def translate(flag="a"):
        command = ["sh", "-c", f"echo made >>{tmp_path}/calls; echo {flag}"]
        score.translate(command, out, inputs=[str(checkpoint), str(data)], cpu=True)
        made.append(len((tmp_path / "calls").read_text().splitlines()))
        return out.with_name("out.out").read_text().strip()

    assert [translate(flag) for flag in "aabb"] == list("aabb") and made == [1, 1, 2, 2]
    (data / "test.de-en.de.bin").touch()
    translate("b")
    for time in (2, 1):  # even if the checkpoint becomes older, as after cp -p
        os.utime(checkpoint, (time, time))
        translate("b")
        translate("b")
    assert made[4:] == [3, 4, 4, 5, 5]
    assert out.with_name("out.device").read_text().startswith("CPU, threads: ")
    out.with_name("out.device").write_text("GPU\n")
    translate("b")
    assert out.with_name("out.device").read_text() == "GPU\n", "the device is that of the translation"
    with pytest.raises(InputError, match="fairseq-generate failed: no$"):
        score.translate(["sh", "-c", "echo no >&2; exit 1"], out, inputs=[], cpu=True)
    assert not out.with_name("out.out").exists()


def test_of_two_calls_at_once_one_translates_and_its_command_inherits_the_lock(tmp_path):
    made = f"echo made >>{tmp_path}/calls; sleep 0.2; readlink /proc/$$/fd/* || true"
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(score.translate, ["sh", "-c", made], tmp_path / "out", inputs=[], cpu=True) for _ in range(2)
        ]
    assert [call.result() for call in calls] == [None, None]
    assert (tmp_path / "calls").read_text() == "made\n"
    assert f"{tmp_path}/out.lock" in (tmp_path / "out.out").read_text().splitlines(), (
        "the command does not inherit the lock"
    )


def test_the_flag_that_joins_pieces_follows_from_the_dictionary():
    dictionaries = {}
    for kind, piece in (("sentencepiece", "\u2581a"), ("subword_nmt", "a@@"), (None, "a")):
        dictionaries[kind] = Dictionary()
        dictionaries[kind].add_symbol(piece)
        flags = [] if kind is None else ["--remove-bpe", kind]
        for typed in (None, "sentencepiece", "subword_nmt", "@@ ", "letter"):
            if typed is None or joins(typed, kind):
                assert score.remove_bpe(typed, dictionaries[kind], "dict") == flags
            else:
                with pytest.raises(InputError, match="does not join what is in dict"):
                    score.remove_bpe(typed, dictionaries[kind], "dict")
    assert joins("@@ ", "subword_nmt") and not joins("subword_nmt", "sentencepiece") and joins("subword_nmt", None)
    assert not joins("sentencepiece", None), "it would join all words to one"
