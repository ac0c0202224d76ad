"""Which parts of the package may import which."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from fairseq_lot.attention.registry import MECHANISMS

PACKAGE = Path(__file__).resolve().parents[1] / "fairseq_lot"
FILES = sorted(PACKAGE.rglob("*.py"))
COMPAT = PACKAGE.with_name("fairseq_lot_compat.py")
TOOLS = {"errors", "output"}
EXPERIMENT = {"corpus", "evaluation", "spec", *TOOLS}
# A room is a folder of the package, a file beside the folders, or spec. It may import itself and:
SEES = {
    "errors": set(),
    "output": {"errors"},
    "spec": {"errors"},  # experiment/spec.py: readers of results import no other file of experiment
    "numerics": {"errors"},
    "kernels": {"numerics", "errors"},
    "transport": {"kernels", "numerics", "errors"},
    "attention": {"transport", "kernels", "numerics", "errors"},
    "modules": {"attention", "transport", "errors"},
    "models": {"modules", "attention", "errors"},
    "pretrained": {"models", "modules", "attention", *EXPERIMENT},
    "plug_and_play": {"inspection", "pretrained", "models", "modules", "attention", *EXPERIMENT},
    "experiment": {"plug_and_play", "pretrained", "models", "modules", "cli", *EXPERIMENT},
    "inspection": {"pretrained", "models", "modules", "attention", "transport", *EXPERIMENT},
    "evaluation": {"corpus", "spec", *TOOLS},
    "corpus": TOOLS,
    "cli": {"errors"},
    "__init__": {"plug_and_play", "pretrained", "attention", "errors"},  # imported when a name is first used
}
WITHOUT_TORCH = {"evaluation", "spec", "corpus", "output", "errors", "cli", "__init__"}
WITHOUT_FAIRSEQ = {"numerics", "kernels", "transport", "attention", *WITHOUT_TORCH}
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


def room_of(*names):
    """The room of a module; its name is given in parts, without ``fairseq_lot``."""
    return "spec" if names[:2] == ("experiment", "spec") else names[0]


def room(path):
    return room_of(*path.relative_to(PACKAGE).with_suffix("").parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path):
    name, parts = room(path), [imported.split(".") for imported in imports(path)]
    rooms = {room_of(*one[1:]) for one in parts if one[0] == "fairseq_lot" and len(one) > 1} - {"__version__"}
    above = rooms - SEES[name] - {name}
    assert not above, f"{name} must not import {', '.join(sorted(above))}"
    foreign = {one[0] for one in parts} - {"fairseq_lot"}
    if name in ("numerics", "transport", "attention"):
        assert not foreign - set(sys.stdlib_module_names) - {"torch"}
    assert name not in WITHOUT_FAIRSEQ or "fairseq" not in foreign
    assert name not in WITHOUT_TORCH or "torch" not in foreign


def test_there_are_no_circular_imports():
    """Imports inside functions count, too."""
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in (*FILES, COMPAT)}
    modules = set(names.values())
    TopologicalSorter({name: modules & set(imports(path)) for path, name in names.items()}).prepare()


def test_compat_names_no_module_of_the_package():
    tree = ast.parse(COMPAT.read_text(encoding="utf-8"))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = [*imports(COMPAT), *(text for text in texts if re.fullmatch(r"[\w.]+", text))]
    assert not [name for name in named if name.startswith("fairseq_lot.")]
    assert "fairseq_lot" not in list(imports(COMPAT))


@pytest.mark.parametrize(
    "path", [path for path in FILES if room(path) in ("modules", "models")], ids=lambda path: path.name
)
def test_modules_and_models_name_no_mechanism(path):
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    assert not MECHANISMS.keys() & {node.value for node in tree if isinstance(node, ast.Constant)}


def test_every_folder_has_a_rule_and_a_docstring_of_one_sentence():
    folders = [path.parent for path in PACKAGE.glob("*/__init__.py")]
    assert {folder.name for folder in folders} == SEES.keys() - {"errors", "spec", "cli", "__init__"}
    for folder in folders:
        sentence = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
        assert sentence and sentence.endswith(".") and "\n" not in sentence


def test_the_command_imports_nothing_heavy():
    code = f"import sys, fairseq_lot.cli; sys.exit(str([x for x in {HEAVY} if x in sys.modules] or ''))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=PACKAGE.parent).stderr.strip() == b""
