"""What a device holds, part by part."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryParts:
    """What a device holds, in bytes."""

    params_bytes: int = 0
    """Parameters in the compute dtype."""

    passes_bytes: int = 0
    """Parameters that are there for a pass: of one pass and the next."""

    grads_bytes: int = 0
    """Gradient accumulators of this device's lane."""

    leaving_bytes: int = 0
    """Under ``layered``, accumulators of one pass and of the last, which leave: of two
    segments, not of all."""

    state_bytes: int = 0
    """Masters and moments of the slices at home here."""

    activations_bytes: int = 0
    """Kept from forwards to backwards, and borders on their way, at full depth."""

    transient_bytes: int = 0
    """Alive inside one segment's backward only."""

    sync_bytes: int = 0
    """Sums and new parameters of the groups in flight, and of groups whose state is at
    home here though no stage of this device uses them; chunks of state that rests in
    host memory, here for their update."""

    gaps_bytes: int = 0
    """Between what was asked for and what the allocator gave."""

    host_bytes: int = 0
    """Of the host, pinned: what waits and rests there. No part of the device's peak."""

    @classmethod
    def _on_device(cls) -> list[str]:
        names = (field.name for field in dataclasses.fields(cls))
        return [name for name in names if name != "host_bytes"]

    @property
    def total_bytes(self) -> int:
        """The peak: all parts of the device at once."""
        return sum(getattr(self, name) for name in self._on_device())

    @property
    def largest(self) -> str:
        """Name of the largest part, for people."""
        parts = {
            name.removesuffix("_bytes"): getattr(self, name)
            for name in self._on_device()
        }
        return max(parts, key=lambda name: parts[name])

    def __add__(self, other: "MemoryParts") -> "MemoryParts":
        """Of two stages on one device; only one of them is inside a backward, and
        passes follow each other whichever stage's they are."""
        summed = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in dataclasses.fields(self)
        }
        for shared in ("transient_bytes", "passes_bytes", "leaving_bytes"):
            summed[shared] = max(getattr(self, shared), getattr(other, shared))
        return MemoryParts(**summed)
