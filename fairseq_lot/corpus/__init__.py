"""Preparation of parallel text: from an archive or a user's own files to BPE pieces."""
