"""The score command: values against sacreBLEU itself, the paired test, and its errors."""

import argparse
import json
import os
import random
import subprocess

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest
from sacremoses import MosesDetokenizer

from fairseq_lot.cli import main
from fairseq_lot.corpus.moses import detokenise
from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.bleu import (
    SACREBLEU,
    TOKENISED,
    for_language,
    measure,
    paired_p_value,
    resampled_scores,
    sentence_statistics,
)
from fairseq_lot.evaluation.results import read_rows, read_statistics
from fairseq_lot.evaluation.score import target_language
from fairseq_lot.output.provenance import current_commit


@pytest.fixture
def arguments(tmp_path, write_generated, corpus):
    """A function that makes the command's arguments for the better system; keywords replace options, None drops one."""
    references, good, bad = corpus
    reference = tmp_path / "reference.en"
    reference.write_text("\n".join(references) + "\n", encoding="utf-8")
    label = {"dataset": "toy", "system": "LOT", "settings": {"attention": "lot"}, "stage": "fine-tuned"}
    options = {
        "generated": write_generated("good.txt", good),
        "tokenised_reference": reference,
        "baseline_generated": write_generated("bad.txt", bad),
        "out": tmp_path / "lot.jsonl",
        "command": "fairseq-generate data-bin/toy --path lot.pt",
        "bootstrap_samples": 200,
    }

    def make(labels=(), **changes):
        chosen = {name: value for name, value in (options | changes).items() if value is not None}
        chosen.setdefault("label", json.dumps(label | dict(labels)))
        return ["score", *(f"--{name.replace('_', '-')}={value}" for name, value in chosen.items())]

    return make


def test_row_agrees_with_sacrebleu(arguments, corpus, tmp_path, capsys):
    references, good, bad = corpus
    settings = {"attention": "lot", "options": {"lot-num-pivots": 32}}
    labels = {"precision": "bf16", "settings": settings, "seed": 2, "training": {"size": "small"}}
    assert main(arguments(labels, seconds=3.5, device="cpu", lenpen=1.25)) == 0
    (row,) = read_rows([tmp_path / "lot.jsonl"])
    (counts,) = read_statistics(tmp_path / "lot.jsonl", [row]).values()
    assert np.array_equal(counts, sentence_statistics(good, references, metric=TOKENISED))
    moses = MosesDetokenizer(lang="en")
    plain = [[moses.detokenize(line.split()) for line in lines] for lines in (good, references, bad)]
    for found, metric, (system, reference, base) in (
        (row.tokenised, BLEU(tokenize="none", force=True), (good, references, bad)),
        (row.sacrebleu, BLEU(lowercase=True), plain),
    ):
        score = metric.corpus_score(system, [reference]).score
        assert found.score == round(score, 2)
        assert found.base == round(metric.corpus_score(base, [reference]).score, 2)
        assert found.signature == str(metric.get_signature())
        assert found.low < found.score < found.high
        assert found.delta > 0 and found.p < 0.05
    assert "tok:none" in row.tokenised.signature and "case:lc" in row.sacrebleu.signature
    assert row.chrf == round(CHRF().corpus_score(plain[0], [plain[1]]).score, 2)
    words = [sum(len(line.split()) for line in lines) for lines in (good, references)]
    assert row.length == round(words[0] / words[1], 3)
    assert row.sentences == 151 and row.reference == "detokenised with sacremoses"
    assert (row.seconds, row.device, row.precision, row.settings.as_written) == (3.5, "cpu", "bf16", settings)
    assert row.lenpen == 1.25
    assert row.key == ("toy", "by hand", "transformer", "LOT", "fine-tuned", 2) and row.training == {"size": "small"}
    assert (row.commit, row.command) == (current_commit(), "fairseq-generate data-bin/toy --path lot.pt")
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and f"tokenised BLEU {row.tokenised.score:.2f}" in out


