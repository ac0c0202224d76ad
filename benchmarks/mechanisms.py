"""Mechanisms on a benchmark's command line: a name with flat options, as for ``fairseq-lot sweep --try``."""

from collections.abc import Iterable
from dataclasses import replace

from fairseq_lot.modules.flat_options import options_of
from fairseq_lot.plug_and_play.points import AttentionSpec, expand, spelt

# near_far at all sites as a swap makes it: linear at every length, then exact up to the swap's default length
EVERYWHERE = "near_far --attention-sites encoder,cross,decoder --near-far-tangents --near-far-exact-up-to 0/512"
# endings of the option that sets a mechanism's rank
RANKS = ("_num_pivots", "_num_features")


def read_ways(texts: Iterable[str], ranks: list[int]) -> dict[str, AttentionSpec]:
    """Read mechanisms with their options, by their label in the table.

    A mechanism with a rank is entered once for each of ``ranks``, unless its text sets the rank.

    Raises:
        InputError: unknown mechanism or option.
    """
    found = {}
    for way in (way for text in texts for way in expand(text, "--mechanism")):
        option = next((name for name in options_of(way.attention) if name.endswith(RANKS)), None)
        rest = {name: value for name, value in way.options.items() if name != option}
        label = " ".join(filter(None, [way.attention, spelt(rest)]))
        if option is None:
            found[label] = way
            continue
        for rank in [way.options[option]] if option in way.options else ranks:
            found[with_rank(label, rank)] = replace(way, options={**rest, option: rank})
    return found


def with_rank(label: str, rank: object) -> str:
    """A contender's label with its rank at the end, where figures look for it."""
    return f"{label} r={rank}"
