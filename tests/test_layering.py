"""Who may import whom, and how long a file may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "fairseq_lot"
FILES = sorted(PACKAGE.rglob("*.py"))
STOREYS = ["transport", "attention", "modules", "models", "plug_and_play"]
APART = ["corpus", "evaluation"]
BESIDE = {"benchmark": ["transport", "attention", "evaluation"]}
FOR_ALL = ["errors", "files"]
HEAVY = ["fairseq", "numpy", "omegaconf", "hydra", "ot", "scipy", "torch"]


def imports(path):
    """Dotted names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import in line {node.lineno}"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(path):
    """Rooms of the package that a file imports from."""
    parts = [name.split(".") for name in imports(path)]
    return {name[1] for name in parts if name[0] == "fairseq_lot" and len(name) > 1} - {"__version__"}


def foreign(path):
    return {name.split(".")[0] for name in imports(path)} - {"fairseq_lot"}


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def allowed(name):
    if name in STOREYS:
        tools = {"corpus", "evaluation"} if name == "plug_and_play" else set()
        return {*STOREYS[: STOREYS.index(name) + 1], *tools, *FOR_ALL}
    if name in BESIDE:
        return {name, *BESIDE[name], *FOR_ALL}
    if name in APART:
        return {*APART, *FOR_ALL}
    if name in FOR_ALL:
        return set(FOR_ALL)
    if name == "cli":
        return set(FOR_ALL)
    return set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path):
    above = own(path) - allowed(room(path))
    assert not above, f"{room(path)} must not import {', '.join(sorted(above))}"
    if room(path) in ("transport", "attention"):
        assert not foreign(path) - set(sys.stdlib_module_names) - {"torch"}
    if room(path) in BESIDE:
        assert "fairseq" not in foreign(path)
    elif room(path) not in STOREYS:
        assert not foreign(path) & {"fairseq", "torch"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.parametrize(
    "path", [path for path in FILES if room(path) in ("modules", "models")], ids=lambda path: path.name
)
def test_fairseq_s_side_names_no_mechanism(path):
    mechanisms = {"esp", "lot", "set", "sinkhorn", "softmax"}
    assert all((PACKAGE / "attention" / f"{name}.py").is_file() for name in mechanisms)
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    assert not mechanisms & {node.value for node in tree if isinstance(node, ast.Constant)}


def test_every_folder_has_its_place():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= {*STOREYS, *APART, *BESIDE}
    assert {"transport", "attention", "modules", "models", "corpus", "evaluation"} <= folders


def test_the_command_imports_nothing_heavy():
    code = f"import sys, fairseq_lot.cli; sys.exit(str([x for x in {HEAVY} if x in sys.modules] or ''))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=PACKAGE.parent).stderr.strip() == b""
