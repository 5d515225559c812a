"""How long bytes take from one device to another."""

import bisect
import dataclasses
import itertools

from hexijax.cluster.errors import ClusterError, Form, Place, shown
from hexijax.cluster.record import Key, Record
from hexijax.cluster.units import BANDWIDTH, LATENCY, MESSAGE, MESSAGE_TIME
from hexijax.cluster.values import ListOf


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinkProfile:
    """One direction of a link; n bytes take latency_s + n / bytes_per_s."""

    latency_s: float
    """Time of an empty message: the intercept of the measured line."""

    bytes_per_s: float
    """Sustained rate of large messages: the slope of the same line."""

    measured: tuple[tuple[int, float], ...] = ()
    """(bytes, seconds) of single messages, as measured; overrules the line."""

    flow_bytes_per_s: float | None = None
    """Between nodes: the most that one pair of devices gets of it. None: all of it."""

    def __post_init__(self) -> None:
        LINK.settle(self)
        points = ((0, self.latency_s), *self.measured)
        for (size, time_s), (next_size, next_time_s) in itertools.pairwise(points):
            if next_size <= size or next_time_s < time_s:
                raise ClusterError(
                    f"its times go from {size:,} bytes in {time_s:g} s to "
                    f"{next_size:,} bytes in {next_time_s:g} s; from no bytes at the "
                    "latency on, sizes must grow and times must not fall. Sort the "
                    "table and keep the larger of two times."
                )

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds to move ``num_bytes`` with nothing else on the wire.

        Between measured sizes by straight lines; below the first from ``latency_s`` at
        no bytes, above the last on at ``bytes_per_s``.
        """
        if not self.measured:
            return self.latency_s + num_bytes / self.bytes_per_s
        above = bisect.bisect_left(self.measured, (num_bytes, 0.0))
        if above == len(self.measured):
            size, time_s = self.measured[-1]
            return time_s + (num_bytes - size) / self.bytes_per_s
        size, time_s = self.measured[above - 1] if above else (0, self.latency_s)
        next_size, next_time_s = self.measured[above]
        part = (num_bytes - size) / (next_size - size)
        return time_s + part * (next_time_s - time_s)

    def filled(self, num_bytes: float) -> float:
        """Part of ``bytes_per_s`` that a message reaches, its latency left out."""
        carried_s = self.transfer_s(int(num_bytes)) - self.latency_s
        return min(1.0, num_bytes / self.bytes_per_s / carried_s) if carried_s else 1.0

    def flow_s(self, num_bytes: int) -> float:
        """The same for one pair of devices, which may get a part of it only."""
        alone_s = self.transfer_s(num_bytes)
        if self.flow_bytes_per_s is None:
            return alone_s
        return max(alone_s, self.latency_s + num_bytes / self.flow_bytes_per_s)


@dataclasses.dataclass(frozen=True, slots=True)
class _Point:
    """A measured message: ``[bytes, microseconds]`` in files."""

    def read(self, raw: object, place: Place) -> tuple[int, float]:
        """Bytes and seconds."""
        if not isinstance(raw, (list, tuple)) or len(raw) != 2:
            place.fail(f"is {shown(raw)}; it must be a pair [bytes, time].")
        size = MESSAGE.read(raw[0], place.item(0))
        return int(size), MESSAGE_TIME.read(raw[1], place.item(1))

    def write(self, value: tuple[int, float], form: Form) -> object:
        """The pair as a list."""
        return [value[0], MESSAGE_TIME.write(value[1], form)]


LINK = Record(
    make=LinkProfile,
    what="a link",
    keys=(
        Key("latency_us", "latency_s", LATENCY),
        Key("bandwidth_gb_per_s", "bytes_per_s", BANDWIDTH),
        Key("measured_bytes_us", "measured", ListOf(item=_Point(), most=10_000)),
        Key("flow_gb_per_s", "flow_bytes_per_s", BANDWIDTH),
    ),
)
