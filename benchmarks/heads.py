"""``python -m benchmarks.heads``: describe each encoder head, with the cost of swapping this head alone.

The description of a head is the mass of its attention on keys at most W tokens away, its entropy and its effective
rank. The cost is the change of the validation loss if a mechanism, calibrated without data, replaces softmax in this
head alone. Results are written to ``heads.jsonl``, ``heads.md`` and ``heads.svg``; another call adds to
``heads.jsonl``.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from fairseq_lot import calibrate
from fairseq_lot.attention.base import AttentionOutput, Masks, Mechanism
from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.inspection.capture import capture
from fairseq_lot.modules.sites import attentions
from fairseq_lot.output.figures import write_figure
from fairseq_lot.output.files import atomic_write
from fairseq_lot.output.provenance import current_commit
from fairseq_lot.output.tables import Table
from fairseq_lot.plug_and_play.swap import swap_as_drawn
from fairseq_lot.plug_and_play.sweep import read_base, total, validation_losses
from fairseq_lot.pretrained.loading import Loaded, load
from fairseq_lot.transport import diagnostics

WINDOWS = (1, 2, 4, 8)
MECHANISMS = ("lot", "near_far")


class OneHead(Mechanism):
    """A mechanism in one head with softmax in all other heads."""

    def __init__(self, mechanism: Mechanism, head: int):
        super().__init__(num_heads=mechanism.num_heads, head_dim=mechanism.head_dim, options=mechanism.options)
        self.swapped, self.head = mechanism, head
        self.softmax = build_mechanism("softmax", num_heads=self.num_heads, head_dim=self.head_dim)

    def attend(self, q, k, v, masks: Masks, need_weights) -> AttentionOutput:
        given = q, k, v, masks, need_weights
        values = self.softmax.attend(*given).values.clone()
        values[:, self.head] = self.swapped.attend(*given).values[:, self.head]
        return AttentionOutput(values)


def main() -> None:
    """Measure the checkpoints that are not in the file yet, then write the table and the figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heads", description=__doc__.split("\n")[0])
    parser.add_argument("data", metavar="DATA", help="folder made by fairseq-preprocess")
    parser.add_argument("--path", required=True, nargs="+", metavar="BASE.pt", help="checkpoints of one training")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="folder for heads.jsonl, heads.md and heads.svg"
    )
    text = "validation sentences of the loss (default: %(default)s)"
    parser.add_argument("--sentences", type=int, default=400, metavar="N", help=text)
    args = parser.parse_args()
    file = args.out / "heads.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for path in args.path:
        base = read_base(path)
        if base.way.options:
            raise InputError(f"{path} has softmax with a prior; give a base of plain softmax")
        if any((row["base"], row["sentences"]) == (base.sum, args.sentences) for row in rows):
            continue
        if any(row["epoch"] == base.epoch or row["sentences"] != args.sentences for row in rows):
            reason = f"{file} was made with other --sentences or with another base of epoch {base.epoch}"
            raise InputError(f"{reason}; give another --out")
        settings = {"epoch": base.epoch, "base": base.sum, "sentences": args.sentences, "commit": current_commit()}
        rows += [settings | row for row in measure(path, args.data, args.sentences)]
        args.out.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)
    rows.sort(key=lambda row: (row["epoch"], row["layer"], row["head"]))
    with atomic_write(args.out / "heads.md") as lines:
        lines.write(render(rows) + "\n")
    write_figure(draw(rows), args.out / "heads.svg")
    print(render(rows))


@torch.no_grad()
def measure(path: str, data: str, sentences: int) -> list[dict[str, Any]]:
    """A row for each head of the encoder."""
    teacher = load(path, data, "valid")
    rows = descriptions(teacher)
    softmax = total(validation_losses(teacher, sentences).values()).mean
    for name in MECHANISMS:
        with torch.enable_grad():
            state = calibrate(swap_as_drawn(path, attention=name)).state
        swapped = load(state, data, "valid")
        encoder = [attention for site, _, attention in attentions(swapped.model) if site == "encoder"]
        fitted = [attention.mechanism for attention in encoder]
        for row in tqdm(rows, desc=name, unit="head"):
            for layer, attention in enumerate(encoder):
                one = OneHead(fitted[layer], row["head"])
                attention.mechanism = one if layer == row["layer"] else one.softmax
            row[name] = total(validation_losses(swapped, sentences).values()).mean - softmax
    return rows


