"""``python -m benchmarks gpu PART``: use half an hour on a GPU, in parts of at most ten minutes.

smoke checks every kernel and runs short trainings. tune finds block sizes. layers and models measure time and memory.
experiment runs the experiment of --config, with several trainings and translations at once. A part stops after
--seconds; the same command then continues it and repeats nothing. The results are packed into FOLDER/PART.tar.xz.00,
.01 and so on, at most 15 MB each; unpack them with: cat FOLDER/PART.tar.xz.* | tar -xJ
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
import yaml

from benchmarks.mechanisms import EVERYWHERE
from fairseq_lot import cli
from fairseq_lot.errors import InputError, check_least
from fairseq_lot.kernels.blocks import VARIABLE
from fairseq_lot.output.files import atomic_write

NAME = "python -m benchmarks gpu"
PARTS = ("smoke", "tune", "layers", "models", "experiment")
ROOT = Path(__file__).parents[1]
LAYERS = (
    "softmax",
    "near_far --near-far-tangents --near-far-exact-up-to 0/512",
    "lot",
    "lot --lot-conv-kernel 3/7",
    "sinkhorn --sinkhorn-epsilon 1 --sinkhorn-num-updates 15",
    "set",
)
MODELS = (EVERYWHERE, "lot")
#: systems that the part smoke trains
TRAINED = (
    "--attention softmax --attention-sites encoder,decoder --softmax-prior alibi",
    "--attention near_far --attention-sites encoder,cross,decoder --near-far-tangents",
    "--attention near_far --attention-sites encoder,decoder --near-far-prior alibi",
    "--attention lot --lot-conv-kernel 3",
    "--attention sinkhorn --sinkhorn-epsilon 1",
    "--attention esp",
    "--attention set",
)
#: seconds between SIGINT and SIGKILL when a command is stopped
GRACE = 15.0


class Scale(NamedTuple):
    """Sizes of the measurements and trainings."""

    lengths: tuple[int, ...]
    model_lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    tokens: int
    updates: int
    more: tuple[str, ...]


FULL = Scale(
    lengths=(32, 128, 512, 1024, 2048, 8192, 32768),
    model_lengths=(32, 512, 1024, 2048, 8192),
    prefixes=(512, 1024, 2048, 8192),
    tokens=8192,
    updates=30,
    more=("--dtype", "float16", "--repeats", "5", "--limit", "5"),
)
TINY = Scale((4, 8), (4,), (3,), 8, 2, ("--device", "cpu", "--repeats", "1", "--warm-up", "0"))


def experiment(args: Namespace) -> dict[str, Any]:
    """The entries of ``--config``."""
    return yaml.safe_load(Path(args.config).read_text(encoding="utf-8"))


def steps(part: str, args: Namespace, work: Path) -> dict[str, list[str]]:
    """The commands of a part, by name; logs have the same names."""
    scale, python = (TINY if args.tiny else FULL), [sys.executable]
    if part == "smoke":
        config = experiment(args)
        if not Path(config["data"]).is_dir():
            raise InputError(f"there is no {config['data']}; make it with: {config.get('prepare', 'prepare_*.sh')}")
        own = [
            "--arch",
            f"lot_transformer_{config['size']}",
            "--max-update",
            str(scale.updates),
            "--disable-validation",
        ]
        own += ["--warmup-updates", "10", "--max-tokens", "4096", *(["--cpu"] if args.tiny else ["--fp16"])]
        trained = {
            f"train{i}": ["bash", "scripts/pretrain.sh", config["data"], str(work / f"train{i}"), *own, *system.split()]
            for i, system in enumerate(TRAINED[:1] if args.tiny else TRAINED)
        }
        return {"mechanisms": [*python, "scripts/smoke.py", *(["--device", "cpu"] if args.tiny else [])], **trained}
    bench = [*python, "-m", "benchmarks"]
    if part == "tune":
        return {"tune": [*bench, "tune", *(["--rehearse", "--mechanism", "set"] if args.tiny else [])]}
    if part == "experiment":
        how = ["--profile", "workflow/profiles/gpu", "--resources", f"gpu={args.at_once}", "--scheduler", "greedy"]
        return {"experiment": ["snakemake", "--configfile", args.config, "--nolock", "--quiet", "all", *how]}

    def measured(name: str, mechanisms: tuple[str, ...], lengths: tuple[int, ...], *more: str) -> list[str]:
        ways = [word for way in mechanisms for word in ("--mechanism", way)]
        sizes = ["--tokens", str(scale.tokens), "--lengths", *map(str, lengths)]
        return [*bench, "--out", str(work / name), *sizes, *ways, *scale.more, *more]

    if part == "layers":
        peers = [word for name in ("flash", "efficient") for word in ("--peer", f"{name}=benchmarks/peers/{name}")]
        found = {
            "layers": measured("layers", LAYERS, scale.lengths, "--patience", "0.5", *([] if args.tiny else peers))
        }
        graphs = () if args.tiny else LAYERS[:3]  # one command each: a layer that cannot be captured ends its command
        for i, way in enumerate(graphs):
            found[f"graphs{i}"] = measured(f"graphs{i}", (way,), scale.lengths, "--graphs", "--patience", "0.5")
        return found
    arch = ["--model", "lot_transformer_small" if args.tiny else "lot_transformer_iwslt_de_en"]
    found = {"models": measured("models", MODELS, scale.model_lengths, *arch)}
    for n in scale.prefixes:
        found[f"decoding{n}"] = measured(f"decoding{n}", MODELS[:1], (n,), *arch, "--prefix", str(n))
    return found


def run(args: Namespace) -> None:
    """Run the unfinished commands of a part until the time is over; then pack all results."""
    check_least(args, seconds=1, at_once=1)
    if not Path(args.config).is_file():
        raise InputError(f"there is no {args.config}; give one of config/*.yaml")
    if not args.tiny and not torch.cuda.is_available():
        raise InputError("there is no GPU; --tiny runs without one")
    args.config = str(Path(args.config).absolute())
    end, work, out = monotonic() + args.seconds, (ROOT / args.work / args.part).absolute(), Path(args.out).absolute()
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, VARIABLE: str(work.parent / "tuned"), "PYTHONUNBUFFERED": "1"}
    environment["VIRTUAL_ENV"] = os.environ.get("VIRTUAL_ENV", sys.prefix)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if args.part == "experiment":
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.at_once)))
    Path(environment[VARIABLE]).mkdir(exist_ok=True)
    left, failed = [], []
    with shared_gpu(work.parent / "mps", environment) if args.part == "experiment" else contextlib.nullcontext():
        for name, command in steps(args.part, args, work).items():
            outcome = finish(name, command, work, environment, end)
            left += [name] * (outcome is None)
            failed += [name] * bool(outcome)
    kept = [work, Path(environment[VARIABLE])]
    if args.part == "experiment":
        kept.append(ROOT / experiment(args)["work"])
    pack(out / f"{args.part}.tar.xz", kept)
    if failed:
        print(f"failed: {', '.join(failed)}; logs: {work}/*.log")
    if left:
        print(f"unfinished: {', '.join(left)}; the same command continues")
    if failed or left:
        raise SystemExit(1)


def finish(name: str, command: list[str], work: Path, environment: dict[str, str], end: float) -> int | None:
    """Run a command unless an earlier call finished it; return its exit code, or None if the time is over."""
    done, log, words = work / f"{name}.done", work / f"{name}.log", shlex.join(command)
    if done.is_file() and done.read_text(encoding="utf-8").strip() == words:
        return 0
    if monotonic() >= end:
        return None
    print(f"{name}: {words}", flush=True)
    begin = monotonic()
    with open(log, "a", encoding="utf-8") as to:
        process = subprocess.Popen(command, stdout=to, stderr=to, env=environment, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(end - begin)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _stop(process)
    print(
        f"{name}: {'done' if code == 0 else f'exit code {code}, see {log},'} in {monotonic() - begin:.0f} s", flush=True
    )
    if code == 0:
        with atomic_write(done) as file:
            file.write(words + "\n")
    return code


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop a command with all processes that it started."""
    for how in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


