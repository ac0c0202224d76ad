"""The cost of a swap: how much it changes the model's predictions, place by place and in all."""

import contextlib
import json
import math
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.data.data_utils import collate_tokens
from fairseq.models.transformer import TransformerModel
from torch import Tensor, nn

from fairseq_lot.errors import InputError
from fairseq_lot.modules.places import Place, named_places
from fairseq_lot.modules.sites import ATTENTION_AT, attention_blocks, attentions, unwrapped
from fairseq_lot.output.files import atomic_write
from fairseq_lot.plug_and_play.distillation import translate_greedily

# source pieces to measure on, and how many of them are in a batch: the predictions of a batch are in memory
_PIECES, _BATCH = 8192, 2048
#: what a fitted swap may cost unless told otherwise: nats a piece, and relative squared error of the output;
#: docs/swap.md shows which swaps they let through
DEFAULT_NATS, DEFAULT_ERROR = 0.2, 0.2
#: words for a budget: that of before, and any cost
USUAL, NO_BUDGET = "default", "none"
REMEDY = f"choose another mechanism or other options, or swap all the same with --budget {NO_BUDGET}"


@dataclass(frozen=True)
class Cost:
    """How much a swap changes what a model computes.

    Attributes:
        nats: mean of KL(base ‖ swapped) of the next piece, over the pieces of the base's own translations.
        error: relative squared error of what leaves the encoder, or the last layer of the decoder: the larger one of
            those that have swapped places.
        by_place: the nats where one place alone is swapped, as ``{"encoder.0": 0.001}``; empty where no attention
            differs from the base's.
        error_by_place: the error, likewise.
        measured_on: the sentences in words.
        exact_up_to: up to so many tokens a sentence gets the base's own attention, at no cost.
    """

    nats: float
    error: float = 0.0
    by_place: dict[str, float] = field(default_factory=dict)
    error_by_place: dict[str, float] = field(default_factory=dict)
    measured_on: str = ""
    exact_up_to: int = 0

    def __str__(self) -> str:
        if not self.by_place:
            return "predictions cannot change: every sentence that the model can read gets the base's own attention"
        worst = max(self.by_place, key=lambda place: self.by_place[place])
        subject = "predictions"
        if self.exact_up_to:
            subject = (
                f"sentences of at most {self.exact_up_to:,} tokens get softmax itself, at no cost; of others {subject}"
            )
        return (
            f"{subject} change by {shown(self.nats)} nats a piece (KL, on {self.measured_on}; relative squared error "
            f"of the output: {shown(self.error)}); the most expensive place: {worst}, {shown(self.by_place[worst])}"
        )

    def note(self, args: Namespace) -> None:
        """Write it into the arguments of a checkpoint, as plain numbers and words."""
        args.swap_cost, args.swap_cost_by_place = self.nats, self.by_place
        args.swap_cost_error, args.swap_cost_measured_on = self.error, self.measured_on


def forget_cost(args: Namespace) -> None:
    """Take out of a checkpoint's arguments what :meth:`Cost.note` has written there."""
    for name in ("swap_cost", "swap_cost_by_place", "swap_cost_error", "swap_cost_measured_on"):
        vars(args).pop(name, None)


@dataclass(frozen=True)
class Budget:
    """What a swap may cost: nats a piece, and a relative squared error of the output."""

    nats: float = math.inf
    error: float = math.inf

    @classmethod
    def read(cls, given: float | str | None, *, fitted: bool) -> "Budget":
        """What was asked for.

        Args:
            given: a number of nats, or its text; None or ``none``: no limit; ``default``: the default budget.
            fitted: whether anything may have been fitted; else the default is no limit.
        """
        if given == USUAL:
            return DEFAULT_BUDGET if fitted else cls()
        if given is None or given == NO_BUDGET:
            return cls()
        try:
            nats = math.nan if isinstance(given, bool) else float(given)
        except (TypeError, ValueError):
            nats = math.nan
        if not 0 <= nats < math.inf:
            raise InputError(f"must be a number of nats, 0 or more, or {NO_BUDGET}, got {given!r}", "budget")
        return cls(nats=nats)

    def use(self, nats: float, error: float) -> float:
        """The share of the budget that a cost takes, of the limit that is nearer; more than 1: it does not fit."""
        shares = [0.0]
        for found, limit in ((nats, self.nats), (error, self.error)):
            if found and limit < math.inf:
                shares.append(found / limit if limit else math.inf)
        return max(shares)

    def __str__(self) -> str:
        error = f" and {self.error} of relative squared error" if self.error < math.inf else ""
        return f"{self.nats:g} nats a piece{error}"


