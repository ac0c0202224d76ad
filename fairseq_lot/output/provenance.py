"""The commit that made a result."""

import subprocess
from pathlib import Path

# Changes to other files, such as README.md or results, do not change scores.
_CODE = ("fairseq_lot", "fairseq_lot_compat.*", "benchmarks/*.py", "scripts", "workflow", "setup.py", "constraints.txt")


def current_commit(folder: str | Path | None = None) -> str:
    """The short commit of this code, with ``-dirty`` if the code has uncommitted changes.

    Args:
        folder: the root of the checkout; default: the folder that contains this package.

    Returns:
        The commit; ``unknown`` outside of a checkout, or when installed inside another project's checkout.
    """
    root = Path(__file__).resolve().parents[2] if folder is None else Path(folder).resolve()
    commit = _git(root, "rev-parse", "--short", "HEAD") if (root / ".git").exists() else None
    if not commit:
        return "unknown"
    return f"{commit}-dirty" if _git(root, "status", "--porcelain", "--", *_CODE) else commit


def _git(folder: Path, *words: str) -> str | None:
    """The output of git; None if git is missing or fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
