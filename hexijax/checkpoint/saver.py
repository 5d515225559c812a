"""Saves a run as it goes: a snapshot, then threads that write it, send it, keep it.

    take(step) -> Taken: copies beside the next forward and backward
    write(taken, metrics) -> fast tier -> retention -> far tier, each in its own thread

Training waits for a save in one case only: the one before is still being written. What
a tier cannot take is told and counted, and the run goes on; the older steps are there.
"""

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hexijax.checkpoint.slices import Key, Stateful, Tensor
from hexijax.checkpoint.snapshot import Snapshot, take
from hexijax.checkpoint.sources import DISK, FAR, OWN, Held
from hexijax.checkpoint.tiers import Copy, Inventory, Neighbours, Tiers, inventory
from hexijax.checkpoint.writer import (
    clear_leftovers,
    copy_part,
    remove_part,
    write_part,
)
from hexijax.errors import UserError
from hexijax.weights.errors import Damaged
from hexijax.weights.memory import give_back_freed
from hexijax.weights.stored.files import Files
from hexijax.weights.stored.manifest import Manifest, Param, Stand
from hexijax.weights.stored.parts import Part, parts_in, whole_steps

if TYPE_CHECKING:
    import jax

LOCAL = "local"
"""The node of devices of which nothing else is said."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A step's snapshot on its way."""

    stand: Stand
    """Where the run stands."""

    snapshot: Snapshot
    """Its state."""

    tensors: Mapping[Key, Tensor]
    """All arrays of the state."""

    params: tuple[Param, ...]
    """All parameters."""

    asked: bool
    """Goes to every tier, due or not."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """What became of a step in a tier."""

    step: int
    """Optimizer steps done."""

    tier: str
    """``disk``, ``far`` or ``peer``."""

    num_bytes: int
    """Written; 0: nothing, see ``error``."""

    seconds: float
    """It took, beside training."""

    error: str = ""
    """Why not; empty: it is there."""


class Saver:
    """See above.

    Args:
      engine: whose state is saved; it may be set anew when a plan changes.
      tiers: where to, and when.
      node_of: node of each device; None: all are one node's.
      facts: of the run, for whoever resumes.
      plan: as text.
      tell: is told of what went wrong.
      verify: every chunk is read back and compared.
      alone: no other process saves its parts in the same places; else each sends and
        removes its own.
      remember: what was written last stays in the host's memory, too (``remembered``).
    """

    def __init__(
        self,
        engine: Stateful,
        tiers: Tiers,
        *,
        node_of: "Mapping[jax.Device, str] | None" = None,
        facts: Mapping[str, Any] | None = None,
        plan: str = "",
        tell: Callable[[str], None] = lambda text: None,
        verify: bool = False,
        alone: bool = True,
        remember: bool = False,
    ):
        self.alone, self.remember = alone, remember
        self.remembered: tuple[Copy, ...] = ()
        """The last step that this process has written, as it was copied for that."""
        self.engine, self.tiers, self.facts, self.plan = engine, tiers, facts, plan
        self.node_of, self.tell, self.verify = node_of, tell, verify
        self.neighbours = Neighbours()
        self.saves: list[Save] = []
        """What was done, in the order in which it ended."""
        self.waited_s = 0.0
        """That training waited for earlier saves."""
        self._fast = _Worker("save")
        self._near = _Worker("neighbour")
        self._far = _Worker("send")
        self._sending: set[int] = set()
        self._lock, self._cleared = threading.Lock(), False

    def due(self, step: int) -> bool:
        """Whether ``step`` steps done are to be saved."""
        return self.tiers.due(step)

    def take(self, step: int, data_state: Any = None, *, asked: bool = False) -> Taken:
        """Copies the state after ``step`` steps; call before the next is dispatched.

        Waits until the last snapshot has been written.

        Args:
          step: optimizer steps done.
          data_state: position of the data, JSON-able.
          asked: save whether it is due or not, in every tier.
        """
        began = time.monotonic()
        self._fast.wait()
        self._near.wait()
        self.waited_s += time.monotonic() - began
        node_of = self.node_of
        if node_of is None:
            import jax

            node_of = dict.fromkeys([*jax.devices(), *_hosts()], LOCAL)
        return Taken(
            stand=Stand(
                step=step,
                data_state=data_state,
                facts=dict(self.facts or {}),
                plan=self.plan,
            ),
            snapshot=take(self.engine, node_of),
            tensors=self.engine.tensors(),
            params=tuple(self.engine.stored_params()),
            asked=asked,
        )

    def write(self, taken: Taken, metrics: Mapping[str, Any] | None = None) -> None:
        """Has a snapshot written; returns at once."""
        stand = dataclasses.replace(taken.stand, metrics=dict(metrics or {}))
        taken = dataclasses.replace(taken, stand=stand)
        every = self.tiers.neighbour_every
        if every and (taken.asked or stand.step % every == 0):
            self._near.begin(lambda: self._keep(taken))
        if taken.asked or self.tiers.stores(stand.step):
            self._fast.begin(lambda: self._store(taken))

    def save(self, step: int, data_state: Any = None) -> None:
        """All at once, for whoever has no loop: returns when it is written.

        Raises:
          UserError: it could not be.
        """
        self.write(self.take(step, data_state, asked=True))
        self.close(step)

    def close(self, step: int | None = None) -> None:
        """Waits for everything that is under way.

        Raises:
          UserError: ``step``, the last one, is not in the fast tier.
        """
        for worker in (self._fast, self._near, self._far):
            worker.wait()
        failed = [s for s in self.saves if s.step == step and s.tier == DISK]
        if failed and failed[-1].error:
            raise UserError(failed[-1].error)

    def abandon(self) -> None:
        """A node is lost: waits for what is under way, however it ends. What was being
        copied from that node fails, and was no save."""
        for worker in (self._fast, self._near, self._far):
            try:
                worker.wait()
            except RuntimeError as error:  # as JAX's errors of devices are
                self.tell(f"a save was cut short ({error})")

    def inventory(self) -> Inventory:
        """What is there now."""
        return inventory(self.tiers, self.neighbours, self.tell)

    # In their threads.

    def _store(self, taken: Taken) -> None:
        step, began = taken.stand.step, time.monotonic()
        nodes, files = taken.snapshot.nodes, self.tiers.fast
        try:
            if not self._cleared:
                clear_leftovers(files, nodes)
                self._cleared = True
            written = [self._write(taken, node, files) for node in nodes]
        except (OSError, Damaged) as error:
            for node in nodes:
                files.delete(f"{step}/{node}")
            self._failed(step, DISK, began, error, files)
            return
        if self.remember:
            self.remembered = tuple(_copy(taken, known) for known in written)
        self._done(step, DISK, sum(known.num_bytes for known in written), began)
        sends = taken.asked or self.tiers.sends(step)
        if self.tiers.far is not None and sends:
            self._begin_sending(step, wait=taken.asked)
        self._retain(files, DISK, self.tiers.keep)

    def _write(self, taken: Taken, node: str, files: Files) -> Manifest:
        return write_part(
            files,
            taken.snapshot.arrays(node),
            writer=node,
            stand=taken.stand,
            tensors=taken.tensors,
            params=taken.params,
            verify=self.verify,
        )

    def _keep(self, taken: Taken) -> None:
        began, total, nodes = time.monotonic(), 0, taken.snapshot.nodes
        for at, node in enumerate(nodes):
            known = Manifest(
                stand=taken.stand,
                writer=node,
                arrays={},
                tensors=taken.tensors,
                params=taken.params,
            )
            held = taken.snapshot.arrays(node)
            self.neighbours.keep(known, held, nodes[(at + 1) % len(nodes)])
            total += sum(x.nbytes for x in held.values())
        self._done(taken.stand.step, "peer", total, began)

    def _begin_sending(self, step: int, *, wait: bool) -> None:
        if wait:
            self._far.wait()
        if not self._far.idle:
            self.tell(
                f"step {step} is not sent to the far tier: an earlier one is still on "
                "its way. Send fewer (--far-every), or faster (--far-rate)."
            )
            return
        with self._lock:
            self._sending.add(step)
        self._far.begin(lambda: self._send(step))

    def _send(self, step: int) -> None:
        began, far = time.monotonic(), self.tiers.far
        assert far is not None
        try:
            stored = parts_in(self.tiers.fast, DISK)
            parts = [p for p in stored if p.step == step and self._own(p)]
            for part in parts:
                copy_part(part, far, self.tiers.far_rate)
            total = sum(part.manifest.num_bytes for part in parts)
            self._done(step, FAR, total, began)
            self._retain(far, FAR, self.tiers.far_keep)
        except (OSError, Damaged) as error:
            self._failed(step, FAR, began, error, far)
        finally:
            with self._lock:
                self._sending.discard(step)
        # It may have been an old one, kept for as long as it was on its way.
        self._retain(self.tiers.fast, DISK, self.tiers.keep)

    def _own(self, part: Part) -> bool:
        """Whether this process sends and removes a part."""
        return self.alone or part.manifest.writer in (self.node_of or {}).values()

    def _retain(self, files: Files, tier: str, keep: int) -> None:
        """Removes steps older than the newest ``keep`` whole ones."""
        try:
            parts = parts_in(files, tier)
            whole = list(whole_steps(parts))[:keep]
            with self._lock:
                busy = set(self._sending) if tier == DISK else set[int]()
            for part in parts:
                old = len(whole) == keep and part.step < whole[-1]
                if old and part.step not in busy and self._own(part):
                    remove_part(part)
        except FileNotFoundError:
            pass  # another island removes them just now
        except OSError as error:
            self.tell(f"old steps in {files.where} cannot be removed ({error}).")

    def _done(self, step: int, tier: str, num_bytes: int, began: float) -> None:
        seconds = time.monotonic() - began
        self.saves.append(
            Save(step=step, tier=tier, num_bytes=num_bytes, seconds=seconds)
        )

    def _failed(
        self, step: int, tier: str, began: float, error: Exception, files: Files
    ) -> None:
        what = str(error).rstrip(".")
        text = (
            f"Step {step} was not saved in {files.where}: {what}. Older steps are "
            "untouched. Make room there, keep fewer steps (--keep), or name another "
            f"place ({'--far' if tier == FAR else '--fast'} PATH)."
        )
        seconds = time.monotonic() - began
        self.saves.append(
            Save(step=step, tier=tier, num_bytes=0, seconds=seconds, error=text)
        )
        self.tell(text)


def _copy(taken: Taken, known: Manifest) -> Copy:
    """What was written of a node, where it was copied to for that."""
    held = taken.snapshot.arrays(known.writer)
    source = Held(arrays=held, label=OWN, node=known.writer)
    return Copy(manifest=known, source=source)


class _Worker:
    """A thread that does one thing at a time."""

    def __init__(self, name: str):
        self._pool = concurrent.futures.ThreadPoolExecutor(1, name)
        self._last: list[concurrent.futures.Future[None]] = []

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return all(each.done() for each in self._last)

    def begin(self, work: Callable[[], None]) -> None:
        """After what it was given before."""
        # A snapshot is freed when the work that held it is gone, after its last line.
        self._last = [self._pool.submit(work), self._pool.submit(give_back_freed)]

    def wait(self) -> None:
        """Until it has nothing to do; raises what the last work raised."""
        last = self._last
        concurrent.futures.wait(last)
        self._last = list[concurrent.futures.Future[None]]()
        for each in last:
            each.result()


def _hosts() -> "list[jax.Device]":
    """The host's own processors, where a plan may rest state."""
    import jax

    try:
        return jax.devices("cpu")
    except RuntimeError:
        return []
