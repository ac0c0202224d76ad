"""``fairseq-lot calibrate``: fit a swapped attention to the softmax attention that it replaced, without labels."""

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

# Pieces of the longest random sentence, unless the attention is exact up to more, or more were asked for.
LONGEST = 80


@dataclass(frozen=True)
class FitOptions(Options):
    """How a calibration fits; docs/swap.md says in which order."""

    steps: int = option(800, "updates that fit the heads one by one", minimum=1)
    joint_steps: int = option(400, "updates that then fit the output of all together", minimum=0)
    learning_rate: float = option(
        0.2,
        "Adam's for the heads at the start, a quarter of it where all are fitted together; it falls to 0",
        above=0,
        maximum=1e30,
    )
    distill_steps: int = option(
        0,
        "updates that at last fit the swapped attentions whole, their trained projections included: those of the "
        "encoder to its output, with others among them all to what the softmax model predicts for the next piece",
        minimum=0,
    )
    distill_rate: float = option(
        5e-4, "Adam's for the projections in these; ten times that for what is new", above=0, maximum=1e30
    )
    longest: int | None = option(
        None,
        "pieces of the longest random sentence, for documents as many as theirs; default: "
        f"{LONGEST}, with near_far twice --near-far-exact-up-to if that is more",
        minimum=1,
    )
    max_tokens: int = option(512, "source pieces in a batch; a longer sentence is alone in one", minimum=1)
    held_out: int = option(64, "sentences to measure the errors on, in one batch", minimum=1)
    split: str = option("train", "split of DATA, where DATA is given")
    seed: int = option(1, "seed of the sentences drawn", minimum=0)

    @classmethod
    def of(cls, args: Namespace) -> "FitOptions":
        """The options of a command line; InputError names the flag whose value has no meaning."""
        try:
            return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})
        except InputError as error:
            raise error.on_command_line() from None


def how_to_fit(
    args: Namespace, data: str | None, *, without: str | None = None, pieces: bool = False
) -> dict[str, Any]:
    """What :func:`calibrate` takes besides checkpoint and data, from a command line.

    Args:
        without: the flag by which nothing is fitted; an option of the fit is then refused.
        pieces: fits are made on random pieces, too, where there are data.
    """
    for field in dataclasses.fields(FitOptions) if without else ():
        if getattr(args, field.name) != field.default:
            raise InputError(f"is of a calibration; leave it out, or {without}", field.name).on_command_line()
    if args.longest != FitOptions.longest and data is not None and not pieces:
        raise InputError(f"--longest {args.longest} is of random sentences, and there is text; leave out one of both")
    if args.split != FitOptions.split and (data is None or is_text_file(data)):
        way_out = "leave it out, or give one (swap: with --calibrate, sweep: with --text)"
        raise InputError(f"--split {args.split} is of a data folder to calibrate on, and there is none; {way_out}")
    text = {name: value for name, value in text_options(args).items() if value}
    if text and (data is None or not is_text_file(data)):
        flags = ", ".join(map(flag, text))
        raise InputError(f"{flags}: of a plain text file to calibrate on, and there is none; leave it out, or give one")
    fitting = dataclasses.asdict(FitOptions.of(args)) | ({"text": text} if text else {})
    return {"device": choose_device(args.device), "languages": typed_pair(args), **fitting}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "data",
        nargs="?",
        metavar="DATA",
        help="folder made by fairseq-preprocess, to calibrate on its text; encoder sites need no more than its source "
        "side and both dictionaries. Or a plain text file in the source language, a sentence a line. Default: random "
        "pieces, for which no data is needed",
    )
    add("--path", required=True, metavar="SWAPPED.pt", help="checkpoint whose attention was swapped")
    add("--out", required=True, metavar="CALIBRATED.pt", help="the new checkpoint; never half-written")
    add_json_argument(parser)
    add_device_argument(parser)
    add_language_arguments(parser)
    add_options(parser, FitOptions)
    add_text_arguments(parser.add_argument_group("from sentences to pieces", "Where DATA is a plain text file."))


