"""Who gives which piece: all of it, from who has it, and none could end sooner."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.checkpoint.assemble import Missing
from hexijax.checkpoint.assign import (
    Assignment,
    Want,
    assignment,
)
from hexijax.checkpoint.slices import Key
from hexijax.weights.source import Box, overlap

KEY = Key("blocks/0/w", "master")
COUNT = Key("count", "")
ITEM_BYTES, COLUMNS = 2**15, 4
ROW_BYTES = ITEM_BYTES * COLUMNS


@dataclasses.dataclass
class Store:
    label: str
    node: str
    rate_bytes_per_s: float
    holds: Mapping[Key, Sequence[Box]]

    def read(self, name: str, kind: str, box: Box) -> np.ndarray:
        raise AssertionError("nothing is read")


def rows(*runs: tuple[int, int]) -> dict[Key, list[Box]]:
    return {KEY: [(run, (0, COLUMNS)) for run in runs]}


def want(start: int, stop: int, node: str = "a") -> Want:
    return Want(
        key=KEY, box=((start, stop), (0, COLUMNS)), item_bytes=ITEM_BYTES, node=node
    )


def check_tiles(found: Assignment, wanted: Sequence[Want], sources: Sequence[Store]):
    """Every element of every want is read once, from a source that has it."""
    for at, each in enumerate(wanted):
        (start, stop), (left, right) = each.box
        times = np.zeros((stop - start, right - left), int)
        for read in found.reads:
            if read.want == at:
                (a, b), (c, d) = read.box
                times[a - start : b - start, c - left : d - left] += 1
                held = sources[read.source].holds[KEY]
                assert any(overlap(box, read.box) == read.box for box in held)
        assert (times == 1).all()


def least_s(wanted: Sequence[Want], sources: Sequence[Store]) -> float:
    """No assignment ends sooner: for each set of sources, the rows that only they hold
    leave them at their summed rate. By Hall's theorem some assignment attains it."""
    only: dict[frozenset[int], int] = {}
    for each in wanted:
        for row in range(*each.box[0]):
            holders = frozenset(
                i
                for i, source in enumerate(sources)
                if any(a <= row < b for (a, b), _ in source.holds.get(KEY, ()))
            )
            only[holders] = only.get(holders, 0) + ROW_BYTES
    several = range(1, len(sources) + 1)
    return max(
        sum(size for holders, size in only.items() if holders <= set(among))
        / sum(sources[i].rate_bytes_per_s for i in among)
        for count in several
        for among in itertools.combinations(range(len(sources)), count)
    )


ROWS = 400
RUN = st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(
    lambda run: (min(run), max(run))
)


@given(
    held=st.lists(
        st.tuples(st.lists(RUN, max_size=3), st.integers(1, 9)), min_size=1, max_size=4
    ),
    wants=st.lists(RUN, min_size=1, max_size=4),
)
def test_none_could_end_sooner(held: list[tuple[list[tuple[int, int]], int]], wants):
    """To within the rows that cannot be cut."""
    sources = [
        Store("peer", f"n{i}", rate * 1e7, rows(*runs))
        for i, (runs, rate) in enumerate(held)
    ]
    sources.append(Store("far", "", 1e7, rows((0, ROWS))))
    wanted = [want(*run, node=f"n{i % 2}") for i, run in enumerate(wants)]
    found = assignment(wanted, sources)
    check_tiles(found, wanted, sources)
    least = least_s(wanted, sources)
    rounding_s = (len(sources) + 1) * ROW_BYTES / 1e7
    assert least * (1 - 1e-9) <= found.finish_s <= least + rounding_s
    for source, size in found.bytes_by_source().items():
        assert size / sources[source].rate_bytes_per_s <= found.finish_s * (1 + 1e-9)


def test_what_is_near_comes_from_there_and_far_helps_only_where_it_is_sooner():
    everything = rows((0, 4000))
    device = Store("device", "a", 1e9, rows((0, 1000)))
    peer = Store("peer", "b", 1e9, rows((0, 2000)))
    far = Store("far", "", 1e8, everything)
    sources, wanted = [far, peer, device], [want(0, 4000)]
    found = assignment(wanted, sources)
    check_tiles(found, wanted, sources)
    # Far alone has the last 2000 rows: it is the last to end whatever the others do.
    assert found.finish_s == pytest.approx(2000 * ROW_BYTES / 1e8)
    # So nothing else comes from it, and the device gives all that it holds.
    assert found.bytes_by_source() == {
        0: 2000 * ROW_BYTES,
        1: 1000 * ROW_BYTES,
        2: 1000 * ROW_BYTES,
    }
    # Where it is quick, it takes its part of what others hold too.
    quick = dataclasses.replace(far, rate_bytes_per_s=2e9)
    found = assignment(wanted, [quick, device])
    assert found.finish_s == pytest.approx(3000 * ROW_BYTES / 2e9)
    more = dataclasses.replace(device, holds=everything)
    found = assignment(wanted, [quick, more])
    assert found.finish_s == pytest.approx(4000 * ROW_BYTES / 3e9, rel=1e-3)


@pytest.mark.parametrize("count", [2, 3, 6, 7])
@pytest.mark.parametrize("rate", [1.0, 0.2, 0.5, 3.0])
def test_a_share_that_is_just_a_wanted_box_is_not_lost(count: int, rate: float):
    """Shares come from floating-point numbers; a hair too little is no box less."""
    everything = rows((0, 100 * count))
    near = Store("peer", "b", 1e9, everything)
    sources = [near, Store("far", "", rate * 1e9, everything)]
    wanted = [want(100 * i, 100 * i + 100) for i in range(count)]
    found = assignment(wanted, sources)
    check_tiles(found, wanted, sources)
    least = 100 * count * ROW_BYTES / (1e9 * (1 + rate))
    assert found.finish_s <= least + ROW_BYTES / (min(1.0, rate) * 1e9)


def test_a_slow_way_to_one_reader_counts():
    """Two sources hold all; the link from b to a is a tenth of what b gives others."""
    both = rows((0, 1000))
    sources = [Store("disk", "a", 1e9, both), Store("disk", "b", 1e9, both)]
    wanted = [want(0, 500, "a"), want(500, 1000, "b")]

    def rate(source, node: str) -> float:
        return source.rate_bytes_per_s * (1.0 if source.node == node else 0.1)

    found = assignment(wanted, sources, rate)
    assert [(r.want, r.source) for r in found.reads] == [(0, 0), (1, 1)]


def test_what_nobody_holds_is_named():
    sources = [Store("peer", "b", 1e9, rows((0, 10), (20, 30)))]
    with pytest.raises(
        Missing,
        match=r"blocks/0/w master \[10:20,0:4\] is held by none of 1 sources \(peer b",
    ):
        assignment([want(0, 30)], sources)
    # Nothing is in an empty box, so nobody needs to hold it; a number has no rows.
    count = Want(key=COUNT, box=(), item_bytes=4, node="a")
    holder = Store("device", "a", 1e9, {COUNT: [()]})
    assert assignment([want(5, 5), count], [holder]).bytes_by_source() == {0: 4}
