"""``fairseq-lot calibrate``: fit a swapped attention to the softmax attention that it replaces, without labels."""

import dataclasses
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fairseq.models.transformer import TransformerModel

from fairseq_lot.attention.options import Options, option
from fairseq_lot.attention.registry import DEFAULT, describe
from fairseq_lot.errors import InputError, flag
from fairseq_lot.modules.flat_options import add_options, mechanism_options
from fairseq_lot.modules.sites import attention_sites
from fairseq_lot.output.files import atomic_write, refuse_same
from fairseq_lot.output.tables import MISSING, Table
from fairseq_lot.plug_and_play.cost import Comparison, Cost, add_json_argument, json_file
from fairseq_lot.plug_and_play.distillation import AttentionPair, Distillation, Fit, copies, fit, undo_harm
from fairseq_lot.plug_and_play.sentences import (
    Sentences,
    encoded,
    from_text,
    is_text_file,
    note_training,
    random_pieces,
    task_of_training,
)
from fairseq_lot.pretrained.checkpoint import Checkpoint, CheckpointLike, load_checkpoint
from fairseq_lot.pretrained.device import add_device_argument, choose_device
from fairseq_lot.pretrained.languages import add_language_arguments, typed_pair, with_languages
from fairseq_lot.pretrained.loading import Loaded, build, check_pairs, load_data
from fairseq_lot.pretrained.text import add_text_arguments, text_options

# default for the pieces in the longest random sentence
LONGEST = 80


@dataclass(frozen=True)
class FitOptions(Options):
    """The options of a fit; docs/swap.md describes its steps."""

    steps: int = option(800, "updates that fit each head alone", minimum=1)
    joint_steps: int = option(400, "updates that then fit all heads together, to the output", minimum=0)
    learning_rate: float = option(
        0.2,
        "Adam's first learning rate for --steps, a quarter of it for --joint-steps; it falls to 0",
        above=0,
        maximum=1e30,
    )
    distill_steps: int = option(
        0,
        "updates that finally also fit the projections of the swapped attentions: to the encoder's output if all are "
        "in the encoder, else to the softmax model's predictions",
        minimum=0,
    )
    distill_rate: float = option(
        5e-4,
        "Adam's first learning rate for the projections in --distill-steps, ten times it for new parameters",
        above=0,
        maximum=1e30,
    )
    longest: int | None = option(
        None,
        "pieces in the longest random sentence; for documents give their length; default: "
        f"{LONGEST}, with near_far twice --near-far-exact-up-to if that is more",
        minimum=1,
    )
    max_tokens: int = option(512, "source pieces in a batch; a longer sentence is a batch of its own", minimum=1)
    held_out: int = option(64, "sentences to measure the errors on, in one batch", minimum=1)
    split: str = option("train", "split of DATA to fit on")
    seed: int = option(1, "seed of the random sentences", minimum=0)

    @classmethod
    def of(cls, args: Namespace) -> "FitOptions":
        """The options on a command line; InputError names the flag of an invalid value."""
        try:
            return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})
        except InputError as error:
            raise error.on_command_line() from None


def how_to_fit(
    args: Namespace, data: str | None, *, without: str | None = None, pieces: bool = False
) -> dict[str, Any]:
    """The arguments of :func:`calibrate` besides checkpoint and data, from a command line.

    Args:
        args: the command line.
        data: the text to fit on; None: random pieces.
        without: the flag that switched the fit off, if one did; options of a fit are then refused.
        pieces: the command fits on random pieces even if ``data`` is given.

    Raises:
        InputError: an option is invalid, or has no effect on this fit.
    """
    for field in dataclasses.fields(FitOptions) if without else ():
        if getattr(args, field.name) != field.default:
            raise InputError(f"is for a calibration; leave it out, or {without}", field.name).on_command_line()
    if args.longest != FitOptions.longest and data is not None and not pieces:
        raise InputError(f"--longest {args.longest} is for random sentences, but text is given; leave out one of both")
    if args.split != FitOptions.split and (data is None or is_text_file(data)):
        way_out = "leave it out, or give one (swap: with --calibrate, sweep: with --text)"
        raise InputError(f"--split {args.split} needs a data folder to calibrate on; {way_out}")
    text = {name: value for name, value in text_options(args).items() if value}
    if text and (data is None or not is_text_file(data)):
        flags = ", ".join(map(flag, text))
        raise InputError(f"{flags}: needs a plain text file to calibrate on; leave it out, or give one")
    fitting = dataclasses.asdict(FitOptions.of(args)) | ({"text": text} if text else {})
    return {"device": choose_device(args.device), "languages": typed_pair(args), **fitting}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "data",
        nargs="?",
        metavar="DATA",
        help="text to calibrate on: a folder made by fairseq-preprocess (encoder sites need only its source side and "
        "both dictionaries), or a plain text file in the source language, a sentence per line. Default: random pieces",
    )
    add("--path", required=True, metavar="SWAPPED.pt", help="checkpoint whose attention was swapped")
    add("--out", required=True, metavar="CALIBRATED.pt", help="the new checkpoint; never half-written")
    add_json_argument(parser)
    add_device_argument(parser)
    add_language_arguments(parser)
    add_options(parser, FitOptions)
    add_text_arguments(parser.add_argument_group("from sentences to pieces", "If DATA is a plain text file."))