def run(args: Namespace) -> None:
    """Calibrate, print the errors and the cost, write the checkpoint."""
    how = how_to_fit(args, args.data)
    refuse_same({"--path": args.path, "DATA": args.data, "--out": args.out, "--json": args.json})
    # both are opened first: an unwritable path fails at once
    with atomic_write(args.out, "wb") as file, json_file(args.json) as numbers:
        done = calibrate(args.path, args.data, **how)
        file.write(done.state.serialised())
        numbers.update(dataclasses.asdict(done.cost))
    print(render(done))
    print(f"{args.out}: {done.description}, from {args.path}")
    print(done.cost)


@dataclass(frozen=True)
class Calibrated:
    """What a calibration gave.

    Attributes:
        state: the calibrated checkpoint.
        description: what was done, as it stands in the checkpoint.
        matched: the attentions that were fitted.
        before, after: relative squared error of every head on held-out sentences, ``(attentions, most heads)``.
        fits: on the heads, on the output of the encoder (or of the decoder), and if asked once more with the
            projections (of the encoder: to its output; of the decoder: to what is predicted).
        cost: how much the predictions differ from softmax's on the held-out sentences.
        comparison: the calibrated model beside softmax, on these.
    """

    state: Checkpoint
    description: str
    matched: list[AttentionPair] = dataclasses.field(repr=False)
    before: torch.Tensor = dataclasses.field(repr=False)
    after: torch.Tensor = dataclasses.field(repr=False)
    fits: list[Fit] = dataclasses.field(repr=False)
    cost: Cost = dataclasses.field(repr=False)
    comparison: Comparison = dataclasses.field(repr=False)


@torch.inference_mode(False)  # wherever it is called
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
    """Fit the parameters that a mechanism has added; the teacher is the same model with the softmax of its training.

    First every attention by itself, on the teacher's own queries, keys and values, to the outputs of the heads; then
    all together, each on what the ones before it give, to the output of the stack; with ``distill_steps`` then also
    the projections around them, to the output of the encoder, or where attentions of the decoder are fitted to the
    teacher's predictions: distillation without labels. A model fitted so has left softmax behind, and is not
    calibrated again. A near_far that is exact up to E tokens is fitted with E = 0, on random sentences longer than E.

    Args:
        checkpoint: with swapped attention: its path, or what ``swap`` returned, which is not changed.
        data: folder made by fairseq-preprocess, whose sentences to use; targets are read for decoder sites only, and if
            there are any. Or a plain text file in the source language, whose pieces are made as those of the model's
            text were; for that the folder that it was trained on must be there. None: random pieces, drawn by the
            counts of the dictionary that the model was trained with if it is still there, else all equally likely.
            Where there are no targets, the decoder reads the teacher's translations.
        device: to run on; None: a GPU when there is one.
        languages: source and target, where neither checkpoint nor data folder tells.
        text: how the lines of a plain text file become pieces, as :meth:`Text.of` takes it.
        **options: of :class:`FitOptions`.

    Raises:
        InputError: nothing to fit, a model that was trained with something else than softmax, or with ALiBi at other
            sites than the swapped ones, or a checkpoint or data folder that cannot be used.
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
            "--distill-steps fits the decoder to predictions, and fairseq cannot differentiate those of an adaptive "
            "softmax; leave it out, or swap in the encoder alone"
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
    slow = [(distillation.added, fitting.learning_rate / 4)]  # faster, near_far gets no better than its heads alone
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
    """A swapped checkpoint that is not fitted, beside the model that was trained, on what a fit would hold out.

    Args:
        state: the swapped checkpoint.
        base: what was swapped; predictions are compared with its own where it was not trained with softmax.
        data, device, languages, text, **options: see :func:`calibrate`.
    """
    fitting, device, softmax = FitOptions(**options), choose_device(device), state.softmax_of_training()
    own, changes = (base, {}) if softmax is None else (state, {"attention": DEFAULT, **softmax})
    trained = build(own, device=device, **changes)
    sentences = _sentences(with_languages(state, languages), data, fitting, trained, text or {})
    return _beside(trained, build(state, device=device, **_linear(state)), state, sentences, _part(data))


def _linear(state: Checkpoint) -> dict[str, Any]:
    """Arguments by which a near_far that is exact on sentences is linear on all of them."""
    return {"near_far_exact_up_to": 0} if exact_up_to(state) else {}


def _beside(
    base: TransformerModel, swapped: TransformerModel, state: Checkpoint, sentences: Sentences, part: int | None
) -> Comparison:
    """A swapped model beside its base, on the held-out sentences.

    Args:
        swapped: the model of ``state``, linear on all sentences.
    """
    exact = exact_up_to(state)
    if exact >= most_tokens(state, *attention_sites(state.model_args)):  # of all sentences that it can read
        swapped = base
    return Comparison(swapped, base, sentences.held_out, part=part, text=sentences.text, exact_up_to=exact)


def _part(data: str | Path | None) -> int | None:
    """The most pieces that are translated as one: random sequences, however long, in parts of a sentence's length."""
    return LONGEST if data is None else None


