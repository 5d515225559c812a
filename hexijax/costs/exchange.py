"""What one bucket's sum and its new parameters cost, part by part, as the runtime does.

    gradients -> partial, leave -> arrive, add -> homes -> update
    homes -> spread out, spread in, join -> users

A member sums its gradient over its lanes, of which each keeps its part, and cuts it to
the homes' boxes: one program, and one call that starts its copies. Every home adds what
has come. New parameters leave each home for all users, a part to each lane, and each
user gathers and joins its pieces. Of a member's copies only the
bytes by way are kept, and of a home's the same, so that a bucket is O(members + homes)
tasks however many copies there are.

A site may stand for several copies of itself (``copies``), which are elsewhere and do
the same at the same time: its bytes count what it moves to and from those too.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from hexijax.cluster import LinkProfile
from hexijax.costs.rates import CALL_S
from hexijax.costs.sums import (
    GRAD_BYTES,
    STATE_BYTES,
    alike,
    box_size,
    shard_size,
)
from hexijax.costs.ways import NO_LOAD, Grid, Hops, Load, Ways, load
from hexijax.layers.chain import Group
from hexijax.plan.plan import Place
from hexijax.program.boxes import Box, whole
from hexijax.program.program import PIECES

PARTS = (
    "partial",
    "leave",
    "arrive",
    "add",
    "spread_out",
    "spread_to",
    "cast",
    "spread_in",
    "join",
)
"""What every equal bucket asks again."""

_Bytes = Callable[[Place, Place], int]
"""From a place to another: of what each device of the other gets."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Site:
    """A stage's mesh or a single device, as sums and copies see it."""

    devices: tuple[str, ...]
    lanes: int = 1
    tensor: int = 1
    item_bytes: int = STATE_BYTES
    """Of a parameter as it is computed with here."""
    memory_bytes_per_s: float
    link: LinkProfile | None = None
    """The slowest inside; None: a single device."""
    copies: int = 1
    """How many sites of the plan this one stands for."""
    twin: tuple[str, ...] = ()
    """Devices of another of them."""

    @property
    def grid(self) -> Grid:
        """How its devices divide an array."""
        return Grid(self.devices, self.lanes, self.tensor)

    @property
    def twin_grid(self) -> Grid:
        """How the other's do."""
        return Grid(self.twin, self.lanes, self.tensor)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A program's call on a site's devices."""

    seconds: float
    ways: Load = NO_LOAD
    """Those between nodes that its lanes' sum holds."""

    def and_s(self, seconds: float) -> "Call":
        """The same, and something more."""
        return dataclasses.replace(self, seconds=self.seconds + seconds)


