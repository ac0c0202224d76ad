"""Fit the new parameters of a swapped attention to the softmax attention that it replaces, without labels."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from fairseq.data.data_utils import collate_tokens
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

from fairseq_lot.attention.base import AttentionOutput, Mechanism
from fairseq_lot.errors import InputError
from fairseq_lot.modules.sites import attentions, unwrapped
from fairseq_lot.pretrained.loading import refuse_overflow

LONG = 200  # steps from which a fit writes its errors to a log; a terminal has a progress bar


@dataclass(frozen=True)
class AttentionPair:
    """An attention of the student and the teacher's attention at the same place, to which it is fitted."""

    site: str
    layer: int
    student: Mechanism
    teacher: Mechanism


class Distillation:
    """A model with swapped attention, the student, and the same model with softmax, the teacher.

    The methods measure their difference on a sample, fairseq's batch. If attentions of the decoder are fitted, the
    sample needs a decoder input; :meth:`readable` adds one.

    Attributes:
        matched: the attentions with new parameters, each with its teacher.
        added: the new parameters of all these attentions.
        rows: for each new parameter the index of its attention in ``matched``.
        projections: the trained projections of these attentions.
        in_encoder: all of them are in the encoder, so the decoder need not run.

    Raises:
        InputError: no attention has new parameters.
    """

    def __init__(self, student: TransformerModel, teacher: TransformerModel) -> None:
        self.student, self.teacher = student, teacher
        self.matched: list[AttentionPair] = []
        self.projections: list[nn.Parameter] = []
        for (site, layer, ours), (_, _, theirs) in zip(attentions(student), attentions(teacher), strict=True):
            # in differential attention only the plans are fitted; λ and the norm were trained
            fitted, teaching = (unwrapped(getattr(attention, "mechanism", None)) for attention in (ours, theirs))
            if fitted is not None and teaching is not None and fitted.fittable():
                self.matched.append(AttentionPair(site, layer, fitted, teaching))
                for projection in (ours.q_proj, ours.k_proj, ours.v_proj, ours.out_proj):
                    self.projections += projection.parameters()
        if not self.matched:
            raise InputError(
                "there is nothing to calibrate: this attention has no parameters that a fit could change; "
                "swap in one that has, such as near_far"
            )
        added = [(row, p) for row, match in enumerate(self.matched) for p in match.student.fittable()]
        self.rows, self.added = [row for row, _ in added], [parameter for _, parameter in added]
        self.in_encoder = all(match.site == "encoder" for match in self.matched)

    def readable(self, sample: dict, part: int | None = None) -> dict:
        """The sample, with the teacher's translation as decoder input if the decoder runs and there are no targets.

        Args:
            sample: fairseq's batch.
            part: see :func:`translate_greedily`.
        """
        if self.in_encoder or "prev_output_tokens" in sample["net_input"]:
            return sample
        translations = translate_greedily(self.teacher, sample, part)
        return {**sample, "net_input": {**sample["net_input"], "prev_output_tokens": translations}}

    def head_errors(self, sample: dict) -> torch.Tensor:
        """``‖student - teacher‖² / ‖teacher‖²`` of each head's output, ``(attentions, most heads)``.

        It is 0 where an attention has fewer heads. Each mechanism of the student gets the teacher's q, k and v.
        """
        student_of = {match.teacher: match for match in self.matched}
        errors: dict[Mechanism, torch.Tensor] = {}
        with_gradients = torch.is_grad_enabled()

        def compare(teacher: Mechanism, args: tuple, kwargs: dict, expected: AttentionOutput) -> None:
            match = student_of[teacher]
            tokens = sample["net_input"]["src_tokens" if match.site == "encoder" else "prev_output_tokens"]
            real = tokens.ne(self.teacher.encoder.padding_idx)[:, None, :, None]
            size = (expected.values * real).square().sum((0, 2, 3))
            with torch.set_grad_enabled(with_gradients):
                difference = (match.student(*args, **kwargs).values - expected.values) * real
                errors[teacher] = difference.square().sum((0, 2, 3)) / size.clamp(min=torch.finfo(size.dtype).tiny)

        with contextlib.ExitStack() as hooks, torch.no_grad():
            for teacher in student_of:
                hooks.enter_context(teacher.register_forward_hook(compare, with_kwargs=True))
            self._output(self.teacher, sample)
        return nn.utils.rnn.pad_sequence([errors[match.teacher] for match in self.matched], batch_first=True)

    def output_error(self, sample: dict) -> torch.Tensor:
        """``‖student - teacher‖² / ‖teacher‖²`` of the encoder's output, or of the decoder's last layer, a scalar."""
        with torch.no_grad():
            expected = self._output(self.teacher, sample)
        difference = self._output(self.student, sample) - expected
        real = self._tokens(sample).ne(self.teacher.encoder.padding_idx).unsqueeze(-1)
        return (difference * real).square().sum() / (expected * real).square().sum()

    def output_divergence(self, sample: dict) -> torch.Tensor:
        """Mean ``KL(teacher ‖ student)`` of the predicted next piece, in nats per piece, a scalar."""

        def predicted(model: TransformerModel) -> torch.Tensor:
            return model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)

        with torch.no_grad():
            expected = predicted(self.teacher)
        divergence = (expected.exp() * (expected - predicted(self.student))).sum(-1)
        return divergence[self._tokens(sample).ne(self.teacher.decoder.padding_idx)].mean()

    def _tokens(self, sample: dict) -> torch.Tensor:
        return sample["net_input"]["src_tokens" if self.in_encoder else "prev_output_tokens"]

    def _output(self, model: TransformerModel, sample: dict) -> torch.Tensor:
        """The output of the encoder, or of the decoder's last layer if it must run, ``(bsz, len, embed_dim)``."""
        source = sample["net_input"]
        if self.in_encoder:
            output = model.encoder(source["src_tokens"], src_lengths=source["src_lengths"])
            return output["encoder_out"][0].transpose(0, 1)
        return model(**source, features_only=True)[0]


