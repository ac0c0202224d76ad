"""Attention mechanisms: one per file, each sees (q, k, v, masks) and nothing of fairseq."""
