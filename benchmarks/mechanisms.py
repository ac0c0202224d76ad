"""Mechanisms as a benchmark's command line names them: with flat options, as ``fairseq-lot sweep --try`` takes them."""

from collections.abc import Iterable
from dataclasses import replace

from fairseq_lot.modules.flat_options import options_of
from fairseq_lot.plug_and_play.points import AttentionSpec, expand, spelt

# how the option ends that is a mechanism's rank, where it has one
RANKS = ("_num_pivots", "_num_features")


def read_ways(texts: Iterable[str], ranks: list[int]) -> dict[str, AttentionSpec]:
    """What the texts name, by its name in the table; what has a rank once for every rank, unless its text gives one.

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
    """The name of a contender of this rank, which figures read from its end."""
    return f"{label} r={rank}"
