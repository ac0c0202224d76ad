"""Fitting what a swapped attention has added to what softmax attention does in its stead, without labels."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from torch import nn

from fairseq_lot.attention.base import Mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.modules.sites import attentions, inner


class NothingToFit(InputError):
    """The attention has no parameters of its own."""


@dataclass(frozen=True)
class Match:
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


def matches(student: TransformerModel, teacher: TransformerModel) -> list[Match]:
    """The attentions of the student that have added parameters; NothingToFit when there are none."""
    found: list[Match] = []
    for (site, layer, ours), (_, _, theirs) in zip(attentions(student), attentions(teacher), strict=True):
        # of a differential attention, its plans are fitted; λ and the norm have been trained
        fitted, told = (inner(getattr(attention, "mechanism", None)) for attention in (ours, theirs))
        if fitted is not None and told is not None and list(fitted.parameters()):
            found.append(Match(site, layer, fitted, told))
    if not found:
        raise NothingToFit("there is nothing to calibrate: this attention has no parameters of its own")
    return found


def projections(student: TransformerModel, matched: list[Match]) -> list[nn.Parameter]:
    """What projects to and from the fitted attentions: it has been trained, with softmax."""
    fitted = {match.student for match in matched}
    return [
        parameter
        for _, _, attention in attentions(student)
        if inner(getattr(attention, "mechanism", None)) in fitted
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj)
        for parameter in projection.parameters()
    ]


def encoder_only(matched: list[Match]) -> bool:
    """No attention of the decoder is fitted, so it need not run."""
    return all(match.site == "encoder" for match in matched)


def with_target(sample: dict, teacher: TransformerModel) -> dict:
    """The sample with something for the decoder to read: where there is no target, the teacher's own translation."""
    if "prev_output_tokens" in sample["net_input"]:
        return sample
    return {**sample, "net_input": {**sample["net_input"], "prev_output_tokens": translate_greedily(teacher, sample)}}


def teacher_calls(teacher: TransformerModel, matched: list[Match], sample: dict) -> list[Call]:
    """What the teacher's mechanisms do on a sample, in the order of ``matched``."""
    calls: dict[nn.Module, Call] = {}
    site_of = {match.teacher: match.site for match in matched}
    source = sample["net_input"]
    pads = {"encoder": source["src_tokens"].eq(teacher.encoder.padding_idx)}

    def keep(module, args, kwargs, output):
        calls[module] = Call(args, kwargs, output.values, pads[site_of[module]])

    handles = [module.register_forward_hook(keep, with_kwargs=True) for module in site_of]
    try:
        with torch.no_grad():
            if encoder_only(matched):
                teacher.encoder(source["src_tokens"], src_lengths=source["src_lengths"])
            else:
                pads["cross"] = pads["decoder"] = source["prev_output_tokens"].eq(teacher.decoder.padding_idx)
                teacher(**source)
    finally:
        for handle in handles:
            handle.remove()
    return [calls[match.teacher] for match in matched]


def head_errors(matched: list[Match], calls: list[Call]) -> torch.Tensor:
    """The error of every head, ``(number of attentions, num_heads)``."""
    return torch.stack([call.error(match.student) for match, call in zip(matched, calls, strict=True)])


@torch.no_grad()
def translate_greedily(teacher: TransformerModel, sample: dict) -> torch.Tensor:
    """The decoder's input for the teacher's own greedy translations, ``(bsz, tgt_len)``."""
    dictionary = teacher.decoder.dictionary
    generator = SequenceGenerator([teacher], dictionary, beam_size=1, max_len_a=1.2, max_len_b=10)
    best = [hypotheses[0]["tokens"] for hypotheses in generator.generate([teacher], sample)]
    tokens = best[0].new_full((len(best), max(map(len, best))), dictionary.pad())
    for row, translation in zip(tokens, best, strict=True):
        row[0] = dictionary.eos()
        row[1 : len(translation)] = translation[:-1]
    return tokens


def output_error(
    student: TransformerModel, teacher: TransformerModel, sample: dict, *, encoder_only: bool
) -> torch.Tensor:
    """``‖student - teacher‖² / ‖teacher‖²`` of what leaves the encoder, or the last layer of the decoder, a scalar."""
    source = sample["net_input"]
    tokens = source["src_tokens" if encoder_only else "prev_output_tokens"]

    def run(model):
        if encoder_only:
            return model.encoder(tokens, src_lengths=source["src_lengths"])["encoder_out"][0].transpose(0, 1)
        return model(**source, features_only=True)[0]

    with torch.no_grad():
        expected = run(teacher)
    real = tokens.ne(teacher.encoder.padding_idx).unsqueeze(-1)
    return ((run(student) - expected) * real).square().sum() / (expected * real).square().sum()


def output_divergence(student: TransformerModel, teacher: TransformerModel, sample: dict) -> torch.Tensor:
    """``KL(teacher ‖ student)`` of what they predict for the next piece, in nats per piece, a scalar."""
    source = sample["net_input"]

    def run(model):
        return model.get_normalized_probs(model(**source), log_probs=True)

    with torch.no_grad():
        expected = run(teacher)
    divergence = (expected.exp() * (expected - run(student))).sum(-1)
    return divergence[source["prev_output_tokens"].ne(teacher.decoder.padding_idx)].mean()


@dataclass(frozen=True)
class Fit:
    """What a fit did.

    Attributes:
        before, after: the errors on held-out sentences.
        steps: how many were made; fewer than asked when it was stopped.
        best_step: the one whose parameters were kept; 0 when none was better than the start.
    """

    before: torch.Tensor
    after: torch.Tensor
    steps: int
    best_step: int


def fit(
    parameters: list[nn.Parameter],
    loss: Callable[[], torch.Tensor],
    held_out_errors: Callable[[], torch.Tensor],
    *,
    steps: int,
    learning_rate: float | list[float],
    evaluations: int = 20,
    progress: Callable[[torch.Tensor], object] = lambda errors: None,
    stop: Callable[[], bool] = lambda: False,
) -> Fit:
    """Minimise a loss by Adam, the rate falling to 0 along a cosine; keep the parameters with the least held-out error.

    Args:
        parameters: what is fitted.
        loss: called once a step.
        held_out_errors: the errors on sentences that are not fitted to; their sum is what counts.
        steps: number of updates.
        learning_rate: of the first step, in the units of the parameters; one for all, or one for each.
        evaluations: how often the held-out errors are measured.
        progress: called after each step with the latest held-out errors.
        stop: asked before each step whether to end early.
    """

    def errors():
        with torch.no_grad():
            return held_out_errors()

    def copies():
        return [parameter.detach().clone() for parameter in parameters]

    before = best = latest = errors()
    kept, best_step, step = copies(), 0, 0
    rates = learning_rate if isinstance(learning_rate, list) else [learning_rate] * len(parameters)
    optimizer = torch.optim.Adam([{"params": [parameter]} for parameter in parameters])
    while step < steps and not stop():
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        step += 1
        # some options leave some parameters out
        gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        if step % max(1, steps // evaluations) == 0 or step == steps:
            latest = errors()
            if latest.sum() < best.sum():
                best, kept, best_step = latest, copies(), step
        progress(latest)
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return Fit(before, best, step, best_step)
