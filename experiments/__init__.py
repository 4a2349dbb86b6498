"""Experiment configurations: base.py declares every key, once."""
