"""Backward passes that keep their precision."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def once_in_full_precision(backward: Callable) -> Callable:
    """``once_differentiable``, outside of the autocast in which somebody may call ``loss.backward()``.

    torch's own lets a second derivative pass in silence, without this part of it, where the first one's weights need no
    gradient. Here it is refused.
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
