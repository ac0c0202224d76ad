"""Draws what phrases and clauses say.

Only ``Random.random`` is used, whose sequence is the same on every Python, and no set is iterated.
"""

from random import Random

from fairseq_lot.corpus.synthetic import german, lexicon
from fairseq_lot.corpus.synthetic.clauses import BE, Clause
from fairseq_lot.corpus.synthetic.lexicon import ADJECTIVES, NOUNS, OTHERS, PREPOSITIONS, PRONOUNS, VERBS, share
from fairseq_lot.corpus.synthetic.phrases import Fixed, NounPhrase, PronounPhrase

# the share of the usual one of two synonyms
USUAL = 0.75
DETERMINERS = {"ein": "a", "dieser": "this"}
DETERMINER_SHARES = (("der", 0.5), ("ein", 0.22), ("possessive", 0.16), ("dieser", 0.06), ("many", 0.06))
CLAUSE_FRAMES = ("dass", "ob", "zu")
SPEAKERS = tuple(PRONOUNS[key] for key in (("ich", "I"), ("wir", "we"), ("du", "you")))
# without you, which only questions have
PEOPLE = (*SPEAKERS[:2], *(PRONOUNS[key] for key in (("er", "he"), ("sie", "she"), ("sie", "they"))))


class Sampler:
    """Draws phrases and clauses from one random generator."""

    def __init__(self, rng: Random):
        self.rng = rng

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    def one(self, items):
        """Return one item, each as likely."""
        return items[int(self.rng.random() * len(items))]

    def weighted(self, pairs):
        """Return the first part of one of the (item, weight) pairs, whose weights add up to 1."""
        point = self.rng.random()
        for item, weight in pairs:
            point -= weight
            if point < 0:
                return item
        return pairs[-1][0]

    def synonym(self, words: str) -> str:
        """Return one of the words of a/b, mostly the first."""
        usual, *others = words.split("/")
        return usual if not others or self.chance(USUAL) else self.one(others)

    def other(self, kind: str) -> tuple[str, str]:
        """Return a word of this kind in German and English."""
        row = self.one([row for row in OTHERS if kind in row.kinds.split()])
        return row.german, self.synonym(row.english)

    def noun(self, classes: str) -> lexicon.Noun:
        """Return a noun of one of the classes."""
        wanted = self.one(classes.split())
        return self.one([noun for noun in NOUNS if wanted in noun.classes.split()])

    def adjective(self, classes: str, *, but: str = "") -> lexicon.Adjective:
        """Return an adjective that goes with one of the classes, but not with those of ``but``."""
        found = self.one([row for row in ADJECTIVES if share(row.classes, classes) and not share(row.classes, but)])
        return found._replace(english=self.synonym(found.english))

    def phrase(self, classes: str, *, subject=None, singular: bool = False, adjective: float = 0.35) -> NounPhrase:
        """Return a noun phrase; his, her and their refer to the ``subject``."""
        noun = self.noun(classes)
        ownable = not share("person weather", noun.classes) or share("friend", noun.classes)
        phrase = NounPhrase(noun, plural=not singular and noun.plural != "" and self.chance(0.2))
        determiner = self.weighted(DETERMINER_SHARES)
        if determiner == "possessive" and ownable:
            owner = subject.pronoun if subject and self.chance(0.7) else self.one(SPEAKERS)
            phrase.determiner = owner.possessive, owner.english_possessive
        elif determiner in DETERMINERS and noun.classes != "weather":
            phrase.determiner = determiner, DETERMINERS[determiner]
        elif determiner == "many" and phrase.plural:
            phrase.determiner = self.other("number") if self.chance(0.7) else ("alle", "all the")
        if any(share(row.classes, noun.classes) for row in ADJECTIVES) and self.chance(adjective):
            phrase.adjective = self.adjective(noun.classes)
        owned = share("small cloth vehicle device", noun.classes) and phrase.determiner[0] == "der"
        if owned and not phrase.adjective and self.chance(0.2):
            phrase.owner = NounPhrase(self.noun("person animal"))
        return phrase

    def subject(self, classes: str, *, asked: bool = False):
        """Return a subject; you is for what is ``asked``."""
        point = self.rng.random()
        if not share("person", classes) or point > 0.42:
            return self.phrase(classes)
        if point > 0.3:
            word, english = self.one((("er", "he"), ("sie", "she")))
            return Fixed(*self.other(english), PRONOUNS[word, english])
        return PronounPhrase(self.one(SPEAKERS if asked and point < 0.15 else PEOPLE))

    def verb(self, frames=(), *, subjects: str = "", objects: str = "", adverbs: str = "") -> lexicon.Verb:
        """Return a verb of one of the frames (by default any without a clause) that goes with these classes."""

        def fits(verb):
            wanted = ((subjects, verb.subjects), (objects, verb.objects), (adverbs, verb.adverbs))
            in_frames = verb.frame in frames if frames else verb.frame not in CLAUSE_FRAMES
            return in_frames and all(not asked or share(asked, found) for asked, found in wanted)

        return self.one([verb for verb in VERBS if fits(verb)])

    def clause(self, *, subject=None, verb=None, tense: str = "", plain: bool = False) -> Clause:
        """Return a clause with what its verb wants.

        Args:
            subject: given, it is a person; else one is drawn.
            verb, tense: given, they are kept.
            plain: without adverbials, a modal verb or a negation.
        """
        verb = verb or self.verb(subjects="person" if subject else "")
        subject = subject or self.subject(verb.subjects)
        tense = tense or self.weighted((("past", 0.5), ("present", 0.35), ("future", 0.15)))
        clause = Clause(subject, verb, tense)
        self._fill_frame(clause)
        if not plain:
            self._embellish(clause)
        if tense == "past" and not clause.modal:
            clause.perfect = subject.pronoun.person == "2s" or self.chance(0.5)
        return clause

    def _fill_frame(self, clause):
        verb, subject = clause.verb, clause.subject
        if verb.frame in ("to", "at"):
            clause.place = self.direction() if verb.frame == "to" else self.location()
        elif verb.frame == "lie":
            clause.place = self._furniture("dat")
        elif verb.frame == "swap":
            clause.object = self.subject("person")
        elif verb.objects == "person":
            clause.object = self.person(subject)
        elif verb.objects:
            clause.object = self.phrase(verb.objects, subject=subject)
        if verb.frame == "give":
            clause.recipient = self.person(subject)
        elif verb.frame == "put":
            clause.place = self._furniture("acc")

    def person(self, subject):
        """Return a person as an object, which may be a pronoun of somebody else than the subject."""
        pronoun = self.one(PEOPLE)
        if self.chance(0.3) and pronoun.person[0] != subject.pronoun.person[0]:
            return PronounPhrase(pronoun)
        return self.phrase("person", subject=subject)

    def _embellish(self, clause):
        verb = clause.verb
        if self.chance(0.4):
            clause.time = self.other(clause.tense)
        elif clause.tense != "future" and self.chance(0.2):
            clause.frequency = self.other("frequency")
        extra = self.rng.random()
        if extra < 0.12 and not clause.frequency and verb.frame != "swap":
            clause.negated, thing = True, clause.object
            if isinstance(thing, NounPhrase) and thing.determiner[0] == "ein" and " " not in verb.frame:
                thing.determiner = ("kein", "a")
        elif extra < 0.25 and "manner" in verb.adverbs:
            clause.manner = self.other("manner")
        elif extra < 0.42 and "place" in verb.adverbs and clause.place is None:
            clause.place = self.location()
        elif extra < 0.5 and verb.adverbs:
            row = self.one([row for row in PREPOSITIONS if row.case])
            clause.company = self._adverbial(row, row.case, clause.subject)
        if verb.adverbs and clause.tense != "future" and self.chance(0.15):
            clause.modal = self.one(("können", "müssen", "wollen"))

    def _adverbial(self, row, case, subject=None):
        thing = self.phrase(row.classes, subject=subject, singular=True, adjective=0.1)
        return german.contract(f"{row.german} {thing.german(case)}"), f"{row.english} {thing.english()}"

    def _furniture(self, case):
        return self._adverbial(self.one([row for row in PREPOSITIONS if row.classes == "furniture"]), case)

    def direction(self) -> tuple[str, str]:
        """Return where to: a city or a place."""
        if self.chance(0.25):
            city = self.other("city")
            return f"nach {city[0]}", f"to {city[1]}"
        thing = self.phrase("place", singular=True, adjective=0.15)
        preposition = thing.noun.prepositions.split(":")[0]
        words = f"zu {thing.german('dat')}" if preposition == "an" else f"{preposition} {thing.german('acc')}"
        return german.contract(words), f"to {thing.english()}"

    def location(self) -> tuple[str, str]:
        """Return where: in a city or at a place, with the place's own prepositions."""
        if self.chance(0.2):
            city = self.other("city")
            return f"in {city[0]}", f"in {city[1]}"
        thing = self.phrase("place", singular=True, adjective=0.15)
        there, english = thing.noun.prepositions.split(":")
        return german.contract(f"{there} {thing.german('dat')}"), f"{english} {thing.english()}"

    def state(self, subject, classes: str, tense: str, *, but: str = "") -> Clause:
        """Return a clause that says how something is, with an adjective for these classes: sehr müde."""
        adjective = self.adjective(classes, but=but)
        degree = self.other("degree") if self.chance(0.4) else ("", "")
        predicate = (f"{degree[0]} {adjective.german}".strip(), f"{degree[1]} {adjective.english}".strip())
        return Clause(subject, BE, tense, predicate=predicate)
