"""What is measured: mechanisms, torch's own attention, the products alone, and attention of other projects."""

import ast
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from fairseq_lot.attention.registry import MECHANISMS, build_mechanism, mechanism_class
from fairseq_lot.errors import InputError

BASE = "sdpa"
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """Something that maps q, k, v, ``(bsz, num_heads, n, d)`` each, to values of the same shape.

    Attributes:
        name: as in the table.
        num_pivots: the rank, or None where there is none.
        build: makes it, on the device and in the dtype given.
    """

    name: str
    num_pivots: int | None
    build: Callable[[torch.device, torch.dtype], Attention]

    @property
    def label(self) -> str:
        return self.name if self.num_pivots is None else f"{self.name} r={self.num_pivots}"


def torch_attention() -> Contender:
    """``scaled_dot_product_attention``, what a softmax Transformer runs."""
    return Contender(BASE, None, lambda device, dtype: scaled_dot_product_attention)


def products(num_heads: int, head_dim: int, num_pivots: int) -> Contender:
    """The four products that no attention through pivots can do without, on weights that are not computed."""

    def build(device, dtype):
        pivots = torch.randn(num_heads, head_dim, num_pivots, device=device, dtype=dtype)

        def attend(q, k, v):
            to_pivots = torch.bmm(q.flatten(0, 1), pivots.repeat(q.size(0), 1, 1))
            from_pivots = torch.bmm(k.flatten(0, 1), pivots.repeat(k.size(0), 1, 1))
            return torch.bmm(to_pivots, torch.bmm(from_pivots.transpose(-1, -2), v.flatten(0, 1))).view(v.shape)

        return attend

    return Contender("products alone", num_pivots, build)


def mechanisms(texts: Iterable[str] | None, num_heads: int, head_dim: int, ranks: list[int]) -> list[Contender]:
    """Mechanisms of the registry; those that have pivots once for every rank.

    Args:
        texts: ``NAME`` or ``NAME:option=value,option=value`` each; None for all, with their defaults.

    Raises:
        InputError: unknown mechanism or option, or a value outside its range.
    """
    shape = {"num_heads": num_heads, "head_dim": head_dim}
    found = []
    for text in MECHANISMS if texts is None else texts:
        name, _, rest = text.partition(":")
        given = dict(map(_option, rest.split(","))) if rest else {}
        label = " ".join([name, *(f"{key}={value}" for key, value in given.items() if key != "num_pivots")])
        for options in _at_ranks(name, given, ranks):
            build_mechanism(name, **shape, **options)  # what is wrong is known before anything is measured
            found.append(Contender(label, options.get("num_pivots"), partial(_build, name, shape | options)))
    return found


def _at_ranks(name, options, ranks):
    """The options once for every rank where a mechanism has pivots; as they are where it has none, or has its rank."""
    known = [field.name for field in dataclasses.fields(mechanism_class(name).options_class)]
    if "num_pivots" not in known or "num_pivots" in options:
        return [options]
    return [options | {"num_pivots": rank} for rank in ranks]


def _option(text):
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text!r} is not option=value")
    value = {"true": "True", "false": "False"}.get(value, value)
    try:
        return name.replace("-", "_"), ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name.replace("-", "_"), value


def _build(name, options, device, dtype):
    mechanism = build_mechanism(name, **options).to(device, dtype)
    return lambda q, k, v: mechanism(q, k, v).values


def peer(text: str, num_heads: int, head_dim: int, num_pivots: int) -> Contender:
    """Attention of another project: ``NAME=FOLDER``, where the folder has a file ``peer.py`` with a function ``build``.

    ``build(num_heads=..., head_dim=..., num_pivots=...)`` returns a function of q, k and v. Modules beside
    ``peer.py`` can be imported from it.

    Raises:
        InputError: no such file, or it does not define ``build`` or fails.
    """
    name, equals, folder = text.partition("=")
    path = Path(folder) / "peer.py"
    if not equals or not name or not path.is_file():
        raise InputError(f"--peer wants NAME=FOLDER, with a file peer.py in the folder; got {text!r}")
    spec = importlib.util.spec_from_file_location(f"peer_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
        attend = module.build(num_heads=num_heads, head_dim=head_dim, num_pivots=num_pivots)
    except Exception as error:
        raise InputError(f"{path} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return Contender(name, num_pivots, lambda device, dtype: attend)
