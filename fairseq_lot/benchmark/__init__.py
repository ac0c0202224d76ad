"""Time and memory of one attention layer, against what one would use instead."""
