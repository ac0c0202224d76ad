"""Fitting what a swapped attention has added to what softmax attention does at its place, without labels."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fairseq_lot.attention.base import Mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.modules.sites import attentions, inner
from fairseq_lot.pretrained.loading import Loaded


class NothingToFit(InputError):
    """The attention has no parameters of its own."""


@dataclass(frozen=True)
class Place:
    """One attention of the student beside the teacher's: what is fitted, and what to."""

    site: str
    layer: int
    student: Mechanism
    teacher: Mechanism


@dataclass(frozen=True)
class Call:
    """One call of a teacher's mechanism, to be repeated by the student's.

    Attributes:
        args, kwargs: of the call; the first is q, ``(bsz, num_heads, tgt_len, head_dim)``.
        values: what the teacher returned, ``(bsz, num_heads, tgt_len, value_dim)``.
        query_pads: ``(bsz, tgt_len)`` bool, True = pad; these rows do not count.
    """

    args: tuple
    kwargs: dict
    values: torch.Tensor
    query_pads: torch.Tensor

    def error(self, student: Mechanism) -> torch.Tensor:
        """``‖student - teacher‖² / ‖teacher‖²`` of every head over the batch, ``(num_heads,)``."""
        real = ~self.query_pads[:, None, :, None]
        difference = (student(*self.args, **self.kwargs).values - self.values) * real
        scale = (self.values * real).square().sum((0, 2, 3))
        return difference.square().sum((0, 2, 3)) / scale.clamp(min=torch.finfo(scale.dtype).tiny)


def places(student: nn.Module, teacher: nn.Module) -> list[Place]:
    """The attentions of the student that have added parameters; NothingToFit when there are none."""
    found = []
    for (site, layer, ours), (_, _, theirs) in zip(attentions(student), attentions(teacher), strict=True):
        # of a differential attention, its plans are fitted; λ and the norm have been trained
        pair = [inner(getattr(attention, "mechanism", None)) for attention in (ours, theirs)]
        if None not in pair and list(pair[0].parameters()):
            found.append(Place(site, layer, *pair))
    if not found:
        raise NothingToFit("there is nothing to calibrate: this attention has no parameters of its own")
    return found


def encoder_only(where: list[Place]) -> bool:
    """No place is in the decoder, so it need not run."""
    return all(place.site == "encoder" for place in where)


def sample_for(teacher: Loaded, where: list[Place], indices: Iterable[int]) -> dict:
    """fairseq's sample of these sentences.

    Encoder sites need source sentences only; for decoder sites the target side is read, or where there is none the
    teacher's own greedy translation.
    """
    sample = teacher.batch(indices)
    if not encoder_only(where) and "prev_output_tokens" not in sample["net_input"]:
        with torch.no_grad():
            sample["net_input"]["prev_output_tokens"] = translate_greedily(teacher, sample)
    return sample


def teacher_calls(teacher: Loaded, where: list[Place], sample: dict) -> list[Call]:
    """What the teacher's mechanisms do on a sample, in the order of ``where``."""
    calls: dict[nn.Module, Call] = {}
    site_of = {place.teacher: place.site for place in where}
    source = sample["net_input"]
    pads = {"encoder": source["src_tokens"].eq(teacher.pad)}

    def keep(module, args, kwargs, output):
        site = site_of[module]
        calls[module] = Call(args, kwargs, output.values, pads[site])

    handles = [module.register_forward_hook(keep, with_kwargs=True) for module in site_of]
    try:
        with torch.no_grad():
            if encoder_only(where):
                teacher.model.encoder(source["src_tokens"], src_lengths=source["src_lengths"])
            else:
                pads["cross"] = pads["decoder"] = source["prev_output_tokens"].eq(teacher.pad)
                teacher.model(**source)
    finally:
        for handle in handles:
            handle.remove()
    return [calls[place.teacher] for place in where]


def head_errors(where: list[Place], calls: list[Call]) -> torch.Tensor:
    """The error of every head, ``(number of places, num_heads)``."""
    return torch.stack([call.error(place.student) for place, call in zip(where, calls, strict=True)])


