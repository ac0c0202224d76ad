"""Places of attentions: a site and a layer, such as ``encoder.0``."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from fairseq_lot.attention.options import SITES
from fairseq_lot.errors import InputError

# value of --keep-softmax for no place; without the option a checkpoint's own places count
NONE = "none"


class Place(NamedTuple):
    """The place of one attention in a model; layers count from 0, as in the names of parameters."""

    site: str
    layer: int

    def __str__(self) -> str:
        return f"{self.site}.{self.layer}"


def named_places(given: Any) -> tuple[Place, ...]:
    """Parse places, sorted by site and layer; InputError for anything else.

    Args:
        given: a list of places, or a text with commas between them; None or ``none``: no place.
    """
    if given is None or given == NONE:
        return ()
    text = ",".join(map(str, given)) if isinstance(given, (list, tuple)) else given
    named = [word.strip() for word in text.split(",") if word.strip()] if isinstance(text, str) else []
    if not named:
        raise InputError(f"keep_softmax must name places, such as encoder.0, or be {NONE}, got {given!r}")
    places = set()
    for word in named:
        site, _, layer = word.partition(".")
        if site not in SITES or not (layer.isascii() and layer.isdecimal()):
            raise InputError(
                f"keep_softmax: {word!r} is not a place; give a site ({', '.join(SITES)}) and a layer from 0, such as "
                "encoder.0"
            )
        places.add(Place(site, int(layer)))
    return tuple(sorted(places, key=lambda place: (SITES.index(place.site), place.layer)))


def listed(places: Iterable[Place]) -> str | None:
    """The places as a text with commas, as in a checkpoint; None if there are none."""
    return ",".join(map(str, places)) or None
