"""All changes that loading the user directory makes to fairseq itself.

- A stock ``transformer`` becomes ours if ``--model-overrides`` names an attention, or if its training starts from a
  checkpoint of ours.
- A task tells its model when an epoch begins.
- A new model's arguments get the fingerprints of its dictionaries.
- An InputError refuses: a misspelt option of ours in ``--model-overrides``; a checkpoint of ours with the name of a
  stock architecture; a training that would lose updates of the attention; a configuration of fairseq-hydra-train with
  another attention than the checkpoint's; other dictionaries than in the training; the opposite direction of
  translation.
- In fairseq's own commands an InputError is one line.

docs/fairseq.md lists these changes with their reasons.
"""

import sys
import zipfile
from argparse import Namespace
from typing import Any

from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.sequence_generator import SequenceGeneratorWithAlignment
from fairseq.tasks.translation import TranslationTask
from omegaconf import OmegaConf

from fairseq_lot.attention.base import Mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.models.architecture import override_attention, own_architecture, refuse_renamed
from fairseq_lot.models.contradictions import check_configured, check_overridden
from fairseq_lot.models.dictionaries import check_dictionaries, note_dictionaries
from fairseq_lot.models.misfit import explained
from fairseq_lot.models.saved import read_saved
from fairseq_lot.models.starting_point import (
    Defaults,
    inherit_from_checkpoint,
    mark_parsed,
    starting_point,
    take_mark,
)
from fairseq_lot.modules.flat_options import check_overrides, option_names
from fairseq_lot_compat import in_command


def install() -> None:
    """Make all changes; a second call does nothing."""
    if not hasattr(TransformerModel, "_refuses_attention"):
        TransformerModel._refuses_attention = True
        for arch in [arch for arch, model in ARCH_MODEL_REGISTRY.items() if model is TransformerModel]:
            ARCH_CONFIG_REGISTRY[arch] = _with_attention_of_start(ARCH_CONFIG_REGISTRY[arch])
        TransformerModel.add_args = _with_mark(vars(TransformerModel)["add_args"])
        TransformerModel.build_model = _with_own_arguments(vars(TransformerModel)["build_model"])
        checkpoint_utils.load_checkpoint_to_cpu = _with_overrides(checkpoint_utils.load_checkpoint_to_cpu)
        checkpoint_utils.load_model_ensemble_and_task = _with_its_data(checkpoint_utils.load_model_ensemble_and_task)
        checkpoint_utils.load_checkpoint = _when_training_begins(checkpoint_utils.load_checkpoint)
        SequenceGeneratorWithAlignment.__init__ = _with_weights(SequenceGeneratorWithAlignment.__init__)
        if in_command():
            sys.excepthook = _exit_with_one_line(sys.excepthook)


def _with_attention_of_start(size):
    """Wrap a stock architecture: a training that starts from a checkpoint of ours then trains our model.

    Args:
        size: the stock architecture's function, which adds missing sizes to the arguments.
    """

    def architecture(args):
        path = starting_point(args) if take_mark(args) else None
        if inherit_from_checkpoint(args, path, Defaults({}, size)):
            args.arch = own_architecture(args.arch)

    return architecture


def _with_mark(stock_add_args):
    """Mark the command lines of a stock ``transformer``, see :func:`mark_parsed`."""

    def add_args(cls, parser):
        stock_add_args.__func__(cls, parser)
        if cls is TransformerModel:
            mark_parsed(parser)

    return classmethod(add_args)


def _with_own_arguments(stock_build_model):
    """Note the dictionaries in a stock ``transformer``; refuse it if its arguments name our attention.

    Other programs, such as CTranslate2's converter, load checkpoints by this method, not by fairseq's loader.
    fairseq-hydra-train gives the arguments as an OmegaConf config.
    """

    def build_model(cls, args, task):
        if cls is TransformerModel:
            take_mark(args)  # left by an architecture that was registered after these changes
            refuse_renamed(args)
            note_dictionaries(args, task)
        return stock_build_model.__func__(cls, args, task)

    return classmethod(build_model)


def _with_overrides(stock_load):
    """Let ``--model-overrides`` name an attention; refuse misspelt options and attention without parameters."""

    def load_checkpoint_to_cpu(path, arg_overrides=None, *args, **options):
        check_overrides(arg_overrides or ())
        ours = {name: value for name, value in (arg_overrides or {}).items() if name in option_names()}
        if ours:
            check_overridden(path, arg_overrides)
        state = stock_load(path, arg_overrides, *args, **options)
        for model in (state.get("args"), (state.get("cfg") or {}).get("model")):
            override_attention(model, ours)
            refuse_renamed(model, path)
        return state

    return load_checkpoint_to_cpu