def descriptions(loaded: Loaded, sentences: int = 64) -> list[dict[str, Any]]:
    """Mass near the diagonal, entropy and effective rank of each encoder head, as means over sentences."""
    found: dict[int, list[torch.Tensor]] = {}
    with capture(loaded.model) as seen:
        for index in loaded.draw(sentences, 1)[0]:
            loaded.model(**loaded.batch([index])["net_input"])
        for attention in seen:
            if attention.site == "encoder":
                weights = attention.weights.double()
                slots = torch.arange(weights.size(-1))
                distance = (slots[:, None] - slots).abs()
                mass = [(weights * (distance <= w)).sum(-1).mean(-1) for w in WINDOWS]
                rest = [diagnostics.row_entropy(weights), diagnostics.effective_rank(weights)]
                found.setdefault(attention.layer, []).append(torch.stack([*mass, *rest], -1)[0])
    names = [*(f"mass_{w}" for w in WINDOWS), "entropy", "effective_rank"]
    return [
        {"layer": layer, "head": head, **dict(zip(names, figures, strict=True))}
        for layer, of_sentences in found.items()
        for head, figures in enumerate(torch.stack(of_sentences).mean(0).tolist())
    ]


def render(rows: list[dict]) -> str:
    """A Markdown table: for each checkpoint the two heads of lowest entropy, then all other heads in one row."""
    head = ["Epoch", "Layer", "Head", "Entropy", "Eff. rank", *(f"Mass, W = {w}" for w in WINDOWS), *MECHANISMS]
    formats = {"entropy": ".2f", "effective_rank": ".1f"} | {f"mass_{w}": ".2f" for w in WINDOWS}
    cells = []
    for epoch in dict.fromkeys(row["epoch"] for row in rows):
        first, second, *others = sorted((row for row in rows if row["epoch"] == epoch), key=lambda row: row["entropy"])
        for row in (first, second):
            figures = [f"{row[name]:{how}}" for name, how in formats.items()]
            cells.append([epoch, row["layer"], row["head"], *figures, *(f"{row[name]:+.4f}" for name in MECHANISMS)])
        figures = [f"{fmean(row[name] for row in others):{how}}" for name, how in formats.items()]
        sums = [f"{sum(row[name] for row in others):+.4f}" for name in MECHANISMS]
        cells.append([epoch, f"the other {len(others)}", "", *figures, *sums])
    notes = [
        "Mass: of softmax, within |i - j| ≤ W, a mean over 64 validation sentences; likewise entropy and rank.",
        f"The last columns: nats of validation loss ({rows[0]['sentences']} sentences) where the mechanism, calibrated "
        "without data, stands in this head alone. Of the other heads: means of the former, sums of the latter.",
        f"Commit: {', '.join(dict.fromkeys(row['commit'] for row in rows))}.",
    ]
    return Table(head, cells, notes=notes).markdown()


def draw(rows: list[dict]) -> Figure:
    """A figure: the cost of swapping a head against the head's mass near the diagonal."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(MECHANISMS), sharex=True, sharey=True)
    for panel, name in zip(panels, MECHANISMS, strict=True):
        points = panel.scatter(
            [row["mass_4"] for row in rows], [row[name] for row in rows], c=[row["epoch"] for row in rows], s=18
        )
        panel.set(title=name, xlabel="mass of softmax within |i - j| ≤ 4")
        panel.axhline(0, color="grey", linewidth=0.5)
    panels[0].set_ylabel("cost of a swap of this head (nats)")
    figure.colorbar(points, ax=panels, label="epochs of the base")
    return figure


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"python -m benchmarks.heads: error: {error}", file=sys.stderr)
        sys.exit(2)
