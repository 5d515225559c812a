"""Checkpoints: a run's whole state to disk and back, under the plan that wrote it.

    engine.arrays() --save--> folder/<step>/ --restore--> engine.load_arrays()

Arrays are keyed by the model's own names and boxes, never by their place in a stage.
"""

from hexijax.checkpoint.plain import Saved, Stateful, latest, look, restore, save

__all__ = ["Saved", "Stateful", "latest", "look", "restore", "save"]
