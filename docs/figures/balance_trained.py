"""How far trained systems are ahead of softmax in BLEU, against how evenly their heads treat the keys.

python docs/figures/balance_trained.py
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

from fairseq_lot.evaluation.results import read_rows
from fairseq_lot.experiment.spec import BASE, FINE_TUNED, FROM_SCRATCH
from fairseq_lot.output.figures import write_figure

RESULTS = Path(__file__).resolve().parents[2] / "results"
# title, rows, their stage, that of softmax, and how the files of their heads begin
PANELS = (
    ("From scratch, 16 epochs", "iwslt14-65k.from-scratch.16-epochs", FROM_SCRATCH, BASE, "16 epochs, "),
    ("Base of 16 epochs, fine-tuned for 10", "iwslt14-65k.fine-tuning", FINE_TUNED, FINE_TUNED, "16 + 10 epochs, "),
)
CONTROL, MARKERS = "softmax", {1: "o", 2: "s"}


def imbalance(name):
    """Δ(A), the mean over the heads of the encoder."""
    heads = json.loads((RESULTS / "iwslt14-65k.small.heads" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    found = [head["imbalance"] for head in heads if head["site"] == "encoder"]
    return sum(found) / len(found)


def draw():
    """A mark for each training, its form by the seed, its colour by the system."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    styles = {}
    for axes, (title, file, stage, stage_of_control, begin) in zip(figure.subplots(1, 2), PANELS, strict=True):
        rows = read_rows([RESULTS / f"{file}.jsonl"])
        control = {
            row.seed: row.tokenised.score for row in rows if (row.system, row.stage) == (CONTROL, stage_of_control)
        }
        for row in (row for row in rows if row.stage == stage and row.system != CONTROL):
            name, colour = row.system.removesuffix(" from scratch"), f"C{len(styles) % 10}"
            face = colour if len(styles) < 10 else "white"
            style = styles.setdefault(name, {"color": colour, "markerfacecolor": face})
            of_seed = f"seed {row.seed}, " if row.seed > 1 else ""
            gain = row.tokenised.score - control[row.seed]
            axes.plot(imbalance(f"{begin}{of_seed}{row.system}"), gain, MARKERS[row.seed], **style)
        axes.axhline(0, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(title)
        axes.set_xscale("symlog", linthresh=0.1)
        axes.set_xlim(0, 8)
        axes.set_xlabel("Δ(A), mean over the heads of the encoder: 0 is balanced")
        axes.set_ylabel("BLEU minus softmax's, same seed")
        axes.spines[["top", "right"]].set_visible(False)
    for name, style in styles.items():
        axes.plot([], [], "o", label=name, **style)
    for seed, marker in MARKERS.items():
        axes.plot([], [], marker, color="0.5", label=f"seed {seed}")
    figure.legend(loc="outside right center", fontsize="small", frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=Path(__file__).with_suffix(".svg"), type=Path)
    write_figure(draw(), parser.parse_args().out)


if __name__ == "__main__":
    main()
