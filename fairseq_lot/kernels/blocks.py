"""Block sizes of the kernels: defaults, or the fastest ones that ``python -m benchmarks tune`` found for a device.

Tuned sizes are in a table, a JSON file for each device name, in the folder ``tuned`` beside this file or in the folder
``FAIRSEQ_LOT_TUNED``. Without a table, or without an entry in it, the kernels' defaults are used.
"""

import functools
import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

VARIABLE = "FAIRSEQ_LOT_TUNED"
#: allowed values in a table, by kernel; the block of ``summarise_keys`` is near_far's chunk
_ANY: dict[str, tuple[int, ...]] = {"warps": (2, 4, 8), "stages": (1, 2, 3)}
_TOKENS = {"block": (16, 32, 64), **_ANY}
CANDIDATES: dict[str, dict[str, tuple[int, ...]]] = {
    "summarise_keys": {"block": (32, 64), **_ANY},
    **dict.fromkeys(("merge", "attend", "query_gradients", "key_gradients"), _TOKENS),
    **dict.fromkeys(("pass_of_both", "key_forward", "query_forward", "query_backward", "key_backward"), _TOKENS),
    **dict.fromkeys(("reduce_side", "undo_update", "gradients"), _TOKENS),
    **dict.fromkeys(("short_forward", "short_backward"), {"warps": (4, 8, 16)}),
    **dict.fromkeys(("solve_forward", "solve_backward"), {"block": (1, 2, 4, 8, 16, 32, 64), **_ANY}),
    **dict.fromkeys(("convolve", "convolve_backward"), {"block": (16, 32, 64, 128), "warps": (2, 4, 8)}),
    **dict.fromkeys(
        ("next_token", "attend_expected", "expected_forward", "expected_backward"), {"warps": (1, 2, 4, 8)}
    ),
}


class Blocks(NamedTuple):
    """Block sizes of a kernel.

    Attributes:
        block: number of tokens that a program takes at once; 0 if the kernel has no such number.
        warps, stages: of a program.
    """

    block: int
    warps: int
    stages: int


#: block sizes that replace the table inside :func:`trying`
_tried: dict[str, Blocks] | None = None
#: defaults of all kernels that ran inside :func:`trying`
_asked: dict[str, Blocks] = {}


@functools.cache
def tuned(kernel: str, device: torch.device, sizes: tuple[int, ...], default: Blocks) -> Blocks:
    """The block sizes in the device's table for a kernel and these sizes of its inputs, or the default."""
    name = " ".join([kernel, *map(str, sizes)])
    _asked.setdefault(name, default)
    return (_of_device(name_of(device)) if _tried is None else _tried).get(name, default)


@contextmanager
def trying(blocks: dict[str, Blocks]) -> Iterator[dict[str, Blocks]]:
    """Context manager: use these block sizes instead of a table.

    Yields:
        The defaults of all kernels that run inside the block, by their names in a table.
    """
    global _tried  # not thread-local: threads of autograd also launch kernels
    before, _tried = _tried, blocks
    tuned.cache_clear()
    _asked.clear()
    try:
        yield _asked
    finally:
        _tried = before
        tuned.cache_clear()


def name_of(device: torch.device) -> str:
    """The name of the device, as in tables."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def path_of(device: str) -> Path:
    """The file of the table for devices of this name."""
    folder = os.environ.get(VARIABLE) or Path(__file__).with_name("tuned")
    return Path(folder, re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def read(device: str) -> dict[str, Any]:
    """The table for devices of this name; empty if there is none.

    Raises:
        ValueError: the file is not a valid table for them; the message has the reason.
    """
    try:
        table = json.loads(path_of(device).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"device": device, "kernels": {}}
    except OSError as error:
        raise ValueError(error.strerror) from error
    if not isinstance(table, dict) or not isinstance(table.get("kernels"), dict):
        raise ValueError("it has no kernels")
    if table.get("device") != device:
        raise ValueError(f"it is for {table.get('device')!r}")
    for name, entry in table["kernels"].items():
        known = CANDIDATES.get(name.partition(" ")[0])
        if known is None:
            raise ValueError(f"there is no kernel {name!r}")
        for field in Blocks._fields:
            value = entry.get(field) if isinstance(entry, dict) else None
            if type(value) is not int or (field in known and value not in known[field]):
                raise ValueError(f"{field} of {name!r} is {value!r}")
    return table


def sizes_in(table: dict[str, Any]) -> dict[str, Blocks]:
    """The block sizes in a table from :func:`read`, by the names of its entries."""
    return {name: Blocks(*(entry[field] for field in Blocks._fields)) for name, entry in table["kernels"].items()}


@functools.cache
def _of_device(device: str) -> dict[str, Blocks]:
    """The entries of the table for devices of this name; empty, after a warning, if the table is invalid."""
    try:
        return sizes_in(read(device))
    except ValueError as error:
        way_out = "its kernels run with defaults; delete it, or write it anew by python -m benchmarks tune --again"
        warnings.warn(f"{path_of(device)} is no table for {device}: {error}; {way_out}", stacklevel=2)
        return {}
