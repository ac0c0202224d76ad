"""A whole model: its encoder, a training step and a decoding step."""

from argparse import Namespace
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial

import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel

from benchmarks.measure import Job
from benchmarks.mechanisms import Named, read_mechanisms
from benchmarks.render import MEBIBYTES, MILLISECONDS, Measure
from fairseq_lot.attention.options import SITES
from fairseq_lot.attention.registry import DEFAULT
from fairseq_lot.errors import InputError
from fairseq_lot.models.pluggable_transformer import PluggableTransformerModel
from fairseq_lot.modules.flat_options import flat_name

MEASURES: tuple[Measure, ...] = (
    Measure("encoder", "encoder_seconds", *MILLISECONDS),
    Measure("training step", "training_seconds", *MILLISECONDS),
    Measure("decoding step", "decoding_seconds", *MILLISECONDS),
    Measure("training speed", "words_per_second", 1.0, "words/s", more_is_better=True),
    Measure("peak memory of a training step", "peak_bytes", *MEBIBYTES),
    Measure("state of decoding", "state_bytes", *MEBIBYTES),
)


class ModelBench:
    """One architecture with softmax, and with other mechanisms at some of its sites, on random pieces.

    Args:
        arch: of fairseq's ``transformer`` or of ours.
        mechanisms: as :func:`~benchmarks.mechanisms.read_mechanisms` takes them; None for LOT in the
            encoder, and at all sites.
        ranks: for what has pivots or features.
        longest: document, in tokens.
        prefix: tokens that a decoding step has behind it.
        vocabulary: pieces, random ones.
    """

    base, measures, turn = DEFAULT, MEASURES, 0.3

    def __init__(
        self,
        arch: str,
        mechanisms: Iterable[str] | None,
        ranks: list[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
        longest: int,
        prefix: int = 32,
        vocabulary: int = 10_000,
    ):
        if ARCH_MODEL_REGISTRY.get(arch) not in (TransformerModel, PluggableTransformerModel):
            known = [arch for arch, kind in ARCH_MODEL_REGISTRY.items() if kind is PluggableTransformerModel]
            raise InputError(
                f"--model must be an architecture of fairseq's transformer or of these: {', '.join(sorted(known))}; "
                f"not {arch!r}"
            )
        self.device, self.dtype, self.prefix, self.vocabulary = device, dtype, prefix, vocabulary
        self.words = f"{arch}, vocabulary {vocabulary}, {prefix} tokens behind a decoding step"
        found = read_mechanisms([DEFAULT, *(mechanisms or ["lot@encoder", "lot@all"])], ranks)
        named = {one.label: one for one in found}
        self.contenders = {label: self._build(arch, one, max(longest, prefix + 1)) for label, one in named.items()}

    def _build(self, arch: str, one: Named, positions: int) -> TransformerModel:
        """A model in training mode, with positions for long documents."""
        symbols = Dictionary()
        for number in range(symbols.nspecial, self.vocabulary):
            symbols.add_symbol(str(number))
        args = Namespace(
            arch=arch,
            attention=one.name,
            attention_sites=",".join(SITES) if one.sites == "all" else one.sites,
            share_all_embeddings=True,
            max_source_positions=positions,
            max_target_positions=positions,
            **{flat_name(one.name, key): value for key, value in one.options.items()},
        )
        ARCH_CONFIG_REGISTRY[arch](args)
        torch.manual_seed(0)
        task = Namespace(source_dictionary=symbols, target_dictionary=symbols)
        return ARCH_MODEL_REGISTRY[arch].build_model(args, task).to(self.device, self.dtype).train()

    def jobs(self, contenders: dict[str, TransformerModel], bsz: int, length: int) -> dict[str, Callable[[], Job]]:
        """What makes the job of each contender; all get the same documents."""
        shape = 2, bsz, max(length, self.prefix + 1)
        pieces = torch.randint(Dictionary().nspecial, self.vocabulary, shape).to(self.device)
        source, target = pieces[..., :length]
        written = pieces[1, :, : self.prefix + 1]
        return {name: partial(job, model, source, target, written) for name, model in contenders.items()}


def job(model: TransformerModel, source: torch.Tensor, target: torch.Tensor, written: torch.Tensor) -> Job:
    """The encoder and a step of decoding as ``fairseq-generate`` makes them, and a training step without its update.

    Args:
        model: in training mode.
        source, target: ``(bsz, n)``, without pads.
        written: ``(bsz, t)``; the step is that which follows the last of them.
    """
    symbols, lengths = model.encoder.dictionary, source.new_full((len(source),), source.size(1))
    previous = target.roll(1, -1)
    previous[:, 0] = symbols.eos()

    def train():
        log_probabilities = model.get_normalized_probs(model(source, lengths, previous), log_probs=True)
        loss, _ = label_smoothed_nll_loss(
            log_probabilities.flatten(0, 1), target.flatten(), 0.1, ignore_index=symbols.pad()
        )
        try:
            loss.backward()
        finally:
            model.zero_grad()

    translating = deepcopy(model, {id(x): x for x in (*model.parameters(), symbols)})  # with the same parameters
    translating.make_generation_fast_()

    @torch.no_grad()
    def encode():
        return translating.encoder(source, lengths)

    encoded = encode()
    state: dict[str, dict] = {}

    @torch.no_grad()
    def decode(tokens, state):
        translating.decoder(tokens, encoder_out=encoded, incremental_state=state)

    for i in range(1, written.size(1)):
        decode(written[:, :i], state)

    def next_step():
        decode(written, {key: dict(kept) for key, kept in state.items()})

    return Job(
        works={"encoder_seconds": encode, "decoding_seconds": next_step, "training_seconds": train},
        known={"state_bytes": sum(x.nbytes for kept in state.values() for x in kept.values() if x is not None)},
        rates={"words_per_second": (target.numel(), "training_seconds")},
    )
