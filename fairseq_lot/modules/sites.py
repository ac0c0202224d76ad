"""Where the attentions of a fairseq Transformer are, and what may stand there."""

from collections.abc import Iterator
from typing import Any, TypeVar

from fairseq.models.transformer import TransformerModel
from fairseq.modules import MultiheadAttention

from fairseq_lot.attention.base import Mechanism
from fairseq_lot.attention.differential import Differential
from fairseq_lot.attention.options import SITES
from fairseq_lot.attention.registry import DEFAULT, build_options, mechanism_class
from fairseq_lot.errors import InputError, flag
from fairseq_lot.modules.flat_options import DEFAULTS, flat_name, mechanism_options

SomeMechanism = TypeVar("SomeMechanism", Mechanism, None, Mechanism | None)
# site: (stack, name of the attention in a layer)
ATTENTION_AT = {
    "encoder": ("encoder", "self_attn"),
    "cross": ("decoder", "encoder_attn"),
    "decoder": ("decoder", "self_attn"),
}


def attentions(model: TransformerModel) -> Iterator[tuple[str, int, MultiheadAttention]]:
    """Every attention of a model with its site and its layer, which counts from 0, as in parameter names."""
    for site in SITES:
        stack, name = ATTENTION_AT[site]
        for layer, block in getattr(model, stack).layers.named_children():  # iterating, LayerDrop leaves some out
            attention = getattr(block, name, None)
            if attention is not None:
                yield site, int(layer), attention


def inner(mechanism: SomeMechanism) -> SomeMechanism:
    """The mechanism that makes the plans: the one inside a wrapper, or the mechanism itself."""
    return None if mechanism is None else getattr(mechanism, "inner", mechanism)


def can_be_fitted(model: TransformerModel) -> bool:
    """Whether some mechanism has parameters to fit; λ and the norm of a differential form are not among them."""
    mechanisms = (getattr(attention, "mechanism", None) for _, _, attention in attentions(model))
    return any(inner(mechanism).fittable() for mechanism in mechanisms if mechanism is not None)


def attention_sites(args: Any) -> tuple[str, ...]:
    """The sites at which ``--attention`` stands."""
    return named_sites(getattr(args, "attention_sites", None) or DEFAULTS["attention_sites"])


def named_sites(given: Any) -> tuple[str, ...]:
    """A list of sites, or a text of them with commas between, in the order of ``SITES``; InputError for others."""
    text = ",".join(map(str, given)) if isinstance(given, (list, tuple)) else given
    named = [site.strip() for site in text.split(",") if site.strip()] if isinstance(text, str) else []
    if not named:
        raise InputError(f"attention_sites must name some of {', '.join(SITES)}, got {given!r}")
    for site in named:
        if site not in SITES:
            raise InputError(f"unknown attention site {site!r}; choose from {', '.join(SITES)}")
    return tuple(site for site in SITES if site in named)


def build_site_mechanism(
    args: Any, *, site: str, layer: int, num_heads: int, head_dim: int, dropout: float
) -> Mechanism | None:
    """Build what stands at one site, or return None where fairseq's own softmax attention stays.

    Args:
        args: namespace or fairseq config that holds the flat options, completed by ``spell_out``.
        layer: 0-based index in its stack.

    Raises:
        InputError: an option is wrong, or the mechanism cannot stand at this site.
    """
    listed = site in attention_sites(args)
    if not listed and not args.differential:
        return None
    name = args.attention if listed else DEFAULT
    options = build_options(name, **(mechanism_options(args, name) if listed else {})).at_site(site)
    context: dict[str, Any] = {"num_heads": num_heads, "head_dim": head_dim, "layer": layer, "dropout": dropout}
    mechanism: Mechanism = mechanism_class(name)(options=options, **context)
    if args.differential:
        mechanism = Differential(mechanism, lambda_init=args.differential_lambda_init)
    check_site(mechanism, name, site)
    return mechanism


def check_site(mechanism: Mechanism, name: str, site: str) -> None:
    """Refuse a mechanism that cannot stand at a decoder site, with the reason."""
    if site == "encoder":
        return
    if mechanism.tied_tokens and site == "cross":
        raise InputError(
            f"{name} attention ties queries and keys to the same tokens, so it cannot stand at the 'cross' site, where "
            "they belong to two sentences; use --attention-sites encoder"
        )
    if mechanism.couples_queries:
        serves = site == "cross" or type(inner(mechanism)).supports_causal  # with other options
        uncoupling = mechanism.uncoupling_options if serves else {}
        flags = [f"{flag(flat_name(name, k))} {v}" for k, v in uncoupling.items()]
        raise InputError(
            f"{name} attention couples the queries (row i of the plan depends on all rows), so at the {site!r} site it "
            "would show future target tokens in training and could not decode step by step; "
            + " or ".join(["use --attention-sites encoder", *flags])
        )
    if mechanism.positional and site == "cross":
        raise InputError(
            f"{name} attention with these options compares the positions of queries and keys, which has no meaning "
            "between two languages at the 'cross' site; use --attention-sites without cross"
        )
    if mechanism.mixes_values:
        raise InputError(
            f"{name} attention with these options mixes the values of neighbouring tokens, later ones included, so it "
            f"cannot stand at the {site!r} site: in the decoder it would show future target tokens, and at cross the "
            "encoder has mixed them already; use --attention-sites encoder"
        )
    if site == "decoder" and not (mechanism.supports_causal and inner(mechanism).supports_causal):
        raise InputError(
            f"{name} attention cannot be causal, so it cannot stand at the 'decoder' site; "
            "use --attention-sites encoder or encoder,cross"
        )
