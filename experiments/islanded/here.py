"""What a task of the islands' benchmark has of its surroundings."""

import dataclasses
from typing import Any

from hexijax.cluster import Cluster
from hexijax.islands.member import Member
from hexijax.islands.transfer import Server, TransferChannel, start_server
from hexijax.islands.world import World

LOOPBACK = "127.0.0.1:0"
LONG_S = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Here:
    """One process: an island, or the only one."""

    cluster: Cluster
    """All of it."""

    member: Member | None = None
    world: World | None = None
    server: Server | None = None

    def all(self, tag: str, value: Any = None) -> dict[str, Any]:
        """Every island's value, once all are here."""
        assert self.member is not None
        return self.member.gather(tag, value, LONG_S)

    def channel(self, **options: Any) -> TransferChannel | None:
        """To the other islands; None: there are none."""
        if self.world is None:
            return None
        assert self.server is not None
        assert self.member is not None
        return TransferChannel(self.server, self.world, self.member.lost, **options)


def island(cluster: Cluster, member: Member) -> Here:
    """Once all have joined."""
    server = start_server(LOOPBACK)
    welcome = member.welcome(-1, LONG_S)
    world = member.join(
        welcome, address=server.address, facts={}, seconds=LONG_S, pull_s=60.0
    )
    return Here(cluster=cluster, member=member, world=world, server=server)
