"""What a run's Saver has kept, for a recovery.

Saver -> inventory -> Kept, newest step first
"""

from collections.abc import Iterator

from hexijax.checkpoint.saver import Saver
from hexijax.checkpoint.sources import DISK
from hexijax.elastic.recovery import Kept


class Saved:
    """A ``Store``: the tiers and neighbours of a saver."""

    def __init__(self, saver: Saver, *, disks_go: bool = False):
        """
        Args:
          saver: of the run.
          disks_go: a lost node takes what it had stored along. In one process the disk
            is the process's own, and stays.
        """
        self._saver, self._disks_go = saver, disks_go
        self._gone: dict[str, int] = {}
        """Of a node that was lost: the newest step that it took along."""

    def forget(self, node: str) -> None:
        """A node is lost: what it kept for others, perhaps its disk, and what was being
        copied from it."""
        self._saver.abandon()
        self._saver.neighbours.forget(node)
        if self._disks_go:
            steps = [part.step for part in self._saver.inventory().parts]
            self._gone[node] = max(steps, default=-1)

    def kept(self) -> Iterator[Kept]:
        """See ``Store``."""
        there = self._saver.inventory()
        steps = {part.step for part in there.parts}
        steps |= {copy.manifest.stand.step for copy in there.copies}
        for step in sorted(steps, reverse=True):
            yield Kept(
                step=step,
                data_state=there.manifests(step)[0].stand.data_state,
                sources=[
                    source
                    for source in there.sources(step)
                    if source.label != DISK or step > self._gone.get(source.node, -1)
                ],
            )
