"""Benchmark of a whole model: the encoder, a training step, a decoding step."""

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
from benchmarks.mechanisms import read_ways
from benchmarks.render import MEBIBYTES, MILLISECONDS, Measure
from fairseq_lot.attention.registry import DEFAULT
from fairseq_lot.errors import InputError
from fairseq_lot.models.pluggable_transformer import PluggableTransformerModel
from fairseq_lot.plug_and_play.points import AttentionSpec
from fairseq_lot.plug_and_play.swap import write_attention_args
from fairseq_lot.pretrained.loading import untrained


class ModelBench:
    """The benchmark of a model on random pieces.

    The contenders are one architecture with softmax, and with each mechanism at its sites.

    Args:
        arch: an architecture of fairseq's ``transformer`` or of ours.
        mechanisms: as :func:`~benchmarks.mechanisms.read_ways` takes them; None: LOT in the encoder, LOT at all sites.
        ranks: numbers of pivots or features.
        longest: tokens of the longest document.
        prefix: target tokens before the decoding step.
        vocabulary: number of pieces.
    """

    base, turn = DEFAULT, 0.3
    lengths, tokens, patience = [32, 256, 1024, 2048, 4096], 2048, float("inf")
    measures: tuple[Measure, ...] = (
        Measure("encoder", "encoder_seconds", *MILLISECONDS),
        Measure("training step", "training_seconds", *MILLISECONDS),
        Measure("decoding step", "decoding_seconds", *MILLISECONDS),
        Measure("training speed", "words_per_second", 1.0, "words/s", more_is_better=True),
        Measure("peak memory of a training step", "peak_bytes", *MEBIBYTES),
        Measure("state of decoding", "state_bytes", *MEBIBYTES),
    )

    def __init__(
        self,
        arch: str,
        mechanisms: Iterable[str] | None,
        ranks: list[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
        longest: int,
        prefix: int,
        vocabulary: int,
    ):
        if ARCH_MODEL_REGISTRY.get(arch) not in (TransformerModel, PluggableTransformerModel):
            known = [arch for arch, kind in ARCH_MODEL_REGISTRY.items() if kind is PluggableTransformerModel]
            raise InputError(
                f"--model must be an architecture of fairseq's transformer or of these: {', '.join(sorted(known))}; "
                f"not {arch!r}"
            )
        self.device, self.dtype, self.prefix, self.vocabulary = device, dtype, prefix, vocabulary
        self.words = f"{arch}, vocabulary {vocabulary}, {prefix} tokens behind a decoding step"
        ways = read_ways([DEFAULT, *(mechanisms or ["lot", "lot --attention-sites encoder,cross,decoder"])], ranks)
        self.contenders = {label: self._build(arch, way, max(longest, prefix + 1)) for label, way in ways.items()}

    def _build(self, arch: str, way: AttentionSpec, positions: int) -> TransformerModel:
        """A model in training mode, with positions for long documents."""
        limits = {"max_source_positions": positions, "max_target_positions": positions}
        args = Namespace(arch=arch, share_all_embeddings=True, **limits)
        ARCH_CONFIG_REGISTRY[arch](args)
        write_attention_args(args, way.attention, **way.options)
        torch.manual_seed(0)
        return untrained(args, self.vocabulary, self.vocabulary).to(self.device, self.dtype).train()

    def jobs(self, names: Iterable[str], bsz: int, length: int) -> dict[str, Callable[[], Job]]:
        """Functions that make the job of each contender; all get the same documents."""
        shape = 2, bsz, max(length, self.prefix + 1)
        pieces = torch.randint(Dictionary().nspecial, self.vocabulary, shape).to(self.device)
        source, target = pieces[..., :length]
        written = pieces[1, :, : self.prefix + 1]
        return {name: partial(job, self.contenders[name], source, target, written) for name in names}


def job(model: TransformerModel, source: torch.Tensor, target: torch.Tensor, written: torch.Tensor) -> Job:
    """The timed parts: encoder, decoding step as in ``fairseq-generate``, training step without the optimiser's update.

    Args:
        model: in training mode.
        source, target: ``(bsz, n)``, without pads.
        written: ``(bsz, t)``, tokens of the translation so far; the decoding step comes after the last one.
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

    translating = deepcopy(model, {id(x): x for x in (*model.parameters(), symbols)})  # shares the parameters
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
