"""German-English sentences from a grammar."""
