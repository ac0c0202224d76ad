"""The sentence patterns of the synthetic corpus.

A pattern takes a Drawer and returns the German words, the English tree and the final punctuation mark.
"""

from fairseq_lot.corpus import adverbs, german
from fairseq_lot.corpus.clauses import Clause
from fairseq_lot.corpus.english import BE, either, synonyms
from fairseq_lot.corpus.lexicon import ADJECTIVES, VERBS
from fairseq_lot.corpus.phrases import Determiner, NounPhrase, Pronoun
from fairseq_lot.corpus.subordinate import CONJUNCTIONS, SEIN, be_clause, kind_of, relative, speaker, subordinate
from fairseq_lot.corpus.verb_phrases import statement, verb_and_objects


class Who:
    """The question word wer, who as a subject."""

    is_pronoun, reflexive, human = True, "sich", True
    person, agreement, stem, their = "3s", "he", "sein", "his"

    def german(self, case: str) -> str:
        """Return wer."""
        return "wer"

    def english(self, case: str = "nom"):
        """Return who."""
        return "who"


def _opened(drawer, clause: Clause, probability: float):
    """Return the German words and English tree of a main clause, with the time first at this probability."""
    if clause.time and drawer.chance(probability):
        return clause.german("inverted", lead=clause.time[0]), clause.english(time="first")
    return clause.german(), clause.english()


def main_clause(drawer):
    """Return a plain statement, often with its time first: Gestern sah der Mann ..."""
    return *_opened(drawer, drawer.clause(), 0.45), "."


def _referable(drawer, **options):
    """Return a clause whose subject a pronoun can take up."""
    subject = speaker(drawer) if drawer.chance(0.85) else drawer.phrase(("animal",))
    return drawer.clause(subject=subject, kind=kind_of(subject), **options)


def with_subordinate(drawer):
    """Return a statement and a subordinate clause after it: ..., weil er müde war."""
    clause = _referable(drawer, adverbial=drawer.chance(0.4))
    clause.cause = None
    words, tree = _opened(drawer, clause, 0.3)
    sub_words, sub_tree = subordinate(drawer, clause)
    return [*words, ",", *sub_words], [tree, sub_tree], "."


def subordinate_first(drawer):
    """Return a subordinate clause and the statement after it: Weil der Mann müde war, ging er ..."""
    clause = _referable(drawer, adverbial=drawer.chance(0.3), time=False)
    sub_words, sub_tree = subordinate(drawer, clause, subject=clause.subject)
    if clause.subject.german("nom") in " ".join(sub_words):
        clause.subject = clause.subject.pronoun
    return [*sub_words, ",", *clause.german("question")], [sub_tree, ",", clause.english()], "."


def yes_no_question(drawer):
    """Return a question that begins with its verb."""
    subject = Pronoun(drawer.one(("du", "Sie", "Sie", "ihr"))) if drawer.chance(0.5) else speaker(drawer)
    clause = drawer.clause(subject=subject, kind="person", negation=False)
    return clause.german("question"), clause.english_question(), "?"


def word_question(drawer):
    """Return a question with wer, was, wo, wann, warum or wie viele."""
    kind = drawer.one(("wer", "was", "wo", "wann", "warum", "wie viele"))
    simple = {"negation": False, "kind": "person"}
    if kind == "wer":
        clause = drawer.clause(subject=Who(), **simple)
        return clause.german(), clause.english(time="last"), "?"
    subject = Pronoun(drawer.one(("du", "Sie", "ihr"))) if drawer.chance(0.35) else speaker(drawer)
    if kind in ("was", "wie viele"):
        return _object_question(drawer, kind, subject)
    verb = drawer.verb(("-", "acc"), kind="person", without=("state", "swap", "refl"))
    steady = {"verb": verb, "subject": subject, "adverbial": False, "time": kind == "warum", "modal": False}
    clause = drawer.clause(tense=drawer.weighted((("past", 0.65), ("pres", 0.35))), **steady, **simple)
    word = {"wo": "where", "wann": "when", "warum": "why"}[kind]
    return [kind, *clause.german("question")], clause.english_question(word), "?"


def _object_question(drawer, kind, subject):
    fitting = [verb for verb in VERBS if verb.frame == "acc" and "state" not in verb.flags]
    verb = drawer.ranked([verb for verb in fitting if not {"person", "relative", "animal"} & set(verb.objects)])
    clause = drawer.clause(subject=subject, kind="person", verb=verb, adverbial=False, negation=False)
    clause.gap = True
    asked = clause.object
    if kind == "was" or not asked.noun.plural:
        return ["was", *clause.german("question")], clause.english_question("what"), "?"
    things = NounPhrase(asked.noun, Determiner("none"), plural=True, adjective=asked.adjective)
    words = ["wie viele", things.german("acc"), *clause.german("question")]
    return words, clause.english_question(["how many", things.english()]), "?"


