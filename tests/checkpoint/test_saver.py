"""Saves beside training: what is kept where, what fails and is said."""

import dataclasses
import itertools
import resource
import shutil
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from hexijax.checkpoint import Saver, Tiers, look, restore
from hexijax.checkpoint.slices import Key, Tensor
from hexijax.errors import UserError
from hexijax.job.saving import stored
from hexijax.report import RunFolder
from hexijax.weights.slices import Slice
from hexijax.weights.stored.files import Folder, Rate, open_files
from tests.checkpoint.test_assemble import KEY, NODES, Cut, check
from tests.checkpoint.test_bad_days import files_end_at, flip


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Cut, Saver, list[str]]]:
    """(engine, what saves it, what was told) with a far tier, both at their ends."""

    def made(engine: Cut | None = None, **fields: Any) -> tuple[Cut, Saver, list[str]]:
        engine, told = engine or Cut((0, 2), (2, 6)).fill(), list[str]()
        (tmp_path / "far").mkdir(exist_ok=True)
        defaults = {"every": 1, "far": open_files(tmp_path / "far"), "far_every": 2}
        tiers = Tiers(fast=open_files(tmp_path / "fast"), **{**defaults, **fields})
        saver = Saver(engine, tiers, node_of=NODES, facts={"seed": 0}, tell=told.append)
        return engine, saver, told

    return made


def run(saver: Saver, steps: int, first: int = 1) -> None:
    for step in range(first, first + steps):
        saver.write(saver.take(step, {"at": step}), {"loss": 1.0})
    saver.close(first + steps - 1)


def test_the_newest_are_kept_where_they_are_due(make: Any, tmp_path: Path):
    _, saver, told = make(neighbour_every=1)
    for step in range(1, 7):
        run(saver, 1, step)
    found = saver.inventory()
    places = {(p.step, p.label, p.node) for p in found.parts}
    assert {step for step, label, _ in places if label == "disk"} == {5, 6}
    assert {step for step, label, _ in places if label == "far"} == {4, 6}
    assert {node for _, label, node in places if label == "disk"} == {"n0", "n1"}
    assert {c.source.node for c in found.copies} == {"n0", "n1"}
    assert found.without(["n0"]).whole() == [6, 5, 4]  # n1 has copies of n0's
    assert found.without(["n0", "n1"]).whole() == [6, 4]  # the far tier alone
    stand = look(found, where="here")
    assert (stand.step, stand.data_state, stand.metrics) == (6, {"at": 6}, {"loss": 1})
    assert told == []
    state = tmp_path / "fast" / "6" / "n0" / "state"
    with ocp.StandardCheckpointer() as checkpointer:  # the folder is Orbax's, too
        tree = checkpointer.restore(state)
    assert sorted(x.shape for x in tree.values()) == [(), (2, 4), (2, 4)]


def test_each_of_several_processes_sends_and_removes_its_own_parts(
    make: Any, tmp_path: Path
):
    def places(tier: str) -> set[tuple[int, str]]:
        found = (tmp_path / tier).glob("*/*/manifest.json")
        return {(int(x.parts[-3]), x.parts[-2]) for x in found}

    _, saver, told = make(keep=1, far_every=2)
    run(saver, 2)
    assert places("fast") == {(2, "n0"), (2, "n1")}
    here = {x: node for x, node in NODES.items() if node == "n1"}
    saver.alone, saver.node_of = False, here
    shutil.rmtree(tmp_path / "far")
    (tmp_path / "far").mkdir()
    for step in (2, 3):
        saver._send(step)
    assert {node for _, node in places("far")} <= {"n1"}
    assert places("far"), "its own part was sent"
    assert told == []


def test_a_step_on_its_way_stays_until_it_has_come(make: Any, tmp_path: Path):
    _, saver, told = make(keep=1, far_every=1, far_rate=Rate(1000))
    run(saver, 2)
    left = {int(x.parts[-3]) for x in (tmp_path / "fast").glob("*/*/manifest.json")}
    assert left == {2}
    assert saver.inventory().whole()[0] == 2
    assert [text.split(":")[0] for text in told] == [
        "step 2 is not sent to the far tier"
    ]


