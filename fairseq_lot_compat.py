"""Lets the unmodified fairseq 0.12.2 run on current Python, hydra, omegaconf, numpy and torch.

``fairseq_lot_compat.pth`` imports this module at interpreter start; all that happens then is that one
finder goes onto ``sys.meta_path``. When somebody imports ``fairseq``, the finder lets the normal loaders do
their work and patches eleven modules before, while or after they execute. No file of fairseq is edited.
What makes fairseq work is patched in every program; what is a convenience acts in fairseq's own commands and
in fairseq-lot alone (:func:`in_command`). docs/fairseq.md lists every patch with its reason.

It is a top-level module because it acts before anything of ``fairseq_lot`` is imported, and imports nothing of it.
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

# What fairseq's frozen sources raise at each start; matched at the beginning of the message.
_KNOWN_WARNINGS = (
    r"\s*hydra\.experimental\.",
    r"\s*The version_base parameter is not specified",
    r"In 'config': Usage of deprecated keyword in package header",
    r"\s*'config' is validated against ConfigStore schema",
    r"\s*The strict flag in the compose API is deprecated",
    r".*invalid escape sequence",  # Python 3.12 and newer, while it compiles fairseq for the first time
    r"`torch\.cuda\.amp\.(autocast|GradScaler)",
    r"`torch\.jit\.",
    r"'pin_memory' argument is set as true but no accelerator is found",
    r"Support for mismatched key_padding_mask and attn_mask is deprecated",
)


def in_command():
    """Say whether the running program is one of fairseq's commands or fairseq-lot, not somebody's script or notebook.

    ``python -m fairseq_cli.train`` and ``python -m fairseq_lot.cli`` are such programs, too. ``sys.argv`` tells, which
    processes that a command spawns inherit.
    """
    program = sys.argv[0] if sys.argv else ""
    folder, name = ["", *program.split("/")][-2:]
    own = {("fairseq_lot", "cli.py"), ("experiment", "score.py"), ("experiment", "check.py")}
    return name in _COMMANDS or folder == "fairseq_cli" or (folder, name) in own


def _with_hashable_configs(module, execute):
    """Execute a config module whose dataclasses nest instances of each other as defaults.

    Python >= 3.11 treats an unhashable default as mutable and refuses it, so every dataclass
    that the module defines gets the identity hash.
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

    Later fairseq dropped it too. Checkpoints with and without its second copies of the weights load. The copies are
    no parameters any more; empty tensors keep their names, as ``torch.jit.script`` compiles the fast path, too.
    """
    import torch

    execute(module)
    layer = module.TransformerEncoderLayerBase
    if "_load_from_state_dict" not in vars(layer):
        return  # a fairseq that has no fast path
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

    A package in the current directory comes first; a mere folder of that name, such as a clone, does not count.
    In every program a user directory registers its models, also where it has been imported already.
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
    """Let a checkpoint that is copied to another name appear there when it is complete.

    fairseq writes ``checkpoint_best.pt`` so, but copies it to ``checkpoint_last.pt`` in place: a kill during the
    copy leaves half a file, from which the next call cannot resume.
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
    """Let a split keep its last sentences, and ``--num-batch-buckets`` find buckets for lengths.

    In fairseq's main branch ``batch_by_size`` leaves out a last batch whose size is no multiple of
    ``--required-batch-size-multiple`` (8), in generation as well: 296 of 300 sentences are translated. fairseq 0.12.2
    keeps it. numpy 2.4 has another name for an argument that ``get_buckets`` gives it.
    """
    execute(module)
    original = module.batch_by_size

    import numpy as np

    def batch_by_size(indices, *args, **kwargs):
        if not isinstance(indices, np.ndarray):
            indices = np.fromiter(indices, dtype=np.int64, count=-1)  # as fairseq itself does
        batches = original(indices, *args, **kwargs)
        batched = sum(map(len, batches))
        # batches follow one another in the order of the indices
        return (
            batches
            if batched == len(indices) or kwargs.get("fixed_shapes") is not None
            else [*batches, indices[batched:]]
        )

    def get_buckets(sizes, num_buckets):
        return np.unique(np.percentile(sizes, np.linspace(0, 100, num_buckets + 1), method="lower")[1:])

    module.batch_by_size, module.get_buckets = batch_by_size, get_buckets


def _with_blocked_repeats(module, execute):
    """Let ``--no-repeat-ngram-size`` block repeated n-grams where fairseq's CUDA extension is not built.

    fairseq 0.12.2 looks for the last n-gram at the end of a buffer for the longest translation, where padding stands,
    and so blocks nothing (its issues 4709 and 5206). The new method compiles with ``torch.jit.script``, as the old did.
    """
    execute(module)
    module.NGramRepeatBlock._no_repeat_ngram = _no_repeat_ngram


