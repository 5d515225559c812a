"""How many layers are compiled and dispatched as one.

A single replica reduces no gradients to others, so nothing overlaps and fewer calls
win. With several, a segment's gradients travel while the next segment computes: short
segments hide more, and cost a call each.
"""

OVERLAPPED = 4
"""Layers of a segment where gradients are reduced beside the backward."""


def layers_per_segment(num_replicas: int, asked: int | None) -> int | None:
    """Most layers of a segment; None: all of a stage."""
    if asked is not None:
        return asked
    return OVERLAPPED if num_replicas > 1 else None


def shorter(per_segment: int | None, asked: int | None) -> list[int | None]:
    """Lengths to try where memory is short: fewer layers in a segment hold fewer
    gradients in its backward. The first is the one wanted; what is asked for stays."""
    if asked is not None:
        return [asked]
    choices: list[int | None] = [per_segment]
    return choices + [n for n in (OVERLAPPED, 1) if n != per_segment]


def segments(num_layers: int, most: int | None) -> tuple[int, ...]:
    """As few segments of at most ``most`` layers as there can be, as even as can be."""
    if most is None:
        return (num_layers,)
    count = -(-num_layers // most)
    edges = [i * num_layers // count for i in range(count + 1)]
    return tuple(edges[i + 1] - edges[i] for i in range(count))


def num_segments(span: tuple[int, int], most: int | None) -> int:
    """How many that are for a stage with these layers."""
    length = span[1] - span[0]
    return -(-length // (most or length))
