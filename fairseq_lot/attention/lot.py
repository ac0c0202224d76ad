"""LOT attention: a coupling through learnable pivots, linear in the sentence length."""

from dataclasses import dataclass

import torch
from torch import nn

from fairseq_lot.attention.base import AttentionOutput, Mechanism, Options, option
from fairseq_lot.attention.convolution import TokenConvolution
from fairseq_lot.errors import InputError
from fairseq_lot.transport.measures import at_least_float32, uniform_log_mass
from fairseq_lot.transport.pivots import pivot_coupling


@dataclass(frozen=True)
class LotOptions(Options):
    """Defaults are those of LOTFormer: r = 32 pivots, T = 5 half-updates, ε = 1 [4]."""

    num_pivots: int = option(32, "pivots per head, r in the paper: the rank of A", minimum=1)
    epsilon: float = option(1.0, "entropic regularisation, in the unit of the scores", above=0)
    num_updates: int = option(5, "half-updates of either plan, T in the paper", minimum=1)
    query_updates: int | None = option(
        None, "half-updates of the query-side plan; 1 uncouples the queries; default: num_updates", minimum=1
    )
    pivot_std: float | None = option(
        None, "standard deviation of the initial pivots; default: head_dim^(1/4); released code: 0.02", minimum=0
    )
    seed: int = option(0, "seed of the initial pivots", minimum=0)
    learn_pivots: bool = option(True, "learn the pivots; false: they stay as they were drawn")
    learn_masses: bool = option(True, "learn the masses of the pivots; false: they stay equal")
    mass_temperature: float = option(1.0, "masses are softmax(logits / this)", above=0)
    conv_kernel: int | None = option(
        None, "odd width of a depthwise convolution of V over tokens, encoder only; default: none", minimum=1
    )

    def __post_init__(self):
        super().__post_init__()
        if self.conv_kernel is not None and self.conv_kernel % 2 != 1:
            raise InputError(f"conv_kernel must be odd, got {self.conv_kernel}")


class Lot(Mechanism):
    """``A = n·Γ1 diag(1/σ) Γ2ᵀ``: queries and keys meet in r pivots of masses σ [4].

    Rows of A sum to 1 for any number of updates; columns converge to n/m.

    The default initialisation makes ``E_z[exp(z·x) exp(z·y)] = exp(‖x + y‖²/2)``, whose factors in x alone and in
    y alone the marginals absorb: LOT starts as a positive-feature estimate of Sinkhorn attention.

    Read as soft clustering, ``A_ij = Σ_t p(t|i) p(j|t)``: query i chooses pivot t, and t chooses key j.

    Attributes:
        pivots: ``(num_heads, r, head_dim)``, learnt (else a buffer), in the space of q and k.
        mass_logits: ``(num_heads, r)``, learnt (else a buffer); ``σ = softmax(mass_logits / mass_temperature)``.
        convolution: what V goes through before it is attended to, or None.
    """

    options_class = LotOptions

    def __init__(self, **context):
        super().__init__(**context)
        options = self.options
        self.query_updates = options.num_updates if options.query_updates is None else options.query_updates
        self.couples_queries = self.query_updates > 1
        std = self.head_dim**0.25 if options.pivot_std is None else options.pivot_std
        # A generator of its own: a swap draws the same pivots wherever the model is built.
        generator = torch.Generator().manual_seed(options.seed * 1_000 + self.layer)
        shape = (self.num_heads, options.num_pivots, self.head_dim)
        self._keep("pivots", std * torch.randn(shape, generator=generator), learn=options.learn_pivots)
        self._keep("mass_logits", torch.zeros(shape[:2]), learn=options.learn_masses)
        self.mixes_values = options.conv_kernel is not None
        self.convolution = None
        if self.mixes_values:
            self.convolution = TokenConvolution(
                num_heads=self.num_heads, head_dim=self.head_dim, kernel=options.conv_kernel
            )

    def _keep(self, name: str, value: torch.Tensor, *, learn: bool) -> None:
        """Store a parameter, or a buffer of the same name in checkpoints."""
        if learn:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def log_masses(self) -> torch.Tensor:
        """log σ, ``(num_heads, r)``, at least float32."""
        return torch.log_softmax(at_least_float32(self.mass_logits) / self.options.mass_temperature, -1)

    def coupling(self, q, k, query_padding_mask=None, key_padding_mask=None):
        """The coupling of queries and keys, as two factors; shapes as in :meth:`forward`."""
        q, k, pivots = at_least_float32(q), at_least_float32(k), at_least_float32(self.pivots)
        pivots = (pivots * (self.scaling / self.options.epsilon)).transpose(-1, -2)  # (num_heads, head_dim, r)
        return pivot_coupling(
            q @ pivots,
            k @ pivots,
            uniform_log_mass(query_padding_mask, q).unsqueeze(-2),
            uniform_log_mass(key_padding_mask, k).unsqueeze(-2),
            self.log_masses(),
            query_updates=self.query_updates,
            key_updates=self.options.num_updates,
        )

    def attend(self, q, k, v, *, query_padding_mask, key_padding_mask, need_plan, causal):
        coupling = self.coupling(q, k, query_padding_mask, key_padding_mask)
        v = v.to(coupling.to_keys.conditional.dtype)
        if self.convolution is not None:
            v = self.convolution(v)
        at_pivots = coupling.to_keys.apply(v)  # (bsz, num_heads, r, value_dim)
        values = self.drop(coupling.from_queries.conditional) @ at_pivots
        return AttentionOutput(values, coupling.conditional if need_plan else None)
