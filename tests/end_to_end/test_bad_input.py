"""Bad input: one clear line that names the value, exit code 2, nothing half-written."""

import shutil

import pytest
from fairseq_cli.preprocess import cli_main as fairseq_preprocess

from tests.end_to_end.conftest import (
    ROOT,
    command,
    contents,
    edited,
    fairseq_lot,
    in_this_process,
    refuse,
    refuse_and_keep,
    train,
)
from tests.end_to_end.deadly import finish, start
from tests.end_to_end.test_malformed_checkpoints import words_of


def test_an_output_that_cannot_be_written_is_refused_at_once(data, stock_checkpoint, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    swap = ("swap", "--no-calibrate", "--path", stock_checkpoint, "--attention", "lot", "--out")
    diagnose = ("diagnose", "--path", stock_checkpoint, data / "bin", "--json")
    for words in (swap, diagnose):
        for out in ("folder", "file/out"):
            refuse(capsys, *words, tmp_path / out, naming=[out])
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "file", tmp_path / "folder"]


def test_a_full_disk_leaves_nothing(stock_checkpoint, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fairseq_lot.output.files.os.fsync", full)
    out = tmp_path / "out.pt"
    words = ("swap", "--no-calibrate", "--path", stock_checkpoint, "--attention", "lot", "--out", out)
    refuse(capsys, *words, naming=[out, "No space"])
    assert list(tmp_path.iterdir()) == []


def test_check_ignores_how_the_training_read_its_data(data, stock_checkpoint, tmp_path):
    with edited(stock_checkpoint, tmp_path / "raw.pt") as state:
        state["cfg"]["task"].update(dataset_impl="raw", num_batch_buckets=5)
    fairseq_lot("check", data / "bin", "--path", tmp_path / "raw.pt")


def test_check_refuses_incomplete_and_damaged_data(data, stock_checkpoint, tmp_path, capsys):
    refuse(capsys, "check", tmp_path / "nowhere", naming=["nowhere"])
    copy = shutil.copytree(data / "bin", tmp_path / "copy")
    (copy / "test.de-en.en.idx").unlink()
    refuse(capsys, "check", copy, naming=["test.de-en.en.idx"])
    shutil.copy(data / "bin" / "test.de-en.en.idx", copy)
    for kind in ("idx", "bin"):
        shutil.copy(data / "bin" / f"train.de-en.de.{kind}", copy / f"test.de-en.de.{kind}")
    refuse(capsys, "check", copy, naming=["300", "60"])
    (copy / "dict.de.txt").open("a").write("one_more 1\n")
    refuse(capsys, "check", copy, "--split", "valid", "--path", stock_checkpoint, naming=["symbols"])


def test_check_refuses_sources_that_the_model_cannot_take(data, tmp_path, capsys):
    flags = ("--arch", "lot_transformer_small", "--max-source-positions", 12, "--skip-invalid-size-inputs-valid-test")
    checkpoint = train(data / "bin", tmp_path, *flags, updates=1)
    refuse(capsys, "check", data / "bin", "--path", checkpoint, naming=["takes 12", "--max-source-positions"])


@pytest.mark.parametrize("with_model", [False, True])
def test_check_refuses_sentences_that_are_longer_than_the_typed_limits(with_model, data, stock_checkpoint, capsys):
    """Long targets count, too: fairseq-train and fairseq-generate abort at a long source and at a long target."""
    folder, words, longest = data / "bin", ("--path", stock_checkpoint) if with_model else (), {}
    places = []
    for side, language in (("source", "de"), ("target", "en")):
        lines = (data / "bpe" / f"valid.{language}").read_text(encoding="utf-8").splitlines()
        longest[side] = max(len(line.split()) for line in lines)
        places.append(1 + [len(line.split()) for line in lines].index(longest[side]))
    limits = [word for side, most in longest.items() for word in (f"--max-{side}-positions", most + 1)]
    fairseq_lot("check", folder, "--split", "valid", *words, *limits)
    said = [f"{most} pieces ({side}, sentence {i})" for (side, most), i in zip(longest.items(), places, strict=True)]
    said = f"valid has 60 sentences, the longest {' and '.join(said)}\n"
    assert capsys.readouterr().out.endswith(said) and longest["source"] != longest["target"]
    for side, most in longest.items():
        option = f"--max-{side}-positions"
        naming = [f"valid: {side} ", f"the model takes {most}", option]
        refuse(capsys, "check", folder, "--split", "valid", *words, option, most, naming=naming)
    refuse(capsys, "check", folder, "--max-target-positions", 0, naming=["--max-target-positions must be at least 1"])


def test_check_refuses_an_empty_source(data, tmp_path, capsys):
    bpe = tmp_path / "bpe"
    shutil.copytree(data / "bpe", bpe)
    lines = (bpe / "test.de").read_text().splitlines()
    (bpe / "test.de").write_text("\n".join([*lines[:4], "", *lines[5:]]) + "\n")
    in_this_process(
        fairseq_preprocess, "-s", "de", "-t", "en", "--testpref", bpe / "test", "--destdir", tmp_path / "bin",
        "--srcdict", data / "bin" / "dict.de.txt", "--joined-dictionary",
    )  # fmt: skip
    refuse(capsys, "check", tmp_path / "bin", naming=["sentence 5 is empty"])


def test_check_prints_sizes_and_the_flags_that_they_need(data, long, capsys):
    """``check`` prints the size of each split and the flags that they need."""
    fairseq_lot("check", data / "bin")
    *splits, about, training, translating = capsys.readouterr().out.splitlines()
    counts = [("train", "300"), ("valid", "60"), ("test", "60")]
    assert [line.split(": ")[1].split()[:3] for line in splits] == [[name, "has", number] for name, number in counts]
    assert about.startswith("de to en, one joined dictionary (")
    assert about.endswith(" symbols), pieces of sentencepiece")
    assert training.startswith("fairseq-train: --source-lang de --target-lang en --share-all-embeddings, and a batch")
    assert translating == "fairseq-generate: --remove-bpe sentencepiece"
    fairseq_lot("check", long)
    first, second, about, training, translating, last = capsys.readouterr().out.splitlines()
    assert "unknown" not in first and "; unknown pieces: " in second and "% (source) and " in second
    assert about.startswith("de to en, two dictionaries (")
    positions = "--max-source-positions 1101 --max-target-positions 1101"
    assert f"--share-decoder-input-output-embed {positions}, and a batch of at least 1101 --max-tokens" in training
    assert translating == f"fairseq-generate: --remove-bpe sentencepiece {positions}"
    assert last.startswith("without these positions fairseq-train skips longer pairs of train")


@pytest.fixture(scope="module")
def long(data, tmp_path_factory):
    """A folder with two dictionaries; the third pair of train and the first of valid have 1,100 pieces a side."""
    home = tmp_path_factory.mktemp("long")
    for side in ("de", "en"):
        for name, place in (("train", 2), ("valid", 0)):
            lines = (data / "bpe" / f"{name}.{side}").read_text(encoding="utf-8").splitlines()[:60]
            lines[place] = " ".join((" ".join(lines).split() * 2)[:1100])
            (home / f"{name}.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    prefixes = ("--trainpref", home / "train", "--validpref", home / "valid")
    in_this_process(fairseq_preprocess, "-s", "de", "-t", "en", "--destdir", home / "bin", *prefixes)
    return home / "bin"


def test_check_refuses_data_at_which_a_training_would_stop(long, stock_checkpoint, tmp_path, capsys):
    """The limits are those of its flags, its architecture or the checkpoint that it starts from."""
    training = ("check", long, "--training")
    flags = ("--arch", "lot_transformer_small", "--optimizer", "adam", "--max-tokens", 4096)
    valid = f"{long}, split valid: source 1 of 60 has 1101 pieces with the end of sentence, the model takes 1024; "
    refuse(capsys, *training, *flags, naming=[valid + "target", "larger --max-source-positions and --max-target-"])
    only = ("--max-target-positions=2000", "--max-source-positions", 1024)
    refuse(capsys, *training, *flags, *only, naming=[valid + "shorten it", "train with a larger --max-source"])
    with edited(stock_checkpoint, tmp_path / "longer.pt") as state:
        vars(state["cfg"]["model"]).update(max_source_positions=2000, max_target_positions=2000)
    tuning = ("--arch", "pluggable_transformer", *flags[2:], "--finetune-from-model", tmp_path / "longer.pt")
    for more, left_out in (
        ((*flags, "--skip-invalid-size-inputs-valid-test"), True),
        ((*flags, "--disable-validation"), True),
        ((*flags, "--max-source-positions", 1101, "--max-target-positions=1101"), False),
        ((*flags, "--truncate-source", "--max-target-positions", 1101), False),
        (tuning, False),
    ):
        capsys.readouterr()
        fairseq_lot(*training, *more)
        said = capsys.readouterr().out.splitlines()
        of_train = "fairseq-train skips 1 of 60 pairs of train, longer than 1024 pieces of the source or 1024 of the"
        assert [of_train in line and line.endswith(": 3") for line in said[:1]] == [True] * left_out
    for more, naming in (
        ((*tuning, "--max-tokens", 1000), ["a batch has 1000", "give a larger --max-tokens-valid"]),
        ((*flags, "--max-tokens", 2), ["all pairs of train are longer than"]),
        ((*flags, "--eval-bleu", "--eval-bleu-remove-bpe", "subword_nmt"), ["does not fit", "give sentencepiece"]),
        ((*flags, "--magic"), ["fairseq-train refuses its flags: unrecognized arguments: --magic"]),
        (("--lr", 1), ["--training needs", "--arch"]),
        ((*flags, "-s", "fr", "-t", "en"), ["has no sentences of fr and en"]),
    ):
        refuse(capsys, *training, *more, naming=naming)
    refuse(capsys, "check", long, "--split", "train", *training[2:], *flags, naming=["--split cannot be used with"])
    fairseq_lot(*training, *flags, "--task", "translation_multi_simple_epoch")
    assert "not checked, because --task translation_multi" in capsys.readouterr().out


def test_pretrain_sh_refuses_too_long_sentences_before_it_trains(long, tmp_path):
    said = finish(start("bash", "scripts/pretrain.sh", long, tmp_path / "out"), 2).splitlines()
    assert len(said) == 2 and "skips 1 of 60 pairs of train" in said[0] and "split valid: source 1" in said[1]
    assert list(tmp_path.iterdir()) == []


def reverse(file):
    """Reverse the lines of a file."""
    file.write_text("".join(reversed(file.read_text(encoding="utf-8").splitlines(keepends=True))), encoding="utf-8")


FRENCH = ("--source-lang", "fr", "--target-lang", "en")
# name: (change of a data folder, options, part of the error)
FOLDERS = {
    "no-source-dictionary": (lambda folder: (folder / "dict.de.txt").unlink(), (), "dict.de.txt is missing"),
    "no-target-dictionary": (lambda folder: (folder / "dict.en.txt").unlink(), (), "dict.en.txt is missing"),
    "longer-dictionary": (lambda folder: (folder / "dict.en.txt").open("a").write("more 1\n"), (), "dict.en.txt has"),
    "other-pieces": (
        lambda folder: reverse(folder / "dict.en.txt"),
        (),
        "dict.en.txt has other pieces than",
    ),
    "other-language": (lambda folder: None, FRENCH, "dict.fr.txt is missing (there is dict.de.txt, dict.en.txt)"),
    "half-a-pair": (lambda folder: None, FRENCH[2:], "--source-lang and --target-lang go together"),
}


@pytest.mark.fast_if(
    lambda name, command: (
        command == "diagnose" or (name, command) in {("other-language", "sweep"), ("other-pieces", "check")}
    )
)
@pytest.mark.parametrize("command", ["calibrate", "check", "diagnose", "report", "sweep", "translate"])
@pytest.mark.parametrize("name", FOLDERS)
def test_data_folders_of_other_languages_or_dictionaries_are_refused(
    name, command, data, stock_checkpoint, lot_checkpoint, tmp_path, capsys
):
    change, options, message = FOLDERS[name]
    shutil.copytree(data / "bin", tmp_path / "bin", ignore=shutil.ignore_patterns("text"))
    shutil.copytree(data / "text", tmp_path / "text")
    change(tmp_path / "bin")
    path = lot_checkpoint if command == "calibrate" else stock_checkpoint
    words = words_of(command, tmp_path / "bin", path, tmp_path)
    refuse_and_keep(capsys, tmp_path, *words, *options, naming=[message])


def test_unknown_text_encoders_are_refused(data, stock_checkpoint, tmp_path, capsys):
    sentence = ("translate", "das", "--path", stock_checkpoint)
    refuse(capsys, *sentence, "--bpe", "magic", naming=["--bpe", "subword_nmt", "magic"])
    refuse(capsys, *sentence, "--tokenizer", "magic", naming=["--tokenizer", "moses", "magic"])
    refuse(capsys, *sentence, "--bpe-codes", tmp_path / "gone", naming=["--bpe-codes", tmp_path / "gone"])
    out = tmp_path / "report.html"
    words = ("report", "--path", stock_checkpoint, "--sentences", data / "raw" / "test.de", "--out", out)
    refuse(capsys, *words, "--bpe", "magic", naming=["--bpe"])
    refuse(capsys, *words, "--split", "test", naming=["either --sentences FILE or --split NAME"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fast_if(lambda flags, naming: "num_pivots" in naming)
@pytest.mark.parametrize(
    "flags, naming",
    [
        (("--lot-num-pivots", 0), "num_pivots must be at least 1, got 0"),
        (("--attention", "magic"), "unknown attention mechanism 'magic'"),
        (("--attention-sites", "cross", "--lot-query-updates", 5), "couples the queries"),
        (("--encoder-attention-heads", 3), "3 attention heads do not divide"),
        (("--differential", "--encoder-embed-dim", 120, "--encoder-attention-heads", 5), "must be even, got 5"),
    ],
)
def test_fairseq_train_ends_with_one_line(flags, naming, data, tmp_path):
    words = ("fairseq-train", data / "bin", "--user-dir", ROOT / "fairseq_lot", "--arch", "lot_transformer_small")
    words += ("--optimizer", "adam", "--max-tokens", 400, "--cpu", "--save-dir", tmp_path / "save")
    done = command(*words, *flags, check=False)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if "| INFO |" not in line]
    assert len(errors) == 1 and errors[0].startswith("fairseq_lot:") and naming in errors[0]
    assert contents(tmp_path) == {}
