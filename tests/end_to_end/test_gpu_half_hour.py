"""scripts/gpu_half_hour.sh, rehearsed at tiny sizes without a GPU."""

import os
import subprocess
import tarfile
from argparse import Namespace
from importlib.util import find_spec

import pytest
import yaml
from fairseq import options

from benchmarks import gpu
from benchmarks.mechanisms import read_ways
from fairseq_lot.errors import InputError
from tests.end_to_end.conftest import ROOT

TINY = {
    "experiment": "tiny", "dataset": "numbers", "size": "small", "backbones": {"transformer": {}}, "seeds": [1],
    "precision": "fp32", "pretrain": {"lr": 0.003, "max-tokens": 500, "max-epoch": 1}, "generate": {"beam": 1},
    "languages": ["de", "en"],
    "systems": {"LOT": {"attention": "lot"}, "SeT": {"attention": "set", "from-scratch": True}},
}  # fmt: skip
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="no triton: pip install -e '.[kernels-test]'")


@pytest.fixture
def half_hour(data, tmp_path):
    """A function that runs a part; it returns the exit code, the output, and the names of the packed files."""
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(TINY | {"data": str(data / "bin"), "work": str(tmp_path / "tiny")}))

    def run(part, *flags):
        words = [part, "--tiny", "--out", tmp_path / "out", "--work", tmp_path / "work", "--config", config, *flags]
        command = ["bash", "scripts/gpu_half_hour.sh", *map(str, words)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        whole = tmp_path / "whole.tar.xz"
        whole.write_bytes(b"".join(file.read_bytes() for file in sorted((tmp_path / "out").glob(f"{part}.tar.xz.*"))))
        with tarfile.open(whole) as archive:
            names = archive.getnames()
        assert not any(name.endswith(".pt") for name in names)
        return done.returncode, done.stdout + done.stderr, names

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "packed"),
    [
        ("smoke", "smoke/mechanisms.log"),
        pytest.param("tune", "tuned/cpu.json", marks=NEEDS_TRITON),
        ("layers", "layers/layers/bench.csv"),
        ("models", "models/decoding3/bench.csv"),
    ],
)
def test_a_part_packs_its_results_and_repeats_nothing(half_hour, part, packed):
    code, said, names = half_hour(part)
    assert code == 0, said
    assert packed in names
    code, said, _ = half_hour(part)
    assert code == 0 and ": done in" not in said, "nothing is done twice"


@pytest.mark.slow
def test_an_experiment_continues_after_its_time_was_over(half_hour, tmp_path):
    code, said, _ = half_hour("experiment", "--seconds", 25)
    assert code == 1 and "unfinished: experiment; the same command continues" in said
    code, said, names = half_hour("experiment", "--seconds", 1200, "--at-once", 2)
    assert code == 0, said
    assert "tiny/table.md" in names and "tiny/results.jsonl" in names
    assert "LOT" in (tmp_path / "tiny" / "table.md").read_text()


def test_fairseq_train_accepts_the_flags_of_the_smoke_test():
    for system in gpu.TRAINED:
        words = ["DATA", "--user-dir", str(ROOT / "fairseq_lot"), "--arch", "lot_transformer_small", *system.split()]
        options.parse_args_and_arch(options.get_training_parser(), words)


def test_measured_mechanisms_have_distinct_names():
    assert len(read_ways(gpu.LAYERS, [32])) == 8
    assert len(read_ways(gpu.MODELS, [32])) == 3


def test_without_a_gpu_it_says_so(tmp_path):
    args = Namespace(part="layers", out=tmp_path, work=tmp_path, seconds=9, at_once=1, tiny=False)
    args.config = str(ROOT / "config" / "iwslt14-65k-full.yaml")
    with pytest.raises(InputError, match="^there is no GPU; --tiny runs without one"):
        gpu.run(args)
    with pytest.raises(InputError, match="^there is no no.yaml; give one of"):
        gpu.run(Namespace(**vars(args) | {"config": "no.yaml"}))
