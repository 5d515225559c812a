"""A step saved under one plan is restored exactly under any other, anywhere."""

import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from hexijax.checkpoint import Saver, Tiers, inventory, restore
from hexijax.job.saving import nodes
from hexijax.runtime.plain import PlainEngine
from hexijax.weights.stored.files import open_files
from tests.checkpoint.bare import bare
from tests.checkpoint.filled import check, fill
from tests.laws import cases
from tests.laws.drawing import draw_plan
from tests.laws.law_models import Shape

ROOT = Path(__file__).parents[2]

PAIRS = 12


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


@pytest.mark.parametrize(
    "pairs", [PAIRS, pytest.param(500, marks=pytest.mark.laws)], ids=["few", "many"]
)
def test_any_plan_is_restored_under_any_other(
    pairs: int, tmp_path: Path, monkeypatch: Any, record_property: Any
):
    rng, unlike = random.Random(pairs), 0
    for shape in SHAPES[: 1 if pairs == PAIRS else len(SHAPES)]:
        source = bare(drawn(rng, shape), monkeypatch)
        fill(source)
        for number in range(math.ceil(pairs / len(SHAPES)) if pairs > PAIRS else PAIRS):
            target = bare(drawn(rng, shape), monkeypatch)
            stored = inventory(saved(source, tmp_path / "steps"))
            found = restore(
                target, stored, where="here", facts={}, node_of=nodes(target)
            )
            assert (found.stand.step, found.stand.data_state) == (7, {"at": 7}), number
            check(target)
            unlike += source.targets().keys() != target.targets().keys()
            source = target  # what was restored is saved once more
            shutil.rmtree(tmp_path / "steps")
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
