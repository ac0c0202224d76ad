"""Attention as optimal transport, inside fairseq: softmax, Sinkhorn, ESP and LOT attention for translation."""

__version__ = "0.1.0"
