"""Plans that keep things in host memory, drawn at random, and where things lie."""

import dataclasses
import functools
import random
from typing import Any

from hexijax.plan.plan import Memory, Params, Schedule, Stage, UpdateOrder
from hexijax.program.program import Buffer
from hexijax.runtime.actions import Action, Slots
from hexijax.runtime.engine import Engine
from hexijax.runtime.executor import Executor
from hexijax.runtime.memories import check_memory
from tests.laws.cases import Case
from tests.laws.shares import draw_shared


@functools.cache
def draw_offloaded(seed: int) -> Case:
    """A plan of ``draw_shared`` with more in host memory; the same for equal seeds."""
    return offloaded(draw_shared(seed))


def offloaded(case: Case) -> Case:
    """The case with more in host memory, drawn by its seed."""
    rng = random.Random(f"offload {case.seed}")
    replicas = tuple(
        dataclasses.replace(r, stages=tuple(_offloaded(rng, s) for s in r.stages))
        for r in case.plan.replicas
    )
    state = tuple(
        dataclasses.replace(
            share,
            memory=(memory := rng.choice(list(Memory))),
            update=rng.choice([Memory.DEVICE, memory]),
        )
        for share in case.plan.state
    )
    order = rng.choice(list(UpdateOrder))
    plan = dataclasses.replace(case.plan, replicas=replicas, state=state, order=order)
    return _with_few_grads(dataclasses.replace(case, plan=plan))


def _with_few_grads(case: Case) -> Case:
    """With room for the gradients of some passes only, where updates may come early."""
    rng = random.Random(f"grads {case.seed}")  # so that named seeds stay theirs
    if case.clipped or case.plan.schedule is not Schedule.LAYERED:
        return case
    replicas = tuple(
        dataclasses.replace(
            r,
            stages=tuple(
                dataclasses.replace(s, grads=rng.choice([0, 1, 2, 3])) for s in r.stages
            ),
        )
        for r in case.plan.replicas
    )
    return dataclasses.replace(
        case, plan=dataclasses.replace(case.plan, replicas=replicas)
    )


def _offloaded(rng: random.Random, stage: Stage) -> Stage:
    number = len(stage.segments)
    mixed = tuple(rng.choice(list(Params)) for _ in range(number))
    return dataclasses.replace(
        stage,
        params=mixed if rng.random() < 0.5 else (Params.STREAMED,) * number,
        residuals=tuple(rng.choice(list(Memory)) for _ in range(number)),
    )


def traits(case: Case) -> set[str]:
    """What a case is an example of."""
    plan, shape = case.plan, case.shape
    stages = [stage for _, stage in plan.stages()]
    homes = [p for p, share in plan.state[0].shares.items() if share]
    lanes = {place: stage.lanes for place, stage in plan.stages()}
    state = {(share.memory, share.update) for share in plan.state}
    has = {
        "streamed": any(Params.STREAMED in s.params for s in stages),
        "residuals": any(Memory.HOST in s.residuals for s in stages),
        "state, updated by the device": (Memory.HOST, Memory.DEVICE) in state,
        "state, updated by the host": (Memory.HOST, Memory.HOST) in state,
        "priority": plan.order is UpdateOrder.PRIORITY,
        "stages": any(len(r.stages) > 1 for r in plan.replicas),
        "tensor": any(s.tensor > 1 for s in stages),
        "lanes that share state": any(lanes.get(home, 1) > 1 for home in homes),
        "clipped": case.clipped,
        "layered": plan.schedule is Schedule.LAYERED,
        "few gradients": any(s.grads for s in stages),
        "frozen": shape.trained != ("*",),
        "lora": shape.lora,
        "tied": shape.tied,
    }
    return {name for name, true in has.items() if true}


def watch(executor: Executor) -> None:
    """After each instruction of the bodies to come, all lies where it should."""
    names: dict[int, Buffer] = {slot: b for b, slot in executor._slot.items()}

    def watched(action: Action) -> Action:
        def then_look(slots: Slots) -> None:
            action(slots)
            for slot, buffer in names.items():
                if slots[slot] is not None:
                    check_memory(buffer, slots[slot])

        return then_look

    executor.body = [watched(action) for action in executor.body]


def rests_on_host(engine: Engine) -> dict[str, Any]:
    """Between steps, what lies in host memory, by name."""
    return {
        str(b): engine._executor.get(b)
        for b in engine.live_buffers()
        if b.memory is Memory.HOST
    }