def with_relative(drawer):
    """Return a statement whose subject or object has a relative clause."""
    clause = drawer.clause(adverbial=False, modal=drawer.chance(0.5))
    if isinstance(clause.object, NounPhrase) and clause.object.determiner.kind != "kein" and drawer.chance(0.5):
        plain = "mass" not in clause.object.noun.flags
        if plain:
            clause.object = relative(drawer, clause.object, clause.tense)
            return clause.german(), clause.english(time="last"), "."
    if not isinstance(clause.subject, NounPhrase) or clause.subject.determiner.kind == "jeder":
        classes = ("person", "animal") if "animal" in clause.verb.subjects else ("person",)
        if "person" in clause.verb.subjects:
            clause.subject = drawer.phrase(classes, definite=True)
    if isinstance(clause.subject, NounPhrase) and "mass" not in clause.subject.noun.flags:
        clause.subject = relative(drawer, clause.subject, clause.tense)
    return *_opened(drawer, clause, 0.3), "."


def content_clause(drawer):
    """Return what somebody says, knows or asks: ..., dass ...; ..., ob ..."""
    frame = drawer.weighted((("dass", 0.75), ("ob", 0.25)))
    subject, tense = speaker(drawer), drawer.weighted((("past", 0.55), ("pres", 0.45)))
    verb = drawer.verb((frame,), kind="person")
    fixed = {"subject": subject, "kind": "person", "tense": tense, "verb": verb}
    main = drawer.clause(**fixed, time=False, adverbial=False, modal=False)
    main.negated = main.negated and frame == "dass" and verb.infinitive in ("wissen", "glauben", "bemerken")
    inner_tense = tense if tense == "past" else drawer.weighted((("pres", 0.6), ("fut", 0.4)))
    if drawer.chance(0.5):
        inner = drawer.clause(subject=subject.pronoun, kind="person", tense=inner_tense, adverbial=False)
    else:
        inner = drawer.clause(tense=inner_tense, adverbial=drawer.chance(0.4))
    word = either("that", "", usual=0.65) if frame == "dass" else CONJUNCTIONS[frame]
    words = [*main.german(), ",", frame, *inner.german("final")]
    return words, [main.english(), word, inner.english(time="last")], "."


def coordination(drawer):
    """Return two statements joined by und or aber."""
    first = _referable(drawer, adverbial=drawer.chance(0.3))
    tense = "pres" if first.tense == "now" else first.tense
    again = drawer.chance(0.5)
    subject = first.subject.pronoun if again else speaker(drawer)
    kind = kind_of(first.subject) if again else "person"
    second = drawer.clause(subject=subject, kind=kind, tense=tense, adverbial=drawer.chance(0.3), time=False)
    conjunction = drawer.weighted((("und", 0.6), ("aber", 0.4)))
    words, tree = _opened(drawer, first, 0.3)
    comma_words, comma_tree = ([","], either(",", "", usual=0.6)) if conjunction == "aber" else ([], "")
    joined = [tree, comma_tree, CONJUNCTIONS[conjunction], second.english(time="last")]
    return [*words, *comma_words, conjunction, *second.german()], joined, "."


def request(drawer):
    """Return a polite request: Machen Sie bitte das Fenster auf!"""
    verb = drawer.verb(("acc", "give", "put", "go"), kind="person", without=("state", "refl", "swap"))
    clause = drawer.clause(
        subject=Pronoun("Sie"), kind="person", tense="pres", verb=verb,
        time=False, adverbial=False, negation=False, modal=False,
    )  # fmt: skip
    finite, tail = clause.finite_and_tail()
    middle = clause.german_middle()
    pronouns = 1 if isinstance(clause.object, Pronoun) and not clause.preposition else 0
    words = [finite, "Sie", *middle[:pronouns], "bitte", *middle[pronouns:], *tail]
    order = [verb_and_objects(clause, "base"), clause.english_rest()]
    return words, either(["please", order], [order, ",", "please"], usual=0.8), "!"


