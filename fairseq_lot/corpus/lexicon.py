"""The word pairs of the synthetic corpus, read from tables into typed entries.

``/`` separates English synonyms, the usual one first: they are the free choices of the target side.
"""

from typing import NamedTuple

from fairseq_lot.corpus.lexicon_nouns import NOUNS as NOUN_TABLE
from fairseq_lot.corpus.lexicon_verbs import VERBS as VERB_TABLE
from fairseq_lot.corpus.lexicon_words import (
    ADJECTIVE_TABLE,
    CITY_TABLE,
    CONJUNCTION_TABLE,
    DEGREE_TABLE,
    FREQUENCY_TABLE,
    MANNER_TABLE,
    NUMBER_TABLE,
    PREPOSITION_TABLE,
    QUANTIFIER_TABLE,
    QUESTION_TABLE,
    TIME_TABLE,
)


class Noun(NamedTuple):
    """A noun: ``gender`` m, f or n; ``weak`` takes -n outside the nominative; ``pronoun`` is the English one."""

    german: str
    gender: str
    weak: bool
    plural: str
    english: str
    classes: tuple
    flags: tuple
    pronoun: str
    preposition: tuple  # German and English, of a place


class Verb(NamedTuple):
    """A verb with its principal parts; empty parts are regular."""

    particle: str
    infinitive: str
    third: str
    past: str
    participle: str
    auxiliary: str
    english: str
    subjects: tuple
    frame: str
    objects: tuple
    flags: tuple


class Adjective(NamedTuple):
    """An adjective and the kinds of nouns it goes with."""

    german: str
    comparative: str
    english: str
    english_comparative: str
    kinds: tuple


def rows(table: str) -> list[list[str]]:
    """Split a table of ``|``-separated lines."""
    return [line.split("|") for line in table.strip().splitlines()]


def _noun(german, gender, plural, english, classes, flags):
    classes, flags = tuple(classes.split()), tuple(flags.split())
    pronoun = next((flag for flag in flags if flag in ("she", "it")), None)
    if pronoun is None:
        human = "person" in classes or "relative" in classes
        pronoun = {"m": "he", "f": "she"}[gender[0]] if human else "it"
    place = next((tuple(flag[4:].split(":")) for flag in flags if flag.startswith("loc=")), ())
    return Noun(german, gender[0], "w" in gender, plural, english, classes, flags, pronoun, place)


def _verb(infinitive, third, past, participle, auxiliary, english, subjects, frame, flags):
    particle, _, bare = infinitive.rpartition("+")
    frame, _, objects = frame.partition(":")
    return Verb(
        particle, bare, third, past, participle, auxiliary, english,
        tuple(subjects.split()), frame, tuple(objects.split()), tuple(flags.split()),
    )  # fmt: skip


NOUNS = tuple(_noun(*row) for row in rows(NOUN_TABLE))
VERBS = tuple(_verb(*row) for row in rows(VERB_TABLE))
ADJECTIVES = tuple(Adjective(*row[:4], tuple(row[4].split())) for row in rows(ADJECTIVE_TABLE))


def word_pairs() -> set[tuple[str, str]]:
    """Return the (German word, usual English word) pairs of the lexicon, without names."""
    pairs = {(entry.german, entry.english) for entry in NOUNS + ADJECTIVES}
    pairs |= {(verb.particle + verb.infinitive, verb.english) for verb in VERBS}
    tables = (TIME_TABLE, MANNER_TABLE, FREQUENCY_TABLE, DEGREE_TABLE, CONJUNCTION_TABLE, PREPOSITION_TABLE)
    for table in (*tables, QUESTION_TABLE, NUMBER_TABLE, QUANTIFIER_TABLE, CITY_TABLE):
        pairs |= {(row[0], row[1]) for row in rows(table)}
    return {(german, english.split("/")[0].replace("+", "")) for german, english in pairs}
