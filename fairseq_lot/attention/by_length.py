"""Attend in one batch by two methods: exactly for short sentences or first rows, linearly for the rest."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fairseq_lot.attention.base import AttentionOutput, Masks
from fairseq_lot.transport.exporting import is_exporting
from fairseq_lot.transport.marginals import Pads

#: :meth:`~fairseq_lot.attention.base.Mechanism.attend`, or a method like it
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Masks, bool], AttentionOutput]


class Split(NamedTuple):
    """The sentences of a batch by their number of real keys.

    Attributes:
        short, long: their indices in the batch.
        slots: the smallest range of slots that has all real keys of the short sentences.
    """

    short: Tensor
    long: Tensor
    slots: slice


def split_by_length(key_pads: Pads, limit: int) -> Split | None:
    """Split a batch into the sentences with at most ``limit`` real keys and the others; None if none is short.

    Without pads no sentence is short: call it only with more than ``limit`` slots. It reads the mask, so the host waits
    for a GPU.
    """
    if key_pads is None:
        return None
    real = ~key_pads
    is_short = real.sum(-1) <= limit
    short, long = is_short.nonzero().squeeze(1), is_short.logical_not().nonzero().squeeze(1)
    if not len(short):
        return None
    used = real.index_select(0, short).any(0).nonzero().flatten().tolist() or [0]  # one slot of a sentence of pads
    return Split(short, long, slice(used[0], used[-1] + 1))


def attend_by_length(
    limit: int,
    exact: Attend,
    linear: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks,
    need_weights: bool,
    *,
    positional: bool,
) -> AttentionOutput:
    """``exact`` for the sentences with at most ``limit`` real keys, ``linear`` for the others.

    Short sentences are cut to the slots that they use. In self-attention, with one mask for both, queries and keys are
    cut, else only the keys.

    Args:
        limit: number of keys.
        exact, linear: the two methods, called like :meth:`Mechanism.attend`.
        q, k, v, masks, need_weights: as for :meth:`Mechanism.attend`.
        positional: ``exact`` compares slots of queries and keys, so keys must not be cut alone.
    """
    if masks.key_pads is not None and is_exporting():  # compute both for all sentences
        is_short = (masks.key_pads.logical_not().sum(-1) <= limit)[:, None, None, None]
        short, long = (attend(q, k, v, masks, need_weights).to(v.dtype) for attend in (exact, linear))
        weights = None
        if short.weights is not None and long.weights is not None:
            weights = torch.where(is_short, short.weights, long.weights)
        return AttentionOutput(torch.where(is_short, short.values, long.values), weights)
    split = split_by_length(masks.key_pads, limit)
    if split is None:
        return linear(q, k, v, masks, need_weights)
    is_self = masks.query_pads is masks.key_pads
    rows = split.slots if is_self else slice(0, q.size(2))
    columns = split.slots if is_self or not positional else slice(0, k.size(2))

    def some(sentences: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor, Tensor, Masks, bool]:
        """The arguments of a method for a part of the batch."""
        of_all = len(sentences) == len(q)

        def chosen(x, slots, axis):
            x = x if of_all else x.index_select(0, sentences)
            return x[:, slots] if axis == 1 else x[:, :, slots]

        key_pads = query_pads = chosen(masks.key_pads, columns, 1)
        if not is_self:
            query_pads = None if masks.query_pads is None else chosen(masks.query_pads, rows, 1)
        keys = chosen(k, columns, 2), chosen(v, columns, 2)
        return chosen(q, rows, 2), *keys, Masks(query_pads, key_pads, masks.causal), need_weights

    outputs = [_uncut(exact(*some(split.short, rows, columns)).to(v.dtype), rows, columns, q.size(2), k.size(2))]
    if not len(split.long):
        return outputs[0]
    outputs.append(linear(*some(split.long, slice(0, q.size(2)), slice(0, k.size(2)))).to(v.dtype))
    places = torch.cat([split.short, split.long]).argsort()
    values, weights = (
        None if x[0] is None else torch.cat(x).index_select(0, places) for x in zip(*outputs, strict=True)
    )
    assert values is not None
    return AttentionOutput(values, weights)


def _uncut(output, rows, columns, tgt_len, src_len):
    """The output with zeros in the rows and columns that were cut off."""
    values, weights = output
    of_rows, of_columns = (rows.start, tgt_len - rows.stop), (columns.start, src_len - columns.stop)
    return AttentionOutput(
        pad(values, (0, 0, *of_rows)), None if weights is None else pad(weights, of_columns + of_rows)
    )


def leading_pads(key_pads: Tensor) -> Tensor:
    """Number of pads before the first real token, ``(bsz, n) -> (bsz,)``; n for a sentence of pads."""
    return key_pads.logical_not().cumsum(-1).eq(0).sum(-1)


def attend_by_row(
    limit: int, exact: Attend, linear: Attend, q: Tensor, k: Tensor, v: Tensor, masks: Masks, need_weights: bool
) -> AttentionOutput:
    """Causal attention: ``exact`` for the first ``limit`` tokens of a sentence, ``linear`` for the later ones.

    Tokens are counted from the first real one. The queries are the last tokens of the keys' sentence. With pads the
    host reads the mask, so it waits for a GPU. Arguments as for :func:`attend_by_length`.
    """
    tgt_len, src_len = q.size(2), k.size(2)
    early = src_len - tgt_len  # keys before the first query
    leading, least, most = None, 0, 0
    if masks.key_pads is not None:
        leading = leading_pads(masks.key_pads) % src_len  # 0 for a sentence of pads
        least, most = (0, src_len - 1) if is_exporting() else torch.stack(leading.aminmax()).tolist()
    # slots before ``stop`` are exact in some sentence, slots from ``start`` on are linear in some
    start, stop = min(least + limit, src_len), min(most + limit, src_len)
    first, last = max(start - early, 0), max(stop - early, 0)  # start and stop as rows
    outputs = []
    if last:
        pads = None if masks.key_pads is None else masks.key_pads[:, :stop]
        output = exact(q[:, :, :last], k[:, :, :stop], v[:, :, :stop], Masks(None, pads, True), need_weights)
        weights = None if output.weights is None else pad(output.weights, (0, src_len - stop))
        outputs.append(AttentionOutput(output.values, weights).to(v.dtype))
    if first < tgt_len:
        outputs.append(linear(q[:, :, first:], k, v, masks, need_weights).to(v.dtype))
    if len(outputs) == 1:
        return outputs[0]
    both = last - first  # rows that are exact in some sentences and linear in others
    slots = torch.arange(early + first, early + last, device=q.device)
    is_exact = None if leading is None or not both else slots - leading.unsqueeze(-1) < limit

    def joined(x: Tensor | None, y: Tensor | None) -> Tensor | None:
        if x is None or y is None:
            return None
        parts = [x, y]
        if is_exact is not None:
            middle = torch.where(is_exact[:, None, :, None], x[:, :, first:], y[:, :, :both])
            parts = [x[:, :, :first], middle, y[:, :, both:]]
        return torch.cat(parts, 2)

    values, weights = (joined(x, y) for x, y in zip(*outputs, strict=True))
    assert values is not None
    return AttentionOutput(values, weights)


class _ZeroGradients(torch.autograd.Function):
    """Identity on the values; the parameters get zero gradients."""

    @staticmethod
    def forward(ctx, values, *parameters):
        ctx.save_for_backward(*parameters)
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad_values):
        return grad_values, *map(torch.zeros_like, ctx.saved_tensors)


def with_zero_gradients(values: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """The values unchanged; the parameters get zero gradients, because data parallelism fails without a gradient."""
    learnt = [parameter for parameter in parameters if parameter.requires_grad] if torch.is_grad_enabled() else []
    return _ZeroGradients.apply(values, *learnt) if learnt else values
