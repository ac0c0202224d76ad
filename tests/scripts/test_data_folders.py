"""What the stages read from a data folder, and that one of fairseq-preprocess alone will do."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# Notes how it was called.
NOTE = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$CALLS"
"""
# Sentences come by length; the second reference is empty.
GENERATE = r"""
printf 'S-2\tx\nT-2\tthe last one\nH-2\t-0.1\tthe last one\nD-2\t-0.1\tthe last one\n'
printf 'S-1\tx\nT-1\t\nH-1\t-0.1\ta\nD-1\t-0.1\ta\n'
printf 'S-0\tx\nT-0\tthe first\nH-0\t-0.1\ta first\nD-0\t-0.1\ta first\n'
"""


def data_folder(folder, *pairs, dictionary="the 1\n"):
    """The files that fairseq-preprocess writes, empty but for the dictionaries."""
    folder.mkdir()
    for pair in pairs:
        for language in pair.split("-"):
            (folder / f"dict.{language}.txt").write_text(f"{language} 1\n{dictionary}", encoding="utf-8")
            for split in ("train", "valid", "test"):
                for kind in ("bin", "idx"):
                    (folder / f"{split}.{pair}.{language}.{kind}").write_text("")
    return folder


def ask(function, data, **variables):
    """Call a function of data.sh on a folder, and print the languages that it found."""
    command = f"source scripts/lib/common.sh; source scripts/lib/data.sh; {function} {data}; echo $SRC $TGT"
    return subprocess.run(
        ["bash", "-euc", command, "stage.sh"], cwd=ROOT, capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], **variables},
    )  # fmt: skip


def test_languages_are_those_of_the_files(tmp_path):
    one = data_folder(tmp_path / "one", "fr-en")
    two = data_folder(tmp_path / "two", "fr-en", "fr-it")
    assert ask("find_languages", one).stdout == "fr en\n"
    assert ask("find_languages", two, SRC="fr", TGT="it").stdout == "fr it\n"
    assert ask("find_languages", two, SRC="en", TGT="fr").stdout == "en fr\n"
    (tmp_path / "nothing").mkdir()
    for data, variables, expected in (
        (one, {"TGT": "de"}, f"{one} has fr-en and not fr-de; change SRC, TGT or DATA"),
        (two, {}, f"{two} has several pairs, fr-en fr-it; choose one with SRC and TGT"),
        (two, {"SRC": "fr"}, f"{two} has several pairs, fr-en fr-it; choose one with SRC and TGT"),
        (
            tmp_path / "nothing",
            {},
            f"{tmp_path}/nothing is not a data folder; make it with one of scripts/prepare_*.sh",
        ),
        (tmp_path / "nowhere", {}, f"{tmp_path}/nowhere is not a data folder"),
    ):
        refused = ask("find_languages", data, **variables)
        assert refused.returncode == 2 and refused.stdout == "" and len(refused.stderr.splitlines()) == 1
        assert refused.stderr.startswith(f"stage.sh: error: {expected}")


@pytest.mark.parametrize(
    "file, dictionary, expected",
    [
        ("sentencepiece.bpe.model", "the 1\n", "sentencepiece"),
        ("code", "the 1\n", "subword_nmt"),
        ("code", "\u2581the 1\n", "subword_nmt"),
        ("sentencepiece.bpe.model", "@@ 1\n", "sentencepiece"),
        (None, "\u2581the 1\n", "sentencepiece"),
        (None, "the@@ 12\n", "subword_nmt"),
        (None, "@-@ 1\na\u2581b 1\n@@x 1\n", "none"),
    ],
)
def test_pieces_are_joined_as_the_folder_says(file, dictionary, expected, tmp_path):
    data = data_folder(tmp_path / "data", "fr-en", dictionary=dictionary)
    if file:
        (data / file).write_text("")
    for locale in ("C", "C.UTF-8"):
        done = ask("joining", data, SRC="fr", TGT="en", LC_ALL=locale)
        assert done.stdout.split() == [expected, "fr", "en"] and done.stderr == ""


