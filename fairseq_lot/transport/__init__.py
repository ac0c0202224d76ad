"""Transport plans between the tokens of a sentence: pure functions on ``(..., n, m)`` tensors."""
