"""Draws the meanings of noun phrases and clauses from the lexicon.

Only ``Random.random`` is used, whose sequence is the same on every Python, and no set is iterated.
"""

from math import sqrt
from random import Random

from fairseq_lot.corpus import adverbs, german
from fairseq_lot.corpus.clauses import Clause
from fairseq_lot.corpus.english import synonyms
from fairseq_lot.corpus.lexicon import ADJECTIVES, NOUNS, VERBS, Adjective, Noun, Verb, rows
from fairseq_lot.corpus.lexicon_words import CITY_TABLE, NAME_TABLE
from fairseq_lot.corpus.phrases import NUMBERS, Determiner, Name, NounPhrase, Pronoun

CITIES, NAMES = rows(CITY_TABLE), rows(NAME_TABLE)
# kinds of adjectives (see the adjective table) of each class of nouns
ADJECTIVE_KINDS = {
    "person": "p", "relative": "p", "animal": "a", "food": "f", "dish": "f", "drink": "d", "read": "r", "text": "r",
    "tale": "r", "small": "t", "device": "t", "cloth": "t", "vehicle": "t", "furniture": "t", "seat": "t", "open": "t",
    "place": "l", "work": "l", "idea": "i", "event": "e",
}  # fmt: skip
DETERMINERS = (("der", 0.55), ("ein", 0.19), ("possessive", 0.12), ("dieser", 0.06), ("number", 0.05), ("name", 0.03))
CLAUSE_FRAMES = ("dass", "ob", "zu")
SOURCE_PRONOUNS = ("er", "sie", "ich", "wir", "sie_p", "er", "sie", "du")


