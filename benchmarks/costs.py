"""``python -m benchmarks costs``: predict how long layers with the new kernels take on an H100, without measuring them.

A batch has 8,192 tokens, or one longer sentence, with 4 heads of 64, in fp16; layers run from CUDA graphs. Two times
are measured: softmax's time, and the benchmark's overhead. The overhead is softmax's time at 32 tokens, where its
kernel does almost nothing. A launch in a graph is assumed to take 2.5 µs. Where softmax was not measured (≈), its time
is on the line through 2,048 and 8,192 tokens, since its work at a fixed number of tokens grows with the length.

LOT: expect errors of up to a factor of 1.5. Before tokens were split, each multiprocessor ran at most one program, both
at 512 and at 2,048 tokens. The difference of these two times is therefore the time of 96 blocks of 16 tokens in all
passes, which gives the time of one block. Two programs at once on a multiprocessor are assumed to take as long as one.

near_far and Sinkhorn: expect errors of up to a factor of 1.5 to 2. The prediction counts operations and bytes of the
kernels. Assumed speeds: products 400 TFLOP/s in half precision and 200 in TF32, powers 3.5 T/s, other operations
20 T/s, memory 4.5 TB/s (the level-2 cache). Products, other work and memory overlap: the slowest counts in full, the
other two count half.
"""

import csv
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from fairseq_lot import cli
from fairseq_lot.kernels.launch import LOT_PART, PER_PROCESSOR, num_parts
from fairseq_lot.output.tables import Table

NAME = "python -m benchmarks costs"
FOLDER = Path(__file__).with_name("h100_graphs")
TOKENS, HEADS, WIDTH, FEATURES, PROCESSORS, LAUNCH = 8192, 4, 64, 32, 132, 2.5e-6
LENGTHS = 512, 1024, 2048, 8192, 32768
WAYS = {"forward": "forward_seconds", "both": "forward_backward_seconds"}
#: LOT: tokens in a block, programs that a multiprocessor runs at once
BLOCK, AT_ONCE = 16, 2
#: LOT: launches for five updates on each side; SPLIT, with tokens split, includes merges, sums and counters
WHOLE, SPLIT = {"forward": 2, "both": 4}, {"forward": 6, "both": 17}
#: near_far: keys in a chunk, keys in a tile
CHUNK, TILE = 64, 32
HALF, TF32, POWERS, OTHER, BYTES = 400e12, 200e12, 3.5e12, 20e12, 4.5e12  # per second
TENSOR = 2 * TOKENS * HEADS * WIDTH  # bytes of q, k, v or the output


@dataclass(frozen=True)
class Work:
    """Operations and bytes of all launches of one direction.

    Attributes:
        launches: number of launches.
        half, tf32: floating-point operations of products, by precision.
        powers, other: exponentials; operations that are neither products nor exponentials.
        moved: bytes read and written.
    """

    launches: int
    half: float
    tf32: float
    powers: float
    other: float
    moved: float

    @property
    def seconds(self) -> float:
        """The time of these launches in a CUDA graph."""
        parts = [self.half / HALF + self.tf32 / TF32, self.powers / POWERS + self.other / OTHER, self.moved / BYTES]
        return self.launches * LAUNCH + (max(parts) + sum(parts)) / 2


