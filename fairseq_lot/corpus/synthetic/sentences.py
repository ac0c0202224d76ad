"""The shapes of sentences: each takes a Sampler and returns a sentence in German and in English."""

import re

from fairseq_lot.corpus.synthetic import english, german
from fairseq_lot.corpus.synthetic.lexicon import PRONOUNS, share
from fairseq_lot.corpus.synthetic.phrases import Fixed, NounPhrase, PronounPhrase
from fairseq_lot.corpus.synthetic.sampler import Sampler

Sentence = tuple[str, str]


def draw_sentence(sampler: Sampler) -> Sentence:
    """Return a sentence of some shape in German and English."""
    german_text, english_text = sampler.weighted(SHAPES)(sampler)
    return _punctuated(german_text), _punctuated(english.with_an(english_text))


def _punctuated(text):
    """A capital first, commas joined to their words, none before another mark."""
    text = re.sub(r"( ,)+", ",", text)
    text = re.sub(r",? ([.?])$", r"\1", text)
    return text[0].upper() + text[1:]


def statement(sampler: Sampler) -> Sentence:
    """Gestern sah der Mann einen Hund."""
    clause = sampler.clause()
    clause.time_first = clause.time is not None and sampler.chance(0.5)
    return f"{clause.german()} .", f"{clause.english()} ."


def _again(phrase):
    return PronounPhrase(phrase.pronoun)


def _is_thing(phrase):
    return isinstance(phrase, NounPhrase) and not share("person weather", phrase.noun.classes)


def reason_last(sampler: Sampler) -> Sentence:
    """Der Mann kauft das Auto, weil es billig ist: the pronoun takes up the object or the subject."""
    tense, subject = sampler.one(("past", "present")), sampler.subject("person")
    first = sampler.clause(subject=subject, tense=tense, plain=True)
    point = sampler.rng.random()
    if _is_thing(first.object) and point < 0.35:
        first.object.adjective = None
        second = sampler.state(_again(first.object), first.object.noun.classes, tense, but="person")
    elif point < 0.65:
        second = sampler.state(_again(subject), "person", tense)
    else:
        second = sampler.clause(subject=_again(subject), tense=tense, plain=True)
    german_word, english_word = sampler.other(f"reason-{tense}")
    words = f"{first.german()} , {german_word} {second.german('final')} ."
    return words, f"{first.english()} {english_word} {second.english()} ."


def reason_first(sampler: Sampler) -> Sentence:
    """Weil der Mann müde war, ging er in den Park."""
    tense, subject = sampler.one(("past", "present")), sampler.subject("person")
    german_word, english_word = sampler.other(f"reason-{tense}")
    if sampler.chance(0.5):
        first = sampler.state(subject, "person", tense)
    else:
        first = sampler.clause(subject=subject, tense=tense, plain=True)
    second = sampler.clause(subject=_again(subject), tense=tense, plain=True)
    words = f"{german_word} {first.german('final')} , {second.german('verb')} ."
    return words, f"{english_word} {first.english()} , {second.english()} ."


def content(sampler: Sampler) -> Sentence:
    """Er sagt, dass der Mann das Fenster aufmacht."""
    verb, tense = sampler.verb(("dass", "ob")), sampler.one(("past", "present"))
    main = sampler.clause(verb=verb, tense=tense, plain=True)
    subject = _again(main.subject) if sampler.chance(0.3) else None
    inner = sampler.clause(subject=subject, tense=tense, plain=sampler.chance(0.5))
    word = {"dass": "that", "ob": "whether"}[verb.frame]
    return f"{main.german()} , {verb.frame} {inner.german('final')} .", f"{main.english()} {word} {inner.english()} ."


def infinitive(sampler: Sampler) -> Sentence:
    """Er versuchte, das Fenster aufzumachen."""
    main = sampler.clause(verb=sampler.verb(("zu",)), tense=sampler.one(("past", "present")), plain=True)
    verb = sampler.verb(subjects="person", adverbs="place manner")
    inner = sampler.clause(subject=main.subject, verb=verb, tense="present", plain=True)
    words = f"{main.english()} to {inner.verb.english} {inner.english_rest(inner.object)}".strip()
    return f"{main.german()} , {inner.german('zu')} .", f"{words} ."


def relative(sampler: Sampler) -> Sentence:
    """Die Frau, die das Brot kauft, schläft; der Mann wäscht das Hemd, das ich gekauft habe."""
    tense = sampler.one(("past", "present"))
    clause = sampler.clause(subject=sampler.phrase("person"), tense=tense, plain=True)
    if _is_thing(clause.object):
        thing, verb = clause.object, sampler.verb(("acc",), subjects="person", objects=clause.object.noun.classes)
        inner = sampler.clause(subject=sampler.subject("person"), verb=verb, tense=tense, plain=True)
        inner.object = None
        that = german.article("der", "acc", thing.group)
        thing.clause = f"{that} {inner.german('final')}", f"that {inner.english()}"
    else:
        person = clause.subject
        who = Fixed(german.article("der", "nom", person.group), "who", person.pronoun)
        inner = sampler.clause(subject=who, tense=tense, plain=True)
        person.clause = inner.german("final"), inner.english()
    return f"{clause.german()} .", f"{clause.english()} ."


def yes_no_question(sampler: Sampler) -> Sentence:
    """Hast du den Hund gesehen?"""
    clause = sampler.clause(subject=sampler.subject("person", asked=True))
    return f"{clause.german('verb')} ?", f"{clause.english(question=True)} ?"


def word_question(sampler: Sampler) -> Sentence:
    """Warum hat der Mann das Auto gekauft? Wer kauft es? Was kauft er?"""
    kind, tense = sampler.rng.random(), sampler.one(("past", "present"))
    if kind < 0.25:
        clause = sampler.clause(subject=Fixed("wer", "who", PRONOUNS["er", "he"]), tense=tense)
        return f"{clause.german()} ?", f"{clause.english()} ?"
    subject = sampler.subject("person", asked=True)
    if kind < 0.5:
        verb = sampler.verb(("acc",), subjects="person")
        clause = sampler.clause(subject=subject, verb=verb, tense=tense, plain=True)
        clause.object = None
        return f"was {clause.german('verb')} ?", f"what {clause.english(question=True)} ?"
    clause = sampler.clause(subject=subject, tense=tense, plain=True)
    german_word, english_word = sampler.other("question")
    return f"{german_word} {clause.german('verb')} ?", f"{english_word} {clause.english(question=True)} ?"


def description(sampler: Sampler) -> Sentence:
    """Der Tisch war nicht sehr teuer."""
    subject = sampler.phrase("person animal small cloth place vehicle event idea read device", adjective=0)
    clause = sampler.state(subject, subject.noun.classes, sampler.one(("past", "present")))
    clause.negated = sampler.chance(0.25)
    return f"{clause.german()} .", f"{clause.english()} ."


SHAPES = (
    (statement, 0.44), (reason_last, 0.12), (reason_first, 0.08), (content, 0.08), (infinitive, 0.07),
    (relative, 0.07), (yes_no_question, 0.05), (word_question, 0.05), (description, 0.04),
)  # fmt: skip
