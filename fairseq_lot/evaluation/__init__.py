"""Scores of translations with tables of scores; nothing here imports torch or fairseq."""
