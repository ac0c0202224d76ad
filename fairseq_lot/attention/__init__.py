"""Attention mechanisms, one per file; they get q, k, v and masks and do not depend on fairseq."""
