"""Which source gives which piece of a state, so that all of it is there soonest.

    wanted boxes, sources -> atoms -> classes -> two linear programs -> (Read, ...)

An atom is a part of a wanted box that each holder has whole or not at all. Atoms with
the same holders and the same reader are one class, and only its bytes count: they can
be cut row by row, so a linear program over classes and holders is exact. It is small
whatever the model. The first makes the moment as early as possible at which the last
holder ends; of all ways to do that, the second takes the bytes that lie nearest. The
answer is a vertex: at most as many classes are cut as there are holders.
"""

import collections
import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hexijax.checkpoint.assemble import Assign, Fetch, Wanted, missing
from hexijax.checkpoint.slices import Key, Slice
from hexijax.checkpoint.sources import DEVICE, DISK, FAR, OWN, PEER, Source
from hexijax.weights.source import Box, overlap

FARTHER: Mapping[str, float] = {DEVICE: 0.0, OWN: 0.0, DISK: 1.0, PEER: 2.0, FAR: 8.0}
"""What a byte from each kind of source weighs, where time leaves a choice."""

ELSEWHERE = 1.0
"""What it weighs besides, if it comes from another node."""

LEAST_CUT_BYTES = 2**16
"""No holder is asked for fewer of an atom's: a request costs more."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """A box that somebody needs."""

    key: Key
    """Of what: a parameter's name and a kind of state."""

    box: Box
    """Which part."""

    item_bytes: int
    """Of one element."""

    node: str
    """Who reads it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """A part of a want, and who gives it."""

    want: int
    """Its place among the wanted."""

    box: Box
    """Of the whole array, as the want's own."""

    source: int
    """Its place among the sources."""

    num_bytes: int
    """Its size."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Reads that tile every want, and when the last holder ends."""

    reads: tuple[Read, ...]
    """In the order of the wants."""

    finish_s: float
    """Seconds until the busiest holder is done, all at work from the start."""

    def bytes_by_source(self) -> dict[int, int]:
        """What each holder gives."""
        given: dict[int, int] = collections.defaultdict(int)
        for read in self.reads:
            given[read.source] += read.num_bytes
        return dict(given)


Rate = Callable[[Source, str], float]
"""Bytes a second from a source to a node that reads from it alone."""

_Class = tuple[tuple[int, ...], str]
"""Holders and reader of atoms."""

_Atom = tuple[int, Box, int]
"""Its want, its box, its bytes."""


TYPICAL_BYTES_PER_S: Mapping[str, float] = {
    DEVICE: 1e10,
    OWN: 1e10,
    DISK: 2e9,
    PEER: 1e9,
    FAR: 1e8,
}
"""Of sources that do not say how fast they are."""


def own_rate(source: Source, node: str) -> float:
    """The same to every node: its own."""
    del node
    given = source.rate_bytes_per_s
    return given if math.isfinite(given) else TYPICAL_BYTES_PER_S[source.label]


def load_solver() -> None:
    """So that no recovery waits for half a second of imports."""
    importlib.import_module("scipy.optimize")


def soonest(rate: Rate = own_rate) -> Assign:
    """The ``Assign`` that ends first; see ``assignment``."""

    def assign(wanted: Sequence[Wanted], sources: Sequence[Source]) -> list[Fetch]:
        wants = [
            Want(
                key=want.slice.key,
                box=want.slice.box,
                item_bytes=want.num_bytes // want.slice.size,
                node=want.nodes[0] if want.nodes else "",
            )
            for want in wanted
        ]
        return [
            Fetch(Slice(*wants[read.want].key, read.box), read.source)
            for read in assignment(wants, sources, rate).reads
        ]

    return assign


def assignment(
    wanted: Sequence[Want], sources: Sequence[Source], rate: Rate = own_rate
) -> Assignment:
    """The reads that end first; among those, the ones from nearest by.

    All holders are read from at the same time, each at its own rate whoever reads.

    Args:
        wanted: what is needed; their boxes may overlap.
        sources: who holds what.
        rate: seconds of a holder's time follow from it.

    Raises:
        Missing: some of it is held by none.
    """
    classes: dict[_Class, list[_Atom]] = collections.defaultdict(list)
    for at, want in enumerate(wanted):
        for box, holders in _atoms(want, sources):
            num_bytes = math.prod(b - a for a, b in box) * want.item_bytes
            classes[holders, want.node].append((at, box, num_bytes))
    quotas = _quotas(classes, sources, rate)
    reads = [
        read
        for each, atoms in classes.items()
        for read in _dealt(atoms, quotas[each], wanted)
    ]
    busy_s = [0.0] * len(sources)
    for read in reads:
        seconds = read.num_bytes / rate(sources[read.source], wanted[read.want].node)
        busy_s[read.source] += seconds
    reads.sort(key=lambda read: (read.want, read.box))
    return Assignment(reads=tuple(reads), finish_s=max(busy_s, default=0.0))


