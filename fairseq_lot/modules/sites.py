"""The attentions of a fairseq Transformer by site, and the mechanism for each place."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from fairseq.models.transformer import TransformerModel
from fairseq.modules import MultiheadAttention

from fairseq_lot.attention.base import Mechanism, Traits
from fairseq_lot.attention.differential import Differential
from fairseq_lot.attention.options import SITES
from fairseq_lot.attention.registry import DEFAULT, build_options, describe, mechanism_class
from fairseq_lot.errors import InputError, flag
from fairseq_lot.modules.flat_options import DEFAULTS, flat_name, mechanism_options
from fairseq_lot.modules.places import NONE, Place, listed, named_places

# for checkpoints of early versions, whose swap did not note the sites of the base's attention
UNKNOWN_SITES = "unknown sites"
SomeMechanism = TypeVar("SomeMechanism", Mechanism, None, Mechanism | None)
# site: (stack, name of the attention in a layer)
ATTENTION_AT = {
    "encoder": ("encoder", "self_attn"),
    "cross": ("decoder", "encoder_attn"),
    "decoder": ("decoder", "self_attn"),
}


def attentions(model: TransformerModel) -> Iterator[tuple[str, int, MultiheadAttention]]:
    """All attentions of a model, each with its site and its layer; layers count from 0, as in parameter names."""
    for site, layer, block in attention_blocks(model):
        yield site, layer, getattr(block, ATTENTION_AT[site][1])


def attention_blocks(model: TransformerModel) -> Iterator[tuple[str, int, Any]]:
    """All attentions of a model as ``(site, layer, fairseq's layer that contains it)``."""
    for site in SITES:
        stack, name = ATTENTION_AT[site]
        for layer, block in getattr(model, stack).layers.named_children():  # plain iteration would apply LayerDrop
            if getattr(block, name, None) is not None:
                yield site, int(layer), block


def unwrapped(mechanism: SomeMechanism) -> SomeMechanism:
    """The mechanism that computes the plans: the inner one of differential attention, else the mechanism itself."""
    return None if mechanism is None else getattr(mechanism, "inner", mechanism)


def can_be_fitted(model: TransformerModel) -> bool:
    """Whether some mechanism has parameters to fit; λ and the norm of the differential form do not count."""
    mechanisms = (getattr(attention, "mechanism", None) for _, _, attention in attentions(model))
    return any(unwrapped(mechanism).fittable() for mechanism in mechanisms if mechanism is not None)


def attention_sites(args: Any) -> tuple[str, ...]:
    """The sites that have ``--attention``."""
    return named_sites(getattr(args, "attention_sites", None) or DEFAULTS["attention_sites"])


def named_sites(given: Any) -> tuple[str, ...]:
    """Parse a list of sites, or a text with commas, into the order of ``SITES``; InputError for anything else."""
    text = ",".join(map(str, given)) if isinstance(given, (list, tuple)) else given
    named = [site.strip() for site in text.split(",") if site.strip()] if isinstance(text, str) else []
    if not named:
        raise InputError(f"attention_sites must name some of {', '.join(SITES)}, got {given!r}")
    for site in named:
        if site not in SITES:
            raise InputError(f"unknown attention site {site!r}; choose from {', '.join(SITES)}")
    return tuple(site for site in SITES if site in named)


def kept_places(args: Any) -> tuple[Place, ...]:
    """The places that keep softmax."""
    return named_places(getattr(args, "keep_softmax", None))


def sites_in_words(args: Any) -> str:
    """The sites and kept places in words: ``encoder, softmax kept at encoder.0``."""
    kept = kept_places(args)
    softmax = describe(DEFAULT, mechanism_options(args, DEFAULT))
    return f"{args.attention_sites}, {softmax} kept at {listed(kept)}" if kept else args.attention_sites


def settle_kept_places(args: Any) -> None:
    """Check the places that keep softmax, and renumber them in ``args`` if the model loses layers.

    ``--encoder-layers-to-keep`` removes layers from a trained model. Places are given for the trained model: those of
    removed layers are dropped, the others get the new numbers of their layers.

    Raises:
        InputError: the model lacks a place, a place is at a site without ``--attention``, or no other place is left.
    """
    kept, sites = kept_places(args), attention_sites(args)
    if not kept:
        return
    numbers = {site: numbers_of_layers(args, site) for site in SITES}
    given = f"--keep-softmax {listed(kept)}"
    for place in kept:
        if place.site not in sites:
            raise InputError(
                f"{given}: {args.attention} attention is only at {','.join(sites)}, so {place} has softmax anyway; "
                f"leave it out ({NONE}: keep no place of the checkpoint)"
            )
        if place.layer not in numbers[place.site]:
            there = listed(Place(place.site, layer) for layer in numbers[place.site]) or f"no attention at {place.site}"
            raise InputError(f"{given}: the model has no {place}; it has {there}")
    moved = [(site, numbers[site][layer]) for site, layer in kept]
    kept = tuple(Place(site, number) for site, number in moved if number is not None)
    left = [(site, number) for site in sites for number in numbers[site].values() if number is not None]
    if set(left) <= set(kept):
        raise InputError(f"{given}: nothing is left for {args.attention} attention; keep fewer places")
    args.keep_softmax = listed(kept)


def numbers_of_layers(args: Any, site: str) -> dict[int, int | None]:
    """For each layer of the trained model with attention at this site: its number in the new model, None if removed."""
    if site == "cross" and getattr(args, "no_cross_attention", False):
        return {}
    stack, _ = ATTENTION_AT[site]
    layers, to_keep = getattr(args, f"{stack}_layers"), getattr(args, f"{stack}_layers_to_keep", None)
    stay = sorted(map(int, to_keep.split(","))) if to_keep else range(layers)
    if max(stay, default=0) >= layers:  # fairseq has already reduced the number of layers
        stay = range(layers)
    return {layer: stay.index(layer) if layer in stay else None for layer in range(layers)}


def softmax_trained_at(args: Any, places: Iterable[Place]) -> dict[str, Any]:
    """The flat options of the softmax attention with which a checkpoint was trained at some places.

    Args:
        args: the arguments of the checkpoint's model; after a swap they also name the attention of the training.
        places: the places.

    Returns:
        ``{"softmax_prior": prior}``; empty if there was no prior.

    Raises:
        InputError: a place was trained with another mechanism, or two places with different priors.
    """
    own = getattr(args, "attention", None) or DEFAULT
    trained, sites = describe(own, mechanism_options(args, own)), ",".join(attention_sites(args))
    if hasattr(args, "trained_attention"):
        trained, sites = args.trained_attention, getattr(args, "trained_sites", UNKNOWN_SITES)
    found = {}
    for place in places:
        if place in kept_places(args):
            found[place] = getattr(args, "softmax_prior", None)
        elif trained == DEFAULT or (sites != UNKNOWN_SITES and place.site not in sites.split(",")):
            found[place] = None
        elif trained == describe(DEFAULT, {"prior": "alibi"}) and place.site in sites:
            found[place] = "alibi"
        else:
            raise InputError(f"{trained} attention was trained at {sites}, so there is no softmax to keep at {place}")
    found = {place: prior for place, prior in found.items() if place.site != "cross"}  # cross never has a prior
    if len(set(found.values())) > 1:
        kinds = ", ".join(f"{prior or 'none'} at {place}" for place, prior in found.items())
        raise InputError(f"softmax was trained with different priors ({kinds}); keep places with the same one")
    prior = next(iter(found.values()), None)
    return {} if prior is None else {"softmax_prior": prior}


def build_site_mechanism(
    args: Any, *, site: str, layer: int, num_heads: int, head_dim: int, dropout: float
) -> Mechanism | None:
    """Build the mechanism for one place; None where fairseq's own softmax attention stays.

    Args:
        args: namespace or fairseq config with the flat options, completed by ``resolve_options``.
        site, layer: the place; layers count from 0.
        num_heads, head_dim, dropout: see :class:`Mechanism`.

    Raises:
        InputError: an option is wrong, or the mechanism does not support this site.
    """
    is_listed, is_kept = site in attention_sites(args), Place(site, layer) in kept_places(args)
    name = args.attention if is_listed and not is_kept else DEFAULT
    given = build_options(name, **(mechanism_options(args, name) if is_listed else {}))
    if getattr(given, "prior", None) and attention_sites(args) == ("cross",):
        raise InputError(
            f"{name} attention with a prior compares the positions of queries and keys, which has no meaning between "
            "two languages at the 'cross' site; leave the prior out, or give more sites"
        )
    options = given.at_site(site)
    is_stock = not is_listed or (is_kept and options == build_options(DEFAULT))
    if is_stock and not args.differential:
        return None
    context: dict[str, Any] = {"num_heads": num_heads, "head_dim": head_dim, "layer": layer, "dropout": dropout}
    mechanism: Mechanism = mechanism_class(name)(options=options, **context)
    if args.differential:
        mechanism = Differential(mechanism, lambda_init=args.differential_lambda_init)
    check_site(mechanism.traits, name, site)
    return mechanism


def check_site(traits: Traits, name: str, site: str) -> None:
    """Raise InputError with the reason if a mechanism does not support a site.

    Args:
        traits: the mechanism's traits.
        name: the mechanism's name, for the message.
        site: ``encoder``, ``cross`` or ``decoder``.
    """
    if site == "encoder":
        return
    if traits.tied_tokens and site == "cross":
        raise InputError(
            f"{name} attention ties queries and keys to the same tokens, so it cannot stand at the 'cross' site, where "
            "they belong to two sentences; use --attention-sites encoder"
        )
    if traits.couples_queries:
        uncoupling = traits.uncoupling_options if site == "cross" or traits.can_be_causal else ()
        flags = [f"{flag(flat_name(name, option))} {value}" for option, value in uncoupling]
        raise InputError(
            f"{name} attention couples the queries (row i of the plan depends on all rows), so at the {site!r} site it "
            "would show future target tokens in training and could not decode step by step; "
            + " or ".join(["use --attention-sites encoder", *flags])
        )
    if traits.positional and site == "cross":
        raise InputError(
            f"{name} attention with these options compares the positions of queries and keys, which has no meaning "
            "between two languages at the 'cross' site; use --attention-sites without cross"
        )
    if traits.mixes_values:
        raise InputError(
            f"{name} attention with these options mixes the values of neighbouring tokens, later ones included, so it "
            f"cannot stand at the {site!r} site: in the decoder it would show future target tokens, and at cross the "
            "encoder has mixed them already; use --attention-sites encoder"
        )
    if site == "decoder" and not traits.is_causal:
        raise InputError(
            f"{name} attention cannot be causal, so it cannot stand at the 'decoder' site; "
            "use --attention-sites encoder or encoder,cross"
        )
