"""A run whose machines come and go: plan again, move the state, go on.

    Loop --pause--> what happened, is it worth it --> plan (ahead) -> read what goes
      -> compile -> recover -> the data put back -> Loop

Survivors continue in this process. A lost node's devices are never touched again; what
they held comes from a save, so that a run may go back some steps. A node that joins,
leaves with notice or has become slow costs no step: all state is read where it lies.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hexijax.checkpoint.assign import load_solver
from hexijax.cluster import Cluster
from hexijax.elastic import (
    Event,
    Members,
    PlansAhead,
    Replans,
    Roll,
    Stragglers,
    What,
    losses,
    lost,
)
from hexijax.elastic.change import Change
from hexijax.elastic.probe import silent
from hexijax.elastic.recovery import Kept, Recovered, Store, between, held, recover
from hexijax.elastic.timing import expected_s, measured_step, nodes_of
from hexijax.experiment import Batch, BatchIterator, Experiment
from hexijax.job.current import Current
from hexijax.job.loop import Loop, Result
from hexijax.job.machine import Machine, Progress, make_machine
from hexijax.layers.chain import Chain
from hexijax.plan import Plan
from hexijax.planner import InfeasiblePlanError

if TYPE_CHECKING:
    import jax


FIRST_COST_S = 30.0
"""What moving over is taken to cost before it has been done."""

MEASURE_EVERY = 50
"""Steps between two whose stages are timed: a timed step overlaps nothing."""


class LostError(Exception):
    """A step's numbers lie on a device that is lost."""