class Drawer:
    """Draws phrases and clauses from one random generator."""

    def __init__(self, rng: Random):
        self.rng = rng

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    def one(self, items):
        """Return one item, each as likely."""
        return items[int(self.rng.random() * len(items))]

    def ranked(self, items):
        """Return one item, the first ones more often.

        The power 1.5 is taken with sqrt, which rounds alike on every machine, where pow need not.
        """
        point = self.rng.random()
        return items[int(point * sqrt(point) * len(items))]

    def weighted(self, pairs):
        """Return the first part of one of the (item, weight) pairs, whose weights add up to 1."""
        point = self.rng.random()
        for item, weight in pairs:
            point -= weight
            if point < 0:
                return item
        return pairs[-1][0]

    def noun(self, classes) -> Noun:
        """Return a noun of one of the classes."""
        wanted = self.one(classes)
        return self.ranked([noun for noun in NOUNS if wanted in noun.classes])

    def adjective(self, noun: Noun) -> Adjective | None:
        """Return an adjective that goes with the noun, if there is one."""
        kind = next((ADJECTIVE_KINDS[name] for name in noun.classes if name in ADJECTIVE_KINDS), None)
        fitting = [adjective for adjective in ADJECTIVES if kind in adjective.kinds]
        return self.ranked(fitting) if fitting else None

    def phrase(self, classes, *, owner=None, singular=False, definite=False, adjective=0.4) -> NounPhrase:
        """Return a noun phrase; ``owner`` is the phrase that a possessive refers to."""
        noun = self.noun(classes)
        plural = not singular and self.chance(0.24)
        kind = "der" if definite else self.weighted(DETERMINERS)
        if kind == "der" and "relative" in noun.classes and self.chance(0.3 if "person" in noun.classes else 0.75):
            kind = "possessive"
        if "mass" in noun.flags or "event" in noun.classes:
            kind = "none" if kind == "ein" and "mass" in noun.flags else ("der" if kind != "dieser" else kind)
        if kind == "number" and (singular or "pair" in noun.flags):
            kind = "der"
        if kind == "number":
            quantity = self.weighted((("number", 0.5), ("viele", 0.2), ("einige", 0.17), ("alle", 0.13)))
            german_word = self.ranked(list(NUMBERS)) if quantity == "number" else ""
            determiner, plural = Determiner(quantity, german_word, NUMBERS.get(german_word, "")), True
        elif kind == "possessive":
            determiner = self._possessive(owner)
        elif kind == "name":
            name = self.one([row[0] for row in NAMES])
            determiner = Determiner("name", name + "s", name + " 's")
        else:
            determiner = Determiner(kind)
        chosen = self.adjective(noun) if self.chance(adjective) else None
        phrase = NounPhrase(noun, determiner, plural=plural, adjective=chosen)
        ownable = kind == "der" and not chosen and {"small", "vehicle"} & set(noun.classes)
        if ownable and self.chance(0.12):
            phrase.owner = self.phrase(["person"], singular=True, definite=True, adjective=0.15)
        return phrase

    def _possessive(self, owner):
        holder = owner or Pronoun(self.one(("ich", "wir", "er", "sie", "ich", "du")))
        return Determiner("possessive", holder.stem, holder.their)

    def subject(self, classes):
        """Return a subject: a pronoun, a name or a noun phrase."""
        kind = self.rng.random()
        if "person" in classes and kind < 0.36:
            if kind < 0.26:
                return Pronoun(self.one(SOURCE_PRONOUNS))
            return Name(*self.one(NAMES))
        if classes == ("person",) and self.chance(0.2):
            classes = ("relative",)
        elif classes == ("person", "animal"):
            classes = ("person", "person", "animal")
        if classes == ("person",) and self.chance(0.05):
            noun = self.noun(classes)
            return NounPhrase(noun, Determiner("jeder"), adjective=self.adjective(noun) if self.chance(0.3) else None)
        return self.phrase(classes)

    def verb(self, frames=None, *, kind="", without=(), having="") -> Verb:
        """Return a verb of one of the frames (by default any that takes no clause) for this ``kind`` of subject.

        Verbs with a flag of ``without`` are left out, and so are those that lack the flag ``having``.
        """
        fitting = [
            verb
            for verb in VERBS
            if (verb.frame.split()[-1] in frames if frames else verb.frame not in CLAUSE_FRAMES)
            and (not kind or kind in verb.subjects)
            and not any(flag in verb.flags for flag in without)
            and (not having or having in verb.flags)
        ]
        return self.ranked(fitting)

    def clause(
        self, *, subject=None, kind="", tense=None, verb=None, object=None,
        adverbial=True, time=True, negation=True, modal=True,
    ) -> Clause:  # fmt: skip
        """Return a clause with whatever its verb's frame wants.

        A given subject, whose class is ``kind``, tense, verb or object is kept; the flags allow adverbials, a time,
        negation and modal verbs.
        """
        if verb is None:
            verb = self.verb(kind=kind, without=("swap",) if subject else ())
        if subject is None:
            subject = self.subject(verb.subjects)
        tense = tense or self.weighted((("past", 0.55), ("pres", 0.3), ("fut", 0.15)))
        clause = Clause(subject=subject, verb=verb, tense=tense)
        self._fill_frame(clause, object)
        spoken = subject.person[0] == "2" or getattr(subject, "key", "") == "Sie"
        clause.perfect = tense == "past" and (spoken or self.chance(0.45))
        if modal and tense in ("pres", "past") and "person" in verb.subjects and self.chance(0.17):
            adverbs.add_modal(self, clause)
        if adverbial:
            adverbs.add_adverbs(self, clause)
        if time and self.chance(0.6):
            adverbs.add_time(self, clause)
        if negation:
            adverbs.negate(self, clause)
        return clause

    def _fill_frame(self, clause, given):
        frame, classes, owner = clause.verb.frame, clause.verb.objects, clause.subject
        if frame == "give":
            clause.recipient = self.other(("person", "relative"), "dat", clause.subject)
            clause.object = given or self.phrase(classes, owner=owner)
        elif frame == "put":
            clause.object = given or self.phrase(("small",), owner=owner)
            clause.goal = self._furniture("acc")
        elif frame == "lie":
            clause.goal = self._furniture("dat")
        elif frame == "go":
            clause.goal = self.direction(owner)
        elif frame == "live":
            clause.goal = self.location(("work", "place") if clause.verb.infinitive == "arbeiten" else ("place",))
        elif frame == "sit":
            seat = self.phrase(("seat",), singular=True, definite=True)
            side = self.one((("auf", "on"), ("auf", "on"), ("neben", "next to/beside"), ("unter", "under")))
            clause.goal = (f"{side[0]} {seat.german('dat')}", [synonyms(side[1]), seat.english("dat")])
        elif frame == "play":
            noun = self.noun(("instrument",))
            clause.goal = (noun.german, "the " + noun.english)
        elif frame not in ("-", *CLAUSE_FRAMES):
            *preposition, clause.case = frame.split()
            clause.preposition = "".join(preposition)
            clause.object = given or self.other(classes, clause.case, clause.subject)

    def other(self, classes, case, subject):
        """Return an object; where only people fit, it may be a pronoun of another person."""
        if all(name in ("person", "relative") for name in classes) and self.chance(0.3):
            keys = ("ich", "wir", "er", "du") if case == "acc" else ("ich", "wir", "er", "sie", "sie_p", "du")
            pronoun = Pronoun(self.one(keys))
            if pronoun.agreement == subject.agreement == "he" or pronoun.person[0] != subject.person[0]:
                return pronoun
        return self.phrase(classes, owner=subject)

    def _furniture(self, case):
        side = self.weighted(((("auf", "on", "surface"), 0.6), (("unter", "under", "furniture"), 0.2),
                              (("neben", "next to/beside", "furniture"), 0.1),
                              (("hinter", "behind", "furniture"), 0.1)))  # fmt: skip
        phrase = self.phrase((side[2],), singular=True, definite=True, adjective=0.2)
        return f"{side[0]} {phrase.german(case)}", [synonyms(side[1]), phrase.english("acc")]

    def direction(self, subject):
        """Return where to: home, a city, a person's or a place."""
        kind = self.rng.random()
        if kind < 0.15:
            return "nach Hause", "home"
        if kind < 0.35:
            city = self.ranked(CITIES)
            return "nach " + city[0], "to " + city[1]
        if kind < 0.5:
            phrase = self.phrase(("person", "relative"), owner=subject, singular=True, definite=True, adjective=0.1)
            return german.contract("zu " + phrase.german("dat")), ["to", phrase.english("dat")]
        phrase = self.phrase(("place",), singular=True, definite=True, adjective=0.2)
        preposition = phrase.noun.preposition[0]
        words = "zu " + phrase.german("dat") if preposition == "an" else f"{preposition} {phrase.german('acc')}"
        return german.contract(words), ["to", phrase.english("acc")]

    def location(self, classes=("place",)):
        """Return where: in a city or at a place, with the place's own prepositions."""
        if self.chance(0.15):
            city = self.ranked(CITIES)
            return "in " + city[0], "in " + city[1]
        phrase = self.phrase(classes, singular=True, definite=True, adjective=0.25)
        there, preposition = phrase.noun.preposition
        return german.contract(f"{there} {phrase.german('dat')}"), [preposition, phrase.english("dat")]
