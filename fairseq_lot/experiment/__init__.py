"""Stages of an experiment, which the scripts of the same names call."""
