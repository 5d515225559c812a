"""Islands of one process: each a thread with an engine, messages handed over in memory.

What an island must not touch is there all the same: its ghosts are other islands' own
devices. So whatever it puts on one is seen.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from hexijax.cluster import Cluster
from hexijax.islands.carrier import IslandCarrier
from hexijax.islands.world import IslandLost, World


class Post:
    """Messages of all islands by number."""

    def __init__(self) -> None:
        self.left: dict[int, list[jax.Array]] = {}
        self.came = threading.Condition()
        self.numbers: set[int] = set()


class NearChannel:
    """One island's end of it."""

    def __init__(self, post: Post, seconds: float = 60.0):
        self.post, self.seconds = post, seconds
        self.offered_bytes = 0

    def offer(self, peer: str, number: int, arrays: Sequence[jax.Array]) -> None:
        with self.post.came:
            assert number not in self.post.numbers, "a number was used twice"
            self.post.numbers.add(number)
            self.post.left[number] = list(arrays)
            self.offered_bytes += sum(x.nbytes for x in arrays)
            self.post.came.notify_all()

    def pull(
        self, peer: str, number: int, like: Sequence[jax.ShapeDtypeStruct], what: str
    ) -> "NearPull":
        return NearPull(self, peer, number, like, what)


class NearPull:
    """A message that is fetched when it is waited for."""

    def __init__(self, channel: NearChannel, peer: str, number: int, like: Any, what):
        self.channel, self.peer, self.number = channel, peer, number
        self.like, self.what = like, what
        self.found: list[jax.Array] | None = None

    def wait(self) -> list[jax.Array]:
        if self.found is not None:
            return self.found
        post, seconds = self.channel.post, self.channel.seconds
        with post.came:
            if not post.came.wait_for(lambda: self.number in post.left, seconds):
                raise IslandLost(self.peer, self.what, seconds)
            arrays = post.left.pop(self.number)
        shapes = [(x.shape, x.dtype) for x in arrays]
        assert shapes == [(x.shape, x.dtype) for x in self.like], self.what
        targets = [next(iter(x.sharding.device_set)) for x in self.like]
        self.found = jax.device_put(arrays, targets)
        return self.found


def carriers(
    cluster: Cluster, devices: Mapping[str, jax.Device], seconds: float = 60.0
) -> dict[str, IslandCarrier]:
    """One for each island of the cluster, all joined."""
    names = tuple(cluster.islands)
    of = {devices[d]: i for i, each in cluster.islands.items() for d in each}
    post = Post()
    return {
        name: IslandCarrier(
            World(
                name=name,
                islands=names,
                run="nearby",
                generation=0,
                key=b"0123456789abcdef",
                peers=dict.fromkeys(names, ""),
            ),
            NearChannel(post, seconds),
            of,
        )
        for name in names
    }


def all_at_once(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each returns, run side by side; the first error is raised."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(i: int, job: Callable[[], Any]) -> None:
        try:
            results[i] = job()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(i, job), daemon=True)
        for i, job in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
