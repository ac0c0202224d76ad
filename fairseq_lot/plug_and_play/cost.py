"""The cost of a swap: the change of the model's predictions, for each place and in total.

A place is one attention of the model: a site and a layer, such as ``encoder.0``.
"""

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

# source pieces to measure on, in total and per batch; all predictions of a batch are in memory
_PIECES, _BATCH = 8192, 2048
#: default budget of a fitted swap: nats a piece, relative squared error of the output; docs/swap.md shows its effect
DEFAULT_NATS, DEFAULT_ERROR = 0.2, 0.2
#: values of --budget for the default budget and for no limit
USUAL, NO_BUDGET = "default", "none"
REMEDY = f"choose another mechanism or other options, or give --budget {NO_BUDGET} to swap anyway"


@dataclass(frozen=True)
class Cost:
    """The change that a swap makes to a model's predictions.

    Attributes:
        nats: mean KL(base ‖ swapped) of the next piece, over the pieces of the base's own translations.
        error: relative squared error of the encoder's output or of the last decoder layer's, whichever is larger; an
            output counts only if a swapped place is in its stack.
        by_place: the nats if only this place is swapped, as ``{"encoder.0": 0.001}``; empty if no attention differs
            from the base's.
        error_by_place: the error if only this place is swapped.
        measured_on: a description of the sentences.
        exact_up_to: sentences of at most this many tokens get the base's own attention, at no cost; 0: none do.
    """

    nats: float
    error: float = 0.0
    by_place: dict[str, float] = field(default_factory=dict)
    error_by_place: dict[str, float] = field(default_factory=dict)
    measured_on: str = ""
    exact_up_to: int = 0

    def __str__(self) -> str:
        if not self.by_place:
            return "predictions cannot change: all sentences that the model can read get the base's own attention"
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
        """Write the cost into the arguments of a checkpoint."""
        args.swap_cost, args.swap_cost_by_place = self.nats, self.by_place
        args.swap_cost_error, args.swap_cost_measured_on = self.error, self.measured_on


def forget_cost(args: Namespace) -> None:
    """Remove the entries of :meth:`Cost.note` from a checkpoint's arguments."""
    for name in ("swap_cost", "swap_cost_by_place", "swap_cost_error", "swap_cost_measured_on"):
        vars(args).pop(name, None)