@pytest.mark.parametrize("options", [TOKENISED, SACREBLEU])
def test_interval_and_resamples_are_those_of_sacrebleu(corpus, options, monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "99")
    references, good, _ = corpus
    generator = random.Random(3)
    # A slightly worse system: the p-value lies between its extremes.
    close = [" ".join(t for t in line.split() if generator.random() > 0.003 or len(line) < 20) for line in good]
    samples = 130
    found = measure(good, references, metric=options, base=close, samples=samples, seed=99)
    ours = BLEU(**options).corpus_score(good, [references], n_bootstrap=samples)
    assert (found.high - found.low) / 2 == pytest.approx(ours._ci, abs=0.01)
    _, scores = PairedTest(
        [("base", close), ("system", good)], {"BLEU": BLEU(**options)}, [references], "bs", samples, n_jobs=1
    )()
    base, system = scores["BLEU"]
    assert (found.base, found.score) == (round(base.score, 2), round(system.score, 2))
    # sacreBLEU takes absolute differences before it centres them; so computed, our resamples give its p.
    statistics = [sentence_statistics(lines, references, metric=options) for lines in (good, close)]
    ours, theirs = resampled_scores(statistics, samples=samples, seed=99)
    folded = np.abs(ours - theirs)
    reached = np.count_nonzero(folded - folded.mean() > system.score - base.score)
    assert system.p_value == pytest.approx((reached + 1) / (samples + 1))
    assert 1 / (samples + 1) < system.p_value < found.p < 1


def test_resampled_scores_equal_those_of_a_loop(corpus):
    references, good, _ = corpus
    statistics = sentence_statistics(good, references, metric=TOKENISED)
    (scores,) = resampled_scores([statistics], samples=70, seed=5)
    drawn = np.random.default_rng(5).choice(len(good), size=(70, len(good)), replace=True)
    for sample in (0, 63, 64, 69):
        lines = [[texts[index] for index in drawn[sample]] for texts in (good, references)]
        assert scores[sample] == pytest.approx(BLEU(**TOKENISED).corpus_score(lines[0], [lines[1]]).score)


def test_p_value_counts_ties_and_both_sides():
    differences = np.array([1.0, 3.0, 1.0, 3.0])
    assert paired_p_value(np.zeros(999), 0.0) == 1.0
    assert paired_p_value(np.full(999, 16.06), 16.06) == 1.0, "all resamples of one sentence are the same"
    assert paired_p_value(differences, 1.0) == paired_p_value(-differences, -1.0) == 1.0
    assert paired_p_value(differences, 1.5) == paired_p_value(-differences, -1.5) == 1 / 5


def test_the_seed_of_the_bootstrap_is_used_and_noted(arguments, tmp_path):
    found = []
    for seed in (1, 2):
        assert main(arguments(bootstrap_seed=seed)) == 0
        found += read_rows([tmp_path / "lot.jsonl"])
    assert [row.bootstrap_seed for row in found] == [1, 2]
    one, other = (row.tokenised for row in found)
    assert one.score == other.score and (one.low, one.high) != (other.low, other.high)


def test_the_base_compared_with_itself_has_difference_0_and_p_1(arguments, tmp_path):
    assert main(arguments({"stage": "plug-and-play"}, generated=tmp_path / "bad.txt")) == 0
    (row,) = read_rows([tmp_path / "lot.jsonl"])
    for metric in (row.tokenised, row.sacrebleu):
        assert (metric.delta, metric.p, metric.base) == (0.0, 1.0, metric.score)


