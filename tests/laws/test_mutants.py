"""The laws can fail: twelve faults, each planted on purpose and each caught.

    pytest -m mutants

A fault is put where a programmer would make it; the few plans that expose it run as in
test_exactness, and the same checks must object.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from hexijax.plan.plan import Place, Replica, Stage, StateShare
from hexijax.runtime import feed as feed_module
from hexijax.runtime.batches import Rows
from hexijax.runtime.engine import Engine
from hexijax.runtime.executor import Executor
from hexijax.runtime.feed import Feed
from hexijax.runtime.groups import GroupRuntime
from hexijax.runtime.verdicts import Verdicts
from tests.laws.cases import Case, chain, check, run
from tests.laws.law_models import Shape
from tests.laws.test_exactness import by_hand

pytestmark = pytest.mark.mutants

Plant = Callable[[pytest.MonkeyPatch], None]


def uneven(shape: Shape, *, clipped: bool = False) -> Case:
    """A pipeline with a tensor degree; one device that pads its last microbatch."""
    layers = len(chain(shape).layers)
    stages = (
        Stage(devices=("fast/0", "fast/1"), layers=(0, 4), tensor=2),
        Stage(devices=("fast/2", "fast/3"), layers=(4, layers), lanes=2),
    )
    first = Replica(stages=stages, microbatches=3, microbatch_size=2, samples=6)
    alone = Stage(devices=("slow/0",), layers=(0, layers))
    second = Replica(stages=(alone,), microbatches=2, microbatch_size=4, samples=6)
    case = by_hand(shape, first, second)
    return dataclasses.replace(case, clipped=clipped)


def halved(shape: Shape) -> Case:
    """The same, with each group's state in two equal halves."""
    case = uneven(shape)
    shares = {Place("r0.s0"): 1.0, Place("r1.s0"): 1.0}
    state = (StateShare(groups=("*",), shares=shares),)
    return dataclasses.replace(case, plan=dataclasses.replace(case.plan, state=state))


def wrap(target: Any, name: str, around: Callable[..., Any]) -> Plant:
    """Replaces ``target.name`` by ``around(original, *arguments)``."""
    original = getattr(target, name)

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            target, name, lambda *args, **kwargs: around(original, *args, **kwargs)
        )

    return plant


def mean_of_means(original: Any, engine: Engine, replica: int, weight: float) -> float:
    feed = engine._feed
    own = sum(feed.weight(r, m) for r, m in feed._rows if r == replica)
    return 1.0 / (own * len(engine.plan.replicas))


def scaled_reduce(factor: Callable[..., float]) -> Callable[..., Any]:
    def reduce(original: Any, group: GroupRuntime, grads: Any) -> Any:
        changed = {
            place: tuple(
                g * factor(group, place, leaf)
                for g, leaf in zip(arrays, group.group.leaves, strict=True)
            )
            for place, arrays in grads.items()
        }
        return original(group, changed)

    return reduce


def per_rank(group: GroupRuntime, place: Any, leaf: Any) -> float:
    return 1.0 if leaf.tensor_dim is not None else float(group.layout.shape(place)[2])


def without_last_user(group: GroupRuntime, place: Any, leaf: Any) -> float:
    users = {
        g.name: g.layers for g in group.layout.chain.groups if leaf in g.leaves
    }.popitem()[1]
    return 0.0 if len(users) > 1 and place == group.members[-2] else 1.0