@contextlib.contextmanager
def shared_gpu(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Context manager: run NVIDIA's multi-process service, with which processes compute at once instead of in turns."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield
        return
    folder.mkdir(exist_ok=True)
    own = {**environment, "CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    if subprocess.run([control, "-d"], env=own, capture_output=True, check=False).returncode:
        print("no multi-process service here: the trainings take turns")
        yield
        return
    environment |= own
    try:
        yield
    finally:
        subprocess.run([control], input=b"quit\n", env=own, capture_output=True, check=False)


def pack(archive: Path, folders: list[Path]) -> None:
    """Pack the folders into files of at most 15 MB, without checkpoints and incomplete files."""
    for old in archive.parent.glob(f"{archive.name}.*"):
        old.unlink()
    left_out = [f"--exclude={pattern}" for pattern in ("*.pt", "*.part", "*.lock")]
    named = [word for folder in folders if folder.is_dir() for word in ("-C", str(folder.parent), folder.name)]
    tar = subprocess.Popen(["tar", "-cJ", *left_out, *named], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    subprocess.run(["split", "-d", "-b", "15M", "-", f"{archive}."], stdin=tar.stdout, check=True)
    if tar.wait() > 1:  # 1: a file changed while tar read it
        raise InputError(f"cannot pack {', '.join(map(str, folders))}; is there space left in {archive.parent}?")
    size = sum(file.stat().st_size for file in archive.parent.glob(f"{archive.name}.*"))
    print(f"{archive}.*: {size / 1e6:.1f} MB", flush=True)


def build_parser() -> cli.OneLineParser:
    """The options of the command."""
    parser = cli.OneLineParser(prog=NAME, description=__doc__)
    parser.set_defaults(run=run)
    add = parser.add_argument
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    add("part", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    add("--out", required=True, metavar="FOLDER", help="folder for the packed results")
    text = "folder for unpacked results and logs, from which the next call continues (default: %(default)s)"
    add("--work", default="checkpoints/gpu", metavar="FOLDER", help=text)
    text = "seconds after which the part stops and packs its results (default: %(default)s)"
    add("--seconds", **number, default=540, help=text)
    text = "the experiment; the part smoke trains with its data and model size (default: %(default)s)"
    add("--config", default="config/iwslt14-65k-full.yaml", metavar="FILE", help=text)
    text = "number of trainings and translations that run on the GPU at once (default: %(default)s)"
    add("--at-once", **number, default=8, help=text)
    add("--tiny", action="store_true", help="rehearse at tiny sizes, without a GPU")
    return parser
