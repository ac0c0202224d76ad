"""English verb phrases: auxiliaries, do-support, negation, progressive, modals and particles."""

from typing import NamedTuple

from fairseq_lot.corpus import english
from fairseq_lot.corpus.english import BE, Choice, Tree, either

FORMS = {
    "third": english.third_person, "past": english.past, "participle": english.participle, "gerund": english.gerund,
}  # fmt: skip
PROGRESSIVE_SHARE = 0.2


class Finite(NamedTuple):
    """One way to make a verb finite: auxiliary, words before the verb, the verb's form.

    ``plain`` is the pair (words, form) of the affirmative statement where that has no auxiliary.
    """

    weight: float
    auxiliary: str
    lead: str
    form: str
    plain: tuple | None = None


def _do(weight, past, agreement, base, inflected, form="base"):
    """Return a lexical verb with do-support; ``base``, ``inflected`` are the words before the verb proper."""
    auxiliary = "did" if past else ("does" if agreement == "he" else "do")
    return Finite(weight, auxiliary, base, form, (inflected, form))


def _modal(clause, agreement):
    past = clause.tense == "past"
    be = BE[agreement][1 if past else 0]

    def lexical(weight, verb, rest, form="base"):
        inflected = english.past(verb) if past else (english.third_person(verb) if agreement == "he" else verb)
        return _do(weight, past, agreement, f"{verb} {rest}", f"{inflected} {rest}", form)

    if clause.modal == "können":
        first = Finite(0.85, "could" if past else "can", "", "base")
        return [first, Finite(0.15, be, "able to", "base")]
    if clause.modal == "müssen":
        have = lexical(0.4, "have", "to")
        return [have._replace(weight=1.0)] if past or clause.negated else [Finite(0.6, "must", "", "base"), have]
    if clause.modal == "wollen":
        return [lexical(1.0, "want", "to")]
    if clause.modal == "möchten":
        return [Finite(1.0, "would", "like to", "base")]
    if clause.modal == "dürfen":
        allowed = Finite(0.7, be, "allowed to", "base")
        return [allowed._replace(weight=1.0)] if past or clause.negated else [allowed, Finite(0.3, "may", "", "base")]
    if clause.modal == "sollen":
        supposed = Finite(0.3, be, "supposed to", "base")
        return [supposed._replace(weight=1.0)] if past else [Finite(0.7, "should", "", "base"), supposed]
    return [lexical(0.7, "like", "to"), lexical(0.3, "like", "", "gerund")]


def finites(clause, agreement: str) -> list[Finite]:
    """Return the ways to make the clause's verb finite, the likeliest first."""
    if clause.modal:
        return _modal(clause, agreement)
    if clause.tense == "fut":
        return [Finite(0.75, "will", "", "base"), Finite(0.25, BE[agreement][0], "going to", "base")]
    if clause.earlier:
        return [Finite(0.8, "had", "", "participle"), Finite(0.2, "did", "", "base", ("", "past"))]
    past = clause.tense == "past"
    if clause.verb.english.split()[0] == "be":
        return [Finite(1.0, BE[agreement][1 if past else 0], "", "rest")]
    if past:
        return [Finite(1.0, "did", "", "base", ("", "past"))]
    progressive = Finite(PROGRESSIVE_SHARE, BE[agreement][0], "", "gerund")
    if clause.tense == "now":
        return [progressive._replace(weight=1.0)]
    auxiliary, form = ("does", "third") if agreement == "he" else ("do", "base")
    simple = Finite(1.0, auxiliary, "", "base", ("", form))
    if "state" in clause.verb.flags or clause.habit or clause.frequency:
        return [simple]
    return [simple._replace(weight=1 - PROGRESSIVE_SHARE), progressive]


def statement(clause, agreement: str) -> Tree:
    """Return verb, negation, frequency adverb and objects of a statement."""
    often = clause.frequency[1] if clause.frequency else ""
    options = []
    for finite in finites(clause, agreement):
        if clause.negated:
            words = [negated(finite.auxiliary), often, finite.lead, verb_and_objects(clause, finite.form)]
        elif finite.plain:
            words = [often, finite.plain[0], verb_and_objects(clause, finite.plain[1])]
        else:
            words = [finite.auxiliary, often, finite.lead, verb_and_objects(clause, finite.form)]
        options.append((finite.weight, words))
    return Choice(tuple(options))


def question(clause, subject) -> Tree:
    """Return auxiliary, subject, verb and objects of a question."""
    options = []
    for finite in finites(clause, subject.agreement):
        often = clause.frequency[1] if clause.frequency else ""
        rest = [often, finite.lead, verb_and_objects(clause, finite.form)]
        options.append((finite.weight, [finite.auxiliary, subject.english(), rest]))
    return Choice(tuple(options))


def negated(auxiliary: str) -> Tree:
    """Return the auxiliary with not, or contracted."""
    if auxiliary == "am":
        return "am not"
    if auxiliary in ("can", "will"):
        return either(*{"can": ("cannot", "can't"), "will": ("will not", "won't")}[auxiliary], usual=0.6)
    return either(auxiliary + " not", auxiliary + "n't", usual=0.6)


def verb_and_objects(clause, form: str) -> Tree:
    """Return the verb in a form (base, third, past, participle, gerund; rest: without its be) and its objects."""
    return either(*(_verb_and_objects(clause, words, form) for words in clause.verb.english.split("/")))


def _verb_and_objects(clause, words, form):
    bare, _, particle = words.partition(" +")
    head, *rest = bare.split(" ")
    if form == "rest":
        head = ""
    elif form == "gerund" and head == "be":
        head = "being"
    elif form != "base":
        head = FORMS[form](head)
    verb = " ".join([head, *rest])
    thing = clause.english_object()
    if particle:
        shifted = [verb, thing, particle]
        pronoun = getattr(clause.object, "is_pronoun", False)
        return shifted if pronoun else either([verb, particle, thing], shifted, usual=0.65)
    if clause.recipient is None:
        return [verb, thing]
    to_recipient = [verb, thing, "to", clause.recipient.english("dat")]
    if words == "explain" or clause.gap or clause.object.is_pronoun:
        return to_recipient
    return either([verb, clause.recipient.english("dat"), thing], to_recipient, usual=0.75)


def passive_verb(clause) -> Tree:
    """Return was/is/will be and the participle, agreeing with the object."""
    be = BE[clause.object.agreement][1 if clause.tense == "past" else 0]

    def form(words):
        head, *rest = words.replace("+", "").split(" ")
        return " ".join([be, english.participle(head), *rest])

    return english.synonyms(clause.verb.english, form)
