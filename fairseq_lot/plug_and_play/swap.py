"""``fairseq-lot swap``: put another attention into a trained model."""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel

from fairseq_lot.attention.near_far import EXACT_UP_TO
from fairseq_lot.attention.options import SITES
from fairseq_lot.attention.registry import DEFAULT, DEFAULT_SWAP, MECHANISMS
from fairseq_lot.errors import InputError
from fairseq_lot.models.architecture import own_architecture
from fairseq_lot.models.pluggable_transformer import base_architecture
from fairseq_lot.modules.flat_options import (
    DEFAULTS,
    add_attention_args,
    add_options,
    check_used,
    option_names,
    resolve_options,
    typed_options,
)
from fairseq_lot.modules.places import Place, listed, named_places
from fairseq_lot.modules.sites import (
    ATTENTION_AT,
    attention_sites,
    attentions,
    can_be_fitted,
    kept_places,
    named_sites,
    numbers_of_layers,
    sites_in_words,
    softmax_trained_at,
)
from fairseq_lot.output.files import atomic_write, refuse_same
from fairseq_lot.output.tables import Table
from fairseq_lot.plug_and_play.calibrate import (
    Calibrated,
    FitOptions,
    calibrate,
    compare,
    exact_up_to,
    how_to_fit,
    most_tokens,
    render,
)
from fairseq_lot.plug_and_play.cost import (
    DEFAULT_BUDGET,
    NO_BUDGET,
    REMEDY,
    USUAL,
    Budget,
    Cost,
    add_json_argument,
    forget_cost,
    json_file,
)
from fairseq_lot.plug_and_play.sentences import note_training
from fairseq_lot.pretrained.checkpoint import Checkpoint, CheckpointLike, load_checkpoint
from fairseq_lot.pretrained.device import add_device_argument
from fairseq_lot.pretrained.languages import add_language_arguments, with_languages
from fairseq_lot.pretrained.loading import build
from fairseq_lot.pretrained.text import add_text_arguments


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--path", required=True, metavar="BASE.pt", help="trained checkpoint: ours or fairseq's transformer*"
    )
    parser.add_argument("--out", required=True, metavar="SWAPPED.pt", help="the new checkpoint; never half-written")
    parser.add_argument(
        "--budget",
        default=USUAL,
        metavar="NATS",
        help="largest change of the predictions, in nats a piece; the most expensive places keep softmax until the "
        f"others fit (default: {DEFAULT_BUDGET} of the output; with --no-calibrate {NO_BUDGET}). {NO_BUDGET}: no limit",
    )
    add_json_argument(parser)
    add_device_argument(parser)
    add_attention_args(parser.add_argument_group("attention"), differential=False, default=DEFAULT_SWAP)
    group = parser.add_argument_group(
        "calibration",
        "The new parameters are fitted to softmax's outputs, on random pieces unless text is given; "
        "fairseq-lot calibrate does the same with a swapped checkpoint.",
    )
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--calibrate",
        metavar="DATA",
        help="fit on the text of a folder made by fairseq-preprocess, or of a plain text file in the source language",
    )
    choice.add_argument("--no-calibrate", action="store_true", help="do not fit: the new parameters stay random")
    add_language_arguments(group)
    add_options(group, FitOptions)
    add_text_arguments(parser.add_argument_group("from sentences to pieces", "With --calibrate and a plain text file."))


