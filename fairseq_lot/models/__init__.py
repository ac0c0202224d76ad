"""Model registration, by import; fairseq imports every file here when it gets ``--user-dir fairseq_lot``."""

from fairseq_lot.models import pluggable_transformer  # noqa: F401 - registers the architectures
