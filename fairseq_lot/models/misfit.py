"""One line about why a checkpoint's weights do not fit the model of a training; fairseq does not explain it."""

from typing import Any

from torch import Tensor, nn

from fairseq_lot.errors import InputError, first_line, flag
from fairseq_lot.models.saved import read_with_weights
from fairseq_lot.models.starting_point import shapes_weights

# Parts of fairseq's messages about errors that the user can correct.
_UNFIT = "Cannot load model parameters from checkpoint"
_CONTRADICTION, _OTHER_OPTIMISER = "--finetune-from-model", "please reset the optimizer"


def other_dictionary(path: str, trained_with: int, dictionary: str, symbols: int) -> str:
    """The message for a checkpoint whose embedding has another number of symbols than a dictionary.

    Args:
        path: the checkpoint.
        trained_with: number of symbols in its embedding.
        dictionary: file of the dictionary.
        symbols: number of symbols in the dictionary.
    """
    return (
        f"{path} was trained with {trained_with} symbols, but {dictionary} has {symbols}; use the data folder that it "
        "was trained on"
    )


def explained(error: Exception, path: str | None, trainer: Any, *, fine_tunes: bool) -> Exception:
    """Explain an error with which fairseq stops at the start of a training.

    Args:
        error: fairseq's error.
        path: the checkpoint; None: it is not a local file.
        trainer: fairseq's trainer.
        fine_tunes: the checkpoint was given by ``--finetune-from-model``.

    Returns:
        An InputError of one line if the user can correct the error, else the error itself.
    """
    message = str(error)
    if message.startswith(_UNFIT):
        if path is not None:
            return InputError(_misfit(path, trainer, error.__context__ or error, fine_tunes=fine_tunes))
    elif message.startswith(_CONTRADICTION):
        return InputError(message.partition(": {")[0])  # without the whole configuration
    elif _OTHER_OPTIMISER in message:
        return InputError(f"{path} does not fit this training: {first_line(error)}")
    return error


def _misfit(path: str, trainer: Any, error: BaseException, *, fine_tunes: bool) -> str:
    args, weights = read_with_weights(path)
    model, task = trainer.get_model(), trainer.cfg.task
    for stack, side in (("encoder", "source"), ("decoder", "target")):
        embedding = weights.get(f"{stack}.embed_tokens.weight")
        dictionary = getattr(getattr(model, stack, None), "dictionary", None)
        if embedding is not None and dictionary is not None and len(embedding) != len(dictionary):
            name = f"{task.data}/dict.{getattr(task, f'{side}_lang', side)}.txt"
            return other_dictionary(path, len(embedding), name, len(dictionary))
    here = trainer.cfg.model
    names = [name for name in vars(args) if shapes_weights(name) and getattr(here, name, None) is not None]
    flags = [
        f"{flag(name)} {getattr(args, name)} (here {getattr(here, name)})"
        for name in names
        if getattr(args, name) != getattr(here, name)
    ]
    if not flags:
        return f"{path} does not fit this model: {_first_difference(model, weights) or first_line(error)}"
    way_out = "leave these flags out" if fine_tunes else "give the same, or --finetune-from-model, which copies them"
    return f"{path} does not fit this model: it has {', '.join(flags)}; {way_out}"


def _first_difference(model: nn.Module, weights: dict[str, Tensor]) -> str | None:
    """One line about the first parameter that is missing on one side or differs in shape; None if all agree."""
    own = {name: tuple(value.shape) for name, value in model.named_parameters()}
    there = {name: tuple(value.shape) for name, value in weights.items()}
    for name, shape in own.items():
        if there.get(name) != shape:
            return f"{name} is {shape} here and {there.get(name, 'not there')} in the checkpoint"
    return next((f"{name} is in the checkpoint only" for name in there if ".layers." in name and name not in own), None)
