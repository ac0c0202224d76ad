"""Fused Triton kernels for CUDA devices; what they compute stands in ``naive``, when they are used in ``choice``."""
