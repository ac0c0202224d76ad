"""Time and memory of one attention layer, or of a whole model, against what one would use instead."""
