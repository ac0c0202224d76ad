"""``python -m benchmarks costs``: what LOT's layer should take on an H100, from what it took before tokens were split.

At 512 and 2,048 tokens a processor of the H100 had one program at most, so the difference of these two times is that of
96 blocks of 16 tokens in every pass: the time of a block in a pass. A launch within a CUDA graph is taken to be 2.5 µs,
a processor to run two programs at once as fast as one. What remains of the time at 512 tokens is the harness's, as it
is for torch's attention. The model is good for a factor of 1.5; nothing of it has been measured.
"""

import csv
from argparse import Namespace
from pathlib import Path

from fairseq_lot import cli
from fairseq_lot.kernels.launch import LOT_PART, PER_PROCESSOR, num_parts
from fairseq_lot.output.tables import Table

NAME = "python -m benchmarks costs"
FOLDER = Path(__file__).with_name("h100_graphs")
TOKENS, HEADS, PROCESSORS, BLOCK, LAUNCH, AT_ONCE = 8192, 4, 132, 16, 2.5e-6, 2
#: launches of five updates on either side; where tokens are split merges, sums and counters are among them
WHOLE, SPLIT = {"forward": 2, "both": 4}, {"forward": 6, "both": 17}


def measured(name: str, contender: str) -> dict[int, dict[str, float]]:
    """Seconds of a contender by length and direction."""
    lines = (FOLDER / name / "bench.csv").read_text(encoding="utf-8").splitlines()[1:]
    rows = [row for row in csv.DictReader(lines) if row["contender"] == contender]
    keys = {"forward": "forward_seconds", "both": "forward_backward_seconds"}
    return {int(row["length"]): {way: float(row[key]) for way, key in keys.items()} for row in rows}


def predicted(n: int, way: str, before: dict[int, dict[str, float]]) -> tuple[int, int, float]:
    """Programs of a launch, launches and seconds for sentences of n tokens."""
    slope = (before[2048][way] - before[512][way]) / ((2048 - 512) // BLOCK)  # of a block in all passes
    harness = before[512][way] - 512 // BLOCK * slope
    rows = HEADS * max(1, TOKENS // n)
    parts, length = num_parts(rows, n, LOT_PART, PROCESSORS, PER_PROCESSOR)
    turns = max(1.0, rows * parts / (PROCESSORS * AT_ONCE))
    launches = (SPLIT if parts > 1 else WHOLE)[way]
    seconds = harness + launches * LAUNCH + turns * -(-length // BLOCK) * slope
    return rows * parts, launches, seconds


def build_parser() -> cli.OneLineParser:
    """The options of the command."""
    parser = cli.OneLineParser(prog=NAME, description=__doc__)
    parser.set_defaults(run=run)
    return parser


def run(args: Namespace) -> None:
    """Print the table."""
    before, softmax = measured("lot", "lot r=32"), measured("softmax", "sdpa")
    rows = []
    for way in ("forward", "both"):
        for n in (512, 2048, 8192):
            programs, launches, seconds = predicted(n, way, before)
            times = [f"{1e3 * x:.2f}" for x in (softmax[n][way], before[n][way], seconds)]
            rows.append([way, n, programs, launches, *times, f"{softmax[n][way] / seconds:.2f}"])
    head = ["", "n", "programs", "launches", "SDPA, ms", "LOT before", "LOT, predicted", "SDPA ÷ predicted"]
    print(Table(head, rows, align="<>>>>>>>").markdown())
