"""Model registration; fairseq imports every file here when it gets ``--user-dir fairseq_lot``."""