def run(args: Namespace) -> None:
    """Run ``fairseq-lot calibrate``: write the fitted checkpoint, print the errors and the cost."""
    how = how_to_fit(args, args.data)
    refuse_same({"--path": args.path, "DATA": args.data, "--out": args.out, "--json": args.json})
    # opened first: an unwritable path fails at once
    with atomic_write(args.out, "wb") as file, json_file(args.json) as numbers:
        done = calibrate(args.path, args.data, **how)
        file.write(done.state.serialised())
        numbers.update(dataclasses.asdict(done.cost))
    print(render(done))
    print(f"{args.out}: {done.description}, from {args.path}")
    print(done.cost)


@dataclass(frozen=True)
class Calibrated:
    """The result of a calibration.

    Attributes:
        state: the calibrated checkpoint.
        description: the fit in words, as written into the checkpoint.
        matched: the fitted attentions, each with its teacher.
        before, after: relative squared error of each head on held-out sentences, ``(attentions, most heads)``; 0 where
            an attention has fewer heads.
        fits: the fit of the heads, the fit of the output, and with ``distill_steps`` the fit with the projections.
        cost: the change of the predictions against softmax, on the held-out sentences.
        comparison: the calibrated model and the softmax model on these sentences.
    """

    state: Checkpoint
    description: str
    matched: list[AttentionPair] = dataclasses.field(repr=False)
    before: torch.Tensor = dataclasses.field(repr=False)
    after: torch.Tensor = dataclasses.field(repr=False)
    fits: list[Fit] = dataclasses.field(repr=False)
    cost: Cost = dataclasses.field(repr=False)
    comparison: Comparison = dataclasses.field(repr=False)