def run(args: Namespace) -> None:
    """Run ``fairseq-lot swap``: write the swapped checkpoint, print the cost."""
    refuse_same({"--path": args.path, "--calibrate": args.calibrate, "--out": args.out, "--json": args.json})
    how = how_to_fit(args, args.calibrate, without="--no-calibrate" if args.no_calibrate else None)
    try:
        budget = Budget.read(args.budget, fitted=not args.no_calibrate)
    except InputError as error:
        raise error.on_command_line() from None
    base = load_checkpoint(args.path)
    with_languages(base, how["languages"])  # refuses the opposite ones
    options = {"attention": DEFAULT_SWAP, **typed_options(args)}
    # opened first: an unwritable path fails at once
    with atomic_write(args.out, "wb") as file, json_file(args.json) as numbers:
        done = plug_in(base, args.calibrate, fitted=not args.no_calibrate, budget=budget, how=how, **options)
        file.write(done.state.serialised())
        numbers.update(done.as_json())
    if done.calibrated is not None:
        print(render(done.calibrated))
    before, swapped = base.model_args, done.state.model_args
    if lost := _sites_that_become_softmax(before, swapped):
        print(f"{args.path} also has {before.attention} attention at {','.join(lost)}; it becomes plain softmax")
    where = f"{swapped.attention} attention at {sites_in_words(swapped)}"
    print(f"{args.out}: {where}, from {args.path}; {done.description}")
    print(*done.notes(), sep="\n")
    print(f"fine-tune it, with the flags of your training: {fine_tuning_command(done.state, args.out)} ...")


def _sites_that_become_softmax(before: Namespace, swapped: Namespace) -> list[str]:
    """Sites where the base has another attention than plain softmax, and the swapped model has plain softmax."""
    lost = [site for site in attention_sites(before) if site not in attention_sites(swapped)]
    if (getattr(before, "attention", None) or DEFAULT) != DEFAULT:
        return lost
    has_prior = getattr(before, "softmax_prior", None) is not None
    return [site for site in lost if has_prior and site != "cross"]  # softmax has no prior at cross


def fine_tuning_command(state: Checkpoint, path: str | Path) -> str:
    """The fairseq-train command that fine-tunes a swapped checkpoint; attention and sizes come from the checkpoint."""
    task = state.settings("task")
    options = state.task_options() if isinstance(task, (dict, Namespace)) else {}
    data, pair = options.get("data"), (options.get("source_lang"), options.get("target_lang"))
    return shlex.join(
        [
            *("fairseq-train", data if isinstance(data, str) else "DATA", "--user-dir", "fairseq_lot"),
            *("--arch", "pluggable_transformer"),
            *("--finetune-from-model", str(path)),
            *(("-s", pair[0], "-t", pair[1]) if all(isinstance(language, str) for language in pair) else ()),
        ]
    )


def why_not_calibrated(state: Checkpoint) -> str | None:
    """The reason not to calibrate a swapped checkpoint by default; None: calibrate it."""
    if not can_be_fitted(build(state)):
        return "not calibrated: this attention has no parameters that a fit could change"
    exact, most = exact_up_to(state), most_tokens(state, *attention_sites(state.model_args))
    if exact >= most:
        return f"not calibrated: it is exact up to {exact} tokens, and the model takes at most {most}"
    return None if state.softmax_of_training() is not None else f"not calibrated: the model was {state.how_trained()}"


@dataclass(frozen=True)
class Swapped:
    """The result of a swap.

    Attributes:
        state: the swapped checkpoint.
        description: how its new parameters were fitted, or why they were not.
        cost: the change of its predictions against the trained model.
        calibrated: the result of the fit; None if there was none.
        budget: the limits for the cost.
        cost_of_all: the cost with all places swapped.
        given_up: the places where the swap was undone because of the budget; for each the nats and the error just
            before.
    """

    state: Checkpoint
    description: str
    cost: Cost
    calibrated: Calibrated | None
    budget: Budget
    cost_of_all: Cost
    given_up: dict[str, tuple[float, float]]

    def notes(self) -> list[str]:
        """Lines about the cost, the places that keep softmax, and whether the cost exceeds the default budget."""
        lines = [str(self.cost)]
        if self.given_up:
            lines += [
                f"softmax stays at {', '.join(self.given_up)}: with these places the swap would exceed the budget",
                self.table(),
            ]
        if self.is_expensive():
            lines.append(f"this is expensive: the default budget of a fitted swap is {DEFAULT_BUDGET}")
        return lines

    def as_json(self) -> dict[str, Any]:
        """The numbers of the swap, for scripts."""
        of_all = {"nats_of_all": self.cost_of_all.nats, "error_of_all": self.cost_of_all.error}
        return asdict(self.cost) | of_all | {"budget": self.budget.nats, "given_up": list(self.given_up)}

    def is_expensive(self) -> bool:
        """Whether it costs more than the default budget."""
        return DEFAULT_BUDGET.use(self.cost.nats, self.cost.error) > 1

    def table(self) -> str:
        """A table of the places: cost alone, swapped or not, and why."""
        rows = []
        for place, nats in self.cost_of_all.by_place.items():
            error = self.cost_of_all.error_by_place[place]
            left = self.given_up.get(place)
            why = "swapped" if left is None else f"softmax: with it nats {left[0]:.4f}, error {left[1]:.4f}"
            rows.append([place, f"{nats:.4f}", f"{error:.4f}", why])
        head = ["place", "nats alone", "error alone", "attention"]
        return Table(head, rows, heading=f"the budget: {self.budget}").markdown(padded=True)


