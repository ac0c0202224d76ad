"""Patches that let the unmodified fairseq 0.12.2 run on current Python, hydra, omegaconf, numpy and torch.

``fairseq_lot_compat.pth`` imports this module at interpreter start. It then only puts one finder onto
``sys.meta_path``. When ``fairseq`` is imported, the finder lets the normal loaders work and patches thirteen modules
before, while or after they execute. No file of fairseq is edited. Patches without which fairseq fails act in all
programs; conveniences act only in fairseq's own commands and in fairseq-lot (:func:`in_command`). docs/fairseq.md lists
all patches with their reasons.

It is a top-level module because it acts before ``fairseq_lot`` is imported. It imports nothing of ``fairseq_lot``.
"""

import sys

# Second copies of the encoder weights that fairseq 0.12.2 keeps for its fast path.
_FAST_PATH_COPIES = tuple(
    f"{layer}_{kind}" for layer in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")
)

_COMMANDS = {
    "fairseq-eval-lm",
    "fairseq-generate",
    "fairseq-hydra-train",
    "fairseq-interactive",
    "fairseq-lot",
    "fairseq-preprocess",
    "fairseq-score",
    "fairseq-train",
    "fairseq-validate",
}

# Warnings of fairseq's frozen sources at each start; matched at the start of the message.
_KNOWN_WARNINGS = (
    r"\s*hydra\.experimental\.",
    r"\s*The version_base parameter is not specified",
    r"In 'config': Usage of deprecated keyword in package header",
    r"\s*'config' is validated against ConfigStore schema",
    r"\s*The strict flag in the compose API is deprecated",
    r".*invalid escape sequence",  # from Python 3.12 on, when it first compiles fairseq
    r"`torch\.cuda\.amp\.(autocast|GradScaler)",
    r"torch\.cuda\.amp\.GradScaler is enabled, but CUDA is not available",  # --amp on a CPU
    r"CUDA is not available or torch_xla is imported\. Disabling autocast",  # the same
    r"`torch\.jit\.",
    r"'pin_memory' argument is set as true but no accelerator is found",
    r"Support for mismatched key_padding_mask and attn_mask is deprecated",
)


def in_command():
    """Whether the running program is one of fairseq's commands or fairseq-lot, not a user's script or notebook.

    ``python -m fairseq_cli.train`` and ``python -m fairseq_lot.cli`` count. It reads ``sys.argv``, which processes that
    a command spawns inherit.
    """
    program = sys.argv[0] if sys.argv else ""
    folder, name = ["", *program.split("/")][-2:]
    own = {("fairseq_lot", "cli.py"), ("experiment", "score.py"), ("experiment", "check.py")}
    return name in _COMMANDS or folder == "fairseq_cli" or (folder, name) in own


def _with_hashable_configs(module, execute):
    """Execute a config module whose dataclasses have instances of each other as defaults.

    Python >= 3.11 refuses an unhashable default, so all dataclasses of the module get the identity hash.
    """
    import dataclasses

    original = dataclasses.dataclass

    def dataclass(cls=None, /, **options):
        def decorate(undecorated):
            decorated = original(undecorated, **options)
            if decorated.__module__ == module.__name__ and decorated.__hash__ is None:
                decorated.__hash__ = object.__hash__
            return decorated

        return decorate if cls is None else decorate(cls)

    dataclasses.dataclass = dataclass
    try:
        execute(module)
    finally:
        dataclasses.dataclass = original


def _without_fast_path(module, execute):
    """Switch off the encoder's fast path, which bypasses ``self_attn`` and fails on current torch.

    Later versions of fairseq have no fast path. Checkpoints load with and without its copies of the weights. The copies
    are no longer parameters; empty tensors keep their names, because ``torch.jit.script`` compiles the fast path.
    """
    import torch

    execute(module)
    layer = module.TransformerEncoderLayerBase
    if "_load_from_state_dict" not in vars(layer):
        return  # this fairseq has no fast path
    original_init = layer.__init__

    def __init__(self, *args, **kwargs):
        original_init(self, *args, **kwargs)
        self.can_use_fastpath = False
        for name in _FAST_PATH_COPIES:
            delattr(self, name)
            setattr(self, name, torch.empty(0))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for name in _FAST_PATH_COPIES:
            state_dict.pop(prefix + name, None)
        # fairseq's own method would fill the copies and switch the fast path on
        super(layer, self)._load_from_state_dict(state_dict, prefix, *args)

    layer.__init__ = __init__
    layer._load_from_state_dict = _load_from_state_dict


