"""Speed and memory of fairseq-train and fairseq-generate by length of the documents, for several checkpoints in turns.

python results/log/documents_speed.py data-bin/libreoffice-chapters 'test2=1,024' 'test3=2,048' 'test4=4,095' \\
    --checkpoints softmax=BASE.pt near_far=SWAPPED.pt >results/libreoffice.speed.md

Prints a table, in which the splits have the titles behind "=". Run it on an idle machine. Ten updates of fine-tuning
are made on a split, then its longest documents are translated one by one. Commands run on the CPU, with the threads
that OMP_NUM_THREADS says.
"""

import argparse
import os
import re
import shlex
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from fairseq.data import indexed_dataset

from fairseq_lot.output.tables import Table

TRAIN = (
    "bash scripts/finetune.sh {path} {data} {out} --train-subset {split} --disable-validation --no-save --cpu"
    " --max-tokens 4096 --log-interval 5 --max-update 10"
)
GENERATE = (
    "fairseq-generate {data} --user-dir fairseq_lot --path {path} --gen-subset {split} --cpu --beam 5 --batch-size 1"
    " --max-len-a 1.2 --max-len-b 50 --max-source-positions 4096 --max-target-positions 4096"
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


def write_longest(data, split, count, out):
    """Write a data folder whose split has the longest documents alone."""
    dictionaries = list(Path(data).glob("dict.*.txt"))
    sides = [next(Path(data).glob(f"{split}.*.{path.suffixes[0][1:]}.idx")) for path in dictionaries]
    sources = [indexed_dataset.make_dataset(str(side.with_suffix("")), "mmap") for side in sides]
    chosen = sorted(range(len(sources[0])), key=lambda i: -sum(source.sizes[i] for source in sources))[:count]
    for path in dictionaries:
        shutil.copy(path, out)
    for side, source in zip(sides, sources, strict=True):
        copy = Path(out, side.stem)
        builder = indexed_dataset.make_builder(f"{copy}.bin", "mmap", vocab_size=2**15)
        for i in chosen:
            builder.add_item(source[i])
        builder.finalize(f"{copy}.idx")


def main():
    """Measure all checkpoints in turns, then print medians, with ratios to the first checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("splits", nargs="+", metavar="SPLIT=TITLE")
    parser.add_argument("--checkpoints", nargs="+", metavar="NAME=FILE", required=True)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--documents", type=int, default=2, help="of each split so many are translated")
    args = parser.parse_args()
    paths = dict(checkpoint.split("=", 1) for checkpoint in args.checkpoints)
    splits = dict(split.split("=", 1) for split in args.splits)
    found = {}
    for _ in range(args.turns):
        for split in splits:
            for name, path in paths.items():
                values = {"path": shlex.quote(path), "split": split}
                with tempfile.TemporaryDirectory() as out:
                    training = measured(TRAIN.format(data=args.data, out=out, **values), r"wps=([0-9.]+)")
                with tempfile.TemporaryDirectory() as few:
                    write_longest(args.data, split, args.documents, few)
                    translating = measured(GENERATE.format(data=few, **values), r", ([0-9.]+) tokens/s")
                for work, result in (("training", training), ("translating", translating)):
                    found.setdefault((name, split, work), []).append(result)
    rows = []
    for split in splits:
        for name in paths:
            cells = []
            for work in ("training", "translating"):
                speeds, peaks = zip(*found[name, split, work], strict=True)
                others = [speed for speed, _ in found[next(iter(paths)), split, work]]
                ratio = statistics.median(ours / theirs for ours, theirs in zip(speeds, others, strict=True))
                cells += [f"{statistics.median(speeds):.0f}", f"{ratio:.2f}", f"{statistics.median(peaks):.0f}"]
            rows.append([splits[split], name, *cells])
    columns = ("tokens/s", "÷ the first", "MiB")
    head = [
        "pieces, up to",
        "attention",
        *(f"{work}, {column}" for work in ("training", "translating") for column in columns),
    ]
    notes = [f"Turns: {args.turns} (medians); {args.documents} documents each. MiB: peak of the process."]
    print(Table(head, rows, notes=notes, align="<<" + ">" * (len(head) - 2)).markdown())


if __name__ == "__main__":
    main()
