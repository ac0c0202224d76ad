"""Attention as optimal transport, inside fairseq: softmax, Sinkhorn, ESP, LOT, near_far and SeT for translation.

The names in ``__all__`` are imported at their first use, so that ``import fairseq_lot`` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fairseq_lot.errors import MISSING

if TYPE_CHECKING:
    from fairseq_lot.attention.registry import build_mechanism
    from fairseq_lot.plug_and_play.calibrate import calibrate
    from fairseq_lot.plug_and_play.swap import swap
    from fairseq_lot.pretrained.translate import Translator

__version__ = "0.1.0"
__all__ = ["Translator", "build_mechanism", "calibrate", "swap"]

_HOMES = {
    "Translator": "fairseq_lot.pretrained.translate",
    "build_mechanism": "fairseq_lot.attention.registry",
    "calibrate": "fairseq_lot.plug_and_play.calibrate",
    "swap": "fairseq_lot.plug_and_play.swap",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "fairseq":
            raise
        raise ModuleNotFoundError(MISSING["fairseq"], name="fairseq") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
