"""``fairseq-lot diagnose``: measure the attention of a model on real sentences, head by head."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from fairseq_lot.errors import check_least
from fairseq_lot.inspection import per_head
from fairseq_lot.inspection.capture import capture
from fairseq_lot.output.files import atomic_write, refuse_same
from fairseq_lot.output.tables import Table
from fairseq_lot.pretrained.data_folder import numbers
from fairseq_lot.pretrained.device import add_device_argument
from fairseq_lot.pretrained.languages import add_language_arguments, typed_pair
from fairseq_lot.pretrained.loading import Loaded, load

# entries of one head's plans in a batch: 64 sentences of 256 tokens, or one of 2,048
_ENTRIES = 2**22
# measures of how far the columns of a plan are from their marginal, and of what that does to the values
BALANCE = ("imbalance", "marginal_error", "mean_shift")
_SIDES = {"source": "src_tokens", "target": "prev_output_tokens"}
# site: sides of the queries and of the keys, in the order of the table
_SIDES_OF = {"encoder": ("source", "source"), "cross": ("target", "source"), "decoder": ("target", "target")}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("data", metavar="DATA", help="folder made by fairseq-preprocess")
    add("--path", required=True, metavar="CKPT.pt", help="checkpoint: ours or fairseq's transformer*")
    add("--split", default="valid", help="train, valid or test (default: %(default)s)")
    add("--sentences", type=int, default=64, metavar="N", help="how many are drawn from it (default: %(default)s)")
    add("--batch", type=int, default=16, metavar="N", help="sentences at a time (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the sentences drawn and of the perturbations (default: %(default)s)")
    add_device_argument(parser)
    add_language_arguments(parser)
    add("--json", metavar="OUT.json", help="also write the figures here, unrounded")
    add(
        "--perturbations",
        type=int,
        default=8,
        metavar="N",
        help="random perturbations per sentence for the certificates of the encoder; 0: none (default: %(default)s)",
    )


def run(args: Namespace) -> None:
    """Print the tables; write the JSON file."""
    check_least(args, sentences=1, batch=1, perturbations=0, seed=0)
    refuse_same({"--path": args.path, "--json": args.json})
    loaded = load(args.path, args.data, args.split, device=args.device, pair=typed_pair(args))
    options = {name: getattr(args, name) for name in ("sentences", "batch", "perturbations", "seed")}
    # opened first: an unwritable path fails at once
    with atomic_write(args.json) if args.json is not None else nullcontext() as file:
        report = diagnose(loaded, **options)
        if file is not None:
            signature = {name: getattr(args, name) for name in ("path", "data", "split", "seed")}
            file.write(json.dumps({**signature, **report}, indent=1, ensure_ascii=False) + "\n")
    print(render(report, title=f"{args.path}, {args.data}, {args.split}"))


def diagnose(
    loaded: Loaded,
    *,
    sentences: int,
    batch: int,
    perturbations: int,
    seed: int,
    measures: Collection[str] = tuple(per_head.MEASURES),
    sites: Collection[str] = tuple(_SIDES_OF),
) -> dict:
    """Run sentences through the model, teacher-forced, and measure its attentions.

    Args:
        sentences: how many are drawn at random.
        batch: sentences at a time, at most.
        perturbations: of each sentence, for the certificates of the encoder.
        seed: of the sentences drawn and of the perturbations.
        measures: some of ``MEASURES``.
        sites: where attentions are measured.

    Returns:
        ``sentences`` (how many were used), ``left_out`` (numbers of those that are longer than the model takes, from
        which none was drawn), ``rows`` (one per site, layer and head, the measures averaged over the
        sentences), ``certificates`` (one per encoder layer, over all heads, sentences and perturbations) and
        ``coupling_certificates`` (likewise, of the two plans of LOT where it stands).
    """
    drawn, _ = loaded.draw(sentences, seed)
    measured: dict[tuple[str, int, str, bool], list[dict]] = {}
    certifying = {"certificates": per_head.certify, "coupling_certificates": per_head.certify_coupling}
    certified: dict[str, dict[int, list[dict]]] = {kind: {} for kind in certifying}
    with torch.no_grad(), capture(loaded.model) as seen, tqdm(total=len(drawn), unit="sentence", disable=None) as bar:
        for indices in _batches(loaded, drawn, batch):
            sample = loaded.batch(indices)
            if tuple(sites) == ("encoder",):  # the decoder's plans would only take time
                loaded.model.encoder(sample["net_input"]["src_tokens"], src_lengths=sample["net_input"]["src_lengths"])
            else:
                loaded.model(**sample["net_input"])
            pads = {side: sample["net_input"][name].eq(loaded.pad) for side, name in _SIDES.items()}
            for attention in seen:
                attention.check_finite(loaded.path)
                if attention.site not in sites:
                    continue
                queries, keys = (pads[side] for side in _SIDES_OF[attention.site])
                if keys.size(1) < attention.k.size(2):  # --cross-self-attention: the source stands before the target
                    keys = torch.cat([pads["source"], keys], 1)
                where = (attention.site, attention.layer, attention.name, attention.signed)
                measured.setdefault(where, []).append(per_head.measure_heads(attention, queries, keys, measures))
                if attention.site == "encoder" and perturbations:
                    seeds = [(seed, int(i), attention.layer) for i in sample["id"]]
                    for kind, of_sentences in certifying.items():
                        found = list(of_sentences(attention, queries, perturbations, seeds))
                        certified[kind].setdefault(attention.layer, []).extend(found)
            seen.clear()
            bar.update(len(sample["id"]))
    places = sorted(measured, key=lambda where: (list(_SIDES_OF).index(where[0]), where[1]))
    rows = [row for where in places for row in per_head.mean_rows(*where, measured[where])]
    certificates = {
        kind: [per_head.summary(layer, parts) for layer, parts in sorted(of_kind.items()) if parts]
        for kind, of_kind in certified.items()
    }
    left_out = [int(i) + 1 for i in loaded.left_out()]
    return {"sentences": len(drawn), "left_out": left_out, "rows": rows, **certificates}


def _batches(loaded: Loaded, drawn: Iterable[int], most: int) -> Iterator[list[int]]:
    """At most so many sentences at a time, and fewer long ones: all plans of a batch are in memory."""
    sentences, batch = loaded.sentences, list[int]()
    for index in drawn:
        longest = max(int(sentences.num_tokens(one)) for one in (*batch, index))
        if batch and (len(batch) == most or (len(batch) + 1) * longest**2 > _ENTRIES):
            yield batch
            batch = []
        batch.append(int(index))
    if batch:
        yield batch


def encoder_balance(loaded: Loaded) -> dict[str, float]:
    """How balanced the encoder's plans are: means of ``BALANCE`` over its heads, and over up to 64 sentences."""
    only = {"measures": BALANCE, "sites": ("encoder",)}
    rows = diagnose(loaded, sentences=64, batch=16, perturbations=0, seed=1, **only)["rows"]
    return {measure: fmean(row[measure] for row in rows) for measure in BALANCE}


