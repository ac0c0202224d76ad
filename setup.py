"""Metadata, dependencies and commands; the hook module travels with a ``.pth`` file that imports it."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
HOOK = "fairseq_lot_compat"


class build_py_with_pth(build_py):
    """Put the hook's ``.pth`` beside the packages, for plain and for editable installs."""

    def run(self):
        super().run()
        folder = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        self.mkpath(str(folder))
        self.copy_file(str(ROOT / f"{HOOK}.pth"), str(Path(folder) / f"{HOOK}.pth"))

    def get_outputs(self, include_bytecode=True):
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / f"{HOOK}.pth")]


def version():
    lines = (ROOT / "fairseq_lot" / "__init__.py").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("__version__")).split('"')[1]


setup(
    name="fairseq-lot",
    version=version(),
    description="Attention as optimal transport, inside fairseq: softmax, Sinkhorn, ESP, LOT, near_far and SeT",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["fairseq_lot", "fairseq_lot.*"]),
    package_data={
        "fairseq_lot": ["py.typed"],
        "fairseq_lot.inspection": ["page/*"],
        "fairseq_lot.kernels": ["tuned/*.json"],
    },
    py_modules=[HOOK],
    cmdclass={"build_py": build_py_with_pth},
    # fairseq==0.12.2 itself is installed afterwards with --no-deps: its own pins are unsatisfiable today.
    install_requires=[
        "bitarray>=2.0",
        "hydra-core>=1.3.2,<1.4",
        "jinja2>=3.1",
        "langcodes>=3.5",
        "matplotlib>=3.7",
        "numpy>=1.24",
        "omegaconf>=2.3,<2.4",
        "pydantic>=2.12",
        "regex",
        "sacrebleu>=2.3",
        "sacremoses>=0.1",
        "sentencepiece>=0.2",
        "tabulate>=0.9",
        "torch>=2.6",
        "tqdm>=4.60",
    ],
    extras_require={
        # what runs config/*.yaml; the package itself works without it, and on Python 3.10
        "experiment": ["snakemake>=9", "snakemake-logger-plugin-rich>=0.5"],
        "test": ["hypothesis", "mypy", "pot>=0.9", "pytest>=8", "pytest-xdist", "ruff", "scipy", "subword-nmt>=0.3.8"],
        # CUDA builds of torch bring it along; here it is for tests on machines without a GPU
        "kernels-test": ["triton>=3.7"],
        # for BPE=subword_nmt in scripts/prepare_*.sh
        "subword-nmt": ["subword-nmt>=0.3.8"],
    },
    entry_points={"console_scripts": ["fairseq-lot = fairseq_lot.cli:main"]},
)
