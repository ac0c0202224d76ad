"""A trained model with its data: read safely, checked, translated with."""
