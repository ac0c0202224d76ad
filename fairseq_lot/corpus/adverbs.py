"""Draws modal verbs, adverbials and negation into a clause."""

from fairseq_lot.corpus.clauses import Clause
from fairseq_lot.corpus.english import synonyms
from fairseq_lot.corpus.lexicon import rows
from fairseq_lot.corpus.lexicon_words import FREQUENCY_TABLE, MANNER_TABLE, TIME_TABLE
from fairseq_lot.corpus.phrases import Determiner, NounPhrase

FREQUENCIES, MANNERS, TIMES = map(rows, (FREQUENCY_TABLE, MANNER_TABLE, TIME_TABLE))
PAST_MODALS = ("können", "müssen", "wollen", "wollen", "dürfen", "müssen", "können", "gern")
PRESENT_MODALS = ("können", "müssen", "wollen", "möchten", "dürfen", "sollen", "gern", "können", "gern", "müssen")
# verbs whose frame already says where
PLACED = ("go", "put", "lie", "live", "sit")


def add_modal(drawer, clause: Clause) -> None:
    """Give the clause a modal verb, or gern, which English says with like."""
    if "state" in clause.verb.flags:
        return
    clause.modal = drawer.one(PAST_MODALS if clause.tense == "past" else PRESENT_MODALS)
    clause.perfect = False


def add_adverbs(drawer, clause: Clause) -> None:
    """Give the clause some of: a frequency, a manner, and one of place, company or cause."""
    verb = clause.verb
    repeatable = clause.tense in ("pres", "past") and not clause.modal and clause.subject.person[0] != "2"
    if repeatable and drawer.chance(0.13):
        row = drawer.one(FREQUENCIES)
        clause.frequency = (row[0], synonyms(row[1]))
    if "state" in verb.flags or "person" not in verb.subjects:
        return
    manners = [row for row in MANNERS if row[2] in verb.flags]
    if manners and clause.modal != "gern" and drawer.chance(0.3):
        row = drawer.one(manners)
        clause.manner = (row[0], synonyms(row[1]))
    kind = drawer.rng.random()
    if kind < 0.22 and verb.frame not in PLACED:
        clause.place = drawer.location()
    elif kind < 0.32 and clause.subject.human:
        clause.company = company(drawer, clause.subject)
    elif kind < 0.4 and clause.tense != "fut" and clause.modal != "gern":
        clause.cause = cause(drawer)


def company(drawer, subject) -> tuple:
    """Return with, without or for somebody."""
    person = drawer.phrase(("person", "relative"), owner=subject, singular=True, definite=True, adjective=0.25)
    words, case, english = drawer.one((("mit", "dat", "with"), ("mit", "dat", "with"), ("ohne", "acc", "without")))
    return f"{words} {person.german(case)}", [english, person.english("acc")]


def cause(drawer) -> tuple:
    """Return because of, despite, during or after something: genitives, and a dative."""
    row = drawer.weighted(
        (
            (("wegen", "because of", "weather", "gen"), 0.3),
            (("trotz", "despite/in spite of", "weather", "gen"), 0.25),
            (("während", "during", "event", "gen"), 0.2),
            (("nach", "after", "event", "dat"), 0.25),
        )
    )
    phrase = NounPhrase(drawer.noun((row[2],)), Determiner("der"))
    return f"{row[0]} {phrase.german(row[3])}", [synonyms(row[1]), phrase.english("acc")]


def add_time(drawer, clause: Clause) -> None:
    """Give the clause a time that fits its tense; gerade makes a present progressive."""
    if clause.frequency:
        return
    kinds = {"pres": ("pres",), "past": ("past",), "fut": ("fut",)}[clause.tense]
    if clause.tense == "pres" and not clause.modal and "state" not in clause.verb.flags:
        kinds = ("pres", "now")
    row = drawer.ranked([row for row in TIMES if row[2] in kinds])
    clause.time = (row[0], synonyms(row[1]))
    clause.habit = row[2] == "pres"
    if row[2] == "now":
        clause.tense = "now"


def negate(drawer, clause: Clause) -> None:
    """Negate some clauses: kein with an indefinite object, else nicht."""
    adverbs = (clause.frequency, clause.manner, clause.place, clause.company, clause.cause)
    determiner = getattr(clause.subject, "determiner", Determiner("der"))
    if any(adverbs) or determiner.kind in ("jeder", "number", "viele", "alle"):
        return
    if clause.modal == "gern" or clause.tense == "now" or not drawer.chance(0.2):
        return
    if isinstance(clause.object, NounPhrase):
        kind = clause.object.determiner.kind
        if kind in ("ein", "none"):
            clause.object.determiner = Determiner("kein")
        elif kind not in ("der", "possessive", "dieser", "name"):
            return
    clause.negated = True
