"""Who and what a sentence is about: phrases with a German form in every case and an English one.

Every phrase has a ``pronoun``, which takes it up again and which the verbs of both languages agree with.
"""

from dataclasses import dataclass

from fairseq_lot.corpus.synthetic import german
from fairseq_lot.corpus.synthetic.lexicon import PRONOUNS, Adjective, Noun, Pronoun


@dataclass
class PronounPhrase:
    """A personal pronoun."""

    pronoun: Pronoun
    is_pronoun = True

    def german(self, case: str) -> str:
        """Return the pronoun in nom, acc or dat."""
        return {"nom": self.pronoun.german, "acc": self.pronoun.accusative, "dat": self.pronoun.dative}[case]

    def english(self, case: str = "acc") -> str:
        """Return the pronoun, as a subject in nom."""
        return self.pronoun.english if case == "nom" else self.pronoun.object


@dataclass
class Fixed:
    """A name, a question word or another word that is only used in one form."""

    german_word: str
    english_word: str
    pronoun: Pronoun
    is_pronoun = False

    def german(self, case: str) -> str:
        """Return the word."""
        return self.german_word

    def english(self, case: str = "acc") -> str:
        """Return the word."""
        return self.english_word


@dataclass
class NounPhrase:
    """A determiner, a noun and what describes it; determiner and relative clause are pairs, German and English."""

    noun: Noun
    determiner: tuple[str, str] = ("der", "the")
    plural: bool = False
    adjective: Adjective | None = None
    owner: "NounPhrase | None" = None
    clause: tuple[str, str] | None = None
    is_pronoun = False

    @property
    def group(self) -> str:
        """The gender, or p."""
        return "p" if self.plural else self.noun.gender

    @property
    def pronoun(self) -> Pronoun:
        """The pronoun that takes the phrase up: er is it for der Tisch."""
        if self.plural:
            return PRONOUNS["sie", "they"]
        return PRONOUNS[{"m": "er", "f": "sie", "n": "es"}[self.noun.gender], self.noun.pronoun]

    def german(self, case: str) -> str:
        """Return the phrase in its case; an owner stands behind it in the genitive, then a relative clause."""
        word = self.determiner[0]
        bare = word == "" or (word == "ein" and (self.plural or not self.noun.plural))
        words = [] if bare else [german.article(word, case, self.group)]
        if self.adjective:
            words.append(self.adjective.stem + german.adjective_ending("" if bare else word, case, self.group))
        words.append(german.noun(self.noun, case, self.plural))
        if self.owner:
            words.append(self.owner.german("gen"))
        if self.clause:
            words.append(f", {self.clause[0]} ,")
        return " ".join(words)

    def english(self, case: str = "acc") -> str:
        """Return the phrase; an owner stands in front: the teacher's car."""
        words = [f"{self.owner.english()}'s" if self.owner else self._english_determiner()]
        words += [self.adjective.english] if self.adjective else []
        words.append(self.noun.english_plural if self.plural else self.noun.english)
        words += [self.clause[1]] if self.clause else []
        return " ".join(filter(None, words))

    def _english_determiner(self):
        german_word, word = self.determiner
        if word == "a" and (self.plural or not self.noun.plural):
            return "any" if german_word == "kein" else ""
        return "these" if word == "this" and self.plural else word
