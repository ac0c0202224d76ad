"""Backward passes that keep their precision."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def once_in_full_precision(backward: Callable) -> Callable:
    """``once_differentiable``, outside of the autocast in which somebody may call ``loss.backward()``."""

    @wraps(backward)
    def outside(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.autocast(grads[0].device.type, enabled=False):
            return backward(ctx, *grads)

    return once_differentiable(outside)
