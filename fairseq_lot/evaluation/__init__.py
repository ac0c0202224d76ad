"""Scores of translations and tables of them; needs neither torch nor fairseq."""
