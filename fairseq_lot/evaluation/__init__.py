"""Scores of translations, and tables of scores; without torch and fairseq."""
