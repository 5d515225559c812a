"""Measured bandwidth as link tables.

    links.json -> in_node(gpu, count), between_nodes(gpu, gpu, count) -> LinkProfile

The source fits a quadratic in log2 of the message size to bandwidth *summed* over
``count`` pairs that talk at once. The fits turn negative for small messages; they are
read from the size given as their first sound one on, and never above the largest
bandwidth seen. A time that a larger message undercuts is lowered to it: a link is no
slower with fewer bytes.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hexijax.cluster import LinkProfile
from hexijax.published.files import PublishedDataError, read, records

LARGEST_BYTES = 2**30
"""The end of the source's sweep."""


@functools.cache
def in_node(folder: Path, gpu: str, count: int) -> LinkProfile:
    """What each pair of a node's cards gets while all of its ``count`` cards talk."""
    data = read(folder, "sailor", "links")
    found = records(data, "intra_node", gpu=gpu, num_gpus=count)
    if not found:
        counts = [str(r["num_gpus"]) for r in records(data, "intra_node", gpu=gpu)]
        raise PublishedDataError(
            f"The link between {count} {gpu} of a node was asked for; links.json has "
            f"{gpu} nodes of {', '.join(counts) or 'no size'}. Use one of these sizes."
        )
    return _table(found[0], pairs=count // 2, together=False)


@functools.cache
def between_nodes(folder: Path, a: str, b: str, count: int) -> LinkProfile:
    """What two nodes get together when ``count`` pairs of their cards talk at once.

    One pair alone gets what was measured of one. Records marked suspect are left out.
    Of ``count``, else of the largest number measured below it, else of the smallest:
    totals of nodes that lack a count are their network card's, whatever the count.
    """
    data = read(folder, "sailor", "links")
    by_count = {
        record["sender_count"]: record
        for one, other in ((b, a), (a, b))
        for record in records(data, "inter_node", sender_gpu=one, receiver_gpu=other)
        if record["sender_count"] == record["receiver_count"] and not record["suspect"]
    }
    if not by_count:
        raise PublishedDataError(
            f"The link between {count} {a} and {count} {b} of two nodes was asked for; "
            "links.json has no sound entry for these cards. A link that was not "
            "measured is not guessed."
        )
    least = min(by_count)
    most = max((known for known in by_count if known <= count), default=least)
    together = _table(by_count[most], pairs=most, together=True)
    alone = _table(by_count[least], pairs=least, together=True)
    return LinkProfile(
        latency_s=together.latency_s,
        bytes_per_s=together.bytes_per_s,
        measured=together.measured,
        flow_bytes_per_s=min(alone.bytes_per_s, together.bytes_per_s),
    )


def _table(record: Mapping[str, Any], *, pairs: int, together: bool) -> LinkProfile:
    """A link by its measured points: one pair's bytes, or those of all together."""
    sizes = [record["positive_from_bytes"]]
    while sizes[-1] < LARGEST_BYTES:
        sizes.append(2 * sizes[-1])
    times_s = [size * pairs / _rate(record, size) for size in sizes]
    # The smallest of what follows, from the right.
    times_s = list(itertools.accumulate(reversed(times_s), min))[::-1]
    factor = pairs if together else 1
    points = tuple(zip((size * factor for size in sizes), times_s, strict=True))
    (first, first_s), (last, last_s) = points[0], points[-1]
    bytes_per_s = last / last_s
    return LinkProfile(
        latency_s=max(0.0, first_s - first / bytes_per_s),
        bytes_per_s=bytes_per_s,
        measured=points,
    )


def _rate(record: Mapping[str, Any], num_bytes: int) -> float:
    """Bytes a second over all pairs, each with a message of ``num_bytes``."""
    a, b, c = record["coeffs_bytes_per_s"]
    x = math.log2(num_bytes / 1e6)
    return min(a * x * x + b * x + c, record["max_bytes_per_s"])