def _with_installed_user_dirs(module, execute):
    """Let ``--user-dir NAME`` find an installed package from any directory, editable installs included.

    A package in the current directory comes first; a folder that is no package, such as a clone, does not count. In all
    programs a user directory registers its models even if it was imported before.
    """
    from importlib.util import find_spec

    execute(module)
    original = module.import_user_module

    def import_user_module(args):
        name = getattr(args, "user_dir", None) if in_command() else None
        if name and name.isidentifier() and not module.os.path.exists(module.os.path.join(name, "__init__.py")):
            spec = find_spec(name)
            if spec and spec.origin and spec.submodule_search_locations:
                args = module.argparse.Namespace(user_dir=spec.submodule_search_locations[0])
        folder = module.os.path.abspath(getattr(args, "user_dir", None) or "")
        name, models = module.os.path.basename(folder), module.os.path.join(folder, "models")
        # fairseq notes in ``memo`` the directories that it has loaded
        is_imported = name in sys.modules and folder not in getattr(module.import_user_module, "memo", ())
        original(args)
        if is_imported and getattr(args, "user_dir", None) and module.os.path.exists(models):
            from fairseq.models import import_models

            import_models(models, f"{name}.models")

    module.import_user_module = import_user_module


def _with_atomic_copies(module, execute):
    """Make copies of checkpoints atomic: a copy appears under its name when it is complete.

    fairseq copies ``checkpoint_best.pt`` to ``checkpoint_last.pt`` in place: a kill during the copy leaves half a file,
    and training cannot resume from it.
    """
    execute(module)
    original = module.PathManager.copy

    def copy(src_path, dst_path, overwrite=False):
        if not module.PathManager.supports_rename(dst_path):
            return original(src_path, dst_path, overwrite=overwrite)
        copied = original(src_path, dst_path + ".tmp", overwrite=True)
        module.PathManager.rename(dst_path + ".tmp", dst_path)
        return copied

    module.PathManager.copy = staticmethod(copy)


def _with_mended_batches(module, execute):
    """Keep the last sentences of a split, and repair ``--num-batch-buckets``.

    In fairseq's main branch ``batch_by_size`` drops a last batch whose size is not a multiple of
    ``--required-batch-size-multiple`` (8), also in generation: 296 of 300 sentences are translated. fairseq 0.12.2
    keeps it. ``get_buckets`` uses an argument name that numpy 2.4 has changed.
    """
    execute(module)
    original = module.batch_by_size

    import numpy as np

    def batch_by_size(indices, *args, **kwargs):
        if not isinstance(indices, np.ndarray):
            indices = np.fromiter(indices, dtype=np.int64, count=-1)  # as fairseq itself does
        batches = original(indices, *args, **kwargs)
        batched = sum(map(len, batches))
        # batches are in the order of the indices
        return (
            batches
            if batched == len(indices) or kwargs.get("fixed_shapes") is not None
            else [*batches, indices[batched:]]
        )

    def get_buckets(sizes, num_buckets):
        return np.unique(np.percentile(sizes, np.linspace(0, 100, num_buckets + 1), method="lower")[1:])

    module.batch_by_size, module.get_buckets = batch_by_size, get_buckets


def _with_blocked_repeats(module, execute):
    """Repair ``--no-repeat-ngram-size`` without fairseq's CUDA extension.

    fairseq 0.12.2 looks for the last n-gram at the end of the buffer, where there is padding, and so blocks nothing
    (its issues 4709 and 5206). The new method compiles with ``torch.jit.script``, like the old one.
    """
    execute(module)
    module.NGramRepeatBlock._no_repeat_ngram = _no_repeat_ngram


def _no_repeat_ngram(self, tokens, lprobs, bsz: int, beam_size: int, step: int):
    """Set the log probability of a token to -inf if it would repeat an n-gram of its row.

    Args:
        tokens: ``(bsz * beam_size, len)``; ``tokens[:, 1 : step + 1]`` are the translation so far, after the end of
            sentence and before padding.
        lprobs: ``(bsz * beam_size, vocabulary)``.
    """
    n = self.no_repeat_ngram_size
    if step >= n:
        seen = tokens[:, 1 : step + 1].unfold(1, n, 1)  # (rows, number of n-grams, n)
        begun = tokens[:, step + 2 - n : step + 1].unsqueeze(1)
        row, at = (seen[:, :, : n - 1] == begun).all(-1).nonzero().unbind(1)
        lprobs[row, seen[row, at, n - 1]] = float("-inf")
    return lprobs


def _with_lines_logged_once(module, execute):
    """Write each line to ``--log-file`` once: fairseq opens the file again in each epoch and keeps the earlier ones."""
    execute(module)
    original = module.progress_bar

    def progress_bar(*args, **kwargs):
        path, opened = kwargs.get("log_file"), {getattr(one, "baseFilename", None) for one in module.logger.handlers}
        if in_command() and path and module.os.path.abspath(path) in opened:
            kwargs["log_file"] = None
        return original(*args, **kwargs)

    module.progress_bar = progress_bar


def _with_bf16_on_gpus(module, execute):
    """Let ``--bf16`` use a GPU if torch_xla is not installed.

    fairseq 0.12.2 reads the flag as a request for a TPU and fails without torch_xla, although it supports GPUs.
    """
    from importlib.util import find_spec

    execute(module)
    original = module.parse_args_and_arch

    def parse_args_and_arch(*args, **kwargs):
        parsed = original(*args, **kwargs)
        options = parsed[0] if isinstance(parsed, tuple) else parsed  # parse_known also returns the rest
        if in_command() and getattr(options, "bf16", False) and find_spec("torch_xla") is None:
            options.tpu = False
        return parsed

    module.parse_args_and_arch = parse_args_and_arch