@torch.inference_mode(False)  # also if called in inference mode
@torch.enable_grad()
def calibrate(
    checkpoint: CheckpointLike,
    data: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    languages: tuple[str, str] | None = None,
    text: dict[str, Any] | None = None,
    **options: Any,
) -> Calibrated:
    """Fit the parameters that a swap added. The teacher is the same model with the softmax of its training.

    1. Each attention alone gets the teacher's queries, keys and values, and is fitted to the outputs of its heads.
    2. All attentions together are fitted to the output of the encoder, or of the decoder if one of them is there.
    3. With ``distill_steps`` their projections are fitted as well: to the output of the encoder, or to the teacher's
       predictions if one of them is in the decoder. The result counts as trained with the new attention, so it
       cannot be calibrated again.

    A near_far that is exact up to E tokens is fitted with E = 0, on random sentences longer than E.

    Args:
        checkpoint: the swapped checkpoint: its path, or the result of ``swap``; it is not changed.
        data: a folder made by fairseq-preprocess; its targets are used only for decoder sites. Or a plain text file in
            the source language, encoded as the model's text was; the data folder of the training must then exist.
            None: random pieces, drawn by the counts of the training's dictionary if it exists, else uniformly.
            Without targets the decoder reads the teacher's translations.
        device: of the models; None: a GPU if there is one.
        languages: source and target, if neither checkpoint nor data folder has them.
        text: options of :meth:`Text.of`, for a plain text file.
        **options: of :class:`FitOptions`.

    Raises:
        InputError: there is nothing to fit, the checkpoint or the data folder cannot be used, or the model was not
            trained with softmax, or with ALiBi at other sites of self-attention than the swapped ones.
    """
    fitting = FitOptions(**options)
    device = choose_device(device)
    state = load_checkpoint(checkpoint)
    softmax = state.softmax_of_training()
    if softmax is None:
        teachers = f"{DEFAULT}, or to {DEFAULT} with a prior at all swapped self-attention"
        raise InputError(f"{state.path} was {state.how_trained()}; calibration fits to {teachers}: fine-tune it")
    student = build(state, device=device, **_linear(state)).requires_grad_(False)
    teacher = build(state, device=device, attention=DEFAULT, **softmax).requires_grad_(False)
    distillation = Distillation(student, teacher)
    if fitting.distill_steps and not distillation.in_encoder and teacher.decoder.adaptive_softmax is not None:
        raise InputError(
            "--distill-steps fits the decoder to predictions, but fairseq cannot differentiate those of an adaptive "
            "softmax; leave it out, or swap only in the encoder"
        )
    sentences = _sentences(with_languages(state, languages), data, fitting, teacher, text or {})
    part = _part(data)
    readable = partial(distillation.readable, part=part)
    held_out = readable(sentences.held_out)
    run = partial(fit, samples=map(readable, sentences.batches), held_out=held_out)
    heads = run(
        [(distillation.added, fitting.learning_rate)],
        distillation.head_errors,
        steps=fitting.steps,
        title="error per layer",
        rows=distillation.rows,
    )
    apart = copies(distillation.added)
    slow = [(distillation.added, fitting.learning_rate / 4)]  # a larger rate does not improve near_far
    together = run(slow, distillation.output_error, steps=fitting.joint_steps, title="error of the output")
    fits = [heads, undo_harm(distillation, held_out, apart, heads, together)]
    with torch.no_grad():
        after = distillation.head_errors(held_out)
    if fitting.distill_steps:
        whole = [(distillation.added, 10 * fitting.distill_rate), (distillation.projections, fitting.distill_rate)]
        errors = distillation.output_error if distillation.in_encoder else distillation.output_divergence
        title = "error of the output" if distillation.in_encoder else "divergence of the predictions in nats"
        fits.append(run(whole, errors, steps=fitting.distill_steps, title=title))
    steps = " + ".join(str(one.steps) for one in fits)
    description = f"calibrated on {sentences.description} ({steps} steps, seed {fitting.seed})"
    if fitting.distill_steps:
        description += ", projections included"
    comparison = _beside(teacher, student, state, sentences, part)
    state = _write_back(state, student, description, distilled=fitting.distill_steps > 0)
    (cost := comparison.cost()).note(state.model_args)
    return Calibrated(state, description, distillation.matched, fits[0].before, after, fits, cost, comparison)


@torch.inference_mode(False)
def compare(
    state: Checkpoint,
    base: Checkpoint,
    data: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    languages: tuple[str, str] | None = None,
    text: dict[str, Any] | None = None,
    **options: Any,
) -> Comparison:
    """Compare a swapped checkpoint without a fit with the trained model, on the sentences that a fit would hold out.

    Args:
        state: the swapped checkpoint.
        base: the checkpoint before the swap. The comparison is with the softmax of its training, or with ``base``
            itself if it was not trained with softmax.
        data, device, languages, text, **options: see :func:`calibrate`.
    """
    fitting, device, softmax = FitOptions(**options), choose_device(device), state.softmax_of_training()
    own, changes = (base, {}) if softmax is None else (state, {"attention": DEFAULT, **softmax})
    trained = build(own, device=device, **changes)
    sentences = _sentences(with_languages(state, languages), data, fitting, trained, text or {})
    return _beside(trained, build(state, device=device, **_linear(state)), state, sentences, _part(data))


def _linear(state: Checkpoint) -> dict[str, Any]:
    """Model arguments that make near_far linear on sentences of any length; empty for other attention."""
    return {"near_far_exact_up_to": 0} if exact_up_to(state) else {}


def _beside(
    base: TransformerModel, swapped: TransformerModel, state: Checkpoint, sentences: Sentences, part: int | None
) -> Comparison:
    """The comparison of a swapped model with its base, on the held-out sentences.

    Args:
        base: the softmax model.
        swapped: the model of ``state``, linear on sentences of any length.
        state: the swapped checkpoint.
        sentences: the comparison uses their held-out batch.
        part: see :func:`_part`.
    """
    exact = exact_up_to(state)
    if exact >= most_tokens(state, *attention_sites(state.model_args)):  # exact on all that it can read
        swapped = base
    return Comparison(swapped, base, sentences.held_out, part=part, text=sentences.text, exact_up_to=exact)


def _part(data: str | Path | None) -> int | None:
    """Number of pieces to which the sources are cut for translation; None for text, which is not cut."""
    return LONGEST if data is None else None


def exact_up_to(state: Checkpoint) -> int:
    """The number of keys up to which near_far equals softmax; 0 if it never does, and for other attention."""
    args = state.model_args
    return (getattr(args, "near_far_exact_up_to", None) or 0) if getattr(args, "attention", None) == "near_far" else 0