def near_far(n: int) -> dict[str, Work]:
    """The work of near_far's kernels on sentences of n > 128 tokens, forward and backward, in the encoder."""
    rows, tensor = HEADS * max(1, TOKENS // n), TENSOR * max(TOKENS, n) // TOKENS
    chunks, blocks = -(-n // CHUNK), -(-(n + CHUNK // 2) // CHUNK)
    met = 2 * CHUNK  # keys that a block of queries reads one by one
    pairs = rows * blocks * CHUNK * met
    logs = rows * blocks * CHUNK * FEATURES * WIDTH * 2  # operations for the logs of the features of queries or of keys
    merged = rows * blocks * chunks * FEATURES * WIDTH * 2
    sums = rows * chunks * (FEATURES * WIDTH + 2 * FEATURES) * 4  # bytes of the sums of all chunks
    of_sums = rows * chunks * CHUNK * FEATURES
    of_blocks = rows * blocks * (met * FEATURES + CHUNK * FEATURES * (1 + met // TILE))
    forward = Work(
        launches=3,
        half=3 * logs + pairs * 4 * WIDTH + of_sums * 4 * WIDTH,
        tf32=pairs * 2 * FEATURES + logs + merged,
        powers=(powers := pairs + of_blocks + of_sums),
        other=22 * pairs + 8 * powers,
        moved=(6 + met // CHUNK) * tensor + 4 * sums,
    )
    backward = Work(
        launches=4,
        half=11 * logs + pairs * 14 * WIDTH,
        tf32=3 * pairs * 2 * FEATURES + 3 * logs + merged,
        powers=(powers := 2 * (pairs + of_blocks)),
        other=45 * pairs + 8 * powers,
        moved=(9 + 4 * met // CHUNK) * tensor + 5 * sums + 8 * rows * (blocks + chunks) * FEATURES * WIDTH,
    )
    return {"forward": forward, "backward": backward}


def sinkhorn(n: int, updates: int) -> dict[str, Work]:
    """The work of Sinkhorn attention on sentences of n <= 128 tokens: one launch per direction, scores stay on chip."""
    pairs = HEADS * max(1, TOKENS // n) * n * n
    # a half-update reads every score: a maximum, a subtraction, a power, a sum
    forward = Work(1, pairs * 4 * WIDTH, 0, pairs * (updates + 1), pairs * 6 * updates, 4 * TENSOR)
    # the updates again, then two powers per update for its gradient
    backward = Work(1, pairs * 10 * WIDTH, 0, pairs * 3 * updates, pairs * 20 * updates, 8 * TENSOR)
    return {"forward": forward, "backward": backward}


def measured(name: str, contender: str) -> dict[int, dict[str, float]]:
    """Measured seconds of a contender, by length and direction."""
    lines = (FOLDER / name / "bench.csv").read_text(encoding="utf-8").splitlines()[1:]
    rows = [row for row in csv.DictReader(lines) if row["contender"] == contender]
    return {int(row["length"]): {way: float(row[key]) for way, key in WAYS.items()} for row in rows}


def softmax_seconds(n: int, way: str, softmax: dict[int, dict[str, float]]) -> float:
    """The measured time of softmax on sentences of n tokens, or the one on the line through two measured times."""
    if n in softmax:
        return softmax[n][way]
    slope = (softmax[8192][way] - softmax[2048][way]) / (8192 - 2048)
    return softmax[2048][way] + slope * (n * max(TOKENS, n) / TOKENS - 2048)


def predicted(n: int, way: str, before: dict[int, dict[str, float]]) -> tuple[int, int, float]:
    """Programs per launch, launches, and predicted seconds of LOT for sentences of n tokens."""
    slope = (before[2048][way] - before[512][way]) / ((2048 - 512) // BLOCK)  # seconds of one block in all passes
    harness = before[512][way] - 512 // BLOCK * slope
    rows = HEADS * max(1, TOKENS // n)
    parts, length = num_parts(rows, n, LOT_PART, PROCESSORS, PER_PROCESSOR)
    turns = max(1.0, rows * parts / (PROCESSORS * AT_ONCE))
    launches = (SPLIT if parts > 1 else WHOLE)[way]
    seconds = harness + launches * LAUNCH + turns * -(-length // BLOCK) * slope
    return rows * parts, launches, seconds


def counted(work: dict[str, Work], way: str, harness: dict[str, float]) -> tuple[int, float]:
    """Launches and predicted seconds of a layer, from the work of its kernels."""
    directions = [work["forward"]] if way == "forward" else list(work.values())
    return sum(one.launches for one in directions), harness[way] + sum(one.seconds for one in directions)


def build_parser() -> cli.OneLineParser:
    """The options of the command."""
    parser = cli.OneLineParser(prog=NAME, description=__doc__)
    parser.set_defaults(run=run)
    return parser


def run(args: Namespace) -> None:
    """Print the table."""
    before, softmax = measured("lot", "lot r=32"), measured("softmax", "sdpa")
    near_far_before = measured("near_far", "near_far r=32")
    lines = []

    def add(name: str, way: str, n: int, programs: int, launches: int, old: float | None, seconds: float) -> None:
        of_softmax = softmax_seconds(n, way, softmax)
        times = ["–" if x is None else f"{1e3 * x:.2f}" for x in (of_softmax, old, seconds)]
        times[0] = times[0] if n in softmax else f"≈ {times[0]}"
        lines.append([name, way, n, programs, launches, *times, f"{of_softmax / seconds:.2f}"])

    for way in WAYS:
        for n in LENGTHS:
            programs, launches, seconds = predicted(n, way, before)
            old = before[n][way] if n in before else None
            add("LOT", way, n, programs, launches, old, seconds)
    for way in WAYS:
        for n in LENGTHS[1:]:  # shorter sentences get softmax itself, by exact_up_to
            launches, seconds = counted(near_far(n), way, softmax[32])
            programs = HEADS * max(1, TOKENS // n) * (n // CHUNK + 1)
            old = near_far_before[n][way] if n in near_far_before else None
            add("near_far", way, n, programs, launches, old, seconds)
    for way in WAYS:
        launches, seconds = counted(sinkhorn(128, 15), way, softmax[32])
        add("Sinkhorn, 15 updates", way, 128, HEADS * TOKENS // 128, launches, None, seconds)
    head = ["", "", "n", "programs", "launches", "SDPA, ms", "before, ms", "predicted, ms", "SDPA ÷ predicted"]
    print(Table(head, lines, align="<<>>>>>>>").markdown())
