"""Programs of plans that were made ahead, compiled before they are needed.

    PlansAhead --(cluster, plan)--> Rehearsals, by a pipe --> a process of low priority:
    the experiment's file anew -> machine -> one step -> JAX's cache on disk

Most programs of a step are compiled when it first runs, so the process runs one, on
forced CPU devices of its own. It needs as much memory again as the state, and leaves a
plan out where that is not there. On GPUs there is no room beside the run, and two
processes cannot share one: nothing is compiled ahead there.
"""

import collections
import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hexijax.cluster import Cluster
from hexijax.elastic.ahead import NICE
from hexijax.plan import Plan

AFTER_S = 30.0
"""From a run's begin: a short one needs its cores."""

ROOM = 3
"""Times the state, of memory that must be there: state, gradients, what is read."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What every rehearsal of a run is of."""

    experiment: Path
    """Its file."""

    settings: Mapping[str, Any]
    """What ``--set`` said."""

    cluster: Cluster
    """Every node that may take part."""

    emulate: bool
    """Forced CPU devices stand for others."""


class Rehearsals:
    """Compiles what it is given, one plan after another, beside the run.

    Args:
      asked: of the run.
      say: takes lines for people.
      after_s: before the first.
    """

    def __init__(
        self, asked: Asked, say: Callable[[str], None], *, after_s: float = AFTER_S
    ):
        self._asked, self._say = asked, say
        self._after_s = after_s
        self._seen: set[str] = set()
        self._waiting: collections.deque[tuple[Cluster, Plan]] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def rehearse(self, cluster: Cluster, plan: Plan) -> None:
        """A plan that may be needed; the first one given is compiled first."""
        with self._changed:
            if self._closed or cluster.fingerprint() in self._seen:
                return
            self._seen.add(cluster.fingerprint())
            self._waiting.append((cluster, plan))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._process is not None:
                self._process.kill()  # the thread may wait for its answer
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, self._after_s)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._waiting)
                    if self._closed:
                        break
                    cluster, plan = self._waiting.popleft()
                    process = self._process = self._process or self._start()
                began = time.perf_counter()
                if _asked(process, (cluster, plan)):
                    names = {node.name for node in cluster.nodes}
                    gone = [
                        node.name
                        for node in self._asked.cluster.nodes
                        if node.name not in names
                    ]
                    self._say(
                        f"compiled ahead in {time.perf_counter() - began:.0f} s: the "
                        f"plan without {', '.join(gone)}"
                    )
        except (OSError, EOFError, pickle.PickleError) as error:
            if not self._closed:
                self._say(
                    "plans are not compiled ahead any more: the process that does it "
                    f"died ({error or type(error).__name__}). A plan is compiled when "
                    "it is needed."
                )
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-m", "hexijax.cli.rehearsal"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        _send(process.stdin, self._asked)
        return process


def can_rehearse(cluster: Cluster, *, emulate: bool) -> bool:
    """Whether a cluster's programs can be compiled by another process."""
    return emulate or cluster.on_cpu


def _asked(process: "subprocess.Popen[bytes]", what: Any) -> bool:
    _send(process.stdin, what)
    assert process.stdout is not None
    return bool(pickle.load(process.stdout))


def _send(pipe: Any, thing: Any) -> None:
    pickle.dump(thing, pipe)
    pipe.flush()


def serve(read: Callable[[], Any], write: Callable[[bool], None]) -> None:
    """Rehearses (cluster, plan) after (cluster, plan), and says of each whether there
    was room to, until reading ends."""
    from hexijax.cli.fields import read_source
    from hexijax.cli.loading import load_experiment
    from hexijax.job.intake import trace_chain
    from hexijax.job.machine import make_machine
    from hexijax.runtime.devices import assign

    asked: Asked = read()
    experiment = load_experiment(read_source(asked.experiment), asked.settings)
    chain = trace_chain(experiment)
    devices = assign(asked.cluster, emulate=asked.emulate)
    batch = next(experiment.data.batches(experiment.batch_size))
    while True:
        try:
            cluster, plan = read()
        except EOFError:
            return
        machine = make_machine(
            experiment,
            cluster,
            chain,
            plan,
            emulate=asked.emulate,
            devices={d.name: devices[d.name] for d in cluster.devices},
        )
        state_bytes = sum(t.num_bytes for t in machine.engine.tensors().values())
        room = available_bytes() >= ROOM * state_bytes
        if room:
            machine.engine.init()
            machine.engine.step(batch, 0).fetch()
        del machine
        write(room)


def available_bytes() -> int:
    """Of host memory, that could be had without harm to others."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    found = {key: rest for key, _, rest in (line.partition(":") for line in lines)}
    return int(found["MemAvailable"].split()[0]) * 1024


def _main() -> None:
    os.nice(NICE)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing but answers goes out
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        serve(lambda: pickle.load(stdin), lambda room: _send(stdout, room))


if __name__ == "__main__":
    # Its classes are those of the module's name, which the other process pickles.
    from hexijax.cli import rehearsal

    rehearsal._main()
