"""A run's whole state to places that outlive it, and back under any plan.

    engine -> Saver: snapshot -> writer -> manifest, in tiers
    tiers -> Inventory -> restore -> any engine of the same model

    slices.py     the unit: a box of one parameter, of one kind of state
    sources.py    where slices can be read: live devices, memory, stored steps
    assign.py     which source gives what; assemble.py: reads it, makes arrays of it
    snapshot.py   a copy beside the next step; saver.py: threads that write it
    writer.py     one writer's slices, committed by a manifest
    tiers.py      fast, far, neighbours: what is due, what is there
    restore.py    the newest whole step into an engine

What a stored step looks like is ``hexijax.weights.stored``'s matter.
"""

from hexijax.checkpoint.restore import Restored, look, restore
from hexijax.checkpoint.saver import Saver
from hexijax.checkpoint.slices import Slice, Stateful
from hexijax.checkpoint.tiers import Inventory, Neighbours, Tiers, inventory
from hexijax.weights.stored.manifest import Stand

__all__ = [
    "Inventory",
    "Neighbours",
    "Restored",
    "Saver",
    "Slice",
    "Stand",
    "Stateful",
    "Tiers",
    "inventory",
    "look",
    "restore",
]
