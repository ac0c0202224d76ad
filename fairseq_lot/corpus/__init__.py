"""Parallel text, from an archive or a grammar to sentencepiece pieces."""
