"""``fairseq-lot calibrate``: fit a swapped attention to the softmax attention that it replaced, without labels."""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from fairseq_lot.attention.registry import DEFAULT
from fairseq_lot.errors import InputError
from fairseq_lot.output.files import atomic_write
from fairseq_lot.plug_and_play.distillation import (
    Fit,
    Place,
    encoder_only,
    fit,
    head_errors,
    output_error,
    places,
    random_batches,
    sample_for,
    teacher_calls,
)
from fairseq_lot.pretrained.checkpoint import load_checkpoint, model_args, serialised
from fairseq_lot.pretrained.loading import load


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("data", metavar="DATA", help="folder made by fairseq-preprocess; encoder sites need its source side only")
    add("--path", required=True, metavar="SWAPPED.pt", help="checkpoint whose attention was swapped")
    add("--out", required=True, metavar="CALIBRATED.pt", help="the new checkpoint; never half-written")
    add("--json", metavar="OUT.json", help="also write the errors of every head here")
    add_fit_arguments(parser)


def add_fit_arguments(parser) -> None:
    """Add the options of the fit, which other commands share."""
    add = parser.add_argument
    add("--split", default="train", help="train, valid or test (default: %(default)s)")
    add("--steps", type=int, default=1600, help="updates that fit the heads one by one (default: %(default)s)")
    add("--joint-steps", type=int, default=800, help="then, that fit the output of all (default: %(default)s)")
    add("--learning-rate", type=float, default=0.2, help="Adam's, falls to 0 (default: %(default)s)")
    add("--max-tokens", type=int, default=1024, metavar="N", help="source pieces in a batch (default: %(default)s)")
    add(
        "--held-out",
        type=int,
        default=64,
        metavar="N",
        help="sentences to measure the errors on (default: %(default)s)",
    )
    add("--seed", type=int, default=1, help="of the sentences drawn (default: %(default)s)")


def run(args: Namespace) -> int:
    """Calibrate, print the errors, write the checkpoint."""
    check_fit_arguments(args)
    for out in filter(None, (args.out, args.json)):
        if Path(out).resolve() == Path(args.path).resolve():
            raise InputError(f"--out is the checkpoint itself, {args.path}; give another file")
    with atomic_write(args.out, "wb") as file:  # opened first: what cannot be written is known at once
        done = calibrate(args.path, args.data, args)
        file.write(serialised(done.state))
    if args.json is not None:
        with atomic_write(args.json) as file:
            json.dump({"path": str(args.path), "data": str(args.data), **as_dict(done)}, file, indent=1)
            file.write("\n")
    print(render(done))
    print(f"{args.out}: calibrated from {args.path}")
    return 0


def check_fit_arguments(args: Namespace) -> None:
    """Refuse values without a meaning."""
    for name, least in {"steps": 1, "joint_steps": 0, "max_tokens": 1, "held_out": 1, "seed": 0}.items():
        if getattr(args, name) < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if not 0 < args.learning_rate < float("inf"):
        raise InputError(f"--learning-rate must be a finite number greater than 0, got {args.learning_rate}")


@dataclass(frozen=True)
class Calibrated:
    """What a calibration gave.

    Attributes:
        where: the places that were fitted.
        before, after: relative squared error of every head on held-out sentences, ``(number of places, num_heads)``.
        apart, together: the two fits, on the heads and then on the output of the encoder (or of the decoder).
        state: the calibrated checkpoint.
        finished: all steps were made; else Ctrl-C ended the fit.
    """

    where: list[Place]
    before: torch.Tensor
    after: torch.Tensor
    apart: Fit
    together: Fit
    state: dict
    finished: bool