def translate_greedily(teacher: Loaded, sample: dict) -> torch.Tensor:
    """The decoder's input for the teacher's own greedy translations, ``(bsz, tgt_len)``."""
    generator = teacher.task.build_generator([teacher.model], Namespace(beam=1, max_len_a=1.2, max_len_b=10))
    best = [hypotheses[0]["tokens"] for hypotheses in generator.generate([teacher.model], sample)]
    eos = teacher.task.target_dictionary.eos()
    tokens = torch.full((len(best), max(map(len, best))), teacher.pad)
    for row, translation in zip(tokens, best, strict=True):
        row[: len(translation)] = torch.cat([translation.new_tensor([eos]), translation[:-1]]).to(row)
    return tokens


def random_batches(teacher: Loaded, indices: np.ndarray, max_tokens: int, seed: int) -> Iterator[np.ndarray]:
    """Batches of neighbours in ``indices``, which are sorted by length, in random order, over and over."""
    batches = list(teacher.dataset.batch_by_size(indices, max_tokens=max_tokens))
    generator = np.random.default_rng(seed)
    while True:
        for i in generator.permutation(len(batches)):
            yield batches[i]


def output_error(student: Loaded, teacher: Loaded, sample: dict, *, encoder_only: bool) -> torch.Tensor:
    """``‖student - teacher‖² / ‖teacher‖²`` of what leaves the encoder, or the last layer of the decoder, a scalar."""
    source = sample["net_input"]
    tokens = source["src_tokens" if encoder_only else "prev_output_tokens"]

    def run(model):
        if encoder_only:
            return model.encoder(tokens, src_lengths=source["src_lengths"])["encoder_out"][0].transpose(0, 1)
        return model(**source, features_only=True)[0]

    with torch.no_grad():
        expected = run(teacher.model)
    real = tokens.ne(teacher.pad).unsqueeze(-1)
    return ((run(student.model) - expected) * real).square().sum() / (expected * real).square().sum()


@dataclass(frozen=True)
class Fit:
    """What a fit did.

    Attributes:
        before, after: the errors on held-out sentences.
        steps: how many were made; fewer than asked when Ctrl-C ended it.
        best_step: the one whose parameters were kept; 0 when none was better than the start.
    """

    before: torch.Tensor
    after: torch.Tensor
    steps: int
    best_step: int


def fit(
    parameters: list[nn.Parameter],
    loss_of_step: Callable[[int], torch.Tensor],
    held_out_errors: Callable[[], torch.Tensor],
    *,
    steps: int,
    learning_rate: float,
    evaluations: int = 20,
    progress: Callable[[int, torch.Tensor], None] = lambda step, errors: None,
) -> Fit:
    """Minimise a loss by Adam, the rate falling to 0 along a cosine.

    The parameters with the least held-out error are kept, also when Ctrl-C ends the fit early.

    Args:
        parameters: what is fitted.
        loss_of_step: the loss of a step, counted from 1.
        held_out_errors: the errors on sentences that are not fitted to; their sum is what counts.
        steps: number of updates.
        learning_rate: of the first step, in the units of the parameters.
        evaluations: how often the held-out errors are measured.
        progress: called after each step with its number and the latest held-out errors.
    """

    def errors():
        with torch.no_grad():
            return held_out_errors()

    def copies():
        return [parameter.detach().clone() for parameter in parameters]

    before = best = latest = errors()
    kept, best_step, step = copies(), 0, 0
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    try:
        for step in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = learning_rate * (1 + math.cos(math.pi * (step - 1) / steps)) / 2
            # some options leave some parameters out
            gradients = torch.autograd.grad(loss_of_step(step), parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            if step % max(1, steps // evaluations) == 0 or step == steps:
                latest = errors()
                if latest.sum() < best.sum():
                    best, kept, best_step = latest, copies(), step
            progress(step, latest)
    except KeyboardInterrupt:
        step -= 1  # the one that was interrupted
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return Fit(before, best, step, best_step)
