"""``fairseq-lot swap``: plug another attention into a pretrained model."""

import copy
import dataclasses
import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from fairseq_lot.attention.base import Mechanism
from fairseq_lot.attention.options import SITES
from fairseq_lot.attention.registry import DEFAULT, MECHANISMS, PLUGGED, describe, mechanism_class
from fairseq_lot.errors import InputError
from fairseq_lot.models.pluggable_transformer import SIZES, base_architecture, own_architecture
from fairseq_lot.modules.flat_options import (
    DEFAULTS,
    add_attention_args,
    flag,
    mechanism_options,
    option_names,
    spell_out,
)
from fairseq_lot.modules.sites import ATTENTION_AT, attention_sites, build_site_mechanism, inner
from fairseq_lot.output.files import atomic_write
from fairseq_lot.plug_and_play.calibrate import FitOptions, add_fit_arguments, calibrate, render, trained_attention
from fairseq_lot.pretrained.checkpoint import Checkpoint, State, model_args, read, saved_task, serialised
from fairseq_lot.pretrained.device import add_device_argument, choose_device
from fairseq_lot.pretrained.languages import add_language_arguments, typed_pair

# arguments of a model that its weights and its function do not depend on
_TRAINING_ONLY = re.compile("drop|quant_noise|_activations|min_params|mha_|ffn_blocks|embed_path")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--path", required=True, metavar="BASE.pt", help="pretrained checkpoint: ours or fairseq's transformer*"
    )
    parser.add_argument("--out", required=True, metavar="SWAPPED.pt", help="the new checkpoint; never half-written")
    add_device_argument(parser)
    add_attention_args(parser.add_argument_group("attention"), differential=False, default=PLUGGED)
    group = parser.add_argument_group(
        "calibration",
        "What the new attention adds is fitted to softmax's outputs, on random pieces unless text is given; "
        "fairseq-lot calibrate does the same with a swapped checkpoint.",
    )
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--calibrate",
        metavar="DATA",
        help="fit on the text of a folder made by fairseq-preprocess, or of a plain text file in the source language",
    )
    choice.add_argument("--no-calibrate", action="store_true", help="leave the new parameters as they were drawn")
    add_language_arguments(group)
    add_fit_arguments(group)


def run(args: Namespace) -> int:
    """Swap, calibrate unless told not to, and say in one line what was done."""
    if Path(args.out).resolve() == Path(args.path).resolve():
        raise InputError(f"--out is the base itself, {args.path}; give another file")
    fitting = dataclasses.asdict(FitOptions.of(args))
    shared: dict[str, Any] = {"device": choose_device(args.device), "languages": typed_pair(args)}
    options = {name: value for name in option_names() if (value := getattr(args, name, None)) is not None}
    state = swap(args.path, **{"attention": PLUGGED, **options})
    reason = "not calibrated: as drawn" if args.no_calibrate else why_not_calibrated(state, args.path)
    with atomic_write(args.out, "wb") as file:  # opened first: an unwritable path fails at once
        if args.calibrate is not None or reason is None:
            done = calibrate(state, args.calibrate, **shared, **fitting)
            state, reason = done.state, done.description
            print(render(done))
        file.write(serialised(state))
    swapped = model_args(state, args.out)
    print(f"{args.out}: {swapped.attention} attention at {swapped.attention_sites}, from {args.path}; {reason}")
    print(f"fine-tune it, with the flags of your training: {fine_tuning_command(state, args.out)} ...")
    return 0


def fine_tuning_command(state: dict, path: str | Path) -> str:
    """The fairseq-train of a swapped checkpoint: its sizes; its attention comes with the checkpoint."""
    args = model_args(state, path)
    suffix, sizes = min(
        ((suffix, _sizes_besides(args, SIZES[suffix])) for suffix in SIZES), key=lambda two: len(two[1])
    )
    data = saved_task(state, path).get("data")
    return shlex.join(
        [
            *("fairseq-train", data if isinstance(data, str) else "DATA", "--user-dir", "fairseq_lot"),
            *("--arch", f"{'diff' if args.differential else args.attention}_transformer{suffix}"),
            *(word for name, value in sizes.items() for word in [flag(name), *([] if value is True else [str(value)])]),
            *("--finetune-from-model", str(path)),
        ]
    )


def _sizes_besides(args: Namespace, size: Callable[[Namespace], None]) -> dict:
    """What has to be told, besides an architecture of this size, for a model of these arguments."""
    told: dict = {}
    while True:  # one after the other, as some follow from others
        usual = Namespace(**told)
        size(usual)
        for name, value in vars(usual).items():
            wanted = getattr(args, name, value)
            if wanted not in (value, None, False) and not _TRAINING_ONLY.search(name):
                told[name] = wanted
                break
        else:
            return told


def why_not_calibrated(state: dict, path: str | Path) -> str | None:
    """Why a swapped checkpoint is left as it is when nobody asked for a calibration; None: it is to be calibrated."""
    if not _has_own_parameters(model_args(state, path)):
        return "not calibrated: this attention has no parameters of its own"
    trained = trained_attention(state, path)
    return None if trained == DEFAULT else f"not calibrated: the model was trained with {trained} attention"