def calibrate(path: str | Path, data: str | Path, options: Namespace) -> Calibrated:
    """Fit the parameters that a mechanism has added; the teacher is the same model with softmax in its place.

    First every attention by itself, on the teacher's own queries, keys and values, to the outputs of the heads; then
    all together, each on what the ones before it give, to the output of the stack.

    Args:
        path: a checkpoint with swapped attention.
        data: folder made by fairseq-preprocess; targets are read for decoder sites only, and if there are any.
        options: ``split``, ``steps``, ``joint_steps``, ``learning_rate``, ``max_tokens``, ``held_out`` and ``seed``, as
            on the command line.

    Raises:
        InputError: nothing to fit, a model that was not trained with softmax, or a checkpoint or data folder that
            cannot be used.
    """
    state = load_checkpoint(path)
    trained = getattr(model_args(state, path), "trained_attention", DEFAULT)
    if trained != DEFAULT:
        raise InputError(f"{path} was trained with {trained} attention; calibration fits to {DEFAULT}: fine-tune it")
    student = load(path, data, options.split, needs_target=False)
    teacher = load(path, data, options.split, needs_target=False, attention=DEFAULT)
    for model in (student.model, teacher.model):
        model.requires_grad_(False)
    where = places(student.model, teacher.model)
    parameters = [parameter for place in where for parameter in place.student.requires_grad_(True).parameters()]
    drawn = teacher.draw(None, options.seed)
    if len(drawn) < 2 * options.held_out:
        raise InputError(f"{data}: {options.split} has {len(drawn)} sentences; --held-out takes half of them at most")
    chosen = teacher.draw(options.held_out, options.seed)
    batches = random_batches(teacher, drawn[~np.isin(drawn, chosen)], options.max_tokens, options.seed)
    held_out = sample_for(teacher, where, chosen)
    held_out_calls = teacher_calls(teacher, where, held_out)

    def next_sample():
        return sample_for(teacher, where, next(batches))

    def output(sample):
        return output_error(student, teacher, sample, encoder_only=encoder_only(where))

    with tqdm(total=options.steps + options.joint_steps, unit="step", disable=None) as bar:

        def progress(step, errors):
            shown = errors.mean(1).tolist() if errors.dim() == 2 else [errors.item()]
            what = "error per layer" if errors.dim() == 2 else "error of the output"
            bar.set_postfix_str(f"{what} " + " ".join(f"{error:.3f}" for error in shown), False)
            bar.update()

        apart = fit(
            parameters,
            lambda step: head_errors(where, teacher_calls(teacher, where, next_sample())).sum(),
            lambda: head_errors(where, held_out_calls),
            steps=options.steps,
            learning_rate=options.learning_rate,
            progress=progress,
        )
        together = fit(
            parameters,
            lambda step: output(next_sample()),
            lambda: output(held_out),
            steps=options.joint_steps if apart.steps == options.steps else 0,  # Ctrl-C ends both
            learning_rate=options.learning_rate / 2,
            progress=progress,
        )
    with torch.no_grad():
        after = head_errors(where, held_out_calls)
    added = set(map(id, parameters))
    for name, parameter in student.model.named_parameters():
        if id(parameter) in added:
            state["model"][name] = parameter.detach().to(state["model"][name].dtype)
    finished = (apart.steps, together.steps) == (options.steps, options.joint_steps)
    return Calibrated(where, apart.before, after, apart, together, state, finished)


def as_dict(done: Calibrated) -> dict:
    """The errors of every head, and of the output."""
    rows = zip(done.where, done.before.tolist(), done.after.tolist(), strict=True)
    return {
        "heads": [
            {"site": place.site, "layer": place.layer, "head": head, "before": before, "after": after}
            for place, befores, afters in rows
            for head, (before, after) in enumerate(zip(befores, afters, strict=True))
        ],
        "output": {"before": done.together.before.item(), "after": done.together.after.item()},
        "steps": [done.apart.steps, done.together.steps],
        "best_steps": [done.apart.best_step, done.together.best_step],
    }


def render(done: Calibrated) -> str:
    """The errors as a table: a line for each attention, a column for each head, before → after."""
    heads = range(done.before.size(1))
    lines = [
        "relative squared errors on held-out sentences, before → after; of the heads:",
        "| site    | layer | " + " | ".join(f"{f'head {head}':14}" for head in heads) + " |",
        "| :------ | ----: | " + " | ".join("-------------:" for _ in heads) + " |",
    ]
    for place, before, after in zip(done.where, done.before.tolist(), done.after.tolist(), strict=True):
        cells = [f"{x:6.3f} → {y:5.3f}" for x, y in zip(before, after, strict=True)]
        lines.append(f"| {place.site:7} | {place.layer:5} | " + " | ".join(cells) + " |")
    together = done.together
    lines.append(
        f"of the output, after {done.apart.steps} steps on the heads and {together.steps} on the output: "
        f"{together.before.item():.4f} → {together.after.item():.4f}"
    )
    return "\n".join(lines)
