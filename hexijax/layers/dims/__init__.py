"""Follows one dim of a program's inputs through all of its equations.

``states`` says what can be known of a value; ``flow`` goes through a program; the rules
are in ``constant``, ``linear``, ``moves`` and ``products``.
"""

from hexijax.layers.dims.flow import flow, state_of, step
from hexijax.layers.dims.moves import reshaped_dim
from hexijax.layers.dims.states import (
    Along,
    Mixed,
    Same,
    State,
    Summed,
    Unknown,
    is_elementwise,
)

__all__ = [
    "Along",
    "Mixed",
    "Same",
    "State",
    "Summed",
    "Unknown",
    "flow",
    "is_elementwise",
    "reshaped_dim",
    "state_of",
    "step",
]