def infinitive_clause(drawer):
    """Return a statement with an infinitive clause: Er versuchte, das Fenster aufzumachen."""
    verb = drawer.verb(("zu",), kind="person")
    subject = speaker(drawer)
    main = drawer.clause(subject=subject, kind="person", verb=verb, adverbial=False, negation=False, modal=False)
    inner = drawer.clause(
        subject=main.subject, kind="person", tense="pres", verb=drawer.verb(kind="person", without=("swap", "state")),
        adverbial=drawer.chance(0.4), time=False, negation=False, modal=False,
    )  # fmt: skip
    inner.frequency = None
    words = main.german("inverted", lead=main.time[0]) if main.time else main.german()
    body = [main.subject.english(), statement(main, main.subject.agreement), "to", verb_and_objects(inner, "base")]
    body = [body, inner.english_rest()]
    tree = [main.time[1], either("", ",", usual=0.6), body] if main.time else body
    return [*words, ",", *inner.german("zu")], tree, "."


def existence(drawer):
    """Return what there is somewhere: In der Stadt gibt es ein altes Museum."""
    noun = drawer.noun(("place", "small", "animal", "event", "plant"))
    kind = drawer.weighted((("ein", 0.6), ("viele", 0.2), ("einige", 0.2)))
    adjective = drawer.adjective(noun) if drawer.chance(0.6) else None
    thing = NounPhrase(noun, Determiner(kind), plural=kind != "ein" or drawer.chance(0.2), adjective=adjective)
    place, in_past = drawer.location(), drawer.chance(0.4)
    verb = "gab" if in_past else "gibt"
    there = ["there", BE[thing.agreement][1 if in_past else 0], thing.english()]
    first, last = [place[1], either("", ",", usual=0.6), there], [there, place[1]]
    if drawer.chance(0.5):
        return [place[0], verb, "es", thing.german("acc")], either(last, first, usual=0.7), "."
    return ["es", verb, place[0], thing.german("acc")], either(last, first, usual=0.9), "."


def comparison(drawer):
    """Return a comparison: Der Hund ist größer als die Katze; ... so groß wie ..."""
    classes = drawer.one((("person",), ("animal",), ("vehicle",), ("place",), ("cloth",), ("idea",)))
    one, two = drawer.phrase(classes, adjective=0.15), drawer.phrase(classes, adjective=0.15)
    adjective = drawer.adjective(one.noun)
    in_past = drawer.chance(0.4)
    subject, other = (one.german("nom"), one.english()), (two.german("nom"), two.english())
    finite = german.auxiliary("sein", one.person, in_past)
    be = BE[one.agreement][1 if in_past else 0]
    if drawer.chance(0.65):
        tree = [subject[1], be, synonyms(adjective.english_comparative), "than", other[1]]
        return [subject[0], finite, adjective.comparative, "als", other[0]], tree, "."
    no, english_no = drawer.one((("", ""), ("nicht", either("not"))))
    words = [subject[0], finite, no, "so", adjective.german, "wie", other[0]]
    return words, [subject[1], be, english_no, "as", synonyms(adjective.english), "as", other[1]], "."


def passive(drawer):
    """Return a passive with its agent: Das Fenster wurde von dem Mann aufgemacht."""
    verb = drawer.verb(kind="person", having="pass", without=("state",))
    clause = drawer.clause(
        subject=drawer.phrase(("person",)), kind="person", tense=drawer.weighted((("past", 0.75), ("pres", 0.25))),
        verb=verb, object=drawer.phrase(verb.objects), adverbial=False, time=False, negation=False, modal=False,
    )  # fmt: skip
    if clause.tense == "past" and drawer.chance(0.5):
        adverbs.add_time(drawer, clause)
    if clause.time and drawer.chance(0.5):
        return clause.german_passive(clause.time[0]), clause.english_passive(time_first=True), "."
    return clause.german_passive(), clause.english_passive(), "."


def description(drawer):
    """Return how something is: Das Haus war nicht sehr alt."""
    phrase = drawer.phrase(("person", "animal", "small", "cloth", "place", "vehicle", "event", "idea", "read"))
    adjective = drawer.adjective(phrase.noun)
    while adjective is phrase.adjective:
        adjective = drawer.one(ADJECTIVES[:12])
    clause = be_clause(drawer, phrase, drawer.weighted((("past", 0.5), ("pres", 0.5))), adjective)
    clause.negated = drawer.chance(0.25)
    if drawer.chance(0.4) and phrase.noun.classes and kind_of(phrase) != "thing":
        clause.place = drawer.location()
        clause.goal = None
        clause.verb = SEIN
    return clause.german(), clause.english(), "."


TEMPLATES = (
    (main_clause, 0.22), (with_subordinate, 0.19), (subordinate_first, 0.09), (yes_no_question, 0.05),
    (word_question, 0.05), (with_relative, 0.12), (content_clause, 0.08), (coordination, 0.06), (request, 0.01),
    (infinitive_clause, 0.05), (existence, 0.02), (comparison, 0.02), (passive, 0.03), (description, 0.01),
)  # fmt: skip
