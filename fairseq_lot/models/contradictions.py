"""Refusal of configurations and overrides that contradict the attention of a checkpoint."""

from argparse import Namespace
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY, FairseqLanguageModel
from fairseq.models.transformer import TransformerModel

from fairseq_lot.attention.registry import DEFAULT
from fairseq_lot.errors import InputError
from fairseq_lot.models.architecture import refuse_renamed
from fairseq_lot.models.model_attention import changed, completed, in_words, options_read, parameters, redrawn
from fairseq_lot.models.saved import read_saved
from fairseq_lot.modules import flat_options
from fairseq_lot.modules.places import listed
from fairseq_lot.modules.sites import kept_places, softmax_trained_at


def check_configured(model: Namespace, path: str) -> None:
    """Raise InputError if fairseq-hydra-train configures another attention than its starting checkpoint has.

    fairseq-hydra-train builds the model before it knows the checkpoint, so the model cannot inherit the attention.

    Args:
        model: the configured arguments of the model.
        path: the checkpoint from which the training starts.
    """
    saved = read_saved(path).model
    refuse_renamed(saved, path)
    if getattr(saved, "attention", None) is None:
        return
    saved, planned = completed(saved), completed(model)
    names = [*flat_options.DEFAULTS, *options_read(saved)]
    if changed(names, saved, planned):
        values = {name: getattr(saved, name, None) for name in names}
        wanted = " ".join(f"+model.{name}={value}" for name, value in values.items() if value is not None)
        raise InputError(f"{path} has {in_words(saved)}, the configuration means {in_words(planned)}; give it {wanted}")


def check_overridden(path: str, overrides: dict[str, Any]) -> None:
    """Raise InputError if the parameters of a checkpoint's attention do not fit the overridden arguments.

    Args:
        path: the checkpoint.
        overrides: the values of ``--model-overrides``.
    """
    saved = read_saved(path).model
    arch = getattr(saved, "arch", None) or getattr(saved, "_name", None)
    model = ARCH_MODEL_REGISTRY.get(arch, TransformerModel)  # an architecture that nobody registered fails elsewhere
    if issubclass(model, FairseqLanguageModel):
        return  # the model of --lm-path, which gets the same overrides but does not use ours
    ours = [name for name in overrides if name in flat_options.option_names()]
    planned = completed(Namespace(**(vars(saved) | overrides)))
    is_stock = getattr(saved, "attention", None) is None
    if is_stock and model is not TransformerModel:
        raise InputError(f"{path} is a {arch}, whose attention cannot be overridden; that of a transformer can")
    if is_stock and "attention" not in overrides:
        raise InputError(f"{path} has fairseq's own attention, which does not read {ours[0]}; override attention too")
    kept = kept_places(planned)
    flat_options.check_used(ours, planned.attention, differential=planned.differential, keeps_softmax=bool(kept))
    try:
        softmax = softmax_trained_at(saved, kept)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if kept and getattr(planned, "softmax_prior", None) != softmax.get("softmax_prior"):
        trained = softmax.get("softmax_prior")
        raise InputError(f"{path} was trained with prior {trained} at {listed(kept)}; override softmax_prior with that")
    if is_stock:
        return
    saved = completed(saved)
    given_up = set(kept_places(saved)).difference(kept)
    if given_up and planned.attention != DEFAULT:
        raise InputError(f"{path} has {in_words(saved)}, and no parameters for {planned.attention} there; use swap")
    if saved.differential != planned.differential:
        raise InputError(f"{path} has {in_words(saved)}, which is not trained as {in_words(planned)}; fine-tune it so")
    if redrawn(parameters(saved, saved), parameters(planned, saved)):
        raise InputError(
            f"{path} has {in_words(saved)}, whose parameters are not those of {in_words(planned)}; use swap"
        )
