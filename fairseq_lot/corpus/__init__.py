"""Preparation of parallel text: from an archive or one's own files to BPE pieces."""
