"""``fairseq-lot diagnose``: measure each attention head of a model on real sentences."""

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

# largest number of entries of one head's plans in a batch: 64 sentences of 256 tokens, or one of 2,048
_ENTRIES = 2**22
# the measures of a plan's columns: distance from their marginal, and its effect on the values
BALANCE = ("imbalance", "marginal_error", "mean_shift")
_SIDES = {"source": "src_tokens", "target": "prev_output_tokens"}
# site: language side of the queries and of the keys, in the order of the table
_SIDES_OF = {"encoder": ("source", "source"), "cross": ("target", "source"), "decoder": ("target", "target")}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("data", metavar="DATA", help="folder made by fairseq-preprocess")
    add("--path", required=True, metavar="CKPT.pt", help="checkpoint: ours or fairseq's transformer*")
    add("--split", default="valid", help="train, valid or test (default: %(default)s)")
    add("--sentences", type=int, default=64, metavar="N", help="random sentences of the split (default: %(default)s)")
    add("--batch", type=int, default=16, metavar="N", help="sentences in a batch (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the random sentences and perturbations (default: %(default)s)")
    add_device_argument(parser)
    add_language_arguments(parser)
    add("--json", metavar="OUT.json", help="also write the figures here, unrounded")
    add(
        "--perturbations",
        type=int,
        default=8,
        metavar="N",
        help="random perturbations per sentence for the encoder's certificates; 0: none (default: %(default)s)",
    )


def run(args: Namespace) -> None:
    """Run ``fairseq-lot diagnose``: print the tables and write the JSON file."""
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
    """Measure the attentions of a model on random sentences, with teacher forcing.

    Args:
        loaded: the model with its data.
        sentences: number of random sentences.
        batch: largest number of sentences in a batch.
        perturbations: number of perturbations per sentence, for the encoder's certificates; 0: no certificates.
        seed: seed of the random sentences and perturbations.
        measures: some of ``MEASURES``.
        sites: the sites to measure.

    Returns:
        A dictionary with these keys. ``sentences``: the number of sentences used. ``left_out``: numbers, from 1, of the
        sentences that are too long for the model, and so were never drawn. ``rows``: one dictionary per site, layer and
        head, with each measure averaged over the sentences. ``certificates``: one :func:`~per_head.summary` per encoder
        layer, over all heads, sentences and perturbations: measured changes under noise, divided by their proved
        bounds. ``coupling_certificates``: the same for LOT's two plans, if the encoder has LOT.

    Raises:
        InputError: an attention is not finite.
    """
    drawn, _ = loaded.draw(sentences, seed)
    measured: dict[tuple[str, int, str, bool], list[dict]] = {}
    certifying = {"certificates": per_head.certify, "coupling_certificates": per_head.certify_coupling}
    certified: dict[str, dict[int, list[dict]]] = {kind: {} for kind in certifying}
    with torch.no_grad(), capture(loaded.model) as seen, tqdm(total=len(drawn), unit="sentence", disable=None) as bar:
        for indices in _batches(loaded, drawn, batch):
            sample = loaded.batch(indices)
            if tuple(sites) == ("encoder",):  # the decoder need not run
                loaded.model.encoder(sample["net_input"]["src_tokens"], src_lengths=sample["net_input"]["src_lengths"])
            else:
                loaded.model(**sample["net_input"])
            pads = {side: sample["net_input"][name].eq(loaded.pad) for side, name in _SIDES.items()}
            for attention in seen:
                attention.check_finite(loaded.path)
                if attention.site not in sites:
                    continue
                queries, keys = (pads[side] for side in _SIDES_OF[attention.site])
                if keys.size(1) < attention.k.size(2):  # --cross-self-attention: keys are the source, then the target
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
    """The drawn indices in batches of at most ``most`` sentences.

    Batches of long sentences are smaller, because all plans of a batch are in memory.
    """
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
    """The measures ``BALANCE`` of the encoder, averaged over its heads and over up to 64 sentences."""
    only = {"measures": BALANCE, "sites": ("encoder",)}
    rows = diagnose(loaded, sentences=64, batch=16, perturbations=0, seed=1, **only)["rows"]
    return {measure: fmean(row[measure] for row in rows) for measure in BALANCE}


def render(report: dict, *, title: str) -> str:
    """The report of :func:`diagnose` as aligned Markdown tables with notes."""
    signed = (
        "Differential attention has one A = A1 - λ A2 per pair of heads. Its rows sum to 1 - λ, which counts as "
        'marginal error. Entropy is of |A|. "To softmax" compares with two softmax plans and the same λ.'
    )
    notes = [signed] if any(row["signed"] for row in report["rows"]) else []
    if report["left_out"]:
        left_out = numbers([number - 1 for number in report["left_out"]])
        notes.append(f"These sentences are too long for the model and were not drawn: {left_out}.")
    heads = _table(
        ("site", "layer", "head", "attention"),
        per_head.MEASURES,
        report["rows"],
        heading=f"{title}: means over {report['sentences']} sentences; layers and heads count from 0, entropy in nats",
        notes=notes,
    )
    others = sorted({row["attention"] for row in report["certificates"]} - {"sinkhorn"})
    not_of_the_mechanism = (
        "These certificates are of the exact plan for the scores q·k, the limit of sinkhorn's updates. They say "
        f"nothing about this model's {', '.join(others)}."
    )
    certificates = _table(
        ("layer", "attention"),
        per_head.CERTIFICATES,
        report["certificates"],
        heading="Encoder self-attention, exact plan at τ, scores perturbed by random signs: measured change over its "
        "bound (at most 1)",
        notes=[
            "(31): inequality (31), of the plan; output: a bound derived from it; (44): inequality (44), of the "
            "output, with perturbed values.",
            *([not_of_the_mechanism] if others else []),
        ],
    )
    couplings = _table(
        ("layer", "attention"),
        per_head.COUPLING_CERTIFICATES,
        report["coupling_certificates"],
        heading="LOT's two plans at its ε, scores with the pivots and values perturbed by random signs: measured "
        "change over its bound (at most 1)",
        notes=["A, output: with exact plans; as run: the output after the model's own T half-updates."],
    )
    return "\n\n".join(table.markdown(padded=True) for table in (heads, certificates, couplings) if table.rows)


def _table(keys: Sequence[str], figures: Mapping[str, tuple[str, str]], rows: Sequence[dict], **texts: Any) -> Table:
    """A table with the ``keys`` and the formatted ``figures`` of each row; only names are left-aligned."""
    return Table(
        [*keys, *(title for title, _ in figures.values())],
        [
            [*(row[key] for key in keys), *(format(row[name], form) for name, (_, form) in figures.items())]
            for row in rows
        ],
        align="".join("<" if key in ("site", "attention") else ">" for key in (*keys, *figures)),
        **texts,
    )
