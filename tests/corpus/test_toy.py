"""The synthetic corpus: reproducible, disjoint, grammatical where that can be checked, and not too easy."""

import hashlib
import re
import subprocess
import sys
from argparse import ArgumentParser
from statistics import mean

import pytest
import sacrebleu

from fairseq_lot.corpus import english, german, lexicon, toy
from fairseq_lot.errors import InputError

FILES = [f"{split}.{language}" for split in toy.SPLITS for language in ("de", "en")]
SMALL = ["--train", "60", "--valid", "9", "--test", "8"]

PATTERNS = {
    "separable verb, particle at the end": (r"^\w+ mach\w+ .*(auf|zu)\.$", r"\b(open|clos|shut)"),
    "separable verb joined at the end of a clause": (r", (weil|dass|obwohl|wenn) .*(aufmacht|zumacht|anruft)", r""),
    "separable infinitive with zu": (r", .*\w+zu(machen|rufen|laden|ziehen|schalten|räumen)", r" to \w+"),
    "verb-final weil": (r", weil \w+ .*(war|ist|hat)\.$", r" (because|since) "),
    "verb-final dass": (r", dass .*(hat|haben|wird|werden)\.$", r""),
    "obwohl": (r"[Oo]bwohl", r"[Aa]lthough|[Ee]ven though"),
    "wenn": (r"[Ww]enn", r"[Ww]hen|[Ii]f"),
    "pluperfect": (r"[Nn]achdem .* (hatte|hatten|war|waren)\b", r"[Aa]fter "),
    "Präteritum": (r"\bsah(en)?\b", r"\b(saw|see)\b"),
    "Perfekt": (r"\b(hat|haben) .* gekauft\.$", r"\b(bought|purchased?|buy)\b"),
    "Perfekt with sein": (r"\b(ist|sind) .* gefahren\.$", r"\b(drove|went|drive|go)\b"),
    "future": (r"\bwird .*en\.$", r"\b(will|going to)\b"),
    "modal": (r"\bmuss\b", r"\b(must|has to|have to)\b"),
    "nicht": (r"\bnicht\b", r"\b(not|cannot)\b|n't\b"),
    "kein": (r"\bkeine?n?\b", r"(not|n't) "),
    "question": (r"^(Hast|Haben|Hat) .*\?$", r"^Did .*\?$"),
    "question word": (r"^Warum .*\?$", r"^Why (do|does|did|is|are|was|were|will|can|must) .*\?$"),
    "inversion": (r"^Gestern (sah|kaufte|war|hat|haben|las)\w* ", r"[Yy]esterday"),
    "relative clause": (r", (der|die|das|den|dem|denen) .*,", r""),
    "relative with a preposition": (r", (auf|mit|an|über|von) (den|die|das|dem|der|denen) ", r""),
    "er is it": (r"\b(Hund|Esel|Vogel|Affe|Hase)\b.*\ber\b", r"\bit\b"),
    "es is she": (r"\bMädchen\b.*\bes\b", r"\bshe\b"),
    "sie is they": (r"^Sie (haben|sahen|kauften) [^?]*\.$", r"^(They|\w+,? they)|they"),
    "sie is she": (r"^Sie (hat|sah|kaufte) ", r"\b[Ss]he\b"),
    "contraction": (r"\b(im|zum|zur|ins|am) [A-ZÄÖÜ]", r""),
    "genitive": (r"\bdes \w+(s|n)\b", r"'s|of the|the"),
    "genitive preposition": (r"\b(wegen|trotz) (des|der) ", r"because of|despite|in spite of"),
    "number": (r"\b(zwei|drei|vier)\b", r"\b([Tt]wo|[Tt]hree|[Ff]our)\b"),
    "comparison": (r"\b\w+er als (der|die|das|ein)", r" than "),
    "passive": (r"\bwurden? .*von", r"\b(was|were) .* by "),
    "verb with preposition": (r"\bwart\w+ .*auf d", r"\bwait\w* for\b"),
}


def generate(**sizes):
    return toy.generate(**{"train": 60, "valid": 9, "test": 8, "seed": 1, **sizes})