DEFAULT_BUDGET = Budget(DEFAULT_NATS, DEFAULT_ERROR)


def add_json_argument(parser: ArgumentParser | _ArgumentGroup) -> None:
    """Add --json."""
    what = "write the cost of the swap here, for scripts: nats a piece in all and by place; never half-written"
    parser.add_argument("--json", metavar="FILE", help=what)


@contextlib.contextmanager
def json_file(path: str | None) -> Iterator[dict[str, Any]]:
    """What is put into the dictionary goes to a file, if there is one, when the block ends without an error."""
    content: dict[str, Any] = {}
    with contextlib.nullcontext() if path is None else atomic_write(path) as file:
        yield content
        if file is not None:
            json.dump(_without_infinity(content), file, indent=1)
            file.write("\n")


def _without_infinity(value: Any) -> Any:
    """The same with null for infinite numbers, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _without_infinity(inner) for name, inner in value.items()}
    return None if value == math.inf else value


def shown(nats: float) -> str:
    """A number of nats for people."""
    return "less than 0.0001" if 0 < nats < 1e-4 else f"{nats:.4f}"


class Comparison:
    """A swapped model beside its base, on sentences that the base has translated.

    Args:
        swapped, base: models of one shape, which differ in their attention.
        sample: fairseq's, of sentences that nothing was fitted on; as many as have 8,192 source pieces are used.
        part: see :func:`~fairseq_lot.plug_and_play.distillation.translate_greedily`.
        text: which text the sentences are from; None: they are random.
        exact_up_to: see :class:`Cost`; here the swapped model is linear on all sentences.

    Attributes:
        places: where the attention differs, as ``encoder.0``: a site, and the layer from 0.
    """

    def __init__(
        self,
        swapped: TransformerModel,
        base: TransformerModel,
        sample: dict,
        *,
        part: int | None,
        text: str | None,
        exact_up_to: int = 0,
    ) -> None:
        self.base, self._pad, self._exact_up_to = base, base.encoder.padding_idx, exact_up_to
        # a block, the name of its attention, and that of the swapped model and of the base
        self._blocks: dict[str, tuple[nn.Module, str, nn.Module, nn.Module]] = {}
        ours = attentions(swapped)
        for (site, layer, block), (_, _, own) in zip(attention_blocks(base), ours, strict=True):
            name = ATTENTION_AT[site][1]
            if _plan_of(own) != _plan_of(getattr(block, name)):
                self._blocks[str(Place(site, layer))] = block, name, own, getattr(block, name)
        self.places = list(self._blocks)
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.measured_on = ""
        if self.places:
            sources = _some(sample["net_input"]["src_tokens"], self._pad)
            lengths = sorted(len(source) - 1 for source in sources)
            span = f"{lengths[0]:,}" if lengths[0] == lengths[-1] else f"{lengths[0]:,} to {lengths[-1]:,}"
            what = f"random sentences of {span} pieces" if text is None else f"sentences of {span} pieces from {text},"
            self.measured_on = f"{len(sources)} {what} that were not fitted on"
            self._pairs = self._translated(sources, part)

    def cost(self) -> Cost:
        """Of all places together, and of each alone."""
        if not self.places:
            return Cost(0.0, exact_up_to=self._exact_up_to)
        (nats, error), *alone = self.measured([self.places, *([place] for place in self.places)])
        by_place, error_by_place = (dict(zip(self.places, found, strict=True)) for found in zip(*alone, strict=True))
        return Cost(nats, error, by_place, error_by_place, self.measured_on, self._exact_up_to)

    @torch.no_grad()
    def measured(self, ways: Sequence[Collection[str]]) -> list[tuple[float, float]]:
        """Nats and error, see :class:`Cost`, where these places are swapped; infinite where they are no numbers.

        Args:
            ways: the places that are swapped, for each pair of numbers.
        """
        # of each way: sum of divergences, squared differences of the encoder and of the decoder; of the base squares
        sums, squares = torch.zeros(len(ways), 3, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        pieces = 0
        for sources, targets in self._pairs:
            theirs = self._run(sources, targets)
            squares += torch.stack([output.double().square().sum() for output in theirs[1:]]).cpu()
            pieces += len(theirs[0])
            for number, places in enumerate(ways):
                with self._swapped(places):
                    ours = self._run(sources, targets)
                divergence = (theirs[0].exp() * (theirs[0] - ours[0])).double().sum()
                differences = [(x - y).double().square().sum() for x, y in zip(ours[1:], theirs[1:], strict=True)]
                sums[number] += torch.stack([divergence, *differences]).cpu()
        found = []
        for places, (divergence, *differences) in zip(ways, sums, strict=True):
            of_encoder, of_decoder = (
                difference / square for difference, square in zip(differences, squares, strict=True)
            )
            sites = {place.site for place in named_places(places)}
            errors = [*([of_encoder] if "encoder" in sites else []), *([of_decoder] if sites - {"encoder"} else [])]
            found.append((_finite((divergence / pieces).clamp(min=0)), _finite(torch.stack(errors).max())))
        return found

    def _run(self, sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the next pieces, and the outputs of encoder and decoder, each without pads."""
        decoder = self.base.decoder
        no_pad, real = sources.ne(self._pad), targets.ne(decoder.padding_idx)
        read = self.base.encoder(sources, src_lengths=no_pad.sum(1))
        output, extra = decoder(targets, encoder_out=read, features_only=True)
        predicted = self.base.get_normalized_probs((decoder.output_layer(output), extra), log_probs=True)
        return predicted[real], read["encoder_out"][0].transpose(0, 1)[no_pad], output[real]

    def within(self, cost: Cost, budget: Budget) -> tuple[Cost, dict[str, tuple[float, float]]]:
        """What is left where the most expensive places are given up, one after the other, until the rest fits.

        Args:
            cost: of all places.

        Returns:
            The cost of the rest, and for each place that is given up the nats and the error of all that were left with
            it.

        Raises:
            InputError: no place fits.
        """
        alone = {place: (nats, cost.error_by_place[place]) for place, nats in cost.by_place.items()}
        left = dict(sorted(alone.items(), key=lambda item: (budget.use(*item[1]), *item[1])))
        now, given_up = (cost.nats, cost.error), {}
        while budget.use(*now) > 1:
            place, (nats, error) = left.popitem()
            if not left:
                raise InputError(
                    f"all places would keep softmax: {place}, the cheapest, alone costs {shown(nats)} nats and has an "
                    f"error of {shown(error)}"
                )
            given_up[place] = now
            (now,) = self.measured([list(left)])
        by_place, errors = (
            {p: found[p] for p in self.places if p in left} for found in (cost.by_place, cost.error_by_place)
        )
        return Cost(*now, by_place, errors, cost.measured_on, cost.exact_up_to), given_up

    @contextlib.contextmanager
    def _swapped(self, places: Collection[str]) -> Iterator[None]:
        """The base with the swapped attention at some places, its projections included."""
        chosen = [self._blocks[place] for place in places]
        try:
            for block, name, ours, _ in chosen:
                setattr(block, name, ours)
            yield
        finally:
            for block, name, _, theirs in chosen:
                setattr(block, name, theirs)

    def _translated(self, sources: list[Tensor], part: int | None) -> list[tuple[Tensor, Tensor]]:
        """Batches of sources and of what the decoder reads, sentences of like length together."""
        batches: list[list[int]] = [[]]
        everything = collate_tokens(sources, self._pad, left_pad=True)
        lengths = everything.ne(self._pad).sum(1)
        read = {"net_input": {"src_tokens": everything, "src_lengths": lengths}}
        targets = translate_greedily(self.base, read, part)
        for row in lengths.argsort().tolist():
            if batches[-1] and (len(batches[-1]) + 1) * len(sources[row]) > _BATCH:
                batches.append([])
            batches[-1].append(row)
        pairs = []
        for rows in batches:
            longest = targets[rows].ne(self.base.decoder.padding_idx).sum(1).max()
            pairs.append(
                (collate_tokens([sources[row] for row in rows], self._pad, left_pad=True), targets[rows, :longest])
            )
        return pairs


def _finite(number: Tensor) -> float:
    """As a float; infinite where it is no number."""
    return number.item() if number.isfinite() else math.inf


def _plan_of(attention: nn.Module) -> tuple | None:
    """What makes the plans of an attention the same as another's; None: plain softmax, ours or fairseq's."""
    mechanism = unwrapped(getattr(attention, "mechanism", None))
    if mechanism is None or mechanism.traits.is_stock:
        return None
    return type(mechanism), mechanism.options


def _some(tokens: Tensor, pad: int) -> list[Tensor]:
    """The sentences without their pads: all of them, or some of every length if they have too many pieces."""
    sentences = [row[row.ne(pad)] for row in tokens]
    pieces = sum(map(len, sentences))
    number = max(1, min(len(sentences), len(sentences) * _PIECES // pieces))
    chosen = [(2 * i + 1) * len(sentences) // (2 * number) for i in range(number)]
    return [sentences[i] for i in chosen]
