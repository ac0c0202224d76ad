"""Where the attentions of a fairseq Transformer are."""

from collections.abc import Iterator

from torch import nn

from fairseq_lot.attention.base import Mechanism
from fairseq_lot.modules.options import SITES

# site: (stack, name of the attention in a layer)
PLACES = {
    "encoder": ("encoder", "self_attn"),
    "cross": ("decoder", "encoder_attn"),
    "decoder": ("decoder", "self_attn"),
}


def attentions(model: nn.Module) -> Iterator[tuple[str, int, nn.Module]]:
    """Every attention of a model with its site and its layer, which counts from 0, as in parameter names."""
    for site in SITES:
        stack, name = PLACES[site]
        for layer, block in enumerate(getattr(model, stack).layers):
            attention = getattr(block, name, None)
            if attention is not None:
                yield site, layer, attention


def inner(mechanism: Mechanism | None) -> Mechanism | None:
    """The mechanism that makes the plans: the one inside a wrapper, or the mechanism itself."""
    return getattr(mechanism, "inner", mechanism)
