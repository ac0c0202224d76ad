"""Transport plans between the tokens of a sentence."""
