"""Scored systems, grouped and ordered as the tables show them."""

from collections.abc import Iterable

from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.results import BASE, FINE_TUNED, PLUG_AND_PLAY, Row, read_rows

# in the order of the tables; others follow
_BACKBONES = ("transformer", "diff_transformer")
_MECHANISMS = ("softmax", "sinkhorn", "esp", "lot")

Key = tuple[str, str, str]  # backbone, mechanism, options


def read_systems(paths: Iterable[str]) -> list[Row]:
    """Return the rows of all results files, each system once.

    Raises:
        InputError: a file is missing or broken, or two of them disagree about a system.
    """
    found: dict[tuple, tuple[Row, str]] = {}
    for path in paths:
        for row in read_rows(path):
            old, old_path = found.setdefault(row.key, (row, path))
            if old != row:
                raise InputError(f"{old_path} and {path} have different rows of one system: {row.key}; give only one")
    return [row for row, _ in found.values()]


def only(rows: list[Row], **wanted: str | None) -> list[Row]:
    """Return the rows whose fields have the wanted values; None: any.

    Raises:
        InputError: no row has one of them.
    """
    for name, value in wanted.items():
        found = [row for row in rows if value in (None, getattr(row, name))]
        if value is not None and not found:
            known = sorted({getattr(row, name) for row in rows})
            raise InputError(f"no row of {name} {value!r}; there are: {'; '.join(known) or 'none'}")
        rows = found
    return rows


def tables(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each table: those of one dataset, size of the architecture and protocol."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.dataset, _size(row.architecture), row.protocol), []).append(row)
    return [found[key] for key in sorted(found)]


def by_system(rows: Iterable[Row]) -> dict[Key, list[Row]]:
    """Return the rows of each system, in the order of the table; a base is the first stage of softmax."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        if row.stage != BASE or row.mechanism == "softmax":
            found.setdefault((row.backbone, row.mechanism, row.options), []).append(row)
    return {key: found[key] for key in sorted(found, key=table_order)}


def at_stage(rows: Iterable[Row], stage: str) -> list[Row]:
    """Return the rows of ``PLUG_AND_PLAY`` or ``FINE_TUNED``; softmax is not plugged in, there it is the base."""
    stages = {PLUG_AND_PLAY: (PLUG_AND_PLAY, BASE), FINE_TUNED: (FINE_TUNED,)}[stage]
    return [row for row in rows if row.stage in stages]


def label(key: Key, systems: Iterable[Key]) -> str:
    """Return the name of a system: its mechanism, and its options where ``systems`` has the mechanism several times."""
    backbone, mechanism, options = key
    alone = len({other for other in systems if other[:2] == key[:2]}) == 1
    name = "softmax (base)" if mechanism == "softmax" else mechanism
    return name if alone or not options else f"{name}: {options}"


def _size(architecture):
    """The architectures of the mechanisms differ in a prefix only: lot_transformer_small has the size small."""
    _, name, size = architecture.partition("transformer")
    return size.strip("_") if name else architecture


def table_order(key: Key) -> tuple:
    """What the systems of a table are sorted by."""
    backbone, mechanism, options = key
    return (_rank(_BACKBONES, backbone), backbone, _rank(_MECHANISMS, mechanism), mechanism, options)


def _rank(known, name):
    return known.index(name) if name in known else len(known)
