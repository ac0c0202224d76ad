"""Registration of the models, by import: with ``--user-dir fairseq_lot`` fairseq imports all files here."""

from fairseq_lot.models import pluggable_transformer  # noqa: F401 - registers the architectures
