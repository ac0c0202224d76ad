"""Parallel text, from an archive or one's own files to sentencepiece pieces."""