def run(folder, *options):
    parser = ArgumentParser()
    toy.add_arguments(parser)
    toy.run(parser.parse_args(["--out", str(folder), *options]))


@pytest.fixture(scope="module")
def corpus():
    """Return 7,000 pairs in their splits, generated once."""
    return toy.generate(train=6000, valid=500, test=500, seed=1)


@pytest.fixture(scope="module")
def pairs(corpus):
    return [pair for split in corpus.values() for pair in split]


def test_same_seed_same_corpus_other_seed_another():
    assert generate() == generate()
    assert generate()["train"] != generate(seed=2)["train"]


def test_the_hash_seed_of_python_does_not_matter():
    code = (
        "import hashlib; from fairseq_lot.corpus.toy import generate; "
        "text = repr(generate(train=300, valid=5, test=5, seed=3)); print(hashlib.sha256(text.encode()).hexdigest())"
    )
    here = hashlib.sha256(repr(generate(train=300, valid=5, test=5, seed=3)).encode()).hexdigest()
    for seed in ("0", "77"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == here


def test_six_files_with_the_asked_counts(tmp_path):
    run(tmp_path / "new", *SMALL)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(FILES)
    for name, count in zip(FILES, (60, 60, 9, 9, 8, 8), strict=True):
        text = (tmp_path / "new" / name).read_text(encoding="utf-8")
        assert text.endswith("\n") and len(text.splitlines()) == count


def test_no_german_sentence_occurs_twice(corpus):
    sentences = [pair.german for split in corpus.values() for pair in split]
    assert len(set(sentences)) == len(sentences) == 7000


def test_sentences_are_clean_and_of_the_right_length(pairs):
    for pair in pairs:
        for text in (pair.german, pair.english):
            assert 4 <= len(text.split()) <= 25
            assert re.fullmatch(r"[A-ZÄÖÜ].*\w[.?!]", text)
            assert not re.search(r"  |,,| [,.?!]|[,.?!]\w|,[.?!]", text)
    assert 9.5 <= mean(len(pair.german.split()) for pair in pairs) <= 12


@pytest.mark.parametrize("name", PATTERNS)
def test_phenomenon_occurs(pairs, name):
    source, target = PATTERNS[name]
    found = [pair for pair in pairs if re.search(source, pair.german)]
    assert len(found) >= 3
    agreeing = sum(bool(re.search(target, pair.english)) for pair in found)
    assert agreeing >= 0.75 * len(found)  # other clauses of a sentence may match the source pattern by chance


@pytest.mark.parametrize(
    "word, near, english_word",
    [
        ("Bank", r"sitz\w*|saß\w*|gesessen", "bench"),
        ("Bank", r"arbeite\w*|gearbeitet", "bank"),
        ("Decke", r"streich\w*|strich\w*|gestrichen", "ceiling"),
        ("Birne", r"iss?t|essen|aß|aßen|gegessen", "pear"),
        ("Gericht", r"koch\w*|gekocht", "dish|meal"),
        ("Frau", r"(m|s)eine[rn]?(?= Frau\b)", "wife"),
    ],
)
def test_ambiguous_words_follow_their_context(pairs, word, near, english_word):
    patterns = (rf"\b{word}\b", rf"\b({near})\b")
    found = [pair for pair in pairs if all(re.search(pattern, pair.german) for pattern in patterns)]
    assert found
    assert sum(bool(re.search(english_word, pair.english)) for pair in found) >= 0.7 * len(found)


def test_a_and_an(pairs):
    text = " ".join(pair.english for pair in pairs)
    assert not re.search(r"\b[Aa] (apple|old|umbrella|egg|ill|odd|uncle|aunt|honest|expensive|interesting)\b", text)
    assert not re.search(r"\b[Aa]n (useful|big|small|hard|new)\b", text)
    assert re.search(r"\ban old\b", text) and re.search(r"\ba useful\b", text)


def test_lexicon_has_enough_word_pairs():
    assert len(lexicon.word_pairs()) >= 400
    assert len({german_word for german_word, _ in lexicon.word_pairs()}) >= 300


def test_every_noun_is_complete():
    for noun in lexicon.NOUNS:
        assert noun.gender in "mfn" and noun.german[0].isupper()
        assert noun.plural or {"mass", "pair"} & set(noun.flags), noun
        assert noun.classes and noun.english
        if noun.weak:
            assert noun.gender == "m" and noun.plural.endswith("n")
    assert {noun.gender for noun in lexicon.NOUNS} == set("mfn")


def noun(word):
    return next(entry for entry in lexicon.NOUNS if entry.german == word)


def verb(infinitive):
    return next(entry for entry in lexicon.VERBS if entry.particle + entry.infinitive == infinitive)


def adjective(word):
    return next(entry for entry in lexicon.ADJECTIVES if entry.german == word)


@pytest.mark.parametrize(
    "case, expected",
    [
        ("nom", "der alte Mann, ein alter Mann, alter Mann"),
        ("acc", "den alten Mann, einen alten Mann, alten Mann"),
        ("dat", "dem alten Mann, einem alten Mann, altem Mann"),
        ("gen", "des alten Mannes, eines alten Mannes, alten Mannes"),
    ],
)
def test_articles_and_adjective_endings(case, expected):
    old, man = adjective("alt"), german.noun_form(noun("Mann"), case)
    made = []
    for kind, declension in (("der", "weak"), ("ein", "mixed"), ("", "strong")):
        article = german.article(kind, case, "m") if kind else ""
        made.append(f"{article} {german.adjective_form(old, declension, case, 'm')} {man}".strip())
    assert ", ".join(made) == expected


def test_german_noun_forms():
    assert german.noun_form(noun("Kind"), "dat", plural=True) == "Kindern"
    assert german.noun_form(noun("Auto"), "dat", plural=True) == "Autos"
    assert german.noun_form(noun("Nachbar"), "acc") == "Nachbarn"
    assert german.noun_form(noun("Haus"), "gen") == "Hauses"
    assert german.contract("zu der Schule") == "zur Schule"
    assert german.adjective_form(adjective("teuer"), "weak", "nom", "m") == "teure"
    assert german.adjective_form(adjective("dunkel"), "mixed", "nom", "n") == "dunkles"


def test_german_verb_forms():
    read = [german.present(verb("lesen"), person) for person in german.PERSONS]
    assert read == ["lese", "liest", "liest", "lesen", "lest", "lesen"]
    assert german.present(verb("warten"), "2s") == "wartest"
    assert german.present(verb("einladen"), "2s") == "lädst"
    assert german.present(verb("spielen"), "1s") == "spiele"
    assert german.present(verb("sammeln"), "1s") == "sammle"
    assert german.past(verb("arbeiten"), "3p") == "arbeiteten"
    assert german.past(verb("bringen"), "3p") == "brachten"
    words = ("aufmachen", "besuchen", "reparieren", "bellen", "anrufen")
    participles = [german.participle(verb(word)) for word in words]
    assert participles == ["aufgemacht", "besucht", "repariert", "gebellt", "angerufen"]


def test_english_forms():
    assert [english.plural(word) for word in ("lady", "police officer", "knife", "watch", "sheep")] == [
        "ladies", "police officers", "knives", "watches", "sheep",
    ]  # fmt: skip
    assert [english.past(word) for word in ("carry", "close", "buy")] == ["carried", "closed", "bought"]
    assert [english.gerund(word) for word in ("sit", "lie", "see")] == ["sitting", "lying", "seeing"]
    assert english.realise(["a", english.either("old", "big"), "dog", "."]) == "An old dog."


def test_an_ideal_translator_scores_below_100(pairs):
    """The likeliest translation of every meaning: what a model can reach at best."""
    score = sacrebleu.corpus_bleu([pair.likely for pair in pairs[:3000]], [[pair.english for pair in pairs[:3000]]])
    assert 76 <= score.score <= 92


@pytest.mark.parametrize(
    "option, value",
    [("--train", "0"), ("--valid", "-3"), ("--test", "0"), ("--train", "1000000000000"), ("--seed", "-1")],
)
def test_bad_counts_are_refused_and_nothing_is_written(tmp_path, option, value):
    with pytest.raises(InputError, match=rf"{option} {value}: .*(give|lower)"):
        run(tmp_path / "out", *SMALL, option, value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="cannot write"):
        run(tmp_path / "file", *SMALL)
