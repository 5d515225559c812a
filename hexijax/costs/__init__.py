"""How long and how big: what planning knows about compute, links and memory.

    Chain, DeviceProfile, links -> layer times, transfer times, bytes by device

Measured layer times come first; where there are none, a roofline with stated
efficiencies. No JAX here.
"""

from hexijax.costs.compute import LayerTime, MeshShape, layer_times
from hexijax.costs.instructions import PlanCosts
from hexijax.costs.memory import plan_memory
from hexijax.costs.parts import MemoryParts
from hexijax.costs.rates import Rate, rate

__all__ = [
    "LayerTime",
    "MemoryParts",
    "MeshShape",
    "PlanCosts",
    "Rate",
    "layer_times",
    "plan_memory",
    "rate",
]
