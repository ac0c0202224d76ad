"""Tables of ratios: how many times faster or smaller one contender of benchmarks/ is than another.

for name in readme layer convolution prior model sentences lengths; do
    python results/log/ratios.py $name >benchmarks/ratios/$name.md
done
"""

import csv
import functools
import sys
from pathlib import Path

from fairseq_lot.output.tables import Table

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FORWARD, BOTH, MEMORY = "forward_seconds", "forward_backward_seconds", "peak_bytes"
ENCODER, TRAINING, DECODING = "encoder_seconds", "training_seconds", "decoding_seconds"
NEAR_FAR, NARROW, LOT = "near_far r=32", "near_far --near-far-window 4 r=32", "lot r=32"
CONVOLUTION = "lot --lot-conv-kernel 7 r=32"
IN_MODEL = "near_far --attention-sites encoder,decoder r=32"
ALIBI = "softmax --softmax-prior alibi", "near_far --near-far-prior alibi r=32"


def forward_and_both(folder, *pairs):
    """Rows of a table for the times of a layer: forward, then forward with backward."""
    ways = ("forward", FORWARD), ("forward + backward", BOTH)
    return [(f"{way}: {title}", folder, key, *two) for way, key in ways for title, *two in pairs]


MODEL = [
    (title, "near_far_model", key, "softmax", IN_MODEL)
    for title, key in (
        ("encoder", ENCODER),
        ("training step", TRAINING),
        ("decoding step, 32 tokens behind it", DECODING),
        ("peak memory of a training step", MEMORY),
    )
]
# by name: head of the first column, lengths, rows; a row is title, folder, figure, dividend, divisor
TABLES = {
    "readme": (
        "softmax's time ÷ its time, by tokens",
        (32, 2048),
        [
            ("a layer of near_far, forward + backward", "near_far", BOTH, "sdpa", NEAR_FAR),
            ("a layer of LOT, forward + backward", "near_far", BOTH, "sdpa", LOT),
            *((f"a model with near_far: {title}", *rest) for title, *rest in MODEL[1:3]),
        ],
    ),
    "layer": (
        "times, by tokens",
        (32, 128, 512, 2048, 8192),
        forward_and_both(
            "near_far",
            ("SDPA ÷ near_far, W = 4", "sdpa", NARROW),
            ("SDPA ÷ near_far, W = 8", "sdpa", NEAR_FAR),
            ("SDPA ÷ LOT", "sdpa", LOT),
        ),
    ),
    "convolution": (
        "times, by tokens",
        (32, 128, 512, 2048),
        forward_and_both(
            "lot_conv",
            ("SDPA ÷ LOT with convolution", "sdpa", CONVOLUTION),
            ("near_far ÷ LOT with convolution", NEAR_FAR, CONVOLUTION),
            ("LOT with convolution ÷ LOT", CONVOLUTION, LOT),
        ),
    ),
    "prior": (
        "softmax with ALiBi ÷ near_far with ALiBi, by tokens",
        (128, 512, 2048, 8192),
        [
            ("forward", "near_far_prior", FORWARD, *ALIBI),
            ("forward + backward", "near_far_prior", BOTH, *ALIBI),
            ("memory", "near_far_prior", MEMORY, *ALIBI),
        ],
    ),
    "model": ("softmax ÷ near_far, by tokens", (32, 2048), MODEL),
    "sentences": (
        "SDPA's time ÷ its time, by tokens",
        (30,),
        forward_and_both(
            "sentences", *((name, "sdpa", name) for name in ("sinkhorn", "set r=32", LOT, NEAR_FAR, "esp"))
        ),
    ),
    "lengths": (
        "times with r = 32, by tokens",
        (32, 128, 512, 2048, 8192),
        forward_and_both(
            "lengths",
            ("released ÷ LOT", "released r=32", LOT),
            ("SDPA ÷ LOT", "sdpa", LOT),
            ("LOT ÷ products", LOT, "products alone r=32"),
        ),
    ),
}


@functools.cache
def figures(folder: str) -> dict[tuple[str, int], dict[str, str]]:
    """The lines of a benchmark's bench.csv, by contender and length."""
    with (BENCHMARKS / folder / "bench.csv").open(encoding="utf-8") as file:
        next(file)  # the line that describes the benchmark
        return {(line["contender"], int(line["length"])): line for line in csv.DictReader(file)}


def table(name: str) -> str:
    """The table of this name."""
    head, lengths, described = TABLES[name]
    rows = []
    for title, folder, key, over, under in described:
        found = figures(folder)
        ratios = (float(found[over, length][key]) / float(found[under, length][key]) for length in lengths)
        rows.append([title, *(f"{ratio:.2g}" if ratio < 100 else f"{ratio:.0f}" for ratio in ratios)])
    return Table([head, *(f"{length:,}" for length in lengths)], rows, align="<" + ">" * len(lengths)).markdown()


if __name__ == "__main__":
    print(table(sys.argv[1]))