@torch.no_grad()
def translate_greedily(teacher: TransformerModel, sample: dict, part: int | None = None) -> torch.Tensor:
    """The teacher's own greedy translations as decoder input, ``(bsz, tgt_len)`` indices.

    Args:
        teacher: the model.
        sample: fairseq's batch of sources.
        part: cut sources into parts of at most this many pieces, translate each part and join the translations. This
            is for random pieces: long sources are slow, and the teacher may know only sentences. None: do not cut.
    """
    dictionary, sources = teacher.decoder.dictionary, sample["net_input"]["src_tokens"]
    most, eos = teacher.max_positions()[1] - 1, sources.new_tensor([dictionary.eos()])
    texts = [source[source.ne(dictionary.pad())] for source in sources]
    parts_of = [text[:-1].tensor_split(max(1, -(-(len(text) - 1) // (part or len(text))))) for text in texts]
    parts = [torch.cat([one, text[-1:]]) for text, own in zip(texts, parts_of, strict=True) for one in own]
    lengths = torch.tensor([len(one) for one in parts], device=sources.device)
    tokens = collate_tokens(parts, dictionary.pad(), left_pad=True)
    generator = SequenceGenerator([teacher], dictionary, beam_size=1, max_len_a=1.2, max_len_b=10)
    with refuse_overflow("the model"):
        best = generator.generate([teacher], {"net_input": {"src_tokens": tokens, "src_lengths": lengths}})
    translated = iter(hypotheses[0]["tokens"][:-1] for hypotheses in best)
    joined = [torch.cat([torch.cat([next(translated) for _ in own])[:most], eos]) for own in parts_of]
    return collate_tokens(joined, dictionary.pad(), dictionary.eos(), move_eos_to_beginning=True)


@dataclass(frozen=True)
class Fit:
    """The result of a fit: errors on held-out sentences, before and after it.

    Attributes:
        title: a name for the error, for messages and tables.
        before, after: the errors, ``(attentions, most heads)`` if heads were fitted alone, else a scalar.
        steps: number of updates.
    """

    title: str
    before: torch.Tensor
    after: torch.Tensor
    steps: int


def fit(
    fitted: list[tuple[list[nn.Parameter], float]],
    errors: Callable[[dict], torch.Tensor],
    samples: Iterator[dict],
    held_out: dict,
    *,
    steps: int,
    title: str = "error",
    rows: list[int] | None = None,
) -> Fit:
    """Minimise errors by Adam with a cosine schedule; keep the parameters with the smallest held-out errors.

    Args:
        fitted: lists of parameters, each with its first learning rate. The parameters are changed in place, and
            ``requires_grad`` stays set.
        errors: a function of a sample; the sum of its result is minimised.
        samples: one for each step.
        held_out: a sample that is not fitted; measured about 20 times.
        steps: number of updates.
        title: a name for the error, for the progress bar and messages.
        rows: for each parameter the index of its attention. Each head then keeps its own best parameters; this needs
            errors ``(attentions, heads)`` and parameters whose first axis is the heads. None: all parameters are kept
            from the step with the smallest sum of errors.

    Raises:
        InputError: the errors are not finite at the start.
    """
    parameters = [parameter.requires_grad_(True) for some, _ in fitted for parameter in some]

    def measured() -> torch.Tensor:
        with torch.no_grad():
            return errors(held_out)

    before = best = measured()
    if not before.isfinite().all():
        raise InputError(f"the {title} is not finite: a weight of the model is NaN or overflows; give another model")
    kept = copies(parameters)
    optimizer = torch.optim.Adam([{"params": some, "lr": rate} for some, rate in fitted])
    schedule = CosineAnnealingLR(optimizer, max(1, steps))
    for step in (bar := tqdm(range(1, steps + 1), title, unit="step", disable=None if steps else True)):
        optimizer.zero_grad()
        errors(next(samples)).sum().backward()
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 20) == 0 or step == steps:
            latest = measured()
            means = latest.sum(-1) / latest.count_nonzero(-1).clamp(min=1) if latest.dim() else latest
            shown = " ".join(f"{error:.3f}" for error in means.flatten())
            bar.set_postfix_str(shown)
            if bar.disable and steps >= LONG and step % (steps // 4) == 0:  # no terminal, so no bar
                print(f"{title}: step {step} of {steps}, {shown}", file=sys.stderr, flush=True)
            if rows is not None:
                better = latest < best
                best = torch.where(better, latest, best)
                copy_heads(parameters, kept, better, rows)
            elif latest.sum() < best.sum():
                best, kept = latest, copies(parameters)
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return Fit(title, before, best, steps)


def copies(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the parameters' values."""
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def copy_heads(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], heads: torch.Tensor, rows: list[int]
) -> None:
    """Copy the parameters of some heads from ``sources`` into ``targets``, in place.

    Args:
        sources, targets: parameters in the same order, each with the heads on its first axis.
        heads: ``(attentions, most heads)`` bool, True = copy this head.
        rows: for each parameter the index of its attention in ``heads``.
    """
    for source, target, row in zip(sources, targets, rows, strict=True):
        chosen = heads[row, : len(source)].view(-1, *[1] * (source.dim() - 1))
        target.copy_(torch.where(chosen, source, target))


def undo_harm(pair: Distillation, held_out: dict, apart: list[torch.Tensor], heads: Fit, together: Fit) -> Fit:
    """Undo the joint fit for heads that are now worse than before any fit.

    These heads get back their parameters from the end of the fit of the heads. If the error of the output is then
    larger than before the joint fit, all heads get back theirs.

    Args:
        pair: the two models.
        held_out: the sample for the errors.
        apart: the values of ``pair.added`` after the fit of the heads.
        heads: the fit of the heads.
        together: the joint fit.

    Returns:
        ``together`` with the new error of the output as ``after``.
    """
    with torch.no_grad():
        worse = pair.head_errors(held_out) > heads.before
        if not worse.any():
            return together
        copy_heads(apart, pair.added, worse, pair.rows)
        after = pair.output_error(held_out)
        if after <= together.before:
            return replace(together, after=after)
        copy_heads(apart, pair.added, torch.ones_like(worse), pair.rows)
    return replace(together, after=together.before)
