"""Experiments: lab notes that return a ``hexijax.Experiment``."""
