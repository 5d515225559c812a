"""Figures and names as people read them."""

from collections.abc import Iterable, Iterator, Sequence

from hexijax.cluster import Cluster

_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> Iterator[str]:
    """Lines whose cells stand under each other; columns in ``right`` end together."""
    right = set(right)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def gib(num_bytes: float) -> str:
    """``71.13 GiB``, and ``3.1 MiB`` of what is small."""
    if abs(num_bytes) < 2**30:
        return f"{num_bytes / 2**20:.3g} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"


def seconds(time_s: float) -> str:
    """``46.6 s``, ``3.41 ms``: three digits, in the unit that fits."""
    scale, unit = next((s for s in _SCALES if abs(time_s) >= s[0]), _SCALES[-1])
    value = time_s / scale
    if value >= 100 or not value:
        return f"{value:,.0f} {unit}"
    return f"{value:#.3g} {unit}"


def rate(per_s: float) -> str:
    """``5,620``; small ones keep three digits."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def short_kinds(cluster: Cluster) -> dict[str, str]:
    """What people call each kind: ``h100-80g-sxm`` is an H100, ``rtx3090-24g`` a 3090.

    Kinds that would share a name keep their whole one.
    """
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    short = {kind: _short(kind) for kind in kinds}
    names = list(short.values())
    return {k: s if names.count(s) == 1 else k for k, s in short.items()}


def _short(kind: str) -> str:
    first = kind.split("-")[0]
    number = first.removeprefix("rtx").removeprefix("gtx")
    return number if number.isdigit() else first.upper()


def plural(word: str, count: int) -> str:
    """The word for that many."""
    return word if count == 1 else f"{word}s"
