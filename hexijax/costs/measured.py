"""Reads a kind's measured layer times: they overrule the roofline.

A row holds ``signature`` (of the layer), ``dtype``, ``tensor`` (degree), ``samples``
(of one lane's microbatch), ``forward_s`` and ``backward_s``: of both in one program. It
may hold ``apart_forward_s`` and ``apart_backward_s``: of each in a program of its own;
without them these are no different. What the row's ``remat`` (none, where it has none)
computes again is in it. A policy without rows is reckoned from one that has them: from
none, else from the first. Between measured counts times go by straight lines, beyond
them by the last line's slope, and ``basis`` says which it was. A kind that has a
layer's times in a dtype at some tensor degrees only is refused at the others
(``missing`` asks without raising): how a layer speeds up with its degree differs
between kinds by a factor of four, so a guess from another degree, or from the roofline
beside measured ones, would steer every comparison.

A time that a larger microbatch undercuts is lowered to it: more samples take no less
work, so the difference was something else (small kernels wait for their launches).
"""

import bisect
import dataclasses
import enum
import functools
import itertools
from collections.abc import Sequence

from hexijax.cluster import DeviceProfile
from hexijax.errors import UserError
from hexijax.layers.chain import Remat

Point = tuple[float, float, float, float, float]
"""Samples, then forward and backward in one program, then each in one of its own."""

Points = tuple[Point, ...]
"""By samples."""

Key = tuple[object, object, object]
"""Signature, dtype and tensor degree of a table."""


class NotMeasuredError(UserError):
    """A kind's table has the layer, but not as the plan would run it."""


class Basis(enum.StrEnum):
    """What a layer's time rests on."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"
    ROOFLINE = "roofline"
    """The kind has no time of this layer in this dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a layer under one policy, with what that computes again."""

    forward_s: float
    """In one program with its backward, as ``backward_s`` is with its forward."""

    backward_s: float
    apart_forward_s: float
    """In a program of its own, never less than joined; ``apart_backward_s`` too."""

    apart_backward_s: float


def measured_s(
    profile: DeviceProfile, signature: str, dtype: str, tensor: int, samples: int
) -> dict[Remat, Measured]:
    """A layer's times by the policies that were measured, none first; empty: none was.

    Raises:
      NotMeasuredError: the layer was measured in this dtype at other degrees only.
    """
    by_policy = tables(profile).get((signature, dtype, tensor), {})
    if not by_policy:
        fault = missing(profile, signature, dtype, tensor)
        if fault:
            raise NotMeasuredError(fault)
    found: dict[Remat, Measured] = {}
    for policy, points in by_policy.items():
        forward_s, backward_s, *apart_s = (_at(points, samples, i) for i in range(1, 5))
        found[policy] = Measured(
            forward_s,
            backward_s,
            max(forward_s, apart_s[0]),
            max(backward_s, apart_s[1]),
        )
    return found


def missing(
    profile: DeviceProfile, signature: str, dtype: str, tensor: int
) -> str | None:
    """Why a layer cannot be priced at a tensor degree; None where it can.

    For a search that would rather leave a degree out than fail.
    """
    degrees = _degrees(profile).get((signature, dtype), ())
    if not degrees or tensor in degrees:
        return None
    there = ", ".join(map(str, degrees))
    return (
        f"Layer {signature} in {dtype} at tensor degree {tensor} was asked of a "
        f"{profile.kind}, which has measured times of it at tensor degree {there} "
        f"only. A time is never guessed from another degree: let the same `hexijax "
        f"profile` go on until it has degree {tensor}, or use a plan of degree {there}."
    )


def basis(
    profile: DeviceProfile, signature: str, dtype: str, tensor: int, samples: int
) -> Basis:
    """What ``measured_s`` would answer from."""
    by_policy = tables(profile).get((signature, dtype, tensor))
    if not by_policy:
        return Basis.ROOFLINE
    points = next(iter(by_policy.values()))
    if any(point[0] == samples for point in points):
        return Basis.MEASURED
    inside = points[0][0] < samples < points[-1][0]
    return Basis.INTERPOLATED if inside else Basis.EXTRAPOLATED


@functools.lru_cache(maxsize=256)
def tables(profile: DeviceProfile) -> dict[Key, dict[Remat, Points]]:
    """The kind's rows by signature, dtype and tensor degree, then by policy."""
    found: dict[Key, dict[Remat, list[Point]]] = {}
    for row in profile.layer_times:
        if "forward_s" in row and "backward_s" in row:
            key = (row.get("signature"), row.get("dtype"), row.get("tensor", 1))
            forward_s, backward_s = float(row["forward_s"]), float(row["backward_s"])
            point = (
                float(row.get("samples", 1)),
                forward_s,
                backward_s,
                float(row.get("apart_forward_s", forward_s)),
                float(row.get("apart_backward_s", backward_s)),
            )
            policy = Remat(str(row.get("remat", Remat.NONE)))
            found.setdefault(key, {}).setdefault(policy, []).append(point)
    return {
        key: {
            policy: _rising(sorted(by_policy[policy]))
            for policy in sorted(by_policy, key=lambda p: p is not Remat.NONE)
        }
        for key, by_policy in found.items()
    }


def update_s_per_param(profile: DeviceProfile) -> float | None:
    """Seconds of the optimizer for each parameter, by the largest row that has them.

    A row holds ``update_params`` and ``update_s``.
    """
    rows = [
        (float(row["update_params"]), float(row["update_s"]))
        for row in profile.layer_times
        if "update_params" in row and "update_s" in row
    ]
    if not rows:
        return None
    params, seconds = max(rows)
    return seconds / params


@functools.lru_cache(maxsize=256)
def _degrees(profile: DeviceProfile) -> dict[tuple[object, object], tuple[int, ...]]:
    """Measured tensor degrees by signature and dtype."""
    found: dict[tuple[object, object], set[int]] = {}
    for signature, dtype, tensor in tables(profile):
        found.setdefault((signature, dtype), set()).add(int(str(tensor)))
    return {key: tuple(sorted(degrees)) for key, degrees in found.items()}


def _rising(points: Sequence[Point]) -> Points:
    """No time falls as samples grow: each is the smallest of what follows."""
    counts, *columns = zip(*points, strict=True)
    lowest = (
        list(itertools.accumulate(reversed(column), min))[::-1] for column in columns
    )
    joined_s, back_s, apart_s, apart_back_s = lowest
    return tuple(zip(counts, joined_s, back_s, apart_s, apart_back_s, strict=True))


def _at(points: Sequence[Point], samples: int, column: int) -> float:
    if len(points) == 1:  # one size: time per sample, as far as it is known
        return points[0][column] * samples / points[0][0]
    sizes = [point[0] for point in points]
    above = min(max(bisect.bisect_left(sizes, samples), 1), len(points) - 1)
    low, high = points[above - 1], points[above]
    slope = (high[column] - low[column]) / (high[0] - low[0])
    return max(low[column] + slope * (samples - low[0]), points[0][column] / 2)
