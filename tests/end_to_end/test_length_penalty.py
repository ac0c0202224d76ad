"""``score.sh --lenpen chosen``: one beam search on the validation set chooses the length penalty of every test set."""

import json
import os
import random
import re

import pytest
from fairseq_cli.preprocess import cli_main as fairseq_preprocess
from sacrebleu.metrics import BLEU

from fairseq_lot import cli
from fairseq_lot.evaluation.hypotheses import read_nbest
from fairseq_lot.evaluation.length_penalty import GRID, rank
from fairseq_lot.experiment import score
from tests.end_to_end.conftest import contents, fields, generate, in_this_process, train

SENTENCES = 40  # of each test set
LABEL = '{"system": "softmax", "settings": {"attention": "softmax"}, "stage": "base"}'


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A data folder for a copying task, with sentences of one to nine words and two test sets."""
    home, draw = tmp_path_factory.mktemp("words"), random.Random(1)
    for name, count, longest in (("train", 400, 9), ("valid", 40, 9), ("test", SENTENCES, 8), ("test1", SENTENCES, 8)):
        lines = [" ".join(draw.choice("abcdefgh") for _ in range(draw.randint(1, longest))) for _ in range(count)]
        for language in ("de", "en"):
            (home / f"{name}.{language}").write_text("".join(f"{line}\n" for line in lines))
    splits = {"train": "train", "valid": "valid", "test": f"test,{home}/test1"}
    prefixes = [word for split, names in splits.items() for word in (f"--{split}pref", f"{home}/{names}")]
    in_this_process(
        fairseq_preprocess, "-s", "de", "-t", "en", "--joined-dictionary", "--destdir", home / "bin", *prefixes
    )
    return home / "bin"


@pytest.fixture(scope="module")
def copier(words, tmp_path_factory):
    """A model that ends its sentences at wrong places, so that their lengths depend on the penalty."""
    flags = ("--arch", "transformer_tiny", "--share-decoder-input-output-embed", "--lr", "3e-3")
    return train(words, tmp_path_factory.mktemp("copier"), *flags, updates=60)


@pytest.mark.parametrize("flags", ["", "--max-len-b 6 --diverse-beam-groups 3"])
def test_one_search_finds_the_best_translations_for_every_length_penalty(flags, words, copier, tmp_path):
    """All hypotheses of one beam search contain the translations of fairseq-generate with any ``--lenpen``."""
    own = ("--beam", 6, "--remove-bpe", "@@ ", *flags.split())
    (tmp_path / "nbest").write_text(generate(words, copier, *own, "--nbest", 6, "--lenpen", 1))
    nbest = list(read_nbest(tmp_path / "nbest", SENTENCES).values())
    texts = {}
    for lenpen in (0.5, 1, 2.5):
        found = fields(generate(words, copier, *own, "--lenpen", lenpen), "H").values()
        texts[lenpen] = [" ".join(text.split()) for _, text in found]
        assert [of[place].text for of, place in zip(nbest, rank(nbest, lenpen), strict=True)] == texts[lenpen]
    assert texts[0.5] != texts[1] != texts[2.5]


@pytest.mark.slow
def test_score_sh_takes_the_best_on_validation_for_all_test_sets(words, copier, tmp_path, capsys):
    def scored(out, *flags):
        given = [copier, words, tmp_path / out, "-", LABEL, "--beam", 6, "--max-len-b", 20, "--cpu", *flags]
        assert cli.run(score.build_parser, [str(word) for word in given], "score.sh") == 0
        return json.loads((tmp_path / f"{out}.jsonl").read_text()), capsys.readouterr().out

    row, said = scored("out", "--lenpen", "2", "--lenpen=chosen")
    lenpen = row["lenpen"]
    shown = {float(one): float(bleu) for one, bleu in re.findall(r"([\d.]+): ([\d.]+)", said)}
    assert list(shown) == list(GRID) and shown[lenpen] == max(shown.values()) > min(shown.values())
    assert f"--lenpen {lenpen:g} is the best on valid" in said
    assert row["command"].endswith(f"--max-len-b 20 --cpu --lenpen {lenpen:g}")
    own = ("--gen-subset", "valid", "--beam", 6, "--lenpen", lenpen)
    texts = [text for _, text in fields(generate(words, copier, *own, "--remove-bpe", "@@ "), "H").values()]
    references = (words.parent / "valid.en").read_text().splitlines()
    assert BLEU(tokenize="none", force=True).corpus_score(texts, [references]).score == pytest.approx(
        shown[lenpen], abs=0.006
    )
    part, of_part = scored("part", "--lenpen", "chosen", "--lenpen-every", "3", "--batch-size", "4")
    assert re.match(r"--lenpen [\d.]+ is the best on 16 of 40 sentences of valid; BLEU", of_part)  # 4 batches of 10
    assert part["lenpen"] in GRID and "every" not in part["command"] and "distributed" not in part["command"]
    whole, chosen = read_nbest(tmp_path / "out.valid.out", 40), read_nbest(tmp_path / "part.valid.out", 40, part=True)
    for sentence, own in chosen.items():
        assert [one.text for one in own] == [one.text for one in whole[sentence]], "the same hypotheses"
    assert len({len(references[sentence].split()) for sentence in chosen}) >= 5, "short and long ones"
    os.utime(tmp_path / "out.valid.out", (1, 1))
    other, said_again = scored("out.test1", "--gen-subset=test1", "--lenpen", "chosen")
    assert (tmp_path / "out.valid.out").stat().st_mtime == 1, "valid is translated once"
    assert other["lenpen"] == lenpen and said_again.splitlines()[0] == said.splitlines()[0]
    assert "--gen-subset=test1" in other["command"] and other["tokenised"] != row["tokenised"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--beam", "1"], "a beam of 1 has one translation of a sentence; give --beam 2 or more, or a number"),
        (["--unnormalized"], "with --unnormalized no score is divided by a length; leave out one of the two"),
        (["--score-reference"], "with --score-reference nothing is translated; leave out one of the two"),
        (["--gen-subset", "valid"], "it is chosen on valid, so a row of valid would be too good; give a number"),
    ],
)
def test_choosing_a_length_penalty_is_refused_where_nothing_can_be_chosen(
    flags, reason, words, copier, tmp_path, capsys
):
    assert refusal(capsys, copier, words, tmp_path / "out", *flags) == f"--lenpen chosen: {reason}"
    assert contents(tmp_path) == {}


def test_a_part_that_lacks_long_or_short_sentences_is_refused(words, copier, tmp_path, capsys):
    shown = refusal(capsys, copier, words, tmp_path / "out", "--lenpen-every", "4", "--batch-size", "4")
    assert shown == (
        "--lenpen-every 4 leaves fewer than three of the 10 batches of valid; give at most 3, or a smaller --batch-size"
    )
    assert contents(tmp_path) == {}


def test_a_validation_set_that_is_not_translated_whole_is_refused(words, copier, tmp_path, capsys):
    (tmp_path / "bin").mkdir()
    for file in words.iterdir():
        if not file.name.startswith("valid"):
            (tmp_path / "bin" / file.name).symlink_to(file)
    assert "valid.de-en.de.bin is missing" in refusal(capsys, copier, tmp_path / "bin", tmp_path / "out")
    for file in words.glob("train.*"):  # has longer sentences than the test set
        (tmp_path / "bin" / file.name.replace("train", "valid")).symlink_to(file)
    limit = max(map(len, map(str.split, (words.parent / "test.de").read_text().splitlines()))) + 1
    flags = ("--max-source-positions", limit, "--max-target-positions", limit)
    assert "split valid" in refusal(capsys, copier, tmp_path / "bin", tmp_path / "out", *flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]


def refusal(capsys, checkpoint, data, out, *flags):
    """Run ``score.sh --lenpen chosen``, which must refuse with one line; return the line."""
    capsys.readouterr()
    words = [str(word) for word in (checkpoint, data, out, "-", LABEL, "--lenpen", "chosen", *flags)]
    assert cli.run(score.build_parser, words, "score.sh") == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("score.sh: error: ")
