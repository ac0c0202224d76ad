"""German inflection: articles, adjective endings, nouns and verbs.

Cases are ``nom``, ``acc``, ``dat``, ``gen``; a group is ``m``, ``f``, ``n`` or ``p`` (plural of any gender); persons
are ``1s`` to ``3p``.
"""

import re

from fairseq_lot.corpus.lexicon import Adjective, Noun, Verb

# endings in the order m f n p
DEFINITE = {
    "nom": ("der", "die", "das", "die"),
    "acc": ("den", "die", "das", "die"),
    "dat": ("dem", "der", "dem", "den"),
    "gen": ("des", "der", "des", "der"),
}
RELATIVE = {
    "nom": ("der", "die", "das", "die"),
    "acc": ("den", "die", "das", "die"),
    "dat": ("dem", "der", "dem", "denen"),
}
EIN_ENDINGS = {
    "nom": ("", "e", "", "e"),
    "acc": ("en", "e", "", "e"),
    "dat": ("em", "er", "em", "en"),
    "gen": ("es", "er", "es", "er"),
}
DIES_ENDINGS = {
    "nom": ("er", "e", "es", "e"),
    "acc": ("en", "e", "es", "e"),
    "dat": ("em", "er", "em", "en"),
    "gen": ("es", "er", "es", "er"),
}
WEAK_ENDINGS = {
    "nom": ("e", "e", "e", "en"),
    "acc": ("en", "e", "e", "en"),
    "dat": ("en", "en", "en", "en"),
    "gen": ("en", "en", "en", "en"),
}
MIXED_ENDINGS = {
    "nom": ("er", "e", "es", "en"),
    "acc": ("en", "e", "es", "en"),
    "dat": ("en", "en", "en", "en"),
    "gen": ("en", "en", "en", "en"),
}
STRONG_ENDINGS = {
    "nom": ("er", "e", "es", "e"),
    "acc": ("en", "e", "es", "e"),
    "dat": ("em", "er", "em", "en"),
    "gen": ("en", "er", "en", "er"),
}
CONTRACTIONS = {
    "in dem": "im", "in das": "ins", "an dem": "am", "an das": "ans",
    "zu dem": "zum", "zu der": "zur", "von dem": "vom", "bei dem": "beim",
}  # fmt: skip
# present of the irregular verbs, 1s 2s 3s 1p 2p 3p, and the stem of the past
PRESENT = {
    "sein": ("bin", "bist", "ist", "sind", "seid", "sind"),
    "haben": ("habe", "hast", "hat", "haben", "habt", "haben"),
    "werden": ("werde", "wirst", "wird", "werden", "werdet", "werden"),
    "können": ("kann", "kannst", "kann", "können", "könnt", "können"),
    "müssen": ("muss", "musst", "muss", "müssen", "müsst", "müssen"),
    "wollen": ("will", "willst", "will", "wollen", "wollt", "wollen"),
    "dürfen": ("darf", "darfst", "darf", "dürfen", "dürft", "dürfen"),
    "sollen": ("soll", "sollst", "soll", "sollen", "sollt", "sollen"),
    "mögen": ("mag", "magst", "mag", "mögen", "mögt", "mögen"),
    "wissen": ("weiß", "weißt", "weiß", "wissen", "wisst", "wissen"),
    "laden": ("lade", "lädst", "lädt", "laden", "ladet", "laden"),
}
PAST = {
    "sein": "war", "haben": "hatte", "werden": "wurde", "können": "konnte", "müssen": "musste",
    "wollen": "wollte", "dürfen": "durfte", "sollen": "sollte",
}  # fmt: skip
SHORT_GENITIVE = ("Chef", "Film", "Lärm")
PERSONS = ("1s", "2s", "3s", "1p", "2p", "3p")
INSEPARABLE = ("be", "emp", "ent", "er", "ge", "miss", "ver", "zer")


def _column(group: str) -> int:
    return "mfnp".index(group)


