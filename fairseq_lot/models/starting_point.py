"""A training inherits attention, options, sites and sizes from the checkpoint that it starts from.

fairseq builds the model from the command line and then loads the weights into it. Properties that are not in the
weights, such as a temperature, would silently change.
"""

import copy
import logging
import os
import re
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fairseq.data.data_utils import infer_language_pair
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_legacy import base_architecture
from fairseq.utils import split_paths

from fairseq_lot.attention.registry import DEFAULT
from fairseq_lot.errors import InputError, flag
from fairseq_lot.models.architecture import refuse_renamed
from fairseq_lot.models.model_attention import changed, completed, in_words, options_read, parameters, redrawn
from fairseq_lot.models.saved import Saved, read_saved
from fairseq_lot.modules import flat_options
from fairseq_lot.modules.sites import kept_places, softmax_trained_at

logger = logging.getLogger(__name__)

# an argument that marks a parsed command line
_MARK = "parsed_by_fairseq"
# arguments of a model that change its function but not its weights; the last two together remove a norm
_NOT_IN_WEIGHTS = (
    "encoder_attention_heads",
    "decoder_attention_heads",
    "activation_fn",
    "no_scale_embedding",
    "no_token_positional_embeddings",
    "cross_self_attention",
    "decoder_normalize_before",
    "no_decoder_final_norm",
)
# arguments that change neither weights nor function; after training the layers that were not kept are gone
_TRAINING_ONLY = re.compile("drop|quant_noise_scalar|_activations|min_params|mha_|ffn_blocks|embed_path|layers_to_keep")
# architectures do not set these; the values are fairseq-train's defaults
_FAIRSEQ_DEFAULTS = {
    name: vars(TransformerConfig())[name]
    for name in (
        "max_source_positions",
        "max_target_positions",
        "no_decoder_final_norm",
        "adaptive_softmax_factor",
        "tie_adaptive_proj",
        "base_layers",
        "base_sublayers",
        "base_shuffle",
    )
}


class Defaults(NamedTuple):
    """The defaults that an architecture adds to a command line.

    Attributes:
        attention: options of the attention, by flat name.
        size: a function that adds missing sizes to the arguments.
    """

    attention: dict[str, Any]
    size: Callable[[Namespace], None]


@dataclass(frozen=True)
class Inheritance:
    """The changes that a checkpoint makes to a training's command line.

    Attributes:
        values: arguments that are new or differ from the typed ones.
        notes: lines for the log, as ``(level, line)``.
        has_attention: the checkpoint names its attention.
    """

    values: dict[str, Any]
    notes: tuple[tuple[int, str], ...]
    has_attention: bool

    def apply(self, args: Namespace) -> None:
        """Write the values into the command line, and the notes into the log."""
        vars(args).update(self.values)
        for level, note in self.notes:
            logger.log(level, note)


def mark_parsed(parser: ArgumentParser | _ArgumentGroup) -> None:
    """Mark the command lines that this parser reads.

    fairseq calls an architecture with a command line, and also with the arguments of each model that it builds or
    loads. Only a command line inherits from a checkpoint.
    """
    parser.set_defaults(**{_MARK: True})


def take_mark(args: Namespace) -> bool:
    """Remove the mark of :func:`mark_parsed`, so that no checkpoint has it; return whether there was one."""
    return vars(args).pop(_MARK, False)


def inherit_from_checkpoint(args: Namespace, path: str | None, defaults: Defaults) -> bool:
    """Add to a training's command line the settings of the checkpoint from which it starts.

    Args:
        args: the typed arguments only; completed in place.
        path: the checkpoint; None: there is none, and only sizes are added.
        defaults: the architecture's, for arguments that neither the command line nor the checkpoint gives.

    Returns:
        Whether there is a checkpoint that names its attention.

    Raises:
        InputError: see :func:`plan`.
    """
    if path is None:
        defaults.size(args)
        return False
    inherited = plan(read_saved(path), args, defaults, _languages_of_data(args))
    inherited.apply(args)
    return inherited.has_attention


