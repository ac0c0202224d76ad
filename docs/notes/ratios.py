"""How many times faster or smaller one contender of benchmarks/ is than another.

for name in readme layer convolution prior model lengths; do
    python docs/notes/ratios.py $name >benchmarks/ratios/$name.md
done
"""

import csv
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
# by name: head of the first column, lengths, and in each row its title, the folder, what was measured of which two
TABLES = {
    "readme": (
        "softmax's time ÷ its time, by tokens",
        (32, 2048),
        [
            ("a layer of near_far, forward", "near_far", FORWARD, "sdpa", NEAR_FAR),
            ("a layer of near_far, forward and backward", "near_far", BOTH, "sdpa", NEAR_FAR),
            ("a layer of LOT, forward", "near_far", FORWARD, "sdpa", LOT),
            ("a layer of LOT, forward and backward", "near_far", BOTH, "sdpa", LOT),
            ("a model with near_far, its encoder", "near_far_model", ENCODER, "softmax", IN_MODEL),
            ("a model with near_far, training step", "near_far_model", TRAINING, "softmax", IN_MODEL),
            ("a model with near_far, decoding step", "near_far_model", DECODING, "softmax", IN_MODEL),
        ],
    ),
    "layer": (
        "times, by tokens",
        (32, 128, 512, 2048, 8192),
        [
            ("forward: SDPA ÷ near_far, W = 4", "near_far", FORWARD, "sdpa", NARROW),
            ("forward: SDPA ÷ near_far, W = 8", "near_far", FORWARD, "sdpa", NEAR_FAR),
            ("forward: SDPA ÷ LOT", "near_far", FORWARD, "sdpa", LOT),
            ("forward + backward: SDPA ÷ near_far, W = 4", "near_far", BOTH, "sdpa", NARROW),
            ("forward + backward: SDPA ÷ near_far, W = 8", "near_far", BOTH, "sdpa", NEAR_FAR),
            ("forward + backward: SDPA ÷ LOT", "near_far", BOTH, "sdpa", LOT),
        ],
    ),
    "convolution": (
        "times, by tokens",
        (32, 128, 512, 2048),
        [
            (f"{way}: {title}", "lot_conv", key, over, under)
            for way, key in (("forward", FORWARD), ("forward + backward", BOTH))
            for title, over, under in (
                ("SDPA ÷ LOT with convolution", "sdpa", CONVOLUTION),
                ("near_far ÷ LOT with convolution", NEAR_FAR, CONVOLUTION),
                ("LOT with convolution ÷ LOT", CONVOLUTION, LOT),
            )
        ],
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
    "model": (
        "softmax ÷ near_far, by tokens",
        (32, 2048),
        [
            ("encoder", "near_far_model", ENCODER, "softmax", IN_MODEL),
            ("training step", "near_far_model", TRAINING, "softmax", IN_MODEL),
            ("decoding step, 32 tokens behind it", "near_far_model", DECODING, "softmax", IN_MODEL),
            ("peak memory of a training step", "near_far_model", MEMORY, "softmax", IN_MODEL),
        ],
    ),
    "lengths": (
        "times with r = 32, by tokens",
        (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
        [
            (f"{way}: {title}", "lengths", key, over, under)
            for way, key in (("forward", FORWARD), ("forward + backward", BOTH))
            for title, over, under in (
                ("released ÷ LOT", "released r=32", LOT),
                ("SDPA ÷ LOT", "sdpa", LOT),
                ("LOT ÷ products", LOT, "products alone r=32"),
            )
        ],
    ),
}


def figures(folder: str) -> dict[tuple[str, int], dict[str, str]]:
    """The lines of a benchmark by contender and length."""
    with (BENCHMARKS / folder / "bench.csv").open(encoding="utf-8") as file:
        next(file)  # what the figures depend on
        return {(line["contender"], int(line["length"])): line for line in csv.DictReader(file)}


def table(name: str) -> str:
    """One of the tables."""
    head, lengths, described = TABLES[name]
    rows = []
    for title, folder, key, over, under in described:
        found = figures(folder)
        ratios = (float(found[over, length][key]) / float(found[under, length][key]) for length in lengths)
        rows.append([title, *(f"{ratio:.2g}" if ratio < 100 else f"{ratio:.0f}" for ratio in ratios)])
    return Table([head, *(f"{length:,}" for length in lengths)], rows, align="<" + ">" * len(lengths)).markdown()


if __name__ == "__main__":
    print(table(sys.argv[1]))
