"""fairseq's generation options work with LOT at every site."""

import io
from argparse import Namespace

import pytest
from fairseq_cli.interactive import cli_main as fairseq_interactive

from fairseq_lot.errors import InputError
from fairseq_lot.models.fairseq_hooks import _with_its_data
from tests.end_to_end.conftest import edited, fields, generate, hypotheses, in_this_process
from tests.plug_and_play import in_memory

SENTENCES = 60


@pytest.fixture(scope="module")
def plain(data, everywhere):
    """The output of fairseq-generate without further options."""
    return generate(data / "bin", everywhere)


# FAST: options that reach the attention; SLOW: options that only compare scores in another way
FAST = ["--diverse-beam-groups 3", "--sampling --sampling-topk 20 --nbest 3", "--retain-dropout", "--prefix-size 2"]
SLOW = ["--diversity-rate 0.5", "--lenpen 5", "--unnormalized", "--match-source-len"]


@pytest.mark.fast_if(lambda flags: flags in FAST)
@pytest.mark.parametrize("flags", FAST + SLOW)
def test_each_option_changes_the_translations(flags, data, everywhere, plain):
    found = generate(data / "bin", everywhere, *flags.split())
    assert fields(found, "H").keys() == fields(plain, "H").keys() == set(range(SENTENCES))
    assert hypotheses(found) != hypotheses(plain), f"{flags} change nothing"


def test_the_best_translations_are_among_several(data, everywhere, plain):
    found = hypotheses(generate(data / "bin", everywhere, "--nbest", 3))
    assert len(found) == 3 * len(hypotheses(plain)) and set(hypotheses(plain)) <= set(found)


def test_a_model_is_not_run_in_the_opposite_direction(data, everywhere, tmp_path):
    with edited(everywhere, tmp_path / "reversed.pt") as state:
        state["cfg"]["task"].update(source_lang="en", target_lang="de")
    with pytest.raises(InputError, match="reversed.pt translates en to de; give -s en -t de$"):
        generate(data / "bin", tmp_path / "reversed.pt")
    assert hypotheses(generate(data / "bin", tmp_path / "reversed.pt", "-s", "en", "-t", "de"))


def test_a_model_of_one_language_has_no_opposite_direction():
    task = in_memory.load().task
    task.cfg.source_lang = task.cfg.target_lang = "en"
    loaded = [], Namespace(task=task.cfg), task
    assert _with_its_data(lambda *_: loaded)(["model.pt"], None, task) is loaded


def test_references_are_scored(data, everywhere):
    found = generate(data / "bin", everywhere, "--score-reference")
    assert fields(found, "H").keys() == set(range(SENTENCES))
    references = [reference.replace("<<unk>>", "<unk>") for (reference,) in fields(found, "T").values()]
    assert [text for _, text in fields(found, "H").values()] == references  # fairseq writes <<unk>> in references


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_alignments_of_lot_are_printed(kind, data, everywhere):
    found = generate(data / "bin", everywhere, "--print-alignment", kind)
    aligned, scores = fields(found, "A"), fields(found, "P")
    assert aligned.keys() == set(range(SENTENCES))
    for sentence, (text,) in aligned.items():
        pieces = len(scores[sentence][0].split())  # of the target, its end included
        if kind == "soft":
            rows = [[float(number) for number in row.split(",")] for row in text.split()]
            assert len(rows) == pieces
            assert all(abs(sum(row) - 1) < 1e-4 for row in rows)  # six digits, rows of A sum to 1
        else:
            assert [int(pair.split("-")[1]) for pair in text.split()] == list(range(pieces - 1))


def test_ensembles_average_probabilities(data, everywhere, stock_checkpoint, plain):
    twice = generate(data / "bin", f"{everywhere}:{everywhere}")
    assert [row[1] for row in fields(twice, "H").values()] == [row[1] for row in fields(plain, "H").values()]
    mixed = generate(data / "bin", f"{everywhere}:{stock_checkpoint}")
    assert fields(mixed, "H").keys() == set(range(SENTENCES))
    alone = [hypotheses(output) for output in (plain, generate(data / "bin", stock_checkpoint))]
    assert hypotheses(mixed) not in alone


@pytest.mark.fast_if(lambda kind: kind == "ordered")
@pytest.mark.parametrize("kind", ["ordered", "unordered"])
def test_constraints_are_in_the_translations(kind, data, everywhere, monkeypatch):
    sources = (data / "bpe" / "test.de").read_text(encoding="utf-8").splitlines()[:4]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\t▁the\ts\n" for line in sources)))
    words = ("-s", "de", "-t", "en", "--path", everywhere, "--user-dir", "fairseq_lot", "--cpu", "--beam", 3)
    output = in_this_process(fairseq_interactive, data / "bin", *words, "--max-len-b", 20, "--constraints", kind)
    found = [row[1].split() for row in fields(output, "H").values()]
    assert len(found) == len(sources)
    for pieces in found:
        assert "▁the" in pieces and "s" in pieces
        assert kind == "unordered" or "s" in pieces[pieces.index("▁the") :]


def test_batches_of_another_size_give_the_same_translations(data, everywhere, plain):
    found = generate(data / "bin", everywhere, "--batch-size", 7)
    texts = [[text for _, text in fields(output, "H").values()] for output in (plain, found)]
    assert texts[0] == texts[1] and len(texts[0]) == SENTENCES