def swap(
    checkpoint: CheckpointLike,
    *,
    attention: str = DEFAULT_SWAP,
    calibrate: bool | str | Path = True,
    budget: float | str | None = USUAL,
    device: str | torch.device | None = None,
    languages: tuple[str, str] | None = None,
    text: dict[str, Any] | None = None,
    **options: Any,
) -> Checkpoint:
    """Replace the attention of a trained model and fit the new one to the old one, as ``fairseq-lot swap`` does.

    Args:
        checkpoint: its path, or the result of :func:`~fairseq_lot.pretrained.checkpoint.load_checkpoint`; it is not
            changed.
        attention: the new mechanism: {mechanisms}. The default preserves a model's quality.
        calibrate: True: fit the new parameters on random pieces. A folder made by fairseq-preprocess, or a plain text
            file in the source language: fit on its text. False: leave them random.
        budget: largest change of the predictions, in nats a piece; the most expensive places keep softmax until the
            others fit. None: no limit. Default: {budget} of the output, and no limit if ``calibrate`` is False.
        device: of the models; None: a GPU if there is one.
        languages: source and target, if neither checkpoint nor data folder has them.
        text: options of :meth:`Text.of`, for a plain text file.
        **options: ``attention_sites``: the sites to swap, of {sites} (default: encoder); ``keep_softmax``: places at
            these sites that keep the trained softmax, such as ``encoder.0``; the mechanism's own options, such as
            ``lot_num_pivots``; those of :class:`FitOptions`, such as ``steps``. ``fairseq-lot swap --help`` lists them
            all, with dashes for underscores.

    Returns:
        The new checkpoint.

    Raises:
        InputError: an unknown mechanism or option, a site that the mechanism does not support or the model lacks, or a
            budget that no place fits.
    """
    names = {field.name for field in fields(FitOptions)}
    fitting = {name: options.pop(name) for name in names & options.keys()}
    if calibrate is False and fitting:
        raise InputError("is for a calibration; leave it out, or calibrate=False", min(fitting))
    how = {"device": device, "languages": languages, "text": text, **fitting}
    data = None if isinstance(calibrate, bool) else calibrate
    fitted = calibrate is not False
    limit = Budget.read(budget, fitted=fitted)
    done = plug_in(checkpoint, data, fitted=fitted, budget=limit, how=how, attention=attention, **options)
    if done.given_up or done.is_expensive():
        print(*done.notes(), sep="\n", file=sys.stderr)
    return done.state


@torch.inference_mode(False)  # also if called in inference mode
def plug_in(
    checkpoint: CheckpointLike,
    data: str | Path | None,
    *,
    fitted: bool,
    budget: Budget,
    how: dict[str, Any],
    **options: Any,
) -> Swapped:
    """Swap, fit, measure the cost, and keep softmax at places that exceed the budget.

    Args:
        checkpoint: the base.
        data: text to fit on, see :func:`~fairseq_lot.plug_and_play.calibrate.calibrate`; None: random pieces. If the
            swap has nothing to fit, text is refused and None means no fit.
        fitted: fit the new parameters.
        budget: limits for the cost.
        how: further arguments of ``calibrate``.
        **options: arguments of :func:`swap_as_drawn`.

    Raises:
        InputError: see :func:`swap`.
    """
    base = load_checkpoint(checkpoint)
    state = swap_as_drawn(base, **options)
    state.path = base.path  # for messages
    description = why_not_calibrated(state) if fitted else "not calibrated: as drawn"
    done = None
    if fitted and (data is not None or description is None):
        done = calibrate(state, data, **how)
        state, description, cost, comparison = done.state, done.description, done.cost, done.comparison
    else:
        comparison = compare(state, base, data, **how)
        cost = comparison.cost()
    of_all = cost
    try:
        cost, given_up = comparison.within(cost, budget)
        if given_up:
            state = with_softmax_at(state, base, list(given_up), **options)
    except InputError as error:
        raise InputError(f"{base.path}: the swap costs more than {budget}, and {error}; {REMEDY}") from None
    cost.note(state.model_args)
    return Swapped(state, description or "", cost, done, budget, of_all, given_up)


