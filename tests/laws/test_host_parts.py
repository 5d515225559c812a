"""State that the host updates in parts, one for some of its cores: the same numbers."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from hexijax.plan.plan import Memory
from hexijax.runtime import host
from hexijax.runtime.memories import copied
from tests.laws.offload import draw_offloaded, rests_on_host, traits
from tests.laws.test_offload import one_step
from tests.laws.test_packs import SHARES, make_runtime, step

FIRST, *MORE = 96, 14, 24, 97, 0
"""Drawn cases whose host updates some state."""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Four of the forced devices stand for cores of a host beside cards."""
    mesh = Mesh(np.array(jax.local_devices()[4:8]), (host.CORES,))
    monkeypatch.setattr(host, "_mesh", lambda: mesh)
    monkeypatch.setattr(host, "LEAST_SIZE", 4)
    return mesh.size


@pytest.mark.parametrize(
    "seed", [FIRST, *(pytest.param(x, marks=pytest.mark.laws) for x in MORE)]
)
def test_parts_give_the_plain_program_s_numbers(
    seed: int, parts: int, monkeypatch: Any
):
    seen: list[Any] = []
    monkeypatch.setattr(
        "tests.laws.test_offload.rests_on_host",
        lambda engine: seen.append(rests_on_host(engine)) or seen[-1],
    )
    case = draw_offloaded(seed)
    assert "state, updated by the host" in traits(case)
    one_step(case, monkeypatch)
    counts = {len(x.sharding.device_set) for x in jax.tree.leaves(seen)}
    assert parts in counts


@pytest.mark.parametrize("shape", [(8, 6), (6, 8), (6, 6), (2,), ()])
def test_an_array_goes_to_a_card_as_it_was(shape: tuple[int, ...], parts: int):
    runtime = make_runtime(SHARES["one stores all"])
    home = runtime.homes[0]
    target = runtime.layout.replicated(home)
    given = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    (there,) = host.seen_by_host([jax.device_put(given, target)])
    cut = any(size % parts == 0 for size in shape) and given.size >= 4
    assert there.sharding.is_fully_replicated is not cut
    like = jax.ShapeDtypeStruct(shape, "float32", sharding=target)
    came = host.way_to_cards(like, runtime.programs)(there)
    assert came.sharding.is_equivalent_to(target, len(shape))
    np.testing.assert_array_equal(came, given)


def test_what_lies_in_parts_is_copied_for_a_snapshot(parts: int):
    given = np.arange(64, dtype="float32").reshape(8, 8)
    (there,) = host.seen_by_host([jax.device_put(given)])
    assert len(there.sharding.device_set) == parts
    (copy,) = copied([there], "a snapshot")
    assert isinstance(copy, np.ndarray)
    np.testing.assert_array_equal(copy, given)


@pytest.mark.parametrize("in_parts", [False, True])
def test_what_the_host_updates_travels_packed(in_parts: bool, request: Any):
    if in_parts:
        request.getfixturevalue("parts")
    expected = step(make_runtime(SHARES["uneven"]))
    found = step(make_runtime(SHARES["uneven"], Memory.HOST, Memory.HOST))
    for name in expected:
        if name.startswith("after"):
            for a, b in zip(expected[name], found[name], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("cores", "count"), [(None, 1), (1, 1), (2, 1), (4, 2), (16, 8), (128, 8)]
)
def test_a_host_has_no_more_parts_than_pay(cores: int | None, count: int):
    assert host.host_parts(cores) == count
