"""Trained models with their data: safe reading, checks, translation."""