def noun_form(noun: Noun, case: str, plural: bool = False) -> str:
    """Return the noun in its case: dative plural -n, genitive -(e)s, weak masculines in -n."""
    if plural:
        form = noun.plural
        return form + "n" if case == "dat" and form[-1] not in "ns" else form
    if noun.weak and case != "nom":
        return noun.plural
    if case == "gen" and noun.gender != "f":
        return noun.german + _genitive_ending(noun.german)
    return noun.german


def _genitive_ending(word):
    if word == "Bus":
        return "ses"
    if word[-1] in "sßxz":
        return "es"
    syllables = re.findall(r"au|äu|ei|eu|ie|ee|[aeiouäöüy]", word.lower())
    return "es" if len(syllables) == 1 and word[-1] in "bdfgmnrt" and word not in SHORT_GENITIVE else "s"


def article(kind: str, case: str, group: str) -> str:
    """Return the form of ``der``, ``ein``, ``kein``, ``mein``, ..., ``dieser``, ``jeder`` or ``alle``."""
    column = _column(group)
    if kind == "der":
        return DEFINITE[case][column]
    if kind in ("dieser", "jeder"):
        return kind[:-2] + DIES_ENDINGS[case][column]
    if kind == "alle":
        return "all" + DIES_ENDINGS[case][column]
    return kind + EIN_ENDINGS[case][column]


def adjective_form(adjective: Adjective, declension: str, case: str, group: str) -> str:
    """Return the attributive adjective in the ``weak``, ``mixed`` or ``strong`` declension."""
    endings = {"weak": WEAK_ENDINGS, "mixed": MIXED_ENDINGS, "strong": STRONG_ENDINGS}[declension]
    stem = adjective.german
    if stem.endswith("euer"):
        stem = stem[:-2] + "r"
    elif stem.endswith("el"):
        stem = stem[:-2] + "l"
    return stem.removesuffix("e") + endings[case][_column(group)]


def contract(words: str) -> str:
    """Merge a preposition with its definite article where German does: in dem -> im."""
    head = " ".join(words.split()[:2])
    return words.replace(head, CONTRACTIONS[head], 1) if head in CONTRACTIONS else words


def stem_of(infinitive: str) -> str:
    """Return the infinitive without -en or -n."""
    return infinitive[:-2] if infinitive.endswith("en") else infinitive[:-1]


def _needs_e(stem):
    return stem.endswith(("d", "t", "ffn", "chn", "gn", "tm"))


def present(verb: Verb, person: str) -> str:
    """Return the present form without the particle."""
    if verb.infinitive in PRESENT:
        return PRESENT[verb.infinitive][PERSONS.index(person)]
    stem = stem_of(verb.infinitive)
    if person in ("1p", "3p"):
        return verb.infinitive
    if person == "1s":
        return (stem[:-2] + "l" if verb.infinitive.endswith("eln") else stem) + "e"
    if person == "2p":
        return stem + ("et" if _needs_e(stem) else "t")
    third = verb.third or stem + ("et" if _needs_e(stem) else "t")
    if person == "3s":
        return third
    base = third[:-1]
    return base + ("t" if base[-1] in "sßxz" else "st")


def past(verb: Verb, person: str) -> str:
    """Return the Präteritum without the particle."""
    stem = stem_of(verb.infinitive)
    return past_form(verb.past or PAST.get(verb.infinitive) or stem + ("ete" if _needs_e(stem) else "te"), person)


def past_form(first: str, person: str) -> str:
    """Add the ending of a person to a Präteritum given in the first person singular."""
    if person in ("1s", "3s"):
        return first
    if person == "2s":
        return first + "st"
    if person == "2p":
        return first + "t"
    return first + ("n" if first.endswith("e") else "en")


def participle(verb: Verb) -> str:
    """Return the past participle with the particle: aufgemacht, besucht, repariert."""
    if verb.participle:
        return verb.particle + verb.participle
    stem = stem_of(verb.infinitive)
    prefix = "" if verb.infinitive.startswith(INSEPARABLE) or stem.endswith("ier") else "ge"
    return verb.particle + prefix + stem + ("et" if _needs_e(stem) else "t")


def auxiliary(name: str, person: str, in_past: bool = False) -> str:
    """Return a form of sein, haben, werden or a modal verb."""
    return past_form(PAST[name], person) if in_past else PRESENT[name][PERSONS.index(person)]
