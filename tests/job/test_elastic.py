"""A run whose nodes come and go: the unbroken run's losses, and every sample once."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from hexijax.checkpoint.sources import DISK, Damaged, Held
from hexijax.elastic import Asked, Members, PlansAhead, Replans, probe
from hexijax.errors import UserError
from hexijax.experiment import Batch, BatchIterator, Experiment
from hexijax.job import elastic
from hexijax.job.elastic import Elastic
from hexijax.job.intake import plan_options, trace_chain
from hexijax.job.loop import Line, Loop
from hexijax.job.screen import Quiet
from hexijax.planner import Grouping
from hexijax.report import Meter
from hexijax.runtime.devices import assign
from tests.cli import tiny
from tests.elastic.examples import four
from tests.elastic.nearby import Nearby

pytestmark = pytest.mark.usefixtures("backend")

STEPS = 60
CLUSTER = four()


@dataclasses.dataclass
class Logged:
    """Batches that are logged by number; putting them back takes the log back."""

    inner: BatchIterator
    log: list[int] = dataclasses.field(default_factory=list)
    then: Callable[[int], None] = lambda number: None
    """Called with the number of a batch before it is given."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.then(len(self.log))
        self.log.append(len(self.log))
        return next(self.inner)

    def get_state(self) -> Any:
        return {"log": len(self.log), "inner": self.inner.get_state()}

    def set_state(self, state: Any) -> None:
        del self.log[state["log"] :]
        self.inner.set_state(state["inner"])


@functools.cache
def job() -> tuple[Experiment, Asked]:
    experiment = tiny.experiment(rate=0.02, steps=STEPS)
    chain = trace_chain(experiment)
    options = dataclasses.replace(
        plan_options(experiment), grouping=Grouping.ONE, use_all_devices=True
    )
    return experiment, Asked(
        chain=chain, batch_size=8, dtype="float32", options=options
    )


OTHERS: list[jax.Array] = []
"""Arrays from before a test: those of other tests' modules among them."""


@pytest.fixture(autouse=True)
def _not_those_of_others() -> Iterator[None]:
    OTHERS[:] = jax.live_arrays()
    yield
    OTHERS.clear()


def destroy(node: str) -> None:
    """Nothing of a lost node can be read: its arrays are deleted under their owners."""
    device = assign(CLUSTER, emulate=True)[f"{node}/0"]
    spared = set(map(id, OTHERS))
    for array in jax.live_arrays():
        if device in array.sharding.device_set and id(array) not in spared:
            array.delete()


class Eager(Replans):
    """Takes every chance, whatever it costs."""

    def pays(self, **_: Any) -> bool:
        return True


class Run:
    """One run, and what became of it."""

    def __init__(
        self,
        *present: str,
        happens: dict[float, Callable[["Run"], None]] | None = None,
        compiling: Callable[["Run"], None] = lambda run: None,
        every: int = 5,
        steps: int = STEPS,
        replans: Replans | None = None,
        measure_every: int = 0,
        **store: Any,
    ):
        """
        Args:
          present: nodes at the start.
          happens: called when the step of that number has ended; at -N after the save
            of N steps, at N + 0.5 while step N is dispatched.
          compiling: called whenever an engine of a later plan has compiled a program.
          every: steps between saves.
          steps: to do.
          replans: how often it may plan again.
          measure_every: steps between two that are timed.
          store: where saves go.
        """
        experiment, asked = job()
        self.experiment = dataclasses.replace(experiment, steps=steps)
        self.members = Members(CLUSTER, present)
        self.batches = Logged(experiment.data.batches(8))
        self.batches.then = lambda number: self.happen(0.5 + number)
        self.lines: dict[int, float] = {}
        self.said: list[str] = []
        self.happens, self.every, self.compiling = dict(happens or {}), every, compiling
        devices = assign(CLUSTER, emulate=True)
        node_of = {device: name[0] for name, device in devices.items()}
        self.store = Nearby(node_of, **store)
        with PlansAhead(asked, background=False) as ahead:
            self.elastic = Elastic(
                experiment=self.experiment,
                chain=asked.chain,
                members=self.members,
                ahead=ahead,
                devices=devices,
                stores=[self.store],
                replans=replans or Eager(),
                emulate=True,
                say=self.said.append,
                progress=self.progress,
                measure_every=measure_every,
            )
            self.elastic.begin().engine.init()
            self.running = True
            with contextlib.closing(self):
                assert self.elastic.run(self.make_loop, self.batches, self.back)
        self.changes = self.elastic.changes

    def close(self) -> None:
        self.running = False

    def progress(self, what: str, done: int, total: int) -> None:
        if hasattr(self, "running"):
            self.compiling(self)

    def make_loop(self, elastic: Elastic) -> Loop:
        return Loop(
            engine=elastic.machine.engine,
            experiment=self.experiment,
            batches=self.batches,
            meter=Meter(tokens_per_step=1.0, flops_per_step=1.0, peak_flops_per_s=None),
            screen=Quiet(),
            write=self.write,
            save=self.save if self.every else None,
            save_every=self.every,
        )

    def write(self, line: Line) -> None:
        step = int(line["step"] or 0)
        self.lines[step] = float(line["loss"] or 0.0)
        self.happen(step)

    def happen(self, step: float) -> None:
        happens = self.happens.pop(step, None)
        if happens:
            happens(self)

    def save(self, done: int) -> None:
        engine = self.elastic.machine.engine
        self.store.save(engine, done, self.batches.get_state())
        self.happen(-done)

    def back(self, step: int) -> None:
        self.lines = {at: loss for at, loss in self.lines.items() if at < step}

    def check(self, steps: int = STEPS) -> None:
        """The unbroken run's losses; every batch once, in order."""
        assert self.batches.log == list(range(steps))
        assert sorted(self.lines) == list(range(steps))
        for step, loss in self.lines.items():
            assert loss == pytest.approx(unbroken()[step], rel=1e-5)


