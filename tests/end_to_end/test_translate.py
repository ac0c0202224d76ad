"""``fairseq-lot translate`` as a user runs it, compared with fairseq-generate."""

import io
import shutil
import subprocess

import pytest
from sacremoses import MosesDetokenizer

from fairseq_lot.errors import InputError
from fairseq_lot.pretrained import translate
from fairseq_lot.pretrained.loading import Loaded
from fairseq_lot.pretrained.translate import Translator, references
from tests.end_to_end.conftest import BIN, edited, fairseq_lot, fields, generate, refuse
from tests.plug_and_play import in_memory


@pytest.fixture(scope="module")
def expected(data, stock_checkpoint):
    """fairseq-generate's translations of the test set, Moses tokens, in its order."""
    output = generate(data / "bin", stock_checkpoint, "--beam", 5, "--max-len-b", 200)
    return [text for _, text in fields(output, "D").values()]


def test_translates_as_fairseq_does(data, stock_checkpoint, expected):
    model = Translator(stock_checkpoint)
    raw = (data / "raw" / "test.de").read_text(encoding="utf-8").splitlines()[:20]
    english = MosesDetokenizer("en")
    assert model.translate(raw) == [english.detokenize(line.split()) for line in expected[:20]]
    assert len(set(expected[:20])) > 1, "the model says more than one sentence"


def test_pipe_and_compare(data, stock_checkpoint, expected, tmp_path, capsys, monkeypatch):
    swapped = tmp_path / "swapped.pt"
    fairseq_lot("swap", "--path", stock_checkpoint, "--out", swapped, "--attention", "sinkhorn")
    lines = (data / "text" / "test.de").read_text(encoding="utf-8").splitlines()[:5]
    piped = "\ufeff" + "\n".join([*lines[:2], "", *lines[2:]]) + "\n"  # some editors write a byte order mark first
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
    capsys.readouterr()
    fairseq_lot("translate", "--path", stock_checkpoint, "--compare", swapped, "--tokenised")
    header, *rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert header == [str(stock_checkpoint), str(swapped)]
    assert [left for left, _ in rows] == [*expected[:2], "", *expected[2:5]]
    assert rows[2] == ["", ""]
    fairseq_lot("translate", "--tokenised", "--path", swapped, "--", *lines)
    alone = capsys.readouterr().out.splitlines()
    assert [right for _, right in rows] == [*alone[:2], "", *alone[2:]]


def test_the_beam_is_as_wide_as_asked(stock_checkpoint, monkeypatch):
    beams, search = [], Loaded.translate
    monkeypatch.setattr(Loaded, "translate", lambda self, beam, batch: beams.append(beam) or search(self, beam, batch))
    fairseq_lot("translate", "--path", stock_checkpoint, "--beam", 2, "das")
    assert beams == [2]


def test_references_are_the_text_if_there_is_one_else_the_targets(tmp_path):
    """A reference word that the target dictionary lacks becomes ``<<unk>>``, which no translation contains."""
    loaded = in_memory.load()
    loaded.task.cfg.data, loaded.task.cfg.target_lang = str(tmp_path), "en"
    targets, known = loaded.sentences.tgt, loaded.task.target_dictionary
    targets[0][0] = known.unk()
    how = (loaded.task, loaded.sentences, "test")
    first, *others = references(*how)
    assert first == " ".join(["<<unk>>", *(known[i] for i in targets[0][1:-1])])
    (tmp_path / "text").mkdir()
    file = tmp_path / "text" / "test.en"
    file.write_text("\n".join(["a word", *others]) + "\n")
    assert references(*how) == ["a word", *others]
    file.write_text("a word\n")
    with pytest.raises(InputError, match="test.en has 1 lines, the split 6 sentences; correct or remove it"):
        references(*how)
    file.unlink()
    loaded.sentences.tgt = None
    with pytest.raises(InputError, match="test has no target side and no text/test.en; add either"):
        references(*how)


def test_sentences_in_pieces_need_no_encoder(data, stock_checkpoint, expected, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(data / "bin", tmp_path / "bin", ignore=shutil.ignore_patterns("*.model", "text"))
    pieces = (data / "bpe" / "test.de").read_text(encoding="utf-8").splitlines()[:5]
    model = ("--path", stock_checkpoint, "--data", folder)
    capsys.readouterr()
    fairseq_lot("translate", *model, "--pieces", "--", *pieces)
    assert capsys.readouterr().out.splitlines() == expected[:5], "tokens, as in fairseq-generate's output"
    assert Translator(stock_checkpoint, folder, pieces=True).translate([*pieces[:2], ""]) == [*expected[:2], ""]
    refuse(capsys, "translate", *model, "das", naming=["sentencepiece.bpe.model"])
    refuse(capsys, "translate", *model, "--pieces", "--tokenised", "das", naming=["--tokenised cannot be used"])
    text = "Jede Zeile ist hier Text ."
    refuse(capsys, "translate", *model, "--pieces", pieces[0], text, naming=["line 2: ", "not in the dictionary, such"])


def test_bad_input_is_refused(data, stock_checkpoint, tmp_path, capsys, monkeypatch):
    model = ("--path", stock_checkpoint)
    refuse(capsys, "translate", "das", naming=["--path"])
    refuse(capsys, "translate", "--path", tmp_path / "gone.pt", "das", naming=["gone.pt"])
    refuse(capsys, "translate", *model, "--beam", 0, "das", naming=["--beam", 0])
    refuse(capsys, "translate", *model, "--data", tmp_path, "das", naming=[tmp_path])
    refuse(capsys, "translate", *model, "das", "der " * 2000, naming=["line 2", "pieces"])
    folder = shutil.copytree(data / "bin", tmp_path / "bin")
    (folder / "sentencepiece.bpe.model").unlink()
    refuse(capsys, "translate", *model, "--data", folder, "das", naming=["sentencepiece.bpe.model"])
    (folder / "sentencepiece.bpe.model").write_bytes(b"garbage")
    refuse(capsys, "translate", *model, "--data", folder, "das", naming=["sentencepiece.bpe.model"])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"das\n\xff\n")))
    refuse(capsys, "translate", *model, naming=["line 2", "UTF-8"])
    monkeypatch.setattr(translate, "_BATCH", 2)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n\n\n\xff\n")))
    refuse(capsys, "translate", *model, naming=["line 4", "UTF-8"])


def test_a_moved_data_folder_is_named(data, stock_checkpoint, tmp_path, capsys):
    with edited(stock_checkpoint, tmp_path / "moved.pt") as state:
        state["cfg"]["task"]["data"] = "data-bin/gone"
    words = ("translate", "--path", tmp_path / "moved.pt", "das")
    refuse(capsys, *words, naming=["data-bin/gone", "--data"])
    fairseq_lot(*words, "--data", data / "bin")


def test_a_closed_output_ends_the_command_quietly(data, stock_checkpoint):
    words = [BIN / "fairseq-lot", "translate", "--path", stock_checkpoint, "--beam", 1, *["das"] * 40]
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    said = process.stderr.read().splitlines()
    assert process.wait() == 141 and all("the limit, and may be cut off" in line for line in said)
    process.stderr.close()


def test_on_a_terminal_a_bad_line_does_not_end_the_command(data, stock_checkpoint, capsys, monkeypatch):
    typed = io.TextIOWrapper(io.BytesIO(b"der " * 2000 + b"\ndas haus\n"))
    monkeypatch.setattr(typed, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", typed)
    fairseq_lot("translate", "--path", stock_checkpoint)
    output = capsys.readouterr()
    assert "line 1" in output.err and len(output.out.splitlines()) == 1