def with_softmax_at(state: Checkpoint, base: Checkpoint, places: list[str], **options: Any) -> Checkpoint:
    """A swapped checkpoint with the base's attention, including projections, at some places.

    Args:
        state: the swapped checkpoint.
        base: the checkpoint before the swap.
        places: the places that get the base's softmax back.
        **options: the swap's arguments of :func:`swap_as_drawn`.

    Raises:
        InputError: the base was not trained with softmax there.
    """
    kept = [*map(str, named_places(options.pop("keep_softmax", None))), *places]
    mixed = swap_as_drawn(base, keep_softmax=kept, **options)
    at = [(*ATTENTION_AT[place.site], place.layer) for place in named_places(places)]
    modules = [f"{stack}.layers.{layer}.{name}." for stack, name, layer in at]
    for name, weight in state["model"].items():
        if name in mixed["model"] and not name.startswith(tuple(modules)):
            mixed["model"][name] = weight
    for name in ("calibration", "trained_attention", "trained_sites"):
        if hasattr(state.model_args, name):
            setattr(mixed.model_args, name, getattr(state.model_args, name))
    return mixed


def swap_as_drawn(checkpoint: CheckpointLike, *, attention: str = DEFAULT_SWAP, **flat_options: Any) -> Checkpoint:
    """Replace the attention of a trained model without a fit; weights that both models have do not change.

    Args:
        checkpoint: its path, or the result of :func:`~fairseq_lot.pretrained.checkpoint.load_checkpoint`; it is not
            changed.
        attention: the new mechanism: {mechanisms}. The default preserves a model's quality once it is calibrated.
        **flat_options: ``attention_sites``: the sites to swap, of {sites} (default: encoder); ``keep_softmax``: places
            at these sites that keep the trained softmax, such as ``encoder.0``; the mechanism's own options, such as
            ``lot_num_pivots``. ``fairseq-lot swap --help`` lists them all, with dashes for underscores. In a model
            trained with softmax, near_far by default has tangents (``near_far_tangents``) and is exact up to
            {exact_up_to} tokens (``near_far_exact_up_to``). Softmax that was trained with a prior keeps it at
            self-attention that is not swapped.

    Returns:
        A checkpoint without optimiser state; its arguments name the attention of the training. The differential form
        stays. Parameters that were trained with the same mechanism keep their values if shapes agree; other new
        parameters are initialised as in a new model.

    Raises:
        InputError: an unknown mechanism or option, a site that the mechanism does not support, a site or place that the
            model lacks, or a place in ``keep_softmax`` that was not trained with softmax.
    """
    if any(name.startswith("differential") for name in flat_options):
        raise InputError("swap does not change the differential form; leave out its options")
    state = load_checkpoint(checkpoint).with_own_arguments()
    of_training = state.attention_of_training()
    args, weights = state.model_args, state["model"]
    # sets arguments that old checkpoints lack
    base_architecture(args)
    flat_options |= _softmax_elsewhere(state, attention, flat_options)
    previous = getattr(args, "attention", None) or DEFAULT
    try:
        softmax = softmax_trained_at(args, named_places(flat_options.get("keep_softmax")))
    except InputError as error:
        raise InputError(f"{state.path}: {error}") from None
    args.trained_attention, args.trained_sites = of_training
    note_training(state)
    vars(args).pop("calibration", None)
    forget_cost(args)
    implied = options_of_swap(attention)
    if of_training[0].split()[0] != DEFAULT:  # the model was not trained with softmax
        implied = {name: getattr(args, name) for name in implied if previous == attention and hasattr(args, name)}
    write_attention_args(args, attention, **implied | flat_options)
    if kept_places(args) and flat_options.get("softmax_prior") not in (None, softmax.get("softmax_prior")):
        raise InputError(f"{state.path} was trained with another prior at the places to keep; leave out softmax_prior")
    vars(args).update(softmax)
    state["model"] = {name: value for name, value in weights.items() if ".mechanism." not in name}
    model = build(state)
    drawn = model.state_dict()
    lacking = set(attention_sites(args)) - {site for site, _, _ in attentions(model)}
    if lacking:
        raise InputError(f"{state.path} has no attention at {', '.join(sorted(lacking))}; give other sites")

    def is_kept(name: str) -> bool:
        """Whether a trained weight stays: a mechanism's own only with the same mechanism and shape, all others do."""
        if name not in weights:
            return False
        of_mechanism = (".mechanism.inner." if args.differential else ".mechanism.") in name
        is_trained = of_training[0] != DEFAULT and previous == attention
        return not of_mechanism or (is_trained and weights[name].shape == drawn[name].shape)

    state["model"] = {name: weights[name] if is_kept(name) else drawn[name] for name in drawn}
    state["last_optimizer_state"] = None
    state.drop_averages()
    return Checkpoint(state)  # drops the path: it differs from its file now