def _no_repeat_ngram(self, tokens, lprobs, bsz: int, beam_size: int, step: int):
    """Give each token -inf that would end an n-gram which stands in its row already, ``(bsz * beam_size, vocabulary)``.

    ``tokens[:, 1 : step + 1]`` have been translated; before them is the end of sentence, after them padding.
    """
    n = self.no_repeat_ngram_size
    if step >= n:
        seen = tokens[:, 1 : step + 1].unfold(1, n, 1)  # (rows, number of n-grams, n)
        begun = tokens[:, step + 2 - n : step + 1].unsqueeze(1)
        row, at = (seen[:, :, : n - 1] == begun).all(-1).nonzero().unbind(1)
        lprobs[row, seen[row, at, n - 1]] = float("-inf")
    return lprobs


def _with_lines_logged_once(module, execute):
    """Let ``--log-file`` have every line once: fairseq opens it again for each epoch, beside the times before."""
    execute(module)
    original = module.progress_bar

    def progress_bar(*args, **kwargs):
        path, opened = kwargs.get("log_file"), {getattr(one, "baseFilename", None) for one in module.logger.handlers}
        if in_command() and path and module.os.path.abspath(path) in opened:
            kwargs["log_file"] = None
        return original(*args, **kwargs)

    module.progress_bar = progress_bar


def _with_bf16_on_gpus(module, execute):
    """Let ``--bf16`` mean a GPU where torch_xla is not installed.

    fairseq 0.12.2 reads it as a request for a TPU and fails without torch_xla, although GPUs are supported too.
    """
    from importlib.util import find_spec

    execute(module)
    original = module.parse_args_and_arch

    def parse_args_and_arch(*args, **kwargs):
        parsed = original(*args, **kwargs)
        options = parsed[0] if isinstance(parsed, tuple) else parsed  # with parse_known the rest comes second
        if in_command() and getattr(options, "bf16", False) and find_spec("torch_xla") is None:
            options.tpu = False
        return parsed

    module.parse_args_and_arch = parse_args_and_arch


def _with_bf16_when_translating(module, execute):
    """Let fairseq-generate and fairseq-interactive heed ``--bf16`` for a Transformer, as they do ``--fp16``."""
    execute(module)
    original = module.TransformerModel.prepare_for_inference_

    def prepare_for_inference_(self, cfg):
        if in_command() and cfg.common.bf16:
            self.bfloat16()
        original(self, cfg)

    module.TransformerModel.prepare_for_inference_ = prepare_for_inference_


def _with_safe_checkpoint_types(module, execute):
    """Execute fairseq itself after torch's safe loader and, in a command, the warning filters are prepared."""
    _allow_checkpoint_types()
    if in_command():
        _silence_known_notes()
    execute(module)
    _allow_meters(module.meters)


def _allow_checkpoint_types():
    """Tell torch's safe loader about the plain types that stand in fairseq checkpoints."""
    from argparse import Namespace

    import numpy as np
    import torch

    multiarray = (np._core if hasattr(np, "_core") else np.core).multiarray
    dtypes = {type(np.dtype(code)) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["Float"]}
    functions = [  # numpy 1 and 2 write different module names; either reads the other's
        _alias(function, f"numpy.{core}.multiarray")
        for function in (multiarray._reconstruct, multiarray.scalar)
        for core in ("core", "_core")
    ]
    torch.serialization.add_safe_globals([Namespace, np.ndarray, np.dtype, *dtypes, *functions])


def _allow_meters(meters):
    """Checkpoints of fairseq 0.9 and older hold these, plain numbers, under the name that their module had then."""
    import torch

    kinds = meters.AverageMeter, meters.StopwatchMeter, meters.TimeMeter
    torch.serialization.add_safe_globals([*kinds, *((kind, f"fairseq.meters.{kind.__name__}") for kind in kinds)])


def _alias(function, module_name):
    """Return a function that a pickle can name as a member of another module."""

    def call(*args):
        return function(*args)

    call.__module__ = module_name
    call.__name__ = call.__qualname__ = function.__name__
    return call


def _silence_known_notes():
    """Filter, by message, the warnings that nobody who runs fairseq 0.12.2 can act on."""
    import logging
    import warnings

    # asks for tensorboardX at every start, for a text-to-speech task
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    for message in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


_PATCHED_MODULES = {
    "fairseq": _with_safe_checkpoint_types,
    "fairseq.data.data_utils": _with_mended_batches,
    "fairseq.dataclass.configs": _with_hashable_configs,
    "fairseq.file_io": _with_atomic_copies,
    "fairseq.logging.progress_bar": _with_lines_logged_once,
    "fairseq.models.transformer.transformer_config": _with_hashable_configs,
    "fairseq.models.transformer.transformer_legacy": _with_bf16_when_translating,
    "fairseq.modules.transformer_layer": _without_fast_path,
    "fairseq.ngram_repeat_block": _with_blocked_repeats,
    "fairseq.options": _with_bf16_on_gpus,
    "fairseq.utils": _with_installed_user_dirs,
}


class Finder:
    """Meta-path finder that hands the modules above to the loader that would have had them, wrapped."""

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


# A module that is imported twice, from two places or by reload, leaves one finder.
sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__module__", None) != __name__]
sys.meta_path.insert(0, Finder)
