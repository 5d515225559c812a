"""Collectives over devices of one island or many give what NumPy gives, everywhere."""

import random
from pathlib import Path
from typing import Any

import jax
import pytest

from hexijax.runtime.carrying import ONE_PROCESS
from hexijax.runtime.communicator import Communicator, Way
from tests.islands.cases import cluster
from tests.islands.collectives import rounds
from tests.islands.nearby import all_at_once, carriers
from tests.islands.processes import islands


def apart(count: int) -> dict:
    """Carriers of so many islands in this process, and what they share."""
    made = cluster(count)
    names = [d.name for d in made.devices]
    return carriers(made, dict(zip(names, jax.devices(), strict=True)))


@pytest.mark.parametrize("mixed", [False, True])
def test_within_one_process(mixed: bool):
    for members in (1, 3):
        rounds(
            ONE_PROCESS, jax.devices()[:members], seed=members, count=10, mixed=mixed
        )


@pytest.mark.parametrize(("count", "mixed"), [(2, False), (3, True)])
def test_between_islands(count: int, mixed: bool):
    devices = random.Random(count).sample(jax.devices(), 5)
    jobs = [
        lambda c=carrier: rounds(c, devices, seed=7, count=10, mixed=mixed)
        for carrier in apart(count).values()
    ]
    all_at_once(jobs)


def test_large_sums_between_islands_are_exchanged_in_parts():
    devices = jax.devices()
    jobs = [
        lambda c=carrier: rounds(c, devices, seed=3, count=5, most=40_000)
        for carrier in apart(3).values()
    ]
    all_at_once(jobs)


def test_the_way_follows_from_where_two_members_are():
    first, *_ = apart(2).values()
    devices = jax.devices()
    group = Communicator([devices[0], devices[1], devices[6], devices[7]], first)
    assert group.here == (0, 1)
    assert group.way(0, 1) is Way.MESH
    assert group.way(0, 2) is Way.TRANSFER


@pytest.mark.laws
def test_ten_thousand_rounds_between_processes_leave_nothing_behind(
    tmp_path: Path, record_property: Any
):
    with islands(3, tmp_path) as running:
        told = running.all(do="collectives", seed=5, count=10_000, most=6)
    record_property("rounds_took_s", max(said["took_s"] for said in told.values()))
    for name, said in told.items():
        early, *_, late = said["resident_bytes"][1:]
        record_property(f"resident_mib_{name}", [b >> 20 for b in (early, late)])
        assert late - early < 64 * 2**20, (name, said)


@pytest.mark.laws
def test_collectives_of_any_size_between_processes(
    tmp_path: Path, record_property: Any
):
    with islands(3, tmp_path) as running:
        for num_bytes in (0, 4, 4_000, 1_000_004, 16 * 2**20, 64 * 2**20):
            told = running.all(do="sized", num_bytes=num_bytes)
            spent = next(iter(told.values()))["spent_s"]
            rounded = {k: round(s, 3) for k, s in spent.items()}
            record_property(f"seconds_of_{num_bytes}", rounded)