def change_params(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """``change`` on each place's parameters by leaf, before the first step."""

    def prologue(original: Any, executor: Executor) -> None:
        original(executor)
        for buffer in executor.live():
            if buffer.kind.value == "Param":
                leaves = executor._parts.groups[buffer.subject].group.leaves
                ids = [leaf.id for leaf in leaves]
                held = dict(zip(ids, executor.get(buffer), strict=True))
                change(held)
                executor.put(buffer, tuple(held.values()))

    return prologue


def dropped(held: dict[str, Any]) -> None:
    for leaf, value in held.items():
        if leaf.startswith("blocks/1/"):
            held[leaf] = jnp.zeros_like(value)


def swapped(held: dict[str, Any]) -> None:
    for leaf in held:
        other = leaf.replace("blocks/0/", "blocks/1/")
        if leaf.startswith("blocks/0/") and other in held:
            held[leaf], held[other] = held[other], held[leaf]


def keys_by_rank(original: Any, batch: Any, rows: Rows) -> Any:
    taken = original(batch, rows)
    if "@keys" in taken:
        taken["@keys"] = batch["@keys"][: len(rows.index)]
    return taken


@functools.cache
def _first(group: GroupRuntime, place: Any) -> dict[str, Any]:
    return {}


def stale(original: Any, group: GroupRuntime, place: Any, pieces: Any) -> Any:
    kept = _first(group, place)
    # A copy: the next update overwrites what a slice shares with its master.
    if "value" not in kept:
        kept["value"] = tuple(x.copy() for x in original(group, place, pieces))
    return kept["value"]


def skip_a_microbatch(original: Any, feed: Feed, r: int, m: int, place: Any) -> Any:
    arrays = original(feed, r, m, place)
    if m == 1 and "@mask" in arrays:
        arrays["@mask"] = arrays["@mask"] * 0
    return arrays


def norm_of_some(original: Any, own: Verdicts, squares: Any, places: Any) -> Any:
    return original(own, squares[: len(squares) // 2], places)


def reversed_slices(original: Any, group: GroupRuntime, place: Any) -> Any:
    join = original(group, place)

    def wrong(parts: Any) -> Any:
        alike = [len({x.shape for x in p}) == 1 for p in parts]
        return join(
            tuple(p[::-1] if a else p for p, a in zip(parts, alike, strict=True))
        )

    return wrong


def padding_weighs(original: Any, feed: Feed, replica: int, microbatch: int) -> float:
    rows = feed._rows[replica, microbatch]
    full = original(feed, replica, microbatch)
    return float(full * rows.mask.size / max(rows.mask.sum(), 1))


TIED = Shape()
DROPOUT = Shape(dropout=0.3)
FAULTS: dict[str, tuple[Plant, Callable[[], Case]]] = {
    "mean of means": (wrap(Engine, "_seed", mean_of_means), lambda: uneven(TIED)),
    "unsplit gradient counted once a rank": (
        wrap(GroupRuntime, "send_grads", scaled_reduce(per_rank)),
        lambda: uneven(TIED),
    ),
    "gradient three times too large": (
        wrap(GroupRuntime, "send_grads", scaled_reduce(lambda *_: 3.0)),
        lambda: uneven(TIED),
    ),
    "a layer dropped": (
        wrap(Executor, "run_prologue", change_params(dropped)),
        lambda: uneven(TIED),
    ),
    "key by rank": (
        wrap(feed_module, "take", keys_by_rank),
        lambda: uneven(DROPOUT),
    ),
    "stale parameter": (wrap(GroupRuntime, "join", stale), lambda: uneven(TIED)),
    "one microbatch skipped": (
        wrap(Feed, "load", skip_a_microbatch),
        lambda: uneven(TIED),
    ),
    "tied gradient lost": (
        wrap(GroupRuntime, "send_grads", scaled_reduce(without_last_user)),
        lambda: uneven(TIED),
    ),
    "clipped by the norm of some": (
        wrap(Verdicts, "judge", norm_of_some),
        lambda: uneven(TIED, clipped=True),
    ),
    "slices in the wrong order": (
        wrap(GroupRuntime, "_join", reversed_slices),
        lambda: halved(TIED),
    ),
    "two layers swapped": (
        wrap(Executor, "run_prologue", change_params(swapped)),
        lambda: uneven(TIED),
    ),
    "padding counted in the last weight": (
        wrap(Feed, "weight", padding_weighs),
        lambda: uneven(TIED),
    ),
}


@pytest.mark.parametrize("shape", [TIED, DROPOUT], ids=["plain", "dropout"])
def test_the_plan_is_right_without_a_fault(shape: Shape, monkeypatch: Any):
    check(uneven(shape), run(uneven(shape), monkeypatch))


@pytest.mark.parametrize(
    "case", [lambda: uneven(TIED, clipped=True), lambda: halved(TIED)]
)
def test_its_variants_are_right_without_a_fault(
    case: Callable[[], Case], monkeypatch: Any
):
    check(case(), run(case(), monkeypatch))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch):
    plant, case = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(case(), run(case(), monkeypatch))
