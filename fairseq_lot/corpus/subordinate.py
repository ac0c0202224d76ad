"""Subordinate and relative clauses of the synthetic corpus."""

from fairseq_lot.corpus.clauses import Clause
from fairseq_lot.corpus.english import Tree, synonyms
from fairseq_lot.corpus.lexicon import ADJECTIVES, VERBS, Verb, rows
from fairseq_lot.corpus.lexicon_words import CONJUNCTION_TABLE, DEGREE_TABLE
from fairseq_lot.corpus.phrases import NounPhrase, Relative

SEIN = Verb("", "sein", "", "war", "gewesen", "s", "be", (), "-", (), ("state",))
CONJUNCTIONS = {row[0]: synonyms(row[1]) for row in rows(CONJUNCTION_TABLE)}
DEGREES = rows(DEGREE_TABLE)
# German past, present; English past, present
WEATHER = (
    ("es regnete", "es regnet", "it was raining/it rained", "it is raining/it rains"),
    ("es schneite", "es schneit", "it was snowing/it snowed", "it is snowing/it snows"),
    ("es dunkel wurde", "es dunkel wird", "it was getting dark", "it is getting dark"),
    ("die Sonne schien", "die Sonne scheint", "the sun was shining", "the sun is shining"),
    ("es spät war", "es spät ist", "it was late", "it is late"),
    ("niemand da war", "niemand da ist", "nobody was there", "nobody is there"),
)
STATES = ("müde", "krank", "hungrig", "traurig", "glücklich", "jung", "alt", "arm", "klug", "höflich", "ruhig")
# what is done with a thing that the main clause has named
FOLLOW_UPS = ("brauchen", "suchen", "mögen", "sammeln", "verlieren", "vergessen", "reparieren", "verkaufen", "finden")


def kind_of(phrase) -> str:
    """Return the class of a subject: person, animal or thing."""
    if isinstance(phrase, NounPhrase):
        return "person" if phrase.human else ("animal" if "animal" in phrase.noun.classes else "thing")
    return "person" if phrase.human else "thing"


def predicate(drawer, adjective, degree: float = 0.4) -> tuple:
    """Return an adjective, perhaps with a degree, as German text and English tree."""
    if not drawer.chance(degree):
        return adjective.german, synonyms(adjective.english)
    row = drawer.one(DEGREES)
    return f"{row[0]} {adjective.german}", [synonyms(row[1]), synonyms(adjective.english)]


def be_clause(drawer, subject, tense: str, adjective) -> Clause:
    """Return a clause that says how something is."""
    return Clause(subject=subject, verb=SEIN, tense=tense, goal=predicate(drawer, adjective))


def state_of(drawer, subject, tense: str, kind: str) -> Clause:
    """Return a clause like: he was tired."""
    letter = "a" if kind == "animal" else "p"
    fitting = [item for item in ADJECTIVES if item.german in STATES and letter in item.kinds]
    return be_clause(drawer, subject, tense, drawer.one(fitting))


def subordinate(drawer, main: Clause, *, subject=None) -> tuple[list[str], Tree]:
    """Return a subordinate clause to ``main`` in German words and English tree.

    Its subject refers back to the subject of ``main``, unless ``subject`` is given (or another person is drawn).
    """
    in_past = main.tense == "past"
    kind = kind_of(main.subject)
    conjunction = drawer.weighted(_conjunctions(main, kind))
    word = CONJUNCTIONS[conjunction]
    if conjunction in ("weil", "obwohl", "während", "wenn") and drawer.chance(0.15):
        weather = drawer.one(WEATHER)
        return [conjunction, weather[0 if in_past else 1]], [word, synonyms(weather[2 if in_past else 3])]
    other = subject is None and kind != "thing" and drawer.chance(0.3)
    if other:
        subject, kind = drawer.subject(("person",)), "person"
    else:
        subject = subject or main.subject.pronoun
    clause = _content(drawer, main, subject, kind, conjunction, other)
    return [conjunction, *clause.german("final")], [word, clause.english(time="last")]


def _conjunctions(main, kind):
    if kind != "person" or main.tense == "fut":
        return (("weil", 0.7), ("obwohl", 0.3))
    if main.tense == "past":
        return (("weil", 0.36), ("obwohl", 0.17), ("als", 0.13), ("während", 0.08), ("bevor", 0.08), ("nachdem", 0.1),
                ("damit", 0.08))  # fmt: skip
    return (("weil", 0.38), ("obwohl", 0.17), ("wenn", 0.25), ("während", 0.06), ("bevor", 0.06), ("damit", 0.08))


