"""A step saved under one plan is restored exactly under any other, anywhere."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from hexijax.checkpoint import Inventory, Saver, Tiers, inventory, restore
from hexijax.checkpoint.snapshot import take
from hexijax.checkpoint.sources import Held
from hexijax.checkpoint.tiers import Copy
from hexijax.job.saving import nodes
from hexijax.runtime.plain import PlainEngine
from hexijax.weights.stored.files import open_files
from hexijax.weights.stored.manifest import Manifest, Stand
from tests.checkpoint.bare import bare
from tests.checkpoint.filled import check, fill
from tests.laws import cases
from tests.laws.drawing import draw_plan
from tests.laws.law_models import Shape

ROOT = Path(__file__).parents[2]

PAIRS = 12
STORED_EVERY = 4
"""Of pairs, one that goes through files; of the others the state stays in memory: it is
cut, assigned and assembled by the same code."""

SHAPES = [
    Shape(api=api, tied=tied, scanned=scanned)
    for api in ("nnx", "linen")
    for tied in (True, False)
    for scanned in (False, True)
]


def drawn(rng: random.Random, shape: Shape) -> cases.Case:
    """A random plan for a model."""
    plan = draw_plan(rng, cases.chain(shape), batch_size=cases.BATCH_SIZE)
    return cases.Case(0, shape, clipped=False, plan=plan)


def saved(engine: Any, folder: Path) -> Tiers:
    tiers = Tiers(fast=open_files(folder))
    saver = Saver(engine, tiers, node_of=nodes(engine))
    saver.save(7, {"at": 7})
    return tiers


def held(engine: Any) -> Inventory:
    """What a save would write, in each node's memory."""
    node_of = nodes(engine)
    assert node_of is not None
    snapshot = take(engine, node_of)
    return Inventory(
        parts=(),
        copies=[
            Copy(
                manifest=Manifest(
                    stand=Stand(step=7, data_state={"at": 7}),
                    writer=node,
                    arrays={},
                    tensors=engine.tensors(),
                    params=(),
                ),
                source=Held(arrays=snapshot.arrays(node), node=node),
            )
            for node in snapshot.nodes
        ],
    )


@pytest.mark.parametrize(
    ("shape", "pairs"),
    [
        (SHAPES[0], PAIRS),
        *(pytest.param(shape, 63, marks=pytest.mark.laws) for shape in SHAPES),
    ],
    ids=str,
)
def test_any_plan_is_restored_under_any_other(
    shape: Shape, pairs: int, tmp_path: Path, monkeypatch: Any, record_property: Any
):
    rng, unlike = random.Random(f"{shape} {pairs}"), 0
    source = bare(drawn(rng, shape), monkeypatch)
    fill(source)
    for number in range(pairs):
        target = bare(drawn(rng, shape), monkeypatch)
        if number % STORED_EVERY:
            kept = held(source)
        else:
            kept = inventory(saved(source, tmp_path / "steps"))
        found = restore(target, kept, where="here", facts={}, node_of=nodes(target))
        assert (found.stand.step, found.stand.data_state) == (7, {"at": 7}), number
        check(target)
        unlike += source.targets().keys() != target.targets().keys()
        source = target  # what was restored is saved once more
        shutil.rmtree(tmp_path / "steps", ignore_errors=True)
    record_property("pairs, of which cut unlike", (pairs, unlike))
    assert unlike > pairs // 2


def test_the_plain_program_goes_on_from_any_plan_and_any_plan_from_it(
    tmp_path: Path, monkeypatch: Any
):
    case = drawn(random.Random(1), SHAPES[0])
    planned = bare(case, monkeypatch)
    plain = PlainEngine(planned.experiment, device=jax.devices()[2])
    plain.init()
    assert plain.tensors() == planned.tensors()
    fill(planned)
    restore(plain, inventory(saved(planned, tmp_path / "a")), where="x", facts={})
    check(plain)
    again = bare(case, monkeypatch)
    restore(again, inventory(saved(plain, tmp_path / "b")), where="x", facts={})
    check(again)


@pytest.mark.laws
def test_fewer_devices_in_a_new_process_hold_the_same(tmp_path: Path, monkeypatch: Any):
    planned = bare(drawn(random.Random(1), SHAPES[0]), monkeypatch)
    fill(planned)
    saved(planned, tmp_path)
    for count in (6, 4, 2, 1):
        force = f"--xla_force_host_platform_device_count={count}"
        environ = {**os.environ, "XLA_FLAGS": force}
        command = [sys.executable, "-m", "tests.checkpoint.restoring", str(tmp_path)]
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{count} devices\n"
