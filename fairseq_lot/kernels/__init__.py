"""Fused Triton kernels for CUDA devices. ``naive`` has plain versions of them; ``choice`` decides on their use."""
