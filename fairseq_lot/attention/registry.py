"""The registry of mechanisms: their classes by name."""

import dataclasses
from typing import Any

from fairseq_lot.attention.base import Mechanism
from fairseq_lot.attention.esp import Esp
from fairseq_lot.attention.lot import Lot
from fairseq_lot.attention.near_far import NearFar
from fairseq_lot.attention.options import Options
from fairseq_lot.attention.set import Set
from fairseq_lot.attention.sinkhorn import Sinkhorn
from fairseq_lot.attention.softmax import Softmax
from fairseq_lot.errors import InputError

MECHANISMS: dict[str, type[Mechanism]] = {
    "esp": Esp,
    "lot": Lot,
    "near_far": NearFar,
    "set": Set,
    "sinkhorn": Sinkhorn,
    "softmax": Softmax,
}

# the default mechanism of a model
DEFAULT = "softmax"

# the default mechanism of a swap: it preserves the model's quality
DEFAULT_SWAP = "near_far"


def mechanism_class(name: str) -> type[Mechanism]:
    """The mechanism registered under ``name``; InputError if there is none."""
    if name not in MECHANISMS:
        raise InputError(f"unknown attention mechanism {name!r}; choose one of {', '.join(MECHANISMS)}")
    return MECHANISMS[name]


def build_options(name: str, **options: Any) -> Options:
    """The options dataclass of a mechanism, from plain values.

    Raises:
        InputError: unknown mechanism, unknown option, or a value outside its range.
    """
    options_class = mechanism_class(name).options_class
    known = [field.name for field in dataclasses.fields(options_class)]
    for option in options:
        if option not in known:
            raise InputError(f"{name} attention has no option {option!r}; it has: {', '.join(known) or 'none'}")
    try:
        return options_class(**options)
    except InputError as error:
        raise InputError(f"{name} attention: {error}") from None


def build_mechanism(
    name: str, *, num_heads: int, head_dim: int, layer: int = 0, dropout: float = 0.0, **options: Any
) -> Mechanism:
    """Build the mechanism ``name``.

    Args:
        name: a key of ``MECHANISMS``.
        num_heads, head_dim, layer, dropout: see :class:`~fairseq_lot.attention.base.Mechanism`.
        **options: the mechanism's own options: the fields of its options dataclass.

    Raises:
        InputError (a ValueError): unknown mechanism, unknown option, or a value outside its range.

    Examples:
        >>> attention = build_mechanism("lot", num_heads=2, head_dim=8, num_pivots=16)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)  # one sentence of 5 tokens
        >>> output = attention(q, k, v, need_weights=True)
        >>> output.values.shape, output.weights.shape
        (torch.Size([1, 2, 5, 8]), torch.Size([1, 2, 5, 5]))
    """
    return mechanism_class(name)(
        num_heads=num_heads, head_dim=head_dim, layer=layer, dropout=dropout, options=build_options(name, **options)
    )


def describe(name: str, options: dict[str, Any]) -> str:
    """The mechanism's name with the options that differ from their defaults: ``softmax (prior=alibi)``."""
    defaults = dataclasses.asdict(build_options(name))
    changed = [f"{key}={value}" for key, value in options.items() if value != defaults[key]]
    return f"{name} ({', '.join(changed)})" if changed else name
