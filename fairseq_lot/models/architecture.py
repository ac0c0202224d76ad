"""Architectures of fairseq's own and ours: a checkpoint of ours must not bear the name of one of fairseq's.

Other programs know only fairseq's names. They read the projections of q, k and v and compute softmax with them.
"""

from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel
from omegaconf import OmegaConf, open_dict

from fairseq_lot.errors import InputError


def own_architecture(arch: str) -> str:
    """Ours for a model of a stock architecture, of its size where ours have it; sizes in arguments count anyway."""
    own = f"lot_{arch}"
    return own if own in ARCH_MODEL_REGISTRY else "lot_transformer"


def refuse_renamed(args: Any, path: str = "the model") -> None:
    """Raise InputError where a model has an attention of ours and the architecture of fairseq's own Transformer."""
    attention, stock = getattr(args, "attention", None), _stock_names(args)
    if attention is not None and stock:
        arch = next(iter(stock.values()))
        raise InputError(
            f"{path} has {attention} attention under the name {arch} of fairseq's own architecture, which other "
            f"programs run as softmax; set arch and _name back to {own_architecture(arch)}, or give fairseq's commands "
            f"--model-overrides \"{{'attention': '{attention}'}}\""
        )


def override_attention(args: Any, overrides: dict[str, Any]) -> None:
    """Write options of ours into a model's arguments, and our architecture; fairseq writes into namespaces alone."""
    if OmegaConf.is_config(args):
        with open_dict(args):
            args.update(overrides)
    if "attention" in overrides:
        for name, arch in _stock_names(args).items():
            setattr(args, name, own_architecture(arch))


def _stock_names(args):
    """Those of ``arch`` and ``_name`` that are an architecture of fairseq's own Transformer."""
    named = {name: getattr(args, name, None) for name in ("arch", "_name")}
    return {
        name: arch
        for name, arch in named.items()
        if isinstance(arch, str) and ARCH_MODEL_REGISTRY.get(arch) is TransformerModel
    }
