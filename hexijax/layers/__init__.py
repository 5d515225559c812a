"""The model as a chain of layers: traced, cut, counted.

``chain`` is the data and imports no jax; everything else traces and touches no device.
"""
