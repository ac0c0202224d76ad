"""German inflection: articles, adjective endings, nouns and verbs.

Cases are ``nom``, ``acc``, ``dat`` and ``gen``; a group is a gender m, f or n, or p, the plural of any gender; persons
are 1s, 2s, 3s, 1p and 3p.
"""

from fairseq_lot.corpus.synthetic.lexicon import Noun, Verb

GROUPS, PERSONS = "mfnp", ("1s", "2s", "3s", "1p", "3p")
# one form for each group
ARTICLES = {"nom": "der die das die", "acc": "den die das die", "dat": "dem der dem den", "gen": "des der des der"}
ENDINGS = {"nom": "er e es e", "acc": "en e es e", "dat": "em er em en", "gen": "es er es er"}
# with their stems
DER_WORDS = {"der": "d", "dieser": "dies", "alle": "all"}
EIN_WORDS = ("ein", "kein", "mein", "dein", "sein", "ihr", "unser")
CONTRACTIONS = {"in dem": "im", "in das": "ins", "an dem": "am", "zu dem": "zum", "zu der": "zur", "von dem": "vom"}
# the present in each person, and the past
IRREGULAR = {
    "sein": ("bin bist ist sind sind", "war"),
    "haben": ("habe hast hat haben haben", "hatte"),
    "werden": ("werde wirst wird werden werden", "wurde"),
    "können": ("kann kannst kann können können", "konnte"),
    "müssen": ("muss musst muss müssen müssen", "musste"),
    "wollen": ("will willst will wollen wollen", "wollte"),
    "wissen": ("weiß weißt weiß wissen wissen", "wusste"),
}


def article(word: str, case: str, group: str) -> str:
    """Return a determiner in its case; numbers have only one form."""
    if word == "der":
        return ARTICLES[case].split()[GROUPS.index(group)]
    if word in DER_WORDS:
        return DER_WORDS[word] + _ending(case, group)
    return word + _ending(case, group) if _shows_case(word, case, group) else word


def adjective_ending(word: str, case: str, group: str) -> str:
    """Return the ending of an adjective after the determiner ``word``: weak where that one shows the case already."""
    if not _shows_case(word, case, group):
        return "en" if case == "gen" and group in "mn" else _ending(case, group)
    return "e" if case + group in ("nomm", "nomf", "nomn", "accf", "accn") else "en"


def _ending(case, group):
    return ENDINGS[case].split()[GROUPS.index(group)]


def _shows_case(word, case, group):
    return word in DER_WORDS or (word in EIN_WORDS and case + group not in ("nomm", "nomn", "accn"))


def noun(entry: Noun, case: str, plural: bool = False) -> str:
    """Return a noun in its case: -n in the dative plural, and in weak masculines (des Jungen)."""
    if plural:
        return entry.plural + "n" if case == "dat" and entry.plural[-1] not in "ns" else entry.plural
    weak = entry.gender == "m" and entry.genitive.endswith("n")
    return entry.genitive if case == "gen" or (weak and case != "nom") else entry.german


def contract(words: str) -> str:
    """Merge a preposition with its article where German does: in dem Haus, im Haus."""
    head = " ".join(words.split()[:2])
    return words.replace(head, CONTRACTIONS[head], 1) if head in CONTRACTIONS else words


def irregular(infinitive: str, person: str, *, past: bool = False) -> str:
    """Return a form of an auxiliary or modal verb, or of wissen."""
    present, first = IRREGULAR[infinitive]
    return _past(first, person) if past else present.split()[PERSONS.index(person)]


def finite(verb: Verb, person: str, *, past: bool = False) -> str:
    """Return the present or the Präteritum, without the particle."""
    if verb.infinitive in IRREGULAR:
        return irregular(verb.infinitive, person, past=past)
    if past:
        return _past(verb.past, person)
    if person == "1s":
        return verb.infinitive.removesuffix("n").removesuffix("e") + "e"
    if person == "2s":
        stem = verb.third.removesuffix("t")
        return stem + ("t" if stem[-1] in "sßz" else "st")
    return verb.third if person == "3s" else verb.infinitive


def _past(first, person):
    if person[1] == "s":
        return first + ("st" if person == "2s" else "")
    return first + ("n" if first.endswith("e") else "en")