def starting_point(args: Namespace) -> str | None:
    """The local checkpoint from which a training with these options starts, by fairseq's rules; None: there is none."""
    if not hasattr(args, "restore_file"):
        return None  # a parser without the options of checkpoints
    suffix = args.checkpoint_suffix
    path = args.restore_file.replace(".pt", f"{suffix}.pt")
    if args.restore_file == "checkpoint_last.pt":
        path = os.path.join(args.save_dir, path)
        if not os.path.exists(path):
            path = args.continue_once or args.finetune_from_model
    return path if path and os.path.isfile(path) else None


def plan(
    saved: Saved, typed: Namespace, defaults: Defaults, languages: tuple[str | None, str | None] = (None, None)
) -> Inheritance:
    """Decide what a training inherits, without reading, changing or logging anything.

    Args:
        saved: the checkpoint.
        typed: the typed arguments only.
        defaults: the architecture's.
        languages: source and target language, from the names of the data; None if unknown.

    Returns:
        The changes to the command line.

    Raises:
        InputError: the architecture's default attention differs from the checkpoint's, or the saved state of the
            optimiser lacks new parameters.
    """
    refuse_renamed(saved.model, saved.path)
    args, has_attention = copy.copy(typed), getattr(saved.model, "attention", None) is not None
    notes = [*_keep_model(args, saved, defaults.size), *_keep_direction(args, saved, languages)]
    notes += (_keep_attention if has_attention else _draw_attention)(args, saved, defaults.attention)
    before = vars(typed)
    values = {name: value for name, value in vars(args).items() if name not in before or before[name] is not value}
    return Inheritance(values, tuple(notes), has_attention)


def shapes_weights(name: str) -> bool:
    """Whether the shapes of a model's weights may depend on this argument."""
    names = Namespace(**_FAIRSEQ_DEFAULTS)
    base_architecture(names)
    return hasattr(names, name) and not _TRAINING_ONLY.search(name) and name not in _NOT_IN_WEIGHTS


def _keep_model(args, saved, size):
    """Write into ``args`` the checkpoint's sharing of embeddings and the settings that its weights do not show.

    Such settings are, for example, the numbers of heads. A fine-tuning also keeps the sizes that were not typed.

    Returns:
        Notes for the log; :func:`_keep_direction`, :func:`_draw_attention` and :func:`_keep_attention` likewise.
    """
    path, model, notes = saved.path, saved.model, []
    arch = Namespace(**(_FAIRSEQ_DEFAULTS | vars(args)))
    size(arch)
    if args.finetune_from_model:
        names = Namespace(**_FAIRSEQ_DEFAULTS)
        base_architecture(names)
        for name in vars(names):
            value, is_typed = getattr(model, name, None), getattr(args, name, None) is not None
            if not (is_typed or value is None or _TRAINING_ONLY.search(name)):
                setattr(args, name, value)
    size(args)
    kept = [name for name, value in vars(arch).items() if getattr(args, name, value) != value]
    if kept:
        flags = ", ".join(f"{flag(name)} {getattr(args, name)}" for name in kept)
        notes.append((logging.INFO, f"{path} has {flags}, which is kept"))
    shared = {"share_all_embeddings": (), "share_decoder_input_output_embed": ("share_all_embeddings",)}
    for name, implied_by in shared.items():
        here, there = (any(getattr(one, x, False) for x in (name, *implied_by)) for one in (args, model))
        setattr(args, name, there)
        if here != there:
            how = "with" if there else "without"
            notes.append((logging.WARNING, f"{path} was trained {how} {flag(name)}, which is kept"))
    for name in _NOT_IN_WEIGHTS:
        value = getattr(model, name, None)
        if value is not None and getattr(args, name, None) != value:
            setattr(args, name, value)
            notes.append((logging.WARNING, f"{path} was trained with {flag(name)} {value}, which is kept"))
    return notes


def _languages_of_data(args):
    """Source and target language from the names of the data; None if unknown."""
    folder = split_paths(args.data)[0] if isinstance(getattr(args, "data", None), str) else ""
    return tuple(infer_language_pair(folder)) if os.path.isdir(folder) else (None, None)