@dataclass(frozen=True)
class Budget:
    """Limits for the cost of a swap, see :class:`Cost`; infinite: no limit.

    Attributes:
        nats: limit of ``Cost.nats``.
        error: limit of ``Cost.error``.
    """

    nats: float = math.inf
    error: float = math.inf

    @classmethod
    def read(cls, given: float | str | None, *, fitted: bool) -> "Budget":
        """The budget for a value of ``--budget``.

        Args:
            given: a number of nats, or its text; None or ``none``: no limit; ``default``: the default budget.
            fitted: the swap is fitted. Without a fit ``default`` means no limit.

        Raises:
            InputError: ``given`` is none of these.
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
        """The larger of the ratios nats / limit and error / limit; above 1 the cost exceeds the budget."""
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
    """Add ``--json``."""
    what = "write the cost of the swap here, for scripts: nats a piece in total and by place; never half-written"
    parser.add_argument("--json", metavar="FILE", help=what)


@contextlib.contextmanager
def json_file(path: str | None) -> Iterator[dict[str, Any]]:
    """Context manager: yield a dictionary, and write it as JSON to ``path`` if the block ends without an error.

    Args:
        path: the file; None: nothing is written.
    """
    content: dict[str, Any] = {}
    with contextlib.nullcontext() if path is None else atomic_write(path) as file:
        yield content
        if file is not None:
            json.dump(_without_infinity(content), file, indent=1)
            file.write("\n")


def _without_infinity(value: Any) -> Any:
    """The value with None instead of infinity, which JSON cannot express; dictionaries are searched."""
    if isinstance(value, dict):
        return {name: _without_infinity(inner) for name, inner in value.items()}
    return None if value == math.inf else value


def shown(nats: float) -> str:
    """A number of nats as text."""
    return "less than 0.0001" if 0 < nats < 1e-4 else f"{nats:.4f}"


class Comparison:
    """The comparison of a swapped model with its base, on the base's own translations.

    Args:
        swapped, base: models of equal shape that differ in their attention.
        sample: fairseq's batch of sentences that were not fitted on; about 8,192 of their source pieces are used.
        part: see :func:`~fairseq_lot.plug_and_play.distillation.translate_greedily`.
        text: name of the text that the sentences come from; None: they are random.
        exact_up_to: see :class:`Cost`; the swapped model here is linear on sentences of any length.

    Attributes:
        places: the places whose attention differs.
        measured_on: a description of the sentences; empty without such places.
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
        # for each place: the layer, the name of its attention, the attention of the swapped model and of the base
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
        """The cost of all places together, with the cost of each place alone."""
        if not self.places:
            return Cost(0.0, exact_up_to=self._exact_up_to)
        (nats, error), *alone = self.measured([self.places, *([place] for place in self.places)])
        by_place, error_by_place = (dict(zip(self.places, found, strict=True)) for found in zip(*alone, strict=True))
        return Cost(nats, error, by_place, error_by_place, self.measured_on, self._exact_up_to)

    @torch.no_grad()
    def measured(self, ways: Sequence[Collection[str]]) -> list[tuple[float, float]]:
        """The cost of several sets of swapped places.

        Args:
            ways: the sets of swapped places.

        Returns:
            For each set the nats and the error, see :class:`Cost`; infinity stands for NaN.
        """
        # sums for each set: divergence, squared differences of encoder and decoder; squares: of the base's outputs
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
        """Run the base on a batch; all results are without pads.

        Returns:
            Log probabilities of the next piece, ``(pieces, symbols)``, and the outputs of the encoder and of the last
            decoder layer, ``(pieces, embed_dim)``.
        """
        decoder = self.base.decoder
        no_pad, real = sources.ne(self._pad), targets.ne(decoder.padding_idx)
        read = self.base.encoder(sources, src_lengths=no_pad.sum(1))
        output, extra = decoder(targets, encoder_out=read, features_only=True)
        predicted = self.base.get_normalized_probs((decoder.output_layer(output), extra), log_probs=True)
        return predicted[real], read["encoder_out"][0].transpose(0, 1)[no_pad], output[real]

    def within(self, cost: Cost, budget: Budget) -> tuple[Cost, dict[str, tuple[float, float]]]:
        """Undo the swap at the most expensive places, one after another, until the others together fit the budget.

        Args:
            cost: the cost of all places.
            budget: the limits.

        Returns:
            The cost of the places that stay swapped. For each place where the swap was undone, the nats and the error
            just before.

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
        """Context manager: the base has the swapped attention, with its projections, at these places."""
        chosen = [self._blocks[place] for place in places]
        try:
            for block, name, ours, _ in chosen:
                setattr(block, name, ours)
            yield
        finally:
            for block, name, _, theirs in chosen:
                setattr(block, name, theirs)

    def _translated(self, sources: list[Tensor], part: int | None) -> list[tuple[Tensor, Tensor]]:
        """Batches of sources and of the base's translations as decoder inputs, sorted by source length."""
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
    """The number as a float; infinite if it is not finite."""
    return number.item() if number.isfinite() else math.inf


def _plan_of(attention: nn.Module) -> tuple | None:
    """A key that is equal for attentions with equal plans: type and options; None for plain softmax."""
    mechanism = unwrapped(getattr(attention, "mechanism", None))
    if mechanism is None or mechanism.traits.is_stock:
        return None
    return type(mechanism), mechanism.options


def _some(tokens: Tensor, pad: int) -> list[Tensor]:
    """The sentences without pads: all of them, or evenly spread ones if they have more than ``_PIECES`` pieces."""
    sentences = [row[row.ne(pad)] for row in tokens]
    pieces = sum(map(len, sentences))
    number = max(1, min(len(sentences), len(sentences) * _PIECES // pieces))
    chosen = [(2 * i + 1) * len(sentences) // (2 * number) for i in range(number)]
    return [sentences[i] for i in chosen]
