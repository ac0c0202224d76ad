"""Prints the tables of README.md and of pages in docs/ anew.

What stands between two comments is what the command in the first prints:

<!-- $ fairseq-lot table results/NAME.jsonl -->   or   <!-- $ cat FILE -->
<!-- / -->
"""

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path

from fairseq_lot.cli import main as fairseq_lot
from fairseq_lot.output.files import atomic_write

ROOT = Path(__file__).resolve().parents[1]
NOTES = ("notes/ablations.md", "notes/gpu.md", "notes/near_far.md")
NAMES = ("results.md", "performance.md", "sharp_heads.md", "results/*.md", *NOTES)
PAGES = [ROOT / "README.md", *sorted(page for name in NAMES for page in (ROOT / "docs").glob(name))]
BLOCK = re.compile(r"^<!-- \$ ([^\n]+) -->$.*?^<!-- / -->$", re.MULTILINE | re.DOTALL)


def rendered(page: str) -> str:
    """The text of a page with all of its tables printed anew."""
    return BLOCK.sub(lambda block: f"<!-- $ {block[1]} -->\n\n{printed(block[1])}\n\n<!-- / -->", page)


def printed(command: str) -> str:
    """What a command prints in the repository's root, without line ends around it."""
    program, *words = shlex.split(command)
    if program == "cat" and len(words) == 1:
        return Path(words[0]).read_text(encoding="utf-8").strip("\n")
    if program != "fairseq-lot":
        sys.exit(f"render_results.py: error: there is the command {command!r}; use fairseq-lot or cat FILE")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = fairseq_lot(words)
    if code:
        sys.exit(f"render_results.py: error: {command!r} failed, see above; nothing was changed")
    return output.getvalue().strip("\n")


def main() -> None:
    """Write the pages."""
    os.chdir(ROOT)
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = rendered(before)
        with atomic_write(page) as file:
            file.write(after)
        print(f"{page}: {'as its commands print it' if after == before else 'changed'}")


if __name__ == "__main__":
    main()
