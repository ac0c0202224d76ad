"""The words of the synthetic corpus: one table a part of speech in words/*.tsv, whose header names the fields below.

``a/b`` are English synonyms, the usual one first. Classes say which words go together, such as a verb and its objects.
"""

from importlib.resources import files
from typing import NamedTuple


class Noun(NamedTuple):
    """A noun: ``gender`` m, f or n; no ``plural`` for a mass; ``prepositions`` are those of a place, as in:at."""

    german: str
    gender: str
    genitive: str
    plural: str
    english: str
    english_plural: str
    pronoun: str
    classes: str
    prepositions: str


class Verb(NamedTuple):
    """A verb and its principal parts: ``auf+machen`` is separable, ``sich freuen`` reflexive.

    Frames: ``-`` nothing; ``acc`` and ``dat`` an object in this case, ``auf acc`` one with a preposition; ``give`` a
    dative person and an accusative; ``swap`` a dative that is the English subject; ``to`` a direction and ``at`` a
    place; ``put`` a move onto furniture and ``lie`` a rest there; ``dass``, ``ob`` and ``zu`` a clause.
    ``adverbs`` says whether an adverb of manner and a place go with it.
    """

    german: str
    third: str
    past: str
    participle: str
    auxiliary: str
    english: str
    english_past: str
    frame: str
    subjects: str
    objects: str
    adverbs: str

    @property
    def particle(self) -> str:
        """The separable part: auf of aufmachen."""
        return self.german.rpartition("+")[0]

    @property
    def infinitive(self) -> str:
        """The infinitive without particle and sich."""
        return self.german.rpartition("+")[2].removeprefix("sich ")


class Adjective(NamedTuple):
    """An adjective; endings go to its ``stem``: teuer, teur-e."""

    german: str
    stem: str
    english: str
    classes: str


class Preposition(NamedTuple):
    """A preposition with the ``classes`` of nouns that follow it; those of furniture take two cases."""

    german: str
    case: str
    english: str
    classes: str


class Pronoun(NamedTuple):
    """A pronoun in both languages; German verbs agree with ``person`` (1s to 3p), English ones with ``english``."""

    german: str
    accusative: str
    dative: str
    reflexive: str
    possessive: str
    person: str
    english: str
    object: str
    english_possessive: str


class Word(NamedTuple):
    """A word or phrase that is not inflected; ``kinds`` say how it is used."""

    kinds: str
    german: str
    english: str


def _read(name, row):
    header, *lines = (files(__package__) / "words" / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
    names = header.split("\t")
    return tuple(row(**dict(zip(names, line.split("\t"), strict=True))) for line in lines)


NOUNS: tuple[Noun, ...] = _read("nouns", Noun)
VERBS: tuple[Verb, ...] = _read("verbs", Verb)
ADJECTIVES: tuple[Adjective, ...] = _read("adjectives", Adjective)
PREPOSITIONS: tuple[Preposition, ...] = _read("prepositions", Preposition)
PRONOUNS = {(row.german, row.english): row for row in _read("pronouns", Pronoun)}
OTHERS: tuple[Word, ...] = _read("others", Word)


def share(one: str, other: str) -> bool:
    """Say whether two space-separated lists of classes have one in common."""
    return not set(one.split()).isdisjoint(other.split())
