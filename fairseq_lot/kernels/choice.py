"""The only place that decides whether a kernel is used or plain torch.

docs/internals.md lists devices and sizes, and the values of ``FAIRSEQ_LOT_KERNELS``. Before its first use with a
device, types, sizes and numbers of updates, a kernel solves a small padded problem. Its values and gradients must agree
with plain torch in float64 up to 1e-4, plus rounding in half precision. If they do not, or if an error is raised, there
is one warning, and plain torch is used from then on. Triton is imported when a kernel is first wanted.
"""

import importlib.util
import math
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from fairseq_lot.errors import InputError
from fairseq_lot.kernels import launch, naive
from fairseq_lot.kernels.launch import LONGEST_ON_CHIP, padded
from fairseq_lot.kernels.naive import (
    ExpectedKeys,
    LotInputs,
    LotSettings,
    NearFarKept,
    NearFarSettings,
    SinkhornInputs,
    SinkhornSettings,
)
from fairseq_lot.numerics.log_domain import log_domain_sinkhorn

VARIABLE = "FAIRSEQ_LOT_KERNELS"
CAPABILITY = (8, 0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 2048  # limit for the shorter side of the solver's scores, which a program holds whole
MOST_PIVOTS, WIDEST_HEAD, LARGEST_TILE = 64, 128, 4096  # limits for r, head_dim and their product, as powers of two
WIDEST_STEP = 63  # limit for near_far's window in a decoding step; a program holds its keys
WIDEST_WINDOW = 16  # limit for near_far's window; half of the shortest chunk of keys
ERROR = 1e-4

#: by the key of :func:`_usable`: the reason why a kernel failed its test, None if it passed
_tested: dict[tuple, str | None] = {}


def _mode() -> str:
    mode = os.environ.get(VARIABLE, "auto")
    if mode not in ("auto", "off", "on"):
        raise InputError(f"{VARIABLE} must be auto, off or on, got {mode!r}")
    return mode


def wanted(x: Tensor) -> bool:
    """Whether to try a kernel for x: on CUDA unless kernels are off, elsewhere only if they are on."""
    mode = _mode()
    return mode == "on" or (mode == "auto" and x.is_cuda)


def lot(inputs: LotInputs, settings: LotSettings) -> Tensor | None:
    """Values of LOT attention by the kernel; dropout takes its seed from torch's CPU generator.

    Returns:
        ``(bsz, num_heads, n, value_dim)`` in the dtype of v, zero at padded queries; None if the kernel is not used.
    """
    q, _, v, pivots, *_ = inputs
    r, d, dv = pivots.size(-2), q.size(-1), v.size(-1)
    dtypes = tuple(x.dtype for x in inputs[:4])
    limit = _beyond(dtypes) or _too_large(*_sides(r, d, dv))
    if limit is None and padded(r) * max(padded(d), padded(dv)) > LARGEST_TILE:
        limit = f"r = {r} pivots of width {max(d, dv)} are too many for one program"
    programs = q.size(0) * q.size(1)
    is_split = any(launch.lot_parts(programs, x.size(2), q.device)[0] > 1 for x in (q, v))
    n = 2 * launch.LOT_PART + 5 if is_split else 13  # of the test
    key = ("lot", q.device, *dtypes, r, d, dv, settings.query_updates, settings.key_updates, settings.dropout > 0, n)
    if not _usable(q, limit, key, lambda: _lot_error(q.device, dtypes, r, d, dv, settings, n)):
        return None
    from fairseq_lot.kernels.lot import lot as kernel

    return kernel(inputs, settings)


def convolution(v: Tensor, weight: Tensor) -> Tensor | None:
    """The convolution of the values over tokens in float32 by the kernel; None if it is not used.

    Args:
        v: ``(bsz, num_heads, n, width)``.
        weight: ``(num_heads, d, number of neighbours)``; the width is a multiple of d, and its parts share the weights.
    """
    width, d, number, dtypes = v.size(-1), weight.size(1), weight.size(2), (v.dtype, weight.dtype)
    limit = _beyond(dtypes) or _too_large(("value_dim", width, 2 * WIDEST_HEAD))
    kind = v.device, dtypes, width, d, number
    if not _usable(v, limit, ("convolution", *kind), lambda: _convolution_error(*kind)):
        return None
    from fairseq_lot.kernels.convolution import convolution as kernel

    return kernel(v, weight)


def try_fused_sinkhorn(scores: Tensor, log_a: Tensor, log_b: Tensor, *, num_updates: int) -> Tensor | None:
    """The conditional of :func:`~fairseq_lot.transport.sinkhorn.solve` by the kernel; None if it is not used.

    Arguments as for that function, with at most two leading axes of the scores.
    """
    *lead, n, m = scores.shape
    limit = _beyond([x.dtype for x in (scores, log_a, log_b)], DTYPES[:1])
    if limit is None and min(n, m) > WIDEST:
        limit = f"neither side of {n} x {m} scores is within {WIDEST}"
    if limit is None and len(lead) > 2:
        limit = f"{len(lead)} leading axes of the scores are more than 2"
    held, tokens = padded(min(n, m)), 13
    if launch.solver_parts(math.prod(lead), max(n, m), held, scores.device)[0] > 1:
        tokens = 2 * launch.SOLVER_PART + 5
    key = ("sinkhorn", scores.device, n < m, held, num_updates, tokens)
    if not _usable(scores, limit, key, lambda: _sinkhorn_error(scores.device, n < m, held, num_updates, tokens)):
        return None
    from fairseq_lot.kernels.sinkhorn import fused_sinkhorn as kernel

    return kernel(scores, log_a, log_b, num_updates=num_updates)


def near_far(
    q: Tensor, k: Tensor, v: Tensor, features: Tensor, feature_bias: Tensor, settings: NearFarSettings
) -> Tensor | None:
    """Values of near_far attention with one half-update, by the kernel; None if it is not used.

    Arguments as for :func:`fairseq_lot.kernels.near_far.near_far`.
    """
    if q.dtype not in DTYPES[1:]:  # in float32 the backward kernels would spill kilobytes of registers
        return None
    r, d, dv, dtypes = features.size(1), q.size(-1), v.size(-1), (q.dtype, features.dtype)
    limit = _beyond((k.dtype, v.dtype), (q.dtype,)) or _beyond((features.dtype,), (q.dtype, torch.float32))
    limit = limit or _too_large(("window", settings.window, WIDEST_WINDOW), *_sides(r, d, dv))
    is_long = settings.tangents or k.size(2) > launch.DENSE
    kind = settings.slopes is not None, settings.key_padding_mask is not None, settings.causal, settings.tangents
    key = ("near_far", q.device, *dtypes, r, d, dv, is_long, *kind)
    if not _usable(q, limit, key, lambda: _near_far_error(q.device, dtypes, r, d, dv, is_long, kind)):
        return None
    from fairseq_lot.kernels.near_far import near_far as kernel

    return kernel(q, k, v, features, feature_bias, settings)


def near_far_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pads: Tensor | None,
    kept: NearFarKept,
    features: Tensor,
    feature_bias: Tensor,
    slopes: Tensor | None,
    *,
    window: int,
    scale: float,
) -> tuple[Tensor, NearFarKept] | None:
    """One token of near_far's decoder by the kernel; None if it is not used, or if gradients are needed.

    Arguments as for :func:`fairseq_lot.kernels.near_far_step.near_far_step`.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, kept.keys, features, feature_bias)):
        return None
    r, d, dv, dtypes = features.size(1), q.size(-1), v.size(-1), (q.dtype, features.dtype)
    if torch.float64 in (*dtypes, kept.keys.dtype):
        return None
    limit = _beyond((k.dtype, v.dtype), (q.dtype,)) or _beyond(dtypes)
    limit = limit or _too_large(("window", window, WIDEST_STEP), *_sides(r, d, dv))
    has_pads = pads is not None or kept.log_mass is not None
    kind = q.device, dtypes, r, d, dv, window, slopes is not None, has_pads
    if not _usable(q, limit, ("near_far_step", *kind), lambda: _step_error(*kind)):
        return None
    from fairseq_lot.kernels.near_far_step import near_far_step as kernel

    return kernel(q, k, v, pads, kept, features, feature_bias, slopes, window=window, scale=scale)


def near_far_expected(q: Tensor, keys: ExpectedKeys, *, window: int, scale: float) -> Tensor | None:
    """Values of near_far at cross by the kernel; None if it is not used, or if gradients are needed.

    Arguments as for :func:`fairseq_lot.kernels.near_far_expected.near_far_expected`.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, keys.key, keys.value, keys.probes)):
        return None
    if q.dtype not in DTYPES or keys.value.dtype != torch.float32:
        return None
    r, d, dv, dtypes = keys.log_sums.size(2), q.size(-1), keys.value.size(-1), (q.dtype, keys.probes.dtype)
    limit = _too_large(("window", window, WIDEST_STEP // 2), *_sides(r, d, dv))
    kind = q.device, dtypes, r, d, dv, window, keys.constants is not None, keys.key_padding_mask is not None
    if not _usable(q, limit, ("near_far_expected", *kind), lambda: _expected_error(*kind)):
        return None
    from fairseq_lot.kernels.near_far_expected import near_far_expected as kernel

    return kernel(q, keys, window=window, scale=scale)


def near_far_at_expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_logs: Tensor,
    log_sums: Tensor,
    means: Tensor,
    shares: Tensor,
    positions: Tensor,
    key_padding_mask: Tensor | None,
    *,
    window: int,
) -> Tensor | None:
    """Values of near_far at cross, with gradients, by the kernel; None if it is not used.

    Arguments as for :func:`fairseq_lot.kernels.near_far_expected.near_far_at_expected`.
    """
    dtypes = tuple(x.dtype for x in (q, k, v, means, shares))
    if torch.float64 in dtypes:
        return None
    r, d, dv = log_sums.size(2), q.size(-1), v.size(-1)
    limit = _beyond(dtypes) or _beyond((query_logs.dtype, log_sums.dtype), (torch.float64,))
    limit = limit or _too_large(("window", window, WIDEST_STEP // 2), *_sides(r, d, dv))
    kind = q.device, dtypes, r, d, dv, window, key_padding_mask is not None
    if not _usable(q, limit, ("near_far_at_expected", *kind), lambda: _at_expected_error(*kind)):
        return None
    from fairseq_lot.kernels.near_far_expected import near_far_at_expected as kernel

    return kernel(q, k, v, query_logs, log_sums, means, shares, positions, key_padding_mask, window=window)


def _sides(r, d, dv):
    return ("r", r, MOST_PIVOTS), ("head_dim", d, WIDEST_HEAD), ("value_dim", dv, WIDEST_HEAD)


def _too_large(*sizes):
    return next((f"{name} is {size}, more than {most}" for name, size, most in sizes if size > most), None)


def sinkhorn_attention(inputs: SinkhornInputs, settings: SinkhornSettings) -> Tensor | None:
    """Values of Sinkhorn attention by the kernel; None if it is not used. Dropout as for :func:`lot`."""
    q, k, v, factors, slopes, *_ = inputs
    (n, d), m, dv = q.shape[2:], k.size(2), v.size(-1)
    dtypes = q.dtype, k.dtype, v.dtype
    limit = _beyond(dtypes)
    for name, size in (("head_dim", d), ("value_dim", dv)):
        limit = limit or (f"{name} is {size}, more than {WIDEST_HEAD}" if size > WIDEST_HEAD else None)
    short = padded(max(n, m)) <= LONGEST_ON_CHIP
    held = (padded(n), padded(m)) if short else None
    kinds = factors is not None, slopes is not None
    key = ("sinkhorn attention", q.device, *dtypes, d, dv, held, *kinds, settings.num_updates, settings.dropout > 0)
    if not _usable(q, limit, key, lambda: _attention_error(q.device, dtypes, held, d, dv, kinds, settings)):
        return None
    from fairseq_lot.kernels.sinkhorn_attention import sinkhorn_attention as kernel

    return kernel(inputs, settings)


def _beyond(dtypes, known=DTYPES):
    other = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype not in known]
    return f"there is none for {other[0]}" if other else None


def _usable(x, limit, key, error):
    """Whether a kernel can be used.

    Args:
        x: an input, for the device.
        limit: the reason why these inputs are not supported; None: they are.
        key: the name of the kernel and all that its test depends on.
        error: a function that tests it and returns its error.

    Raises:
        InputError: it cannot, although ``FAIRSEQ_LOT_KERNELS`` is on.
    """
    reason = _unavailable(x.device) or limit
    if reason is None:
        if key not in _tested:
            _tested[key] = _failure(error)
            if _tested[key] is not None and _mode() == "auto":
                warnings.warn(f"plain torch instead of the {key[0]} kernel on {x.device}: {_tested[key]}", stacklevel=2)
        reason = _tested[key]
    if reason is not None and _mode() == "on":
        raise InputError(f"{VARIABLE}=on, but the {key[0]} kernel cannot be used: {reason}; set it to auto or off")
    return reason is None


def _unavailable(device: torch.device) -> str | None:
    """What keeps Triton from running on the device."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the tensors are on {device}, not on a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return "{} has compute capability {}.{}, {}.{} is needed".format(device, *capability, *CAPABILITY)
    return None


def _failure(error):
    """What was wrong in the test, None if nothing; whatever it raises must not stop a training that can go on.

    Nor must what it saves or draws be taken for a part of the pass in which it happens: of activation checkpointing,
    of dropout, of a default device.
    """
    saved_as_they_are = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            saved_as_they_are,
        ):
            size = error()
    except Exception as raised:
        return f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"
    return None if size <= 1 else f"its test is off by {size:.2g} times what is allowed"


def _excess(results, exact, dtypes, roundings=1, floor=0.0):
    """The largest error, as a multiple of what is allowed there; infinite if anything is not finite.

    ``roundings`` to a half precision are allowed. A gradient has at least the ``floor`` of all gradients' norm: where
    it all but vanishes it has errors like the others.
    """
    worst, floor = 0.0, floor * torch.cat([x.flatten() for x in exact[1:]]).norm() if floor else 0.0
    for i, (result, wish, dtype) in enumerate(zip(results, exact, dtypes, strict=True)):
        allowed = ERROR + (roundings * torch.finfo(dtype).eps if dtype in DTYPES[1:] else 0.0)
        norm = wish.norm().clamp(min=float(floor) if i else 0.0)
        ratio = ((result.double().cpu() - wish).norm() / (allowed * norm).clamp(min=1e-30)).item()
        worst = max(worst, ratio) if math.isfinite(ratio) else math.inf
    return worst


def _problem(inputs, *functions):
    """Values and gradients of each function of the inputs, the first as it is, the second in float64 on the CPU."""
    results = []
    for function, change in zip(functions, (lambda x: x, lambda x: x.double().cpu()), strict=True):
        leaves = [change(x.detach()).clone().requires_grad_() for x in inputs]
        values = function(*leaves)
        weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        weights = weights.bfloat16().to(values.device, values.dtype)  # the same in every precision
        grads = torch.autograd.grad(values, leaves, weights, allow_unused=True, materialize_grads=True)
        results.append([values.detach(), *grads])
    return results


def _lot_error(device, dtypes, r, d, dv, settings, n=13):
    from fairseq_lot.kernels.lot import lot as kernel

    generator = torch.Generator().manual_seed(0)
    shapes = (2, 2, n, d), (2, 2, n, d), (2, 2, n, dv), (2, r, d), (2, r)
    *inputs, logits = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [x.to(device, dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
    inputs[3] = inputs[3] * d**0.25
    inputs.append(logits.to(device).log_softmax(-1))
    masks = torch.zeros(2, 2, n, dtype=torch.bool)
    masks[0, 0, -4:], masks[1, 1, :5] = True, True
    settings, dropping = (settings._replace(scale=d**-0.5, dropout=x) for x in (0.0, settings.dropout))
    result, exact = _problem(
        inputs,
        lambda *x: kernel(LotInputs(*x, *masks.to(device)), settings),
        lambda *x: naive.lot(LotInputs(*x, *masks), settings),
    )
    worst = _excess(result, exact, [dtypes[2], *dtypes, torch.float32])
    if not dropping.dropout:
        return worst
    # values are linear in v, whatever is dropped, as long as the gradient drops the same
    v = inputs[2].clone().requires_grad_()
    q, k, _, pivots, log_masses = inputs
    values = kernel(LotInputs(q, k, v, pivots, log_masses, *masks.to(device)), dropping)
    (grad,) = torch.autograd.grad(values, v, values.detach())
    square = values.detach().double().square().sum().cpu()
    return max(worst, _excess([(grad.double() * v.detach().double()).sum()], [square], dtypes[2:3]))


def _convolution_error(device, dtypes, width, d, number):
    from fairseq_lot.kernels.convolution import convolution as kernel

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in ((2, 2, 70, width), (2, d, number))]
    inputs = [x.to(device, dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
    result, exact = _problem(inputs, kernel, naive.convolution)
    return _excess(result, exact, [torch.float32, *dtypes])


def _sinkhorn_error(device, transposed, held, num_updates, n=13):
    from fairseq_lot.kernels.sinkhorn import fused_sinkhorn as kernel

    generator = torch.Generator().manual_seed(0)
    pivots = held // 2 + 1  # so that the block is padded
    tokens, bsz = max(n, pivots + 1), 2 if held <= 64 else 1
    shape = (bsz, bsz, pivots, tokens) if transposed else (bsz, bsz, tokens, pivots)
    inputs = [torch.randn(size, generator=generator) for size in (shape, (bsz, 1, shape[2]), (bsz, 1, shape[3]))]
    inputs[1][0, :, -2:] = inputs[2][0, :, :3] = -torch.inf
    inputs = [inputs[0], *(x.log_softmax(-1) for x in inputs[1:])]
    result, exact = _problem(
        [x.to(device) for x in inputs],
        lambda *x: kernel(*x, num_updates=num_updates),
        lambda *x: log_domain_sinkhorn(*x, num_updates=num_updates),
    )
    return _excess(result, exact, [torch.float32] * 4)


def _near_far_error(device, dtypes, r, d, dv, is_long, kind):
    from fairseq_lot.kernels.near_far import near_far as kernel

    generator = torch.Generator().manual_seed(0)
    has_slopes, has_pads, causal, tangents = kind
    n = launch.DENSE + 22 if is_long else min(60, launch.DENSE)
    shapes = (2, 2, n, d), (2, 2, n, d), (2, 2, n, dv), (2, r, d), (2, r)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    inputs[3] = inputs[3] * d**0.25
    inputs = [x.to(device, dtype) for x, dtype in zip(inputs, [dtypes[0]] * 3 + [dtypes[1]] * 2, strict=True)]
    mask = torch.zeros(2, n, dtype=torch.bool)
    mask[0, -n // 3 :], mask[1, : n // 2] = True, True
    slopes = torch.tensor([0.25, 0.0625])
    exact = NearFarSettings(8, d**-0.5, slopes if has_slopes else None, mask if has_pads else None, causal, tangents)
    settings = exact._replace(
        slopes=slopes.to(device) if has_slopes else None, key_padding_mask=mask.to(device) if has_pads else None
    )
    result, wish = _problem(
        inputs,
        lambda q, k, v, z, c: kernel(q, k, v, z, c, settings),
        lambda q, k, v, z, c: naive.near_far(q, k, v, z, c, exact),
    )
    # parts of all gradients are rounded to the inputs' type, and the results once more
    return _excess(result, wish, [dtypes[0]] * 6, roundings=2, floor=0.1)


def _step_error(device, dtypes, r, d, dv, window, has_slopes, has_pads):
    from fairseq_lot.kernels.near_far_step import near_far_step as kernel

    generator = torch.Generator().manual_seed(0)
    n = window + 5
    inputs = [torch.randn(size, generator=generator) for size in ((2, 2, n, d), (2, 2, n, d), (2, 2, n, dv))]
    inputs += [d**0.25 * torch.randn((2, r, d), generator=generator), torch.randn((2, r), generator=generator)]
    inputs = [x.to(device, dtype) for x, dtype in zip(inputs, [dtypes[0]] * 3 + [dtypes[1]] * 2, strict=True)]
    mask = torch.zeros(2, n, dtype=torch.bool)
    mask[0, -3:], mask[1, :2] = has_pads, has_pads
    slopes = torch.tensor([0.25, 0.0625]) if has_slopes else None
    settings = NearFarSettings(window, d**-0.5, slopes, mask, causal=True)
    q, k, v, features, bias = (x.double().cpu() for x in inputs)
    exact = naive.near_far(q, k, v, features, bias, settings)
    q, k, v, features, bias = inputs
    kept = NearFarKept(torch.empty(2, 2, 0, d, device=device), torch.empty(2, 2, 0, dv, device=device))
    found = []
    with torch.no_grad():
        for i in range(n):
            now = (slice(None), slice(None), slice(i, i + 1))
            pads = mask[:, i : i + 1].to(device) if has_pads else None
            values, kept = kernel(
                q[now], k[now], v[now], pads, kept, features, bias, None if slopes is None else slopes.to(device),
                window=window, scale=d**-0.5,
            )  # fmt: skip
            found.append(values)
    values = torch.cat(found, 2).double().cpu().masked_fill(mask[:, None, :, None], 0.0)
    return _excess([values], [exact.masked_fill(mask[:, None, :, None], 0.0)], dtypes[:1])


def _expected_error(device, dtypes, r, d, dv, window, tangents, has_pads):
    from fairseq_lot.kernels.near_far_expected import near_far_expected as kernel

    generator = torch.Generator().manual_seed(0)
    m, scale = 2 * window + 9, d**-0.5
    q, k, v, features = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((2, 2, 5, d), (2, 2, m, d), (2, 2, m, dv), (2, r, d))
    )
    q, k, v, features = (
        q.to(dtypes[0]).double(),
        k.float().double(),
        v.float().double(),
        features.to(dtypes[1]).double(),
    )
    mask = torch.zeros(2, m, dtype=torch.bool)
    mask[0, -3:], mask[1, :2] = has_pads, has_pads
    logs = scale * k @ features.transpose(-1, -2)
    logs = logs if tangents else logs - scale / 2 * k.square().sum(-1, keepdim=True)
    logs = logs.masked_fill(mask[:, None, :, None], -torch.inf)
    shares = torch.softmax(logs, 2)
    positions = shares.transpose(-1, -2) @ torch.arange(0.501, m, dtype=torch.float64)
    means = shares.transpose(-1, -2) @ k
    constants = scale * (features * means).sum(-1) if tangents else None
    keys = ExpectedKeys(
        scale * k, v, shares, logs.logsumexp(2), positions, shares.transpose(-1, -2) @ v,
        means if tangents else features, constants, mask if has_pads else None,
    )  # fmt: skip
    exact = naive.near_far_expected(q, keys, window=window, scale=scale)
    narrow = {name: getattr(keys, name).float() for name in ("key", "value", "shares", "means")}
    made = keys._replace(**narrow, probes=keys.probes.to(dtypes[1]))
    moved: list[Any] = [None if x is None else x.to(device) for x in made]
    with torch.no_grad():
        found = kernel(q.to(device, dtypes[0]), ExpectedKeys(*moved), window=window, scale=scale)
    return _excess([found], [exact], dtypes[:1])


def _at_expected_error(device, dtypes, r, d, dv, window, has_pads):
    from fairseq_lot.kernels.near_far_expected import near_far_at_expected as kernel

    generator = torch.Generator().manual_seed(0)
    m = 2 * window + 9
    q, k, v, query_logs, key_logs = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((2, 2, 5, d), (2, 2, m, d), (2, 2, m, dv), (2, 2, 5, r), (2, 2, m, r))
    )
    mask = torch.zeros(2, m, dtype=torch.bool)
    mask[0, -3:], mask[1, :2] = has_pads, has_pads
    key_logs = key_logs.masked_fill(mask[:, None, :, None], -torch.inf)
    shares = torch.softmax(key_logs, 2)
    positions = shares.transpose(-1, -2) @ torch.arange(0.501, m, dtype=torch.float64)
    means = shares.transpose(-1, -2) @ v
    types = *dtypes[:3], torch.float64, torch.float64, *dtypes[3:]
    inputs = [d**-0.5 * q, k, v, query_logs, key_logs.logsumexp(2), means, shares]
    inputs = [x.to(device, dtype) for x, dtype in zip(inputs, types, strict=True)]
    pads = mask if has_pads else None
    rest: list[Any] = [None if x is None else x.to(device) for x in (positions, pads)]
    result, exact = _problem(
        inputs,
        lambda *x: kernel(*[*x, *rest], window=window),
        lambda *x: naive.near_far_at_expected(*[*x, positions, pads], window=window),
    )
    return _excess(result, exact, [dtypes[0]] * 8, roundings=2, floor=0.1)


def _attention_error(device, dtypes, held, d, dv, kinds, settings):
    from fairseq_lot.kernels.sinkhorn_attention import sinkhorn_attention as kernel

    generator = torch.Generator().manual_seed(0)
    # the blocks are padded; long sentences have several, and more keys than queries
    n, m = (135, 150) if held is None else (size // 2 + 1 if size > 16 else 7 for size in held)
    heads = 1 if held is None else 2
    shapes = (2, heads, n, d), (2, heads, m, d), (2, heads, m, dv), (heads,)
    *inputs, factors = (torch.randn(shape, generator=generator) for shape in shapes)
    leaves = [x.to(device, dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
    leaves += [factors.exp().to(device)] if kinds[0] else []
    masks = torch.zeros(2, n, dtype=torch.bool), torch.zeros(2, m, dtype=torch.bool)
    masks[0][0, -4:], masks[1][1, -3:] = True, True
    slopes, positions = (
        (2.0 ** -torch.arange(1, heads + 1), torch.arange(m)[None]) if kinds[1] and n <= m else (None, None)
    )
    settings, dropping = (settings._replace(scale=d**-0.5, dropout=x) for x in (0.0, settings.dropout))

    def attend(function, settings, device, q, k, v, factors=None):
        rest = (None if x is None else x.to(device) for x in (slopes, positions, *masks))
        return function(SinkhornInputs(q, k, v, factors, *rest), settings)

    result, exact = _problem(
        leaves,
        lambda *x: attend(kernel, settings, device, *x),
        lambda *x: attend(naive.sinkhorn_attention, settings, "cpu", *x),
    )
    worst = _excess(result, exact, [dtypes[2], *dtypes, *[torch.float32] * kinds[0]])
    if not dropping.dropout:
        return worst
    # as in LOT's test
    q, k, v, *rest = leaves
    v = v.clone().requires_grad_()
    values = attend(kernel, dropping, device, q, k, v, *rest)
    (grad,) = torch.autograd.grad(values, v, values.detach())
    square = values.detach().double().square().sum().cpu()
    return max(worst, _excess([(grad.double() * v.detach().double()).sum()], [square], dtypes[2:3]))
