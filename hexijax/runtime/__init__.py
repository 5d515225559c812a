"""Runs Programs on devices: compilation, dispatch, transfers, reductions, updates."""
