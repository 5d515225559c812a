"""Uneven slices by one collective over a bucket's users, or by pieces: which is faster.

    Exchange -> Collective -> gather_path, reduce_path; and what the chosen one costs

Pieces take the ways of their devices, and each a little time of its own; those of one
bucket travel while another's are joined. A collective is a program of all users, and
all send as much as the one that has most. So it may take a part of each home's boxes
only, and leave the rest to pieces: of n homes there are n such parts worth a look, from
what the smallest has, which needs no padding, to what the largest has.
"""

import functools
from collections.abc import Callable, Iterable

from hexijax.cluster import LinkProfile
from hexijax.costs.exchange import Call, Exchange
from hexijax.costs.rates import CALL_S, COLLECTIVE_SHARE, PIECE_S
from hexijax.costs.sums import GRAD_BYTES
from hexijax.costs.ways import Hops, Load, load
from hexijax.plan.plan import Place
from hexijax.program.program import PIECES


class Collective:
    """Of one bucket, whose users are each one device, all of one kind and client."""

    def __init__(self, exchange: Exchange, link: LinkProfile, hops: Hops) -> None:
        """``link``: the slowest between the users; ``hops``: from each to the next."""
        self._exchange, self._link, self._hops = exchange, link, hops
        self._held = dict.fromkeys(exchange.members, 0) | exchange.held
        self.gather_path = functools.cache(self._gather_path)
        self.reduce_path = functools.cache(self._reduce_path)

    def _gather_path(self, *, alone: bool) -> int:
        """Elements of new parameters that go by a collective.

        ``alone``: no other bucket's joins run beside these copies.
        """
        exchange, item = self._exchange, self._exchange.param_item_bytes
        pack_s = max(self.pack(home).seconds for home in exchange.homes)

        def seconds(path: int) -> float:
            loads = [exchange.spread_out(home, path) for home in exchange.homes]
            loads += [exchange.spread_in(user, path) for user in exchange.members]
            joins = [exchange.join(user, path) for user in exchange.members]
            join_s = max(join.seconds if join else 0.0 for join in joins)
            if not alone:
                held_s = max(s for load in loads for s in (*load.holds_s, 0.0))
                if not path:
                    return max(held_s, join_s)
                return held_s + pack_s + self.ring(path, item).seconds + join_s
            copies_s = self._copies_s(path, loads)
            ring_s = pack_s + self.ring(path, item).seconds if path else 0.0
            return copies_s + ring_s + join_s

        return self._cheapest(item, seconds)

    def _reduce_path(self) -> int:
        """The same of gradients, of the last bucket of a step."""
        exchange = self._exchange

        def seconds(path: int) -> float:
            loads = [exchange.leave(member, path) for member in exchange.members]
            loads += [exchange.arrive(home, path) for home in exchange.homes]
            copies_s = self._copies_s(path, loads)
            adding_s = max(exchange.add(home, path).seconds for home in exchange.homes)
            ring_s = self.ring(path, GRAD_BYTES).seconds if path else 0.0
            return copies_s + ring_s + adding_s

        return self._cheapest(GRAD_BYTES, seconds)

    def pack(self, home: Place) -> Call:
        """A home's boxes as one vector: they are read and written."""
        exchange = self._exchange
        moved = 2 * exchange.held[home] * exchange.param_item_bytes
        return Call(CALL_S + moved / exchange.site(home).memory_bytes_per_s)

    def ring(self, path: int, item_bytes: int) -> Call:
        """All users send every part but their own to the next."""
        link, steps = self._link, self._exchange.num_members - 1
        carried_s = link.transfer_s(path * item_bytes) - link.latency_s
        seconds = CALL_S + steps * (link.latency_s + carried_s / COLLECTIVE_SHARE)
        ways = load([(self._hops, steps * path * item_bytes, 1)])
        return Call(max(seconds, CALL_S + max(ways.holds_s, default=0.0)), ways)

    def _cheapest(self, item_bytes: int, seconds: Callable[[int], float]) -> int:
        """Of equals the smallest path, which pads least."""
        parts = {self._held[member] for member in self._exchange.members}
        paths = [p for p in sorted(parts - {PIECES}) if self._fits(p, item_bytes)]
        return min([PIECES, *paths], key=seconds)

    def _copies_s(self, path: int, loads: Iterable[Load]) -> float:
        """Until all pieces have left one device, or come to it."""
        exchange = self._exchange
        pieces = any(exchange.rest(home, path) for home in exchange.homes)
        begun_s = PIECE_S * pieces * (exchange.num_members - 1)
        return begun_s + max(load.seconds for load in loads)

    def _fits(self, path: int, item_bytes: int) -> bool:
        """Whether it takes no more than the plan's memory counts for a bucket on its
        way: all of it as it is computed with, and all of it in fp32."""
        exchange = self._exchange
        rest = sum(exchange.rest(home, path) for home in exchange.homes)
        packed = (exchange.num_members + 1) * path + rest
        room = exchange.size * (GRAD_BYTES + exchange.param_item_bytes)
        return packed * item_bytes <= room
