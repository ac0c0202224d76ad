"""Plain torch code that ``transport/`` and ``kernels/`` share."""