class Elastic:
    """An engine that is replaced as its members change."""

    def __init__(
        self,
        *,
        experiment: Experiment,
        chain: Chain,
        members: Members,
        ahead: PlansAhead,
        devices: "Mapping[str, jax.Device]",
        stores: Iterable[Store] = (),
        replans: Replans | None = None,
        roll: Roll | None = None,
        emulate: bool = False,
        say: Callable[[str], None] = print,
        progress: Progress | None = None,
        measure_every: int = MEASURE_EVERY,
    ):
        """
        Args:
          experiment: what is trained.
          chain: its model.
          members: who takes part.
          ahead: makes plans; closed by the caller.
          devices: JAX's, by name, of all nodes that may ever take part.
          stores: where steps are kept.
          replans: how often it may plan again.
          roll: is looked at between steps.
          emulate: let any device stand for any other.
          say: takes lines for people.
          progress: told (what, done, total) while compiling.
          measure_every: steps between two whose stages are timed; 0: none are.
        """
        self._experiment, self._chain = experiment, chain
        self.members, self._ahead = members, ahead
        self.devices, self._replans = dict(devices), replans or Replans()
        self.stores: Iterable[Store] = tuple(stores)
        self.roll = roll
        self._emulate, self._say, self._progress = emulate, say, progress
        self._measure_every = measure_every
        self._node_of = {x: name.rpartition("/")[0] for name, x in devices.items()}
        self._watch = Stragglers(members)
        self._cost_s = FIRST_COST_S
        self._pending: tuple[Event, ...] = ()
        self.changes: list[Change] = []
        """Re-plans so far."""
        self.steps = experiment.steps
        """Of the run: what a change gains counts until their end."""
        self.engine = Current(self)
        """That of now."""
        self.done = 0
        """Steps done when the run ended."""
        self.machine: Machine
        self.plan: Plan
        self.cluster: Cluster
        self._expected_s: Mapping[str, float] = {}

    def begin(self, plan: Plan | None = None) -> Machine:
        """The first machine, for the members of now; its engine has no state yet.

        Args:
          plan: for it; None: the search's.
        """
        load_solver()
        self.members.take()
        cluster = self.members.cluster()
        if plan is not None:
            self._ahead.know(cluster, plan)
        self._take(cluster, self._ahead.get(cluster).plan)
        self._prepare()
        return self.machine

    def run(
        self,
        make_loop: Callable[["Elastic"], Loop],
        batches: BatchIterator,
        back: Callable[[int], None],
        start: int = 0,
    ) -> bool:
        """Trains to the end, through all changes; False: it was asked to stop.

        Args:
          make_loop: a loop over ``batches`` on ``machine``; called after each change.
          batches: that can be put back.
          back: told that steps from one on are done again.
          start: steps done.
        """
        while True:
            loop = make_loop(self)
            loop.engine, loop.pause = self.engine, self._pause
            loop.save = loop.save and self._guarded(loop.save)
            whole = True
            try:
                finished = loop.run(start)
                self.done = loop.done
                if not loop.paused:
                    return finished
            except LostError:
                whole = False  # of the step at hand nobody knows how far it came
            except RuntimeError:  # of JAX, perhaps
                if not self._explained():
                    raise
                whole = False
            start = self._change(loop.done, batches, whole=whole)
            back(start)

    # Deciding.

    def _pause(self, done: int) -> bool:
        """Whether the run must, or should, plan again now."""
        if self.roll is not None:
            self.roll.look()
        if not self._pending and not self.members.changed.is_set():
            return False
        events = self.members.take()
        self._pending = (*self._pending, *events)
        self._forget(events)
        if self._forced():
            return True
        if any(event.what is not What.LOST for event in self._pending):
            cluster = self.members.cluster()
            if not self._ahead.ready(cluster):
                if events:
                    self._ahead.prepare([cluster, *losses(self.cluster)])
                return False  # steps go on until it is there
            if self._pays(cluster, done):
                return True
        for event in self._pending:
            self._say(f"after step {done}: {event}; the plan stays as it is")
        self._pending = ()
        self._prepare()
        return False

    def _forced(self) -> bool:
        used = nodes_of(self.plan)
        going = (What.LOST, What.NOTICE)
        return any(e.what in going and e.node in used for e in self._pending)

    def _pays(self, cluster: Cluster, done: int) -> bool:
        """Whether a plan that nothing forces would: with who came, or at the speeds of
        now."""
        try:
            new = self._ahead.get(cluster).plan
        except InfeasiblePlanError:
            return False
        slowest = min(map(self.members.speed, nodes_of(self.plan)))
        return self._replans.pays(
            now_s=_step_s(self.plan) / slowest,
            then_s=_step_s(new),
            cost_s=self._cost_s,
            steps_left=self.steps - done,
        )

    def _forget(self, events: Iterable[Event]) -> None:
        for node in lost(events):
            for store in self.stores:
                store.forget(node)

    def _guarded(self, save: Callable[[int], None]) -> Callable[[int], None]:
        """Saves only what is whole."""

        def guarded(done: int) -> None:
            if gone := nodes_of(self.plan) - self.members.intact:
                raise LostError(f"{', '.join(sorted(gone))} lost before step {done}")
            save(done)

        return guarded

    def _explained(self) -> bool:
        """Whether a step failed because a node of the plan is lost: as was told, or as
        its devices say."""
        used = nodes_of(self.plan)
        if used <= self.members.intact:
            devices: dict[str, list[jax.Device]] = {node: [] for node in used}
            for device, node in self._node_of.items():
                if node in used:
                    devices[node].append(device)
            for node in silent(devices):
                self.members.lose(node)
        return not used <= self.members.intact

    # Changing.

    def _change(self, done: int, batches: BatchIterator, *, whole: bool) -> int:
        """A new machine with the newest state there is; returns its step."""
        began = time.perf_counter()
        self._replans.begin(done)
        events = (*self._pending, *self.members.take())
        self._forget(events)
        now = self.members.clock()
        detect_s = max(0.0, now - min((e.at_s for e in events), default=now))
        gone = set(lost(events))
        live: list[Kept] = []
        if whole:
            nodes = set(self.members.present) - gone
            live = self._live(nodes, done, batches.get_state())
        del self.machine  # its memory is needed
        self._pending, recovered = (), None
        plan_s = compile_s = move_s = 0.0
        ahead = True
        while recovered is None:
            cluster = self.members.cluster()
            planned = self._ahead.get(cluster)
            ahead, plan_s = ahead and planned.ahead, plan_s + planned.seconds
            compiling = time.perf_counter()
            self._take(cluster, planned.plan)
            moving = time.perf_counter()
            compile_s += moving - compiling
            if not self._meanwhile():
                recovered = self._recover(live)
                move_s += time.perf_counter() - moving
            if self._meanwhile():
                # One of those just planned for goes too: once more, without it.
                events, recovered = (*events, *self._pending), None
                gone |= lost(self._pending)
                live = [kept.without(gone) for kept in live]
                self._pending = ()
        batches.set_state(recovered.data_state)
        change = Change(
            events=events,
            done=done,
            recovered=recovered,
            detect_s=detect_s,
            plan_s=plan_s,
            ahead=ahead,
            compile_s=compile_s,
            move_s=move_s,
        )
        self.changes.append(change)
        self._cost_s = time.perf_counter() - began
        self._replans.ended(recovered.step)
        for line in change.lines():
            self._say(line)
        self._prepare()
        return recovered.step

    def _live(self, nodes: Collection[str], done: int, data_state: Any) -> list[Kept]:
        """What the engine holds on some nodes; nothing, where that cannot be read."""
        try:
            sources = held(self.engine, self._node_of, nodes)
        except RuntimeError:  # of JAX: a device failed under it
            return []
        return [Kept(step=done, data_state=data_state, sources=sources)]

    def _meanwhile(self) -> bool:
        """Whether something has happened that forces another plan; what does not
        waits for the next step."""
        more = self.members.take()
        self._forget(more)
        self._pending = (*self._pending, *more)
        return self._forced()

    def _recover(self, live: Iterable[Kept]) -> Recovered:
        stored = [kept for store in self.stores for kept in store.kept()]
        return recover(
            self.machine.engine,
            [*live, *stored],
            node_of=self._node_of,
            rate=between(self.members.whole),
        )

    def _take(self, cluster: Cluster, plan: Plan) -> None:
        self.machine = make_machine(
            self._experiment,
            cluster,
            self._chain,
            plan,
            emulate=self._emulate,
            devices={d.name: self.devices[d.name] for d in cluster.devices},
            progress=self._progress,
        )
        self.cluster, self.plan = cluster, plan
        usual = [n.name for n in self.members.whole.nodes]
        gone = set(usual) - {n.name for n in cluster.nodes}
        at_full_speed = self.members.whole.without(*gone) if gone else cluster
        self._expected_s = expected_s(plan, self._chain, at_full_speed)
        self._watch.forget()

    def _prepare(self) -> None:
        """Plans for what is likely to come: each loss, then each return."""
        staying = set(self.members.staying)
        returns = [
            self.members.whole.without(*others)
            for node in self.members.whole.nodes
            if node.name not in staying
            and (
                others := {n.name for n in self.members.whole.nodes}
                - staying
                - {node.name}
            )
        ]
        self._ahead.prepare([*losses(self.cluster), *returns])

    # Stepping.

    def step(self, batch: Batch, step: int) -> Result:
        """A step of the engine of now, timed once in a while."""
        engine: Any = self.machine.engine
        every = self._measure_every
        if not every or step % every != every - 1 or len(self._expected_s) < 2:
            return engine.step(batch, step)
        result, measured_s = measured_step(engine, batch, step)
        self._watch.step(measured_s, self._expected_s)
        return result

    def check_readable(self, reads: Any) -> None:
        """Raises a ``LostError`` if one of some arrays has a part on a lost node."""
        import jax

        intact = self.members.intact
        for array in jax.tree.leaves(reads):
            for device in array.sharding.device_set:
                if self._node_of.get(device) not in intact:
                    raise LostError(f"numbers of a step lie on {device}")


def _step_s(plan: Plan) -> float:
    return plan.prediction.step_s if plan.prediction else 0.0
