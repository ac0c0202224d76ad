"""Names of architectures: a checkpoint with our attention must not have the name of one of fairseq's architectures.

Other programs know only fairseq's names. They would read the projections and compute softmax.
"""

from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel
from omegaconf import OmegaConf, open_dict

from fairseq_lot.errors import InputError


def own_architecture(arch: str) -> str:
    """Our architecture for a stock one: ``lot_ARCH`` if we registered it, else ``lot_transformer``.

    The size of the model does not change: it is in the model's arguments.
    """
    own = f"lot_{arch}"
    return own if own in ARCH_MODEL_REGISTRY else "lot_transformer"


def refuse_renamed(args: Any, path: str = "the model") -> None:
    """Raise InputError if a model has our attention under the name of fairseq's own Transformer."""
    attention, stock = getattr(args, "attention", None), _stock_names(args)
    if attention is not None and stock:
        arch = next(iter(stock.values()))
        raise InputError(
            f"{path} has {attention} attention under the name of fairseq's own architecture {arch}, which other "
            f"programs run as softmax; set arch and _name back to {own_architecture(arch)}, or give fairseq's commands "
            f"--model-overrides \"{{'attention': '{attention}'}}\""
        )


def override_attention(args: Any, overrides: dict[str, Any]) -> None:
    """Write overrides and our architecture into a model's arguments; fairseq writes overrides into namespaces only.

    Args:
        args: namespace or config of the model, changed in place; or None.
        overrides: our options among ``--model-overrides``.
    """
    if OmegaConf.is_config(args):
        with open_dict(args):
            args.update(overrides)
    if "attention" in overrides:
        for name, arch in _stock_names(args).items():
            setattr(args, name, own_architecture(arch))


def _stock_names(args):
    """Arguments (``arch``, ``_name``) that name an architecture of fairseq's own Transformer, with their values."""
    named = {name: getattr(args, name, None) for name in ("arch", "_name")}
    return {
        name: arch
        for name, arch in named.items()
        if isinstance(arch, str) and ARCH_MODEL_REGISTRY.get(arch) is TransformerModel
    }