def test_the_base_may_be_left_out_and_raw_references_may_be_given(arguments, corpus, tmp_path):
    raw = tmp_path / "raw.txt"
    lines = detokenise(corpus[0], language="en")
    raw.write_text("".join(f"{line.capitalize()}\n" for line in lines), encoding="utf-8")
    found = []
    for more in ({}, {"raw_reference": raw}):
        assert main(arguments(baseline_generated=None, **more)) == 0
        found += read_rows([tmp_path / "lot.jsonl"])
    detokenised, raw_row = found
    assert raw_row.reference == "raw"
    assert raw_row.sacrebleu == detokenised.sacrebleu
    assert (raw_row.tokenised.base, raw_row.tokenised.delta, raw_row.tokenised.p) == (None, None, None)


def test_the_same_system_is_replaced_and_another_refused(arguments, tmp_path, refused):
    for changes in ({}, {"device": "cuda"}):
        assert main(arguments(**changes)) == 0
    assert [row.device for row in read_rows([tmp_path / "lot.jsonl"])] == ["cuda"]
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    refused(arguments({"seed": 2}), tmp_path / "lot.jsonl", "has rows of other systems")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_base_with_translations_of_another_test_set_is_refused(arguments, corpus, tmp_path, refused, write_generated):
    other = write_generated("other.txt", corpus[2])
    text = other.read_text(encoding="utf-8")
    other.write_text(text.replace("ein satz", "noch einer"), encoding="utf-8")  # half of the lines are shared
    assert main(arguments(baseline_generated=other)) == 0
    others = text.replace("ein satz", "noch einer").replace("a sentence", "one more")
    for shared in ("", "S-0\tein satz\n"):  # a short sentence may stand in several test sets
        other.write_text(shared + others, encoding="utf-8")
        refused(arguments(baseline_generated=other), "other.txt has translations of other sentences than")


def test_full_disk_leaves_no_row(arguments, tmp_path, monkeypatch, refused):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = sorted(tmp_path.iterdir())
    refused(arguments(), "No space left on device")
    assert sorted(tmp_path.iterdir()) == before


def test_bad_options_are_refused_in_one_line(arguments, refused, tmp_path):
    for changes, words in (
        ({"bootstrap_samples": 0}, ["--bootstrap-samples", "0"]),
        ({"bootstrap_seed": -1}, ["--bootstrap-seed", "-1"]),
        ({"seconds": "nan"}, ["--seconds", "nan"]),
        ({"seconds": "inf"}, ["--seconds", "inf"]),
        ({"seconds": -2}, ["--seconds", "-2"]),
        ({"lenpen": "nan"}, ["--lenpen", "nan"]),
        ({"labels": {"system": " "}}, ["--label", "at system"]),
        ({"labels": {"stage": "later"}}, ["--label", "at stage", "later"]),
        ({"labels": {"colour": "red"}}, ["--label", "unknown entry 'colour'"]),
        ({"label": "{"}, ["--label '{'", "Invalid JSON"]),
        ({"device": "\udcff"}, ["not valid UTF-8"]),
        *[({"target_lang": name}, ["--target-lang", name]) for name in ("../x", "", "1")],
        ({"out": tmp_path}, [tmp_path]),
        ({"out": tmp_path / "lot.seed1"}, [tmp_path / "lot.seed1", ".jsonl"]),
        ({"out": "/dev/stdout"}, ["/dev/stdout", ".jsonl"]),
        ({"out": tmp_path / "good.txt" / "results.jsonl"}, ["good.txt"]),
    ):
        refused(arguments(**changes), *words)
    assert not (tmp_path / "lot.jsonl").exists()


