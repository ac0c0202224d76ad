"""torch's ``scaled_dot_product_attention`` with only its memory-efficient kernel allowed, which needs a GPU."""

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def build(num_heads: int, head_dim: int, num_pivots: int) -> Callable:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return scaled_dot_product_attention(q, k, v)

    return attend
