"""Backward passes that keep their precision."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def once_in_full_precision(backward: Callable) -> Callable:
    """Decorator of a backward method: switches autocast off and refuses second derivatives.

    ``loss.backward()`` may be called under autocast, which would lower the precision. With torch's
    ``once_differentiable`` alone a second derivative can be wrong without an error: this function's term is missing.

    Args:
        backward: the ``backward(ctx, *grads)`` of a ``torch.autograd.Function``.

    Raises:
        NotImplementedError: in the backward pass, with ``create_graph=True``.
    """

    def outside(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.autocast(grads[0].device.type, enabled=False):
            return backward(ctx, *grads)

    once = once_differentiable(outside)

    @wraps(backward)
    def checked(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError("this attention has no second derivatives; leave out create_graph=True")
        return once(ctx, *grads)

    return checked