def test_bad_files_are_refused_in_one_line(arguments, refused, tmp_path, write_generated, corpus):
    good = corpus[1]
    short = write_generated("short.txt", good[:-1])
    long = write_generated("long.txt", [*good, "more"])
    raw = tmp_path / "raw.txt"
    raw.write_text("one line\n", encoding="utf-8")
    for changes, words in (
        ({"generated": short}, [short, "150 whole H- lines", "is cut off"]),
        ({"generated": long}, [long, "sentence 151", "151 lines", "another test set"]),
        ({"baseline_generated": short}, [short]),
        ({"baseline_generated": tmp_path / "absent"}, ["cannot read", "absent"]),
        ({"generated": tmp_path / "reference.en"}, ["0 whole H- lines"]),
        ({"tokenised_reference": tmp_path / "absent.en"}, ["cannot read", "absent"]),
        ({"raw_reference": raw}, ["unequal line counts", "1 in", "151 in"]),
    ):
        refused(arguments(**changes), *words)
    for piece in ("\u2581a", "a@@"):
        pieces = tmp_path / "pieces.en"
        pieces.write_text("@@ words\n" * 3 + f"{piece} b\n" + "words\n" * 147, encoding="utf-8")
        refused(arguments(tokenised_reference=pieces), f"{pieces}, line 4: has pieces, such as {piece!r}")
    broken = tmp_path / "lot.jsonl"
    broken.write_text("\n{broken\n", encoding="utf-8")
    refused(arguments(), f"{broken}, line 2")
    assert broken.read_text(encoding="utf-8") == "\n{broken\n"


@pytest.mark.parametrize(
    ("name", "typed", "language"),
    [
        ("test.en", None, "en"),
        ("test.de-en.pt_BR", None, "pt_BR"),
        ("test.sr-Latn-RS", None, "sr-Latn-RS"),
        ("test.en", "fr", "fr"),
        ("reference.txt", "fr", "fr"),
        ("test.target", "target", "target"),
        ("reference.txt", None, None),
        ("reference", None, None),
        ("test.english", None, None),
    ],
)
def test_the_target_language_is_typed_or_read_from_the_name_of_the_reference(name, typed, language):
    args = argparse.Namespace(tokenised_reference=f"some/folder/{name}", target_lang=typed)
    if language is not None:
        assert target_language(args) == language
    else:
        with pytest.raises(InputError, match="give --target-lang"):
            target_language(args)


def test_the_commit_of_a_checkout_is_dirty_if_code_has_changed(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", "-C", tmp_path, *identity, *words], text=True).strip()

    assert current_commit(tmp_path) == "unknown"
    package, hook = tmp_path / "fairseq_lot", tmp_path / "fairseq_lot_compat.pth"
    package.mkdir()
    (package / "code.py").write_text("a = 1\n")
    git("init", "-q")
    assert current_commit(tmp_path) == "unknown"
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "--short", "HEAD")
    assert current_commit(tmp_path) == commit
    (tmp_path / "results.jsonl").write_text("{}\n")
    assert current_commit(tmp_path) == commit
    assert current_commit(package) == "unknown"
    for path in (hook, tmp_path / "scripts" / "score.sh", tmp_path / "workflow" / "Snakefile"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("changed\n")
        assert current_commit(tmp_path) == f"{commit}-dirty"
        path.unlink()
    (package / "code.py").write_text("a = 2\n")
    assert current_commit(tmp_path) == f"{commit}-dirty"


def test_sentences_of_languages_without_spaces_are_split():
    """sacreBLEU's default tokenizer takes a sentence without spaces for one word."""
    said, meant = ["他今天来了"], ["他昨天来了"]
    assert measure(said, meant, metric=SACREBLEU).score == 0
    for language, split in (("zh", "zh"), ("zho_Hans", "zh"), ("yue_Hant", "zh"), ("JA", "char"), ("jpn", "char")):
        found = measure(said, meant, metric=for_language(SACREBLEU, language))
        assert found.score > 20 and f"tok:{split}|" in found.signature
    for language in ("en", "jav_Latn", "kmr", "target"):
        assert for_language(SACREBLEU, language) is SACREBLEU


def test_a_row_in_a_language_without_spaces_has_its_tokenizer(arguments, tmp_path):
    assert main(arguments(target_lang="ja")) == 0
    (row,) = read_rows([tmp_path / "lot.jsonl"])
    assert "tok:char|" in row.sacrebleu.signature and "tok:none|" in row.tokenised.signature
