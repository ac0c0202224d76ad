"""English inflection: verb forms, auxiliaries with do-support, a and an. A subject is its pronoun: I, he, they, ..."""

import re

THIRD = ("he", "she", "it")


def third_person(verb: str) -> str:
    """Return the -s form of a verb."""
    if verb == "have":
        return "has"
    if verb.endswith(("s", "sh", "ch", "x", "o")):
        return verb + "es"
    return verb[:-1] + "ies" if verb.endswith("y") and verb[-2] not in "aeiou" else verb + "s"


def be(subject: str, *, past: bool = False) -> str:
    """Return am, is, are, was or were."""
    if past:
        return "was" if subject in ("I", *THIRD) else "were"
    return "am" if subject == "I" else "is" if subject in THIRD else "are"


def do(subject: str, *, past: bool = False) -> str:
    """Return do, does or did."""
    return "did" if past else "does" if subject in THIRD else "do"


def inflect(verb: str, past_form: str, subject: str, *, past: bool = False) -> str:
    """Return the finite form of a verb whose first word is inflected: looks for, looked for."""
    head, _, rest = verb.partition(" ")
    form = past_form if past else third_person(head) if subject in THIRD else head
    return f"{form} {rest}".strip()


def with_an(text: str) -> str:
    """Write an for a where a vowel sound follows."""
    return re.sub(r"\b([Aa]) (?=[aeiou]|hon)", r"\1n ", text)