def exact_up_to(state: Checkpoint) -> int:
    """The number of keys up to which near_far computes what softmax does; 0: it never does, or it is not near_far."""
    args = state.model_args
    return (getattr(args, "near_far_exact_up_to", None) or 0) if getattr(args, "attention", None) == "near_far" else 0


def most_tokens(state: Checkpoint, *sites: str) -> int:
    """The tokens of the longest sentence, its end among them, that a model has positions for at these sites."""
    source, target = state.max_positions
    return max(target if site == "decoder" else source for site in sites)


def lengths_of_random(state: Checkpoint, longest: int | None) -> tuple[int, int]:
    """Pieces of the shortest and of the longest random sentence: of all sentences none is computed exactly.

    The default is cut to what the model has positions for.

    Raises:
        InputError: a given length is more than that, or no more than the attention is exact up to.
    """
    exact, most = exact_up_to(state), most_tokens(state, "encoder") - 1
    if longest is None:
        longest = min(max(LONGEST, 2 * exact), most)
    if longest > most:
        raise InputError(f"{state.path} has positions for {most} pieces, not --longest {longest}; give at most {most}")
    if longest < min(exact, most):  # with the end of the sentence still exact
        raise InputError(
            f"--longest {longest} is too short to fit near_far, which is exact up to {exact} tokens; "
            f"give at least {exact}"
        )
    return max(1, min(exact, longest)), longest


def _sentences(
    state: Checkpoint, data: str | Path | None, fitting: FitOptions, teacher: TransformerModel, text: dict[str, Any]
) -> Sentences:
    """What to run on."""
    shared = {"max_tokens": fitting.max_tokens, "held_out": fitting.held_out, "seed": fitting.seed}
    if data is None:
        shortest, longest = lengths_of_random(state, fitting.longest)
        if fitting.longest is None and longest > LONGEST:  # as many pieces as in sentences of the usual length
            shared["held_out"] = max(1, fitting.held_out * LONGEST // longest)
        task = task_of_training(state)  # where there is none, all pieces are equally likely
        counted = None if task is None else task.source_dictionary
        return random_pieces(teacher, counted, shortest=shortest, longest=longest, **shared)
    if is_text_file(data):
        return from_text(encoded(state, data, teacher, **text), str(data), **shared)
    task, dataset = load_data(state, data, fitting.split, needs_target=False)
    loaded = Loaded(teacher, task, dataset, state.path)
    check_pairs(state, loaded, teacher)
    return from_text(loaded, f"{data}, {fitting.split}", **shared)


def _write_back(state: Checkpoint, student: TransformerModel, description: str, *, distilled: bool) -> Checkpoint:
    """A checkpoint like ``state`` with what was fitted in the student, which says what was done."""
    state = Checkpoint(state.with_own_arguments())  # no longer what its file holds
    state["model"] = dict(state["model"])
    for name, parameter in student.named_parameters():
        if parameter.requires_grad:
            state["model"][name] = parameter.detach().to("cpu", state["model"][name].dtype)
    state.drop_averages()
    note_training(state)
    args = state.model_args
    args.calibration = description
    if distilled:  # softmax in its place would no longer be the model that was trained
        args.trained_attention = describe(args.attention, mechanism_options(args, args.attention))
        args.trained_sites = ",".join(attention_sites(args))
    return state


def render(done: Calibrated) -> str:
    """The errors as a table: a line for each attention, a column for each head, before → after."""
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