def test_a_snapshot_is_of_its_step_whatever_the_next_one_overwrites(make: Any):
    engine, saver, _ = make(far=None, far_every=0)
    taken = saver.take(1)
    donate = jax.jit(lambda x: x * 0, donate_argnums=0)
    engine.arrays = {k: [donate(x) for x in v] for k, v in engine.arrays.items()}
    saver.write(taken)
    saver.close(1)
    restore(engine, saver.inventory(), where="here", facts={}, node_of=NODES)
    check(engine)


def test_what_is_remembered_is_not_read_from_the_disk(make: Any, tmp_path: Path):
    """One process of two: the other is lost, and what it saved lies on the disk."""
    engine, saver, _ = make(far=None, far_every=0)
    folder = RunFolder(tmp_path)
    saver.tiers = dataclasses.replace(saver.tiers, fast=open_files(folder.checkpoints))
    saver.remember, saver.facts = True, {"session": "first"}
    run(saver, 2)
    assert {c.manifest.stand.step for c in saver.remembered} == {2}
    own = [c for c in saver.remembered if c.source.node == "n0"]

    def read() -> dict[str, int]:
        found = stored(folder, lambda text: None, own)
        result = restore(engine, found, where="here", facts={}, node_of=NODES)
        assert result.stand.step == 2
        check(engine)
        return dict(result.moved.num_bytes)

    both = read()
    held = sum(x.nbytes for x in own[0].source.arrays.values())
    assert both["memory"] == held > 0
    assert both["disk"] > 0
    saver.facts = {"session": "second"}  # others did step 2 anew: one mind for all
    run(saver, 1, first=2)
    assert read().keys() == {"disk"}


def chunk(tier: str, tmp_path: Path, step: int) -> Path:
    return next((tmp_path / tier).glob(f"{step}/n1/state/*-w-*/c.0.0"))


def test_what_is_damaged_comes_from_elsewhere_or_an_older_step(
    make: Any, tmp_path: Path
):
    engine, saver, told = make()
    run(saver, 2)
    flip(chunk("fast", tmp_path, 2))
    found = restore(engine, saver.inventory(), where="here", facts={}, tell=told.append)
    assert found.stand.step == 2
    assert found.moved.num_bytes["far"] > 0
    assert "step 2 is damaged" in told[0]
    assert "So it is read elsewhere." in told[0]
    check(engine)
    flip(chunk("far", tmp_path, 2))
    found = restore(engine, saver.inventory(), where="here", facts={}, tell=told.append)
    assert found.stand.step == 1
    assert "So an older step is looked for." in found.notes[-1]
    check(engine)
    flip(chunk("fast", tmp_path, 1))
    with pytest.raises(UserError, match="No step in here can be read whole; 2 were"):
        restore(engine, saver.inventory(), where="here", facts={})


def test_what_does_not_belong_is_refused(make: Any):
    engine, saver, _ = make()
    with pytest.raises(UserError, match="There is no checkpoint in here"):
        restore(engine, saver.inventory(), where="here", facts={})
    run(saver, 1)
    found = saver.inventory()
    with pytest.raises(UserError, match="no step 2 in here. Whole steps are 1"):
        restore(engine, found, where="here", facts={}, step=2)
    with pytest.raises(UserError, match="its seed is 0, this run's is 1"):
        restore(engine, found, where="here", facts={"seed": 1})

    class Other(Cut):
        def tensors(self) -> dict[Key, Tensor]:
            return {**super().tensors(), KEY: Tensor((6, 9), np.dtype("float32"))}

    with pytest.raises(UserError) as error:
        restore(Other((0, 6)), found, where="here", facts={})
    assert (
        "first difference is the state of 'blocks/0/w' (0/mu): it has float32[6,8], "
        "this run has float32[6,9]."
    ) in str(error.value)


