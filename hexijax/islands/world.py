"""What an island knows of the job it is part of: facts alone, no JAX.

    rendezvous -> World -> the engine of one island

A run keeps its name and key while it lives; a generation is the time between two
changes of who takes part.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from hexijax.errors import UserError, did_you_mean

ID_BITS = 63
"""Of an id of a transfer: what a signed integer holds."""


class IslandLost(UserError):
    """Another island did not answer in time, or the way to it broke."""

    def __init__(self, island: str, what: str, seconds: float, why: str = ""):
        """``what``: what was waited for; ``seconds``: how long, or what was given."""
        self.island, self.what, self.seconds = island, what, seconds
        self.late = not why
        """Whether it is only late: another may keep it."""
        late = f"did not come within {seconds:.1f} s"
        never = f"will not come, after {seconds:.1f} s: {why.rstrip('.')}"
        super().__init__(
            f"Island {island!r} is lost: {what} {never if why else late}. Its own log "
            "says what became of it; the job goes on from the last complete "
            "checkpoint, without it or once it is back."
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One island's view of the job, for one generation."""

    name: str
    """This island."""

    islands: tuple[str, ...]
    """All that take part, in the cluster's order."""

    run: str
    """What the whole run is called, for logs."""

    generation: int
    """How often the membership has changed."""

    key: bytes = dataclasses.field(repr=False)
    """Random, at least 16 bytes, known to the run's islands alone: ids of transfers
    follow from it."""

    peers: Mapping[str, str]
    """Where each other island's transfer server listens: island -> ``host:port``."""

    pull_s: float = 60.0
    """How long anything from another island may take to come."""

    def __post_init__(self) -> None:
        if self.name not in self.islands:
            raise UserError(
                f"Island {self.name!r} is none of this run's: it has "
                f"{', '.join(self.islands)}.{did_you_mean(self.name, self.islands)} "
                "Islands are called as in the cluster file (a node's `island`, or the "
                "node itself)."
            )
        missing = set(self.islands) - set(self.peers) - {self.name}
        if missing:
            raise UserError(
                f"Island {self.name!r} was told no transfer address of "
                f"{', '.join(sorted(missing))}: each island tells its own when it "
                "joins. Start all of them with the same version of hexijax."
            )
        if len(self.key) < 16:
            raise UserError(
                f"The run's key has {len(self.key)} bytes and needs at least 16: ids "
                "of transfers follow from it and are to be guessed by nobody."
            )
        if self.pull_s <= 0:
            raise UserError(
                f"Waiting for another island was given {self.pull_s} s; it takes more "
                "than 0. A minute is usual."
            )

    @property
    def session(self) -> str:
        """Of these islands in this generation, and of no other launch: for saves."""
        return hashlib.blake2b(b"session", key=self.key[:64], digest_size=8).hexdigest()

    def transfer_id(self, *parts: str | int) -> int:
        """A transfer's number, the same on both sides and nobody else's."""
        text = "\x1f".join(map(str, (self.run, self.generation, *parts)))
        digest = hashlib.blake2b(text.encode(), key=self.key[:64], digest_size=8)
        return int.from_bytes(digest.digest(), "big") >> (64 - ID_BITS)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """What an island is told when it comes, and when a generation begins."""

    run: str
    """What the run is called."""

    generation: int
    """How often who takes part has changed."""

    islands: tuple[str, ...]
    """All that take part."""

    brief: Mapping[str, Any]
    """What is to be done: the launcher's words."""
