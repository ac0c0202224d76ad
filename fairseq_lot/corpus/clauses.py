"""One clause of the synthetic corpus: its meaning, its German word orders and its English tree."""

from dataclasses import dataclass
from typing import Any

from fairseq_lot.corpus import german
from fairseq_lot.corpus.english import Tree, either
from fairseq_lot.corpus.lexicon import Verb
from fairseq_lot.corpus.phrases import Relative
from fairseq_lot.corpus.verb_phrases import passive_verb, question, statement


@dataclass
class Clause:
    """What a clause says.

    ``tense`` is pres, now (progressive), past or fut; ``perfect`` chooses the Perfekt as the German past; ``earlier``
    is the pluperfect. ``case`` and ``preposition`` belong to the German object. The adverbials are pairs of German
    text and English tree. A ``gap`` object is left out of the English clause (relative clauses, what-questions).
    """

    subject: Any
    verb: Verb
    tense: str
    object: Any = None
    case: str = "acc"
    preposition: str = ""
    recipient: Any = None
    modal: str = ""
    perfect: bool = False
    earlier: bool = False
    negated: bool = False
    time: tuple | None = None
    frequency: tuple | None = None
    manner: tuple | None = None
    cause: tuple | None = None
    company: tuple | None = None
    goal: tuple | None = None
    place: tuple | None = None
    gap: bool = False
    habit: bool = False

    def finite_and_tail(self) -> tuple[str, list[str]]:
        """Return the German finite verb and the verbs at the end of the main clause."""
        verb, person, in_past = self.verb, self.subject.person, self.tense == "past"
        infinitive = verb.particle + verb.infinitive
        if self.modal and self.modal != "gern":
            if self.modal == "möchten":
                return german.past_form("möchte", person), [infinitive]
            return german.auxiliary(self.modal, person, in_past), [infinitive]
        if self.tense == "fut":
            return german.auxiliary("werden", person), [infinitive]
        if self.perfect or self.earlier:
            name = "sein" if verb.auxiliary == "s" else "haben"
            return german.auxiliary(name, person, self.earlier), [german.participle(verb)]
        finite = german.past(verb, person) if in_past else german.present(verb, person)
        return finite, [verb.particle] if verb.particle else []

    def german_middle(self, with_time: bool = True, with_object: bool = True) -> list[str]:
        """Return what stands between the verbs, in German order."""
        pronouns, nouns, prepositional = [], [], []
        if self.recipient is not None:
            (pronouns if self.recipient.is_pronoun else nouns).append(self.recipient.german("dat"))
        if self.object is not None and with_object:
            form = self.object.german(self.case)
            if self.preposition:
                prepositional.append(german.contract(f"{self.preposition} {form}"))
            else:
                (pronouns if self.object.is_pronoun else nouns).append(form)
        if "refl" in self.verb.flags:
            pronouns.insert(0, self.subject.reflexive)
        words, goal = [*pronouns], [self.goal[0]] if self.goal else []
        words += [part[0] for part in (self.time if with_time else None, self.frequency) if part]
        if self.modal == "gern":
            return [*words, "gern", *nouns, *self._german_adverbials(), *prepositional, *goal]
        if self.cause:
            words.append(self.cause[0])
        words += nouns
        if self.negated and not (self.object is not None and self._has_kein()):
            words.append("nicht")
        return [*words, *self._german_adverbials(), *prepositional, *goal]

    def _has_kein(self):
        return getattr(getattr(self.object, "determiner", None), "kind", "") == "kein"

    def _german_adverbials(self):
        return [part[0] for part in (self.manner, self.company, self.place) if part]

    def german(self, order: str = "v2", lead: str = "") -> list[str]:
        """Return the German words: ``v2``, ``inverted`` after ``lead``, ``question``, ``final`` or ``zu``."""
        finite, tail = self.finite_and_tail()
        subject = self.subject.german("nom")
        lead_is_time = bool(lead and self.time and lead == self.time[0])
        middle = self.german_middle(with_time=not lead_is_time, with_object=not self.gap)
        if order == "v2":
            return [subject, finite, *middle, *tail]
        if order == "inverted":
            return [lead, finite, subject, *middle, *tail]
        if order == "question":
            return [finite, subject, *middle, *tail]
        if order == "zu":
            verb = self.verb
            return [*middle, f"{verb.particle}zu{verb.infinitive}" if verb.particle else "zu " + verb.infinitive]
        return [subject, *middle, *self._final_verbs(finite, tail)]

    def _final_verbs(self, finite, tail):
        """Join a particle to its verb at the end of a subordinate clause: weil er das Fenster aufmacht."""
        return [tail[0] + finite] if tail and tail[0] == self.verb.particle else [*tail, finite]

    def german_relative(self, relative: Relative) -> list[str]:
        """Return the words of a relative clause, its pronoun (with preposition) first."""
        finite, tail = self.finite_and_tail()
        if relative.role == "subject":
            return [relative.german("nom"), *self.german_middle(), *self._final_verbs(finite, tail)]
        head = f"{self.preposition} {relative.german(self.case)}".strip()
        middle = self.german_middle(with_object=False)
        return [head, self.subject.german("nom"), *middle, *self._final_verbs(finite, tail)]

    def english(self, *, time: str = "free") -> Tree:
        """Return the English statement; its ``time`` is mostly ``first``, mostly last (``free``) or always ``last``."""
        subject = self.english_subject()
        body = [subject.english(), statement(self, subject.agreement), self.english_rest()]
        if self.time is None:
            return body
        first, last = [self.time[1], either("", ",", usual=0.6), body], [body, self.time[1]]
        if time == "last":
            return last
        return either(first, last, usual=0.8) if time == "first" else either(last, first, usual=0.93)

    def english_subject(self):
        """Return the phrase that is the English subject: the dative one of gefallen."""
        return self.object if "swap" in self.verb.flags else self.subject

    def english_rest(self) -> Tree:
        """Return the adverbials after the English verb and its object, without the time."""
        parts = (self.goal, self.place, self.manner, self.company, self.cause)
        return [part[1] for part in parts if part]

    def english_object(self) -> Tree:
        """Return the English object, or nothing where a gap is left."""
        other = self.subject if "swap" in self.verb.flags else self.object
        return "" if other is None or self.gap else other.english("acc")

    def english_question(self, word: Tree = "") -> Tree:
        """Return the English question, after ``word`` (where, when, ...)."""
        return [word, question(self, self.english_subject()), self.english_rest(), self.time[1] if self.time else ""]

    def german_passive(self, lead: str = "") -> list[str]:
        """Return the passive: the object as subject, the subject after von."""
        finite = german.auxiliary("werden", self.object.person, self.tense == "past")
        patient, agent = self.object.german("nom"), german.contract("von " + self.subject.german("dat"))
        first = [lead, finite, patient] if lead else [patient, finite]
        time = [self.time[0]] if self.time and not lead else []
        return [*first, *time, agent, german.participle(self.verb)]

    def english_passive(self, *, time_first: bool = False) -> Tree:
        """Return the English passive with its agent."""
        body = [self.object.english(), passive_verb(self), "by", self.subject.english("acc")]
        if self.time is None:
            return body
        return either([self.time[1], body], [body, self.time[1]], usual=0.8) if time_first else [body, self.time[1]]
