"""Benchmarks: time and memory of an attention layer or of a whole model, compared with softmax attention."""