def test_a_full_disk_is_said_and_the_run_goes_on(make: Any):
    engine, saver, told = make(far=None, far_every=0)
    run(saver, 1)
    with files_end_at(64):
        saver.write(saver.take(2))
        saver.close()
    assert "Step 2 was not saved in" in told[0]
    assert "Make room there, keep fewer steps (--keep), or name another" in told[0]
    with pytest.raises(UserError, match="Step 2 was not saved"):
        saver.close(2)
    assert saver.inventory().whole() == [1]
    run(saver, 1, 3)
    assert saver.inventory().whole() == [3, 1]
    restore(engine, saver.inventory(), where="here", facts={})
    check(engine)


class Refusing(Folder):
    """A far tier that takes nothing."""

    def put(self, key: str, data: bytes, *, durable: bool = False) -> None:
        raise PermissionError(f"{key}: denied")


def test_a_far_tier_that_refuses_or_is_away_costs_no_step(make: Any, tmp_path: Path):
    _, saver, told = make(far=Refusing(tmp_path / "far"))
    run(saver, 2)
    assert "Step 2 was not saved in" in told[0]
    assert "denied" in told[0]
    assert saver.inventory().whole() == [2, 1]
    shutil.rmtree(tmp_path / "far")
    assert saver.inventory().whole() == [2, 1]


class Meeting(Folder):
    """A far tier that answers the first chunk when the second is on its way."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.met, self.first = threading.Barrier(2), itertools.count()

    def put(self, key: str, data: bytes, *, durable: bool = False) -> None:
        if "/c" in key and next(self.first) < 2:
            self.met.wait(60)
        super().put(key, data, durable=durable)


def test_several_chunks_are_on_their_way_at_a_time(make: Any, tmp_path: Path):
    _, saver, _ = make(far=Meeting(tmp_path / "far"))
    run(saver, 2)
    assert 2 in {p.step for p in saver.inventory().parts if p.label == "far"}


def test_a_slow_far_tier_holds_nothing_up(make: Any):
    """Sent a step at a time: those that are due meanwhile are left out, and it is
    said."""
    _, saver, told = make(far_every=1, far_rate=Rate(50))
    for step in (1, 2, 3):
        saver.write(saver.take(step))
        saver._fast.wait()
    assert saver.inventory().whole() == [3, 2, 1]  # 1 is kept while it is sent
    assert [text.split(" to the far")[0] for text in told] == [
        "step 2 is not sent",
        "step 3 is not sent",
    ]
    saver.tiers.far_rate.bytes_per_s = float("inf")
    saver.close()
    assert {p.step for p in saver.inventory().parts if p.label == "far"} == {1}


class Large:
    """200 MB in 10 arrays."""

    def __init__(self, num_bytes: int):
        rows = num_bytes // 10 // 4000
        self.held = {
            Slice(f"w{i}", "master", ((0, rows), (0, 1000))): [jnp.ones((rows, 1000))]
            for i in range(10)
        }

    def slices(self) -> Any:
        return self.held

    def tensors(self) -> Any:
        return {
            k.key: Tensor(tuple(x.shape), np.dtype(x.dtype))
            for k, (x,) in self.held.items()
        }

    def stored_params(self) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("saves", "megabytes"),
    [(14, 20), pytest.param(50, 200, marks=pytest.mark.laws)],
)
def test_memory_does_not_grow_from_save_to_save(
    saves: int, megabytes: int, tmp_path: Path, record_property: Any
):
    saver: Any = Saver(
        Large(megabytes * 10**6), Tiers(fast=open_files(tmp_path), every=1)
    )
    resident: list[int] = []
    for step in range(1, saves + 1):
        saver.write(saver.take(step))
        saver.close(step)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * resource.getpagesize())
    last = min(
        10, len(resident) // 4
    )  # it moves by a chunk for each thread, up and down
    early, late = resident[10 - last : 10], resident[-last:]
    growth = int(statistics.median(late) - statistics.median(early))
    record_property("resident bytes, and more of them at the end", (early[-1], growth))
    assert growth < megabytes * 10**6 / 10 + 8 * 10**6
    assert threading.active_count() < 50