class Exchange:
    """Of one bucket; ``boxes`` are those of its state, by home."""

    def __init__(
        self,
        group: Group,
        boxes: Mapping[Place, Mapping[str, Box]],
        members: Sequence[Place],
        sites: Mapping[Place, Site],
        ways: Ways,
        *,
        whole_leaves: bool = False,
    ) -> None:
        self.members, self.homes = tuple(members), tuple(boxes)
        self._group, self._boxes, self._ways = group, boxes, ways
        self._sites = {place: sites[place] for place in (*boxes, *members)}
        self._grids = {place: site.grid for place, site in self._sites.items()}
        self._twins = {place: site.twin_grid for place, site in self._sites.items()}
        self._leaves = alike(group.leaves, whole_leaves)
        items = {sites[member].item_bytes for member in members}
        self.param_item_bytes = items.pop() if len(items) == 1 else STATE_BYTES
        """Of a parameter on its way."""
        self._whole_leaves = whole_leaves
        self.num_members = sum(sites[member].copies for member in members)
        num_homes = sum(sites[home].copies for home in boxes)
        self.alone = self.num_members == num_homes == 1 and self.homes == self.members
        self._piece = functools.cache(self._piece_size)
        self._divided = functools.cache(self._divided_size)
        for part in PARTS:
            setattr(self, part, functools.cache(getattr(self, part)))
        self.held = {home: self._held(home) for home in boxes}
        """Elements at home on each device of a place."""
        self.size = group.size
        self._wholes = all(
            held.get(leaf.id, whole(leaf)) == whole(leaf)
            for held in boxes.values()
            for leaf, _ in self._leaves
        )

    # Sums

    def partial(self, member: Place) -> Call:
        """The sum over a member's lanes, cut to the boxes of all homes.

        Reduce-scattered; what the lanes cannot divide is all-reduced.
        """
        site = self._sites[member]
        shard = shard_size(self._group, site.tensor)
        if site.lanes == 1:  # alone: squares for the norm; else a copy of each box
            passes = 1 if self.alone else 2
            moved = passes * shard * GRAD_BYTES
            return Call(CALL_S + moved / site.memory_bytes_per_s)
        whole_here = self.alone and self._whole_leaves
        part = 0 if whole_here else min(self._divided(site.lanes, site.tensor), shard)
        return self._lanes(site, [part, shard - part, shard - part], GRAD_BYTES)

    def leave(self, member: Place, path: int = PIECES) -> Load:
        """A member's copies to all homes but itself."""
        each = functools.partial(self._grad_bytes, path)
        return self._sent(member, self.homes, each)

    def arrive(self, home: Place, path: int = PIECES) -> Load:
        """All copies to a home."""
        each = functools.partial(self._grad_bytes, path)
        return self._got(home, self.members, each)

    def add(self, home: Place, path: int = PIECES) -> Call:
        """Adding what has come: each array is read, one is written.

        Leaves that stay whole are gathered over the lanes. Alone it sums its lanes.
        What a collective has added up comes once.
        """
        if self.alone:
            return self.partial(home)
        site = self._sites[home]
        part = self._piece(home, site.lanes, site.tensor)
        moved = (self.num_members + 1) * part * GRAD_BYTES
        if path:
            together = self.held[home] - self.rest(home, path)
            moved -= (self.num_members - 1) * together * GRAD_BYTES
        call = Call(CALL_S)
        if part < self.held[home]:
            call = self._lanes(site, [self.held[home]], GRAD_BYTES)
        return call.and_s(moved / site.memory_bytes_per_s)

    # New parameters

    def spread_out(self, home: Place, path: int = PIECES) -> Load:
        """A home's copies to all users but itself."""
        each = functools.partial(self._param_bytes, path)
        return self._sent(home, self.members, each)

    def spread_to(self, home: Place, user: Place) -> Load:
        """A home's copies to one user, for a pass."""
        each = functools.partial(self._param_bytes, PIECES)
        return self._sent(home, (user,), each)

    def cast(self, home: Place) -> Call | None:
        """What makes a home's slices of its masters, for a pass of one user; None: they
        travel as they are."""
        if self.param_item_bytes == STATE_BYTES:
            return None
        moved = self.held[home] * (STATE_BYTES + self.param_item_bytes)
        return Call(CALL_S + moved / self._sites[home].memory_bytes_per_s)

    def spread_in(self, user: Place, path: int = PIECES) -> Load:
        """All copies to a user."""
        each = functools.partial(self._param_bytes, path)
        return self._got(user, self.homes, each)

    def join(self, user: Place, path: int = PIECES) -> Call | None:
        """What makes parameters of the pieces; None: they are the parameters."""
        site = self._sites[user]
        gathered = self._divided(site.lanes, site.tensor)
        if self._whole_leaves and user in self.held:  # its own it has on every lane
            gathered -= min(gathered, self.held[user])
        same_dtype = self.param_item_bytes == site.item_bytes
        direct = same_dtype and not path and (self.alone or self._wholes)
        if direct and not gathered:
            return None
        call = Call(CALL_S)
        if gathered:
            call = self._lanes(site, [gathered], site.item_bytes)
        if direct or self.alone:
            return call
        moved = 2 * shard_size(self._group, site.tensor) * site.item_bytes
        return call.and_s(moved / site.memory_bytes_per_s)

    # Parts

    def site(self, place: Place) -> Site:
        """A user or a home."""
        return self._sites[place]

    def rest(self, home: Place, path: int) -> int:
        """Elements of a home that go by pieces beside a collective."""
        return self.held[home] - min(path, self.held[home]) * (home in self.members)

    def _held(self, home: Place) -> int:
        """Elements at home on each device of a place."""
        site = self._sites[home]
        return self._piece(home, 1 if self._whole_leaves else site.lanes, site.tensor)

    def _piece_size(self, home: Place, lanes: int, tensor: int) -> int:
        """Elements of a home's boxes on each device of a place."""
        held = self._boxes[home]
        return sum(
            count * box_size(leaf, held[leaf.id], lanes=lanes, tensor=tensor)
            for leaf, count in self._leaves
            if leaf.id in held
        )

    def _divided_size(self, lanes: int, tensor: int) -> int:
        """Elements, of those on each tensor shard, that the lanes of a place divide."""
        if lanes == 1:
            return 0
        saved = sum(
            self._sites[home].copies
            * (self._piece(home, 1, tensor) - self._piece(home, lanes, tensor))
            for home in self.homes
        )
        return saved * lanes // (lanes - 1)

    def _grad_bytes(self, path: int, member: Place, home: Place) -> int:
        del member
        if path:
            return self.rest(home, path) * GRAD_BYTES
        site = self._sites[home]
        return self._piece(home, site.lanes, site.tensor) * GRAD_BYTES

    def _param_bytes(self, path: int, home: Place, user: Place) -> int:
        if path:
            return self.rest(home, path) * self.param_item_bytes
        site = self._sites[user]
        return self._piece(home, site.lanes, site.tensor) * self.param_item_bytes

    def _sent(self, place: Place, to: Sequence[Place], num_bytes: _Bytes) -> Load:
        source = self._grids[place]
        copies = [
            copy
            for other in to
            for grid, times in self._others(place, other)
            for copy in self._copies(source, grid, num_bytes(place, other), times)
        ]
        return load(copies, into=False, several=len(copies) > 1)

    def _got(self, place: Place, of: Sequence[Place], num_bytes: _Bytes) -> Load:
        target = self._grids[place]
        copies = [
            copy
            for other in of
            for grid, times in self._others(place, other)
            for copy in self._copies(grid, target, num_bytes(other, place), times)
        ]
        return load(copies, out=False, several=len(copies) > 1)

    def _others(self, place: Place, other: Place) -> Iterator[tuple[Grid, int]]:
        """Of what a site stands for, all but the place itself."""
        copies = self._sites[other].copies
        if other != place:
            yield self._grids[other], 1
        if copies > 1:
            yield self._twins[other], copies - 1

    def _copies(
        self, source: Grid, target: Grid, each: int, times: int
    ) -> list[tuple[Hops, float, int]]:
        """What ``load`` asks; ``each`` device of the target gets so many bytes."""
        pieces = self._ways.pieces(source, target)
        return [(hops, part * each, times) for part, hops in pieces]

    def _lanes(self, site: Site, sizes: Sequence[int], item: int) -> Call:
        """A ring over lanes: each sends all parts but its own, of every size."""
        assert site.link, "several lanes are several devices"
        lanes = site.lanes
        seconds = CALL_S + (lanes - 1) * sum(
            site.link.transfer_s(size * item // lanes) for size in sizes if size
        )
        hops = self._ways.ring(site.grid)
        sent = (lanes - 1) / lanes * sum(sizes) * item
        ways = load([(hops, sent, 1)])
        return Call(max(seconds, CALL_S + max(ways.holds_s, default=0.0)), ways)