@pytest.fixture
def stage(tmp_path):
    """Call a stage with stand-ins for fairseq and fairseq-lot; returns how they were called."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, more in (("fairseq-train", ""), ("fairseq-generate", GENERATE), ("fairseq-lot", "")):
        (tools / name).write_text(NOTE + more)
        (tools / name).chmod(0o755)
    (tmp_path / "base.pt").write_text("")

    def stage(script, **variables):
        environment = {
            "PATH": f"{tools}:{os.environ['PATH']}", "VIRTUAL_ENV": "/some/environment", "DEVICE": "cpu",
            "SIZE": "small", "CALLS": str(tmp_path / "calls"),
            **{name: str(value) for name, value in variables.items()},
        }  # fmt: skip
        (tmp_path / "calls").unlink(missing_ok=True)
        command = ["bash", str(ROOT / "scripts" / "stages" / script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return (tmp_path / "calls").read_text().splitlines()

    return stage


def test_training_shares_embeddings_as_far_as_the_dictionaries_allow(stage, tmp_path):
    data = data_folder(tmp_path / "data", "fr-en")
    check, train = stage("pretrain.sh", DATA=data, SAVE=tmp_path / "apart")
    assert check == f"fairseq-lot check {data} --split train --source-lang fr --target-lang en"
    assert f"{data} --user-dir fairseq_lot -s fr -t en --share-decoder-input-output-embed --optimizer" in train
    shutil.copy(data / "dict.fr.txt", data / "dict.en.txt")
    settings = {"DATA": data, "SWAPPED": tmp_path / "base.pt", "SAVE": tmp_path / "joined"}
    check, train = stage("finetune.sh", **settings)
    assert check.endswith(f"--split train --path {tmp_path}/base.pt --source-lang fr --target-lang en")
    assert "-s fr -t en --share-all-embeddings --optimizer" in train


def test_without_text_the_references_are_the_target_side(stage, tmp_path):
    data = data_folder(tmp_path / "plain", "fr-en", dictionary="the@@ 1\n")
    settings = {"DATA": data, "CKPT": tmp_path / "base.pt", "RESULTS": tmp_path / "results.jsonl"}
    _, generate, score = stage("score.sh", **settings)
    assert "-s fr -t en --gen-subset test" in generate and "--remove-bpe subword_nmt" in generate
    out = tmp_path / "base.test.out"
    assert f"--tokenised-reference {out}.reference --target-lang en --results" in score
    assert "--raw-reference" not in score and "--dataset plain --architecture" in score
    assert Path(f"{out}.reference").read_text() == "the first\n\nthe last one\n"


def test_text_in_the_folder_is_the_reference(stage, tmp_path):
    data = data_folder(tmp_path / "full", "fr-en")
    for name, content in (("text/test.en", "the\n"), ("raw/test.en", "The\n"), ("description.txt", "My corpus\n")):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_text(content)
    settings = {"DATA": data, "CKPT": tmp_path / "base.pt", "RESULTS": tmp_path / "results.jsonl", "CHECKED": "yes"}
    _, score = stage("score.sh", **settings)
    expected = (
        f"--tokenised-reference {data}/text/test.en --target-lang en --raw-reference {data}/raw/test.en --results"
    )
    assert expected in score and "--dataset My corpus --architecture" in score
    assert not Path(f"{tmp_path}/base.test.out.reference").exists()


def test_no_language_stands_in_the_scripts():
    """But in those that make German-English corpora."""
    for path in (ROOT / "scripts").rglob("*.*"):
        if path.suffix in (".sh", ".py") and path.name not in ("prepare_iwslt14.sh", "prepare_synthetic.sh"):
            code = re.sub(r"^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            code = code.replace("IWSLT14=data-bin/iwslt14.de-en\n", "")
            assert not re.search(r"(?<!\w)(de|en)(?!\w)", code), path


@pytest.mark.slow
def test_a_folder_of_fairseq_preprocess_alone_goes_through_every_stage(tmp_path):
    """subword-nmt, a dictionary for each language, no text, model or description beside them."""
    text = tmp_path / "text"
    text.mkdir()
    for name, count in (("train", 200), ("valid", 20), ("test", 20)):
        for language, words in (("fr", "la maison est le numéro"), ("en", "the house is number")):
            lines = [f"{words} {number * number} ." for number in range(count)]
            (text / f"{name}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def call(script, **variables):
        environment = {
            **os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1",
            "DEVICE": "cpu", "SIZE": "small", "EPOCHS": "1", "MAX_TOKENS": "500", "BEAM": "1",
            "RESULTS": str(tmp_path / "results.jsonl"), **{name: str(value) for name, value in variables.items()},
        }  # fmt: skip
        command = ["bash", str(ROOT / "scripts" / script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    made = tmp_path / "made"
    call(
        "prepare_corpus.sh", SRC="fr", TGT="en", TRAIN=text / "train", VALID=text / "valid", TEST=text / "test",
        OUT=made, TOKENISED="yes", BPE="subword_nmt", JOINED="no", VOCAB_SIZE=40,
    )  # fmt: skip
    data = tmp_path / "plain"
    data.mkdir()
    for file in [*made.glob("*.bin"), *made.glob("*.idx"), *made.glob("dict.*")]:
        shutil.copy(file, data)
    base, swapped = tmp_path / "base" / "checkpoint_best.pt", tmp_path / "swapped.pt"
    call("stages/pretrain.sh", DATA=data, SAVE=tmp_path / "base")
    call("stages/score.sh", DATA=data, CKPT=base)
    lot = {"ATTENTION": "lot", "CALIBRATE": "no", "DATA": data, "BASELINE": tmp_path / "base/checkpoint_best.test.out"}
    call("stages/plug_and_play.sh", BASE=base, OUT=swapped, **lot)
    call("stages/score.sh", CKPT=swapped, STAGE="plug-and-play", **lot)
    call("stages/finetune.sh", SWAPPED=swapped, SAVE=tmp_path / "tuned", **lot)
    call("stages/score.sh", CKPT=tmp_path / "tuned" / "checkpoint_best.pt", STAGE="fine-tuned", **lot)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(row["dataset"], row["stage"], row["sentences"]) for row in rows] == [
        ("plain", "base", 20), ("plain", "plug-and-play", 20), ("plain", "fine-tuned", 20)
    ]  # fmt: skip
    reference = tmp_path / "base" / "checkpoint_best.test.out.reference"
    assert reference.read_text() == (text / "test.en").read_text()
