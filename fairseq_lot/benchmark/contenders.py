"""What is measured: mechanisms, torch's own attention, the products alone, and attention of other projects."""

import ast
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from fairseq_lot.attention.registry import MECHANISMS, build_mechanism, build_options, mechanism_class
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
        return with_rank(self.name, self.num_pivots)


def with_rank(name: str, num_pivots: int | None) -> str:
    """A name in the table; figures read the rank from it."""
    return name if num_pivots is None else f"{name} r={num_pivots}"


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


@dataclass(frozen=True)
class Named:
    """A mechanism of the registry as it is named on the command line.

    Attributes:
        name: in the registry.
        options: of its dataclass, without ``num_pivots``.
        num_pivots: the rank, or None where there are no pivots.
        sites: where in a model it is to stand, ``encoder,cross``; None where nothing is said.
    """

    name: str
    options: dict[str, Any]
    num_pivots: int | None
    sites: str | None

    @property
    def label(self) -> str:
        """Without the rank."""
        where = "" if self.sites is None else f"@{self.sites}"
        return " ".join([self.name + where, *(f"{key}={value}" for key, value in self.options.items())])

    @property
    def all_options(self) -> dict[str, Any]:
        return self.options if self.num_pivots is None else {**self.options, "num_pivots": self.num_pivots}


def read_mechanism(text: str, ranks: list[int]) -> list[Named]:
    """``NAME[@SITES][:option=value,...]``, once for every rank where there are pivots and no rank is given.

    Raises:
        InputError: unknown mechanism or option, or a value outside its range.
    """
    head, _, rest = text.partition(":")
    name, at, sites = head.partition("@")
    options = dict(map(_option, rest.split(","))) if rest else {}
    build_options(name, **options)  # what is wrong is known before anything is measured
    known = [field.name for field in dataclasses.fields(mechanism_class(name).options_class)]
    own = [options.pop("num_pivots")] if "num_pivots" in options else ranks
    return [Named(name, options, rank, sites if at else None) for rank in (own if "num_pivots" in known else [None])]


def mechanisms(texts: Iterable[str] | None, num_heads: int, head_dim: int, ranks: list[int]) -> list[Contender]:
    """Mechanisms of the registry; those that have pivots once for every rank.

    Args:
        texts: ``NAME`` or ``NAME:option=value,option=value`` each; None for all, with their defaults.

    Raises:
        InputError: unknown mechanism or option, or a value outside its range.
    """
    found = []
    for text in MECHANISMS if texts is None else texts:
        for one in read_mechanism(text, ranks):
            if one.sites is not None:
                raise InputError(f"{text!r} names sites, which a layer has none of; they are for --model")
            options = {"num_heads": num_heads, "head_dim": head_dim, **one.all_options}
            build_mechanism(one.name, **options)  # likewise
            found.append(Contender(one.label, one.num_pivots, partial(_build, one.name, options)))
    return found


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
