"""Noun phrases of the synthetic corpus: each one gives its German form in any case and its English tree.

Every phrase has ``person`` (the German verb's), ``agreement`` (the English verb's: I, he, you, they), ``pronoun`` (the
phrase that refers back to it) and ``stem``/``their`` (the possessives of that reference).
"""

from dataclasses import dataclass

from fairseq_lot.corpus import german
from fairseq_lot.corpus.english import Tree, either, plural, synonyms
from fairseq_lot.corpus.lexicon import Adjective, Noun, rows
from fairseq_lot.corpus.lexicon_words import NUMBER_TABLE

NUMBERS = {row[0]: row[1] for row in rows(NUMBER_TABLE)}
# nom acc dat reflexive person possessive
GERMAN_PRONOUNS = {
    "ich": ("ich", "mich", "mir", "mich", "1s", "mein"),
    "du": ("du", "dich", "dir", "dich", "2s", "dein"),
    "er": ("er", "ihn", "ihm", "sich", "3s", "sein"),
    "sie": ("sie", "sie", "ihr", "sich", "3s", "ihr"),
    "es": ("es", "es", "ihm", "sich", "3s", "sein"),
    "wir": ("wir", "uns", "uns", "uns", "1p", "unser"),
    "ihr": ("ihr", "euch", "euch", "euch", "2p", "euer"),
    "sie_p": ("sie", "sie", "ihnen", "sich", "3p", "ihr"),
    "Sie": ("Sie", "Sie", "Ihnen", "sich", "3p", "Ihr"),
}
# subject object agreement possessive
ENGLISH_PRONOUNS = {
    "I": ("I", "me", "I", "my"),
    "you": ("you", "you", "you", "your"),
    "he": ("he", "him", "he", "his"),
    "she": ("she", "her", "he", "her"),
    "it": ("it", "it", "he", "its"),
    "we": ("we", "us", "they", "our"),
    "they": ("they", "them", "they", "their"),
}
USUAL_ENGLISH = {
    "ich": "I", "du": "you", "er": "he", "sie": "she", "es": "it", "wir": "we", "ihr": "you", "sie_p": "they",
    "Sie": "you",
}  # fmt: skip

# seine Frau is his wife, not his woman
SPOUSES = {"woman": "wife", "man": "husband"}


class Pronoun:
    """A personal pronoun; ``english`` names the English one where the referent decides (er -> it)."""

    is_pronoun = True

    def __init__(self, key: str, english: str | None = None):
        *self._forms, self.reflexive, self.person, self.stem = GERMAN_PRONOUNS[key]
        self.key = key
        self.english_key = english or USUAL_ENGLISH[key]
        self._subject, self._object, self.agreement, self.their = ENGLISH_PRONOUNS[self.english_key]
        self.pronoun = self
        self.human = self.english_key != "it"

    def german(self, case: str) -> str:
        """Return the pronoun in nom, acc or dat."""
        return self._forms[("nom", "acc", "dat").index(case)]

    def english(self, case: str = "nom") -> Tree:
        """Return the English pronoun; any case but nom is the object form."""
        return self._subject if case == "nom" else self._object


class Name:
    """A given name, the same in both languages."""

    is_pronoun = False
    person = "3s"
    agreement = "he"
    reflexive = "sich"
    human = True

    def __init__(self, name: str, pronoun: str):
        self.name = name
        self.pronoun = Pronoun("er" if pronoun == "he" else "sie", pronoun)
        self.stem, self.their = self.pronoun.stem, self.pronoun.their

    def german(self, case: str) -> str:
        """Return the name."""
        return self.name

    def english(self, case: str = "nom") -> Tree:
        """Return the name."""
        return self.name


class Relative:
    """A relative pronoun for ``antecedent``; ``role`` is its part in the English clause, subject or object."""

    is_pronoun = True
    reflexive = "sich"

    def __init__(self, antecedent, role: str):
        self.role = role
        self.group = antecedent.group
        self.human = antecedent.human
        self.person, self.agreement = antecedent.person, antecedent.agreement
        self.pronoun = antecedent.pronoun
        self.stem, self.their = antecedent.stem, antecedent.their

    def german(self, case: str) -> str:
        """Return der, die, das, dem, denen, ..."""
        return german.RELATIVE[case]["mfnp".index(self.group)]

    def english(self, case: str = "nom") -> Tree:
        """Return who, that, which or, as an object, nothing."""
        if self.role == "subject":
            return either("who", "that", usual=0.85) if self.human else either("that", "which")
        return either("that", "", "who" if self.human else "which")


