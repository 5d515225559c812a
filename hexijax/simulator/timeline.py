"""When everything of a step happens, and why a device waits."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hexijax.costs.ways import Load
from hexijax.program.program import Instruction
from hexijax.simulator.memory import MemoryCurve
from hexijax.simulator.uses import What, name


class Cause(enum.StrEnum):
    """Why a device does nothing."""

    PIPELINE = "pipeline"
    """What it needs is still being computed elsewhere: the bubble."""
    MOVE = "move"
    """Activations or cotangents are on their way."""
    SYNC = "sync"
    """Gradients or new parameters are on their way."""
    DISPATCH = "dispatch"
    """The host has not come round to it."""


class Event(NamedTuple):
    """One use of some queues."""

    start_s: float
    end_s: float
    what: What
    instruction: Instruction
    """The one it belongs to; a Reduce or a Gather has several."""
    devices: tuple[str, ...]
    """Kept from start to end."""
    load: Load
    """Ways, ``<device or node> out`` and ``in``, each kept from the start for its own
    time."""

    @property
    def name(self) -> str:
        """The instruction as a person reads it."""
        return name(self.instruction)

    @property
    def queues(self) -> Iterator[tuple[str, float, float, int]]:
        """Name, start, end and bytes of its use of each device and way."""
        for device in self.devices:
            yield device, self.start_s, self.end_s, 0
        load = self.load
        for way, hold_s, num_bytes in zip(
            load.ways, load.holds_s, load.num_bytes, strict=True
        ):
            yield way, self.start_s, self.start_s + hold_s, num_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One step in its steady state; seconds from the first start of the step."""

    step_s: float
    """From the end of one step to the end of the next."""

    events: tuple[Event, ...]
    """By their order of dispatch; those that take no time are left out. Empty where
    they were not asked for."""

    busy_s: Mapping[str, Mapping[What, float]]
    """What each device computes, and for how long; ``sync`` are sums in programs."""

    idle_s: Mapping[str, Mapping[Cause, float]]
    """Why each device waits, and for how long.

    With ``busy_s`` it makes the step, from the device's last work in one step to its
    last in the next.
    """

    link_bytes: Mapping[str, int]
    """Bytes over each way, ``<device or node> out`` and ``in``."""

    host_s: Mapping[str, float]
    """What each island's host needs to dispatch the step."""

    memory: Mapping[str, MemoryCurve] = dataclasses.field(default_factory=dict)
    """What each device holds, all step; empty where it was not asked for.

    Where repeating microbatches were played once, the time of those left out is the
    step's first, in which the curve stands still; its peak is the whole step's.
    """

    def utilisation(self, device: str) -> float:
        """Part of the step in which a device computes."""
        return sum(self.busy_s[device].values()) / self.step_s