def _content(drawer, main, subject, kind, conjunction, other):
    tense = "past" if main.tense == "past" else "pres"
    if conjunction in ("weil", "obwohl", "wenn", "als") and (kind != "person" or drawer.chance(0.4)):
        return state_of(drawer, subject, tense, kind)
    simple = {"subject": subject, "kind": kind, "tense": tense, "time": False}
    thing = main.object
    named = isinstance(thing, NounPhrase) and not thing.human and not main.negated and main.verb.frame == "acc"
    if conjunction in ("weil", "obwohl", "bevor", "damit") and named and drawer.chance(0.5):
        wanted = drawer.one(FOLLOW_UPS)
        verb = next(verb for verb in VERBS if verb.infinitive == wanted and verb.frame == "acc")
        if set(verb.objects) & set(thing.noun.classes) and verb.infinitive != main.verb.infinitive:
            simple |= {"verb": verb, "object": thing.pronoun}
    without = ("swap", "state") if conjunction in ("nachdem", "damit", "während", "bevor") else ("swap",)
    simple.setdefault("verb", drawer.verb(kind=kind, without=without))
    steady = conjunction in ("weil", "obwohl", "wenn")
    clause = drawer.clause(**simple, adverbial=drawer.chance(0.35), negation=steady, modal=steady)
    if conjunction == "damit":
        clause.modal, clause.perfect, clause.frequency = "können", False, None
    if conjunction == "nachdem":
        clause.earlier, clause.frequency = True, None
    if conjunction in ("wenn", "als", "bevor", "nachdem"):
        clause.habit = True
    return clause


class WithRelative:
    """A noun phrase with a relative clause after it."""

    def __init__(self, phrase: NounPhrase, words: list[str], tree: Tree):
        self._phrase, self._words, self._tree = phrase, words, tree

    def __getattr__(self, name):
        return getattr(self._phrase, name)

    def german(self, case: str) -> str:
        """Return the phrase in its case and the relative clause between commas."""
        return " ".join([self._phrase.german(case), ",", *self._words, ","])

    def english(self, case: str = "nom") -> Tree:
        """Return the phrase and its relative clause."""
        return [self._phrase.english(case), self._tree]


def relative(drawer, phrase: NounPhrase, tense: str) -> WithRelative:
    """Return the phrase with a relative clause in which it is the subject or the object."""
    tense = "past" if tense == "past" else "pres"
    kind = kind_of(phrase)
    takers = [
        verb
        for verb in VERBS
        if set(verb.objects) & set(phrase.noun.classes)
        and "person" in verb.subjects
        and verb.frame.split()[-1] in ("acc", "dat")
        and "swap" not in verb.flags
    ]
    options = {"tense": tense, "time": False, "negation": False}
    if takers and (kind == "thing" or drawer.chance(0.4)):
        pronoun = Relative(phrase, "object")
        subject = drawer.subject(("person",))
        clause = drawer.clause(
            subject=subject, kind="person", verb=drawer.ranked(takers), object=pronoun, adverbial=False, **options
        )
        tree = [pronoun.english("acc"), _with_gap(clause)]
        return WithRelative(phrase, clause.german_relative(pronoun), tree)
    pronoun = Relative(phrase, "subject")
    if kind == "thing" or drawer.chance(0.15):
        about_thing = kind == "thing"
        clause = _described(drawer, pronoun, phrase, tense) if about_thing else state_of(drawer, pronoun, tense, kind)
    else:
        clause = drawer.clause(subject=pronoun, kind=kind, adverbial=drawer.chance(0.3), **options)
    return WithRelative(phrase, clause.german_relative(pronoun), clause.english(time="last"))


def _with_gap(clause):
    clause.gap = True
    return clause.english(time="last")


def _described(drawer, pronoun, phrase, tense):
    adjective = drawer.adjective(phrase.noun) or next(item for item in ADJECTIVES if item.german == "schön")
    return be_clause(drawer, pronoun, tense, adjective)


def speaker(drawer):
    """Return a subject that can say or know something: no phrase that a pronoun cannot take up."""
    subject = drawer.subject(("person",))
    while isinstance(subject, NounPhrase) and subject.determiner.kind == "jeder":
        subject = drawer.subject(("person",))
    return subject
