"""Plans made before they are needed: one for the loss of each single node.

    PlansAhead --clusters, by a pipe--> a process of low priority --plans--> PlansAhead

The search is pure Python and takes seconds: in a thread it would hold up the dispatch
of steps. The process imports no JAX, so it holds no device. It is started anew if it
dies; what it cannot plan for is planned for when it is needed, and fails there.
"""

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from hexijax.cluster import Cluster, ClusterError
from hexijax.layers.chain import Chain
from hexijax.plan import Plan
from hexijax.planner import InfeasiblePlanError, PlanOptions, make_plan

NICE = 15
"""Politeness of the process: training goes first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What every plan of a run is for."""

    chain: Chain
    """The model."""

    batch_size: int
    """Samples of a step."""

    dtype: str
    """Compute dtype."""

    options: PlanOptions
    """What else was asked for."""

    def plan(self, cluster: Cluster) -> Plan:
        """The search's plan for a cluster.

        Raises:
          InfeasiblePlanError: the model does not fit there.
        """
        return make_plan(
            self.chain,
            cluster,
            batch_size=self.batch_size,
            dtype=self.dtype,
            options=self.options,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan, and where it came from."""

    plan: Plan
    """For the cluster that was asked for."""

    seconds: float
    """That somebody waited for it."""

    ahead: bool
    """It had been asked for before it was needed."""


class PlansAhead:
    """Plans by cluster, made in the background."""

    def __init__(
        self,
        asked: Asked,
        *,
        background: bool = True,
        made: Callable[[Cluster, Plan], None] = lambda cluster, plan: None,
    ):
        """
        Args:
          asked: of every plan.
          background: make them; else each is made when it is needed.
          made: is told of each that was made ahead, in another thread.
        """
        self._asked, self._background, self._made = asked, background, made
        self._found: dict[str, Plan | None] = {}
        self._waiting: list[Cluster] = []
        self._now = ""
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def know(self, cluster: Cluster, plan: Plan) -> None:
        """A plan that was made elsewhere."""
        with self._changed:
            self._found[cluster.fingerprint()] = plan

    def prepare(self, clusters: Iterable[Cluster]) -> None:
        """These may be needed, the first soonest; others are no longer waited for."""
        if not self._background:
            return
        with self._changed:
            self._waiting = [
                c for c in clusters if c.fingerprint() not in (*self._found, self._now)
            ]
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def ready(self, cluster: Cluster) -> bool:
        """Whether ``get`` would give a plan at once, or nothing better is to come."""
        with self._changed:
            return not self._background or cluster.fingerprint() in self._found

    def get(self, cluster: Cluster) -> Planned:
        """The plan for a cluster: at once where it is known, else as soon as it is.

        Raises:
          InfeasiblePlanError: the model does not fit there.
        """
        began, key = time.perf_counter(), cluster.fingerprint()
        with self._changed:
            ahead = key in self._found or key == self._now
            while key == self._now:
                self._changed.wait()
            plan = self._found.get(key)
        if plan is None:  # or it was infeasible: the search says why
            plan, ahead = self._asked.plan(cluster), False
            self.know(cluster, plan)
        return Planned(plan=plan, seconds=time.perf_counter() - began, ahead=ahead)

    def wait(self) -> None:
        """Until all that was asked for is there; for tests."""
        with self._changed:
            while self._waiting or self._now:
                self._changed.wait()

    def close(self) -> None:
        """Ends the process."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        process = self._process
        if process is not None:
            process.kill()  # the thread may wait for its answer
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> "PlansAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    break
                cluster = self._waiting.pop(0)
                self._now = cluster.fingerprint()
            plan = self._ask(cluster)
            with self._changed:
                self._found[self._now] = plan
                self._now = ""
                self._changed.notify_all()
            if plan is not None:
                self._made(cluster, plan)
        self._end_process()

    def _ask(self, cluster: Cluster) -> Plan | None:
        try:
            if self._process is None or self._process.poll() is not None:
                self._end_process()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "hexijax.elastic.ahead"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
                self._send(self._asked)
            self._send(cluster)
            assert self._process.stdout is not None
            return pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            return None

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):  # what was not sent is lost
                    pipe.close()
            self._process.wait()

    def _send(self, thing: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        pickle.dump(thing, self._process.stdin)
        self._process.stdin.flush()


def losses(cluster: Cluster) -> list[Cluster]:
    """The cluster without each of its nodes; of nodes that are alike, each: plans name
    their devices."""
    found = []
    for node in cluster.nodes:
        with contextlib.suppress(ClusterError):  # the last one
            found.append(cluster.without(node.name))
    return found


def serve(read: Callable[[], Any], write: Callable[[Any], None]) -> None:
    """Answers clusters with plans, or None where there is none, until reading ends."""
    asked: Asked = read()
    while True:
        try:
            cluster = read()
        except EOFError:
            return
        try:
            write(asked.plan(cluster))
        except InfeasiblePlanError:
            write(None)


def _main() -> None:
    os.nice(NICE)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing but plans goes out

    def write(thing: Any) -> None:
        pickle.dump(thing, stdout)
        stdout.flush()

    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        serve(lambda: pickle.load(stdin), write)


if __name__ == "__main__":
    _main()
