"""``fairseq-lot calibrate``: fit a swapped attention to the softmax attention that it replaced, without labels."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from tqdm import tqdm

from fairseq_lot.attention.registry import DEFAULT
from fairseq_lot.errors import InputError
from fairseq_lot.files import atomic_write
from fairseq_lot.plug_and_play.calibration import Fit, Place, fit, places, random_batches, teacher_calls
from fairseq_lot.plug_and_play.checkpoint import load_checkpoint, serialised
from fairseq_lot.plug_and_play.loading import load


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
    add("--steps", type=int, default=800, help="number of updates (default: %(default)s)")
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
        where, fitted, state = calibrate(args.path, args.data, args)
        file.write(serialised(state))
    if args.json is not None:
        with atomic_write(args.json) as file:
            json.dump({"path": str(args.path), "data": str(args.data), **as_dict(where, fitted)}, file, indent=1)
            file.write("\n")
    print(render(where, fitted))
    print(f"{args.out}: calibrated from {args.path}")
    return 0


def check_fit_arguments(args: Namespace) -> None:
    """Refuse values without a meaning."""
    for name, least in {"steps": 1, "max_tokens": 1, "held_out": 1, "seed": 0}.items():
        if getattr(args, name) < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if not 0 < args.learning_rate < float("inf"):
        raise InputError(f"--learning-rate must be a finite number greater than 0, got {args.learning_rate}")


def calibrate(path: str | Path, data: str | Path, options: Namespace) -> tuple[list[Place], Fit, dict]:
    """Fit the parameters that a mechanism has added; the teacher is the same model with softmax in its place.

    Args:
        path: a checkpoint with swapped attention.
        data: folder made by fairseq-preprocess; targets are read for decoder sites only, and if there are any.
        options: ``split``, ``steps``, ``learning_rate``, ``max_tokens``, ``held_out`` and ``seed``, as on the command
            line.

    Returns:
        The places that were fitted, what was reached, and the calibrated checkpoint.

    Raises:
        InputError: nothing to fit, or a checkpoint or data folder that cannot be used.
    """
    student = load(path, data, options.split, needs_target=False)
    teacher = load(path, data, options.split, needs_target=False, attention=DEFAULT)
    for model in (student.model, teacher.model):
        model.requires_grad_(False)
    where = places(student.model, teacher.model)
    for place in where:
        place.student.requires_grad_(True)
    drawn = teacher.draw(None, options.seed)
    if len(drawn) < 2 * options.held_out:
        raise InputError(f"{data}: {options.split} has {len(drawn)} sentences; --held-out takes half of them at most")
    chosen = teacher.draw(options.held_out, options.seed)
    training = drawn[~torch.isin(torch.from_numpy(drawn), torch.from_numpy(chosen)).numpy()]
    batches = random_batches(teacher, training, options.max_tokens, options.seed)
    with tqdm(total=options.steps, unit="step", disable=None) as bar:

        def progress(step, errors):
            bar.set_postfix_str("error per layer " + " ".join(f"{error:.3f}" for error in errors.tolist()), False)
            bar.update()

        fitted = fit(
            where,
            teacher_calls(teacher, where, chosen),
            lambda step: teacher_calls(teacher, where, next(batches)),
            steps=options.steps,
            learning_rate=options.learning_rate,
            progress=progress,
        )
    state = load_checkpoint(path)
    added = {id(parameter) for place in where for parameter in place.student.parameters()}
    for name, parameter in student.model.named_parameters():
        if id(parameter) in added:
            state["model"][name] = parameter.detach().to(state["model"][name].dtype)
    return where, fitted, state


def as_dict(where: list[Place], fitted: Fit) -> dict:
    """The errors of every head."""
    return {
        "steps": fitted.steps,
        "best_step": fitted.best_step,
        "heads": [
            {"site": place.site, "layer": place.layer, "head": head, "before": before, "after": after}
            for place, befores, afters in zip(where, fitted.before.tolist(), fitted.after.tolist(), strict=True)
            for head, (before, after) in enumerate(zip(befores, afters, strict=True))
        ],
    }


def render(where: list[Place], fitted: Fit) -> str:
    """The errors as a table: a line for each attention, a column for each head, before → after."""
    heads = range(fitted.before.size(1))
    lines = [
        "relative squared error of the head outputs on held-out sentences, before → after; "
        f"step {fitted.best_step} of {fitted.steps} was best",
        "| site    | layer | " + " | ".join(f"head {head}       " for head in heads) + " |",
        "| :------ | ----: | " + " | ".join("-------------:" for _ in heads) + " |",
    ]
    for place, before, after in zip(where, fitted.before.tolist(), fitted.after.tolist(), strict=True):
        cells = [f"{x:6.3f} → {y:5.3f}" for x, y in zip(before, after, strict=True)]
        lines.append(f"| {place.site:7} | {place.layer:5} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
