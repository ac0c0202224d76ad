"""Depthwise convolution of the values over the tokens."""

import torch
from torch import Tensor, nn

from fairseq_lot.errors import InputError
from fairseq_lot.kernels import choice as kernels
from fairseq_lot.numerics.devices import ways
from fairseq_lot.transport.marginals import at_least_float32


class TokenConvolution(nn.Module):
    """``out_i = Σ_o w_o v_{i + o - kernel // 2}``, with separate weights for each channel of each head.

    It is initialised as the identity. Values outside of the sentence count as zero, so padding changes nothing as long
    as pads are zero and at the ends.

    Args:
        num_heads: number of heads.
        head_dim: channels of one head.
        kernel: odd number of neighbouring tokens that one output sees.

    Attributes:
        weight: ``(num_heads, head_dim, kernel)``, learnt.
    """

    def __init__(self, *, num_heads: int, head_dim: int, kernel: int):
        super().__init__()
        weight = torch.zeros(num_heads, head_dim, kernel)
        weight[..., kernel // 2] = 1.0
        self.weight = nn.Parameter(weight)

    def forward(self, v: Tensor) -> Tensor:
        """Convolve over tokens.

        Args:
            v: ``(bsz, num_heads, n, width)``, zero at pads; the width is a multiple of head_dim, and its parts share
                the weights (differential attention has two parts).

        Returns:
            ``(bsz, num_heads, n, width)``, at least in float32.

        Raises:
            InputError: another width.
        """
        num_heads, head_dim, kernel = self.weight.shape
        width = v.size(-1)
        if width % head_dim:
            raise InputError(f"a convolution of {head_dim} channels per head cannot take values of width {width}")
        if kernels.wanted(v):
            mixed = kernels.convolution(v, self.weight)
            if mixed is not None:
                return mixed
        v = at_least_float32(v)
        weight = self.weight.to(v.dtype).repeat(1, width // head_dim, 1).flatten(0, 1)[:, None, :, None]
        channels = v.transpose(-1, -2).flatten(1, 2).unsqueeze(-1)  # (bsz, num_heads * width, n, 1)
        if ways(v).convolves_channels_last:
            channels = channels.contiguous(memory_format=torch.channels_last)
        mixed = nn.functional.conv2d(channels, weight, padding=(kernel // 2, 0), groups=len(weight))
        return mixed.squeeze(-1).unflatten(1, (num_heads, width)).transpose(-1, -2)