def _with_its_data(stock_load):
    """Refuse other dictionaries than in the training, and the opposite direction of translation.

    The direction may come from the names of the data. Dictionaries are compared before the weights are read, which do
    not fit a dictionary of another size.
    """

    def load_model_ensemble_and_task(filenames, arg_overrides=None, task=None, *args, **options):
        for path in filenames if task is not None else ():
            if zipfile.is_zipfile(path):  # checkpoints in older formats are not ours
                check_dictionaries(read_saved(path).model, task, path)
        loaded = stock_load(filenames, arg_overrides, task, *args, **options)
        if task is None:  # fairseq's Python interface: the task comes from the checkpoint
            for path, model in zip(filenames, loaded[0], strict=False):
                check_dictionaries(getattr(model, "args", None), loaded[2], path)
        if isinstance(task, TranslationTask):
            trained, now = (
                tuple(getattr(of, f"{side}_lang", None) for side in ("source", "target"))
                for of in (loaded[1].task, task.cfg)
            )
            if None not in now and trained == now[::-1] != now:
                pair = f"-s {trained[0]} -t {trained[1]}"
                raise InputError(f"{filenames[-1]} translates {trained[0]} to {trained[1]}; give {pair}")
        return loaded

    return load_model_ensemble_and_task


def _with_weights(stock_init):
    """Let decoders return weights for ``--print-alignment``, even if the model was loaded without them."""

    def __init__(self, models, *args, **options):
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, TransformerDecoderLayerBase):
                module.need_attn = True
        stock_init(self, models, *args, **options)

    return __init__


def _when_training_begins(stock_load):
    """Check a training when it begins; InputError if its starting checkpoint or its options do not fit.

    It compares dictionaries and weights with the checkpoint's, and calls :func:`refuse_to_lose`. With
    fairseq-hydra-train it compares the attention, too.
    """

    def load_checkpoint(cfg, trainer, **options):
        path, model = starting_point(cfg), trainer.cfg.model
        configured = OmegaConf.is_config(model) and ARCH_MODEL_REGISTRY.get(model._name)
        if path is not None and configured and issubclass(configured, TransformerModel):
            values: Any = OmegaConf.to_container(model)
            check_configured(Namespace(**values), path)
        if path is not None and isinstance(trainer.get_model(), TransformerModel):
            check_dictionaries(read_saved(path).model, trainer.task, path)
        refuse_to_lose(trainer.get_model(), trainer.cfg)
        try:
            return stock_load(cfg, trainer, **options)
        except Exception as error:
            fine_tunes = path is not None and path == cfg.finetune_from_model
            raise explained(error, path, trainer, fine_tunes=fine_tunes) from error.__cause__

    return load_checkpoint


def refuse_to_lose(model, cfg):
    """Raise InputError if a training's options do not work with the attention of its model.

    ``--memory-efficient-fp16`` and ``-bf16`` round updates of the attention away, ``--store-ema`` averages the counter
    of epochs, and the loss with alignments takes logarithms of negative weights.

    Args:
        model: the model of the training.
        cfg: fairseq's config of the training.
    """
    learnt = [name for name, _ in model.named_parameters() if ".mechanism." in name]
    for half in ("fp16", "bf16"):
        if learnt and getattr(cfg.common, f"memory_efficient_{half}"):
            raise InputError(
                f"--memory-efficient-{half} keeps no float32 copy of the parameters, so most updates of the "
                f"attention's, such as {learnt[0]}, would be lost in rounding; use --{half}"
            )
    if cfg.ema.store_ema and any(name.endswith(".mechanism.epoch") for name, _ in model.named_buffers()):
        raise InputError("--store-ema would average the epoch that --esp-anneal counts; leave out one of them")
    aligned = getattr(cfg.criterion, "_name", None) == "label_smoothed_cross_entropy_with_alignment"
    if aligned and any(isinstance(module, Mechanism) and module.traits.signed for module in model.modules()):
        raise InputError(
            "--criterion label_smoothed_cross_entropy_with_alignment takes logarithms of weights, but differential "
            "attention has negative ones; use --criterion label_smoothed_cross_entropy"
        )


def _exit_with_one_line(previous_hook):
    """Let a fairseq command end with one line and exit code 2 after an InputError, without a traceback."""

    def hook(kind, error, traceback):
        if issubclass(kind, InputError):
            # with several processes fairseq silences print in all but the first, and torch collects sys.stderr until
            # this function returns
            (sys.__stderr__ or sys.stderr).write(f"fairseq_lot: error: {error}\n")
            raise SystemExit(2)
        previous_hook(kind, error, traceback)

    return hook


def announce_epochs(task: Any) -> None:
    """Let the task call ``set_epoch`` of its model when an epoch begins: fairseq 0.12.2 tells only tasks.

    The trainer calls the hook at the start of an epoch, and when a training resumes within one.
    """
    if getattr(task, "_announces_epochs", False) or not hasattr(task, "begin_epoch"):
        return
    begin_epoch = task.begin_epoch

    def announce(epoch, model):
        begin_epoch(epoch, model)
        if hasattr(model, "set_epoch"):
            model.set_epoch(epoch)

    task.begin_epoch, task._announces_epochs = announce, True
