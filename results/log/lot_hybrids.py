"""Two experimental mechanisms outside of the package: LOT with a gated band, and LOT with a convolution of V.

The script registers them, then runs ``fairseq-lot``:

    python results/log/lot_hybrids.py sweep DATA --path BASE.pt --out FOLDER --try gated_band --try lot_and_convolution
"""

import sys
from dataclasses import dataclass

import torch

from fairseq_lot.attention.base import AttentionOutput, Mechanism
from fairseq_lot.attention.lot import Lot, LotOptions
from fairseq_lot.attention.near_far import NearFar, NearFarOptions
from fairseq_lot.attention.options import Options, option
from fairseq_lot.attention.registry import MECHANISMS


@dataclass(frozen=True)
class GatedBandOptions(Options):
    """Options of LOT, of the band and of the gate."""

    num_pivots: int = option(32, "pivots per head", minimum=1)
    window: int = option(2, "W: the band has the keys at most so many tokens away", minimum=0)
    start: float = option(-1.0, "the gate's logit at the start")


class GatedBand(Mechanism):
    """``(1 - g) A_lot + g A_band``, where A_band is softmax over the keys with |i - j| ≤ W."""

    options_class = GatedBandOptions
    positional = True

    def __init__(self, **context):
        super().__init__(**context)
        options = self.options
        self.lot = Lot(**{**context, "options": LotOptions(num_pivots=options.num_pivots)})
        self.band = NearFar(**{**context, "options": NearFarOptions(num_features=0, window=options.window)})
        self.gate = torch.nn.Parameter(torch.full((self.num_heads, 1, 1), options.start))

    def attend(self, q, k, v, masks, need_weights):
        far, near = (part.attend(q, k, v, masks, need_weights) for part in (self.lot, self.band))
        gate = torch.sigmoid(self.gate)
        weights = torch.lerp(far.weights, near.weights, gate) if need_weights else None
        return AttentionOutput(torch.lerp(far.values, near.values, gate), weights)


class LotAndConvolution(Mechanism):
    """``A_lot v`` plus a depthwise convolution of v over 7 tokens, whose weights start at zero."""

    positional = True

    def __init__(self, **context):
        super().__init__(**context)
        self.lot = Lot(**{**context, "options": LotOptions()})
        self.kernel = torch.nn.Parameter(torch.zeros(self.num_heads * self.head_dim, 1, 7))

    def attend(self, q, k, v, masks, need_weights):
        far = self.lot.attend(q, k, v, masks, need_weights)
        channels = v.transpose(2, 3).flatten(1, 2)
        near = torch.nn.functional.conv1d(channels, self.kernel.to(v.dtype), padding=3, groups=channels.size(1))
        return AttentionOutput(far.values + near.unflatten(1, v.shape[1:2] + v.shape[3:]).transpose(2, 3), far.weights)


# before fairseq_lot.cli is imported, which reads the options of all mechanisms
MECHANISMS |= {"gated_band": GatedBand, "lot_and_convolution": LotAndConvolution}

if __name__ == "__main__":
    from fairseq_lot.cli import main

    sys.exit(main())