def _keep_direction(args, saved, languages):
    """Keep the checkpoint's direction of translation if the names of the data suggest the opposite one.

    Typed languages are not changed.
    """
    pair = saved.task.get("source_lang"), saved.task.get("target_lang")
    is_typed = getattr(args, "source_lang", None) or getattr(args, "target_lang", None)
    if is_typed or None in pair or tuple(languages) != pair[::-1]:
        return []
    args.source_lang, args.target_lang = pair
    return [(logging.WARNING, f"{saved.path} translates {pair[0]} to {pair[1]}, which is kept")]


def _draw_attention(args, saved, defaults):
    """For a checkpoint with fairseq's own attention: train the typed attention; its new parameters are random."""
    planned = completed(args, defaults)
    if _goes_on(args, saved) and any(one.is_learnt for one in parameters(planned, planned).values()):
        raise InputError(
            f"{saved.path} has fairseq's own attention; {in_words(planned)} learns parameters, so the optimiser's "
            "saved state does not fit; use --finetune-from-model or --reset-optimizer"
        )
    if planned.attention == DEFAULT and not planned.differential:
        return []
    line = f"{saved.path} has fairseq's own attention; trained is {in_words(planned)}, its parameters as drawn"
    return [(logging.WARNING, line)]


def _keep_attention(args, saved, defaults):
    """For a checkpoint with our attention: keep it, except for typed options."""
    path, before = saved.path, completed(saved.model)
    typed = flat_options.typed_options(args)
    _refuse_other_defaults(args, defaults, typed, before, path)
    is_same = "attention" not in typed or args.attention == before.attention
    own = options_read(before) if is_same else []
    for name in [*flat_options.DEFAULTS, *own] if is_same else ["differential", "differential_lambda_init"]:
        if name not in typed and getattr(before, name, None) is not None:
            setattr(args, name, getattr(before, name))
    try:
        softmax = softmax_trained_at(before, kept_places(completed(args)))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    vars(args).update({name: value for name, value in softmax.items() if name not in typed})
    after, line = completed(args), f"{path} has {in_words(before)}"
    changes = [
        f"{flag(name)} {getattr(before, name, None)} becomes {getattr(after, name, None)}"
        for name in changed([*flat_options.DEFAULTS, *own], before, after)
    ]
    there, here = parameters(before, before), parameters(after, before)
    if there != here and _goes_on(args, saved):
        raise InputError(
            f"{line}; the command line changes its parameters ({', '.join(changes)}), so the optimiser's saved state "
            "does not fit; use --finetune-from-model or --reset-optimizer"
        )
    drawn, notes = redrawn(there, here), []
    if drawn:
        args.redrawn_attention = drawn
    if drawn or here.keys() - there:
        changes.append("parameters that are new or of another shape are drawn")
    begins = path == args.finetune_from_model or args.reset_dataloader
    if begins and getattr(args, "esp_anneal", None) not in (None, 1):
        again = (
            f"{path} was trained with an annealed sort temperature; annealing begins again, in the first epoch "
            f"at {flag('esp_sort_temperature')} {args.esp_sort_temperature}"
        )
        notes.append((logging.WARNING, again))
    if changes:
        return [*notes, (logging.WARNING, f"{line}; by the command line {', '.join(changes)}")]
    return [*notes, (logging.INFO, f"{line}, which is kept")]


def _goes_on(args, saved):
    """Whether the training continues with the optimiser's saved state."""
    return saved.has_optimiser and not args.reset_optimizer and saved.path != args.finetune_from_model


def _refuse_other_defaults(args, defaults, typed, saved, path):
    """Raise InputError if the architecture's default attention differs from the checkpoint's and none was typed."""
    size = args.arch.partition("_transformer")[2]
    meant, change = defaults.get("attention", saved.attention), ""
    if "attention" not in typed and meant != saved.attention:
        change = f"--attention {meant}"
    elif "differential" not in typed and defaults.get("differential") and not saved.differential:
        meant, change = "a differential one", "--differential"
    if change:
        raise InputError(
            f"{path} has {in_words(saved)}, --arch {args.arch} means {meant}; use --arch {saved.attention}_transformer"
            f"{size} to keep it, or {change} to change it"
        )