_WORDS = {
    "mechanisms": ", ".join(MECHANISMS),
    "sites": ", ".join(SITES),
    "budget": DEFAULT_BUDGET,
    "exact_up_to": EXACT_UP_TO,
}
for function in (swap, swap_as_drawn):
    function.__doc__ = (function.__doc__ or "").format(**_WORDS)


def _softmax_elsewhere(state: Checkpoint, attention: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options that keep a trained softmax with a prior at self-attention that is not swapped; empty without one."""
    softmax = state.softmax_of_training()
    if not softmax or attention == DEFAULT:
        return {}
    swapped = named_sites(options.get("attention_sites", DEFAULTS["attention_sites"]))
    others = [site for site in named_sites(softmax["attention_sites"]) if site not in (*swapped, "cross")]
    if not others:
        return {}
    kept = [Place(site, layer) for site in others for layer in numbers_of_layers(state.model_args, site)]
    kept += named_places(options.get("keep_softmax"))
    return {"attention_sites": [*swapped, *others], "keep_softmax": listed(kept)}


def options_of_swap(attention: str) -> dict[str, Any]:
    """Options that differ from a mechanism's defaults when it replaces the softmax of a trained model."""
    return {"near_far_exact_up_to": EXACT_UP_TO, "near_far_tangents": True} if attention == "near_far" else {}


def write_attention_args(args: Namespace, attention: str, **flat_options: Any) -> None:
    """Write a mechanism with all its options into a model's arguments, and a pluggable architecture as ``arch``.

    Raises:
        InputError: an unknown mechanism or option, or an invalid value.
    """
    foreign = [name for name in flat_options if name not in option_names()]
    if foreign:
        raise InputError(f"unknown option {foreign[0]!r}; fairseq-lot swap --help lists the options")
    keeps_softmax = bool(named_places(flat_options.get("keep_softmax")))
    used = [name for name, value in flat_options.items() if name != "keep_softmax" or value is not None]
    check_used(used, attention, differential=True, keeps_softmax=keeps_softmax)
    for name in option_names():
        if name in vars(args) and not name.startswith("differential"):
            delattr(args, name)
    sites = ",".join(named_sites(flat_options.get("attention_sites", DEFAULTS["attention_sites"])))
    vars(args).update({**flat_options, "attention": attention, "attention_sites": sites})
    resolve_options(args)
    if ARCH_MODEL_REGISTRY[args.arch] is TransformerModel:
        args.arch = own_architecture(args.arch)
    args._name = args.arch