def _with_bf16_when_translating(module, execute):
    """Let fairseq-generate and fairseq-interactive apply ``--bf16`` to a Transformer, as they do ``--fp16``."""
    execute(module)
    original = module.TransformerModel.prepare_for_inference_

    def prepare_for_inference_(self, cfg):
        if in_command() and cfg.common.bf16:
            self.bfloat16()
        original(self, cfg)

    module.TransformerModel.prepare_for_inference_ = prepare_for_inference_


def _with_broadcast_checkpoints(module, execute):
    """Let a training by several processes start from a checkpoint.

    fairseq's first process sends the checkpoint's configuration to the others, whose ``torch.load`` refuses it: since
    torch 2.6 it loads tensors and plain types alone. The sender is a process of the same training.
    """
    import torch

    execute(module)

    def _broadcast_object_slow(obj, src_rank, group, dist_device):
        objects = [obj]
        torch.distributed.broadcast_object_list(objects, src=src_rank, group=group, device=dist_device)
        return objects[0]

    module._broadcast_object_slow = _broadcast_object_slow


def _with_amp_on_cpus(module, execute):
    """Let ``--amp`` train in bfloat16 on a CPU, by torch's autocast.

    fairseq 0.12.2 asks for the autocast of GPUs, which does nothing on a CPU: it trains in float32 without a word.
    """
    import torch

    execute(module)
    original = module.FairseqTask.train_step

    def train_step(self, sample, model, criterion, optimizer, *args, **kwargs):
        on_cpu = next(model.parameters()).device.type == "cpu"
        with torch.autocast("cpu", torch.bfloat16, enabled=on_cpu and isinstance(optimizer, module.AMPOptimizer)):
            return original(self, sample, model, criterion, optimizer, *args, **kwargs)

    module.FairseqTask.train_step = train_step


def _with_safe_checkpoint_types(module, execute):
    """Execute fairseq after preparing torch's safe loader and, in a command, the warning filters."""
    _allow_checkpoint_types()
    if in_command():
        _silence_known_notes()
    execute(module)
    _allow_meters(module.meters)


def _allow_checkpoint_types():
    """Allow the plain types in fairseq checkpoints for torch's safe loader."""
    from argparse import Namespace

    import numpy as np
    import torch

    multiarray = (np._core if hasattr(np, "_core") else np.core).multiarray
    dtypes = {type(np.dtype(code)) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["Float"]}
    functions = [  # numpy 1 and 2 write different module names; allow both
        _alias(function, f"numpy.{core}.multiarray")
        for function in (multiarray._reconstruct, multiarray.scalar)
        for core in ("core", "_core")
    ]
    torch.serialization.add_safe_globals([Namespace, np.ndarray, np.dtype, *dtypes, *functions])


def _allow_meters(meters):
    """Allow fairseq's meters, which checkpoints of fairseq 0.9 and older contain, also under their old module name."""
    import torch

    kinds = meters.AverageMeter, meters.StopwatchMeter, meters.TimeMeter
    torch.serialization.add_safe_globals([*kinds, *((kind, f"fairseq.meters.{kind.__name__}") for kind in kinds)])


def _alias(function, module_name):
    """The function under the name of another module, for pickles."""

    def call(*args):
        return function(*args)

    call.__module__ = module_name
    call.__name__ = call.__qualname__ = function.__name__
    return call


def _silence_known_notes():
    """Silence warnings of fairseq 0.12.2 that no user can act on."""
    import logging
    import warnings

    # it asks for tensorboardX at each start
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    for message in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


_PATCHED_MODULES = {
    "fairseq": _with_safe_checkpoint_types,
    "fairseq.data.data_utils": _with_mended_batches,
    "fairseq.dataclass.configs": _with_hashable_configs,
    "fairseq.distributed.utils": _with_broadcast_checkpoints,
    "fairseq.file_io": _with_atomic_copies,
    "fairseq.logging.progress_bar": _with_lines_logged_once,
    "fairseq.models.transformer.transformer_config": _with_hashable_configs,
    "fairseq.models.transformer.transformer_legacy": _with_bf16_when_translating,
    "fairseq.modules.transformer_layer": _without_fast_path,
    "fairseq.ngram_repeat_block": _with_blocked_repeats,
    "fairseq.options": _with_bf16_on_gpus,
    "fairseq.tasks.fairseq_task": _with_amp_on_cpus,
    "fairseq.utils": _with_installed_user_dirs,
}


class Finder:
    """Meta-path finder that wraps the normal loaders of the modules above by their patches."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in _PATCHED_MODULES:
            return None
        others = (finder for finder in sys.meta_path if finder is not cls and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        loader = getattr(spec, "loader", None)
        if loader is not None and hasattr(loader, "exec_module"):
            patch, execute = _PATCHED_MODULES[name], loader.exec_module
            loader.exec_module = lambda module: patch(module, execute)
        return spec


# One finder remains if this module is imported twice, from two places or by reload.
sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__module__", None) != __name__]
sys.meta_path.insert(0, Finder)
