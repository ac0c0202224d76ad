"""One clause: what it says, its German word orders and its English one."""

from dataclasses import dataclass
from typing import Any

from fairseq_lot.corpus.synthetic import english, german
from fairseq_lot.corpus.synthetic.lexicon import Verb
from fairseq_lot.corpus.synthetic.phrases import NounPhrase

# the German modal verbs that English says with a verb and to
MODALS = {"müssen": ("have", "had"), "wollen": ("want", "wanted")}
BE = Verb("sein", "", "", "", "sein", "be", "", "-", "", "", "")


@dataclass
class Clause:
    """What a clause says; phrases have a German and an English form, and so have the pairs of adverbials.

    ``tense`` is present, past or future; ``perfect`` chooses the Perfekt as the German past. ``predicate`` is what is
    said with sein. ``time_first`` opens a main clause with its time, which turns the German verb and subject around.
    """

    subject: Any
    verb: Verb
    tense: str = "present"
    perfect: bool = False
    modal: str = ""
    negated: bool = False
    object: Any = None
    recipient: Any = None
    predicate: tuple[str, str] | None = None
    place: tuple[str, str] | None = None
    manner: tuple[str, str] | None = None
    company: tuple[str, str] | None = None
    frequency: tuple[str, str] | None = None
    time: tuple[str, str] | None = None
    time_first: bool = False

    def german(self, order: str = "main") -> str:
        """Return the German clause.

        Args:
            order: ``main``; ``verb`` for the finite verb first, as in a question; ``final`` for the verb last, as in
                a subordinate clause; ``zu`` for an infinitive clause.
        """
        finite, closing = self._german_verbs()
        subject, middle = self.subject.german("nom"), self._german_middle()
        if order == "zu":
            particle, infinitive = self.verb.particle, self.verb.infinitive
            words = [*middle, f"{particle}zu{infinitive}" if particle else f"zu {infinitive}"]
        elif order == "final":
            # a particle is written in one word with its verb: weil er das Fenster aufmacht
            verbs = closing + finite if closing == self.verb.particle else f"{closing} {finite}"
            words = [subject, *middle, verbs]
        elif order == "verb":
            words = [finite, subject, *middle, closing]
        elif self.time_first:
            words = [self.time[0], finite, subject, *middle, closing]
        else:
            words = [subject, finite, *middle, closing]
        return " ".join(filter(None, words))

    def _german_verbs(self):
        """The finite verb and what closes the main clause: a particle, a participle or an infinitive."""
        verb, person, past = self.verb, self.subject.pronoun.person, self.tense == "past"
        if self.modal or self.tense == "future":
            return german.irregular(self.modal or "werden", person, past=past), verb.particle + verb.infinitive
        if self.perfect:
            return german.irregular(verb.auxiliary, person), verb.particle + verb.participle
        return german.finite(verb, person, past=past), verb.particle

    def _german_middle(self):
        """Everything between the verbs: pronouns, times, nouns, nicht, and then the rest."""
        *preposition, case = self.verb.frame.split()
        case = "dat" if case in ("dat", "swap") else "acc"
        pronouns, nouns, prepositional = [], [], []
        if self.verb.german.startswith("sich "):
            pronouns.append(self.subject.pronoun.reflexive)
        for phrase, its_case in ((self.recipient, "dat"), (self.object, case)):
            if phrase is None:
                continue
            if preposition:
                prepositional.append(german.contract(f"{preposition[0]} {phrase.german(its_case)}"))
            else:
                (pronouns if phrase.is_pronoun else nouns).append(phrase.german(its_case))
        without = isinstance(self.object, NounPhrase) and self.object.determiner[0] == "kein"
        negation = ["nicht"] if self.negated and not without else []
        times = [part[0] for part in (None if self.time_first else self.time, self.frequency) if part]
        rest = [part[0] for part in (self.company, self.manner) if part]
        end = [part[0] for part in (self.place, self.predicate) if part]
        return [*pronouns, *times, *nouns, *negation, *rest, *prepositional, *end]

    def english(self, *, question: bool = False) -> str:
        """Return the English clause: a statement, or a question with its auxiliary first."""
        subject, thing = (self.object, self.subject) if self.verb.frame == "swap" else (self.subject, self.object)
        auxiliary, verb = self._english_verbs(subject.pronoun.english, question)
        often = self.frequency[1] if self.frequency else ""
        negation = "not" if self.negated else ""
        words = [subject.english("nom"), auxiliary, negation, often, verb]
        if question:
            words[:2] = words[1::-1]
        words.append(self.english_rest(thing))
        if self.time:
            words.insert(0 if self.time_first else len(words), self.time[1])
        return " ".join(filter(None, words)).replace("can not", "cannot")

    def english_rest(self, thing) -> str:
        """Return what follows the English verb, but for the time."""
        words = [self.predicate[1]] if self.predicate else []
        words += [thing.english()] if thing else []
        words += [f"to {self.recipient.english()}"] if self.recipient else []
        return " ".join([*words, *(part[1] for part in (self.place, self.manner, self.company) if part)])

    def _english_verbs(self, subject, question):
        """The auxiliary, if any, and the verb."""
        past = self.tense == "past"
        head, past_form, rest = self.verb.english, self.verb.english_past, ""
        if self.modal in MODALS:
            (head, past_form), rest = MODALS[self.modal], f" to {head}"
        if self.tense == "future":
            return "will", head + rest
        if self.verb is BE:
            return english.be(subject, past=past), ""
        if self.modal == "können":
            return ("could" if past else "can"), head
        if question or self.negated:
            return english.do(subject, past=past), head + rest
        return "", english.inflect(head, past_form, subject, past=past) + rest
