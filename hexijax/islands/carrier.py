"""Takes arrays from device to device of a plan whose places lie on several islands.

    pieces -> those that stay here | one message to each island | one from each island

All islands carry the same pieces in the same order, each a part of them, so both ends
of a message know its number and what is in it; nothing is told but the arrays.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import SingleDeviceSharding

from hexijax.islands.world import World
from hexijax.runtime.carrying import Coming, Piece, settled, spot


class Pull(Protocol):
    """A message on its way here."""

    def wait(self) -> Sequence[jax.Array]:
        """Its arrays, once all have come.

        Raises:
          IslandLost: they did not, in time.
        """
        ...


class Channel(Protocol):
    """Messages of arrays, each on one device, between islands."""

    def offer(self, peer: str, number: int, arrays: Sequence[jax.Array]) -> None:
        """Leaves a message for an island to fetch; does not wait."""
        ...

    def pull(
        self, peer: str, number: int, like: Sequence[jax.ShapeDtypeStruct], what: str
    ) -> Pull:
        """Begins to fetch a message; ``what`` it is, for people."""
        ...


@dataclasses.dataclass(frozen=True)
class IslandCarrier:
    """The ``Carrier`` of one engine of one island."""

    world: World
    channel: Channel
    islands: Mapping[jax.Device, str]
    """Whose each device is; of other islands they are ghosts."""
    engine: int = 0
    """How many engines of this world came before: a number that all islands give it."""

    @property
    def readers(self) -> list[jax.Device]:
        """The first device of each island."""
        first: dict[str, jax.Device] = {}
        for device, island in self.islands.items():
            first.setdefault(island, device)
        return [first[island] for island in self.world.islands if island in first]

    def here(self, device: jax.Device) -> bool:
        """Whether it is this island's, or no place's: its host's own processor."""
        return self.islands.get(device, self.world.name) == self.world.name

    def island(self, device: jax.Device) -> str:
        """Whose it is."""
        return self.islands[device]

    def carry(self, pieces: Sequence[Piece]) -> list[Any]:
        """Each piece at its target, if that is here."""
        at, me = spot(), self.world.name
        turn = at.next() if at else ()
        stay: list[int] = []
        go: dict[str, dict[Hashable, Piece]] = {}
        come: dict[str, dict[Hashable, list[int]]] = {}
        for i, piece in enumerate(pieces):
            source, target = self.islands[piece.source], self.islands[piece.target]
            if source == target == me:
                stay.append(i)
            elif source == me:
                go.setdefault(target, {}).setdefault(piece.what, piece)
            elif target == me:
                come.setdefault(source, {}).setdefault(piece.what, []).append(i)
        assert at is not None or not (go or come), "nobody else knows of this"
        for island, sent in go.items():
            number = self.world.transfer_id(self.engine, *turn, me, island)
            self.channel.offer(island, number, [p.data() for p in sent.values()])
        result: list[Any] = [None] * len(pieces)
        if stay:
            targets = [pieces[i].target for i in stay]
            copies = jax.device_put([pieces[i].data() for i in stay], targets)
            for i, copy in zip(stay, copies, strict=True):
                result[i] = copy
        for island, wanted in come.items():
            number = self.world.transfer_id(self.engine, *turn, island, me)
            self._come(pieces, island, number, list(wanted.values()), str(at), result)
        return result

    def _come(
        self,
        pieces: Sequence[Piece],
        island: str,
        number: int,
        wanted: Sequence[Sequence[int]],
        what: str,
        result: list[Any],
    ) -> None:
        """Fetches one message: of equal pieces one, which is then copied here."""
        like = [_struct(pieces[which[0]]) for which in wanted]
        pull = self.channel.pull(island, number, like, what)
        for k, which in enumerate(wanted):
            first = Coming(lambda k=k: pull.wait()[k])
            result[which[0]] = first
            for i in which[1:]:
                target = pieces[i].target
                result[i] = Coming(
                    lambda first=first, target=target: jax.device_put(
                        first.value(), target
                    )
                )

    def settle(self, tree: Any) -> Any:
        """A tree whose arrays have all come.

        Raises:
          IslandLost: some did not, in time.
        """
        return settled(tree)


def _struct(piece: Piece) -> jax.ShapeDtypeStruct:
    where = SingleDeviceSharding(piece.target)
    return jax.ShapeDtypeStruct(piece.shape, piece.dtype, sharding=where)