@dataclass(frozen=True)
class Determiner:
    """A determiner: ``kind`` der, ein, kein, dieser, jeder, alle, viele, einige, number, none, name, possessive.

    ``german`` is the possessive's stem, the name with its -s or the numeral; ``english`` its translation.
    """

    kind: str
    german: str = ""
    english: str = ""


class NounPhrase:
    """A determiner, perhaps an adjective, a noun, and perhaps an owner in the genitive."""

    is_pronoun = False
    reflexive = "sich"

    def __init__(
        self, noun: Noun, determiner: Determiner, *, plural: bool = False, adjective: Adjective | None = None,
        owner: "NounPhrase | None" = None,
    ):  # fmt: skip
        self.noun, self.determiner, self.adjective, self.owner = noun, determiner, adjective, owner
        self.plural = plural and "pair" not in noun.flags and "mass" not in noun.flags
        self.group = "p" if self.plural else noun.gender
        self.person = "3p" if self.plural else "3s"
        self.many = self.plural or "pair" in noun.flags
        self.agreement = "they" if self.many else "he"
        german_key = {"m": "er", "f": "sie", "n": "es", "p": "sie_p"}[self.group]
        self.pronoun = Pronoun(german_key, "they" if self.many else noun.pronoun)
        self.stem, self.their = self.pronoun.stem, self.pronoun.their
        self.human = "person" in noun.classes or "relative" in noun.classes

    def german(self, case: str) -> str:
        """Return the phrase in nom, acc, dat or gen."""
        words = [self._german_determiner(case)]
        if self.adjective:
            words.append(german.adjective_form(self.adjective, self._declension(), case, self.group))
        words.append(german.noun_form(self.noun, case, self.plural))
        if self.owner:
            words.append(self.owner.german("gen"))
        return " ".join(word for word in words if word)

    def _german_determiner(self, case):
        kind = self.determiner.kind
        if kind in ("number", "name", "viele", "einige", "none"):
            quantity = kind + "n" if case == "dat" else kind
            return quantity if kind in ("viele", "einige") else self.determiner.german
        if kind == "ein" and self.plural:
            return ""
        stem = self.determiner.german if kind == "possessive" else kind
        form = german.article(stem, case, self.group)
        return form.replace("euere", "eure")

    def _declension(self):
        kind = self.determiner.kind
        if kind in ("der", "dieser", "jeder", "alle"):
            return "weak"
        if kind in ("number", "name", "viele", "einige", "none") or (kind == "ein" and self.plural):
            return "strong"
        return "mixed"

    def english(self, case: str = "nom") -> Tree:
        """Return the English tree of the phrase."""
        core = [self._english_noun()]
        if self.adjective:
            core.insert(0, synonyms(self.adjective.english))
        if self.owner:
            owner, mark = self.owner, "'" if self.owner.many and self.owner.english_plural_ends_in_s() else "'s"
            article = self._english_determiner()
            return either([owner.english(), mark, core], [article, core, "of", owner.english()], usual=0.75)
        return [self._english_determiner(), core]

    def english_plural_ends_in_s(self) -> bool:
        """Say whether the English plural takes a bare apostrophe as its genitive."""
        return plural(self.noun.english.split("/")[0]).endswith("s")

    def _english_noun(self):
        words = self.noun.english
        if self.determiner.kind in ("possessive", "name"):
            words = SPOUSES.get(words, words)
        return synonyms(words, plural if self.plural else None)

    def _english_determiner(self):
        kind, many = self.determiner.kind, self.many
        mass = "mass" in self.noun.flags
        if kind in ("ein", "none"):
            return "" if self.plural or mass else ("a pair of" if many else "a")
        if kind == "kein":
            return "any" if many or mass else "a"
        simple = {
            "der": "the", "dieser": "these" if many else "this", "jeder": either("every", "each"),
            "alle": "all the", "viele": either("many", "a lot of"), "einige": either("some", "a few"),
        }  # fmt: skip
        return simple.get(kind, self.determiner.english)