def most_tokens(state: Checkpoint, *sites: str) -> int:
    """Tokens in the longest sentence that the model takes at these sites, including the end of sentence."""
    source, target = state.max_positions
    return max(target if site == "decoder" else source for site in sites)


def lengths_of_random(state: Checkpoint, longest: int | None) -> tuple[int, int]:
    """Lengths in pieces of the shortest and the longest random sentence; near_far is exact on none of these lengths.

    Args:
        state: the swapped checkpoint.
        longest: pieces in the longest one; None: the default, or the model's limit if that is lower.

    Raises:
        InputError: the given length is too long for the model, or so short that near_far is exact on it.
    """
    exact, most = exact_up_to(state), most_tokens(state, "encoder") - 1
    if longest is None:
        longest = min(max(LONGEST, 2 * exact), most)
    if longest > most:
        raise InputError(f"{state.path} takes at most {most} pieces, not --longest {longest}; give at most {most}")
    if longest < min(exact, most):  # with the end of sentence at most ``exact`` tokens
        raise InputError(
            f"--longest {longest} is too short to fit near_far, which is exact up to {exact} tokens; "
            f"give at least {exact}"
        )
    return max(1, min(exact, longest)), longest


def _sentences(
    state: Checkpoint, data: str | Path | None, fitting: FitOptions, teacher: TransformerModel, text: dict[str, Any]
) -> Sentences:
    """The sentences to fit on; arguments as for :func:`calibrate`."""
    shared = {"max_tokens": fitting.max_tokens, "held_out": fitting.held_out, "seed": fitting.seed}
    if data is None:
        shortest, longest = lengths_of_random(state, fitting.longest)
        if fitting.longest is None and longest > LONGEST:  # hold out as many pieces as usual, in fewer sentences
            shared["held_out"] = max(1, fitting.held_out * LONGEST // longest)
        task = task_of_training(state)  # without it all pieces are equally likely
        counted = None if task is None else task.source_dictionary
        return random_pieces(teacher, counted, shortest=shortest, longest=longest, **shared)
    if is_text_file(data):
        return from_text(encoded(state, data, teacher, **text), str(data), **shared)
    task, dataset = load_data(state, data, fitting.split, needs_target=False)
    loaded = Loaded(teacher, task, dataset, state.path)
    check_pairs(state, loaded, teacher)
    return from_text(loaded, f"{data}, {fitting.split}", **shared)


def _write_back(state: Checkpoint, student: TransformerModel, description: str, *, distilled: bool) -> Checkpoint:
    """A copy of ``state`` with the student's fitted parameters and the description of the fit.

    Args:
        distilled: the projections were also fitted.
    """
    state = Checkpoint(state.with_own_arguments())  # drops the path: it differs from its file now
    state["model"] = dict(state["model"])
    for name, parameter in student.named_parameters():
        if parameter.requires_grad:
            state["model"][name] = parameter.detach().to("cpu", state["model"][name].dtype)
    state.drop_averages()
    note_training(state)
    args = state.model_args
    args.calibration = description
    if distilled:  # the projections no longer fit the softmax of the training
        args.trained_attention = describe(args.attention, mechanism_options(args, args.attention))
        args.trained_sites = ",".join(attention_sites(args))
    return state


def render(done: Calibrated) -> str:
    """The errors before and after the fit as a text table, with a row for each attention and a column for each head."""
    num_heads, (apart, together, *distilled) = done.before.size(1), done.fits
    notes = [
        f"of the output, after {apart.steps} steps on the heads and {together.steps} on the output: "
        f"{together.before.item():.4f} → {together.after.item():.4f}"
    ]
    notes += [
        f"{one.title}, in {one.steps} more steps with the projections: {one.before.item():.4f} → {one.after.item():.4f}"
        for one in distilled
    ]
    rows = []
    for match, *errors in zip(done.matched, done.before.tolist(), done.after.tolist(), strict=True):
        own = [f"{before:.3f} → {after:.3f}" for before, after in zip(*errors, strict=True)][: match.student.num_heads]
        rows.append([match.site, match.layer, *own, *[MISSING] * (num_heads - len(own))])
    return Table(
        ["site", "layer", *(f"head {head}" for head in range(num_heads))],
        rows,
        heading="relative squared errors of the heads on held-out sentences, before → after",
        notes=notes,
        align="<" + ">" * (1 + num_heads),
    ).markdown(padded=True)
