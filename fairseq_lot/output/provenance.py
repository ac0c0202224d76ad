"""The commit that a result comes from."""

import subprocess
from pathlib import Path

# A change elsewhere, in a README or in the results themselves, does not change the scores.
_CODE = ("fairseq_lot", "fairseq_lot_compat.*", "benchmarks/*.py", "scripts", "workflow", "setup.py", "constraints.txt")


def current_commit(folder: str | Path | None = None) -> str:
    """Return the short commit of this code, with ``-dirty`` when the code has changes.

    Args:
        folder: the root of the checkout; by default the folder that holds this package.

    Returns:
        The commit, or ``unknown`` outside a checkout, also when installed inside that of another project.
    """
    root = Path(__file__).resolve().parents[2] if folder is None else Path(folder).resolve()
    commit = _git(root, "rev-parse", "--short", "HEAD") if (root / ".git").exists() else None
    if not commit:
        return "unknown"
    return f"{commit}-dirty" if _git(root, "status", "--porcelain", "--", *_CODE) else commit


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints, or None when git is missing or fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