@functools.cache
def unbroken() -> list[float]:
    run = Run("a", "b", "c", every=0)
    assert run.changes == []
    return [run.lines[step] for step in range(STEPS)]


def lose(*nodes: str) -> Callable[[Run], None]:
    def happens(run: Run) -> None:
        for node in nodes:
            run.members.lose(node)
            destroy(node)

    return happens


def join(node: str) -> Callable[[Run], None]:
    return lambda run: run.members.join(node)


RING = {"a": "b", "b": "c", "c": "d", "d": "a"}


def test_three_losses_and_two_joins_are_the_unbroken_run():
    run = Run(
        *"abc",
        happens={
            11: lose("b"),
            20: join("d"),
            31: lose("a"),
            40: join("b"),
            50: lose("d"),
        },
        neighbour=RING,
    )
    run.check()
    assert [[str(e) for e in change.events] for change in run.changes] == [
        *(["b lost"], ["d joined"], ["a lost"], ["b joined"], ["d lost"])
    ]
    found = [(c.done, c.recovered.step) for c in run.changes]
    back = [done - step for done, step in found]
    # A loss goes back to the last save that is whole; a join goes on where it is.
    assert back[1] == back[3] == 0
    assert all(0 < lost <= 7 for lost in back[::2])
    for change in run.changes:
        labels = set(change.recovered.moved.num_bytes)
        joined = change.done == change.recovered.step
        assert labels == ({"device"} if joined else {"disk", "peer"})
        said = "\n".join(change.lines())
        assert "noticed in" in said
        assert "GB from" in said
    assert {node.name for node in run.elastic.cluster.nodes} == {"b", "c"}


def test_with_a_copy_of_every_step_survivors_go_on_in_memory():
    """State at the survivors is read from their devices, the rest from a copy."""
    run = Run(*"abc", happens={-7: lose("b")}, every=1, neighbour=RING, steps=12)
    run.check(12)
    (change,) = run.changes
    assert (change.done, change.recovered.step) == (7, 7)
    moved = change.recovered.moved.num_bytes
    assert set(moved) == {"device", "peer"}
    tensors = run.elastic.machine.engine.tensors().values()
    whole = sum(math.prod(tensor.shape) for tensor in tensors)
    assert sum(moved.values()) == pytest.approx(4 * whole, abs=64)


def test_a_second_loss_while_the_first_is_recovered_from():
    def again(run: Run) -> None:
        if "c" in run.members.present and "b" not in run.members.present:
            lose("c")(run)

    run = Run(
        *"abcd",
        happens={7: lose("b")},
        compiling=again,
        far_every=5,
        steps=12,
    )
    run.check(12)
    (change,) = run.changes
    assert [str(event) for event in change.events] == ["b lost", "c lost"]
    assert change.recovered.step == 5
    assert {node.name for node in run.elastic.cluster.nodes} == {"a", "d"}
    assert set(change.recovered.moved.num_bytes) == {"disk", "far"}


def test_where_all_copies_of_a_slice_are_lost_an_older_step_counts():
    happens = {13: lose("b", "c")}
    run = Run(*"abc", happens=happens, neighbour=RING, far_every=5, every=2, steps=16)
    run.check(16)
    (change,) = run.changes
    assert change.recovered.step == 10
    assert any(
        "step 12: " in line and "is held by none of" in line
        for line in change.recovered.passed_over
    )
    with pytest.raises(
        UserError,
        match=r"No step of the run is whole any more; 3 were looked at:\n  step 6: .*"
        r"\n.*\n.*\nState has one home, so what a lost machine held comes from a save",
    ):
        Run(*"abc", happens={7: lose("b")}, every=2, steps=12)
    # b keeps a's copy: with both gone, what a held is nowhere.
    with pytest.raises(UserError, match="is held by none of"):
        Run(*"abc", happens={7: lose("a", "b")}, every=2, neighbour=RING, steps=12)


