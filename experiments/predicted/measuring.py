"""Runs listed plans, each in a process of its own, those of one card side by side.

Listed -> turns -> a child a plan -> its result -> Bench.found
"""

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benching import LEAST_S, Bench, Child
from experiments.predicted.listing import Listed, read_before
from hexijax.plan.plan import Memory, Plan

MOST_S = 150.0
"""For one plan, compiled and run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A child that waits for its gate."""

    name: str
    """Of the plan."""

    child: Child
    """The process."""

    gate: Path
    """What it waits for."""

    result: Path
    """What it writes."""


def turns(listed: Listed, cards: int) -> list[tuple[str, ...]]:
    """Plans that run at once: those that use one card in pairs, as far as there are
    cards, but only one whose parameters or state lie in host memory, which they would
    share. Kinds are mixed, so that a short time leaves out some of each."""
    names = [*listed.promises]
    random.Random(0).shuffle(names)
    plans = {name: listed.promises[name].plan for name in names}
    small = [name for name in names if len(devices_of(plans[name])) < 2]
    hosted = [name for name in small if on_host(plans[name])]
    rest = [name for name in small if name not in hosted]
    found: list[tuple[str, ...]] = [(n,) for n in names if n not in small]
    while hosted or rest:
        mine = [hosted.pop() if hosted else rest.pop()]
        while len(mine) < cards and rest:
            mine.append(rest.pop())
        found.append(tuple(mine))
    random.Random(1).shuffle(found)
    return found


def devices_of(plan: Plan) -> list[str]:
    """Names of what it computes on."""
    return sorted({name for _, stage in plan.stages() for name in stage.devices})


def on_host(plan: Plan) -> bool:
    """Whether anything of it rests in host memory."""
    state = any(share.memory is Memory.HOST for share in plan.state)
    return state or any(
        stage.params or stage.waits or stage.residuals for _, stage in plan.stages()
    )


def known(bench: Bench, before: Path) -> None:
    """Takes over what an earlier run has measured of the same list.

    Raises:
      UserError: it was of another list.
    """
    rows = read_before(before, "predicted", bench.found["list"])
    plans = rows["predicted"]["plans"]
    bench.found["plans"] = {k: row for k, row in plans.items() if "step_s" in row}
    bench.rows["what"] |= {k: rows["what"][k] for k in ("card", "jax")}


def measure_all(
    bench: Bench, path: Path, listed: Listed, chain: Path, cards: int, steps: int
) -> None:
    """Every plan, as long as time is left; what was not run is in ``left``."""
    rows = bench.found.setdefault("plans", {})
    done = {name for name, row in rows.items() if "step_s" in row}
    for name, promise in listed.promises.items():
        rows.setdefault(name, {}).update(
            predicted_s=promise.step_s, promised_bytes=dict(promise.memory_bytes)
        )
    left = {k: v for k, v in listed.promises.items() if k not in done}
    todo = turns(dataclasses.replace(listed, promises=left), cards)
    bench.found["left"] = [name for turn in todo for name in turn]
    started = _start(bench, path, todo[0], chain, steps) if todo else []
    following: list[Started] = []
    took_s = [2 * LEAST_S]
    try:
        for number, turn in enumerate(todo):
            if bench.left_s < statistics.median(took_s) + 10:
                return
            began = time.monotonic()
            for each in started:
                each.gate.touch()
            after = todo[number + 1] if number + 1 < len(todo) else ()
            following = _start(bench, path, after, chain, steps)
            for each in started:
                bench.part(each.name, lambda each=each: _finish(bench, each, rows))
            took_s.append(time.monotonic() - began)
            bench.found["left"] = [n for n in bench.found["left"] if n not in turn]
            bench.keep()
            started, following = following, list[Started]()
    finally:
        for each in (*started, *following):
            each.child.stop()


def _start(
    bench: Bench, path: Path, turn: Sequence[str], chain: Path, steps: int
) -> list[Started]:
    found = []
    paired = len(turn) > 1
    for card, name in enumerate(turn):
        stem = bench.work / name.replace(" ", "_")
        gate, result = stem.with_suffix(".gate"), stem.with_suffix(".json")
        command = bench.python(
            "experiments.predicted.running",
            *(path, name, chain, result, "--gate", gate, "--steps", steps),
        )
        child = bench.start(name, [card] if paired else [0, 1], *command)
        found.append(Started(name=name, child=child, gate=gate, result=result))
    return found


def _finish(bench: Bench, started: Started, rows: dict[str, Any]) -> None:
    try:
        started.child.wait(MOST_S)
    finally:
        if started.result.exists():
            found = json.loads(started.result.read_text())
            for name in ("card", "jax"):
                bench.rows["what"][name] = found.pop(name)
            rows[started.name] |= found
