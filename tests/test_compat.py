"""The hook fairseq_lot_compat: its imports at interpreter start, and its patches once fairseq is imported."""

import dataclasses
import os
import pickle
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import fairseq.data.data_utils
import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from fairseq.ngram_repeat_block import NGramRepeatBlock
from omegaconf import OmegaConf

import fairseq_lot_compat
from fairseq_lot.errors import MISSING, InputError
from tests.conftest import close
from tests.plug_and_play import in_memory

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
COPIES = [f"{layer}_{kind}" for layer in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")]


def run(*command, cwd):
    """Run a command in another directory, without the environment variables of Python."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(part) for part in command]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def python(code, tmp_path, *options):
    result = run(sys.executable, *options, "-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    return result


class TestStart:
    def test_pth_belongs_to_the_installed_package(self, tmp_path):
        code = "import importlib.metadata as m; print(*(file.name for file in m.files('fairseq-lot')))"
        assert "fairseq_lot_compat.pth" in python(code, tmp_path).stdout.split()

    def test_interpreter_starts_with_the_hook_and_nothing_heavy(self, tmp_path):
        """fairseq would skip the models of ``--user-dir fairseq_lot`` if the package were imported already."""
        code = "import importlib.util, sys; print(*sys.modules); print(importlib.util.find_spec('fairseq').name)"
        start, found = python(f"{code}; print(*sys.modules)", tmp_path).stdout.split("\nfairseq\n")
        assert "fairseq_lot_compat" in start.split()
        assert not {"fairseq", "fairseq_lot", "numpy", "torch"} & {*start.split(), *found.split()}

    def test_hook_imports_no_other_module(self, tmp_path):
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); before = set(sys.modules)"
        result = python(f"{code}; import fairseq_lot_compat; print(*set(sys.modules) - before)", tmp_path, "-S")
        assert result.stdout.split() == ["fairseq_lot_compat"]


# Prints whether our imports change warning filters, sys.excepthook, a logger's level, matplotlib and --bf16.
CHANGES = """
import importlib, logging, sys, warnings
import matplotlib
import fairseq_lot_compat
for _ in range(2):
    importlib.reload(fairseq_lot_compat)
print(sum(getattr(finder, "__module__", "") == "fairseq_lot_compat" for finder in sys.meta_path))
before = list(warnings.filters), sys.excepthook, matplotlib.rcParams.copy()
from fairseq import options
from fairseq_lot.models import pluggable_transformer
from fairseq_lot.output import figures
figures.as_bytes(figures.Figure(), "svg")
ours = [f for f in warnings.filters if f[1] is not None and "hydra" in f[1].pattern]
level = logging.getLogger("fairseq.tasks.text_to_speech").level
train = options.get_training_parser()
args = options.parse_args_and_arch(train, ["data", "--arch", "transformer", "--bf16"])
print(bool(ours), sys.excepthook is not before[1], level > 0, matplotlib.rcParams != before[2], not args.tpu)
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
print(TransformerEncoderLayerBase(TransformerConfig()).can_use_fastpath)
warnings.warn("the strict flag of something else")
from argparse import Namespace
from fairseq.utils import import_user_module
import_user_module(Namespace(user_dir="fairseq_lot"))
"""


class TestOwnCommands:
    """Conveniences act only in the commands of fairseq and of this package, not in users' scripts."""

    @pytest.mark.fast_if(lambda program, ours: program != "fairseq_cli/train.py")
    @pytest.mark.parametrize(
        "program, ours", [("my_script.py", False), ("fairseq-train", True), ("fairseq_cli/train.py", True)]
    )
    def test_conveniences_are_on_in_commands_and_off_in_scripts(self, program, ours, tmp_path):
        """In all programs there is one finder and encoder layers work; scripts find user directories as in fairseq."""
        (tmp_path / program).parent.mkdir(exist_ok=True)
        (tmp_path / program).write_text(CHANGES)
        result = run(sys.executable, tmp_path / program, cwd=tmp_path)
        assert result.stdout.splitlines() == ["1", f"{ours} {ours} {ours} False {ours}", "False"], result.stderr
        assert "the strict flag of something else" in result.stderr
        assert (result.returncode == 0) == ours and ("FileNotFoundError" in result.stderr) == (not ours)

    def test_commands_are_recognised_by_the_name_of_the_program(self, monkeypatch):
        commands = ("train", "generate", "interactive", "preprocess", "score", "hydra-train", "validate", "eval-lm")
        own = [*(f"fairseq-{name}" for name in commands), "fairseq-lot", "fairseq_cli/train.py", "fairseq_lot/cli.py"]
        own += [f"fairseq_lot/experiment/{name}.py" for name in ("check", "score")]
        for program in own:
            monkeypatch.setattr(sys, "argv", [f"/some/where/{program}", "data"])
            assert fairseq_lot_compat.in_command(), program
        for argv in ([], ["-c"], [""], ["train.py"], ["my/fairseq-train.py"], ["ipykernel_launcher.py"]):
            monkeypatch.setattr(sys, "argv", argv)
            assert not fairseq_lot_compat.in_command(), argv


class TestBatches:
    """fairseq's main branch drops the last batch of a split unless its size fits; a function here imitates it."""

    @pytest.mark.parametrize("keep", [True, False])
    @pytest.mark.parametrize("number, sizes", [(8, [8]), (16, [8, 8]), (20, [8, 8, 4])])
    def test_no_sentence_is_lost(self, keep, number, sizes):
        def batch_by_size(indices, fixed_shapes=None, **_):
            batches = np.split(indices, range(8, len(indices), 8))
            return batches if keep or len(batches[-1]) % 8 == 0 else batches[:-1]

        module, indices = Namespace(), np.arange(number)[::-1]
        fairseq_lot_compat._with_mended_batches(module, lambda module: setattr(module, "batch_by_size", batch_by_size))
        for given in (indices, (int(i) for i in indices)):
            batches = module.batch_by_size(given)
            assert np.array_equal(np.concatenate(batches), indices) and [len(batch) for batch in batches] == sizes

    def test_lengths_are_put_into_buckets(self):
        """``--num-batch-buckets`` works, although numpy has renamed an argument that fairseq uses."""
        assert fairseq.data.data_utils.get_buckets(np.arange(1, 101), 4).tolist() == [25, 50, 75, 100]

    def test_the_function_of_fairseq_is_wrapped(self):
        """The wrapper stands where fairseq's data sets look for the function."""
        assert fairseq.data.data_utils.batch_by_size.__module__ == "fairseq_lot_compat"


class TestRepeats:
    """--no-repeat-ngram-size, in a buffer of tokens that is not full yet."""

    TOKENS = ([2, 5, 6, 7, 5, 6, 1, 1, 1], [2, 5, 6, 7, 6, 5, 1, 1, 1])

    @pytest.mark.parametrize("scripted", [False, True])
    @pytest.mark.parametrize(
        "size, step, banned",
        [
            (3, 5, [[0, 7]]),
            (3, 4, []),
            (2, 5, [[0, 7], [1, 6]]),
            (1, 2, [[0, 5], [0, 6], [1, 5], [1, 6]]),
            (6, 5, []),
            (3, 0, []),
        ],
    )
    def test_tokens_that_would_repeat_an_ngram_are_banned(self, size, step, banned, scripted):
        block = NGramRepeatBlock(size, use_extension=False)
        block = torch.jit.script(block) if scripted else block
        scores = block(torch.tensor(self.TOKENS), torch.zeros(2, 10), bsz=2, beam_size=1, step=step)
        assert scores.isinf().nonzero().tolist() == banned


class TestScripting:
    """torch.jit.script, as fairseq's own test of exports calls it."""

    def test_a_stock_model_can_be_scripted(self, tmp_path):
        dictionary = Dictionary()
        for number in range(40):
            dictionary.add_symbol(str(number))
        task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
        args = Namespace(encoder_layers=2, decoder_layers=2, encoder_embed_dim=8, decoder_embed_dim=8)
        model = TransformerModel.build_model(args, task).eval()
        torch.jit.script(model).save(tmp_path / "model.pt")
        source = torch.tensor([[4, 5, 6, 2], [1, 1, 7, 2]])
        inputs = source, torch.tensor([4, 2]), torch.tensor([[2, 5, 6], [2, 8, 9]])
        close(torch.jit.load(tmp_path / "model.pt")(*inputs)[0], model(*inputs)[0], 1e-6)

    def test_our_models_are_refused_in_one_line(self):
        model = in_memory.load("lot_transformer").model
        encoder, decoder = model.encoder.layers[0], model.decoder.layers[0]
        attention = encoder.self_attn
        for module in (model, model.encoder, model.decoder, encoder, decoder, attention, attention.mechanism):
            with pytest.raises(InputError, match="^torch.jit.script cannot compile .*$"):
                torch.jit.script(module)


class TestCommands:
    def test_help_prints_no_warning(self, tmp_path):
        (tmp_path / "fairseq-train").write_text(
            "from fairseq_cli import generate, interactive, preprocess, train, validate; train.cli_main()"
        )
        result = run(sys.executable, tmp_path / "fairseq-train", "--help", cwd=tmp_path)
        assert (result.returncode, result.stderr) == (0, "") and result.stdout.startswith("usage: ")

    def test_user_dir_registers_models_even_if_the_package_is_imported_already(self, tmp_path):
        """fairseq alone would skip a package that is imported already."""
        code = f"""if True:
            import argparse, fairseq_lot
            from fairseq.models import ARCH_MODEL_REGISTRY
            from fairseq.utils import import_user_module
            import_user_module(argparse.Namespace(user_dir={str(ROOT / "fairseq_lot")!r}))
            print("lot_transformer" in ARCH_MODEL_REGISTRY)
        """
        assert python(code, tmp_path).stdout.split()[-1] == "True"

    def test_any_other_user_dir_registers_its_models_once(self, tmp_path):
        models = tmp_path / "another" / "models"
        models.mkdir(parents=True)
        for path in (models.parent / "__init__.py", models / "__init__.py"):
            path.touch()
        (models / "one.py").write_text("print('registered')", encoding="utf-8")
        code = f"""if True:
            import argparse, another
            from fairseq.utils import import_user_module
            for _ in range(2):
                import_user_module(argparse.Namespace(user_dir={str(models.parent)!r}))
        """
        assert python(code, tmp_path).stdout.split().count("registered") == 1

    @pytest.mark.fast_if(lambda folder: folder == "fairseq_lot/fairseq_lot")
    @pytest.mark.parametrize("folder", [None, "fairseq_lot", "fairseq_lot/fairseq_lot"])
    def test_user_dir_is_found_from_any_directory(self, folder, tmp_path):
        """Even if a folder there has the package's name, such as a clone. The error lists every architecture."""
        if folder:
            (tmp_path / folder).mkdir(parents=True)
        result = run(BIN / "fairseq-train", "data", "--user-dir", "fairseq_lot", "--arch", "none", cwd=tmp_path)
        assert result.returncode == 2
        assert "lot_transformer_small" in result.stderr and "Traceback" not in result.stderr


# Imitates an environment with our wheel and without fairseq.
WITHOUT_FAIRSEQ = """
import sys
class Hidden:
    def find_spec(name, path=None, target=None):
        if name == "fairseq":
            raise ModuleNotFoundError("No module named 'fairseq'", name=name)
sys.meta_path.insert(0, Hidden)
import fairseq_lot
from fairseq_lot.cli import main
fairseq_lot.build_mechanism("lot", num_heads=2, head_dim=4)
print(*(main(words) for words in (["swap", "--path=a", "--out=b"], ["translate", "--path=a"], ["diagnose", "a"])))
fairseq_lot.swap
"""


def test_without_fairseq_mechanisms_work_and_commands_say_in_one_line_that_it_is_missing(tmp_path):
    result = run(sys.executable, "-c", WITHOUT_FAIRSEQ, cwd=tmp_path)
    *errors, last = result.stderr.splitlines()
    assert result.stdout == "2 2 2\n" and errors[:3] == 3 * [f"fairseq-lot: error: {MISSING['fairseq']}"]
    assert last == f"ModuleNotFoundError: {MISSING['fairseq']}"


class TestConfigs:
    def test_nested_defaults_work(self):
        assert OmegaConf.structured(FairseqConfig()).common.seed == FairseqConfig().common.seed
        assert TransformerConfig().encoder.embed_dim == 512
        assert hash(TransformerConfig().encoder) != hash(TransformerConfig(encoder=None))

    def test_dataclasses_are_as_strict_as_before(self):
        assert dataclasses.dataclass.__module__ == "dataclasses"
        with pytest.raises(ValueError, match="mutable default"):
            dataclasses.make_dataclass("Wrong", [("values", list, [])])


class TestEncoderLayer:
    @pytest.fixture
    def layers(self):
        torch.manual_seed(0)
        cfg = TransformerConfig()
        cfg.encoder.embed_dim, cfg.encoder.ffn_embed_dim, cfg.encoder.attention_heads = 8, 16, 2
        return torch.nn.ModuleList(TransformerEncoderLayerBase(cfg) for _ in range(2))

    @pytest.mark.parametrize("copies", [[], COPIES])
    def test_checkpoint_loads_with_and_without_copies(self, layers, copies):
        assert not {*COPIES} & {name for name, _ in layers[0].named_parameters()}
        state = {name: torch.rand_like(value) for name, value in layers.state_dict().items()}
        assert not any(name.endswith(tuple(COPIES)) for name in state)
        stored = {**state, **{f"{layer}.{name}": torch.zeros(3) for layer in range(2) for name in copies}}
        layers.load_state_dict(stored, strict=True)
        assert all(torch.equal(value, state[name]) for name, value in layers.state_dict().items())

    def test_missing_and_foreign_weights_are_still_refused(self, layers):
        state = layers.state_dict()
        with pytest.raises(RuntimeError, match="fc3"):
            layers.load_state_dict({**state, "0.fc3.weight": torch.zeros(1)})
        del state["1.fc1.weight"]
        with pytest.raises(RuntimeError, match="1.fc1.weight"):
            layers.load_state_dict(state)


class Malicious:
    """Creates a file when an unsafe loader unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class TestCheckpoints:
    CONTENT = {
        "args": Namespace(arch="transformer", task="translation", criterion="cross_entropy", lr=[0.5]),
        "cfg": None,
        "model": {"weight": torch.ones(2)},
        "optimizer_history": [{"lr_scheduler_state": {"best": np.float64(3.5)}}],
        "extra_state": {
            "best": np.float64(3.5),
            "loss": np.float32(0.25),
            "epoch": np.int64(7),
            "done": np.bool_(True),
            "sizes": np.arange(3),
        },
    }

    @pytest.fixture(params=["as written here", "numpy 1", "numpy 2"])
    def path(self, request, tmp_path):
        path = tmp_path / "checkpoint.pt"
        torch.save(self.CONTENT, path, _use_new_zipfile_serialization=request.param == "as written here")
        if request.param != "as written here":  # the older format is a plain pickle, whose names can be edited
            core = {"numpy 1": b"numpy.core.", "numpy 2": b"numpy._core."}[request.param]
            stored = path.read_bytes()
            assert b"core.multiarray" in stored
            path.write_bytes(stored.replace(b"numpy._core.", b"numpy.core.").replace(b"numpy.core.", core))
        return path

    def test_plain_types_pass_the_safe_loader_and_fairseq_loads_them(self, path):
        loaded = torch.load(path, weights_only=True)
        assert loaded["args"] == self.CONTENT["args"]
        for name, value in self.CONTENT["extra_state"].items():
            assert type(loaded["extra_state"][name]) is type(value)
            assert np.array_equal(loaded["extra_state"][name], value)
        state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
        assert state["cfg"].task.source_lang is None
        assert state["optimizer_history"][0]["lr_scheduler_state"]["best"] == 3.5

    def test_malicious_checkpoint_is_refused(self, tmp_path):
        path, proof = tmp_path / "checkpoint.pt", tmp_path / "proof"
        torch.save({"model": {}, "args": Malicious(proof)}, path)
        with pytest.raises(pickle.UnpicklingError, match="system"):
            torch.load(path, weights_only=True)
        with pytest.raises(pickle.UnpicklingError, match="system"):
            checkpoint_utils.load_checkpoint_to_cpu(str(path))
        assert not proof.exists()
