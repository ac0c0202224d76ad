"""Speed and memory of fairseq-train and fairseq-generate by length of the documents, for several checkpoints in turns.

python results/log/documents_speed.py data-bin/libreoffice-chapters test1 test2 test3 \\
    --checkpoints softmax=BASE.pt near_far=SWAPPED.pt

Prints a table. Run it on an idle machine. A split is used for both: ten updates of fine-tuning on it, then a part of
it is translated, one document at a time. Commands run on the CPU, with the threads that OMP_NUM_THREADS says.
"""

import argparse
import os
import re
import shlex
import statistics
import subprocess
import tempfile

from fairseq_lot.output.tables import Table

TRAIN = (
    "bash scripts/finetune.sh {path} {data} {out} --train-subset {split} --disable-validation --no-save --cpu"
    " --max-tokens 4096 --log-interval 5 --max-update 10"
)
GENERATE = (
    "fairseq-generate {data} --user-dir fairseq_lot --path {path} --gen-subset {split} --cpu --beam 5 --batch-size 1"
    " --max-len-a 1.2 --max-len-b 50 --max-source-positions 4096 --max-target-positions 4096 --num-shards {shards}"
    " --shard-id 0"
)


def measured(command, pattern):
    """The last number that ``pattern`` finds in a command's log, with the command's peak memory in MiB."""
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(shlex.split(command), stdout=log, stderr=log)
        _, status, usage = os.wait4(child.pid, 0)
        log.seek(0)
        text = log.read()
    if status:
        raise SystemExit(f"{command} failed: {text.splitlines()[-1]}")
    return float(re.findall(pattern, text)[-1]), usage.ru_maxrss / 1024


def main():
    """Measure all checkpoints in turns, then print medians, with ratios to the first checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("splits", nargs="+", metavar="SPLIT")
    parser.add_argument("--checkpoints", nargs="+", metavar="NAME=FILE", required=True)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--shards", type=int, default=16, help="1 of so many parts of a split is translated")
    args = parser.parse_args()
    paths = dict(checkpoint.split("=", 1) for checkpoint in args.checkpoints)
    found = {}
    for _ in range(args.turns):
        for split in args.splits:
            for name, path in paths.items():
                values = {"data": args.data, "path": shlex.quote(path), "split": split, "shards": args.shards}
                with tempfile.TemporaryDirectory() as out:
                    training = measured(TRAIN.format(out=out, **values), r"wps=([0-9.]+)")
                translating = measured(GENERATE.format(**values), r", ([0-9.]+) tokens/s")
                for work, result in (("training", training), ("translating", translating)):
                    found.setdefault((name, split, work), []).append(result)
    rows = []
    for split in args.splits:
        for name in paths:
            cells = []
            for work in ("training", "translating"):
                speeds, peaks = zip(*found[name, split, work], strict=True)
                others = [speed for speed, _ in found[next(iter(paths)), split, work]]
                ratio = statistics.median(ours / theirs for ours, theirs in zip(speeds, others, strict=True))
                cells += [f"{statistics.median(speeds):.0f}", f"{ratio:.2f}", f"{statistics.median(peaks):.0f}"]
            rows.append([split, name, *cells])
    columns = ("tokens/s", "÷ the first", "MiB")
    head = ["split", "attention", *(f"{work}, {column}" for work in ("training", "translating") for column in columns)]
    notes = [f"Turns: {args.turns} (medians). MiB: peak of the process."]
    print(Table(head, rows, notes=notes, align="<<" + ">" * (len(head) - 2)).markdown())


if __name__ == "__main__":
    main()
