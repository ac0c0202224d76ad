"""Inspection of each head of a trained model: measures, attention maps, the report."""
