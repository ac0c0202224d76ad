"""The scores that the papers report, beside measured ones."""

from collections.abc import Iterable

from fairseq_lot.evaluation.medians import NOTE, by_seed, measured
from fairseq_lot.evaluation.results import FINE_TUNED, PLUG_AND_PLAY, Row
from fairseq_lot.evaluation.systems import by_system, label, table_order
from fairseq_lot.output.tables import MISSING, Table

# Tokenised BLEU on IWSLT'14 De-En, medians of 4 runs [ESPFormer, LOTFormer]. What stands beside esp is measured with
# Table 12's values, in the units of the released modules.
REPORTED = {
    ("transformer", "softmax"): {PLUG_AND_PLAY: 33.40, FINE_TUNED: 34.61},
    ("transformer", "sinkhorn"): {PLUG_AND_PLAY: 33.36, FINE_TUNED: 34.61},
    ("transformer", "esp"): {PLUG_AND_PLAY: 33.38, FINE_TUNED: 34.64},
    ("transformer", "lot"): {PLUG_AND_PLAY: 33.29, FINE_TUNED: 34.72},
    ("diff_transformer", "softmax"): {PLUG_AND_PLAY: 33.85, FINE_TUNED: 34.78},
    ("diff_transformer", "sinkhorn"): {PLUG_AND_PLAY: 33.67, FINE_TUNED: 34.81},
    ("diff_transformer", "esp"): {PLUG_AND_PLAY: 33.72, FINE_TUNED: 34.83},
    ("diff_transformer", "lot"): {PLUG_AND_PLAY: 33.42, FINE_TUNED: 34.91},
}


def beside_papers(rows: Iterable[Row], heading: str) -> Table:
    """Return the reported scores and the medians of the rows, with differences to softmax.

    Args:
        rows: of one dataset and size; their tokenised BLEU is shown.
        heading: of the table.
    """
    systems = by_system(rows)
    unmeasured = [(*pair, "") for pair in REPORTED if not any(key[:2] == pair for key in systems)]
    keys = sorted([*systems, *unmeasured], key=table_order)
    lines = []
    for key in keys:
        backbone, mechanism, options = key
        alone = sum(other[:2] == key[:2] for other in keys) == 1
        reported = REPORTED.get(key[:2]) if alone or not options else None  # the papers' settings are the defaults
        softmax = REPORTED.get((backbone, "softmax"))
        own, control = systems.get(key, []), systems.get((backbone, "softmax", ""), [])
        cells = [
            cell
            for stage in (PLUG_AND_PLAY, FINE_TUNED)
            for cell in (_reported(reported, softmax, stage), measured(by_seed(own, stage), by_seed(control, stage)))
        ]
        lines.append([backbone, label(key, keys), *cells])
    return Table(
        ["Backbone", "Mechanism", "Papers: plug-and-play", "Here", "Papers: fine-tuned", "Here"],
        lines,
        heading=heading,
        notes=[
            "Papers: IWSLT'14 De-En, 6+6 layers of width 512, 25 + 10 epochs, medians of 4 runs "
            "[ESPFormer, LOTFormer].",
            NOTE,
        ],
    )


def _reported(scores, softmax, stage):
    if scores is None:
        return MISSING
    if scores is softmax:
        return f"{scores[stage]:.2f}"
    return f"{scores[stage]:.2f} ({scores[stage] - softmax[stage]:+.2f})"
