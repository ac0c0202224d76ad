"""English inflection, and English sentences with free choices.

A tree is a string, a list of trees, or a :class:`Choice` between trees that mean the same. ``realise`` draws each
choice, or takes the likeliest option of each when it gets no generator.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

# the usual synonym is drawn this often; the others share the rest
USUAL = 0.72

IRREGULAR_PLURALS = {
    "man": "men", "woman": "women", "child": "children", "lady": "ladies", "policeman": "policemen", "thief": "thieves",
    "mouse": "mice", "sheep": "sheep", "knife": "knives", "shelf": "shelves", "scarf": "scarves", "potato": "potatoes",
    "tomato": "tomatoes", "wife": "wives",
}  # fmt: skip
# past and participle
IRREGULAR_VERBS = {
    "see": ("saw", "seen"), "buy": ("bought", "bought"), "read": ("read", "read"), "find": ("found", "found"),
    "eat": ("ate", "eaten"), "sleep": ("slept", "slept"), "drink": ("drank", "drunk"), "come": ("came", "come"),
    "go": ("went", "gone"), "shut": ("shut", "shut"), "write": ("wrote", "written"), "give": ("gave", "given"),
    "drive": ("drove", "driven"), "think": ("thought", "thought"), "show": ("showed", "shown"), "sit": ("sat", "sat"),
    "sell": ("sold", "sold"), "wear": ("wore", "worn"), "speak": ("spoke", "spoken"), "hear": ("heard", "heard"),
    "put": ("put", "put"), "lie": ("lay", "lain"), "stand": ("stood", "stood"), "get": ("got", "got"),
    "understand": ("understood", "understood"), "forget": ("forgot", "forgotten"), "bring": ("brought", "brought"),
    "take": ("took", "taken"), "fall": ("fell", "fallen"), "begin": ("began", "begun"), "tell": ("told", "told"),
    "know": ("knew", "known"), "sing": ("sang", "sung"), "feed": ("fed", "fed"), "catch": ("caught", "caught"),
    "throw": ("threw", "thrown"), "lose": ("lost", "lost"), "steal": ("stole", "stolen"), "pay": ("paid", "paid"),
    "run": ("ran", "run"), "fly": ("flew", "flown"), "swim": ("swam", "swum"), "weep": ("wept", "wept"),
    "leave": ("left", "left"), "wake": ("woke", "woken"), "say": ("said", "said"), "have": ("had", "had"),
    "send": ("sent", "sent"), "plan": ("planned", "planned"),
}  # fmt: skip
DOUBLED = {"sit", "get", "put", "run", "swim", "begin", "forget", "shut", "plan"}
BE = {"I": ("am", "was"), "he": ("is", "was"), "you": ("are", "were"), "they": ("are", "were")}
CONSONANT_SOUND = ("uni", "use", "eu", "one")
VOWEL_SOUND = ("hour", "honest")


class Choice(NamedTuple):
    """Weighted options that mean the same."""

    options: tuple


Tree = str | list | Choice


def either(*options: Tree, usual: float = USUAL) -> Tree:
    """Choose between options; the first has probability ``usual``, the others share the rest."""
    if len(options) == 1:
        return options[0]
    rest = (1 - usual) / (len(options) - 1)
    return Choice(tuple((rest if index else usual, option) for index, option in enumerate(options)))


def synonyms(words: str, form=None) -> Tree:
    """Choose between the words of ``a/b/c``, each put through ``form``."""
    return either(*(form(word) if form else word for word in words.split("/")))


def plural(phrase: str) -> str:
    """Return the plural of a noun; of several words the last one is inflected."""
    *head, word = phrase.split(" ")
    if word in IRREGULAR_PLURALS:
        word = IRREGULAR_PLURALS[word]
    elif word.endswith(("s", "sh", "ch", "x")):
        word += "es"
    elif word.endswith("y") and word[-2] not in "aeiou":
        word = word[:-1] + "ies"
    else:
        word += "s"
    return " ".join([*head, word])


def third_person(word: str) -> str:
    """Return the -s form of a verb."""
    if word == "have":
        return "has"
    if word.endswith(("s", "sh", "ch", "x", "o")):
        return word + "es"
    return word[:-1] + "ies" if word.endswith("y") and word[-2] not in "aeiou" else word + "s"


def past(word: str) -> str:
    """Return the simple past of a verb."""
    return IRREGULAR_VERBS[word][0] if word in IRREGULAR_VERBS else _ed(word)


def participle(word: str) -> str:
    """Return the past participle of a verb."""
    return IRREGULAR_VERBS[word][1] if word in IRREGULAR_VERBS else _ed(word)


def _ed(word):
    if word.endswith("e"):
        return word + "d"
    return word[:-1] + "ied" if word.endswith("y") and word[-2] not in "aeiou" else word + "ed"


def gerund(word: str) -> str:
    """Return the -ing form of a verb."""
    if word == "lie":
        return "lying"
    if word in DOUBLED:
        return word + word[-1] + "ing"
    return word[:-1] + "ing" if word.endswith("e") and word not in ("be", "see") else word + "ing"


def realise(tree: Tree, rng: Random | None = None) -> str:
    """Return the sentence of a tree, with its choices drawn from ``rng`` or, without one, the likeliest."""
    words: list[str] = []
    _collect(tree, rng, words)
    return sentence(words, a_to_an=True)


def _collect(tree, rng, words):
    if isinstance(tree, Choice):
        _collect(_pick(tree.options, rng), rng, words)
    elif isinstance(tree, str):
        words.extend(tree.split())
    else:
        for part in tree:
            _collect(part, rng, words)


def _pick(options, rng):
    if rng is None:
        return max(options, key=lambda option: option[0])[1]
    point = rng.random()
    for weight, option in options:
        point -= weight
        if point < 0:
            return option
    return options[-1][1]


def _is_vowel_sound(word):
    word = word.lower()
    return word.startswith(VOWEL_SOUND) or (word[0] in "aeiou" and not word.startswith(CONSONANT_SOUND))


def sentence(words: Sequence[str], *, a_to_an: bool = False) -> str:
    """Join words to a sentence: punctuation joined to the left, doubled commas dropped, a capital first."""
    text = ""
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        if word == "," and following in {",", ".", "?", "!"}:
            continue
        if a_to_an and word == "a" and _is_vowel_sound(following):
            word = "an"
        text += word if not text or word in {",", ".", "?", "!", "'s", "'"} else " " + word
    return text[0].upper() + text[1:]