def render(report: dict, *, title: str) -> str:
    """The report as aligned Markdown tables, with a line on how to read each."""
    signed = (
        "Differential A = A1 - λ A2 is signed, one per pair of heads: its rows sum to 1 - λ, which counts as marginal "
        "error; entropy is that of |A|; it is compared with the difference of two softmax plans with the same λ."
    )
    notes = [signed] if any(row["signed"] for row in report["rows"]) else []
    if report["left_out"]:
        left_out = numbers([number - 1 for number in report["left_out"]])
        notes.append(f"None of these sentences was drawn, which are longer than the model takes: {left_out}.")
    heads = _table(
        ("site", "layer", "head", "attention"),
        per_head.MEASURES,
        report["rows"],
        heading=f"{title}: means over {report['sentences']} sentences; layers and heads count from 0, entropy in nats",
        notes=notes,
    )
    others = sorted({row["attention"] for row in report["certificates"]} - {"sinkhorn"})
    not_of_the_mechanism = (
        "These are certificates of the exact plan of the scores q·k, which the updates of sinkhorn converge to; "
        f"they are not certificates of what attends here, {', '.join(others)}."
    )
    certificates = _table(
        ("layer", "attention"),
        per_head.CERTIFICATES,
        report["certificates"],
        heading="Encoder self-attention, exact plan at τ, scores perturbed by random signs: measured change over its "
        "bound (at most 1)",
        notes=[
            "Of the plan: inequality (31); of the output: the certificate derived from it, and inequality (44) as "
            "stated, with the values perturbed as well.",
            *([not_of_the_mechanism] if others else []),
        ],
    )
    couplings = _table(
        ("layer", "attention"),
        per_head.COUPLING_CERTIFICATES,
        report["coupling_certificates"],
        heading="The two plans of lot, through its pivots at its ε, scores with pivots and values perturbed by random "
        "signs: measured change over its bound (at most 1)",
        notes=["A and output: of the exact plans; as run: of the output after T half-updates, as the model has it."],
    )
    return "\n\n".join(table.markdown(padded=True) for table in (heads, certificates, couplings) if table.rows)


def _table(keys: Sequence[str], figures: Mapping[str, tuple[str, str]], rows: Sequence[dict], **texts: Any) -> Table:
    """A row of keys and formatted figures for each of ``rows``; names to the left, numbers to the right."""
    return Table(
        [*keys, *(title for title, _ in figures.values())],
        [
            [*(row[key] for key in keys), *(format(row[name], form) for name, (_, form) in figures.items())]
            for row in rows
        ],
        align="".join("<" if key in ("site", "attention") else ">" for key in (*keys, *figures)),
        **texts,
    )
