"""Reads a kind's measured layer times: they overrule the roofline.

A row holds ``signature`` (of the layer), ``dtype``, ``tensor`` (degree), ``samples``
(of one lane's microbatch), ``forward_s`` and ``backward_s``. Between measured counts
by straight lines, beyond them by the last line's slope; another dtype or tensor degree
is another table, never guessed from this one.
"""

import bisect
import functools
from collections.abc import Sequence

from hexijax.cluster import DeviceProfile

Points = tuple[tuple[float, float, float], ...]
"""(samples, forward_s, backward_s), by samples."""

Key = tuple[object, object, object]
"""Signature, dtype and tensor degree of a table."""


def measured_s(
    profile: DeviceProfile, signature: str, dtype: str, tensor: int, samples: int
) -> tuple[float, float] | None:
    """Seconds of a layer's forward and backward, or None where nothing was measured."""
    points = tables(profile).get((signature, dtype, tensor))
    if not points:
        return None
    return _at(points, samples, 1), _at(points, samples, 2)


@functools.lru_cache(maxsize=256)
def tables(profile: DeviceProfile) -> dict[Key, Points]:
    """The kind's rows by signature, dtype and tensor degree."""
    found: dict[Key, list[tuple[float, float, float]]] = {}
    for row in profile.layer_times:
        if "forward_s" in row and "backward_s" in row:
            key = (row.get("signature"), row.get("dtype"), row.get("tensor", 1))
            samples, forward_s, backward_s = (
                float(row.get(name, 1))
                for name in ("samples", "forward_s", "backward_s")
            )
            found.setdefault(key, []).append((samples, forward_s, backward_s))
    return {key: tuple(sorted(points)) for key, points in found.items()}


def _at(
    points: Sequence[tuple[float, float, float]], samples: int, column: int
) -> float:
    if len(points) == 1:  # one size: time per sample, as far as it is known
        return points[0][column] * samples / points[0][0]
    sizes = [point[0] for point in points]
    above = min(max(bisect.bisect_left(sizes, samples), 1), len(points) - 1)
    low, high = points[above - 1], points[above]
    slope = (high[column] - low[column]) / (high[0] - low[0])
    return max(low[column] + slope * (samples - low[0]), points[0][column] / 2)