class Rotten(Held):
    """A disk that nothing can be read from any more."""

    def read(self, name: str, kind: str, box: Any) -> Any:
        error = Damaged(f"{name} is not what was written")
        error.source = self
        raise error


def test_a_node_that_is_lost_and_back_at_once_has_lost_its_memory():
    def blink(run: Run) -> None:
        lose("b")(run)
        join("b")(run)

    run = Run(*"abc", happens={7: blink}, neighbour=RING, steps=12)
    run.check(12)
    (change,) = run.changes
    assert [str(event) for event in change.events] == ["b lost", "b joined"]
    assert change.recovered.step == 5
    assert set(change.recovered.moved.num_bytes) == {"disk", "peer"}


# The copy of what is damaged is with b.
@pytest.mark.parametrize(("lost", "step"), [("c", 4), ("b", 2)])
def test_what_is_damaged_is_read_elsewhere_or_from_before(lost: str, step: int):
    def rot(run: Run) -> None:
        state, held = run.store.saved[4]
        rotten = [Rotten(arrays=x.arrays, label=x.label, node=x.node) for x in held]
        mine = [x.label == DISK and x.node == "a" for x in held]
        left = [r if bad else x for r, x, bad in zip(rotten, held, mine, strict=True)]
        run.store.saved[4] = state, left

    happens = {-4: rot, 5: lose(lost)}
    run = Run(*"abc", happens=happens, neighbour=RING, every=2, steps=8)
    run.check(8)
    (change,) = run.changes
    assert change.recovered.step == step
    assert "is not what was written" in change.recovered.passed_over[0]


def test_notices_and_stragglers_lose_no_step():
    run = Run(
        *"abc",
        happens={
            3: lambda run: run.members.notice("a", 60),
            6: lambda run: run.members.slow("b", 0.5),
            8: lambda run: run.members.lose("a"),
        },
        steps=12,
    )
    run.check(12)
    assert [c.recovered.step - c.done for c in run.changes] == [0, 0]
    assert {node.name for node in run.elastic.cluster.nodes} == {"b", "c"}
    assert run.elastic.cluster.device("b/0").kind == "cpu-one-at-0.50"
    # That a node goes that is not in the plan changes nothing.
    assert any("a lost; the plan stays as it is" in line for line in run.said)


def test_a_node_whose_stages_are_slow_is_planned_for_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
):
    usual = elastic.measured_step

    def measured(engine: Any, batch: Any, step: int) -> Any:
        result, spent_s = usual(engine, batch, step)
        assert set(spent_s) == set(expected_s)
        assert min(spent_s.values()) > 0
        return result, {node: s * (1 + (node == "b")) for node, s in expected_s.items()}

    expected_s = dict.fromkeys("abc", 1.0)
    monkeypatch.setattr(elastic, "measured_step", measured)
    monkeypatch.setattr(elastic, "expected_s", lambda *_: expected_s)
    run = Run(*"abc", measure_every=1, steps=8)
    run.check(8)
    (change,) = run.changes
    assert [str(event) for event in change.events] == ["b runs at 0.50 of its speed"]
    assert change.recovered.step == change.done == 5


def test_a_step_that_fails_is_explained_by_its_devices(
    monkeypatch: pytest.MonkeyPatch,
):
    """Nobody tells of the loss: the step fails, and the device does not answer."""
    gone = assign(CLUSTER, emulate=True)["b/0"]
    adds = probe.adds
    monkeypatch.setattr(probe, "adds", lambda device: device != gone and adds(device))
    run = Run(*"abc", happens={7.5: lambda run: destroy("b")}, neighbour=RING, steps=12)
    run.check(12)
    (change,) = run.changes
    assert [str(event) for event in change.events] == ["b lost"]
    assert change.recovered.step == 5

    def fault(run: Run) -> None:
        raise RuntimeError("a fault in code")

    with pytest.raises(RuntimeError, match="a fault in code"):
        Run(*"ac", happens={3.5: fault}, steps=5)


def test_what_does_not_pay_is_left():
    run = Run(*"abc", happens={3: join("d")}, replans=Replans(), steps=6)
    run.check(6)
    assert run.changes == []
    assert any("d joined; the plan stays as it is" in line for line in run.said)
