"""Attention mechanisms, one a file, that see q, k, v and masks and nothing of fairseq."""