def swap(checkpoint: Checkpoint, *, attention: str = PLUGGED, **flat_options) -> dict:
    """Return a checkpoint whose attention is another one; everything that both share is kept bit for bit.

    Args:
        checkpoint: its path, or what :func:`~fairseq_lot.pretrained.checkpoint.load_checkpoint` returned, which is not
            changed.
        attention: the new mechanism: {mechanisms}. The default keeps a model's quality, once it is calibrated.
        **flat_options: ``attention_sites``, where it stands, a list of {sites} (default: encoder),
            and the mechanism's own options, such as ``lot_num_pivots``. ``fairseq-lot swap --help`` lists them all,
            with dashes for underscores.

    Returns:
        A checkpoint without optimiser state, whose arguments say with which attention it was trained. The
        differential backbone stays; parameters that the same mechanism already had keep their values when the shapes
        agree, others start as a new model's would.

    Raises:
        InputError: an unknown mechanism or option, or a site where the mechanism cannot stand.
    """
    mechanism_class(attention)
    state, path = read(checkpoint)
    was_trained = state.get("last_optimizer_state") is not None
    state = {**state, "last_optimizer_state": None}
    for holder in ("cfg", "args"):
        state[holder] = copy.deepcopy(state.get(holder))
    args = model_args(state, path)
    # old checkpoints may lack arguments that have a default today
    base_architecture(args)
    previous = getattr(args, "attention", None) or DEFAULT
    if was_trained:  # with the attention that it has
        args.trained_attention = describe(previous, mechanism_options(args, previous))
    _set_attention(args, attention, flat_options)
    weights, new = state["model"], _new_parameters(args)

    def keeps_value(key):
        """λ and the norm of the differential form stay; what is a mechanism's own stays with the same mechanism."""
        if key not in weights:
            return False
        of_wrapper = getattr(args, "differential", None) and ".mechanism.inner." not in key
        return of_wrapper or (previous == attention and weights[key].shape == new[key].shape)

    own = {key: weights[key] if keeps_value(key) else value for key, value in new.items()}
    shared = {key: value for key, value in weights.items() if ".mechanism." not in key}
    return State({**state, "model": _in_order(shared, own)})


def _in_order(shared: dict, own: dict) -> dict:
    """All parameters as fairseq-train would write them: those of a mechanism behind the projections around it.

    Where there are no projections, as in a state that only tries options, they stand at the end.
    """
    ordered: dict = {}
    for name, following in pairwise([*shared, ""]):
        ordered[name] = shared[name]
        attention, found, _ = name.partition("_attn.")
        if found and not following.startswith(attention + found):
            start = f"{attention}{found}mechanism."
            ordered.update({key: value for key, value in own.items() if key.startswith(start)})
    return ordered | own


swap.__doc__ = (swap.__doc__ or "").format(mechanisms=", ".join(MECHANISMS), sites=", ".join(SITES))


def _set_attention(args: Namespace, attention: str, flat_options: dict) -> None:
    """Write the mechanism with all its options into the model's arguments, and ours as the architecture."""
    foreign = [name for name in flat_options if name not in option_names()]
    if foreign:
        raise InputError(f"unknown option {foreign[0]!r}")
    of_others = [n for n in flat_options if n not in DEFAULTS and not n.startswith(attention + "_")]
    if of_others:
        raise InputError(f"option --{of_others[0].replace('_', '-')} does not belong to {attention} attention")
    for name in option_names():
        if name in vars(args) and not name.startswith("differential"):
            delattr(args, name)
    args.attention = attention
    for name, value in flat_options.items():
        setattr(args, name, _comma_separated(value) if name == "attention_sites" else value)
    spell_out(args)
    if args.arch.startswith("transformer"):
        args.arch = own_architecture(args.arch)
    args._name = args.arch


def _comma_separated(sites: str | list[str] | tuple[str, ...]) -> str:
    """Attention sites as the command line has them."""
    if not isinstance(sites, (str, list, tuple)) or not sites:
        raise InputError(f"attention_sites must name some of {', '.join(SITES)}, not {sites!r}")
    return sites if isinstance(sites, str) else ",".join(map(str, sites))


def _new_parameters(args: Namespace) -> dict:
    """Parameters and buffers of all mechanisms of a model with these arguments, by their names in its checkpoint."""
    return {
        prefix + key: value for prefix, mechanism in _mechanisms(args) for key, value in mechanism.state_dict().items()
    }


def _has_own_parameters(args: Namespace) -> bool:
    """The mechanism itself, without the differential form around it, has something to learn."""
    return any(list(inner(mechanism).parameters()) for _, mechanism in _mechanisms(args))


def _mechanisms(args: Namespace) -> Iterator[tuple[str, Mechanism]]:
    """The mechanisms of a model with these arguments, each with the start of its parameters' names."""
    attention_sites(args)
    for site in SITES:
        stack, attention = ATTENTION_AT[site]
        if site == "cross" and getattr(args, "no_cross_attention", False):
            continue
        num_heads = getattr(args, f"{stack}_attention_heads")
        for layer in range(getattr(args, f"{stack}_layers")):
            mechanism = build_site_mechanism(
                args,
                site=site,
                layer=layer,
                num_heads=num_heads,
                head_dim=getattr(args, f"{stack}_embed_dim") // num_heads,
                dropout=args.attention_dropout,
            )
            if mechanism is not None:
                yield f"{stack}.layers.{layer}.{attention}.mechanism.", mechanism