def _atoms(
    want: Want, sources: Sequence[Source]
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Parts of the want, each with the sources that have all of it."""
    held = [
        (i, both)
        for i, source in enumerate(sources)
        for box in source.holds.get(want.key, ())
        if (both := overlap(box, want.box)) is not None
    ]
    boxes = [want.box]
    while boxes:
        box = boxes.pop()
        inside = [(i, both) for i, h in held if (both := overlap(h, box)) is not None]
        edge = next(
            (
                (dim, at)
                for _, both in inside
                for dim, (rows, whole) in enumerate(zip(both, box, strict=True))
                for at in rows
                if whole[0] < at < whole[1]
            ),
            None,
        )
        if edge is not None:
            boxes += reversed(_cut(box, *edge))
        elif not math.prod(b - a for a, b in box):
            continue  # nothing is in it
        elif inside:
            yield box, tuple(sorted({i for i, _ in inside}))
        else:
            raise missing(Slice(*want.key, box), sources)


def _cut(box: Box, dim: int, at: int) -> list[Box]:
    (start, stop), before, after = box[dim], box[:dim], box[dim + 1 :]
    return [(*before, (start, at), *after), (*before, (at, stop), *after)]


def _quotas(
    classes: Mapping[_Class, Sequence[_Atom]],
    sources: Sequence[Source],
    rate: Rate,
) -> dict[_Class, dict[int, float]]:
    """Bytes that each holder gives of each class."""
    total = {each: float(sum(a[2] for a in atoms)) for each, atoms in classes.items()}
    if all(len(holders) == 1 for holders, _ in total):
        return {each: {each[0][0]: size} for each, size in total.items()}
    ways = [(each, i) for each in total for i in each[0]]
    shares = _solved(ways, total, sources, rate)
    quotas: dict[_Class, dict[int, float]] = {each: {} for each in total}
    for (each, i), share in zip(ways, shares, strict=True):
        if share > 0:
            quotas[each][i] = share * total[each]
    return quotas


def _solved(
    ways: Sequence[tuple[_Class, int]],
    total: Mapping[_Class, float],
    sources: Sequence[Source],
    rate: Rate,
) -> np.ndarray:
    """Of each class, the part that goes each way. ``[ways]``

    Parts instead of bytes, and seconds over the longest a class alone may take, keep
    the numbers near one.
    """
    from scipy.optimize import linprog  # pyrefly: ignore[untyped-import]

    of_class = {each: row for row, each in enumerate(total)}
    seconds = np.array(
        [total[each] / rate(sources[i], each[1]) for each, i in ways], dtype=float
    )
    seconds /= seconds.max()
    n = len(ways)
    whole = np.zeros((len(total), n + 1))
    busy = np.zeros((len(sources), n + 1))
    busy[:, n] = -1.0
    for column, (each, i) in enumerate(ways):
        whole[of_class[each], column] = 1.0
        busy[i, column] = seconds[column]
    ones, zeros = np.ones(len(total)), np.zeros(len(sources))
    soonest = np.zeros(n + 1)
    soonest[n] = 1.0

    def solve(cost: np.ndarray, latest: float | None) -> Any:
        bounds = [(0.0, 1.0)] * n + [(0.0, latest)]
        found = linprog(
            cost, A_ub=busy, b_ub=zeros, A_eq=whole, b_eq=ones, bounds=bounds
        )
        assert found.success, found.message
        return found

    finish = float(solve(soonest, None).x[n])
    sizes = np.array([total[each] for each, _ in ways])
    far = [
        FARTHER[sources[i].label] + ELSEWHERE * (sources[i].node != each[1])
        for each, i in ways
    ]
    # A second is worth little: it decides between sources that are as near.
    nearest = sizes / sizes.max() * np.array(far) + 1e-3 * seconds
    cost = np.append(nearest, 0.0)
    return np.clip(solve(cost, finish * (1 + 1e-7) + 1e-12).x[:n], 0.0, 1.0)


def _dealt(
    atoms: Sequence[_Atom], quotas: Mapping[int, float], wanted: Sequence[Want]
) -> Iterator[Read]:
    """The atoms of a class in order, to one holder after another."""
    # Largest last: it takes what rounding to rows leaves over.
    holders = sorted(quotas, key=lambda i: quotas[i])
    waiting = collections.deque(atoms)
    for turn, holder in enumerate(holders):
        left = quotas[holder] if turn + 1 < len(holders) else math.inf
        while waiting and left > 0:
            want, box, num_bytes = waiting[0]
            if num_bytes > left:
                size = wanted[want].item_bytes
                first, rest = _split(box, left / num_bytes, size)
                if first is None:
                    break
                if rest is not None:
                    whole_bytes, num_bytes = num_bytes, _bytes(first, size)
                    waiting[0] = (want, rest, whole_bytes - num_bytes)
                    waiting.appendleft((want, first, num_bytes))
                box, left = first, num_bytes
            waiting.popleft()
            left -= num_bytes
            yield Read(want=want, box=box, source=holder, num_bytes=num_bytes)


def _split(box: Box, part: float, item_bytes: int) -> tuple[Box | None, Box | None]:
    """The rows of a box that are nearest to a part of it, and the others: all of it or
    none where a cut is not worth it, or nearer to no cut."""
    whole_bytes = _bytes(box, item_bytes)
    if min(part, 1 - part) * whole_bytes >= LEAST_CUT_BYTES:
        for dim, (start, stop) in enumerate(box):
            rows = round(part * (stop - start))
            if 0 < rows < stop - start:
                first, rest = _cut(box, dim, start + rows)
                return first, rest
    return (box, None) if part > 0.5 else (None, box)


def _bytes(box: Box, item_bytes: int) -> int:
    return math.prod(stop - start for start, stop in box) * item_bytes
