"""LOT attention in plain PyTorch, without fairseq: masks, gradients, and a training loop of a few steps.

It takes some seconds:

    python examples/plain_pytorch.py
"""

import torch
from torch import nn

import fairseq_lot

VOCABULARY, WIDTH, HEADS, PAD = 12, 32, 4, 0


class SelfAttention(nn.Module):
    """Projections around a mechanism, which sees q, k, v with batch and heads as axes of their own, and masks."""

    def __init__(self, mechanism="lot", **options):
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mechanism = fairseq_lot.build_mechanism(mechanism, num_heads=HEADS, head_dim=WIDTH // HEADS, **options)

    def forward(self, x, padding_mask):
        """``x`` is (bsz, len, WIDTH); ``padding_mask`` is (bsz, len), True = pad. Returns values and weights."""
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        # in self-attention queries and keys share one mask: the same object
        output = self.mechanism(*heads, padding_mask, padding_mask, need_weights=True)
        return self.out(output.values.transpose(1, 2).flatten(2)), output.weights


class Model(nn.Module):
    """One layer that says for every token which symbol stands before it, and for the first one which stands last."""

    def __init__(self, **options):
        super().__init__()
        self.symbols, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(20, WIDTH)
        self.attention, self.read = SelfAttention(**options), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.symbols(tokens) + self.positions.weight[: tokens.size(1)]
        values, weights = self.attention(x, tokens == PAD)
        return self.read(x + values), weights


def sentences(bsz=32):
    """Random symbols, 4 to 12 a sentence, pads behind them."""
    lengths = torch.randint(4, 13, (bsz, 1))
    return torch.randint(1, VOCABULARY, (bsz, 12)).masked_fill(torch.arange(12) >= lengths, PAD)


def before(tokens):
    """The symbol before each one, in a circle around the real tokens."""
    last = (tokens != PAD).sum(1, keepdim=True) - 1
    return torch.cat([tokens.gather(1, last), tokens[:, :-1]], 1)


def train(model, steps=80):
    """Returns the loss of every step."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        tokens = sentences()
        logits, _ = model(tokens)
        real = tokens != PAD
        loss = nn.functional.cross_entropy(logits[real], before(tokens)[real])
        optimiser.zero_grad()
        loss.backward()  # reaches the pivots and their masses, too
        optimiser.step()
        losses.append(loss.item())
    return losses


def main():
    torch.manual_seed(1)
    model = Model(mechanism="lot", num_pivots=8, num_updates=11)
    losses = train(model)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")

    tokens = sentences(1)
    n = int((tokens != PAD).sum())
    _, weights = model(tokens)
    print(f"{n} real tokens; a row of A sums to {weights[0, 0, 0].sum():.3f}, every key receives about 1:")
    print(" ".join(f"{mass:.2f}" for mass in weights[0, 0].sum(0).tolist()))
    return losses, weights[0, :, :n, :n]


if __name__ == "__main__":
    main()
