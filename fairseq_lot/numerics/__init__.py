"""Plain torch that the transport plans share with their GPU kernels."""
