"""Speed and memory of fairseq-train and fairseq-generate on documents, for several models in turns.

python results/log/documents_speed.py data-bin/documents softmax=BASE 'near_far=checkpoints/documents/...' >FILE.md

Run it on an idle machine. A folder of a training has ``flags`` and ``checkpoint_best.pt`` from scripts/pretrain.sh.
"""

import argparse
import os
import re
import shlex
import statistics
import subprocess
import tempfile
from pathlib import Path

from fairseq_lot.output.tables import Table

TRAIN = "bash scripts/pretrain.sh {data} {out} {flags} --no-save --disable-validation --log-interval 20 --max-update 40"
GENERATE = (
    "fairseq-generate {data} --user-dir fairseq_lot --path {path} --gen-subset {subset} --beam 5 --batch-size 128"
)
SUBSETS = {"test2": "16 sentences", "test3": "up to 1,000 pieces"}


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
    """Measure all models in turns, then print medians, with ratios to the first model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("trainings", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    folders = dict(training.split("=", 1) for training in args.trainings)
    found = {}
    for _ in range(args.turns):
        for name, folder in folders.items():
            flags, path = Path(folder, "flags").read_text().strip(), shlex.quote(f"{folder}/checkpoint_best.pt")
            with tempfile.TemporaryDirectory() as out:
                training = TRAIN.format(data=args.data, out=out, flags=flags)
                found.setdefault((name, "training"), []).append(measured(training, r"wps=([0-9.]+)"))
            for subset, title in SUBSETS.items():
                command = GENERATE.format(data=args.data, path=path, subset=subset)
                found.setdefault((name, title), []).append(measured(command, r", ([0-9.]+) tokens/s"))
    rows = []
    for name in folders:
        cells = []
        for title in ("training", *SUBSETS.values()):
            speeds, peaks = zip(*found[name, title], strict=True)
            others = [speed for speed, _ in found[next(iter(folders)), title]]
            ratio = statistics.median(ours / theirs for ours, theirs in zip(speeds, others, strict=True))
            cells += [f"{statistics.median(speeds):.0f} ({ratio:.2f})", f"{statistics.median(peaks):.0f}"]
        rows.append([name, *cells])
    titles = ("training", *(f"translating {title}" for title in SUBSETS.values()))
    head = ["Attention", *(f"{title}, {unit}" for title in titles for unit in ("tokens/s", "MiB"))]
    notes = [
        f"Turns: {args.turns} (medians). In brackets: of the first model's in the same turn. MiB: peak of the process."
    ]
    print(Table(head, rows, notes=notes, align="<" + ">" * (len(head) - 1)).markdown())


if __name__ == "__main__":
    main()
