"""LOT attention in plain torch, without our kernels."""

import os
from collections.abc import Callable

import torch

from fairseq_lot.attention.registry import build_mechanism
from fairseq_lot.kernels.choice import VARIABLE


def build(num_heads: int, head_dim: int, num_pivots: int) -> Callable:
    mechanism = build_mechanism("lot", num_heads=num_heads, head_dim=head_dim, num_pivots=num_pivots)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if mechanism.pivots.device != q.device or mechanism.pivots.dtype != q.dtype:
            mechanism.to(q.device, q.dtype)
        before = os.environ.get(VARIABLE, "auto")
        os.environ[VARIABLE] = "off"
        try:
            return mechanism(q, k, v).values
        finally:
            os.environ[VARIABLE] = before

    return attend
